"""What cross_entropy and linear_cross_entropy share: a row of logits to its loss, its softmax and its gradient."""

import torch
import triton
import triton.language as tl

from whet.launch import launcher
from whet.ops._rows import cdiv, power_of_two

LOWEST = tl.constexpr(-3.4028234663852886e38)  # of fp32, and finite: a row that starts with -inf keeps exp(z - top) defined
LOG2E = tl.constexpr(1.4426950408889634)  # for tl.exp2, one instruction: tl.exp is five, three of them for what is below 2^-126


@triton.jit
def _tanh(x):
    """The odd polynomial near zero, where 1 - exp(-2|x|) cancels; under two fp32 steps everywhere."""
    a = tl.abs(x)
    e = tl.exp(-2.0 * a)
    q = x * x
    near = a * (1.0 + q * (-0.33333334 + q * (0.13333334 + q * (-0.05396825 + q * 0.021869488))))
    t = tl.where(a < 0.3, near, (1.0 - e) / (1.0 + e))
    return tl.where(x < 0.0, -t, t)


@triton.jit
def _narrow(number):
    """A float argument in 32 bits: Inductor hands it over in 64."""
    return (tl.full([], 1.0, tl.float32) * number).to(tl.float32)


@triton.jit
def _capped(z, softcap, HAS_SOFTCAP: tl.constexpr):
    return softcap * _tanh(z / softcap) if HAS_SOFTCAP else z


@triton.jit
def _with_tile(z, tops, masses, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr, GROUP: tl.constexpr):
    """tops and masses, the maxima and the sums of exp(z - top) of groups of columns, with those of one more tile in them."""
    z = tl.reshape(z, (BLOCK_R, BLOCK_V // GROUP, GROUP))
    higher = tl.maximum(tops, tl.max(tl.max(z, axis=2), axis=0))
    sums = tl.sum(tl.sum(tl.exp2((z - higher[None, :, None]) * LOG2E), axis=2), axis=0)
    return higher, masses * tl.exp2((tops - higher) * LOG2E) + sums


@triton.jit
def _softmax_of_row(
    row_ptr, V, P, softcap,
    BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr, GROUP: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SMOOTHING: tl.constexpr,
):
    """top = max z, log_mass = log(sum exp(z - top)), with smoothing mean z, of one row, read once; V = 0 reads nothing.

    A tile is (BLOCK_R, BLOCK_V), its rows and GROUP neighbouring columns in the same thread: the running maximum needs no
    barrier, and rescaling costs 1 / (BLOCK_R * GROUP) of an exp per element. Whole tiles have no mask; that of the last one is
    of whole loads, since V may be odd.
    """
    v = tl.arange(0, BLOCK_R)[:, None] * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
    tops = tl.full((BLOCK_V // GROUP,), LOWEST, tl.float32)
    masses = tl.zeros((BLOCK_V // GROUP,), tl.float32)
    totals = tl.zeros((BLOCK_V,), tl.float32)
    whole = V // (BLOCK_R * BLOCK_V) * (BLOCK_R * BLOCK_V)
    for start in range(0, whole, BLOCK_R * BLOCK_V):
        z = _capped(tl.load(row_ptr + start + v).to(tl.float32), softcap, HAS_SOFTCAP)
        tops, masses = _with_tile(z, tops, masses, BLOCK_R, BLOCK_V, GROUP)
        if HAS_SMOOTHING:
            totals += tl.sum(z, axis=0)
    if whole < V:
        z = tl.load(row_ptr + whole + v, mask=whole + v < P, other=0.0).to(tl.float32)
        z = tl.where(whole + v < V, _capped(z, softcap, HAS_SOFTCAP), float("-inf"))
        tops, masses = _with_tile(z, tops, masses, BLOCK_R, BLOCK_V, GROUP)
        if HAS_SMOOTHING:
            totals += tl.sum(tl.where(whole + v < V, z, 0.0), axis=0)
    top = tl.max(tops, axis=0)
    return top, tl.log(tl.sum(masses * tl.exp2((tops - top) * LOG2E), axis=0)), tl.sum(totals, axis=0) / V


@triton.jit
def _loss(top, log_mass, mean, at_target, smoothing, HAS_SMOOTHING: tl.constexpr):
    """lse - z[target] as (top - z) + log_mass: nothing cancels when the target is the maximum."""
    if HAS_SMOOTHING:
        return (1.0 - smoothing) * (top - at_target) + smoothing * (top - mean) + log_mass
    else:
        return (top - at_target) + log_mass


@triton.jit
def _gradient(z, weight, top, log_mass, softcap, HAS_SOFTCAP: tl.constexpr):
    """d loss / d z: softmax minus weight, what the smoothed one-hot target holds there, through the softcap."""
    capped = _capped(z, softcap, HAS_SOFTCAP)
    d = tl.exp2((capped - top) * LOG2E - log_mass * LOG2E) - weight
    if HAS_SOFTCAP:
        d *= 1.0 - (capped / softcap) * (capped / softcap)
    return d


@triton.jit
def _put_gradient(
    row_ptr, to_ptr, v, start, end, target, counts, top, log_mass, factor, V, P, smoothing, softcap,
    HAS_SOFTCAP: tl.constexpr, HAS_SMOOTHING: tl.constexpr,
):
    """factor times the gradient of one row's columns v, from start to end, to to_ptr; zero where ignored and past V.

    Most tiles are whole and without the target: there the mask and the one-hot, three times the instructions, are left out.
    """
    share = smoothing / V if HAS_SMOOTHING else 0.0
    if counts & (end <= V) & ((target < start) | (target >= end)):
        d = _gradient(tl.load(row_ptr + v).to(tl.float32), share, top, log_mass, softcap, HAS_SOFTCAP)
        tl.store(to_ptr + v, d * factor)
    else:
        z = tl.load(row_ptr + v, mask=(v < P) & counts, other=0.0).to(tl.float32)
        here = tl.where((target >= start) & (target < end), target, -1).to(tl.int32)
        weight = share + tl.where(v == here, 1.0 - smoothing, 0.0)
        d = _gradient(z, weight, top, log_mass, softcap, HAS_SOFTCAP)
        tl.store(to_ptr + v, tl.where((v < V) & counts, d * factor, 0.0), mask=v < P)


@triton.jit
def _loss_kernel(
    z_ptr, target_ptr,  # inputs
    loss_ptr, stats_ptr,  # outputs: (M,), (2, M)
    stride_zm, stride_stats,
    V, P, ignore_index, smoothing, softcap,
    BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr, GROUP: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SMOOTHING: tl.constexpr,
):
    """loss = log(sum exp z) - z[target] per row, and the two numbers its softmax is made again from.  One program, one row.

    Fuses   softcap, softmax, label smoothing and the pick of the target: a row is read once, an ignored one never.
    Moves   z, target in; loss, stats out = M*V*itemsize + 20*M.  Unfused: 3*M*V and more.
    Rounds  nothing: fp32 inside and out.
    """
    smoothing, softcap = _narrow(smoothing), _narrow(softcap)
    m = tl.program_id(0).to(tl.int64)
    row_ptr = z_ptr + m * stride_zm
    target = tl.load(target_ptr + m).to(tl.int64)
    counts = target != ignore_index

    at_target = tl.load(row_ptr + target, mask=(target >= 0) & (target < V), other=0.0).to(tl.float32)
    at_target = _capped(at_target, softcap, HAS_SOFTCAP)
    top, log_mass, mean = _softmax_of_row(
        row_ptr, tl.where(counts, V, 0), P, softcap, BLOCK_R, BLOCK_V, GROUP, HAS_SOFTCAP, HAS_SMOOTHING
    )
    loss = _loss(top, log_mass, mean, at_target, smoothing, HAS_SMOOTHING)
    tl.store(loss_ptr + m, tl.where(counts, loss, 0.0))
    tl.store(stats_ptr + m, top)
    tl.store(stats_ptr + stride_stats + m, log_mass)


@triton.jit
def _dlogits_kernel(
    z_ptr, target_ptr, stats_ptr, dloss_ptr, scale_ptr,  # inputs
    dz_ptr,  # output, may be z_ptr
    stride_zm, stride_dzm, stride_stats, stride_dloss,
    V, P, ignore_index, smoothing, softcap,
    BLOCK_V: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SMOOTHING: tl.constexpr,
):
    """dz = (softmax(z) - onehot(target)) * dloss * scale, zero where ignored.  One program, BLOCK_V columns of one row.

    Fuses   softmax, the one-hot, the softcap's slope and the upstream gradient.
    Moves   z in, dz out = 2*M*V*itemsize.
    Rounds  once, at the store.
    """
    smoothing, softcap = _narrow(smoothing), _narrow(softcap)
    pid = tl.program_id(0)
    blocks = tl.cdiv(P, BLOCK_V)
    m = (pid // blocks).to(tl.int64)
    start = (pid % blocks) * BLOCK_V
    v = start + tl.arange(0, BLOCK_V)
    target = tl.load(target_ptr + m).to(tl.int64)
    counts = target != ignore_index

    top, log_mass = tl.load(stats_ptr + m), tl.load(stats_ptr + stride_stats + m)
    dloss = tl.load(dloss_ptr + m * stride_dloss) * tl.load(scale_ptr)
    _put_gradient(
        z_ptr + m * stride_zm, dz_ptr + m * stride_dzm, v, start, start + BLOCK_V, target, counts, top, log_mass, dloss,
        V, P, smoothing, softcap, HAS_SOFTCAP, HAS_SMOOTHING,
    )


@triton.jit
def _loss_and_dlogits_kernel(
    z_ptr, target_ptr,  # z is overwritten with dz
    loss_ptr,
    stride_zm,
    V, P, ignore_index, smoothing, softcap,
    BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr, GROUP: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SMOOTHING: tl.constexpr,
):
    """The loss of a row, then dz = softmax(z) - onehot(target) over it, zero where ignored.  One program, one row.

    Fuses   forward and backward: the second read goes from the end of the row, which is still in L2, to its start.
    Moves   z in, dz out = 2*M*V*itemsize, and of the second read what L2 has lost.
    Rounds  dz once, at the store; fp32 inside.
    """
    smoothing, softcap = _narrow(smoothing), _narrow(softcap)
    m = tl.program_id(0).to(tl.int64)
    row_ptr = z_ptr + m * stride_zm
    target = tl.load(target_ptr + m).to(tl.int64)
    counts = target != ignore_index

    at_target = tl.load(row_ptr + target, mask=(target >= 0) & (target < V), other=0.0).to(tl.float32)
    at_target = _capped(at_target, softcap, HAS_SOFTCAP)
    top, log_mass, mean = _softmax_of_row(
        row_ptr, tl.where(counts, V, 0), P, softcap, BLOCK_R, BLOCK_V, GROUP, HAS_SOFTCAP, HAS_SMOOTHING
    )
    loss = _loss(top, log_mass, mean, at_target, smoothing, HAS_SMOOTHING)
    tl.store(loss_ptr + m, tl.where(counts, loss, 0.0))

    tl.debug_barrier()  # every warp has read its z[target] before any warp overwrites the row
    tile = tl.arange(0, BLOCK_R)[:, None] * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
    tiles = tl.cdiv(P, BLOCK_R * BLOCK_V)
    for done in range(0, tiles):
        start = (tiles - 1 - done) * (BLOCK_R * BLOCK_V)
        _put_gradient(
            row_ptr, row_ptr, start + tile, start, start + BLOCK_R * BLOCK_V, target, counts, top, log_mass, 1.0,
            V, P, smoothing, softcap, HAS_SOFTCAP, HAS_SMOOTHING,
        )


@triton.jit
def _reduce_kernel(
    loss_ptr, target_ptr, num_items_ptr,  # inputs
    out_ptr, scale_ptr,  # outputs, one number each
    M, ignore_index,
    BLOCK_M: tl.constexpr, MEAN: tl.constexpr, HAS_NUM_ITEMS: tl.constexpr,
):
    """out = sum(loss) / divisor, scale = 1 / divisor; divisor is the count of targets, num_items, or 1.  One program.

    Fuses   the sum, the count and the division, on the device: no launch waits for a number.
    Moves   loss, target in = 12*M.
    Rounds  fp32 sums in a fixed order. No target counts: out is 0/0 as in torch, scale 0, so that gradients are zero.
    """
    total = tl.zeros((BLOCK_M,), tl.float32)
    count = tl.zeros((BLOCK_M,), tl.int32)
    for start in range(0, M, BLOCK_M):
        m = (start + tl.arange(0, BLOCK_M)).to(tl.int64)
        total += tl.load(loss_ptr + m, mask=m < M, other=0.0)
        count += ((tl.load(target_ptr + m, mask=m < M, other=0) != ignore_index) & (m < M)).to(tl.int32)
    loss = tl.sum(total, axis=0)
    counted = tl.sum(count, axis=0).to(tl.float32)
    divisor = tl.full((), 1.0, tl.float32)
    if HAS_NUM_ITEMS:
        divisor = tl.load(num_items_ptr).to(tl.float32)
    elif MEAN:
        divisor = counted
    tl.store(out_ptr, tl.div_rn(loss, divisor))
    tl.store(scale_ptr, tl.where(counted > 0.0, tl.div_rn(1.0, divisor), 0.0))


def tile(P: int, itemsize: int) -> dict:
    """BLOCK_R, BLOCK_V, GROUP, num_warps of the one-row kernels: eight columns a thread, two deep; deeper or wider was slower.

    A group is one load of a thread.
    """
    BLOCK_V = min(power_of_two(max(P, 16)), 2048 if P <= 65536 else 4096)
    BLOCK_R = min(2, power_of_two(cdiv(P, BLOCK_V)))
    return dict(BLOCK_R=BLOCK_R, BLOCK_V=BLOCK_V, GROUP=16 // itemsize, num_warps=max(1, BLOCK_V // 256))


def losses(z, V, target, ignore_index, smoothing, softcap, loss, stats):
    """Fill loss (M,) and stats (2, M) from the first V columns of z (M, P), unit stride in the row."""
    M, P = z.shape
    if M:
        launcher(_loss_kernel)[(M,)](
            z, target, loss, stats, z.stride(0), stats.stride(0), V, P, ignore_index, smoothing, softcap,
            HAS_SOFTCAP=softcap > 0, HAS_SMOOTHING=smoothing > 0, **tile(P, z.element_size()),
        )


def losses_and_dlogits(z, V, target, ignore_index, smoothing, softcap, loss):
    """Fill loss (M,) and overwrite z (M, P) with its unscaled gradient; columns from V on become zero."""
    M, P = z.shape
    if M:
        launcher(_loss_and_dlogits_kernel)[(M,)](
            z, target, loss, z.stride(0), V, P, ignore_index, smoothing, softcap,
            HAS_SOFTCAP=softcap > 0, HAS_SMOOTHING=smoothing > 0, **tile(P, z.element_size()),
        )


def dlogits(z, V, target, stats, dloss, scale, ignore_index, smoothing, softcap, dz):
    """Fill dz (M, P) from z, its stats and the upstream gradient, one number or one per row; dz may be z."""
    M, P = z.shape
    dloss = dloss.reshape(-1)
    if M:
        BLOCK_V = min(power_of_two(max(P, 16)), 4096)
        launcher(_dlogits_kernel)[(M * cdiv(P, BLOCK_V),)](
            z, target, stats, dloss, scale, dz,
            z.stride(0), dz.stride(0), stats.stride(0), 0 if dloss.numel() == 1 else dloss.stride(0),
            V, P, ignore_index, smoothing, softcap,
            BLOCK_V=BLOCK_V, HAS_SOFTCAP=softcap > 0, HAS_SMOOTHING=smoothing > 0, num_warps=max(1, min(8, BLOCK_V // 256)),
        )
    return dz


def reduced(loss, target, ignore_index, mean, num_items):
    """(sum of loss / divisor, 1 / divisor), both on the device."""
    out, scale = loss.new_empty(()), loss.new_empty(())
    launcher(_reduce_kernel)[(1,)](
        loss, target, loss if num_items is None else num_items, out, scale, loss.numel(), ignore_index,
        BLOCK_M=2048, MEAN=mean, HAS_NUM_ITEMS=num_items is not None, num_warps=8,
    )
    return out, scale


def as_tensor(num_items, device: torch.device) -> torch.Tensor | None:
    """num_items for the kernels: a number is filled in on the device, which waits for nothing."""
    if num_items is None or isinstance(num_items, torch.Tensor):
        return num_items
    return torch.full((), float(num_items), dtype=torch.float32, device=device)
