"""linear_cross_entropy in FP8: its three products on the FP8 tensor cores, and the kernel that prepares two of them."""

import torch
import triton
import triton.language as tl

from whet.launch import launcher
from whet.op import autocast_of
from whet.ops import _cross_entropy as kernels
from whet.ops._cross_entropy import _gradient, _narrow
from whet.ops._fp8 import E4M3, E5M2, UNIT, casts_in_ptx, e5m2_bytes, e5m2_word, padded, product, quantized
from whet.ops._loss_chunks import CHUNK_BYTES, chunks, scaled, sum_dtype
from whet.ops._rows import cdiv, unit_rows
from whet.torch_ops import Fused

NO_FP8 = "computes in the inputs' precision; precision='fp8' is served by triton_fp8, eager and compile"
LOG2E = tl.constexpr(1.4426950408889634)
STEEP = tl.constexpr(32768.0)  # the gradient of a logit, within -1..1, is held as 2^15 times that: E5M2 ends at 57344
SHORT = 1024  # of D: so few products may be added in 14 bits, inside the tensor cores alone
TOGETHER = 2  # chunks whose products with dlogits.T are one: its sums go to memory that much less often


@triton.jit
def _steep_row(
    z_ptr, target_ptr, stats_ptr, stride_zm, stride_stats, m, v, M, V, P, ignore_index, softcap,
    HAS_SOFTCAP: tl.constexpr,
):
    """2^15 (softmax(z) - onehot(target)) of the rows m and the columns v, zero where ignored; columns past V are anything."""
    target = tl.load(target_ptr + m, mask=m < M, other=ignore_index)
    counts = (target != ignore_index) & (m < M)
    target = tl.where(counts, target, -1).to(tl.int32)
    top = tl.load(stats_ptr + m, mask=counts, other=0.0)
    log_mass = tl.load(stats_ptr + stride_stats + m, mask=counts, other=float("inf"))  # no probability for any
    # A mask of whole loads: V may be odd.
    z = tl.load(z_ptr + m[:, None] * stride_zm + v[None, :], mask=counts[:, None] & (v < P)[None, :], other=0.0).to(tl.float32)
    if HAS_SOFTCAP:
        d = _gradient(z, v[None, :], target[:, None], top[:, None], log_mass[:, None], V, 0.0, softcap, HAS_SOFTCAP) * STEEP
    else:  # a difference, in which no large logits are left, one multiply-add and one exponential for each
        d = tl.exp2((z - top[:, None]) * LOG2E - (log_mass * LOG2E - 15.0)[:, None])
        d = tl.where(v[None, :] == target[:, None], d - STEEP, d)
    return d


@triton.jit
def _fp8_dlogits_kernel(
    z_ptr, target_ptr, stats_ptr,  # inputs
    dz_ptr, turned_ptr,  # outputs: (M, P) bytes; (P, fours) int32 of four rows' bytes each
    stride_zm, stride_stats, stride_turned,
    M, V, P, fours, ignore_index, softcap,
    BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr, HAS_SOFTCAP: tl.constexpr, IN_PTX: tl.constexpr,
):
    """dz = E5M2(2^15 (softmax(z) - onehot(target))), zero where ignored, and its transpose.  A program, 4 BLOCK_M rows.

    Fuses   softmax, the one-hot, the softcap's slope, the rounding and the transpose; zeros up to P and to 4 * fours rows.
    Moves   z in; dz out, a byte an element, twice. Four rows are turned as one word: shared memory is slow at single bytes.
    Rounds  to E5M2 once. 2^-32 and less of a row's probability is nothing.
    """
    softcap = _narrow(softcap)
    pid = tl.program_id(0)
    blocks = tl.cdiv(P, BLOCK_V)
    four = (pid // blocks).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    first = (pid % blocks) * BLOCK_V
    v = first + tl.arange(0, BLOCK_V)
    m, in_row = 4 * four, (v < P)[None, :]
    a = _steep_row(z_ptr, target_ptr, stats_ptr, stride_zm, stride_stats, m, v, M, V, P, ignore_index, softcap, HAS_SOFTCAP)
    b = _steep_row(z_ptr, target_ptr, stats_ptr, stride_zm, stride_stats, m + 1, v, M, V, P, ignore_index, softcap, HAS_SOFTCAP)
    c = _steep_row(z_ptr, target_ptr, stats_ptr, stride_zm, stride_stats, m + 2, v, M, V, P, ignore_index, softcap, HAS_SOFTCAP)
    d = _steep_row(z_ptr, target_ptr, stats_ptr, stride_zm, stride_stats, m + 3, v, M, V, P, ignore_index, softcap, HAS_SOFTCAP)
    if first + BLOCK_V > V:
        in_vocab = (v < V)[None, :]
        a, b = tl.where(in_vocab, a, 0.0), tl.where(in_vocab, b, 0.0)
        c, d = tl.where(in_vocab, c, 0.0), tl.where(in_vocab, d, 0.0)
    at = dz_ptr + m[:, None] * P + v[None, :]
    tl.store(at, e5m2_bytes(a, IN_PTX), mask=(m < M)[:, None] & in_row)
    tl.store(at + P, e5m2_bytes(b, IN_PTX), mask=(m + 1 < M)[:, None] & in_row)
    tl.store(at + 2 * P, e5m2_bytes(c, IN_PTX), mask=(m + 2 < M)[:, None] & in_row)
    tl.store(at + 3 * P, e5m2_bytes(d, IN_PTX), mask=(m + 3 < M)[:, None] & in_row)
    to = turned_ptr + v[:, None].to(tl.int64) * stride_turned + four[None, :]
    tl.store(to, tl.trans(e5m2_word(a, b, c, d, IN_PTX)), mask=(v < P)[:, None] & (four < fours)[None, :])


def dlogits(z, V, target, stats, ignore_index, softcap, dz, turned):
    """Fill dz (M, P), and turned (P, a multiple of four and at least M) with its transpose, from z (M, P) and its stats."""
    (M, P), words = z.shape, turned.view(torch.int32)
    fours, strides = words.shape[1], (z.stride(0), stats.stride(0), words.stride(0))
    launcher(_fp8_dlogits_kernel)[(cdiv(fours, 16) * cdiv(P, 128),)](
        z, target, stats, dz.view(torch.uint8), words, *strides, M, V, P, fours, ignore_index, softcap,
        BLOCK_M=16, BLOCK_V=128, HAS_SOFTCAP=softcap > 0, IN_PTX=casts_in_ptx(), num_warps=4,
    )


def losses_and_gradients(x, w, b, target, cuts, ignore_index, softcap, dx, dw, db):
    """The loss of each row of x (M, D); dx (M, D), dw (P, D), db (P,) take their unscaled gradients where they have elements.

    cuts   slices of the rows that follow each other: the logits of one are in memory at a time; all but the last are
           multiples of UNIT
    """
    (M, D), V, P = x.shape, w.shape[0], padded(w.shape[0])
    loss, stats = (torch.empty(shape, dtype=torch.float32, device=x.device) for shape in (M, (2, M)))
    (xq, x_turned, x_scale), (wq, w_turned, w_scale) = quantized(x), quantized(w)
    bias = torch.nn.functional.pad(b, (0, P - V)) if b.numel() else None
    one, slope = (torch.full((), n, dtype=torch.float32, device=x.device) for n in (1.0, 1 / STEEP.value))
    ones = torch.ones(UNIT, padded(M) if db.numel() else 0, device=x.device).to(E4M3)
    logits = x.new_empty(cuts[0].stop, P)
    wanted = bool(dx.numel() or dw.numel() or db.numel())
    grads = torch.empty((cuts[0].stop, P) if wanted else 0, dtype=E5M2, device=x.device)
    for i in range(0, len(cuts), TOGETHER):
        group = cuts[i : i + TOGETHER]
        start, end = group[0].start, padded(group[-1].stop)
        turned = here = None  # the last group's goes before this one's comes
        turned = torch.empty((P, end - start) if wanted else 0, dtype=E5M2, device=x.device)
        for cut in group:
            z = product(xq[cut], wq, x_scale, w_scale, x.dtype, bias, fast=SHORT >= D, out=logits[: cut.stop - cut.start])
            kernels.losses(z, V, target[cut], ignore_index, 0.0, softcap, loss[cut], stats[:, cut])
            if wanted:
                dz, here = grads[: len(z)], turned[:, cut.start - start : padded(cut.stop) - start]
                dlogits(z, V, target[cut], stats[:, cut], ignore_index, softcap, dz, here)
            if dx.numel():
                product(dz, w_turned, slope, w_scale, x.dtype, out=dx[cut])
        if dw.numel() and i:
            dw.add_(product(turned, x_turned[:, start:end], slope, x_scale, dw.dtype))
        elif dw.numel():
            product(turned, x_turned[:, start:end], slope, x_scale, dw.dtype, out=dw)
        if db.numel():
            db += product(turned, ones[:, start:end], slope, one, torch.float32)[:, 0]
    return loss


def whole_chunks(x, w) -> list[slice]:
    """Chunks of whole tiles: rows of any length are cut as if 128 of them fitted."""
    (V, D), size = w.shape, x.element_size()
    return chunks(x.numel() // D, min(padded(V) * size, CHUNK_BYTES // 128), padded(V) * D * size)


def inside(x, w, target, ignore_index, reduction, softcap, num_items, b, *wanted) -> int:
    """Bytes of a chunk of logits and its gradient, a group's gradients turned, x and w in E4M3, and a group's share of dw."""
    D, M, P = w.shape[1], x.numel() // w.shape[1], padded(w.shape[0])
    if not M:
        return 0
    rows = (cuts := whole_chunks(x, w))[0].stop
    logits, operands = rows * P * x.element_size(), 2 * (padded(M) + P) * D
    if not any(wanted):
        return logits + operands
    share = P * D * sum_dtype(w).itemsize if wanted[1] and len(cuts) > TOGETHER else 0
    return logits + operands + rows * P + min(TOGETHER * rows, padded(M)) * P + share


def fp8_forward(x, w, target, ignore_index, reduction, softcap, num_items, b, need_dx, need_dw, need_db):
    """The loss, and its gradients unscaled: every row has the same upstream gradient."""
    (M, D), P = (flat := unit_rows(x)).shape, padded(w.shape[0])
    target = target.reshape(-1).contiguous()
    dx = torch.empty(x.shape if need_dx else 0, dtype=x.dtype, device=x.device)
    dw = torch.empty((P, D) if need_dw else 0, dtype=sum_dtype(w), device=x.device)
    db = torch.zeros(P if need_db else 0, dtype=torch.float32, device=x.device)
    cuts = whole_chunks(x, w)
    if M:
        each = losses_and_gradients(flat, w, b, target, cuts, ignore_index, softcap, dx.view(-1, D), dw, db)
    else:
        each = torch.empty(0, dtype=torch.float32, device=x.device)
        dw.zero_()
    loss, scale = kernels.reduced(each, target, ignore_index, reduction == "mean", num_items)
    return loss, dx, dw[: w.shape[0]], db[: w.shape[0]], scale


def _fp8_fake(x, w, target, ignore_index, reduction, softcap, num_items, b, need_dx, need_dw, need_db):
    scalar = x.new_empty((), dtype=torch.float32)
    dw = w.new_empty(w.shape if need_dw else 0, dtype=sum_dtype(w))
    db = b.new_empty(b.shape if need_db else 0, dtype=torch.float32)
    return scalar, x.new_empty(x.shape if need_dx else 0), dw, db, torch.empty_like(scalar)


def fp8_backward(dloss, dx, dw, db, scale):
    return tuple(scaled(grad, dloss, scale, dx.dtype) for grad in (dx, dw, db))


IN_FP8 = Fused(
    "linear_cross_entropy_fp8",
    "(Tensor x, Tensor w, Tensor target, int ignore_index, str reduction, float softcap, Tensor? num_items,"
    " Tensor b, bool need_dx, bool need_dw, bool need_db) -> (Tensor, Tensor, Tensor, Tensor, Tensor)", fp8_forward, _fp8_fake,
    "(Tensor dloss, Tensor dx, Tensor dw, Tensor db, Tensor scale) -> (Tensor, Tensor, Tensor)", fp8_backward,
    lambda dloss, dx, dw, db, scale: tuple(dx.new_empty(grad.shape) for grad in (dx, dw, db)),
    save=lambda args, results: (results[1:], ()), inside=inside,
    grads_to=(0, 1) + (None,) * 5 + (2,) + (None,) * 3,
    label="linear_cross_entropy[triton_fp8]",
)


def fp8_refuses(x, w, target, reduction="mean", label_smoothing=0.0, precision=None, **options):
    if precision != "fp8":
        return "changes the precision, which is done only where asked for: precision='fp8'"
    if (dtype := autocast_of(x) or x.dtype) != torch.bfloat16:
        return f"x, or the dtype of autocast, must be bfloat16, got {dtype}"
    if reduction == "none":
        return "reduction must be 'mean' or 'sum', got 'none'"
    if label_smoothing:
        return f"label_smoothing must be 0, since E5M2 holds the gradient of all targets too small alike, got {label_smoothing}"
    if w.shape[0] > 1 and w.stride(0) == 0:
        return "w must have rows of its own, since E5M2 holds no gradients that cancel over equal ones, got one row expanded"
    if x.shape[-1] % UNIT:
        return f"x.shape[-1] must be a multiple of {UNIT}, got {x.shape[-1]}"
    return None


def run_fp8(
    x, w, target, ignore_index=-100, reduction="mean", label_smoothing=0.0, softcap=None, num_items=None, b=None,
    precision=None,
):
    b = x.new_empty(0) if b is None else b
    if dtype := autocast_of(x):
        x, w, b = x.to(dtype), w.to(dtype), b.to(dtype)
    grad = torch.is_grad_enabled()
    options = float(softcap or 0.0), kernels.as_tensor(num_items, x.device)
    need = (grad and t.requires_grad for t in (x, w, b))
    return IN_FP8(x, w, target, ignore_index, reduction, *options, b, *need)
