"""Programmatic dependent launch: a decode kernel may start before the one before it has ended, and waits only where it must."""

import contextlib
import contextvars
from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from whet import machine

_pdl = contextvars.ContextVar("whet_pdl", default=False)


@contextlib.contextmanager
def pdl() -> Iterator[None]:
    """Within the block decode kernels are launched so that each may start before the one before it has ended.

    Only for a sequence of these kernels alone, in which weights, positions and what the cache held before are written by
    nothing, nor by the kernel just before: they are read early.
    """
    before = _pdl.set(True)
    try:
        yield
    finally:
        _pdl.reset(before)


def pdl_options() -> dict:
    """Launch options: programmatic dependent launch within `pdl`, where the GPU has it."""
    capability = machine.this_machine().capability
    if _pdl.get() and capability and capability >= (9, 0) and not torch.version.hip:
        return dict(PDL=True, launch_pdl=True)
    return dict(PDL=False)


@triton.jit
def launch_dependents(PDL: tl.constexpr):
    """Let the next kernel start: it too waits before it reads what this one writes."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait(PDL: tl.constexpr):
    """Wait for all that the kernels before have written."""
    if PDL:
        gdc_wait()
