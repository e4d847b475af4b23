"""Programs that add to one place in a fixed order: each waits for its turn, adds, and passes the turn on.

A turn is an int32 that starts at 0 and counts those who have added. The sums are the same bits in every run, since their order
is. Whoever waits must wait only for programs that started before it: `ticket` numbers programs in the order they start.
"""

import triton
import triton.language as tl

from whet import machine


def polls_in_ptx() -> bool:
    """Whether `wait_for_turn` may be a loop of PTX: on NVIDIA GPUs, of which each has a compute capability."""
    return machine.this_machine().capability is not None


@triton.jit
def ticket(ticket_ptr):
    """How many programs started before this one."""
    return tl.atomic_add(ticket_ptr, 1, sem="relaxed")


@triton.jit
def wait_for_turn(turn_ptr, turn, IN_PTX: tl.constexpr):
    """Return once *turn_ptr is turn, and what was added before is seen. Every thread polls: none waits for another.

    In PTX, since Triton pipelines no loop that has another one inside.
    """
    if IN_PTX:
        tl.inline_asm_elementwise(
            "{ .reg .pred early; .reg .u32 now;\n"
            "again: ld.acquire.gpu.global.u32 now, [$1]; setp.ne.u32 early, now, $2; @early bra again; mov.u32 $0, now; }",
            "=r,l,r,~{memory}", [turn_ptr, turn], dtype=tl.int32, is_pure=False, pack=1,
        )
    else:
        while tl.atomic_add(turn_ptr, 0, sem="acquire") != turn:
            pass
        tl.debug_barrier()


@triton.jit
def pass_turn(turn_ptr, turn, IN_PTX: tl.constexpr):
    """Let whoever comes after `turn` add: it sees all that the threads of this program added before.

    In PTX for the same reason: Triton pipelines no loop with a barrier of its own.
    """
    if IN_PTX:
        tl.inline_asm_elementwise(
            "{ .reg .pred first; .reg .u32 thread; mov.u32 thread, %tid.x; setp.eq.u32 first, thread, 0;\n"
            "bar.sync 0; @first st.release.gpu.global.u32 [$1], $2; mov.u32 $0, 0; }",
            "=r,l,r,~{memory}", [turn_ptr, turn + 1], dtype=tl.int32, is_pure=False, pack=1,
        )
    else:
        tl.debug_barrier()
        tl.atomic_xchg(turn_ptr, turn + 1, sem="release")
