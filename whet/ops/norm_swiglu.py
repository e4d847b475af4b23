"""norm_swiglu: rms_norm, the gate and up projections, silu(gate) * up. For decoding: few rows, weights read once."""

import torch
import torch.nn.functional as F

from whet.op import Cost, lay, nbytes
from whet.ops._gemv import check_product
from whet.ops._product import product_op
from whet.ops._weights import dense, random_weight
from whet.ops.rms_norm import reference as rms_norm
from whet.values import families


def reference(x, norm, w, scale=None, eps=1e-6):
    """gate, up = halves of rms_norm(x, norm, eps) @ w.T;  y = silu(gate) * up.  x (M, K);  w (2F, K), its gate rows first."""
    wide = torch.promote_types(x.dtype, torch.float32)
    gate, up = F.linear(rms_norm(x, norm, eps), dense(w, scale, x.dtype)).to(wide).chunk(2, -1)
    return (gate * torch.sigmoid(gate) * up).to(x.dtype)


def inputs(dtype, device, M, K, F, quant=None, layout="contiguous"):
    x, norm = torch.randn(M, K, dtype=dtype, device=device), (torch.rand(K, device=device) + 0.5).to(dtype)
    x, (w, scale) = lay(x, layout), random_weight(2 * F, K, quant, dtype, device)
    return dict(x=x, norm=norm, w=w, scale=scale, eps=1e-6)


def large_gates(args):
    """Hostile values: weights 64 times as large, so that exp of a gate overflows."""
    name = "w" if args["scale"] is None else "scale"
    return args | {name: args[name] * 64}


def check(x, norm, w, scale=None, eps=1e-6):
    if w.dim() == 2 and w.shape[0] % 2:
        return f"w must have an even number of rows, gate and up, got {w.shape[0]}"
    return check_product(x, w, scale, norm=norm)


def cost(x, norm, w, scale=None, eps=1e-6):
    M, N = x.shape[0], w.shape[0]
    out, flops = M * N // 2, 2 * M * N * x.shape[1] + 5 * x.numel()
    return Cost(bytes=nbytes(x, norm, w, scale) + out * x.element_size(), flops=flops + 5 * out)


def run_torch(x, norm, w, scale=None, eps=1e-6):
    gate, up = F.linear(F.rms_norm(x, norm.shape, norm, eps), dense(w, scale, x.dtype)).chunk(2, -1)
    return F.silu(gate) * up


OP = product_op(
    "norm_swiglu", reference, run_torch, rows="F", paired=True,
    inputs=inputs,
    check=check,
    cases=(
        dict(M=1, K=128, F=12), dict(M=3, K=300, F=9, layout="sliced"), dict(M=0, K=64, F=8),
        dict(M=1, K=192, F=7, quant="int4"),
        dict(M=2, K=64, F=9, quant="int8"), dict(M=1, K=128, F=7, quant="fp8"), dict(M=9, K=100, F=20),
        dict(M=20, K=128, F=24, quant="int4"), dict(M=17, K=64, F=20, quant="int8", layout="sliced"), dict(M=65, K=72, F=9),
    ),
    shapes={f"qwen3-0.6b mlp {M}": dict(M=M, K=1024, F=3072) for M in (1, 8, 64)},
    cost=cost,
    tiny=dict(F=4),
    hostile=families(("x",), ("norm",), options={"eps 0.01": dict(eps=1e-2)}, large_gates=large_gates),
)
