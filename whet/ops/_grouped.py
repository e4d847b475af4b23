"""Second layers of K small MLPs: SiLU and the O-wide products of all of them at once, and their gradients.

pre is (M, K, W): of each group's W columns the first H count, and those after them are padding. down is padded with zeros
as it is handed to the kernels, which is a copy of few values, so that rows of both are whole loads.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from whet.launch import launcher
from whet.ops._rows import cdiv, column_sum, power_of_two, programs

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
BLOCK_O = 16  # the least that a tensor core multiplies, and the widest output
BLOCK_H = 64  # of 16-bit values: a row of a tile is a whole cache line
ROWS, BWD_ROWS = 64, 32  # BLOCK_M: 60 and 96 registers a thread on sm_90; at 64 rows the backward takes 172
PER_SM = 32  # programs of the backward: several turns of those that an SM holds, since they do not end together


@triton.jit
def _dot_add(acc, a, b):
    """acc + a @ b in fp32, of fp32 operands too. The interpreter's product reads bf16 as integers, so there it is widened."""
    if INTERPRETED:
        acc = tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    else:
        acc = tl.dot(a, b, acc, input_precision="ieee")
    return acc


@triton.jit
def _grouped_down_kernel(
    pre_ptr, down_ptr,  # (M, K, W), (K, O, W), its padding zeros
    y_ptr,  # (M, K, O)
    M, K, H, W, O,  # noqa: E741
    BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_O: tl.constexpr, IS_PADDED: tl.constexpr,
):
    """y[m, k] = silu(pre[m, k]) @ down[k].T.  One program, BLOCK_M rows of one group.

    Fuses   SiLU into the product of all groups: the activated hidden values stay in registers.
    Moves   pre in; y out = (M*K*W + M*K*O) * itemsize; down, once for each block of rows, from the cache.  F.silu, then a
            batched product: 3*M*K*H + M*K*O.
    Rounds  silu(pre) to storage dtype, as eager does; sums in fp32; y once.
    """
    pid = tl.program_id(0)
    k = (pid % K).to(tl.int64)
    m = (pid // K).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    o = tl.arange(0, BLOCK_O)
    pre_rows = pre_ptr + (m[:, None] * K + k) * W
    down_rows = down_ptr + (k * O + o[None, :]) * W
    y = tl.zeros((BLOCK_M, BLOCK_O), dtype=tl.float32)
    for start in range(0, W, BLOCK_H):
        h = start + tl.arange(0, BLOCK_H)
        pre = tl.load(pre_rows + h[None, :], mask=(m < M)[:, None] & (h < W)[None, :], other=0.0).to(tl.float32)
        if IS_PADDED:
            pre = tl.where((h < H)[None, :], pre, 0.0)
        down = tl.load(down_rows + h[:, None], mask=(h < W)[:, None] & (o < O)[None, :], other=0.0)
        y = _dot_add(y, (pre * tl.sigmoid(pre)).to(down.dtype), down)
    tl.store(y_ptr + (m[:, None] * K + k) * O + o[None, :], y, mask=(m < M)[:, None] & (o < O)[None, :])


@triton.jit
def _grouped_down_bwd_kernel(
    dy_ptr, pre_ptr, down_ptr,  # (M, K, O), (M, K, W), (K, O, W), its padding zeros
    dpre_ptr, partial_ptr,  # (M, K, W), (parts, K, O, W) in fp32; None where it is not asked for
    M, K, H, W, O,  # noqa: E741
    BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_O: tl.constexpr, IS_PADDED: tl.constexpr,
):
    """dpre = (dy @ down) * silu'(pre);  partial = dy.T @ silu(pre), of a part's rows.  One program, BLOCK_H columns of a group.

    Fuses   the gradients of the product and of SiLU, which is made again: dh and silu(pre) stay in registers. `column_sum`
            adds the parts. Programs stride over the rows.
    Moves   pre in; dpre out = 2*M*K*W * itemsize; dy, once for each block of columns, from the cache; one fp32 row per part.
            Autograd of the stock calls: 5*M*K*H, and 2 more where it copies dh to pre's layout.
    Rounds  silu(pre) to storage dtype, as eager does; sums in fp32, in a fixed order; dpre once.
    """
    across = tl.cdiv(W, BLOCK_H)
    k = (tl.program_id(0) // across).to(tl.int64)
    h = (tl.program_id(0) % across) * BLOCK_H + tl.arange(0, BLOCK_H)
    o = tl.arange(0, BLOCK_O)
    down_at = (k * O + o[:, None]) * W + h[None, :]
    in_down = (o < O)[:, None] & (h < W)[None, :]
    down = tl.load(down_ptr + down_at, mask=in_down, other=0.0)
    total = tl.zeros((BLOCK_O, BLOCK_H), dtype=tl.float32)
    for i in range(tl.program_id(1), tl.cdiv(M, BLOCK_M), tl.num_programs(1)):
        m = (i * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
        group = m[:, None] * K + k
        inside = (m < M)[:, None] & (h < W)[None, :]
        pre = tl.load(pre_ptr + group * W + h[None, :], mask=inside, other=0.0).to(tl.float32)
        if IS_PADDED:
            pre = tl.where((h < H)[None, :], pre, 0.0)
        dy = tl.load(dy_ptr + group * O + o[None, :], mask=(m < M)[:, None] & (o < O)[None, :], other=0.0)
        p = tl.sigmoid(pre)
        if dpre_ptr is not None:
            dpre = _dot_add(tl.zeros((BLOCK_M, BLOCK_H), dtype=tl.float32), dy, down) * (p + pre * p * (1.0 - p))
            if IS_PADDED:
                dpre = tl.where((h < H)[None, :], dpre, 0.0)
            tl.store(dpre_ptr + group * W + h[None, :], dpre, mask=inside)
        if partial_ptr is not None:
            total = _dot_add(total, tl.trans(dy), (pre * p).to(dy.dtype))
    if partial_ptr is not None:
        part = tl.program_id(1).to(tl.int64) * K * O * W
        tl.store(partial_ptr + part + down_at, total, mask=in_down)


def blocks(M: int, W: int, most_rows: int) -> dict:
    """BLOCK_M and BLOCK_H: no larger than they must be where there are few rows or columns."""
    return dict(BLOCK_M=min(most_rows, power_of_two(max(M, 16))), BLOCK_H=min(BLOCK_H, power_of_two(max(W, 16))))


def widened(down, W: int):
    """down with rows of W values, contiguous."""
    return F.pad(down, (0, W - down.shape[2])) if down.shape[2] < W else down.contiguous()


def forward(pre, down):
    """y (M, K, O) of pre (M, K, W), contiguous, and down (K, O, H)."""
    (M, K, W), (_, O, H) = pre.shape, down.shape  # noqa: E741
    y = torch.empty(M, K, O, dtype=pre.dtype, device=pre.device)
    if M:
        tile = blocks(M, W, ROWS) | dict(BLOCK_O=BLOCK_O, IS_PADDED=W > H, num_warps=4, num_stages=3)
        launcher(_grouped_down_kernel)[(cdiv(M, tile["BLOCK_M"]) * K,)](pre, widened(down, W), y, M, K, H, W, O, **tile)
    return y


def backward(dy, pre, down, need_dpre, need_ddown):
    """dpre (M, K, W) and ddown (K, O, H), each None where it is not asked for. dy and pre are contiguous."""
    (M, K, W), (_, O, H) = pre.shape, down.shape  # noqa: E741
    dpre = torch.empty_like(pre) if need_dpre else None
    if not M:
        return dpre, down.new_zeros(K, O, H) if need_ddown else None
    tile = blocks(M, W, BWD_ROWS) | dict(BLOCK_O=BLOCK_O, IS_PADDED=W > H, num_warps=4, num_stages=3)
    turns, across = cdiv(M, tile["BLOCK_M"]), K * cdiv(W, tile["BLOCK_H"])
    most = max(1, programs(turns * across, PER_SM) // across)
    parts = cdiv(turns, cdiv(turns, most))  # as few as take as long
    partial = torch.empty(parts, K * O * W, dtype=torch.float32, device=pre.device) if need_ddown else None
    launcher(_grouped_down_bwd_kernel)[(across, parts)](
        dy, pre, widened(down, W), dpre, partial, M, K, H, W, O, **tile
    )
    if partial is None:
        return dpre, None
    ddown = column_sum(partial, torch.empty(K * O * W, dtype=down.dtype, device=down.device))
    return dpre, ddown.view(K, O, W)[..., :H].contiguous()
