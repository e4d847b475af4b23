"""An MLP in one kernel: the hidden values stay on the chip, and the backward makes the pre-activations again from x.

A program has BLOCK_M rows of x and BLOCK_O columns of y, and walks over blocks of the hidden values. Where O is wider than
BLOCK_O every block of columns makes the hidden values again: with n blocks the first products cost n times what they need.
"""

import re
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from whet import machine
from whet.launch import launcher
from whet.ops._rows import cdiv, power_of_two, unit_rows
from whet.ops.activated_linear import _act_and_slope, formula
from whet.ops.attention.common import dot, dot_add
from whet.ops.mlp import hybrid, recompute
from whet.torch_ops import Fused

MAX_O = 1024  # beyond, the hidden values would be made more than four times
WHOLE_D = 512  # columns of 128 rows of x that fit beside two blocks of the weights: 224 KB


@triton.jit
def _mlp_kernel(
    x_ptr, w_ptr, down_ptr,  # inputs; w is up, or where GATED the rows of gate and up in turns
    y_ptr,  # output
    stride_xm, stride_wh, stride_do, stride_ym,
    M, D, H, O, WIDE,  # noqa: E741
    BLOCK_M: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, WHOLE: tl.constexpr,
    GATED: tl.constexpr, RELU2: tl.constexpr, SILU: tl.constexpr, TANH: tl.constexpr,
):
    """y = act(x @ up.T) @ down.T, with a gate (act(x @ gate.T) * (x @ up.T)) @ down.T.  One program, BLOCK_M x BLOCK_O of y.

    Fuses   both products and the activation: no hidden value is written. WHOLE: a row of x is one block, read once; else it
            is read again, from L2, for every block of the hidden values. A gate and its up are neighbouring columns of one
            product, twice as wide as two, and in the same thread. Rows of down have WIDE >= H elements.
    Moves   x, w, down in; y out = (M*D + D*H + H*O + M*O) * itemsize, gated D*H more; from L2 the weights M / BLOCK_M times.
    Rounds  the pre-activations and the hidden values to the storage dtype, as eager does; sums in fp32; y once.
    """
    across = tl.cdiv(O, BLOCK_O)
    m = (tl.program_id(0) // across).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    o = (tl.program_id(0) % across).to(tl.int64) * BLOCK_O + tl.arange(0, BLOCK_O)
    d = tl.arange(0, BLOCK_D)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    x_rows = x_ptr + m[:, None] * stride_xm
    if WHOLE:
        x = tl.load(x_rows + d[None, :], mask=(m < M)[:, None] & (d < D)[None, :], other=0.0)
    y = tl.zeros((BLOCK_M, BLOCK_O), tl.float32)

    COLUMNS: tl.constexpr = 2 * BLOCK_H if GATED else BLOCK_H
    per: tl.constexpr = 2 if GATED else 1
    for start in range(0, H, BLOCK_H):
        h, column = start + tl.arange(0, BLOCK_H), start * per + tl.arange(0, COLUMNS)
        w_rows, in_w = w_ptr + column[None, :].to(tl.int64) * stride_wh, (column < H * per)[None, :]
        if WHOLE:
            pre = dot(x, tl.load(w_rows + d[:, None], mask=in_w & (d < D)[:, None], other=0.0))
        else:
            pre = tl.zeros((BLOCK_M, COLUMNS), tl.float32)
            for at in range(0, D, BLOCK_D):
                k = at + d
                part = tl.load(x_rows + k[None, :], mask=(m < M)[:, None] & (k < D)[None, :], other=0.0)
                pre = dot_add(pre, part, tl.load(w_rows + k[:, None], mask=in_w & (k < D)[:, None], other=0.0))
        pre = pre.to(dtype).to(tl.float32)
        if GATED:
            pre_gate, pre_up = tl.split(tl.reshape(pre, (BLOCK_M, BLOCK_H, 2)))
            hidden, _ = _act_and_slope(pre_gate, x_ptr, RELU2, SILU, TANH)
            hidden *= pre_up
        else:
            hidden, _ = _act_and_slope(pre, x_ptr, RELU2, SILU, TANH)
        hidden = tl.where((h < H)[None, :], hidden, 0.0)  # past the last, infinite times zero may have made NaN
        in_down = (h < WIDE)[:, None] & (o < O)[None, :]
        down = tl.load(down_ptr + o[None, :] * stride_do + h[:, None], mask=in_down, other=0.0)
        y = dot_add(y, hidden.to(dtype), down)
    inside = (m < M)[:, None] & (o < O)[None, :]
    tl.store(y_ptr + m[:, None] * stride_ym + o[None, :], y, mask=inside)


class MlpTile(NamedTuple):
    """Blocks of rows, of y's columns, of hidden values and of x's columns, warps, stages: "64x256x32x512w8s2"."""

    M: int
    O: int  # noqa: E741
    H: int
    D: int
    warps: int
    stages: int

    @classmethod
    def read(cls, text: str) -> "MlpTile":
        found = re.fullmatch(r"(\d+)x(\d+)x(\d+)x(\d+)w(\d+)s(\d+)", text)
        if not found:
            raise ValueError(f"mlp: a tile is written like 64x256x64x64w8s3 (rows, O, H, D, warps, stages), got {text!r}")
        return cls(*map(int, found.groups()))


def default(x, gated: bool) -> MlpTile:
    """What runs untuned. A gate halves the block of hidden values: two weights share the memory, two sums the registers."""
    if x.dtype == torch.float32:
        return MlpTile(32, 128, 32, 32, 8, 2)
    if hopper(x) and x.shape[-1] <= WHOLE_D and x.shape[-1] % 16 == 0:  # addresses of single elements spill 136 bytes
        return MlpTile(128, 256, 16 if gated else 32, WHOLE_D, 8, 2)
    return MlpTile(64, 256, 32 if gated else 64, 64, 8, 3 if machine.this_machine().capability else 1)


def hopper(x) -> bool:
    """Whether x's products run on tensor cores of an SM with 227 KB of shared memory."""
    capability = machine.this_machine().capability or (0, 0)
    return x.dtype != torch.float32 and capability[0] in (9, 10)


def tiles(x, up, down, gate=None, activation="silu"):
    if not hopper(x) or x.shape[-1] % 16:
        return ()
    walked = "128x256x32x64w8s3" if gate is not None else "128x256x64x64w8s3"
    if x.shape[-1] > WHOLE_D:
        return (walked,)
    return ("64x512x16x512w8s2" if gate is not None else "64x512x32x512w8s2", walked)


def fitted(tile: MlpTile, D: int, H: int, O: int) -> dict:  # noqa: E741
    """A launch's constexprs: blocks no wider than what they cut."""
    wide, hidden, deep = (min(block, power_of_two(max(n, 16))) for block, n in ((tile.O, O), (tile.H, H), (tile.D, D)))
    return dict(
        BLOCK_M=tile.M, BLOCK_O=wide, BLOCK_H=hidden, BLOCK_D=deep, WHOLE=deep >= D,
        num_warps=tile.warps, num_stages=tile.stages,
    )


def aligned(down):
    """down with unit stride along its rows, and zeros behind them where they start at no multiple of 16 elements.

    Such rows, of 1365 say, would be loaded one element at a time; the copy is H*O elements.
    """
    down, odd = unit_rows(down), -down.shape[1] % 16
    return F.pad(down, (0, odd)) if odd and down.shape[1] > 16 else down


def forward(x, up, down, gate, activation, need_dx, need_dup, need_ddown, tile):
    (H, D), O = up.shape, down.shape[0]  # noqa: E741
    y = x.new_empty((*x.shape[:-1], O))
    flat, down, gated = unit_rows(x), aligned(down), gate is not None
    if M := flat.shape[0]:
        w = torch.stack((gate, up), 1).view(2 * H, D) if gated else unit_rows(up)  # a copy of both, 3 MB at 512 x 1408
        cut = fitted(MlpTile.read(tile) if tile else default(x, gated), D, H, O)
        launcher(_mlp_kernel)[(cdiv(M, cut["BLOCK_M"]) * cdiv(O, cut["BLOCK_O"]),)](
            flat, w, down, y, flat.stride(0), w.stride(0), down.stride(0), O,
            M, D, H, O, down.shape[1], **cut, GATED=gated, **formula(activation),
        )
    return y


def fused(gated: bool) -> Fused:
    """Without a gate and with one: the argument is there in both, its gradient is not."""
    return Fused(
        "mlp_gated" if gated else "mlp",
        f"(Tensor x, Tensor up, Tensor down, Tensor? gate, {hybrid.NEED}, str tile) -> Tensor", forward,
        lambda x, up, down, *rest: x.new_empty((*x.shape[:-1], down.shape[0])),
        recompute.BWD_SCHEMA, recompute.backward, recompute.bwd_fake,
        save=recompute.kept,
        grads_to=(0, 1, 2, 3 if gated else None, None, None, None, None, None),
        bwd_inside=recompute.inside_backward, label="mlp[triton]",
    )


FUSED, GATED = fused(False), fused(True)


def refuses(x, up, down, gate=None, activation="silu"):
    if down.shape[0] > MAX_O:
        return f"down must have at most {MAX_O} rows, got {down.shape[0]}: the hidden values would be made over and over"
    return hybrid.refuses(x, up, down, gate, activation)


def run(x, up, down, gate=None, activation="silu", tile=""):
    given, need = hybrid.operands(x, up, down, gate)
    return (FUSED if gate is None else GATED)(*given, activation, *need, tile)
