"""The dtype asked of a norm's result: how a case says it, and which are refused."""

import torch

from whet.op import DTYPE_NAMES, DTYPES
from whet.ops._rows import KERNEL_DTYPES

TWICE_ROUNDED = "an out_dtype with values that the result's own dtype cannot hold"


def to_case(out_dtype: torch.dtype | None, own: torch.dtype) -> dict[str, str]:
    """What a case says of a norm's out_dtype: nothing where the result has that dtype by itself."""
    return {} if out_dtype in (None, own) else dict(out_dtype=DTYPE_NAMES[out_dtype])


def from_case(name: str | None, own: torch.dtype) -> torch.dtype | None:
    """The inverse."""
    return None if name is None or DTYPES[name] == own else DTYPES[name]


def unknown(out_dtype: torch.dtype | None) -> str | None:
    """None, or why no norm can have this out_dtype."""
    if out_dtype is None or out_dtype in DTYPE_NAMES:
        return None
    return f"out_dtype must be None or one of {list(DTYPES)}, got {str(out_dtype).removeprefix('torch.')}"


def kernel_refuses(out_dtype: torch.dtype | None) -> str | None:
    """None, or why no kernel stores this out_dtype."""
    if out_dtype is None or out_dtype in KERNEL_DTYPES:
        return None
    return f"out_dtype must be float32, float16 or bfloat16, got {out_dtype}"


def twice_rounded(out_dtype: torch.dtype | None, own: torch.dtype) -> str | None:
    """None, or why the result of a call that rounds it to its own dtype cannot be cast to this one."""
    if out_dtype is None or torch.promote_types(own, out_dtype) == own:
        return None
    return f"out_dtype must be None or a dtype that {own} holds, to which its result is rounded first, got {out_dtype}"
