"""Products as kernels' launchers make them: of float32 by pairs of halves where that is faster, of all else PyTorch's own."""

from dataclasses import replace

import torch
import torch.nn.functional as F

from whet import machine
from whet.machine import float32_precision
from whet.op import Cost
from whet.ops import _halves
from whet.ops._rows import unit_rows

# Their tensor cores sum float16 in float32 at twice the rate of their float32 alone: three such products take longer than one.
CONSUMER = ((8, 6), (8, 7), (8, 9), (12, 0), (12, 1))


def made_for_halves() -> bool:
    """Whether this GPU is one on which three products in float16 are faster than one in float32."""
    return machine.triton_mode() == "gpu" and machine.this_machine().capability not in CONSUMER


def by_halves(x: torch.Tensor) -> bool:
    """Whether a product of x is one of pairs of halves: in float32, where TF32 is not allowed, on GPUs made for it."""
    return x.dtype == torch.float32 and x.is_cuda and float32_precision() == "highest" and made_for_halves()


def floored(cost: Cost, x: torch.Tensor) -> Cost:
    """The cost with the floor that products of x have: in float32 that of three in float16, where it is lower."""
    return replace(cost, dtype="float16", bwd_dtype="float16", products=3) if x.dtype == torch.float32 else cost


def matmul_forward(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """x @ w.T, as F.linear."""
    if not by_halves(x):
        return F.linear(x, w)
    return _halves.matmul_forward(unit_rows(x), w).view(*x.shape[:-1], w.shape[0])


def matmul_grad_x(dy: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """dy @ w of matrices: the gradient of x."""
    return _halves.matmul_grad_x(dy, w) if by_halves(dy) else dy @ w


def matmul_grad_w(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """dy.T @ x of matrices: the gradient of w."""
    return _halves.matmul_grad_w(dy, x) if by_halves(dy) else dy.t() @ x


def inside_end(x: torch.Tensor, M: int, N: int, D: int) -> int:
    """Bytes that the end of an MLP takes besides, forward: what is activated, (M, N), and halves of that and of w, (D, N)."""
    return M * N * x.element_size() + (_halves.bytes_of_forward(M, D, N) if by_halves(x) else 0)


def inside_end_backward(dy: torch.Tensor, M: int, N: int, D: int, given: int, need_dw: bool, over: bool = False) -> int:
    """Backward: the gradient of what is activated; by halves the rest is let go before the gradients of what was given come.

    given   M * N times so many values; 0 where no gradient of them is asked for
    over    the gradients are written over them, and take nothing
    """
    if not by_halves(dy):
        return M * N * dy.element_size()
    back, across = _halves.bytes_of_grad_x(M, D, N) if given else 0, _halves.bytes_of_grad_w(M, D, N) if need_dw else 0
    return 4 * M * N + max(0, max(back, across) - (0 if over else 4 * given * M * N))
