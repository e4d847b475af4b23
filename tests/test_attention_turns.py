"""The backward that adds to dq in turns: each turn is taken once and in order, wherever a span begins and ends."""

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from test_registered import assert_same_bits

from whet.op import discover
from whet.ops.attention import fused
from whet.ops.attention.common import Tile
from whet.ops.attention.meaning import seen, span
from whet.verify import evaluate, verify

OP = discover()["attention"]
IMPL = OP.impls["triton_fused_bwd"]
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="looks into kernels as they are interpreted")
SIZES = [(70, 90), (90, 70), (130, 33)]
SPANS = [
    dict(), dict(causal="top-left"), dict(causal="bottom-right"), dict(causal="top-left", window=9),
    dict(causal="bottom-right", window=20), dict(window=17), dict(window=2), dict(causal="bottom-right", window=200),
]
TILES = ["16x16w4s1", "16x32w4s1", "32x16w4s1"]


def run(tile):
    return lambda **args: IMPL.run(**args, tile=tile)


@triton.jit
def _expect_turn(turn_ptr, turn, BY: tl.constexpr):
    """In the place of waiting: programs are interpreted one after another, so that it is anyone's turn at once, or never."""
    tl.device_assert(tl.load(turn_ptr) == turn)


@interpreted
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("lengths", SIZES, ids=lambda lengths: "x".join(map(str, lengths)))
@pytest.mark.parametrize("given", SPANS, ids=lambda given: " ".join(map(str, given.values())) or "full")
def test_every_block_of_keys_that_sees_a_tile_of_queries_has_its_turn_there_once(given, lengths, tile, monkeypatch):
    launched, launcher = [], fused.launcher

    def keep(kernel):
        def launch(*args, **options):
            launched.append(args)
            return launcher(kernel)[grid](*args, **options)

        class Grid:
            def __getitem__(self, asked):
                nonlocal grid
                grid = asked
                return launch

        grid = None
        return Grid()

    monkeypatch.setattr(fused, "launcher", keep)
    monkeypatch.setattr(fused, "wait_for_turn", _expect_turn)
    Lq, Lk = lengths
    args = OP.inputs(torch.float32, "cpu", B=1, H=2, KV=1, Lq=Lq, Lk=Lk, D=16, **given)
    evaluate(OP, run(tile), args, grad=True)
    turns = launched[0][9]
    M, N = Tile.read(tile)[:2]
    rows = -(-Lq // M) * M  # a tile's rows past the last query count as the others do
    see = seen(*span(given.get("causal"), given.get("window"), Lq, Lk), rows, Lk, "cpu")
    counts = torch.tensor([sum(bool(see[m : m + M, n : n + N].any()) for n in range(0, Lk, N)) for m in range(0, Lq, M)])
    assert torch.equal(turns[:-2].view(2, -1), counts.int().expand(2, -1))
    assert turns[-2] == -(-Lk // N) and turns[-1] == 0


@pytest.mark.parametrize("tile", TILES[1:])
@pytest.mark.parametrize("case", [
    dict(B=2, H=4, KV=1, Lq=90, Lk=100, D=16, causal="bottom-right"), dict(B=1, H=3, KV=3, Lq=150, Lk=70, D=20),
    dict(B=1, H=4, KV=2, Lq=130, Lk=75, D=32, causal="bottom-right", window=21, layout="bshd"),
    dict(B=2, H=2, KV=1, Lq=75, Lk=130, D=16, causal="top-left", window=40, return_lse=True),
    dict(B=1, H=2, KV=1, Lq=99, Lk=99, D=24, window=30),
], ids=lambda case: " ".join(map(str, case.values())) if isinstance(case, dict) else case)
def test_gradients_are_right_where_many_blocks_of_keys_meet(case, tile, device):
    args = OP.inputs(torch.float32, device, **case)
    verdict = verify(OP, replace(IMPL, run=run(tile)), args)
    assert verdict.ok, verdict.why


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_two_runs_give_the_same_bits(dtype, device):
    args = OP.inputs(dtype, device, B=2, H=4, KV=2, Lq=200, Lk=150, D=32, causal="top-left")
    first, second = (evaluate(OP, run(""), args, grad=True) for _ in range(2))
    assert_same_bits(first, second)


def test_no_length_is_too_long_for_its_sums():
    for shape in OP.shapes.values():
        if "precision" not in shape:
            assert IMPL.refuses(**OP.inputs(torch.bfloat16, "meta", **shape)) is None
