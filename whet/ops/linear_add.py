"""linear_add: a product with weights that may be quantised, added to the residual stream. For decoding: few rows."""

import torch
import torch.nn.functional as F

from whet.op import Cost, Impl, Op, lay, layout_of, nbytes
from whet.ops._gemv import PRODUCT_LIMITS, check_product, multiply, product_refused
from whet.ops._weights import dense, quant_of, random_weight
from whet.torch_ops import Forward
from whet.values import families


def reference(x, res, w, scale=None, bias=None):
    """y = res + x @ w.T + bias.  x (M, K);  res (M, N);  w (N, K), or quantised with its scale."""
    return res + F.linear(x, dense(w, scale, x.dtype), bias)


def inputs(dtype, device, M, K, N, quant=None, bias=False, layout="contiguous"):
    x, res = (lay(torch.randn(M, columns, dtype=dtype, device=device), layout) for columns in (K, N))
    w, scale = random_weight(N, K, quant, dtype, device)
    return dict(x=x, res=res, w=w, scale=scale, bias=torch.randn(N, dtype=dtype, device=device) if bias else None)


def case_of(x, res, w, scale=None, bias=None):
    case = dict(M=x.shape[0], K=x.shape[1], N=w.shape[0])
    case |= {"quant": quant} if (quant := quant_of(w)) else {}
    case |= {} if bias is None else {"bias": True}
    return case if x.is_contiguous() else case | {"layout": layout_of(x)}


def check(x, res, w, scale=None, bias=None):
    return check_product(x, w, scale, bias=bias, res=res)


def cost(x, res, w, scale=None, bias=None):
    M, N = x.shape[0], w.shape[0]
    return Cost(bytes=nbytes(x, res, w, scale, bias) + nbytes(res), flops=2 * M * N * x.shape[1] + M * N)


def launch(x, res, w, scale, bias, tile):
    return multiply(x, None, w, scale, bias, res, 0.0, tile=tile)


KERNEL = Forward(
    "linear_add", "(Tensor x, Tensor res, Tensor w, Tensor? scale, Tensor? bias, str? tile) -> Tensor", launch,
    lambda x, res, w, scale, bias, tile: res.new_empty(res.shape),
)


def refuses(x, res, w, scale=None, bias=None):
    return product_refused(x, w, res=res, bias=bias, scale=scale)


def run_triton(x, res, w, scale=None, bias=None, tile=None):
    return KERNEL(x, res, w, scale, bias, tile)


def run_torch(x, res, w, scale=None, bias=None):
    wide = dense(w, scale, x.dtype)
    return torch.addmm(res, x, wide.t()) if bias is None and res.dtype == x.dtype else res + F.linear(x, wide, bias)


OP = Op(
    name="linear_add",
    reference=reference,
    inputs=inputs,
    case_of=case_of,
    check=check,
    cases=(
        dict(M=1, K=128, N=20), dict(M=3, K=100, N=17, layout="sliced"), dict(M=2, K=300, N=9, bias=True), dict(M=0, K=64, N=8),
        dict(M=1, K=64, N=9, quant="int8"), dict(M=2, K=128, N=13, quant="fp8"), dict(M=3, K=192, N=13, quant="int4"),
        dict(M=9, K=100, N=40), dict(M=20, K=128, N=24, quant="int4"), dict(M=17, K=64, N=20, quant="int8", bias=True),
        dict(M=1, K=3072, N=8), dict(M=65, K=72, N=9, layout="sliced"),
    ),
    shapes={f"qwen3-0.6b o {M}": dict(M=M, K=2048, N=1024) for M in (1, 8, 64)}
    | {f"qwen3-0.6b down {M}": dict(M=M, K=3072, N=1024) for M in (1, 8, 64)},
    cost=cost,
    grads=(),
    impls={
        "torch": Impl(run_torch),
        "triton": Impl(run_triton, refuses, needs="triton", limits=PRODUCT_LIMITS),
    },
    dynamic=("M",),
    tiny=dict(N=8),
    hostile=families(("x", "res"), ("bias",), limit=2.0**20),
)
