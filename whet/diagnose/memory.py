"""Who holds the memory of a training step: parameters, gradients, the optimizer, what the forward keeps, the batch."""

from whet.diagnose.modules import tensors_in
from whet.diagnose.run import Run
from whet.diagnose.tell import pattern


def owners(run: Run) -> dict[str, int]:
    """Bytes by owner at the end of a step's forward, when most is held; the largest first."""
    target = run.target
    parameters = list(target.model.parameters())
    found = {"parameters": sum(p.numel() * p.element_size() for p in parameters)}
    if target.kind == "train":
        found["gradients"] = sum(p.numel() * p.element_size() for p in parameters if p.requires_grad)
        for path, kept in run.watched.kept.items():
            name = f"kept by {pattern(path) or 'the model itself'}"
            found[name] = found.get(name, 0) + kept
    if target.optimizer is not None:
        state = [t for s in target.optimizer.state.values() for t in tensors_in(s)]
        found["optimizer"] = sum(t.numel() * t.element_size() for t in state)
    found["buffers"] = sum(b.numel() * b.element_size() for b in target.model.buffers())
    found["batch"] = sum(t.numel() * t.element_size() for t in tensors_in((target.args, target.kwargs)))
    return dict(sorted(((k, v) for k, v in found.items() if v), key=lambda item: -item[1]))
