"""The end of a decode step: what was chosen is noted and fed next, and every row's clock moves on. One kernel for four."""

import torch
import triton
import triton.language as tl

from whet.ops._pdl import launch_dependents, pdl_options, wait


@triton.jit
def _note_kernel(
    chosen_ptr, value_ptr,  # inputs, (B,)
    token_ptr, emitted_ptr, logit_ptr,  # outputs, (B,), (B, RING) and (B, RING)
    clock_ptr, pace_ptr,  # clock (ROWS,), which moves by pace; its element `cursor` is the column of emitted and logit
    stride_e, stride_l,
    B, ROWS, cursor,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):
    """token = emitted[:, clock[cursor]] = chosen, logit[:, clock[cursor]] = value, clock += pace.  One program.

    Fuses   two copies into a column, a copy and a sum.
    Moves   a few numbers a row.
    Rounds  nothing.
    """
    launch_dependents(PDL)
    i = tl.arange(0, BLOCK)
    wait(PDL)
    column = tl.load(clock_ptr + cursor)
    now, pace = tl.load(clock_ptr + i, mask=i < ROWS, other=0), tl.load(pace_ptr + i, mask=i < ROWS, other=0)
    chosen, value = tl.load(chosen_ptr + i, mask=i < B, other=0), tl.load(value_ptr + i, mask=i < B, other=0.0)
    tl.debug_barrier()  # all have read the column before it moves
    tl.store(token_ptr + i, chosen, mask=i < B)
    tl.store(emitted_ptr + i * stride_e + column, chosen, mask=i < B)
    tl.store(logit_ptr + i * stride_l + column, value, mask=i < B)
    tl.store(clock_ptr + i, now + pace, mask=i < ROWS)


def note(
    chosen: torch.Tensor, value: torch.Tensor, token: torch.Tensor, emitted: torch.Tensor, logit: torch.Tensor,
    clock: torch.Tensor, pace: torch.Tensor, cursor: int,
) -> None:
    _note_kernel[(1,)](
        chosen, value, token, emitted, logit, clock, pace, emitted.stride(0), logit.stride(0), len(chosen), len(clock), cursor,
        BLOCK=triton.next_power_of_2(len(clock)), num_warps=1, **pdl_options(),
    )
