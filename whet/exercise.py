"""The five debugging exercises, run as the scripts they are: each in its own process, what it measured as one row."""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from whet.child import run_to_end

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "exercises"
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Stage:
    script: str
    issue: str
    fix: str


STAGES = {
    1: Stage("stage1_broken_loss.py", "weights are not initialised", "draw them from N(0, 0.02)"),
    2: Stage("stage2_slow_strides.py", "keys and values are expanded, transposed, copied", "hand over the views as they are"),
    3: Stage("stage3_fake_timing.py", "parts are timed without synchronisation", "synchronise before reading the clock"),
    4: Stage("stage4_slow_kernels.py", "a Triton kernel multiplies matrices", "cuBLAS for products, Triton for the rest"),
    5: Stage("stage5_optimized.py", "none", "none"),
}


def chosen(stage: int | str) -> list[int]:
    """The stages that an argument names: 1 to 5, or all."""
    if stage == "all":
        return list(STAGES)
    if str(stage).isdecimal() and int(stage) in STAGES:
        return [int(stage)]
    raise ValueError(f"exercise: stage must be one of {', '.join(map(str, STAGES))} or all, got {stage!r}")


def script(number: int) -> Path:
    path = FOLDER / STAGES[number].script
    if not path.exists():
        raise ValueError(f"exercise: {path} does not exist; the exercises are part of a checkout, not of an installed package")
    return path


def run(
    stage: int | str, batch_size: int = 8, seq_len: int = 128, num_steps: int = 20, hidden_dim: int = 512, num_layers: int = 8,
    num_heads: int = 8, progress: Progress = lambda text, done, total: None,
) -> list[dict]:
    """Run one stage or all, one after the other. A row each: stage, issue and fix, and what the script measured."""
    sizes = dict(
        batch_size=batch_size, seq_len=seq_len, num_steps=num_steps, hidden_dim=hidden_dim, num_layers=num_layers,
        num_heads=num_heads,
    )
    flags = [word for name, value in sizes.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    rows, numbers = [], chosen(stage)
    for i, number in enumerate(numbers):
        s = STAGES[number]
        progress(s.script, i, len(numbers))
        rows.append({"stage": number, "issue": s.issue, "fix": s.fix, **measured(script(number), flags)})
    return rows


def measured(path: Path, flags: list[str]) -> dict:
    """What the script prints with --json; what it says of a fault is raised in one line."""
    known = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = run_to_end([sys.executable, str(path), *flags, "--json"], env=os.environ | {"PYTHONPATH": known})
    if done.fault:
        raise ValueError(f"exercise: {path.name}: {done.fault}")
    return json.loads(done.stdout.splitlines()[-1])
