"""The backward that adds to dq in turns: each turn is taken once and in order, wherever a span begins and ends."""

import ctypes
from dataclasses import replace

import pytest
import torch
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


def number(x) -> int:
    """A scalar of an interpreted kernel: of a pointer, its address."""
    return int(x.handle.data.item()) if isinstance(x, tl.tensor) else int(x)


def expect_turn(turn_ptr, turn, BY):
    """In the place of waiting: programs are interpreted one after another, so that it is anyone's turn at once, or never."""
    assert ctypes.c_int32.from_address(number(turn_ptr)).value == number(turn)


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
    monkeypatch.setattr(fused, "wait_for_turn", expect_turn)
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


@interpreted
@pytest.mark.parametrize("given", SPANS, ids=lambda given: " ".join(map(str, given.values())) or "full")
def test_each_sum_is_added_after_the_wait_for_its_turn_and_before_the_turn_is_passed_on(given, monkeypatch):
    """What interpreted programs, one after another, would not miss: the order of steps inside each."""
    programs: list[list[tuple]] = []
    M, tiles, heads, add = 16, 5, 2, fused.add_rows

    def step(name):
        return lambda ptr, turn, BY: programs[-1].append((name, number(ptr) // 4, number(turn)))

    def started(ptr):
        programs.append([])
        return tl.program_id(0)

    def added(x, b, h, first, *rest):
        programs[-1].append(("add", number(h) * tiles + number(first) // M))
        add.fn(x, b, h, first, *rest)

    for name, told in dict(wait_for_turn=step("wait"), pass_turn=step("pass"), ticket=started, add_rows=added).items():
        monkeypatch.setattr(fused, name, told)
    evaluate(OP, run("16x32w4s1"), OP.inputs(torch.float32, "cpu", B=1, H=heads, KV=1, Lq=70, Lk=90, D=16, **given), grad=True)
    for (name, spare, turn), *steps in programs:
        assert (name, turn) == ("pass", 0), "what nobody waits for comes first"
        assert len(steps) % 3 == 0
        for (waits, place, its), (adds, tile), (passes, same, following) in zip(steps[::3], steps[1::3], steps[2::3]):
            assert (waits, adds, passes) == ("wait", "add", "pass") and place == same and following == its + 1
            assert place == spare - (heads * tiles + 1) + tile
    assert len(programs) == 3 and sum(map(len, programs)) > 10


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


def test_keys_past_the_last_add_nothing_where_every_score_is_far_below_zero(device):
    """Their score is 0, which beside -1152 is a weight that overflows: times a key of zeros it would be NaN in dq."""
    args = OP.inputs(torch.float32, device, B=1, H=2, KV=1, Lq=70, Lk=90, D=16)
    args |= dict(q=args["q"] / 8 + 12, k=args["k"] / 8 - 24)
    assert all(t.isfinite().all() for t in evaluate(OP, run("16x32w4s1"), args, grad=True).values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_two_runs_give_the_same_bits(dtype, device):
    args = OP.inputs(dtype, device, B=2, H=4, KV=2, Lq=200, Lk=150, D=32, causal="top-left")
    first, second = (evaluate(OP, run(""), args, grad=True) for _ in range(2))
    assert_same_bits(first, second)


def test_no_length_is_too_long_for_its_sums():
    for shape in OP.shapes.values():
        if "precision" not in shape:
            assert IMPL.refuses(**OP.inputs(torch.bfloat16, "meta", **shape)) is None
