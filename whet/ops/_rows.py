"""What the row-wise ops share: how a row is cut into a tile, and the sum of partial rows."""

import torch
import triton
import triton.language as tl

from whet import machine
from whet.launch import launcher
from whet.op import rows

KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_N = 8192  # one program holds a whole row, and its sums over rows, in registers: at 16384 the backwards spill on sm_90
RAGGED_N = 4096  # longer rows must be whole 16-byte loads: the addresses of single elements spill 96 to 164 bytes a thread
ROW_LIMITS = (f"rows longer than {MAX_N}", f"rows longer than {RAGGED_N} that are no multiple of 16", "rows of no elements")


def cdiv(a: int, b: int) -> int:
    """triton.cdiv for launchers: as a function of Triton's language that one costs the host several times as much."""
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The least that is not below n: triton.next_power_of_2 for launchers, likewise."""
    return 1 << max(0, n - 1).bit_length()


def row_refused(N: int) -> str | None:
    """None, or why a program cannot hold a row of N."""
    if N > MAX_N:
        return f"x.shape[-1] must be at most {MAX_N}, the longest row one program holds, got {N}"
    if N > RAGGED_N and N % 16:
        return f"x.shape[-1] must be a multiple of 16 where it is over {RAGGED_N}, got {N}"
    return None if N else "x.shape[-1] must be at least 1, got 0"


def unit_rows(x: torch.Tensor) -> torch.Tensor:
    """x as (M, N) with unit stride in N, any stride in M: a view where one exists, else a copy."""
    x = rows(x)
    return x if x.stride(1) == 1 else x.contiguous()


def tile(N: int) -> tuple[int, int, int]:
    """BLOCK_M, BLOCK_N, num_warps of a forward: a whole row per program, several rows when they are short."""
    BLOCK_N = power_of_two(max(N, 16))
    return min(8, max(1, 2048 // BLOCK_N)), BLOCK_N, max(2, BLOCK_N // 2048)


def bwd_tile(N: int, warps_per_sm: int = 16) -> tuple[int, int, int, int]:
    """BLOCK_M, BLOCK_N, num_warps, programs per SM of a backward.

    Sixteen elements a thread: at 32 the backwards take 166 to 252 registers on sm_90. Short rows do best with fewer
    programs, since each leaves one more partial row to sum.
    """
    BLOCK_N = power_of_two(max(N, 16))
    warps = max(4, BLOCK_N // 512)
    return min(8, max(1, 2048 // BLOCK_N)), BLOCK_N, warps, max(1, (12 if BLOCK_N <= 512 else warps_per_sm) // warps)


def programs(blocks: int, per_sm: int) -> int:
    """How many programs share `blocks` blocks of rows, each keeping its own partial sums."""
    return max(1, min(blocks, machine.sm_count() * per_sm))


@triton.jit
def _column_sum_kernel(
    partial_ptr,  # (G, N) fp32
    out_ptr,  # (N,)
    G, N,
    BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """out[n] = sum over g of partial[g, n].  One program, BLOCK_N columns, always the same order of additions.

    Moves   G*N*4 in, N*itemsize out.
    Rounds  once, at the store.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_G, BLOCK_N), dtype=tl.float32)
    for start in range(0, G, BLOCK_G):
        g = start + tl.arange(0, BLOCK_G)
        inside = (g < G)[:, None] & (n < N)[None, :]
        total += tl.load(partial_ptr + g[:, None].to(tl.int64) * N + n[None, :], mask=inside, other=0.0)
    tl.store(out_ptr + n, tl.sum(total, axis=0), mask=n < N)


def column_sum(partial: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    G, N = partial.shape
    BLOCK_N = 8 if N <= 2048 else 16
    launcher(_column_sum_kernel)[(cdiv(N, BLOCK_N),)](partial, out, G, N, BLOCK_G=256, BLOCK_N=BLOCK_N, num_warps=8)
    return out
