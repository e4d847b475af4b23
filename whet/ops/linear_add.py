"""linear_add: a product with weights that may be quantised, added to the residual stream. For decoding: few rows."""

import torch
import torch.nn.functional as F

from whet.op import Cost, lay, nbytes
from whet.ops._product import product_op
from whet.ops._weights import dense, random_weight
from whet.values import families


def reference(x, res, w, scale=None, bias=None):
    """y = res + x @ w.T + bias.  x (M, K);  res (M, N);  w (N, K), or quantised with its scale."""
    return res + F.linear(x, dense(w, scale, x.dtype), bias)


def inputs(dtype, device, M, K, N, quant=None, bias=False, layout="contiguous"):
    x, res = (lay(torch.randn(M, columns, dtype=dtype, device=device), layout) for columns in (K, N))
    w, scale = random_weight(N, K, quant, dtype, device)
    return dict(x=x, res=res, w=w, scale=scale, bias=torch.randn(N, dtype=dtype, device=device) if bias else None)


def cost(x, res, w, scale=None, bias=None):
    M, N = x.shape[0], w.shape[0]
    return Cost(bytes=nbytes(x, res, w, scale, bias) + nbytes(res), flops=2 * M * N * x.shape[1] + M * N)


def run_torch(x, res, w, scale=None, bias=None):
    wide = dense(w, scale, x.dtype)
    return torch.addmm(res, x, wide.t()) if bias is None and res.dtype == x.dtype else res + F.linear(x, wide, bias)


OP = product_op(
    "linear_add", reference, run_torch,
    inputs=inputs,
    cases=(
        dict(M=1, K=128, N=20), dict(M=3, K=100, N=17, layout="sliced"), dict(M=2, K=300, N=9, bias=True), dict(M=0, K=64, N=8),
        dict(M=1, K=64, N=9, quant="int8"), dict(M=2, K=128, N=13, quant="fp8"), dict(M=3, K=192, N=13, quant="int4"),
        dict(M=9, K=100, N=40), dict(M=20, K=128, N=24, quant="int4"), dict(M=17, K=64, N=20, quant="int8", bias=True),
        dict(M=1, K=3072, N=8), dict(M=65, K=72, N=9, layout="sliced"),
    ),
    shapes={f"qwen3-0.6b o {M}": dict(M=M, K=2048, N=1024) for M in (1, 8, 64)}
    | {f"qwen3-0.6b down {M}": dict(M=M, K=3072, N=1024) for M in (1, 8, 64)},
    cost=cost,
    tiny=dict(N=8),
    hostile=families(("x", "res"), ("bias",), limit=2.0**20),
)
