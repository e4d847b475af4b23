"""The record that `make gpu-test` leaves: what passed, failed, was skipped or not run, added up over parts at one commit."""

import json
import subprocess

import pytest
from recording import Recording

from whet import machine
from whet.report import record

pytest_plugins = ("pytester",)
FIRST = """
import pytest
def test_right(): pass
@pytest.mark.parametrize("n", [1, 2])
def test_wrong(n): assert n == 1, "n is two"
@pytest.fixture
def broken(): raise OSError("no such thing")
def test_broken(broken): pass
"""
SECOND = """
import pytest
def test_elsewhere(): pytest.skip("needs another machine")
"""


@pytest.fixture(autouse=True)
def no_other_plugins(monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


@pytest.fixture
def run(pytester, monkeypatch):
    """Runs pytest over small files of tests, with what is given; returns what is then on record."""
    monkeypatch.setenv("WHET_COMMIT", "a" * 40)
    pytester.makepyfile(test_first=FIRST, test_second=SECOND)

    def run(*arguments: str) -> dict:
        pytester.inline_run("-p", "recording", "-p", "no:cacheprovider", "--record", "records/gpu-tests.json", *arguments)
        return json.loads(next((pytester.path / "records").glob("*gpu-tests.json")).read_text())

    return run


def test_outcomes_and_reasons_are_recorded_with_machine_and_commit(run):
    found = run()
    assert found["commit"] == "a" * 40 and found["machine"]["key"] == machine.this_machine().key and found["at"]
    measured = found["measured"]
    assert measured["counts"] == {"passed": 2, "failed": 2, "skipped": 1, "not run": 0}
    assert list(measured["passed"]) == ["test_first.py::test_right", "test_first.py::test_wrong[1]"]
    assert "n is two" in measured["failed"]["test_first.py::test_wrong[2]"]
    assert "no such thing" in measured["failed"]["test_first.py::test_broken"]
    assert measured["skipped"] == {"test_second.py::test_elsewhere": "needs another machine"}
    assert {file: row["failed"] for file, row in measured["files"].items()} == {"test_first.py": 2, "test_second.py": 0}


def test_parts_at_one_commit_add_up_and_another_commit_starts_over(run, monkeypatch):
    run("test_first.py", "-k", "right")
    run("test_first.py", "-k", "wrong")
    measured = run("test_second.py")["measured"]
    assert measured["counts"] == {"passed": 2, "failed": 1, "skipped": 1, "not run": 0} and len(measured["parts"]) == 3
    monkeypatch.setenv("WHET_COMMIT", "b" * 40)
    assert run("test_second.py")["measured"]["counts"] == {"passed": 0, "failed": 0, "skipped": 1, "not run": 0}


def test_parts_that_run_side_by_side_lose_nothing(pytester, monkeypatch):
    """Both have started before either saves what it found."""
    monkeypatch.setenv("WHET_COMMIT", "a" * 40)
    path = pytester.path / "records" / "gpu-tests.json"
    parts = [Recording(path, f"part {n}", pytester.path) for n in range(2)]
    for part in parts:
        part.save()
    for n, part in enumerate(parts):
        part.tests, part.seconds = {f"test_{n}.py::test_it": ["passed", 1.0]}, {f"test_{n}.py": 1.0, "test_both.py": 1.0}
        part.save()
    measured = json.loads(parts[0].path.read_text())["measured"]
    assert measured["counts"]["passed"] == 2 and measured["parts"] == ["part 0", "part 1"]
    assert {file: row["seconds"] for file, row in measured["files"].items()} == {"test_0.py": 1.0, "test_1.py": 1.0}


def test_what_other_tests_gave_at_earlier_commits_is_kept_when_asked_and_named_with_its_commit(run, monkeypatch):
    run()
    monkeypatch.setenv("WHET_COMMIT", "b" * 40)
    measured = run("test_second.py", "--record-onto-earlier")["measured"]
    assert measured["counts"] == {"passed": 2, "failed": 2, "skipped": 1, "not run": 0}
    assert {at: len(names) for at, names in measured["at other commits"].items()} == {"a" * 40: 4}
    monkeypatch.setenv("WHET_COMMIT", "c" * 40)
    measured = run("test_first.py", "-k", "right", "--record-onto-earlier")["measured"]
    assert {at: len(names) for at, names in measured["at other commits"].items()} == {"a" * 40: 3, "b" * 40: 1}


def test_what_a_dirty_tree_or_an_unknown_commit_ran_is_not_added_up(run, monkeypatch):
    for commit in ("unknown", "c" * 40 + "-dirty"):
        monkeypatch.setenv("WHET_COMMIT", commit)
        run("test_first.py")
        assert run("test_second.py")["measured"]["counts"]["passed"] == 0


def test_a_record_that_was_written_does_not_make_the_commit_a_dirty_one(tmp_path, monkeypatch):
    monkeypatch.delenv("WHET_COMMIT", raising=False)
    monkeypatch.setattr(machine, "__file__", str(tmp_path / "whet" / "machine.py"))
    for command in ("init -q", "-c user.name=a -c user.email=a@b commit -q --allow-empty -m first"):
        subprocess.run(["git", *command.split()], cwd=tmp_path, check=True)
    head = machine.commit()
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "gpu-tests.json").write_text("{}")
    assert machine.commit() == head and len(head) == 40
    (tmp_path / "other.py").write_text("")
    assert machine.commit() == f"{head}-dirty"


def test_another_machine_starts_over(run, monkeypatch):
    run("test_first.py")
    make = record.make
    monkeypatch.setattr(record, "make", lambda *given: (made := make(*given)) | {"machine": made["machine"] | {"key": "other"}})
    assert run("test_second.py")["measured"]["counts"]["passed"] == 0


def test_a_test_that_passes_in_a_later_part_is_named_as_one_that_failed_before(run, pytester):
    run("test_first.py")
    pytester.makepyfile(test_first=FIRST.replace("n == 1", "n"))
    measured = run("test_first.py")["measured"]
    assert measured["passed after failing"] == ["test_first.py::test_wrong[2]"]
    assert measured["counts"] == {"passed": 3, "failed": 1, "skipped": 0, "not run": 0}


def test_what_a_run_cut_short_has_selected_is_on_record_as_not_run(run):
    measured = run("-x")["measured"]
    assert measured["counts"] == {"passed": 2, "failed": 1, "skipped": 0, "not run": 2}
    assert list(measured["not run"]) == ["test_first.py::test_broken", "test_second.py::test_elsewhere"]
    assert run("-k", "broken or elsewhere")["measured"]["counts"] == {"passed": 2, "failed": 2, "skipped": 1, "not run": 0}


def test_a_file_that_cannot_be_collected_has_failed_until_it_can(run, pytester):
    pytester.makepyfile(test_third="import no_such_module")
    assert "no_such_module" in run("test_third.py")["measured"]["failed"]["test_third.py"]
    pytester.makepyfile(test_third="def test_now(): pass")
    assert run("test_third.py")["measured"]["counts"] == {"passed": 1, "failed": 0, "skipped": 0, "not run": 0}


def test_nothing_is_recorded_unless_asked_or_when_tests_are_only_listed(pytester):
    pytester.makepyfile(SECOND)
    pytester.inline_run("-p", "recording")
    pytester.inline_run("-p", "recording", "--record", "a.json", "--collect-only")
    assert not list(pytester.path.glob("*.json"))
