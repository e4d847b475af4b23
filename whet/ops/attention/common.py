"""What the kernels of attention share: views of tensors, tiles by name, the edges of a span, a product."""

import re
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from whet import machine
from whet.ops._rows import power_of_two
from whet.ops._turns import add_in_turn

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
# fp32 operands as three TF32 products, 22 of 24 bits: without tensor cores a tile of them does not fit the registers.
FP32 = tl.constexpr("ieee" if torch.version.hip else "tf32x3")
LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453
ONE_BY_LN2 = tl.constexpr(LOG2E)  # LOG2E as kernels can read it
NOWHERE = tl.constexpr(-(2**30) - 1)  # left of what any span reaches
ALIGN = 16  # bytes that a descriptor wants every row, and the first, to start at


class Tile(NamedTuple):
    """BLOCK_M queries, BLOCK_N keys, warps, stages: "64x128w4s2"; "g64x64w4s2" is a kernel in Gluon, for Hopper alone.

    "64x64w4s3r168" holds the compiler to 168 registers a thread: four warps of 168 or fewer run three programs to an SM.
    """

    M: int
    N: int
    warps: int
    stages: int
    gluon: bool = False
    registers: int = 0  # a thread's at most; 0: as many as the compiler wants

    @classmethod
    def read(cls, text: str) -> "Tile":
        found = re.fullmatch(r"(g?)(\d+)x(\d+)w(\d+)s(\d+)(?:r(\d+))?", text)
        if not found:
            raise ValueError(f"attention: a tile is written like 64x128w4s2 (queries, keys, warps, stages), got {text!r}")
        M, N, warps, stages, registers = (int(n or 0) for n in found.groups()[1:])
        return cls(M, N, warps, stages, bool(found[1]), registers)

    @property
    def options(self) -> dict:
        limit = dict(maxnreg=self.registers) if self.registers else {}
        return dict(BLOCK_M=self.M, BLOCK_N=self.N, num_warps=self.warps, num_stages=self.stages) | limit


@triton.jit
def dot(a, b):
    return dot_add(tl.zeros((a.shape[0], b.shape[1]), dtype=tl.float32), a, b)


@triton.jit
def dot_add(acc, a, b):
    """acc + a @ b in fp32. The interpreter's product reads bf16 as integers, so there it is widened."""
    if INTERPRETED:
        acc = tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    elif a.dtype == tl.float32:
        acc = tl.dot(a, b, acc, input_precision=FP32 if a.shape[1] <= 128 else "ieee")  # longer sums show the missing bits
    else:
        acc = tl.dot(a, b, acc)
    return acc


@triton.jit
def seen(i, j, Lk, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):
    """Whether the query aligned with key i sees key j; one is a row and the other a column."""
    see = (j < Lk) & (i == i)
    if HAS_LEFT:
        see = see & (j >= i - left)
    if HAS_RIGHT:
        see = see & (j <= i + right)
    return see


@triton.jit
def lone(i, first_lone, last_lone):
    """Whether the query aligned with key i sees one key alone: see `lone_places`."""
    return (i == first_lone) | (i == last_lone)


@triton.jit
def edges(first, last, L, left, right, BLOCK: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):
    """(lo, full_lo, full_hi, hi): of L positions, [lo, hi) are seen by some of first..last, [full_lo, full_hi) by all.

    All but hi are multiples of BLOCK. The tiles before full_lo and from full_hi on need a mask, those between none.
    """
    lo, full_lo, full_hi, hi = 0, 0, L, L
    if HAS_LEFT:
        lo = tl.maximum(first - left, 0) // BLOCK * BLOCK
        full_lo = tl.cdiv(tl.maximum(last - left, 0), BLOCK) * BLOCK
    if HAS_RIGHT:
        hi = tl.minimum(last + right + 1, L)
        full_hi = tl.minimum(tl.maximum(first + right + 1, 0), L)
    full_lo = tl.minimum(full_lo, tl.cdiv(tl.maximum(hi, 0), BLOCK) * BLOCK)
    full_hi = tl.maximum(full_hi // BLOCK * BLOCK, full_lo)
    return lo, full_lo, full_hi, hi


def block_d(D: int) -> int:
    return max(16, power_of_two(D))


@triton.jit
def rows_of(x, b, h, first, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """ROWS rows of one head, zeros past its last row and column. x is what `view` makes of a tensor."""
    if isinstance(x, tl.core.tensor_descriptor_base):
        tile = x.load([b, h, first, 0]).reshape(ROWS, BLOCK_D)
    else:
        at, inside = _places(x, b, h, first, ROWS, BLOCK_D)
        tile = tl.load(at, mask=inside, other=0.0)
    return tile


@triton.jit
def put_rows(x, b, h, first, value, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Store rows of one head, rounded to x's dtype; those past its last row or column are dropped."""
    if isinstance(x, tl.core.tensor_descriptor_base):
        x.store([b, h, first, 0], value.to(x.dtype).reshape(1, 1, ROWS, BLOCK_D))
    else:
        at, inside = _places(x, b, h, first, ROWS, BLOCK_D)
        tl.store(at, value.to(x[0].dtype.element_ty), mask=inside)


@triton.jit
def add_rows(x, b, h, first, value, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Add rows of one head to x, in fp32, in this program's turn, which is passed on when all has arrived."""
    if isinstance(x, tl.core.tensor_descriptor_base):
        x.atomic_add([b, h, first, 0], value.reshape(1, 1, ROWS, BLOCK_D))
    else:
        at, inside = _places(x, b, h, first, ROWS, BLOCK_D)
        add_in_turn(at, value, inside)


@triton.jit
def _places(x, b, h, first, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    start = x[0] + tl.cast(b, tl.int64) * x[1] + tl.cast(h, tl.int64) * x[2] + tl.cast(first, tl.int64) * x[3]
    row, d = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    return start + row[:, None].to(tl.int64) * x[3] + d[None, :], (first + row < x[4])[:, None] & (d < x[5])[None, :]


def has_descriptors() -> bool:
    """Whether this GPU copies tiles by itself, from a descriptor: Hopper and newer."""
    capability = machine.this_machine().capability
    return capability is not None and capability >= (9, 0)


def view(x: torch.Tensor, rows: int) -> TensorDescriptor | tuple:
    """A tensor as kernels take it: a descriptor of blocks of `rows` rows, or a pointer, strides and sizes."""
    return described(x, rows) if has_descriptors() else pointed(x)


def pointed(x: torch.Tensor) -> tuple:
    return x, *x.stride()[:3], *x.shape[2:]


def described(x: torch.Tensor, rows: int) -> TensorDescriptor:
    return TensorDescriptor(x, *blocks_of(x, rows))


def blocks_of(x: torch.Tensor, rows: int) -> tuple[list[int], list[int], list[int]]:
    """Shape, strides and block of a descriptor."""
    shape, strides = list(x.shape), list(x.stride())
    for d in range(3):
        if shape[d] == 1:
            strides[d] = ALIGN  # of no consequence, but it must be aligned
    return shape, strides, [1, 1, rows, block_d(shape[3])]


def takes(x: torch.Tensor) -> bool:
    """Whether a descriptor can take x, wherever it starts: what is the same for a fake tensor."""
    width = ALIGN // x.element_size()
    strides = [s for s, n in zip(x.stride()[:-1], x.shape[:-1]) if n > 1]
    return x.shape[-1] % width == 0 and x.stride(-1) == 1 and all(s > 0 and s % width == 0 for s in strides)


def ready(x: torch.Tensor) -> torch.Tensor:
    """x itself where a descriptor can take it; else a copy, its rows padded with zeros to whole multiples of 16 bytes."""
    if takes(x):
        return x if x.is_meta or x.data_ptr() % ALIGN == 0 else x.clone()  # not contiguous(): that gives x itself back
    width = ALIGN // x.element_size()
    if x.shape[-1] % width:
        x = F.pad(x, (0, -x.shape[-1] % width))
    return x.contiguous()


def shaped(x: torch.Tensor) -> torch.Tensor:
    """A tensor as `cut` leaves a result for x: the fakes' words for it."""
    return torch.empty_like(x) if takes(x) else x.new_empty(x.shape)


def like(x: torch.Tensor, D: int) -> torch.Tensor:
    """A tensor for a result of D columns, padded as `ready` pads; `[..., :D]` of it is the result."""
    return torch.empty_like(x) if x.shape[-1] == D else x.new_empty(x.shape)


def cut(x: torch.Tensor, D: int) -> torch.Tensor:
    return x if x.shape[-1] == D else x[..., :D].contiguous()


def lone_places(left: int, right: int, Lk: int, dlse: torch.Tensor | None) -> tuple[int, int]:
    """Where a query stands that sees the first key alone, and one that sees the last alone; NOWHERE without such a limit.

    Over one key the weight is 1 whatever its score, whose gradient is 0, to which do v^T - delta only comes near. With a
    gradient of the log-sum-exp it is not 0, and no place is given.
    """
    far = NOWHERE.value
    return -right if right >= 0 and dlse is None else far, Lk - 1 + left if left >= 0 and dlse is None else far


def limits(left: int, right: int) -> dict:
    """The span as kernel arguments: -1 is no limit, and no limit needs to be larger than any length."""
    far = 2**30
    return dict(left=min(left, far), right=min(right, far), HAS_LEFT=left >= 0, HAS_RIGHT=right >= 0)
