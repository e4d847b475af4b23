"""The end of a decode step: what was chosen is noted and fed next, and every row's position moves on. One kernel for four."""

import torch
import triton
import triton.language as tl

from whet.launch import launcher
from whet.ops._pdl import launch_dependents, pdl_options, wait


@triton.jit
def _note_kernel(
    chosen_ptr, value_ptr,  # inputs, (B,)
    token_ptr, out_tokens_ptr, logit_ptr,  # outputs, (B,), (B, RING) and (B, RING)
    position_ptr, advance_ptr,  # (N,): positions, which move by advance; element `column_at` is the column that is written
    stride_o, stride_l,
    B, N, column_at,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):
    """column = position[column_at]: token = out_tokens[:, column] = chosen, logit[:, column] = value; position += advance.

    One program.
    Fuses   two copies into a column, a copy and a sum.
    Moves   a few numbers a row.
    Rounds  nothing.
    """
    launch_dependents(PDL)
    i = tl.arange(0, BLOCK)
    wait(PDL)
    column = tl.load(position_ptr + column_at)
    position, advance = tl.load(position_ptr + i, mask=i < N, other=0), tl.load(advance_ptr + i, mask=i < N, other=0)
    chosen, value = tl.load(chosen_ptr + i, mask=i < B, other=0), tl.load(value_ptr + i, mask=i < B, other=0.0)
    tl.debug_barrier()  # all have read the column before it moves
    tl.store(token_ptr + i, chosen, mask=i < B)
    tl.store(out_tokens_ptr + i * stride_o + column, chosen, mask=i < B)
    tl.store(logit_ptr + i * stride_l + column, value, mask=i < B)
    tl.store(position_ptr + i, position + advance, mask=i < N)


def note(
    chosen: torch.Tensor, value: torch.Tensor, token: torch.Tensor, out_tokens: torch.Tensor, logit: torch.Tensor,
    position: torch.Tensor, advance: torch.Tensor, column_at: int,
) -> None:
    launcher(_note_kernel)[(1,)](
        chosen, value, token, out_tokens, logit, position, advance, out_tokens.stride(0), logit.stride(0),
        len(chosen), len(position), column_at, BLOCK=triton.next_power_of_2(len(position)), num_warps=1, **pdl_options(),
    )
