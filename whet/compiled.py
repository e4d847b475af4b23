"""torch.compile of a formula, as every op has it among its impls."""

import functools
from collections.abc import Callable

import torch
from torch._guards import detect_fake_mode


class NotTraced(RuntimeError):
    """A formula under torch.compile was handed tensors without values."""


def compiled(reference: Callable) -> Callable:
    """torch.compile of the reference, made at first use: one graph per shape, no dynamic guards to pay for."""

    @functools.cache
    def build():
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
        return torch.compile(reference, dynamic=False, fullgraph=True)

    @functools.wraps(reference)
    def run(*args, **options):
        if torch.compiler.is_compiling():
            return reference(*args, **options)  # inside a larger torch.compile the formula itself is what gets fused
        refuse_fake_tensors(reference.__module__.removeprefix("whet.ops.").partition(".")[0])
        return build()(*args, **options)

    return run


def refuse_fake_tensors(op: str) -> None:
    """What torch.compile refuses to trace of them it would skip for good in this process, and then fail with real ones too."""
    if torch._C._len_torch_dispatch_stack() and detect_fake_mode() is not None:
        raise NotTraced(f"{op} runs under torch.compile in some plan, which decides itself what it keeps")
