"""A pytest plugin that keeps what a run found as a record: tests passed, failed, skipped and not run, at which commit.

`--record FILE` turns it on. Runs over other tests at the same commit on the same machine add to the record, so that a suite
can be run in parts; at another commit it starts over. It is saved as tests go, since a run may be cut short: what was
selected and has no outcome yet is "not run".
"""

import json
import time
from pathlib import Path

import pytest

from whet.report import record

OUTCOMES = ("passed", "failed", "skipped", "not run")
SAVE_EVERY = 10.0  # seconds


class Recording:
    """tests: nodeid -> [outcome, seconds if passed, else why]; seconds: file -> time spent in its tests, over all parts."""

    def __init__(self, path: Path, command: str, root: Path):
        self.path, self.root = path, root
        self.record = record.make(command, {})
        self.tests: dict[str, list] = {}
        self.seconds: dict[str, float] = {}
        self.recovered: set[str] = set()  # failed in an earlier part, passed in a later one
        self.parts = [command]
        self.spent: dict[str, float] = {}
        self.saved_at = time.monotonic()
        if measured := self.earlier():
            self.tests = {name: [o, detail] for o in OUTCOMES for name, detail in measured[o].items()}
            self.seconds = {file: row["seconds"] for file, row in measured["files"].items()}
            self.recovered = set(measured["passed after failing"])
            self.parts = [*measured["parts"], command]

    @property
    def committed(self) -> bool:
        """Whether the commit says what ran."""
        return self.record["commit"] != "unknown" and not self.record["commit"].endswith("-dirty")

    def earlier(self) -> dict | None:
        """What the record that is there holds, if it is of this machine and of this commit."""
        path = record.place(self.record, self.path.parent, self.path.stem)
        if not self.committed or not path.exists():
            return None
        found = json.loads(path.read_text())
        same = found["commit"] == self.record["commit"] and found["machine"]["key"] == self.record["machine"]["key"]
        return found["measured"] if same else None

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.set(report.nodeid, "failed", self.why(report))

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            self.tests.setdefault(item.nodeid, ["not run", ""])
            self.tests.pop(item.nodeid.partition("::")[0], None)  # a file that could not be collected before
        self.save()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name, file = report.nodeid, report.nodeid.partition("::")[0]
        self.spent[name] = self.spent.get(name, 0.0) + report.duration
        self.seconds[file] = self.seconds.get(file, 0.0) + report.duration
        if report.failed:
            self.set(name, "failed", self.why(report))
        elif report.skipped:
            self.set(name, "skipped", self.why(report))
        elif report.when == "call":
            self.set(name, "passed", round(self.spent[name], 2))
        if report.when == "teardown" and time.monotonic() - self.saved_at > SAVE_EVERY:
            self.save()

    def set(self, name: str, outcome: str, detail) -> None:
        if self.tests.get(name, [""])[0] == "failed" and outcome == "passed":
            self.recovered.add(name)
        elif outcome == "failed":
            self.recovered.discard(name)
        self.tests[name] = [outcome, detail]

    def why(self, report) -> str:
        """The first line of an error, or a skip's reason, less where the checkout is. Of a file the error stands last."""
        crash = getattr(report.longrepr, "reprcrash", None)
        if report.skipped and isinstance(report.longrepr, tuple):
            lines = [report.longrepr[2].removeprefix("Skipped: ")]
        else:
            lines = str(crash.message).splitlines() if crash else str(report.longrepr).strip().splitlines()[::-1]
        return next(iter(lines), "").removeprefix("E   ").strip().replace(f"{self.root}/", "")[:300]

    def measured(self) -> dict:
        by_outcome: dict[str, dict] = {outcome: {} for outcome in OUTCOMES}
        for name, (outcome, detail) in sorted(self.tests.items()):
            by_outcome[outcome][name] = detail
        files: dict[str, dict] = {}
        for name, (outcome, _) in sorted(self.tests.items()):
            file = name.partition("::")[0]
            row = files.setdefault(file, dict.fromkeys(OUTCOMES, 0) | {"seconds": round(self.seconds.get(file, 0.0), 1)})
            row[outcome] += 1
        return {
            "counts": {o: len(tests) for o, tests in by_outcome.items()}, "seconds": round(sum(self.seconds.values()), 1),
            "parts": self.parts, "files": files, "passed after failing": sorted(self.recovered), **by_outcome,
        }

    def save(self) -> Path | None:
        self.saved_at = time.monotonic()
        return record.write(self.record | {"measured": self.measured()}, self.path.parent, self.path.stem)

    def pytest_sessionfinish(self) -> None:
        self.save()

    def pytest_terminal_summary(self, terminalreporter) -> None:
        counts = ", ".join(f"{n} {outcome}" for outcome, n in self.measured()["counts"].items())
        terminalreporter.write_line(f"on record: {counts}")
        if not self.committed:
            terminalreporter.write_line("not at a commit, so other parts start over; commit first, or set WHET_COMMIT")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", type=Path, metavar="FILE", help="add what passed, failed and was skipped to this record")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.record and not config.option.collectonly:
        arguments = " ".join(str(a) for a in config.invocation_params.args).replace(f"{config.rootpath}/", "")
        path = config.invocation_params.dir / config.option.record
        config.pluginmanager.register(Recording(path, f"python -m pytest {arguments}", config.rootpath))
