"""linear: a float32 linear layer without a bias, its products by tensor cores to float32's own accuracy.

An H200 multiplies float32 at a fifteenth of the rate at which its tensor cores multiply float16. Here every operand is a pair
of float16, and a product three of theirs (see `_halves`). A pair holds 22 of float32's 24 bits: from a K of about 100 that
costs less than float32 loses as it rounds K sums, of few products more. A value under 2^-17 of its row's largest holds fewer.
It is no TF32, which keeps 11. Opaque to torch.compile.
"""

import torch
import torch.nn.functional as F

from whet.compiled import compiled
from whet.op import Cost, Impl, Op, autocast_of, floating, lay, layout_of, nbytes, same_device
from whet.ops import _halves
from whet.ops._products import floored
from whet.ops._rows import unit_rows
from whet.parts import row_pieces
from whet.torch_ops import Fused, may_ask
from whet.values import balanced_columns, families


def reference(x, w):
    """y = x @ w.T.  x (..., K);  w (N, K)."""
    return F.linear(x, w)


def inputs(dtype, device, M, K, N, layout="contiguous", w_layout="contiguous"):
    x = lay(torch.randn(M, K, device=device).to(dtype), layout)
    return dict(x=x, w=lay((max(1, K) ** -0.5 * torch.randn(N, K, device=device)).to(dtype), w_layout))


def case_of(x, w):
    case = dict(M=x.numel() // max(1, x.shape[-1]), K=x.shape[-1], N=w.shape[0], layout=layout_of(x))
    return case if w.is_contiguous() else case | dict(w_layout=layout_of(w))


def check(x, w):
    if reason := floating(x=x, w=w) or same_device(x=x, w=w):
        return reason
    if x.dim() < 1 or w.dim() != 2 or w.shape[1] != x.shape[-1] or w.numel() < 1:
        return f"w must have shape (N, {x.shape[-1] if x.dim() else 'K'}) to match x.shape[-1], got {tuple(w.shape)}"
    if w.dtype != x.dtype and not torch.is_autocast_enabled(x.device.type):
        return f"w must have x's dtype {x.dtype} outside autocast, got {w.dtype}"
    return None


def cost(x, w):
    y = x.numel() // max(1, x.shape[-1]) * w.shape[0] * x.element_size()
    flops, given = 2 * x.numel() * w.shape[0], nbytes(x, w)
    return floored(Cost(bytes=given + y, flops=flops, bwd_bytes=2 * given + y, bwd_flops=2 * flops), x)


def forward(x, w, need_dx, need_dw):
    return _halves.matmul_forward(unit_rows(x), w).view(*x.shape[:-1], w.shape[0])


def backward(dy, x, w, need_dx, need_dw):
    """dx and dw, each of no elements where it is not asked for."""
    flat, none = unit_rows(dy), dy.new_empty(0)
    dx = _halves.matmul_grad_x(flat, w).view(*dy.shape[:-1], w.shape[1]) if need_dx else none
    return dx, _halves.matmul_grad_w(flat, x) if need_dw else none


def _bwd_fake(dy, x, w, need_dx, need_dw):
    dx = dy.new_empty((*dy.shape[:-1], w.shape[1]) if need_dx else 0)
    return dx, dy.new_empty((dy.shape[-1], x.shape[-1]) if need_dw else 0)


def _save(args, results):
    """x only where dw asks for it, w only where dx does. Not x's halves: x is often kept anyway, by what made it."""
    x, w, need_dx, need_dw = args
    return (x if need_dw else None, w if need_dx else None), (need_dx, need_dw)


def inside(x, w, *need) -> int:
    return _halves.bytes_of_forward(x.numel() // max(1, x.shape[-1]), *w.shape)


def inside_backward(dy, x, w, need_dx, need_dw) -> int:
    """dx comes first: what it takes is let go before dw is there."""
    M, N = dy.numel() // max(1, dy.shape[-1]), dy.shape[-1]
    back, across = _halves.bytes_of_grad_x(M, *w.shape) if need_dx else 0, 0
    if need_dw:
        back, across = back - 4 * N * x.shape[-1], _halves.bytes_of_grad_w(M, N, x.shape[-1])
    return max(0, back, across)


FUSED = Fused(
    "linear",
    "(Tensor x, Tensor w, bool need_dx, bool need_dw) -> Tensor", forward,
    lambda x, w, *need: x.new_empty((*x.shape[:-1], w.shape[0])),
    "(Tensor dy, Tensor? x, Tensor? w, bool need_dx, bool need_dw) -> (Tensor, Tensor)", backward, _bwd_fake,
    save=_save,
    grads_to=(0, 1, None, None), inside=inside, bwd_inside=inside_backward,
)


def refuses(x, w):
    if (dtype := autocast_of(x) or x.dtype) != torch.float32 or w.dtype != torch.float32:
        return f"x and w must be float32, outside autocast, got {dtype} and {w.dtype}: F.linear multiplies 16 bits as they are"
    most = max(x.numel(), x.numel() // max(1, x.shape[-1]) * w.shape[0])
    return f"x and y must have less than 2^31 elements, got {most:,}" if most >= 1 << 31 else None


def nothing_to_fuse(x, w):
    return "one product is all there is: Inductor calls what F.linear calls"


def run_triton(x, w):
    return FUSED(x, w, may_ask(x), may_ask(w))


OP = Op(
    name="linear",
    reference=reference,
    inputs=inputs,
    case_of=case_of,
    check=check,
    cases=(
        dict(M=1, K=16, N=64), dict(M=7, K=24, N=100), dict(M=33, K=32, N=257), dict(M=0, K=16, N=64), dict(M=5, K=7, N=7),
        dict(M=150, K=8, N=144), dict(M=70, K=300, N=40), dict(M=9, K=16, N=96, layout="sliced"),
        dict(M=9, K=16, N=96, layout="transposed"), dict(M=9, K=16, N=96, layout="expanded"),
        dict(M=9, K=16, N=96, w_layout="transposed"), dict(M=9, K=16, N=96, w_layout="sliced"), dict(M=3, K=1, N=1),
    ),
    shapes={f"{M}x{K}x{N}": dict(M=M, K=K, N=N) for M, K, N in (
        (1024, 512, 4096), (1024, 2048, 512), (8192, 1024, 8192), (8192, 4096, 1024), (16384, 2048, 2048),
    )},
    cost=cost,
    grads=("x", "w"),
    impls={
        "compile": Impl(compiled(reference), nothing_to_fuse, limits=("any call: there is nothing to fuse",)),
        "triton": Impl(
            run_triton, refuses, needs="triton",
            limits=("dtypes other than fp32, and autocast", "2^31 elements of x or y"),
            words="whet's own kernels: three products in float16 on tensor cores, as accurate as float32",
        ),
    },
    dynamic=("M",),
    tiny=dict(M=16, K=32, N=100),
    hostile=families(("x",), ("w",), limit=2.0**8, balanced_columns=balanced_columns("x", "w")),
    pieces=row_pieces("x", added=("w",)),
)
