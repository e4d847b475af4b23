"""The products of a loss over chunks of rows: its logits, and the gradients that follow from theirs.

In float32 they are those of `_halves` where `_products` says so, of halves of w that are made once.
"""

import functools

import torch

from whet.ops import _halves
from whet.ops._products import by_halves
from whet.ops._rows import unit_rows


@functools.cache
def adds_in_fp32() -> bool:
    """Whether addmm takes half matrices and a float32 sum in one product on the GPU: PyTorch 2.10 and later."""
    return tuple(int(n) for n in torch.__version__.split(".")[:2]) >= (2, 10)


class LossProducts:
    """Of w (V, D) and a b of V elements, or of none."""

    def __init__(self, w: torch.Tensor, b: torch.Tensor):
        self.w, self.b = w, b
        self.halves = _halves.split_rows(unit_rows(w)) if by_halves(w) else None

    def logits(self, x, out) -> None:
        """out = x @ w.T + b"""
        if self.halves:
            _halves.matmul_forward(x, self.w, out, self.halves)
            if self.b.numel():
                out += self.b
        elif self.b.numel():
            torch.addmm(self.b, x, self.w.t(), out=out)
        else:
            torch.mm(x, self.w.t(), out=out)

    def dx(self, dz, out) -> None:
        """out = dz @ w"""
        if self.halves:
            _halves.matmul_grad_x(dz, self.w, out, self.halves)
        else:
            torch.mm(dz, self.w, out=out)

    def add_dw(self, dw, dz, x, first: bool) -> None:
        """dw += dz.T @ x, or = when first."""
        if self.halves:
            made = _halves.matmul_grad_w(dz, x, out=dw if first else None)
            if not first:
                dw += made
        elif dw.dtype == x.dtype:
            torch.addmm(dw, dz.t(), x, beta=0 if first else 1, out=dw)
        elif not dw.is_cuda:
            torch.addmm(dw, dz.t().to(dw.dtype), x.to(dw.dtype), beta=0 if first else 1, out=dw)
        elif first:
            torch.mm(dz.t(), x, out_dtype=dw.dtype, out=dw)
        elif adds_in_fp32():
            torch.addmm(dw, dz.t(), x, out_dtype=dw.dtype, out=dw)
        else:
            dw.add_(torch.mm(dz.t(), x, out_dtype=dw.dtype))


def inside(x, V: int, D: int, rows: int, chunks: int, need_dx: bool, need_dw: bool) -> int:
    """Bytes that these take besides: w's halves, a part of a chunk's, and from the second chunk on what is added to dw."""
    if not by_halves(x):
        return 0
    dx = _halves.bytes_of_chunk(rows, V, D) if need_dx else 0
    dw = _halves.bytes_of_grad_w(rows, V, D) + (4 * V * D if chunks > 1 else 0) if need_dw else 0
    return _halves.bytes_of_forward(rows, V, D) + max(0, max(dx, dw) - 4 * rows * D)
