"""Gluon's kernels on the CPU: planted faults are found, and whet's kernels in Gluon are right however they are interleaved."""

from dataclasses import replace

import pytest
import torch
from conftest import case_id
from planted_gluon import FAULTS, _planted_kernel, planted
from test_registered import assert_same_bits
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

import whet.ops
from whet.aot import pretended
from whet.interpret_gluon.engines import EXTREMES, Barrier, Engines, Hazard, Interleaving, Program
from whet.interpret_gluon.language import LAUNCHES, Interpreted, Language, interleavings
from whet.interpret_gluon.values import Descriptor, Pointer, Value, tensor
from whet.launch import launcher
from whet.machine import triton_mode
from whet.op import DTYPES, discover
from whet.ops import _halves
from whet.ops.attention import backward, fused
from whet.ops.attention.hopper import shared_layout
from whet.verify import evaluate, verify

pytestmark = pytest.mark.skipif(triton_mode() != "interpret", reason="kernels run here as they are: nothing is interpreted")
WAYS = [*(Interleaving(kind) for kind in EXTREMES), *(Interleaving("random", seed, resident=2) for seed in range(4))]


def outcome(fault: int, way: Interleaving) -> torch.Tensor | None:
    """What the planted kernel leaves, under one interleaving; None where it was found to be wrong on the way."""
    torch.manual_seed(0)
    x, y, z = (torch.randn(*shape).to(torch.bfloat16) for shape in ((64, 256), (256, 64), (64, 64)))
    out = torch.full((64, 64), float("nan")).to(torch.bfloat16)
    LAUNCHES.fixed = way
    try:
        launcher(_planted_kernel)[(1,)](*planted(x, y, z, out, fault))
    except Hazard:
        return None
    finally:
        LAUNCHES.fixed = None
    expected = (x.float() @ y.float()).to(torch.bfloat16).float() @ z.float()
    return out if (out.float() - expected).norm() < 0.01 * expected.norm() else None


def test_a_right_kernel_is_right_however_it_is_interleaved():
    found = [outcome(-1, way) for way in WAYS]
    assert all(f is not None and torch.equal(f, found[0]) for f in found)


@pytest.mark.parametrize("fault", range(len(FAULTS)), ids=FAULTS)
def test_a_fault_of_synchronisation_is_found(fault):
    assert any(outcome(fault, way) is None for way in WAYS)


def test_launches_take_the_extremes_in_turn_and_then_random_ways_no_two_alike():
    ways = [w for w, _ in zip(interleavings(), range(8))]
    assert [w.kind for w in ways] == [*EXTREMES, *["random"] * 4] and len({w.seed for w in ways[4:]}) == 4
    with pytest.raises(ValueError, match="an interleaving is random or one of early, late,"):
        Interleaving("soon")


def test_numbers_are_those_of_triton():
    a, big = Value(torch.tensor(-7, dtype=torch.int32)), Value(torch.tensor(2**31 - 1, dtype=torch.int32))
    assert (int(a // 2), int(a % 2), int(a >> 1), int(big + 1)) == (-3, -1, -4, -(2**31))
    assert (big + 2**40).dtype == torch.int64 and (a * 0.5).dtype == torch.float32 and int(3 - a) == 10
    half = Value(torch.ones(2, dtype=torch.float16))
    assert (half * 0.1).dtype == torch.float16 and (half + Value(torch.ones(2))).dtype == torch.float32


def test_memory_outside_a_tensor_is_a_hazard_unless_it_is_masked():
    language, x = Language(Engines(Interleaving("early")), (1, 1, 1)), torch.arange(6.0)[2:]
    at = Pointer.to(x) + Value(torch.arange(5))
    assert language.load(at, mask=Value(torch.arange(5) < 4), other=-1.0).t.tolist() == [2, 3, 4, 5, -1]
    with pytest.raises(Hazard, match="outside a tensor of 4 elements"):
        language.load(at)
    with pytest.raises(Hazard, match="outside"):
        language.store(at + -3, 0.0)
    assert x.tolist() == [2, 3, 4, 5]


@pytest.mark.parametrize("place", [(0, 0), (5, 60), (9, 0), (0, 80), (-3, 0)], ids=str)
def test_a_block_past_an_end_reads_zeros_and_writes_nothing(place):
    x = torch.randn(7, 72).to(torch.bfloat16)
    d = Descriptor(TensorDescriptor(x, [7, 72], [72, 1], [8, 64], shared_layout((8, 64), x.dtype)))
    around = torch.zeros(30, 200).to(torch.bfloat16)
    around[10:17, 20:92] = x
    block = around[10 + place[0] : 18 + place[0], 20 + place[1] : 84 + place[1]]
    assert torch.equal(d.read(place), block)
    before = x.clone()
    d.write(place, d.read(place))
    assert torch.equal(x, before)


def test_a_barrier_turns_when_all_have_arrived_and_every_byte_has_come():
    b = Barrier()
    with pytest.raises(Hazard, match="before it is initialised"):
        b.passed(0)
    b.init(2)
    b.arrive(1, expected=64)
    b.arrive(1)
    assert b.passed(1) and not b.passed(0)
    b.arrived(64)
    assert b.passed(0) and not b.passed(1)


def test_an_error_in_one_program_is_raised_and_no_thread_is_left_waiting():
    def fail():
        raise ValueError("mine")

    engines = Engines(Interleaving("random", 3, resident=2))
    with pytest.raises(ValueError, match="mine"):
        engines.run([(Program((0, 0, 0)), fail), (Program((1, 0, 0)), lambda: engines.pause(lambda: False, "nothing"))])
    with pytest.raises(Hazard, match="no warps can go on: a signal"):
        engines.run([(Program((0, 0, 0)), lambda: engines.pause(lambda: False, "a signal"))])
    with pytest.raises(NotImplementedError, match="gl.histogram"):
        Language(engines, (1, 1, 1)).histogram  # noqa: B018
    assert int(tensor(2**31)) == 2**31


@pytest.fixture
def hopper(monkeypatch):
    """Within the test launchers choose as on an H200, queries are not split, and what was launched in Gluon is listed."""
    names, launch = [], Interpreted.launch

    def listed(self, *args, **options):
        names.append(self.kernel.__name__)
        return launch(self, *args, **options)

    monkeypatch.setattr(Interpreted, "launch", listed)
    monkeypatch.setattr(backward, "splits", lambda programs, tiles: 1)
    with pretended("sm_90"):
        yield names


SPANS = [
    dict(Lq=130, Lk=300), dict(KV=1, Lq=200, Lk=200, causal="top-left"), dict(Lq=150, Lk=257, causal="bottom-right", window=70),
    dict(Lq=110, Lk=72, causal="bottom-right"), dict(Lq=1, Lk=129), dict(Lq=70, Lk=260, causal="top-left"),
]


FUSED = {"_fused_hopper_kernel"}


@pytest.mark.parametrize("D, tile, kernels", [
    (128, "triton", {"_forward_hopper_kernel", "_dq_hopper_kernel", "_dkdv_hopper_kernel"}),
    (72, "triton@64x64w4s2/g64x32w4s2/g32x64w4s2", {"_dq_hopper_kernel", "_dkdv_hopper_kernel"}),
    (64, "triton@64x128w4s2/64x64w4s3/g64x64w4s2", {"_dkdv_hopper_kernel"}),
    (16, "triton_fused_bwd@g64x128w8s2", FUSED), (64, "triton_fused_bwd@g64x128w8s2", FUSED),
    (100, "triton_fused_bwd@g64x128w8s2", FUSED | {"_forward_hopper_kernel"}),
], ids=["two-pass-128", "two-pass-72", "two-pass-64", "one-pass-16", "one-pass-64", "one-pass-100"])
@pytest.mark.parametrize("case", SPANS, ids=case_id)
def test_attention_in_gluon_is_right_and_has_the_same_bits_under_every_interleaving(case, D, tile, kernels, hopper):
    op = discover()["attention"]
    args = op.inputs(torch.bfloat16, "cpu", **dict(B=1, H=2, KV=2, D=D) | case)

    def run(**args):
        return whet.ops.attention(**args, impl=tile)

    verdict = verify(op, replace(op.impls[tile.split("@")[0]], run=run), args)
    assert verdict.ok, verdict.why
    assert set(hopper) == kernels
    first = evaluate(op, run, args, True)
    for way in WAYS[::2]:
        LAUNCHES.fixed = way
        try:
            assert_same_bits(first, evaluate(op, run, args, True))
        finally:
            LAUNCHES.fixed = None


@pytest.mark.parametrize("tile", _halves.HOPPER[:2], ids=lambda t: f"{t.M}x{t.N}")
@pytest.mark.parametrize("M, K, N", [(150, 200, 70), (5, 7, 9), (130, 64, 300)])
def test_products_of_halves_in_gluon_are_right(M, K, N, tile, hopper, monkeypatch):
    monkeypatch.setattr(_halves, "tile_for", lambda M, N: tile)
    op = discover()["linear"]
    for _ in range(3):
        verdict = verify(op, op.impls["triton"], op.inputs(DTYPES["float32"], "cpu", M=M, K=K, N=N))
        assert verdict.ok, verdict.why
    assert set(hopper) == {"_product_hopper_kernel"}


def test_keys_past_the_last_add_nothing_in_gluon_where_every_score_is_far_below_zero(hopper):
    """Their score is 0, which beside such ones is a weight that overflows: times a key of zeros it would be NaN in dq."""
    op = discover()["attention"]
    args = op.inputs(torch.float16, "cpu", B=1, H=2, KV=1, Lq=70, Lk=90, D=16)
    args |= dict(q=args["q"] / 8 + 12, k=args["k"] / 8 - 24)
    found = evaluate(op, lambda **args: whet.ops.attention(**args, impl="triton_fused_bwd@g64x128w8s2"), args, True)
    assert all(t.isfinite().all() for t in found.values()) and set(hopper) == FUSED


def test_the_sums_of_dq_have_the_same_bits_however_programs_overtake_each_other(hopper, monkeypatch):
    """In float32, before they are rounded: what is added in another order differs there first."""
    op, launch, sums = discover()["attention"], fused.fused_hopper, []
    monkeypatch.setattr(fused, "fused_hopper", lambda *args: (launch(*args), sums.append(args[0].clone())))
    args = op.inputs(torch.bfloat16, "cpu", B=1, H=2, KV=1, Lq=100, Lk=600, D=16)
    for seed in range(4):
        monkeypatch.setattr(LAUNCHES, "fixed", Interleaving("random", seed, resident=5))
        evaluate(op, lambda **args: whet.ops.attention(**args, impl="triton_fused_bwd@g64x128w8s2"), args, True)
    assert len(sums) == 4 and all(torch.equal(s, sums[0]) for s in sums)
