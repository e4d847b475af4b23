"""Launching: the key holds all that Triton asks of the arguments, the unusual goes Triton's way, Inductor sees kernels."""

import contextlib
import json
import random
from types import SimpleNamespace

import pytest
import torch
import triton.language as tl
from conftest import ROOT, python
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel, make_backend
from triton.runtime import driver
from triton.runtime.jit import JITFunction, create_function_from_signature

import whet.ops.rms_norm
from whet import launch, torch_ops
from whet.launch import SOURCES, Direct, launcher

TARGET = GPUTarget("cuda", 90, 32)
NUMBERS = (0, 1, 2, 15, 16, 48, -1, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**32, True, False, 0.0, 1.0, 16.0, 2.5, None)
CONSTEXPRS = (0, 1, 2, 16, True, False, 1.0, None, "tanh", torch.float32)
OPTIONS = ({}, dict(num_warps=4), dict(num_warps=8), dict(num_warps=8, num_stages=3), dict(num_ctas=2), dict(maxnreg=128))


def _copied(x_ptr, y_ptr, stride, M, eps, BLOCK: tl.constexpr, TANH: tl.constexpr = False):
    pass


def _laid_out(x_ptr, M, BLOCK: tl.constexpr, num_warps: tl.constexpr):
    pass


class OnGpu(torch.Tensor):
    """A tensor of the CPU that says it lies on a GPU."""

    @property
    def is_cuda(self):
        return True


class Compiled(CompiledKernel):
    """A compiled kernel that keeps what its C launcher is handed."""

    def __init__(self, seen):
        self.function, self.packed_metadata, self.seen = 7, (4, 1, 0), seen

    @property
    def run(self):
        return lambda *args: self.seen.append(args)

    def launch_metadata(self, *args):
        return None


class Gpu:
    """As much of a driver as a launch asks for."""

    def get_current_target(self):
        return TARGET

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 99


@pytest.fixture
def gpu(monkeypatch):
    """A machine that compiles nothing and launches nothing. Returns what C launchers were handed, and how often Triton ran."""
    seen, runs = [], []

    def compiled(self, key, signature, device, *rest):
        return self.device_caches[device][0].setdefault(key, Compiled(seen))

    run = JITFunction.run

    def counted(self, *args, **kwargs):
        runs.append(self)
        return run(self, *args, **kwargs)

    monkeypatch.setattr(JITFunction, "_do_compile", compiled)
    monkeypatch.setattr(JITFunction, "run", counted)
    monkeypatch.setattr(driver, "_active", Gpu(), raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 99, raising=False)
    monkeypatch.setattr(launch, "cuda", lambda: True)
    return seen, runs


def tensor(n=64, dtype=torch.float32, offset=0):
    return torch.zeros(n + 16, dtype=dtype)[offset : offset + n].as_subclass(OnGpu)


def some_arguments(rng):
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool, torch.float8_e4m3fn)
    tensors = [rng.choice([None, tensor(dtype=rng.choice(dtypes), offset=rng.choice([0, 1, 4, 8, 16]))]) for _ in range(2)]
    return (*tensors, *(rng.choice(NUMBERS) for _ in range(3))), [rng.choice(CONSTEXPRS) for _ in range(2)], rng.choice(OPTIONS)


def test_equal_keys_mean_what_triton_specialises_on_is_equal(gpu, monkeypatch):
    keys: list[tuple] = []
    monkeypatch.setattr(Direct, "ordinary", lambda self, key, *rest: keys.append(key))
    kernel = JITFunction(_copied)
    direct, met, again = Direct(kernel), {}, 0
    bind = create_function_from_signature(kernel.signature, kernel.params, make_backend(TARGET))
    rng = random.Random(0)
    pool = [some_arguments(rng) for _ in range(300)]
    for _ in range(6000):
        (args, constexprs, options), (other, _, _) = rng.choice(pool), rng.choice(pool)
        args = tuple(rng.choice(pair) for pair in zip(args, other)) if rng.random() < 0.7 else args
        direct[(1,)](*args, *constexprs, **options)
        _, specialization, bound = bind(*args, *constexprs, **options)
        want = str(specialization), str(bound)  # as text 1, True and 1.0 differ
        again += keys[-1] in met
        assert met.setdefault(keys[-1], want) == want
    assert None not in keys and again > 500 and len(set(met.values())) > 1000


@pytest.mark.parametrize("change", [
    dict(x_ptr=tensor(dtype=torch.bfloat16)), dict(x_ptr=tensor(offset=1)), dict(x_ptr=None), dict(x_ptr=torch.zeros(64)),
    dict(stride=1), dict(stride=17), dict(M=2**31), dict(M=2.0), dict(M=True), dict(eps=None), dict(BLOCK=32), dict(TANH=True),
    dict(TANH=0), dict(num_warps=8), dict(num_stages=3), dict(maxnreg=64), dict(launch_pdl=True),
], ids=str)  # fmt: skip
def test_what_compiles_to_another_kernel_has_another_key(gpu, change):
    direct = Direct(JITFunction(_copied))
    given = dict(x_ptr=tensor(), y_ptr=tensor(), stride=16, M=64, eps=1e-6, BLOCK=64, TANH=False, num_warps=4)
    direct[(1,)](**given)
    direct[(1,)](**given | change)
    direct[(1,)](**given)
    assert len(gpu[1]) == 2, "the first launch and the changed one are Triton's"


def test_a_later_launch_hands_the_c_launcher_what_triton_did(gpu):
    seen, runs = gpu
    direct, x, y, other = Direct(JITFunction(_copied)), tensor(), tensor(), tensor()
    for grid, first in (((3,), x), ((3,), x), ((5, 2), other), ((5, 2, 4), None)):
        direct[grid](first, y, 16, 64, 1e-6, BLOCK=64, num_warps=4)
    ordinary, same, moved, absent = seen
    assert len(runs) == 2, "one for each of a tensor and None"
    head, hooks, rest = ordinary[:6], (None, None, None), ordinary[11:]
    assert head == (3, 1, 1, 99, 7, (4, 1, 0)) and ordinary[9] is x and rest == (16, 64, 1e-6, 64, False)
    assert same == (*head, *hooks, x.data_ptr(), y.data_ptr(), *rest)
    assert moved == (5, 2, 1, *head[3:], *hooks, other.data_ptr(), y.data_ptr(), *rest)
    assert absent[:3] == (5, 2, 4) and absent[9] is None, "Triton's own: its first"
    direct[(1,)](None, y, 16, 64, 1e-6, BLOCK=64, num_warps=4)
    assert len(runs) == 2 and seen[-1][9] == 0


def test_hooks_and_replaced_runs_see_every_launch(gpu, monkeypatch):
    kernel, met = JITFunction(_copied), []
    direct = Direct(kernel)

    def go() -> int:
        before = len(gpu[1])
        direct[(1,)](tensor(), tensor(), 16, 64, 1e-6, BLOCK=64)
        return len(gpu[1]) - before

    assert [go(), go()] == [1, 0]
    for hook in (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook):
        hook.add(met.append)
        assert go() == 1
        hook.remove(met.append)
        assert go() == 0
    with monkeypatch.context() as patched:
        patched.setattr(knobs.runtime, "launch_enter_hook", met.append)
        assert go() == 1
    kernel.add_pre_run_hook(lambda *args, **options: met.append(options))
    assert go() == 1 and met
    kernel.pre_run_hooks.clear()
    with monkeypatch.context() as patched:
        patched.setattr(JITFunction, "run", lambda self, *args, grid, warmup, **options: met.append(grid))
        go()
    assert met[-1] == (1,) and go() == 0


def test_what_the_key_cannot_hold_is_launched_as_triton_does(gpu):
    kernel = JITFunction(_copied)
    direct = Direct(kernel)
    for odd in (dict(x_ptr=torch.zeros(64)), dict(M=(1, 2)), dict(stride=torch.zeros(16).as_subclass(OnGpu)), dict(x_ptr=0)):
        given = dict(x_ptr=tensor(), y_ptr=tensor(), stride=16, M=64, eps=1e-6, BLOCK=64) | odd
        for _ in range(2):
            direct[(1,)](**given)
    direct[lambda bound: (bound["M"],)](tensor(), tensor(), 16, 64, 1e-6, BLOCK=64)
    assert len(gpu[1]) == 9 and not direct.compiled


@pytest.mark.parametrize("M", [64, None, torch.zeros(1)], ids=["kept by its key", "none", "launched as Triton does"])
def test_an_argument_that_is_an_option_as_well_stays_one(gpu, monkeypatch, M):
    """A Gluon kernel makes its layouts of num_warps: compiled for another number it is refused."""
    met, compiled = [], JITFunction._do_compile

    def watched(self, key, signature, device, constexprs, options, *rest):
        met.append((constexprs[(3,)], options.num_warps))
        return compiled(self, key, signature, device, constexprs, options, *rest)

    monkeypatch.setattr(JITFunction, "_do_compile", watched)
    direct = Direct(JITFunction(_laid_out))
    for warps in (8, 4, 8, 2):
        direct[(1,)](tensor(), M, BLOCK=64, num_warps=warps)
    assert met == [(8, 8), (4, 4), (2, 2)]


def test_sizes_that_never_repeat_do_not_fill_the_memory(gpu, monkeypatch):
    monkeypatch.setattr(launch, "LIMIT", 8)
    direct = Direct(JITFunction(_copied))
    for M in range(50):
        direct[(1,)](tensor(), tensor(), 16, M, 1e-6, BLOCK=64)
    assert 0 < len(direct.compiled) <= 8


def test_a_kernel_is_prepared_once_and_left_alone_without_a_gpu(gpu, monkeypatch):
    kernel = JITFunction(_copied)
    assert launcher(kernel) is launcher(kernel) and isinstance(launcher(kernel), Direct)
    monkeypatch.setattr(launch, "cuda", lambda: False)
    kernel = JITFunction(_copied)
    assert launcher(kernel) is kernel


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("kind", [torch_ops.Forward, torch_ops.Fused])
def test_an_op_runs_on_the_device_of_its_tensors_also_where_a_mode_looks_on(kind, watched, monkeypatch):
    entered, x = [], SimpleNamespace(is_cuda=True, get_device=lambda: 1, device="cuda:1")
    op = object.__new__(kind)
    for name, value in dict(name="planted", label="planted", launch=None, forward=None, op=None, n_out=1).items():
        run = (lambda *args: list(entered)) if name in ("launch", "forward", "op") else value
        object.__setattr__(op, name, run)
    monkeypatch.setattr(torch_ops, "_current_device", lambda: 0)
    monkeypatch.setattr(torch_ops, "_watched", lambda label: watched)
    monkeypatch.setattr(torch.cuda, "device", lambda device: entered.append(device) or contextlib.nullcontext())
    assert op(x) in (["cuda:1"], "cuda:1") and entered == ["cuda:1"]


def test_interpreted_kernels_are_launched_as_they_are(device):
    if device == "cuda":
        pytest.skip("kernels are compiled here, not interpreted")
    kernel = whet.ops.rms_norm.op.impls["triton"].run.__globals__["_rms_norm_kernel"]
    assert launcher(kernel) is kernel


def test_an_edited_op_does_not_meet_graphs_cached_before(monkeypatch, tmp_path):
    from torch._inductor.codegen.wrapper import user_defined_triton_kernel_transitive_closure_source_code as cached_by
    from torch._library.triton import get_triton_kernels_for_op

    assert get_triton_kernels_for_op("whet::rms_norm") == [SOURCES]
    (tmp_path / "ops").mkdir()
    for name in ("launch.py", "torch_ops.py", "ops/gelu.py"):
        (tmp_path / name).write_text("")
    monkeypatch.setattr(launch, "__file__", str(tmp_path / "launch.py"))
    before = cached_by(launch.Sources())
    (tmp_path / "ops/gelu.py").write_text("BLOCK = 2048")
    assert cached_by(launch.Sources()) != before and cached_by(SOURCES)


@pytest.fixture(scope="module")
def traced() -> list[dict]:
    """What tests/tracing.py found: it needs kernels that are not interpreted."""
    child = python(str(ROOT / "tests" / "tracing.py"))
    text, _ = child.communicate(timeout=600)
    assert child.returncode == 0, text
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def test_inductor_is_handed_kernels_on_a_gpu_and_copies_nothing(traced):
    shown = [row for row in traced if row["device"] == "cuda"]
    assert shown and all(row["kernels"] and not row["copies"] for row in shown)
    by_name = {row["name"]: row for row in shown}
    visible = {path.stem for path in (ROOT / "whet" / "ops").glob("*.py") if "visible=True" in path.read_text()}
    assert visible == {name.split()[0] for name in by_name}, "tests/tracing.py traces every op with visible=True"
    assert by_name["rms_norm"]["kernels"] == ["_rms_norm_kernel", "_rms_norm_bwd_kernel", "_column_sum_kernel"]
    assert by_name["cross_entropy"]["kernels"] == ["_loss_kernel", "_reduce_kernel", "_dlogits_kernel"]
    assert by_name["gmm_log_prob"]["kernels"] == ["_gmm_log_prob_kernel", "_mean_kernel", "_gmm_log_prob_bwd_kernel"]
    assert not [name for name, row in by_name.items() if row["opaque"]]


def test_ops_stay_opaque_on_the_cpu(traced):
    kept = [row for row in traced if row["device"] == "cpu"]
    assert kept and all(not row["kernels"] and len(row["opaque"]) == 2 for row in kept)
    assert 2 * len(kept) == len(traced) - len(kept)  # on a GPU with static and with dynamic shapes
