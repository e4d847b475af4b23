"""The doctor's and the profile's command lines: exit codes, files that cannot be written, failures of whet's own."""

import pytest
from typer.testing import CliRunner

from whet.commands import app
from whet.commands.doctor import FailOn, exit_code
from whet.diagnose import doctor as clinic
from whet.diagnose.checks import discover
from whet.diagnose.run import Finding

LINEAR = "import torch\ndef f():\n    return torch.nn.Linear(4, 4), torch.ones(2, 4)\n"
SLOW, WRONG = {"wrong": False}, {"wrong": True}


def invoke(tmp_path, command, *options, body=LINEAR, **env):
    (tmp_path / "t.py").write_text(body)
    given = [command, f"{tmp_path}/t.py:f", "--seconds", "0.01", "--records", str(tmp_path / "records"), *options]
    return CliRunner().invoke(app, given, env=env)


@pytest.mark.parametrize("command, option", [("profile", "--trace"), ("doctor", "--html")])
@pytest.mark.parametrize("full", [False, True], ids=["empty", "full"])
def test_a_directory_is_refused_in_one_line_before_the_work_starts(command, option, full, tmp_path, monkeypatch):
    monkeypatch.setattr(clinic, "open_target", lambda *_: pytest.fail("the work has started"))
    folder = tmp_path / "traces"
    folder.mkdir()
    if full:
        (folder / "kept").write_text("kept")
    done = invoke(tmp_path, command, option, str(folder))
    assert done.exit_code == 2 and folder.is_dir() and len(list(folder.iterdir())) == full
    assert f"{option}: {folder} is a directory" in done.output and len(done.output.strip().splitlines()) == 1


def test_a_file_in_a_directory_that_is_not_there_is_refused_before_the_work_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(clinic, "open_target", lambda *_: pytest.fail("the work has started"))
    done = invoke(tmp_path, "profile", "--trace", str(tmp_path / "nowhere" / "t.json"))
    assert done.exit_code == 2 and "no directory" in done.output


@pytest.mark.parametrize("findings, fail_on, blind, code", [
    ([], "slow", False, 0), ([SLOW], "slow", False, 1), ([WRONG], "slow", True, 1), ([], "slow", True, 2),
    ([SLOW], "wrong", False, 0), ([SLOW, WRONG], "wrong", False, 1), ([SLOW], "wrong", True, 2),
    ([SLOW, WRONG], "never", False, 0), ([WRONG], "never", True, 2),
])
def test_the_exit_code_follows_what_the_user_asks_to_fail_on(findings, fail_on, blind, code):
    assert exit_code(findings, FailOn(fail_on), blind) == code


def test_fail_on_never_ends_with_zero_though_there_are_findings(tmp_path):
    cut = LINEAR.replace("torch.nn.Linear(4, 4)", "Cut()") + (
        "class Cut(torch.nn.Linear):\n    def __init__(self):\n        super().__init__(4, 4)\n"
        "    def forward(self, x):\n        return super().forward(x).mean().detach()\n"
    )
    assert invoke(tmp_path, "doctor", body=cut).exit_code == 1
    assert invoke(tmp_path, "doctor", "--fail-on", "never", body=cut).exit_code == 0
    assert invoke(tmp_path, "doctor", "--fail-on", "sometimes", body=cut).exit_code == 2


def crash(*_, **__):
    raise KeyError("a mistake of whet's own")


@pytest.mark.parametrize("command", ["doctor", "profile"])
def test_a_failure_of_whets_own_is_one_line_and_exit_code_seventy(command, tmp_path, monkeypatch):
    monkeypatch.setattr(clinic, "open_target", crash)
    done = invoke(tmp_path, command)
    assert done.exit_code == 70 and len(done.output.strip().splitlines()) == 1
    assert "test_doctor_command.py:" in done.output and "WHET_TRACEBACK" in done.output
    shown = invoke(tmp_path, command, WHET_TRACEBACK="1")
    assert shown.exit_code == 70 and "Traceback (most recent call last)" in shown.output


def test_nothing_found_is_reported_with_the_number_of_checks_and_what_they_do_not_look_at(tmp_path, device):
    done = invoke(tmp_path, "doctor")
    fit = [c for c in discover().values() if "forward" in c.kinds and (not c.gpu or device == "cuda")]
    assert done.exit_code == 0 and f"{len(fit)} checks" in done.output, done.output
    assert "the data itself" in done.output and "clean bill" not in done.output
    assert device == "cuda" or "fp32_matmul, launch_bound" in " ".join(done.output.split())


def costs(**ms):
    return [Finding(check, check, [], "f", cost_ms=cost) for check, cost in ms.items()]


@pytest.mark.parametrize("findings, words", [
    (costs(launch_bound=90.0, attention_materialised=48.0), "138%"),
    (costs(copies=60.0, optimizer=60.0), "120%"),
    (costs(launch_bound=40.0, copies=5.0), "overlap"), (costs(copies=30.0, optimizer=20.0), ""),
    (costs(launch_bound=90.0), ""),
    ([], ""),
])
def test_costs_that_share_time_are_reported_to_overlap(findings, words):
    sentence = clinic.overlap(findings, 100.0)
    assert words in sentence and bool(sentence) == bool(words)


def test_a_script_that_raises_is_reported_with_its_file_and_line(tmp_path):
    (tmp_path / "helper.py").write_text("def fail(x):\n    return {}[x]\n")
    (tmp_path / "train.py").write_text("import torch\nimport helper\n\nhelper.fail('rate')\n")
    done = CliRunner().invoke(app, ["doctor", str(tmp_path / "train.py")])
    assert done.exit_code == 2 and "KeyError: 'rate' (at helper.py:2)" in " ".join(done.output.split())
