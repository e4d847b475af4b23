"""linear_cross_entropy in FP8: casts code by code, what is turned, many chunks, refusals, a model trained with it."""

import gc
import itertools
import math

import pytest
import torch
import triton
import triton.language as tl
from conftest import DEVICE
from torch.multiprocessing.reductions import StorageWeakRef

import whet.ops
from whet.models.gpt2 import GPT2, SIZES, GPT2Config
from whet.op import Call, discover
from whet.ops import _fp8_loss
from whet.ops._fp8 import casts_in_ptx, e4m3_bits, e5m2_bytes, e5m2_four, quantized, rounded
from whet.prove import prove
from whet.roof import Ceilings
from whet.verify import verify

OP = discover()["linear_cross_entropy"]


@triton.jit
def _codes_kernel(x_ptr, e4m3_ptr, e5m2_ptr, four_ptr, word_ptr, n, BLOCK: tl.constexpr, IN_PTX: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n, other=0.0)
    tl.store(e4m3_ptr + i, e4m3_bits(tl.minimum(tl.maximum(x, -448.0), 448.0)).to(tl.uint8), mask=i < n)
    tl.store(e5m2_ptr + i, e5m2_bytes(x, IN_PTX), mask=i < n)
    a, b, c, d, word = e5m2_four(x, -x, 2 * x, x, IN_PTX)
    tl.store(four_ptr + 4 * i, a, mask=i < n)
    tl.store(four_ptr + 4 * i + 1, b, mask=i < n)
    tl.store(four_ptr + 4 * i + 2, c, mask=i < n)
    tl.store(four_ptr + 4 * i + 3, d, mask=i < n)
    tl.store(word_ptr + i, word, mask=i < n)


def cast(x):
    """Its bytes of E4M3 and of E5M2, and four E5M2 a number as bytes and as words of bytes."""
    n, make = len(x), lambda *more: torch.empty((len(x), *more), dtype=torch.uint8, device=DEVICE)
    e4m3, e5m2, four, word = make(), make(), make(4), make(4)
    _codes_kernel[(triton.cdiv(n, 1024),)](x, e4m3, e5m2, four, word.view(torch.int32), n, BLOCK=1024, IN_PTX=casts_in_ptx())
    return e4m3, e5m2, four, word


def around(dtype, most):
    """Every finite code, what lies between two, and what lies a little off that; no zeros, whose sign is nothing."""
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    codes = codes[codes.isfinite() & (codes != 0)].sort().values
    half = (codes[1:] + codes[:-1]) / 2
    x = torch.cat([codes, half, half * (1 + 2**-7), half * (1 - 2**-7)])
    return x[(x.abs() <= most) & (x != 0)].to(DEVICE)


def test_every_code_of_e4m3_and_what_lies_between_goes_to_the_nearest():
    x = around(torch.float8_e4m3fn, 448.0)
    assert torch.equal(cast(x)[0], x.to(torch.float8_e4m3fn).view(torch.uint8))


def test_every_code_of_e5m2_and_what_lies_between_goes_to_the_nearest():
    x = around(torch.float8_e5m2, 2.0**14)
    _, bytes_, *fours = cast(x)
    want = torch.stack([x, -x, 2 * x, x], 1).to(torch.float8_e5m2).view(torch.uint8)
    assert torch.equal(bytes_, want[:, 0]) and all(torch.equal(four, want) for four in fours)


@pytest.mark.parametrize("bits", [0x7FC00000, -0x400000, 0x7FFFFFFF, -1, 0x7F802000, -0x7FE000], ids=hex)
def test_every_nan_stays_one(bits):
    x = torch.full((8,), bits, dtype=torch.int32, device=DEVICE).view(torch.float32)
    e4m3, e5m2, four, word = cast(x)
    assert x.isnan().all() and e4m3.view(torch.float8_e4m3fn).float().isnan().all()
    assert all(byte.view(torch.float8_e5m2).float().isnan().all() for byte in (e5m2, four, word))


MATRICES = {
    "bfloat16": lambda: torch.randn(50, 48).bfloat16(), "float32": lambda: torch.randn(129, 160) * 1e-3,
    "zeros": lambda: torch.zeros(5, 16), "strided": lambda: torch.randn(200, 96)[:, ::3],
    "turned": lambda: torch.randn(64, 37).t(),
    "wide": lambda: torch.randn(4099, 768), "past 448": lambda: torch.linspace(-479, 479, 640).view(40, 16),
}


@pytest.mark.parametrize("case", MATRICES)
def test_a_quantized_matrix_is_the_references_and_its_transpose_is_its_own(case):
    x = MATRICES[case]().to(DEVICE)
    y, turned, scale = quantized(x)
    assert torch.equal((y.float() * scale)[: len(x)].to(x.dtype), rounded(x)) and not y[len(x) :].float().any()
    assert (rounded(x) - x).abs().le(x.abs() / 16 + scale / 1024).all()
    assert torch.equal(y.view(torch.uint8).t(), turned.view(torch.uint8)) and len(y) % 16 == 0


def test_what_is_not_finite_becomes_nan():
    x = torch.randn(20, 16, device=DEVICE)
    x[3, 4], x[5, 6] = float("inf"), float("nan")
    y, _, scale = quantized(x)
    assert y.float().isnan()[[3, 5], [4, 6]].all() and scale.isnan() and rounded(x).isnan().all()
    assert not quantized(torch.full((16, 16), 3e38, device=DEVICE))[2].isnan()


def test_chunks_are_whole_tiles_at_any_vocabulary():
    for V, D, M in itertools.product((50257, 917_504, 1_000_000, 4_000_000), (16, 64, 112, 768), (130, 202, 512, 1000, 5000)):
        x, w = torch.empty(M, D, dtype=torch.bfloat16, device="meta"), torch.empty(V, D, dtype=torch.bfloat16, device="meta")
        assert all(cut.start % 128 == 0 for cut in _fp8_loss.whole_chunks(x, w))


@pytest.mark.parametrize("M, V, softcap", [(40, 301, 0.0), (128, 1000, 0.0), (37, 160, 5.0)])
def test_the_gradient_of_the_logits_is_the_softmax_less_the_target_and_its_transpose(M, V, softcap):
    P, columns = -(-V // 16) * 16, -(-M // 16) * 16
    z, target = (3 * torch.randn(M, P, device=DEVICE)).bfloat16(), torch.randint(V, (M,), device=DEVICE)
    target[::5] = -100
    capped = z[:, :V].double() if not softcap else softcap * torch.tanh(z[:, :V].double() / softcap)
    top = capped.amax(1)
    stats = torch.stack([top, (capped - top[:, None]).exp().sum(1).log()]).float()
    want = capped.softmax(1)
    want[torch.arange(M), target.clamp(min=0)] -= 1
    want *= 1 if not softcap else 1 - (capped / softcap).square()
    want[target == -100] = 0
    dz = torch.full((M, P), 255, dtype=torch.uint8, device=DEVICE).view(torch.float8_e5m2)
    room = torch.full((P, 2 * columns), 255, dtype=torch.uint8, device=DEVICE).view(torch.float8_e5m2)
    _fp8_loss.dlogits(z, V, target, stats, -100, softcap, dz, room[:, columns:])
    made = dz.double() / 2**15
    assert not made[:, V:].any() and (made[:, :V] - want).abs().le(want.abs() * 2**-3 + 2**-31).all()
    assert torch.equal(dz.view(torch.uint8).t(), room.view(torch.uint8)[:, columns : columns + M])
    assert not room.float()[:, columns + M :].any() and (room.view(torch.uint8)[:, :columns] == 255).all()


@pytest.mark.parametrize("offset", [-3e38, -1e10, 1e4, 1e7, 3e38])
def test_logits_of_any_size_lose_no_gradient(offset):
    """The softmax knows differences alone: that of equal logits is even, and where one is all there is nothing to learn."""
    V, M = 64, 16
    z = torch.full((M, V), offset, device=DEVICE).bfloat16()
    target, top = torch.arange(M, device=DEVICE), z[0, 0].item()
    stats = torch.tensor([top, math.log(V)], device=DEVICE)[:, None].repeat(1, M)
    dz, turned = (torch.empty(shape, dtype=torch.float8_e5m2, device=DEVICE) for shape in ((M, V), (V, M)))
    _fp8_loss.dlogits(z, V, target, stats, -100, 0.0, dz, turned)
    want = torch.full((M, V), 1 / V, device=DEVICE)
    want[target, target] -= 1
    assert (dz.float() / 2**15 - want).abs().le(want.abs() / 8).all()
    z[torch.arange(V, device=DEVICE)[None, :] != target[:, None]] = -math.inf
    stats[1] = 0
    _fp8_loss.dlogits(z, V, target, stats, -100, 0.0, dz, turned)
    assert not dz.float().any() and not turned.float().any()


def in_chunks(monkeypatch, rows=16):
    monkeypatch.setattr(_fp8_loss, "chunks", lambda M, *_: [slice(i, min(i + rows, M)) for i in range(0, M, rows)])


@pytest.mark.parametrize("asked", ["x", "w", "b", "xwb"])
def test_a_groups_turned_gradients_are_let_go_before_the_next_groups_are_made(asked, monkeypatch):
    """What the op says it takes, and what is predicted of a step, is one group's."""
    args = OP.inputs(dtype=torch.bfloat16, device=DEVICE, precision="fp8", M=100, D=32, V=50, bias=True)
    seen: list[StorageWeakRef] = []
    alive, empty = [], torch.empty

    def made(*args, **options):
        if options.get("dtype") == torch.float8_e5m2:
            gc.collect()  # the interpreter's launches lie in cycles
            alive.append(sum(not ref.expired() for ref in seen))
            seen.append(StorageWeakRef((t := empty(*args, **options)).untyped_storage()))
            return t
        return empty(*args, **options)

    in_chunks(monkeypatch)
    monkeypatch.setattr(torch, "empty", made)
    OP.impls["triton_fp8"].run(**args | {k: args[k].requires_grad_() for k in asked})
    assert alive == [0, 1, 1, 1, 1]  # a chunk's gradients, which stay, and those of four groups turned


def test_scales_are_float32_whatever_the_default_dtype_is(monkeypatch):
    """The GPU's product of 8-bit floats takes no others."""
    args = OP.inputs(dtype=torch.bfloat16, device=DEVICE, precision="fp8", M=20, D=16, V=50, bias=True)
    scales = []

    def product(a, b, *rest, **options):
        scales.extend(s.dtype for s in rest[:2])
        return fp8_product(a, b, *rest, **options)

    fp8_product = _fp8_loss.product
    monkeypatch.setattr(_fp8_loss, "product", product)
    torch.set_default_dtype(torch.bfloat16)
    try:
        OP.impls["triton_fp8"].run(**args | {k: args[k].requires_grad_() for k in "xwb"}).backward()
    finally:
        torch.set_default_dtype(torch.float32)
    assert scales == 8 * [torch.float32]


def test_the_whole_proof_passes_hostile_values_too(device):
    call = Call("linear_cross_entropy", dict(M=24, D=16, V=50, precision="fp8", bias=True), "bfloat16", True)
    verdict = prove(OP, "triton_fp8", call, device)
    assert verdict.ok, verdict.why


def test_gradients_of_what_e4m3_holds_are_off_by_roundings_alone(device):
    """Roundings to E5M2 go either way: a factor that is a hundredth off, which they hide from single values, would remain."""
    args = OP.inputs(dtype=torch.bfloat16, device=device, precision="fp8", M=250, D=64, V=500, bias=True, reduction="sum")
    args |= {k: rounded(args[k]) for k in ("x", "w")}
    given = [args[k].requires_grad_() for k in "xwb"]
    made = torch.autograd.grad(OP.impls["triton_fp8"].run(**args), given)
    loss = OP.reference(**{k: v.double() if k in "xwb" else v for k, v in args.items()})
    for grad, want in zip(made, torch.autograd.grad(loss, given)):
        assert abs(((grad - want) * want).sum() / want.square().sum()) < 5e-3


@pytest.mark.parametrize("case", [dict(M=100, D=64, V=1003), dict(M=90, D=32, V=300, bias=True), dict(M=33, D=16, V=64)])
def test_many_chunks_meet_the_budget_of_one(case, monkeypatch):
    in_chunks(monkeypatch)
    verdict = verify(OP, OP.impls["triton_fp8"], OP.inputs(dtype=torch.bfloat16, device=DEVICE, precision="fp8", **case))
    assert verdict.ok, verdict.why


def test_weights_in_float32_take_the_dtype_of_autocast(device):
    """What a model in mixed precision hands over: the gradient of w is one of its own dtype, and near that of bfloat16."""
    x, w = torch.randn(64, 128, device=device), (torch.randn(500, 128, device=device) / 8).requires_grad_()
    grads, target = [], torch.randint(500, (64,), device=device)
    for impl in ("triton_fp8", "torch"):
        with torch.autocast(device, torch.bfloat16):
            whet.ops.linear_cross_entropy(x.bfloat16(), w, target, impl=impl).backward()
        grads.append(w.grad)
        w.grad = None
    assert grads[0].dtype == torch.float32 and (grads[0] - grads[1]).norm() < 0.1 * grads[1].norm()


@pytest.mark.parametrize("change, said", [
    (dict(precision=None), "done only where asked for: precision='fp8'"), (dict(reduction="none"), "reduction must be"),
    (dict(label_smoothing=0.1), "label_smoothing must be 0"), (dict(D=24), "must be a multiple of 16, got 24"),
    (dict(dtype=torch.float32), "must be bfloat16, got torch.float32"),
])
def test_refusals_say_what_would_be_taken(change, said):
    args = OP.inputs(**dict(dtype=torch.bfloat16, device="cpu", M=8, D=16, V=32, precision="fp8") | change)
    assert said in OP.impls["triton_fp8"].refuses(**args)


def test_the_roofline_of_all_three_products_is_that_of_fp8():
    args = OP.inputs(dtype=torch.bfloat16, device="meta", M=32768, D=768, V=50257, precision="fp8")
    roofs = Ceilings(copy_gbs=4000.0, tflops={"float32": 50.0, "bfloat16": 800.0, "float8_e4m3fn": 1200.0})
    plain, fp8 = (roofs.floor_ms(OP.cost(**args | dict(precision=p)), True, "bfloat16") for p in (None, "fp8"))
    assert plain == pytest.approx(1.5 * fp8)


@pytest.mark.parametrize("impl", ["torch", "triton", "liger"])
def test_an_impl_of_one_precision_names_who_serves_fp8(impl):
    args = OP.inputs(dtype=torch.bfloat16, device="cpu", M=8, D=16, V=32, precision="fp8")
    assert "precision='fp8' is served by triton_fp8, eager and compile" in OP.impls[impl].refuses(**args)


def asked(model, batch, autocast: bool):
    from whet.workload import Workload

    precision = "bfloat16" if autocast else "float32"
    calls = Workload(model, kwargs=batch, precision=precision).calls()
    return [call.case.get("precision") for call, _ in calls if call.op == "linear_cross_entropy"]


def test_a_head_in_fp8_is_one_in_training_under_bfloat16_alone():
    model = GPT2(GPT2Config(vocab=101, width=32, layers=1, heads=2, kv_heads=2, fp8_head=True))
    tokens = torch.randint(101, (2, 16))
    batch = dict(tokens=tokens, labels=tokens)
    assert asked(model, batch, True) == ["fp8"] and asked(model, batch, False) == [None]
    assert asked(model.bfloat16(), batch, False) == [None]  # 16 bits are no autocast
    assert asked(model.float().eval(), batch, True) == [None] and SIZES["d12-fast"].fp8_head and not SIZES["d12"].fp8_head


@pytest.mark.gpu
def test_gpu_training_with_a_head_in_fp8_reaches_the_loss_of_bf16():
    def last(fp8: bool) -> float:
        c = GPT2Config(vocab=1000, width=256, layers=2, heads=4, kv_heads=4, fp8_head=fp8)
        model, generator = GPT2(c).cuda(), torch.Generator().manual_seed(0)
        optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
        for _ in range(150):
            first = torch.randint(1000, (16, 1), generator=generator)
            tokens = ((first + 7 * torch.arange(65)) % 1000).cuda()
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return torch.stack(losses[-20:]).mean().item()

    low, high = last(True), last(False)
    assert abs(low - high) < 0.05 * high + 0.05, (low, high)


ON_GPU = [
    test_every_code_of_e4m3_and_what_lies_between_goes_to_the_nearest,
    test_every_code_of_e5m2_and_what_lies_between_goes_to_the_nearest, test_what_is_not_finite_becomes_nan,
    lambda: [test_a_quantized_matrix_is_the_references_and_its_transpose_is_its_own(case) for case in MATRICES],
    lambda: [
        test_the_gradient_of_the_logits_is_the_softmax_less_the_target_and_its_transpose(M, V, softcap)
        for M in (37, 128, 4096) for V in (160, 5003) for softcap in (0.0, 5.0)
    ],
]


@pytest.mark.gpu
@pytest.mark.parametrize("test", ON_GPU, ids=["e4m3", "e5m2", "not-finite", "quantized", "gradients"])
def test_gpu_casts_and_transposes_are_those_of_the_interpreter(test):
    test()


@pytest.mark.gpu
def test_gpu_autocast_of_float32_weights_keeps_the_gradients():
    test_weights_in_float32_take_the_dtype_of_autocast("cuda")
