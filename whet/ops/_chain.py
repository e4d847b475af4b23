"""Decode kernels in a chain: each may start before the one before it has ended, and waits for it only where it must."""

import contextlib
import contextvars
from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from whet import machine

_chain = contextvars.ContextVar("whet_chain", default=False)


@contextlib.contextmanager
def chained() -> Iterator[None]:
    """Within the block decode kernels are launched so that each may start before the one before it has ended.

    Only for a sequence of these kernels alone, in which weights, positions and what the cache held before are written by
    nothing, nor by the kernel just before: they are read early.
    """
    before = _chain.set(True)
    try:
        yield
    finally:
        _chain.reset(before)


def chain() -> dict:
    """Launch options: programmatic dependent launch where a chain asks for it and the GPU has it."""
    capability = machine.this_machine().capability
    if _chain.get() and capability and capability >= (9, 0) and not torch.version.hip:
        return dict(CHAINED=True, launch_pdl=True)
    return dict(CHAINED=False)


@triton.jit
def begin(CHAINED: tl.constexpr):
    """Let the next kernel of the chain start: it too waits before it reads what this one writes."""
    if CHAINED:
        gdc_launch_dependents()


@triton.jit
def ready(CHAINED: tl.constexpr):
    """Wait for all that the kernels before have written."""
    if CHAINED:
        gdc_wait()
