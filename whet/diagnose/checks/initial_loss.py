"""The first loss of a classifier over V classes is ln V: far above it, some weight was drawn from the wrong distribution."""

import math

import torch
from torch import nn

from whet.diagnose.run import Check, Finding, Run
from whet.diagnose.target import Target, target_of
from whet.figures import figure

MEAN = 1  # as torch numbers the reductions of a loss
MARGIN = 2.0  # nats above ln V that a well-made model does not reach before its first step


def classes(run: Run) -> int | None:
    """Over how many classes the loss is a mean: the width of what the last log-softmax or cross-entropy read."""
    if run.target.script is not None and run.target.script.classes:
        return run.target.script.classes
    if any(MEAN not in e.args for e in run.watched.events if e.op == "aten::nll_loss_forward"):
        return None  # a sum grows with the batch
    for e in reversed(run.watched.events):
        if e.phase == "forward" and e.op in ("aten::_log_softmax", "whet::cross_entropy") and e.inputs:
            return e.inputs[0].shape[-1]
        if e.phase == "forward" and e.op == "whet::linear_cross_entropy":
            return e.inputs[1].shape[0]
    return None


def gains(run: Run) -> list[tuple[float, str]]:
    """How much each weight widens what it multiplies, std * sqrt(fan in), the widest first: about 1 where all is well."""
    found = []
    used = {t.name for e in run.watched.events if e.flops and e.phase == "forward" for t in e.inputs if t.name}
    for name, p in run.target.model.named_parameters():
        if p.dim() == 2 and (name in used or not used):
            found.append((p.detach().float().std().item() * p.shape[1] ** 0.5, name))
    return sorted(found, reverse=True)


def find(run: Run):
    script = run.target.script
    loss = script.losses[0] if script is not None and script.losses else run.watched.loss
    count = classes(run)
    if loss is None or not count or count < 2 or not math.isfinite(loss):
        return
    expected = math.log(count)
    if loss <= expected + MARGIN:
        return
    (gain, name), *_ = gains(run) or [(0.0, "")]
    p = dict(run.target.model.named_parameters()).get(name)
    std = 0.0 if p is None else p.detach().float().std().item()
    blame = "no single weight is to blame by its scale"
    if gain > 3:
        blame = f"{name} has a standard deviation of {figure(std, 2)}, and widens what it multiplies {gain:,.0f} times"
    scales = [f"{path or 'the model'} returns values {figure(std)} wide" for path, (_, std) in widest(run)]
    yield Finding(
        "initial_loss", f"the loss starts at {loss:,.0f}, not at ln({count}) = {expected:.1f}: {blame}",
        [f"first loss {figure(loss, 4)}, expected {expected:.2f}", *scales], wrong=True, module=name.rpartition(".")[0],
        fix=f"Draw {name or 'the weights'} from N(0, 0.02), or with a standard deviation of 1/sqrt(fan in), before training",
    )


def widest(run: Run) -> list[tuple[str, tuple[float, float]]]:
    return sorted(run.watched.outputs.items(), key=lambda item: -item[1][1])[:3]


class InitialLossExample(nn.Module):
    def __init__(self, std: float):
        super().__init__()
        self.embed, self.head = nn.Embedding(100, 64), nn.Linear(64, 100, bias=False)
        nn.init.normal_(self.head.weight, std=std)

    def forward(self, tokens, labels):
        return nn.functional.cross_entropy(self.head(self.embed(tokens)).flatten(0, 1), labels.flatten())


def example(std: float) -> Target:
    torch.manual_seed(0)
    tokens = torch.randint(100, (4, 16))
    return target_of("example", (InitialLossExample(std), dict(tokens=tokens, labels=tokens)))


CHECK = Check("initial_loss", "a first loss far above ln(classes)", find, lambda: example(3.0), lambda: example(0.02))
