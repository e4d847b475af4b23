"""The doctor: every check flags what is planted for it and leaves its clean neighbour and the built-in models alone."""

import json
from pathlib import Path

import pytest
from warm import whet

from whet import models
from whet.diagnose.checks import discover
from whet.diagnose.doctor import diagnose, open_target
from whet.diagnose.run import Run

# The smallest size in float32, launched op by op, its grouped heads beyond what SDPA's fused kernels take: no false alarms.
TRUE_ON_A_GPU = {"launch_bound", "fp32_matmul", "attention_materialised"}
ROOT = Path(__file__).resolve().parents[1]
CHECKS = [pytest.param(c, id=c.name, marks=[pytest.mark.gpu] if c.gpu else []) for c in discover().values()]


def opened(given):
    return open_target(str(given)) if isinstance(given, (str, Path)) else given


@pytest.mark.parametrize("check", CHECKS)
def test_planted_is_flagged(check, device):
    found = list(check.find(Run(opened(check.planted()), seconds=0.05)))
    assert found, f"{check.name} does not flag what is planted for it"
    for finding in found:
        assert finding.check == check.name and finding.cause and finding.evidence and finding.fix
        assert not finding.cause.endswith(".") and not finding.fix.endswith(".")


@pytest.mark.parametrize("check", CHECKS)
def test_clean_is_left_alone(check, device):
    found = list(check.find(Run(opened(check.clean()), seconds=0.05)))
    assert not found, found[0].cause


@pytest.mark.parametrize("name", models.discover())
def test_no_false_alarm_on_a_built_in_model(name, device):
    """The smallest size of each; on a CPU it is interpreted, which the doctor must not mistake for slowness."""
    smallest = "tiny" if "tiny" in models.discover()[name].sizes else next(iter(models.discover()[name].sizes))
    diagnosis = diagnose(open_target(f"{name}:{smallest}"), seconds=0.05)
    assert not diagnosis.failed, diagnosis.failed
    found = [f for f in diagnosis.findings if device == "cpu" or f.check not in TRUE_ON_A_GPU]
    assert not found, "\n".join(f"{f.check}: {f.cause}" for f in found)


SIZES = "--batch-size 2 --seq-len 128 --num-steps 3 --hidden-dim 128 --num-layers 2 --num-heads 4"
CAUSES = {1: "initial_loss", 2: "copies", 3: "unsynchronised_timing", 4: "custom_matmul", 5: None}


def diagnosis_of(script: Path, args: str, records: Path) -> tuple[int, dict]:
    options = ("--json", "--seconds", "0.1", "--records", str(records / "records"), "--args", args)
    code, printed, errors = whet("doctor", str(script), *options, folder=ROOT, out=records / "doctor")
    assert code in (0, 1), errors
    return code, json.loads(printed)["measured"]


@pytest.mark.parametrize("stage", CAUSES)
def test_each_exercise_is_named_by_its_cause_and_the_last_is_clean(stage, tmp_path):
    (script,) = (ROOT / "exercises").glob(f"stage{stage}_*.py")
    code, found = diagnosis_of(script, SIZES, tmp_path)
    assert not found["failed"], found["failed"]
    if CAUSES[stage] is None:
        assert code == 0 and not found["findings"], found["findings"][0]["cause"]
    else:
        assert code == 1 and found["findings"][0]["check"] == CAUSES[stage], [f["cause"] for f in found["findings"]]


@pytest.mark.gpu
@pytest.mark.parametrize("stage", CAUSES)
def test_gpu_each_exercise_at_the_seeds_sizes_is_named_by_its_cause(stage, tmp_path, device):
    (script,) = (ROOT / "exercises").glob(f"stage{stage}_*.py")
    code, found = diagnosis_of(script, "--batch-size 8 --seq-len 128 --num-steps 20", tmp_path)
    assert not found["failed"], found["failed"]
    first = found["findings"][0]["check"] if found["findings"] else None
    assert first == CAUSES[stage] and code == (0 if first is None else 1), [f["cause"] for f in found["findings"]]
