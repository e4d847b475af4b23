"""linear_bias: a linear layer with a bias, for training: products as PyTorch makes them, the bias's gradient by a kernel.

Opaque to torch.compile, where Inductor adds up the bias's gradient itself: there F.linear is what to call.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from whet.launch import launcher
from whet.op import Cost, Impl, Op, floating, lay, layout_of, nbytes, rows, same_device
from whet.ops._rows import KERNEL_DTYPES, cdiv, column_sum, power_of_two, programs, unit_rows
from whet.parts import row_pieces
from whet.torch_ops import Fused, may_ask
from whet.values import families

BLOCK_N, ELEMENTS, WARPS = 128, 1024, 4  # of a block of rows: 8 elements a thread, one 16-byte load of bf16, two of fp32
LOADS = 4  # blocks of a turn
PER_SM, TURNS = 16, 2  # programs at most, each of two turns at least: 32 registers a thread on sm_90 leave room for 16


def reference(x, w, b):
    """y = x @ w.T + b.  x (..., K);  w (N, K);  b (N,)."""
    return F.linear(x, w, b)


def inputs(dtype, device, M, K, N, layout="contiguous", w_layout="contiguous"):
    x = lay(torch.randn(M, K, device=device).to(dtype), layout)
    w = lay((max(1, K) ** -0.5 * torch.randn(N, K, device=device)).to(dtype), w_layout)
    return dict(x=x, w=w, b=torch.randn(N, device=device).to(dtype))


def case_of(x, w, b):
    case = dict(M=x.numel() // max(1, x.shape[-1]), K=x.shape[-1], N=w.shape[0], layout=layout_of(x))
    return case if w.is_contiguous() else case | dict(w_layout=layout_of(w))


def check(x, w, b):
    if reason := floating(x=x, w=w, b=b) or same_device(x=x, w=w, b=b):
        return reason
    if x.dim() < 1 or w.dim() != 2 or w.shape[1] != x.shape[-1] or w.numel() < 1:
        return f"w must have shape (N, {x.shape[-1] if x.dim() else 'K'}) to match x.shape[-1], got {tuple(w.shape)}"
    if b.shape != w.shape[:1]:
        return f"b must have shape ({w.shape[0]},) to match w.shape[0], got {tuple(b.shape)}"
    if not torch.is_autocast_enabled(x.device.type):
        for name, t in (("w", w), ("b", b)):
            if t.dtype != x.dtype:
                return f"{name} must have x's dtype {x.dtype} outside autocast, got {t.dtype}"
    return None


def cost(x, w, b):
    M, N = x.numel() // max(1, x.shape[-1]), w.shape[0]
    given, y = nbytes(x, w, b), M * N * x.element_size()
    product = 2 * x.numel() * N
    return Cost(bytes=given + y, flops=product, bwd_bytes=y + nbytes(x, w) + given, bwd_flops=2 * product + M * N)


@triton.jit
def _row_sums_kernel(
    dy_ptr,  # (M, N)
    partial_ptr,  # (parts, N) fp32
    stride_dym,
    M, N,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LOADS: tl.constexpr,
):
    """partial[part] = sum of this part's rows of dy.  One program, BLOCK_N columns of a part, LOADS blocks of rows a turn.

    Fuses   nothing: `column_sum` adds the parts. Programs stride over the rows, the last first: those were written last.
    Moves   dy in = M*N * itemsize; one fp32 row per part out.
    Rounds  nothing: fp32 sums, in a fixed order.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_row = (n < N)[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    turns = tl.cdiv(M, BLOCK_M * LOADS)
    for i in range(tl.program_id(1), turns, tl.num_programs(1)):
        for j in tl.static_range(LOADS):
            m = (((turns - 1 - i) * LOADS + j) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)  # elements may pass 2^31
            inside = (m < M)[:, None] & in_row
            total += tl.load(dy_ptr + m[:, None] * stride_dym + n[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(partial_ptr + tl.program_id(1).to(tl.int64) * N + n, tl.sum(total, axis=0), mask=n < N)


def row_sum(dy):
    """dy.sum(0) of (M, N) with unit stride in N: fp32 inside, rounded once, the same bits every time."""
    M, N = dy.shape
    out = torch.empty(N, dtype=dy.dtype, device=dy.device)
    if not M:
        return out.zero_()
    width = min(BLOCK_N, power_of_two(max(N, 16)))
    height, across = ELEMENTS // width, cdiv(N, width)
    turns = cdiv(M, height * LOADS)
    most = max(1, programs(turns * across, PER_SM) // across)
    parts = cdiv(turns, max(TURNS, cdiv(turns, most)))  # as few as take as long
    partial = torch.empty(parts, N, dtype=torch.float32, device=dy.device)
    launcher(_row_sums_kernel)[(across, parts)](
        dy, partial, dy.stride(0), M, N, BLOCK_M=height, BLOCK_N=width, LOADS=LOADS, num_warps=WARPS
    )
    return column_sum(partial, out)


def forward(x, w, b, need_dx, need_dw, need_db):
    return F.linear(x, w, b)


def backward(dy, x, w, by_column, need_dx, need_dw, need_db):
    """dx, dw and db, each of no elements where it is not asked for; the products are those that autograd makes of addmm.

    by_column   w's columns lie together, as where it is the transpose of a Conv1D's weight: dw is laid out as w is
    db comes first: of a dy that was just written, some is in the cache still.
    """
    flat, K = unit_rows(dy), w.shape[1] if need_dx else 0
    db = row_sum(flat) if need_db else dy.new_empty(0)
    dx = (flat @ w).view(*dy.shape[:-1], K) if need_dx else dy.new_empty(0)
    if not need_dw:
        return dx, dy.new_empty(0), db
    return dx, (rows(x).t() @ flat).t() if by_column else flat.t() @ rows(x), db


def _bwd_fake(dy, x, w, by_column, need_dx, need_dw, need_db):
    N, K = dy.shape[-1], x.shape[-1] if need_dw else 0
    dx = dy.new_empty((*dy.shape[:-1], w.shape[1]) if need_dx else 0)
    dw = dy.new_empty(0) if not need_dw else dy.new_empty((K, N)).t() if by_column else dy.new_empty((N, K))
    return dx, dw, dy.new_empty(N if need_db else 0)


def _save(args, results):
    """x only where dw asks for it, w only where dx does, as autograd keeps them."""
    x, w, _, need_dx, need_dw, need_db = args
    by_column = w.stride(0) == 1 and w.shape[0] > 1
    return (x if need_dw else None, w if need_dx else None), (by_column, need_dx, need_dw, need_db)


FUSED = Fused(
    "linear_bias",
    "(Tensor x, Tensor w, Tensor b, bool need_dx, bool need_dw, bool need_db) -> Tensor", forward,
    lambda x, w, b, *need: x.new_empty((*x.shape[:-1], w.shape[0])),
    "(Tensor dy, Tensor? x, Tensor? w, bool by_column, bool need_dx, bool need_dw, bool need_db) -> (Tensor, Tensor, Tensor)",
    backward, _bwd_fake,
    save=_save,
    grads_to=(0, 1, 2, None, None, None),
)


def refuses(x, w, b):
    for name, t in (("x", x), ("w", w), ("b", b)):
        if t.dtype not in KERNEL_DTYPES:
            return f"{name} must be float32, float16 or bfloat16, got {t.dtype}"
    most = max(x.numel(), x.numel() // max(1, x.shape[-1]) * w.shape[0])
    return f"x and y must have less than 2^31 elements, got {most:,}" if most >= 1 << 31 else None


def run_triton(x, w, b):
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, w, b = x.to(dtype), w.to(dtype), b.to(dtype)
    return FUSED(x, w, b, may_ask(x), may_ask(w), may_ask(b))


def run_torch(x, w, b):
    return F.linear(x, w, b)


OP = Op(
    name="linear_bias",
    reference=reference,
    inputs=inputs,
    case_of=case_of,
    check=check,
    cases=(
        dict(M=1, K=16, N=64), dict(M=7, K=24, N=100), dict(M=33, K=32, N=257), dict(M=0, K=16, N=64), dict(M=5, K=7, N=7),
        dict(M=150, K=8, N=144), dict(M=1100, K=8, N=16),
        dict(M=9, K=16, N=96, layout="sliced"), dict(M=9, K=16, N=96, layout="transposed"),
        dict(M=9, K=16, N=96, layout="expanded"), dict(M=9, K=16, N=96, w_layout="transposed"),
        dict(M=9, K=16, N=96, w_layout="sliced"), dict(M=3, K=1, N=1),
    ),
    shapes={f"{M}x{K}x{N}": dict(M=M, K=K, N=N) for M, K, N in (
        (25216, 768, 3072), (25216, 3072, 768), (16384, 768, 2304), (8192, 1024, 1024), (4096, 768, 1000),
    )},
    cost=cost,
    grads=("x", "w", "b"),
    impls={
        "torch": Impl(run_torch),
        "triton": Impl(
            run_triton, refuses, needs="triton", limits=("dtypes other than fp32, fp16, bf16", "2^31 elements of x or y"),
        ),
    },
    dynamic=("M",),
    tiny=dict(M=16, K=32, N=100),
    hostile=families(("x",), ("w", "b"), limit=2.0**8),
    pieces=row_pieces("x", added=("w", "b")),
)
