"""norm_linear: rms_norm, then a product with weights that may be quantised. For decoding: few rows, weights read once."""

import torch
import torch.nn.functional as F

from whet.op import Cost, lay, nbytes
from whet.ops._product import product_op
from whet.ops._weights import dense, random_weight
from whet.ops.rms_norm import reference as rms_norm
from whet.values import families


def reference(x, norm, w, scale=None, bias=None, eps=1e-6):
    """y = rms_norm(x, norm, eps) @ w.T + bias.  x (M, K);  w (N, K), or quantised with its scale.  The norm is wide inside."""
    return F.linear(rms_norm(x, norm, eps), dense(w, scale, x.dtype), bias)


def inputs(dtype, device, M, K, N, quant=None, bias=False, layout="contiguous"):
    x, norm = torch.randn(M, K, dtype=dtype, device=device), (torch.rand(K, device=device) + 0.5).to(dtype)
    x, (w, scale) = lay(x, layout), random_weight(N, K, quant, dtype, device)
    return dict(x=x, norm=norm, w=w, scale=scale, bias=torch.randn(N, dtype=dtype, device=device) if bias else None, eps=1e-6)


def cost(x, norm, w, scale=None, bias=None, eps=1e-6):
    M, N = x.shape[0], w.shape[0]
    return Cost(bytes=nbytes(x, norm, w, scale, bias) + M * N * x.element_size(), flops=2 * M * N * x.shape[1] + 5 * x.numel())


def run_torch(x, norm, w, scale=None, bias=None, eps=1e-6):
    return F.linear(F.rms_norm(x, norm.shape, norm, eps), dense(w, scale, x.dtype), bias)


OP = product_op(
    "norm_linear", reference, run_torch,
    inputs=inputs,
    cases=(
        dict(M=1, K=128, N=20), dict(M=3, K=100, N=17, layout="sliced"), dict(M=2, K=300, N=9, bias=True), dict(M=0, K=64, N=8),
        dict(M=1, K=64, N=9, quant="int8"), dict(M=2, K=128, N=13, quant="fp8"), dict(M=3, K=192, N=13, quant="int4"),
        dict(M=9, K=100, N=40), dict(M=20, K=128, N=24, quant="int4"), dict(M=17, K=64, N=20, quant="int8", bias=True),
        dict(M=33, K=128, N=16, quant="fp8", layout="sliced"), dict(M=65, K=72, N=9),
    ),
    shapes={f"qwen3-0.6b qkv {M}": dict(M=M, K=1024, N=4096) for M in (1, 8, 64)}
    | {f"qwen3-0.6b qkv 1 {quant}": dict(M=1, K=1024, N=4096, quant=quant) for quant in ("int8", "int4", "fp8")},
    cost=cost,
    tiny=dict(N=8),
    hostile=families(("x",), ("norm",), options={"eps 0.01": dict(eps=1e-2)}),
)
