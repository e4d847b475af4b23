"""The mask function of whet's attention interface: a causal mask that is known to be one is not built."""

import threading
from typing import Any

import torch

PACKED, WINDOW, CAUSAL = "packed_sequence_mask_function", "sliding_window_overlay", "causal_mask_function"


class CausalKnown(threading.local):
    """Of which decoder this thread runs the forward, by its config, where the batch has neither positions nor a mask."""

    def __init__(self):
        self.config: Any = None  # not of the class: torch.compile's guards want it on the instance


KNOWN = CausalKnown()


def parts_of(mask_function: Any) -> list[str]:
    """The names of the masks that Transformers' and_masks joined into one; of any other, its own."""
    name = getattr(mask_function, "__qualname__", "")
    if not name.startswith("and_masks."):
        return [name.partition(".")[0]]
    held = [c.cell_contents for c in mask_function.__closure__ or ()]
    return [part for joined in held if isinstance(joined, tuple) for f in joined for part in parts_of(f)]


def is_causal_alone(parts: list[str], length: int, window: int | None) -> bool:
    """Whether masks joined are the causal one where nothing is packed, and a window is no shorter than the sequence."""
    free = [PACKED, *([WINDOW] if window is not None and window >= length else [])]
    return {part for part in parts if part not in free} == {CAUSAL}


def known(options: dict, tracing: bool) -> bool:
    """Whether the mask that is asked for is the kernels' own causal one, whatever the batch holds.

    Where Transformers may look at the positions it finds what is packed itself. What it joins where it may not says
    nothing; that it then allows no mask to be spared comes from that alone.
    """
    if KNOWN.config is None or options.get("config") is not KNOWN.config or not tracing or options.get("use_vmap"):
        return False
    if options.get("attention_mask") is not None:
        return False
    length, window = options.get("q_length"), options.get("local_size")
    starts = [options.get(name, 0) for name in ("q_offset", "kv_offset")]  # of a static cache a tensor, which is not read
    if not isinstance(length, int) or length != options.get("kv_length") or not all(type(s) is int and s == 0 for s in starts):
        return False
    parts = parts_of(options.get("mask_function"))
    return (PACKED in parts or options.get("allow_is_causal_skip", True)) and is_causal_alone(parts, length, window)


def mask(*args, **options):
    """As Transformers' sdpa_mask; None, which is the kernels' own causal mask, where that is known to be the same."""
    from transformers import masking_utils

    if not args and not torch.compiler.is_compiling() and known(options, masking_utils.is_tracing()):
        return None
    return masking_utils.sdpa_mask(*args, **options)
