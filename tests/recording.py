"""A pytest plugin that keeps what a run found as a record: tests passed, failed, skipped and not run, at which commit.

`--record FILE` turns it on. Runs over other tests at the same commit on the same machine add to the record, so that a suite
can be run in parts, one after the other or side by side; at another commit it starts over. It is saved as tests go,
since a run may be cut short: what was selected and has no outcome yet is "not run".

`--record-onto-earlier` keeps what tests that are not run now gave at earlier commits, and names those commits: for a repair
that touches few of them.
"""

import collections
import fcntl
import json
import os
import time
from pathlib import Path

import pytest

from whet.report import record

OUTCOMES = ("passed", "failed", "skipped", "not run")
SAVE_EVERY = 10.0  # seconds


class Recording:
    """What this run found since it last saved; the rest stands in the record, to which other runs may add at the same time."""

    def __init__(self, path: Path, command: str, root: Path, onto_earlier: bool = False):
        self.command, self.root, self.onto_earlier = command, root, onto_earlier
        self.record = record.make(command, {})
        self.path = record.place(self.record, path.parent, path.stem)
        self.tests: dict[str, list] = {}  # nodeid -> [outcome, seconds if passed, else why]
        self.seconds: dict[str, float] = {}  # file -> time spent in its tests
        self.spent: dict[str, float] = {}  # nodeid -> the same
        self.counts: dict[str, int] = {}
        self.saved_at = 0.0

    @property
    def committed(self) -> bool:
        """Whether the commit says what ran."""
        return self.record["commit"] != "unknown" and not self.record["commit"].endswith("-dirty")

    def earlier(self) -> dict | None:
        """What the record that is there holds, if it is of this run, or of this machine and of this commit or one to keep."""
        if not self.path.exists() or not (self.committed or self.saved_at):
            return None
        found = json.loads(self.path.read_text())
        if found["machine"]["key"] != self.record["machine"]["key"]:
            return None
        if found["commit"] == self.record["commit"]:
            return found["measured"]
        if not self.onto_earlier:
            return None
        measured, elsewhere = found["measured"], found["measured"].get("at other commits", {})
        older = {name for names in elsewhere.values() for name in names}
        here = sorted({name for o in OUTCOMES for name in measured[o]} - older)
        return measured | {"at other commits": elsewhere | {found["commit"]: here}}

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.tests[report.nodeid] = ["failed", self.why(report)]

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            self.tests[item.nodeid] = ["not run", ""]
        self.save()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name, file = report.nodeid, report.nodeid.partition("::")[0]
        self.spent[name] = self.spent.get(name, 0.0) + report.duration
        self.seconds[file] = self.seconds.get(file, 0.0) + report.duration
        if report.failed:
            self.tests[name] = ["failed", self.why(report)]
        elif report.skipped:
            self.tests[name] = ["skipped", self.why(report)]
        elif report.when == "call":
            self.tests[name] = ["passed", round(self.spent[name], 2)]
        if report.when == "teardown" and time.monotonic() - self.saved_at > SAVE_EVERY:
            self.save()

    def why(self, report) -> str:
        """The first line of an error, or a skip's reason, less where the checkout is. Of a file the error stands last."""
        crash = getattr(report.longrepr, "reprcrash", None)
        if report.skipped and isinstance(report.longrepr, tuple):
            lines = [report.longrepr[2].removeprefix("Skipped: ")]
        else:
            lines = str(crash.message).splitlines() if crash else str(report.longrepr).strip().splitlines()[::-1]
        return next(iter(lines), "").removeprefix("E   ").strip().replace(f"{self.root}/", "")[:300]

    def measured(self) -> dict:
        """What stood in the record and what this run adds to it."""
        before = self.earlier()
        tests = {name: [o, detail] for o in OUTCOMES for name, detail in before[o].items()} if before else {}
        seconds = collections.Counter({file: row["seconds"] for file, row in before["files"].items()} if before else {})
        recovered = set(before["passed after failing"]) if before else set()
        parts = [*(before["parts"] if before else []), *([] if self.saved_at else [self.command])]
        commits = {name: at for at, names in (before or {}).get("at other commits", {}).items() for name in names}
        for name, (outcome, detail) in self.tests.items():
            was, file = tests.get(name, [None])[0], name.partition("::")[0]
            if file != name:
                tests.pop(file, None)  # a file that could not be collected before
            if outcome == "not run" and was:
                continue
            recovered -= {name} if outcome == "failed" else set()
            recovered |= {name} if (was, outcome) == ("failed", "passed") else set()
            tests[name] = [outcome, detail]
            commits.pop(name, None)
        elsewhere: dict[str, list[str]] = {}
        for name in sorted(tests.keys() & commits.keys()):
            elsewhere.setdefault(commits[name], []).append(name)
        seconds.update(self.seconds)
        by_outcome: dict[str, dict] = {outcome: {} for outcome in OUTCOMES}
        files: dict[str, dict] = {}
        for name, (outcome, detail) in sorted(tests.items()):
            by_outcome[outcome][name] = detail
            file = name.partition("::")[0]
            row = files.setdefault(file, dict.fromkeys(OUTCOMES, 0) | {"seconds": round(seconds[file], 2)})
            row[outcome] += 1
        return {
            "counts": {o: len(tests) for o, tests in by_outcome.items()}, "seconds": round(seconds.total(), 1),
            "parts": parts, "files": files, "passed after failing": sorted(recovered),
            "at other commits": elsewhere, **by_outcome,
        }

    def save(self) -> None:
        """Under a lock of the folder, which is gone with the process that held it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            measured = self.measured()
            record.write(self.record | {"measured": measured}, self.path.parent, self.path.stem.removeprefix("cpu-"))
        finally:
            os.close(folder)
        self.counts, self.saved_at = measured["counts"], time.monotonic()
        self.tests.clear()
        self.seconds.clear()

    def pytest_sessionfinish(self) -> None:
        self.save()

    def pytest_terminal_summary(self, terminalreporter) -> None:
        counts = ", ".join(f"{n} {outcome}" for outcome, n in self.counts.items())
        terminalreporter.write_line(f"on record: {counts}")
        if not self.committed:
            terminalreporter.write_line("not at a commit, so other parts start over; commit first, or set WHET_COMMIT")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", type=Path, metavar="FILE", help="add what passed, failed and was skipped to this record")
    parser.addoption("--record-onto-earlier", action="store_true", help="keep other tests' outcomes at earlier commits there")


def pytest_configure(config: pytest.Config) -> None:
    worker = hasattr(config, "workerinput")  # of pytest-xdist, whose controller hears of every test
    if config.option.record and not config.option.collectonly and not worker:
        arguments = " ".join(str(a) for a in config.invocation_params.args).replace(f"{config.rootpath}/", "")
        path = config.invocation_params.dir / config.option.record
        made = Recording(path, f"python -m pytest {arguments}", config.rootpath, config.option.record_onto_earlier)
        config.pluginmanager.register(made)
