"""linear_cross_entropy in FP8: its three products on the FP8 tensor cores, and the kernel that prepares two of them."""

import torch
import triton
import triton.language as tl

from whet.launch import launcher
from whet.op import autocast_of
from whet.ops import _cross_entropy as kernels
from whet.ops._cross_entropy import LOG2E, _gradient, _narrow
from whet.ops._fp8 import E4M3, E5M2, UNIT, casts_in_ptx, e5m2_bytes, e5m2_four, padded, product, quantized, widened
from whet.ops._loss_chunks import CHUNK_BYTES, chunks, scaled, sum_dtype
from whet.ops._rows import cdiv, unit_rows
from whet.torch_ops import Fused

NO_FP8 = "computes in the inputs' precision; precision='fp8' is served by triton_fp8, eager and compile"
STEEP = tl.constexpr(32768.0)  # the gradient of a logit, within -1..1, is held as 2^15 times that: E5M2 ends at 57344
SHORT = 1024  # of D: so few products may be added in 14 bits, inside the tensor cores alone
TILES = 3  # a program, of 128 rows by 64 columns: what is known of the rows is loaded once; 50304 columns are 262 times three
TOGETHER = 2  # chunks whose products with dlogits.T are one: its sums go to memory that much less often


@triton.jit
def _softmax_of_rows(target_ptr, stats_ptr, stride_stats, m, exists, ignore_index):
    """Which of the rows m count, their maxima, and their log_mass: infinite where they do not, no probability for any."""
    target = tl.load(target_ptr + m, mask=exists, other=ignore_index)
    counts = (target != ignore_index) & exists
    top = tl.load(stats_ptr + m, mask=counts, other=0.0)
    return counts, top, tl.load(stats_ptr + stride_stats + m, mask=counts, other=float("inf"))


@triton.jit
def _steep(z, weight, top, log_mass, softcap, HAS_SOFTCAP: tl.constexpr):
    """2^15 (softmax(z) - weight), through the softcap.

    Of a difference first, in which no large logits are left; then one multiply-add and one exponential.
    """
    if HAS_SOFTCAP:
        return _gradient(z, weight, top, log_mass, softcap, HAS_SOFTCAP) * STEEP
    else:
        return tl.exp2((z - top) * LOG2E - (log_mass * LOG2E - 15.0)) - weight * STEEP


@triton.jit
def _put_targets(
    z_ptr, target_ptr, stats_ptr, dz_ptr, turned_ptr, stride_zm, stride_stats, stride_turned, m, start, end,
    M, P, ignore_index, softcap, HAS_SOFTCAP: tl.constexpr, IN_PTX: tl.constexpr,
):
    """What the targets of the rows m that lie from start to end have as their gradient, in both places."""
    target = tl.load(target_ptr + m, mask=m < M, other=ignore_index).to(tl.int64)
    here = (m < M) & (target != ignore_index) & (target >= start) & (target < end)
    z = tl.load(z_ptr + m * stride_zm + target, mask=here, other=0.0).to(tl.float32)
    top = tl.load(stats_ptr + m, mask=here, other=0.0)
    log_mass = tl.load(stats_ptr + stride_stats + m, mask=here, other=0.0)
    byte = e5m2_bytes(_steep(z, 1.0, top, log_mass, softcap, HAS_SOFTCAP), IN_PTX)
    tl.store(dz_ptr + m * P + target, byte, mask=here)
    tl.store(turned_ptr.to(tl.pointer_type(tl.uint8)) + target * (4 * stride_turned) + m, byte, mask=here)


@triton.jit
def _fp8_dlogits_kernel(
    z_ptr, target_ptr, stats_ptr,  # inputs
    dz_ptr, turned_ptr,  # outputs: (M, P) bytes; (P, fours) int32 of four rows' bytes each
    stride_zm, stride_stats, stride_turned,
    M, V, P, fours, ignore_index, softcap,
    BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr, TILES: tl.constexpr, HAS_SOFTCAP: tl.constexpr, IN_PTX: tl.constexpr,
):
    """dz = E5M2(2^15 (softmax(z) - onehot(target))), zero where ignored, and its transpose.  A program, 4 BLOCK_M rows.

    Fuses   softmax, the one-hot, the softcap's slope, the rounding and the transpose; zeros up to P and to 4 * fours rows.
            Targets, one a row, and the columns from V to P, fewer than 16, are written over what the tiles have there.
    Moves   z in; dz out, a byte an element, twice. Four rows are turned as one word: shared memory is slow at single bytes.
    Rounds  to E5M2 once. 2^-32 and less of a row's probability is nothing.
    """
    softcap = _narrow(softcap)
    pid = tl.program_id(0)
    blocks = tl.cdiv(P, BLOCK_V * TILES)
    first_four, first = (pid // blocks).to(tl.int64) * BLOCK_M, (pid % blocks) * (BLOCK_V * TILES)
    row, left = tl.arange(0, BLOCK_M) * 4, tl.minimum(M - 4 * first_four, 4 * BLOCK_M).to(tl.int32)
    four, in_fours = first_four + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_M) < fours - first_four
    m = 4 * four
    in_a, top_a, mass_a = _softmax_of_rows(target_ptr, stats_ptr, stride_stats, m, row < left, ignore_index)
    in_b, top_b, mass_b = _softmax_of_rows(target_ptr, stats_ptr, stride_stats, m + 1, row + 1 < left, ignore_index)
    in_c, top_c, mass_c = _softmax_of_rows(target_ptr, stats_ptr, stride_stats, m + 2, row + 2 < left, ignore_index)
    in_d, top_d, mass_d = _softmax_of_rows(target_ptr, stats_ptr, stride_stats, m + 3, row + 3 < left, ignore_index)
    end = tl.minimum(first + BLOCK_V * TILES, P)
    for start in range(first, end, BLOCK_V):
        v = start + tl.arange(0, BLOCK_V)
        at, in_row = z_ptr + m[:, None] * stride_zm + v[None, :], (v < P)[None, :]
        # All loads first, so that they wait together. Their masks are those of whole loads, since V may be odd.
        a = tl.load(at, mask=in_a[:, None] & in_row, other=0.0)
        b = tl.load(at + stride_zm, mask=in_b[:, None] & in_row, other=0.0)
        c = tl.load(at + 2 * stride_zm, mask=in_c[:, None] & in_row, other=0.0)
        d = tl.load(at + 3 * stride_zm, mask=in_d[:, None] & in_row, other=0.0)
        a = _steep(widened(a, IN_PTX), 0.0, top_a[:, None], mass_a[:, None], softcap, HAS_SOFTCAP)
        b = _steep(widened(b, IN_PTX), 0.0, top_b[:, None], mass_b[:, None], softcap, HAS_SOFTCAP)
        c = _steep(widened(c, IN_PTX), 0.0, top_c[:, None], mass_c[:, None], softcap, HAS_SOFTCAP)
        d = _steep(widened(d, IN_PTX), 0.0, top_d[:, None], mass_d[:, None], softcap, HAS_SOFTCAP)
        a, b, c, d, word = e5m2_four(a, b, c, d, IN_PTX)
        at = dz_ptr + m[:, None] * P + v[None, :]
        tl.store(at, a, mask=(row < left)[:, None] & in_row)
        tl.store(at + P, b, mask=(row + 1 < left)[:, None] & in_row)
        tl.store(at + 2 * P, c, mask=(row + 2 < left)[:, None] & in_row)
        tl.store(at + 3 * P, d, mask=(row + 3 < left)[:, None] & in_row)
        to = turned_ptr + v[:, None].to(tl.int64) * stride_turned + four[None, :]
        tl.store(to, tl.trans(word), mask=(v < P)[:, None] & in_fours[None, :])

    tl.debug_barrier()  # every tile is stored before parts of it are stored over
    m = 4 * first_four + tl.arange(0, 4 * BLOCK_M)
    _put_targets(
        z_ptr, target_ptr, stats_ptr, dz_ptr, turned_ptr, stride_zm, stride_stats, stride_turned, m, first, tl.minimum(end, V),
        M, P, ignore_index, softcap, HAS_SOFTCAP, IN_PTX,
    )
    if end > V:
        v = V + tl.arange(0, 16)
        zeros = tl.zeros((4 * BLOCK_M, 16), dtype=tl.uint8)
        tl.store(dz_ptr + m[:, None] * P + v[None, :], zeros, mask=(m < M)[:, None] & (v < P)[None, :])
        to = turned_ptr + v[:, None].to(tl.int64) * stride_turned + four[None, :]
        tl.store(to, tl.zeros((16, BLOCK_M), dtype=tl.int32), mask=(v < P)[:, None] & in_fours[None, :])


def dlogits(z, V, target, stats, ignore_index, softcap, dz, turned):
    """Fill dz (M, P), and turned (P, a multiple of four and at least M) with its transpose, from z (M, P) and its stats.

    P is the least multiple of UNIT that is not below V.
    """
    (M, P), words = z.shape, turned.view(torch.int32)
    fours, strides = words.shape[1], (z.stride(0), stats.stride(0), words.stride(0))
    launcher(_fp8_dlogits_kernel)[(cdiv(fours, 32) * cdiv(P, 64 * TILES),)](
        z, target, stats, dz.view(torch.uint8), words, *strides, M, V, P, fours, ignore_index, softcap,
        BLOCK_M=32, BLOCK_V=64, TILES=TILES, HAS_SOFTCAP=softcap > 0, IN_PTX=casts_in_ptx(), num_warps=4,
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
