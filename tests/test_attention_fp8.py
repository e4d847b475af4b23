"""FP8 attention: the quantiser bit for bit, the forward within the budget of eager on rounded inputs, awkward inputs, training.

Without a GPU the kernels run in Triton's interpreter, which loads E4M3 and multiplies it as the kernels are written. It
cannot show what the tests marked gpu do: the hardware's rounding to E4M3 (the interpreter's own is wrong, so there the
kernels round before they cast), E4M3's NaN, the 14 bits in which Hopper's tensor cores add, and copies by the TMA.
"""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import DEVICE, case_id
from torch import nn

import whet.ops
from whet.op import discover, lay
from whet.ops.attention import fp8
from whet.ops.attention.meaning import ROWS, rounded, scale_of, span
from whet.verify import VALUE_FACTOR, compare, poisoned_empty, widen

OP = discover()["attention"]
ROOT = Path(__file__).parent.parent
LN2 = math.log(2)


def by_the_rule(x):
    """(E4M3 values, scales), block by block in Python floats: 2 ** ceil(log2(amax / 448)), 448 being 0.875 * 2^9."""
    values, scales = torch.empty(x.shape, dtype=torch.float8_e4m3fn), []
    for n, head in enumerate(x.flatten(0, 1).cpu().float()):
        for start in range(0, len(head), ROWS):
            mantissa, exponent = math.frexp(head[start : start + ROWS].abs().max().item())
            scales.append(2.0 ** max(exponent - 9 + (mantissa > 0.875), -126) if mantissa else 1.0)
            values.flatten(0, 1)[n, start : start + ROWS] = (head[start : start + ROWS] / scales[-1]).to(values.dtype)
    return values, torch.tensor(scales).view(x.shape[0] * x.shape[1], -1)


def bits(x):
    return x.cpu().view(torch.uint8)


def every_code(dtype):
    """All finite E4M3 values, what lies halfway between two, and a little to either side, spread over 17 columns."""
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    half = (codes[1:] + codes[:-1]) / 2
    near = torch.cat([codes, half, half * (1 + 2**-7), half * (1 - 2**-7)])
    near = torch.cat([near, -near])
    return F.pad(near, (0, -len(near) % 17)).view(1, 1, -1, 17).to(dtype)


INPUTS = {
    "normal": lambda dtype: torch.randn(2, 3, 200, 64).to(dtype),
    "codes and halves": every_code,
    "some blocks zero": lambda dtype: torch.cat([torch.zeros(1, 2, 128, 24), torch.randn(1, 2, 60, 24)], 2).to(dtype),
    "amax at 448": lambda dtype: torch.full((1, 1, 5, 16), 448.0).to(dtype),
    "amax past 448": lambda dtype: torch.full((1, 1, 5, 16), 450.0).to(dtype),
    "wide range": lambda dtype: (torch.randn(1, 2, 300, 40) * 2.0 ** torch.randint(-14, 12, (1, 2, 300, 40))).to(dtype),
    "tiny": lambda dtype: ((torch.rand(1, 1, 130, 32) + 0.1) * 2.0**-120).to(dtype),  # the interpreter misreads subnormal bf16
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("make", INPUTS.values(), ids=list(INPUTS))
def test_quantiser_follows_the_rule_bit_for_bit(make, dtype, device):
    x = make(dtype)
    values, scales = by_the_rule(x)
    L, D = x.shape[2:]
    with poisoned_empty():
        straight, s = fp8.quantized(x.to(device))
        turned, t = fp8.quantized(x.to(device), transposed=True)
        back, = fp8.dequantized(x.to(device))
    assert torch.equal(s.cpu(), scales) and torch.equal(t.cpu(), scales)
    assert torch.equal(bits(straight)[..., :D], bits(values).flatten(0, 1)) and not bits(straight)[..., D:].any()
    assert torch.equal(bits(turned)[:, :D, :L], bits(values).flatten(0, 1).mT), "v is stored with its keys side by side"
    assert not bits(turned)[:, D:].any() and not bits(turned)[..., L:].any() and turned.shape[2] % ROWS == 0
    assert torch.equal(back.cpu(), rounded(x)), "the backward's inputs are the reference's"


@pytest.mark.parametrize("layout", ["sliced", "transposed", "expanded", "strided"])
def test_quantiser_takes_any_strides(layout, device):
    x = lay(torch.randn(2, 3, 150, 40, device=device), layout)
    for turned in (False, True):
        for a, b in zip(fp8.quantized(x, turned), fp8.quantized(x.contiguous(), turned)):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.gpu
def test_gpu_an_infinity_becomes_nan_and_is_not_hidden(device):
    q, k, v = (torch.randn(1, 1, 70, 32, device=device).bfloat16() for _ in range(3))
    k[0, 0, 3, 5] = math.inf
    o, _ = run(dict(q=q, k=k, v=v))
    assert o.isnan().all() and fp8.dequantized(k)[0].isnan().sum() == 1


def run(args, tile=""):
    """o and lse of the launcher for the op's arguments."""
    q, k, v = args["q"], args["k"], args["v"]
    offset, left, right = span(args.get("causal"), args.get("window"), q.shape[2], k.shape[2])
    left, right = (-1 if n is None else n for n in (left, right))
    with poisoned_empty():
        o, lse = fp8.forward(q, k, v, scale_of(args.get("scale"), q), offset, left, right, tile)
    return o, lse * LN2


def assert_within_budget(args, tile=""):
    """Values and lse against float64 without rounding, at most VALUE_FACTOR times as far off as eager with rounded inputs."""
    args = args | dict(return_lse=True)
    oracle = OP.reference(**{n: widen(t) for n, t in args.items()})
    for name, a, e, o in zip(("o", "lse"), run(args, tile), OP.reference(**args | dict(precision="fp8")), oracle):
        verdict = compare(name, a, e, o, VALUE_FACTOR)
        assert verdict.ok, verdict.why


def case(B, H, KV, Lq, Lk, D, **options):
    return dict(B=B, H=H, KV=KV, Lq=Lq, Lk=Lk, D=D) | options


CASES = [
    case(1, 2, 2, 65, 129, 64), case(1, 4, 2, 130, 257, 32), case(1, 8, 1, 33, 300, 16), case(1, 1, 1, 1, 1, 128),
    case(1, 2, 1, 200, 200, 40, causal="top-left"), case(1, 1, 1, 65, 300, 80, causal="bottom-right"),
    case(1, 2, 2, 300, 140, 32, causal="bottom-right"), case(1, 1, 1, 300, 300, 64, causal="top-left", window=17),
    case(1, 1, 1, 300, 300, 64, causal="top-left", window=150), case(1, 1, 1, 300, 520, 32, window=140),
    case(1, 1, 1, 65, 300, 32, causal="bottom-right", window=1), case(1, 1, 1, 300, 65, 32, window=9),
    case(1, 1, 1, 70, 140, 256), case(2, 2, 1, 65, 63, 32, layout="bshd"), case(2, 2, 2, 65, 130, 32, layout="expanded"),
    case(2, 2, 1, 65, 63, 40, layout="transposed"), case(1, 1, 1, 65, 200, 32, scale=0.3),
    case(1, 1, 1, 65, 200, 32, causal="bottom-right", scale=0.0),
]


@pytest.mark.parametrize("sizes", CASES, ids=case_id)
def test_forward_is_within_the_budget(sizes, device):
    assert_within_budget(OP.inputs(torch.bfloat16, device, **sizes))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_forward_keeps_the_dtype_of_its_inputs(dtype, device):
    assert_within_budget(OP.inputs(dtype, device, **case(1, 2, 1, 100, 200, 48, causal="bottom-right")))


@pytest.mark.parametrize("tile", ["64x128w4s2", "128x128w8s2"])
@pytest.mark.parametrize("options", [dict(), dict(causal="top-left"), dict(causal="top-left", window=100)], ids=str)
def test_every_block_of_queries_serves_every_span(tile, options, device):
    assert_within_budget(OP.inputs(torch.bfloat16, device, **case(1, 2, 1, 270, 270, 32, **options)), tile)


@pytest.mark.parametrize("Lq, Lk", [(0, 65), (65, 0), (0, 0)])
def test_without_queries_or_keys_there_is_nothing_or_zero(Lq, Lk, device):
    o, lse = run(OP.inputs(torch.bfloat16, device, 2, 2, 1, Lq, Lk, 32))
    assert o.shape == (2, 2, Lq, 32) and not o.any() and (lse == -math.inf).all()


def test_rows_that_see_no_key_give_zero_and_minus_infinity(device):
    """70 rows before the first key: a whole block of queries without a tile, and a block whose tile most rows do not see."""
    o, lse = run(OP.inputs(torch.bfloat16, device, 1, 2, 2, 200, 130, 32, causal="bottom-right"))
    assert not o[:, :, :70].any() and (lse[:, :, :70] == -math.inf).all()
    assert o[:, :, 70:].isfinite().all() and lse[:, :, 70:].isfinite().all()


def drawn(device, *shape):
    return torch.randn(*shape, device=device).bfloat16()


def test_constant_rows_give_the_mean_of_the_values(device):
    v = drawn(device, 1, 1, 300, 32)
    q, k = (torch.full_like(v, value) for value in (0.7, -1.3))
    assert_within_budget(dict(q=q, k=k, v=v))


def test_constant_values_come_back_within_the_rounding_of_the_weights(device):
    """Weights are summed before they are rounded, so o may be off by the mean of their errors, at most half a step: 2^-4."""
    q, k = drawn(device, 1, 2, 200, 32), drawn(device, 1, 2, 200, 32)
    o, _ = run(dict(q=q, k=k, v=torch.ones_like(k), causal="top-left"))
    assert (o.float() - 1).abs().max() < 2**-4 and o[:, :, 0].eq(1).all()


def test_one_hot_rows_fetch_the_value_of_their_key(device):
    eye = torch.eye(64, device=device).bfloat16().view(1, 1, 64, 64)
    k = torch.cat([torch.zeros_like(eye), torch.zeros_like(eye), 30 * eye, torch.zeros_like(eye)], 2)  # in the second tile
    v = drawn(device, 1, 1, 256, 64)
    o, lse = run(dict(q=30 * eye, k=k, v=v))
    score = torch.full_like(lse, 30 * 30 / 8)
    assert torch.equal(o, rounded(v)[:, :, 128:192]) and compare("lse", lse, score, score.double(), VALUE_FACTOR).ok


@pytest.mark.parametrize("size", [1e4, 1e-4, 1e-25, 1e15])
def test_inputs_of_any_size_stay_within_the_budget(size, device):
    q, k, v = (size * drawn(device, 1, 2, 270, 32) for _ in range(3))
    assert_within_budget(dict(q=q, k=k, v=v, causal="top-left"))


def test_scores_past_two_to_the_22_pick_their_key(device):
    """There one step of the scores' fp32 is more than E4M3 has room for; without care weights overflow or vanish."""
    digit = torch.arange(9, device=device)
    q, k, v = torch.zeros(1, 1, 64, 32, device=device).bfloat16(), drawn(device, 1, 1, 300, 32), drawn(device, 1, 1, 300, 32)
    q[..., :9] = 2e6 * (1 + torch.arange(64, device=device)[:, None] / 64)
    k[..., :9] = 2.0**digit * (torch.arange(300, device=device)[:, None] >> digit & 1)  # adds up to the key's own number
    o, lse = run(dict(q=q, k=k, v=v))
    assert torch.equal(o, rounded(v)[:, :, -1:].expand_as(o)) and lse.isfinite().all()


def test_ties_for_the_maximum_share_the_weight(device):
    k = torch.zeros(1, 1, 300, 32, device=device).bfloat16()
    k[:, :, [5, 140, 299]] = 20.0  # one in each tile
    v = drawn(device, 1, 1, 300, 32)
    o, _ = run(dict(q=torch.full_like(k[:, :, :70], 20.0), k=k, v=v))
    mean = rounded(v)[:, :, [5, 140, 299]].double().mean(2, keepdim=True).expand_as(o)
    assert compare("o", o, mean.to(o.dtype), mean, VALUE_FACTOR).ok


def test_scales_that_differ_from_tile_to_tile_are_each_applied(device):
    q, k, v = (drawn(device, 1, 2, 600, 32) for _ in range(3))
    steps = torch.tensor([0, 5, -3, 2, -6], device=device).repeat_interleave(ROWS)[:600, None]
    k, v = (k * 2.0 ** (steps.clamp(max=1))).bfloat16(), (v * 2.0**-steps).bfloat16()
    for options in (dict(), dict(causal="top-left"), dict(window=200)):
        assert_within_budget(dict(q=q, k=k, v=v, **options))


def test_a_tile_that_does_not_fit_the_scales_is_refused_by_name(device):
    args = OP.inputs(torch.bfloat16, device, 1, 1, 1, 8, 8, 32)
    for tile in ("64x64w4s2", "32x128w4s2"):
        with pytest.raises(ValueError, match=rf"attention\[triton_fp8\]: tile must be .*got '{tile}'"):
            run(args, tile)
    with pytest.raises(ValueError, match="got 'wide'"):
        run(args, "wide")


AHEAD = """
import json, sys, torch, triton
from whet.aot import TARGETS, Launch, compile_for, recorded, specialise
from whet.ops.attention import fp8

def compiled(D, tile, left, right, target):
    q = torch.empty(2, 8, 4096, D, dtype=torch.bfloat16, device="meta")
    with recorded() as seen:
        fp8.forward(q, q[:, :2], q[:, :2], D**-0.5, 0, left, right, tile)
    for fn, args, options in {fn: (fn, *rest) for fn, *rest in seen}.values():
        launch = Launch("attention", "triton_fp8", f"{D} {tile} {left} {right}", "bfloat16", fn, args, options)
        c = compile_for(launch, target)
        source, how = specialise(launch, TARGETS[target])
        ptx = triton.compile(source, target=TARGETS[target], options=how).asm["ptx"]
        products = [line for line in ptx.splitlines() if "wgmma.mma_async" in line]
        yield dict(kernel=fn.__name__, case=launch.case, target=target, registers=c.registers, spills=c.spills, shared=c.shared,
                   fp8=all("f32.e4m3.e4m3" in p for p in products), products=len(products),
                   from_zero=sum(p.endswith(", 0, 1, 1;") for p in products), groups=ptx.count("wgmma.commit_group"))

SPANS = ((-1, -1), (-1, 0), (255, 0))
plans = [(D, fp8.TILES[D][0], *span, "sm_90") for D in (64, 128) for span in SPANS]
plans += [(D, tile, 255, 0, "sm_90") for D, tiles in fp8.TILES.items() for tile in tiles[D in (64, 128) :]]
plans += [(D, fp8.TILES[D][0], -1, 0, "sm_100") for D in (64, 128)]
json.dump([row for plan in plans for row in compiled(*plan)], sys.stdout)
"""


@pytest.fixture(scope="module")
def ahead():
    env = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run([sys.executable, "-c", AHEAD], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_kernels_compile_without_spilling_and_fit_the_shared_memory(ahead):
    assert {r["target"] for r in ahead} == {"sm_90", "sm_100"}
    assert not [r for r in ahead if r["spills"] or r["shared"] > 232448]


def test_four_programs_share_an_sm_at_a_head_size_of_64_each_with_three_tiles_of_k_and_v(ahead):
    this = dict(kernel="_fp8_forward_kernel", case="64 64x128w4s3 -1 -1", target="sm_90")
    forward, = (r for r in ahead if this.items() <= r.items())
    assert forward["registers"] <= 65536 // (4 * 128) and 3 * 2 * 128 * 64 <= forward["shared"] <= 232448 // 4


def test_products_run_in_fp8_and_no_sum_crosses_a_tile_inside_the_tensor_core(ahead):
    """The first product of each group, which is one tile's, ignores what its accumulator holds."""
    for r in (r for r in ahead if r["target"] == "sm_90" and "forward" in r["kernel"]):
        assert r["products"] and r["fp8"] and r["from_zero"] == r["groups"], r


LARGE = [
    case(2, 8, 2, 2048, 2048, 64, causal="top-left"), case(1, 4, 4, 3000, 5001, 128), case(1, 2, 2, 64, 50000, 64),
    case(1, 4, 1, 2049, 2049, 256, causal="top-left", window=300), case(1, 4, 2, 1000, 3000, 96, causal="bottom-right"),
    case(2, 4, 2, 1500, 700, 32, window=333, layout="bshd"),
]


@pytest.mark.gpu
@pytest.mark.parametrize("sizes, tile", [
    pytest.param(sizes, tile, id=f"{case_id(sizes)}-{tile}") for sizes in LARGE for tile in fp8.TILES[fp8.padded(sizes["D"])]
])
def test_gpu_forward_is_within_the_budget_and_gives_the_same_bits_each_time(sizes, tile, device):
    args = OP.inputs(torch.bfloat16, device, **sizes)
    assert_within_budget(args, tile)
    first = run(args, tile)
    for _ in range(4):
        assert all(torch.equal(a, b) for a, b in zip(first, run(args, tile)))


@pytest.mark.gpu
def test_gpu_rounds_every_bfloat16_as_the_reference_does(device):
    """Each block holds the bfloat16 numbers of a few exponents, so that no scale hides the rest."""
    finite = torch.arange(2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    finite = finite[finite.isfinite()]
    x = torch.cat([finite, -finite]).view(1, 1, -1, 16).to(device)
    assert torch.equal(fp8.dequantized(x)[0], rounded(x))
    many = drawn(device, 2, 8, 5000, 128)
    assert torch.equal(fp8.dequantized(many)[0], rounded(many))


@pytest.mark.gpu
def test_gpu_graph_replays_with_new_values(device):
    args = OP.inputs(torch.bfloat16, device, **case(1, 4, 2, 1000, 1000, 64, causal="top-left"))
    q, k, v = (args[n] for n in "qkv")
    fp8.forward(q, k, v, 0.125, 0, -1, 0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = fp8.forward(q, k, v, 0.125, 0, -1, 0)
    for t in (q, k, v):
        t.copy_(torch.randn_like(t))
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, fp8.forward(q, k, v, 0.125, 0, -1, 0)))


class Block(nn.Module):
    def __init__(self, width, heads, attend):
        super().__init__()
        self.heads, self.attend = heads, attend
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        o = self.attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal="top-left")
        x = x + self.out(o.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class Characters(nn.Module):
    """A causal transformer over bytes."""

    def __init__(self, width, heads, layers, length, attend):
        super().__init__()
        self.token, self.place = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads, attend) for _ in range(layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256))

    def forward(self, text):
        return self.head(self.blocks(self.token(text) + self.place.weight[: text.shape[1]]))


def losses(attend, steps, device, width, heads, layers, length, batch):
    """Training losses on the sources of Python's standard library; seed, data and order are the same for every attention."""
    torch.manual_seed(0)
    model = Characters(width, heads, layers, length, attend).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    source = b"".join(p.read_bytes() for p in sorted(Path(os.__file__).parent.glob("*.py")))
    text = torch.frombuffer(bytearray(source), dtype=torch.uint8)
    order, found = torch.Generator().manual_seed(1), []
    for _ in range(steps):
        starts = torch.randint(len(text) - length - 1, (batch, 1), generator=order)
        chunk = text[starts + torch.arange(length + 1)].long().to(device)
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = F.cross_entropy(model(chunk[:, :-1]).flatten(0, 1).float(), chunk[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def test_the_small_model_learns_with_the_reference_in_fp8():
    """What the training test on a GPU rests on, in few steps: the harness trains, and rounding reaches the loss."""
    def plain(*qkv, **options):
        return whet.ops.attention(*qkv, **options, impl="eager")

    def in_fp8(*qkv, **options):
        return whet.ops.attention(*qkv, **options, precision="fp8", impl="eager")

    bf16, low = (losses(way, 8, "cpu", width=32, heads=2, layers=1, length=32, batch=4) for way in (plain, in_fp8))
    assert low[-1] < low[0] and low != bf16


@pytest.mark.gpu
def test_gpu_training_in_fp8_reaches_the_loss_of_bf16():
    def bf16(*qkv, **options):
        return whet.ops.attention(*qkv, **options, impl="torch")

    def in_fp8(*qkv, **options):
        return whet.ops.attention(*qkv, **options, precision="fp8", impl="triton_fp8")

    sizes = dict(width=256, heads=4, layers=3, length=256, batch=32)
    expected, actual = (sum(losses(way, 200, DEVICE, **sizes)[-20:]) / 20 for way in (bf16, in_fp8))
    assert abs(actual / expected - 1) < 0.01, f"mean loss of the last 20 steps {actual:.4f}, with bf16 {expected:.4f}"
