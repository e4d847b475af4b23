"""Whole runs: by whet's kernels a model trains as it does by PyTorch's own calls, within the noise of another seed."""

import pytest
from test_train_tasks import losses, quiet, small

KERNELS = {
    "rms_norm": "triton", "add_rms_norm": "triton", "attention": "triton", "mlp": "triton", "grouped_mlp": "triton",
    "gmm_log_prob": "triton",
}

pytestmark = pytest.mark.usefixtures("one_thread")


def curve(folder, **changes) -> list[float]:
    """The losses of a run with other tasks in every step."""
    quiet(small(train__steps=16, model__layers=1, run__val_every=0, run__save_every=0, **changes), folder)
    return [loss for _, loss in losses(folder)]


def apart(a: list[float], b: list[float]) -> float:
    """How far two curves lie apart, at the mean over their second half."""
    return sum(abs(x - y) for x, y in zip(a[len(a) // 2 :], b[len(b) // 2 :])) / (len(a) - len(a) // 2)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_run_by_kernels_is_as_near_to_one_without_as_another_seed_is(precision, device, tmp_path, monkeypatch):
    monkeypatch.setenv("WHET_LOCK", str(tmp_path / "whet.lock"))
    plain: dict = dict(kernels__tune=False, kernels__plan="as it is", train__precision=precision)
    base = curve(tmp_path / "base", **plain)
    seed = curve(tmp_path / "seed", train__seed=2, **plain)
    ours: dict = dict(kernels__force=KERNELS, train__precision=precision)
    ours |= dict(kernels__tune=False) if device == "cpu" else {}  # a GPU chooses the rest, and the plan
    best = curve(tmp_path / "best", **ours)
    assert base[-1] < base[0] and len(best) == 16
    assert apart(base, best) < apart(base, seed), (apart(base, best), apart(base, seed))
    assert precision == "bfloat16" or apart(base, best) < 0.01 * apart(base, seed)
