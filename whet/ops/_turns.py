"""Programs that add to one place in a fixed order: each waits for its turn, adds, and passes the turn on.

A turn is an int32 that starts at 0 and counts those who have added. The sums have the same bits in every run, since their
order is the same. Whoever waits must wait only for programs that started before it: `ticket` numbers them as they start.

`BY` says with what the GPU at hand waits. "bulk", Hopper and newer: loops in PTX around sums that the copy engine adds, by
`descriptor.atomic_add`; "ptx", older NVIDIA GPUs: the same around atomics; "warp": the same for one warp that adds for its
program; "atomics": Triton's own, anywhere. Triton pipelines no loop that has another loop or a barrier in it, but takes PTX
for one instruction.
"""

import triton
import triton.language as tl

from whet import machine


def waits_by() -> str:
    """The `BY` of this machine."""
    capability = machine.this_machine().capability
    if capability is None or machine.triton_mode() == "interpret":
        return "atomics"
    return "bulk" if capability >= (9, 0) else "ptx"


@triton.jit
def ticket(ticket_ptr):
    """How many programs started before this one."""
    return tl.atomic_add(ticket_ptr, 1, sem="relaxed")


@triton.jit
def wait_for_turn(turn_ptr, turn, BY: tl.constexpr):
    """Return once *turn_ptr is turn: what was added before it was passed on comes first. Every thread polls."""
    if BY == "atomics":
        while tl.atomic_add(turn_ptr, 0, sem="acquire") != turn:
            pass
        tl.debug_barrier()
    else:
        tl.inline_asm_elementwise(
            "{ .reg .pred early; .reg .u32 now;\n"
            "again: ld.acquire.gpu.global.u32 now, [$1]; setp.ne.u32 early, now, $2; @early bra again;\n"
            + ("fence.proxy.async.global; " if BY == "bulk" else "") + "mov.u32 $0, now; }",
            "=r,l,r,~{memory}", [turn_ptr, turn], dtype=tl.int32, is_pure=False, pack=1,
        )


@triton.jit
def pass_turn(turn_ptr, turn, BY: tl.constexpr):
    """Set *turn_ptr to turn, after all that the threads of this program, or of this warp, added before."""
    if BY == "atomics":
        tl.debug_barrier()
        tl.atomic_xchg(turn_ptr, turn, sem="release")
    elif BY == "warp":
        tl.inline_asm_elementwise(
            "{ .reg .pred first; .reg .u32 lane; bar.warp.sync 0xffffffff; mov.u32 lane, %laneid; setp.eq.u32 first, lane, 0;\n"
            "@first st.release.gpu.global.u32 [$1], $2; mov.u32 $0, 0; }",
            "=r,l,r,~{memory}", [turn_ptr, turn], dtype=tl.int32, is_pure=False, pack=1,
        )
    else:
        tl.inline_asm_elementwise(
            "{ .reg .pred first; .reg .u32 thread; mov.u32 thread, %tid.x; setp.eq.u32 first, thread, 0;\n"
            + ("cp.async.bulk.wait_group 0; " if BY == "bulk" else "")
            + "bar.sync 0; @first st.release.gpu.global.u32 [$1], $2; mov.u32 $0, 0; }",
            "=r,l,r,~{memory}", [turn_ptr, turn], dtype=tl.int32, is_pure=False, pack=1,
        )


@triton.jit
def add_in_turn(at, value, mask=None):
    """Add to what no other program adds to until the turn is passed on."""
    tl.atomic_add(at, value, mask=mask, sem="relaxed")
