"""Kernel selection at the start of training: measured, forced or off, with its reasons, for any object with the names."""

import contextlib
import io
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from conftest import without

import whet
from whet import autoselect
from whet.autoselect import ModelConfig, auto_select_kernels, benchmark_rms_norm, benchmark_rotary, manual_kernel_benchmark
from whet.choices import Choices
from whet.lock import Lock
from whet.op import discover
from whet.tune import Tuned

KEYS = {"pytorch_ms", "triton_ms", "speedup", "use_triton", "chosen", "verified", "reason", "candidates"}
GPU = torch.cuda.is_available()
no_gpu = pytest.mark.skipif(GPU, reason="what a machine without a GPU says")


@pytest.fixture(scope="module")
def measured():
    """One real selection at a small size, torch.compile left out for its time: the config, the results, what was printed."""
    config = ModelConfig(batch_size=1, max_seq_len=8, d_model=32, n_heads=2, dtype="float32")
    results, printed = {}, io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed), without("compile"):
        for name in ("benchmark_rms_norm", "benchmark_rotary"):
            real = getattr(autoselect, name)
            patch.setattr(autoselect, name, lambda real=real, **sizes: results.setdefault(real.__name__, real(**sizes)))
        returned = auto_select_kernels(config)
    assert returned is config
    return config, results, printed.getvalue()


@pytest.fixture
def fake(monkeypatch, request):
    """A tuner that answers at once: Triton right and 4 times as fast, or its tile faster yet. What it was asked is kept."""
    asked = []

    def tune(calls, lock, modes, bucket):
        assert not bucket, "the sizes asked for are those timed"
        entries = {}
        for call, _ in calls:
            asked.append(call)
            times = {"eager": 8.0, "torch": 4.0, "triton": 1.0} | tile
            timed = {name: {"ok": True, "share": 0.1, "why": "", "ms": ms} for name, ms in times.items()}
            entries[f"{call.key} @ {modes[0]}"] = {"candidates": timed, "chosen": chosen, "why": "fastest of the verified"}
        lock.calls.update(entries)
        return Tuned({}, entries)

    tile = getattr(request, "param", {})
    chosen = next(iter(tile), "triton")
    monkeypatch.setattr(autoselect, "tune", tune)
    return asked


@no_gpu
def test_without_a_gpu_pytorch_is_chosen_and_the_reason_given(measured):
    config, results, printed = measured
    assert config.use_triton_rmsnorm is False and config.use_triton_rotary is False
    for r in results.values():
        assert r["triton_ms"] is None and r["speedup"] is None and r["verified"] and not r["use_triton"]
        assert r["reason"] == "kernels are only interpreted on this machine, never timed"
        assert r["pytorch_ms"] > 0 and r["chosen"] in ("eager", "torch")
    assert printed.count("Triton:  not timed (kernels are only interpreted on this machine, never timed)") == 2
    assert "Kernel selection: RMSNorm=PyTorch, Rotary=PyTorch" in printed


def test_results_have_the_documented_keys(measured):
    for r in measured[1].values():
        assert set(r) >= KEYS and set(r["candidates"]) >= {"eager", "triton"}
        assert all(set(c) == {"ms", "ok", "why"} for c in r["candidates"].values())
    assert all(key in benchmark_rms_norm.__doc__ for key in KEYS)


def test_selection_is_by_the_configs_own_sizes(fake):
    config = auto_select_kernels(ModelConfig(batch_size=2, max_seq_len=8, d_model=48, n_heads=4, dtype="float16"))
    norm, rope = fake
    assert (norm.op, norm.case["M"], norm.case["N"], norm.dtype, norm.grad) == ("rms_norm", 16, 48, "float16", True)
    assert rope.op == "rope" and [rope.case[k] for k in ("B", "S", "Hq", "Hk", "D")] == [2, 8, 4, 4, 12] and rope.grad
    assert config.use_triton_rmsnorm is True and config.use_triton_rotary is True


def test_speedup_is_over_the_best_stock_call(fake, capsys):
    r = benchmark_rms_norm(batch_size=2, seq_len=8, d_model=16)
    assert r["use_triton"] and r["pytorch_ms"] == 4.0 and r["triton_ms"] == 1.0 and r["speedup"] == 4.0
    assert r["reason"] == "fastest of the verified"
    auto_select_kernels(ModelConfig())
    printed = capsys.readouterr().out
    assert "Speedup: 4.00x" in printed and "Using:   Triton" in printed and "RMSNorm=Triton, Rotary=Triton" in printed


def test_what_is_measured_into_a_lock_is_found_by_a_model(fake):
    """The key must be the one that a recorded call has, options and all."""
    lock = Lock()
    benchmark_rms_norm(batch_size=2, seq_len=8, d_model=16, dtype="float32", mode="eager", lock=lock)
    benchmark_rotary(batch_size=2, seq_len=8, n_heads=2, d_head=4, dtype="float32", mode="eager", lock=lock)
    choices = Choices(lock.table("eager"))
    x, w = torch.randn(2, 8, 16, requires_grad=True), torch.ones(16)
    q, k = (torch.randn(2, 8, 2, 4).transpose(1, 2).requires_grad_() for _ in range(2))
    rotated = dict(q=q, k=k, cos=torch.ones(8, 2), sin=torch.ones(8, 2), positions=0, interleaved=False)
    for name, args in {"rms_norm": dict(x=x, w=w, eps=1e-6), "rope": rotated}.items():
        op = discover()[name]
        assert choices.pick(op, op.call(args)) == "triton"


@pytest.mark.parametrize("flag, other", [("use_triton_rmsnorm", "rope"), ("use_triton_rotary", "rms_norm")])
@pytest.mark.parametrize("forced", [True, False])
def test_a_forced_flag_is_kept_and_not_measured(flag, other, forced, fake):
    config = auto_select_kernels(ModelConfig(**{flag: forced}))
    assert getattr(config, flag) is forced
    assert [call.op for call in fake] == [other]


def test_with_both_forced_nothing_runs_and_nothing_claims_to(fake, capsys):
    config = auto_select_kernels(ModelConfig(use_triton_rmsnorm=True, use_triton_rotary=False))
    assert not fake and config.use_triton_rmsnorm is True and config.use_triton_rotary is False
    assert capsys.readouterr().out == "Kernel selection: RMSNorm=Triton, Rotary=PyTorch\n"


@pytest.mark.parametrize("given, kept", [(None, False), (True, True), (False, False)])
def test_with_the_benchmark_off_nothing_runs(given, kept, monkeypatch, capsys):
    monkeypatch.setattr(autoselect, "tune", lambda *_, **__: pytest.fail("something was measured"))
    config = auto_select_kernels(ModelConfig(benchmark_kernels=False, use_triton_rmsnorm=given))
    assert config.use_triton_rmsnorm is kept and config.use_triton_rotary is False
    assert "benchmark is off" in capsys.readouterr().out


def test_any_object_with_the_names_will_do(fake):
    @dataclass
    class Mine:
        batch_size: int = 2
        max_seq_len: int = 8
        d_model: int = 32
        n_heads: int = 2

    for config in (Mine(), SimpleNamespace(batch_size=2, max_seq_len=8, d_model=32, n_heads=2, learning_rate=0.1)):
        assert auto_select_kernels(config) is config
        assert config.use_triton_rmsnorm is True and config.use_triton_rotary is True
    assert {call.dtype for call in fake} == {"bfloat16"}


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda: benchmark_rms_norm(batch_size=0), "batch_size must be a whole number of at least 1, got 0"),
        (lambda: benchmark_rms_norm(seq_len=-3), "seq_len must be"),
        (lambda: benchmark_rms_norm(d_model=38.4), "d_model must be a whole number of at least 1, got 38.4"),
        (lambda: benchmark_rms_norm(batch_size=True), "batch_size must be"),
        (lambda: benchmark_rms_norm(batch_size="8"), "batch_size must be a whole number of at least 1, got '8'"),
        (lambda: benchmark_rotary(n_heads=0), "n_heads must be"),
        (lambda: benchmark_rotary(d_head=7), "d_head must be even, got 7"),
        (lambda: benchmark_rms_norm(dtype="int8"), r"dtype must be one of \['float32', .*\], got 'int8'"),
        (lambda: benchmark_rms_norm(mode="fast"), r"mode must be one of \('eager'.*got 'fast'"),
        (lambda: auto_select_kernels(ModelConfig(max_seq_len=0)), "max_seq_len must be"),
        (lambda: auto_select_kernels(ModelConfig(n_heads=0)), "n_heads must be"),
        (lambda: auto_select_kernels(ModelConfig(d_model=100)), "d_model must split into n_heads=8 heads of even width"),
        (lambda: auto_select_kernels(ModelConfig(dtype="fp8")), "dtype must be one of"),
    ],
    ids=[
        "batch", "seq", "fraction", "bool", "text", "heads", "odd", "dtype", "mode",
        "config-seq", "config-heads", "config-width", "config-dtype",
    ],
)
def test_wrong_sizes_name_the_argument(make, said, monkeypatch):
    monkeypatch.setattr("whet.worker.Worker.start", lambda self: pytest.fail("a process was started"))
    with pytest.raises(ValueError, match=said):
        make()


@no_gpu
def test_graph_mode_needs_a_gpu():
    with pytest.raises(ValueError, match="mode must be one of .* on this machine, got 'graph'"):
        benchmark_rms_norm(mode="graph")


def test_an_open_wandb_run_gets_the_choices(fake, monkeypatch):
    summary = {}
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=SimpleNamespace(summary=summary)))
    auto_select_kernels(ModelConfig(use_triton_rotary=False))
    assert summary == {"use_triton_rmsnorm": True, "use_triton_rotary": False}


@pytest.mark.parametrize("module", [None, SimpleNamespace(run=None), SimpleNamespace()], ids=["blocked", "no-run", "bare"])
def test_without_an_open_run_nothing_is_logged(module, fake, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", module)
    auto_select_kernels(ModelConfig())
    assert len(fake) == 2


def test_wandb_is_never_imported_here(fake, monkeypatch):
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    auto_select_kernels(ModelConfig())
    assert "wandb" not in sys.modules


def test_manual_benchmark_covers_both_ops_at_every_size(fake, monkeypatch, capsys):
    monkeypatch.setattr(autoselect, "MANUAL", dict.fromkeys(("cpu", "cuda"), ((1, 4, 16), (2, 8, 32))))
    results = manual_kernel_benchmark()
    assert set(results) == {"rms_norm 1x4x16", "rotary 1x4x8x2", "rms_norm 2x8x32", "rotary 2x8x8x4"}
    assert all(set(r) >= KEYS for r in results.values()) and len(fake) == 4
    printed = capsys.readouterr().out
    assert all(size in printed for size in results) and torch.__version__ in printed


def test_the_calls_are_exported():
    for name in ("auto_select_kernels", "manual_kernel_benchmark", "benchmark_rms_norm", "benchmark_rotary", "ModelConfig"):
        assert getattr(whet, name) is getattr(autoselect, name) and name in whet.__all__
    with pytest.raises(AttributeError, match="module 'whet' has no attribute 'nonsense'; it has "):
        getattr(whet, "non" + "sense")


@pytest.mark.parametrize("fake", [{"triton@8x8": 0.5}], indirect=True)
def test_a_tile_of_the_kernel_is_the_kernel(fake):
    found = autoselect.benchmark_rms_norm(2, 8, 32)
    assert found["use_triton"] and found["chosen"] == "triton@8x8" and found["triton_ms"] == 0.5 and found["speedup"] == 8.0
