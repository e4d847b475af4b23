"""What is slow, what is wrong, what it costs, what fixes it: every check over one target, the findings in order of cost."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from whet.diagnose.checks import discover
from whet.diagnose.decode import as_decode, built_in
from whet.diagnose.run import Check, Finding, Run
from whet.diagnose.script import run_script
from whet.diagnose.summary import notes, overview, slowest_part
from whet.diagnose.target import CannotRun, Target, resolve, state_preserved
from whet.figures import error_line, percent

Progress = Callable[[str, int, int], None]
NEVER_SEEN = "the data itself, steps after the first few, whether training converges, and communication between GPUs"
IDLE_TIME = ("launch_bound", "host_syncs", "input_stalls")  # checks whose cost is time in which others' work waits
WATCHING, PROFILING = "watching a step", "profiling a step"


@dataclass
class Diagnosis:
    target: Target
    run: Run
    findings: list[Finding]
    failed: dict[str, str] = field(default_factory=dict)  # check or observation -> why it could not be made
    checks: list[str] = field(default_factory=list)  # those that were made, failed ones among them

    @property
    def blind(self) -> bool:
        """Whether the step itself could not be seen: that nothing was found says little."""
        return any(text in self.failed for text, _ in observations(self.run))

    @property
    def sentence(self) -> str:
        """What is the slowest part, and why."""
        wrong = [f for f in self.findings if f.wrong]
        first = f"Wrong before slow: {wrong[0].cause}. " if wrong else ""
        return first + slowest(self.run)

    @property
    def notes(self) -> list[str]:
        return self.target.notes if WATCHING in self.failed else notes(self.run)

    @property
    def unseen(self) -> str:
        """What no check of this run looks at, in one sentence."""
        without = [c.name for c in discover().values() if c.gpu and not self.run.gpu]
        gpu = f"; without a GPU, what only a GPU shows ({', '.join(without)})" if without else ""
        return f"{NEVER_SEEN}{gpu}"

    def as_dict(self) -> dict:
        return {
            "target": self.target.name, "kind": self.target.kind, "sentence": self.sentence, "notes": self.notes,
            "findings": [f.as_dict() for f in self.findings], "failed": self.failed,
            "blind": self.blind, "checks": len([c for c in self.checks if c not in self.failed]), "unseen": self.unseen,
            "overlap": "" if PROFILING in self.failed else overlap(self.findings, self.run.step_ms),
        } | ({} if self.failed else overview(self.run))


def open_target(text: str, kind: str | None = None, argv: list[str] | None = None) -> Target:
    """A built-in model, file.py:function, or a script, which is run."""
    if text.endswith(".py"):
        if kind == "decode":
            raise CannotRun(f"{text}: --decode is for a model (file.py:function), not for a script")
        made = run_script(Path(text), argv)
        if kind == "train" and made.kind != "train":
            raise CannotRun(f"{text}: --train, but the script trains no model that it calls")
        return made
    if kind == "decode" and (found := built_in(text)) is not None:
        return found
    target = resolve(text, "train" if kind == "train" else None)
    if kind == "decode":
        return as_decode(target)
    return target


def diagnose(target: Target, progress: Progress = lambda text, done, total: None, seconds: float = 1.0,
             only: tuple[str, ...] = ()) -> Diagnosis:
    """Every check that fits the target. A check that raises is reported, and the others go on."""
    with state_preserved(target.model):
        return run_checks(Run(target, seconds), progress, only)


def run_checks(run: Run, progress: Progress, only: tuple[str, ...]) -> Diagnosis:
    target, found, failed = run.target, [], {}
    steps = observations(run)
    checks = [c for c in discover().values() if target.kind in c.kinds and (not c.gpu or run.gpu)]
    checks = [c for c in checks if not only or c.name in only]
    total = len(steps) + len(checks)
    for i, (text, observe) in enumerate(steps):
        progress(text, i, total)
        try:
            observe()
        except CannotRun:
            raise
        except torch.OutOfMemoryError as e:
            failed[text] = f"out of memory: {str(e).splitlines()[0]}"
        except (Exception, SystemExit) as e:
            failed[text] = error_line(e)
    if len(failed) == len(steps):
        raise CannotRun(f"{target.name}: {next(iter(failed.values()))}")
    for i, check in enumerate(checks):
        progress(check.title, len(steps) + i, total)
        found += attempt(check, run, failed)
    return Diagnosis(target, run, ordered(found), failed, [c.name for c in checks])


def observations(run: Run) -> list[tuple[str, Callable]]:
    return [(WATCHING, lambda: run.watched), (PROFILING, lambda: run.profile)]


def attempt(check: Check, run: Run, failed: dict[str, str]) -> list[Finding]:
    try:
        return list(check.find(run))
    except (Exception, SystemExit) as e:
        failed[check.name] = error_line(e)
        return []


def ordered(findings: list[Finding]) -> list[Finding]:
    """Wrong results first, then by what a finding costs."""
    return sorted(findings, key=lambda f: (not f.wrong, -(f.cost_ms or 0.0)))


def overlap(findings: list[Finding], step_ms: float) -> str:
    """That costs are not to be added up, where they surely share time: more than the step, or idle time beside a part of it."""
    costs = [f.cost_ms for f in findings if f.cost_ms]
    if len(costs) < 2 or not step_ms:
        return ""
    share = sum(costs) / step_ms
    if share <= 1 and not any(f.check in IDLE_TIME and f.cost_ms for f in findings):
        return ""
    return (
        f"The costs of these {len(costs)} findings come to {percent(share)} of the step together: they overlap, since one "
        "stretch of time can have several causes. What the fixes give back does not add up"
    )


def slowest(run: Run) -> str:
    """One sentence: the slowest part of the step, and what bounds it."""
    with contextlib.suppress(Exception):
        return slowest_part(run)
    return "The step could not be profiled."


def apply(diagnosis: Diagnosis) -> list[Finding]:
    """Do every fix that is mechanical, to the live target. Those that were done."""
    done = []
    for finding in diagnosis.findings:
        if finding.apply is not None:
            finding.apply(diagnosis.target)
            done.append(finding)
    return done
