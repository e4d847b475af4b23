"""Stage 4: the times are true, and the forward takes most of the step.

python exercises/stage4_slow_kernels.py --batch-size 8 --seq-len 128 --num-steps 20

Without a GPU the kernel runs in Triton's interpreter: small sizes take seconds, those above many minutes.
"""

import os

import torch
import torch.nn.functional as F

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, so it must be set before

import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from common import main  # noqa: E402

TILE = 16 if torch.cuda.is_available() else 128  # the interpreter takes as long for a small tile as for a large one


@triton.jit
def _swiglu_by_hand_kernel(x_ptr, gate_ptr, up_ptr, y_ptr, M, N, K, BLOCK: tl.constexpr):
    """y = silu(x Wg^T) * (x Wu^T).  One program, BLOCK x BLOCK of y.

    Fuses   both products, silu and the last product: neither gate nor up goes to memory.
    Moves   x once for every BLOCK columns of y, both weights once for every BLOCK rows; y out.
    Rounds  once, at the store; fp32 inside.
    """
    m = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    n = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    gate, up = tl.full((BLOCK, BLOCK), 0.0, tl.float32), tl.full((BLOCK, BLOCK), 0.0, tl.float32)
    for first in range(0, K, BLOCK):
        k = first + tl.arange(0, BLOCK)
        in_x, in_w = (m < M)[:, None] & (k < K)[None, :], (k < K)[:, None] & (n < N)[None, :]
        x = tl.load(x_ptr + m[:, None] * K + k[None, :], mask=in_x, other=0.0)
        gate += tl.dot(x, tl.load(gate_ptr + n[None, :] * K + k[:, None], mask=in_w, other=0.0), input_precision="ieee")
        up += tl.dot(x, tl.load(up_ptr + n[None, :] * K + k[:, None], mask=in_w, other=0.0), input_precision="ieee")
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(y_ptr + m[:, None] * N + n[None, :], y, mask=(m < M)[:, None] & (n < N)[None, :])


@torch.library.custom_op("exercise::swiglu_by_hand", mutates_args=())
def swiglu_by_hand(x: torch.Tensor, w_gate: torch.Tensor, w_up: torch.Tensor) -> torch.Tensor:
    x, w_gate, w_up = x.contiguous(), w_gate.contiguous(), w_up.contiguous()
    y = x.new_empty(*x.shape[:-1], w_gate.shape[0])
    M, N, K = y.numel() // y.shape[-1], y.shape[-1], x.shape[-1]
    _swiglu_by_hand_kernel[(triton.cdiv(M, TILE), triton.cdiv(N, TILE))](x, w_gate, w_up, y, M, N, K, BLOCK=TILE)
    return y


@swiglu_by_hand.register_fake
def _(x, w_gate, w_up):
    return x.new_empty(*x.shape[:-1], w_gate.shape[0])


def backward(ctx, dy):
    """The gradients by torch's own products, gate and up recomputed."""
    x, w_gate, w_up = ctx.saved_tensors
    gate, up = F.linear(x, w_gate), F.linear(x, w_up)
    s = torch.sigmoid(gate)
    d_gate, d_up = dy * up * s * (1 + gate * (1 - s)), dy * gate * s
    rows = x.flatten(0, -2)
    return d_gate @ w_gate + d_up @ w_up, d_gate.flatten(0, -2).mT @ rows, d_up.flatten(0, -2).mT @ rows


swiglu_by_hand.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


def swiglu(x, weight):
    # Symptom: the forward takes longer than the backward.
    return swiglu_by_hand(x, *weight.chunk(2))


if __name__ == "__main__":
    main(swiglu=swiglu)
