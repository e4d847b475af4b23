"""Parameters that get a gradient in every step and that no optimizer updates."""

import torch
from torch import nn

from whet.diagnose.run import Check, Finding, Run
from whet.diagnose.summary import pattern
from whet.diagnose.target import Target, target_of
from whet.figures import percent

NAMED = 4  # parameters named in the cause, of however many


def owned(target: Target) -> set[int]:
    """Parameters of every optimizer that is known: a script may have several."""
    optimizers = [] if target.optimizer is None else [target.optimizer]
    optimizers += getattr(target.script, "optimizers", [])
    return {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}


def unowned(run: Run) -> list[str]:
    """None where no parameter is owned at all: such an optimizer updates copies of its own, as those of mixed precision do."""
    trained = {n: p for n, p in run.target.model.named_parameters() if p.requires_grad and p.numel()}
    held = owned(run.target)
    if not any(id(p) in held for p in trained.values()):
        return []
    return [n for n, p in trained.items() if id(p) not in held and run.watched.grads.get(n) not in (None, "none")]


def find(run: Run):
    names = unowned(run)
    if not names:
        return
    sizes = {n: p.numel() for n, p in run.target.model.named_parameters()}
    share = sum(sizes[n] for n in names) / max(1, sum(sizes.values()))
    kinds = list(dict.fromkeys(map(pattern, names)))
    some = ", ".join(kinds[:NAMED]) + (f" and {len(kinds) - NAMED} more" if len(kinds) > NAMED else "")
    yield Finding(
        "unowned_parameters", f"no optimizer updates {some}: a gradient is computed in every step and never used",
        [f"{len(names)} of {len(sizes)} parameters, {percent(share)} of the model's values, are in no optimizer"],
        "Give them to the optimizer (one made before a layer was added or replaced does not know it), or set requires_grad to "
        "False on those that are to stay as they are", module=names[0].rpartition(".")[0],
    )


class UnownedExample(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.body(x).relu()).square().mean()


def example(forgotten: bool) -> Target:
    model = UnownedExample()
    given = model.body.parameters() if forgotten else model.parameters()
    return target_of("example", (model, torch.randn(8, 16), torch.optim.SGD(given, lr=0.1)))


CHECK = Check(
    "unowned_parameters", "parameters that no optimizer updates", find, lambda: example(True), lambda: example(False),
    kinds=("train",),
)
