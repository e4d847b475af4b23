"""Gradients that a script never clears between its optimizer's steps: each step then follows the sum of all before it."""

import tempfile
from pathlib import Path

from whet.diagnose.run import Check, Finding, Run
from whet.diagnose.script import Clearing

LEAST = 1  # steps before which gradients could have been cleared and were not


def find(run: Run):
    script = run.target.script
    if script is None:
        return
    for name, seen in script.clearing.items():
        if seen.rounds >= LEAST and seen.kept == seen.rounds:
            yield finding(name, seen)


def finding(name: str, seen: Clearing) -> Finding:
    at = f" at {seen.line}" if seen.line else ""
    rounds = "the one step" if seen.rounds == 1 else f"all {seen.rounds} steps"
    return Finding(
        "uncleared_gradients",
        f"gradients are never cleared between the steps of {name}{at}: each step follows the sum of all before it",
        [f"in {rounds} looked at after the first, the gradients of the step before were still there when a backward began"],
        "Call optimizer.zero_grad() once a step, before the backward or after optimizer.step()", wrong=True, line=seen.line,
    )


SCRIPT = """import torch
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x = torch.ones(4, 8)
for step in range(4):
    {clear}
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
"""


def example(clear: str) -> Path:
    path = Path(tempfile.mkdtemp(prefix="whet-")) / "train.py"
    path.write_text(SCRIPT.format(clear=clear))
    return path


CHECK = Check(
    "uncleared_gradients", "gradients never cleared between steps", find, lambda: example("pass"),
    lambda: example("optimizer.zero_grad()"), kinds=("train",),
)
