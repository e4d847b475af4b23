"""The mask function of whet's attention interface: a causal mask that is known to be one is not built."""

import threading
from typing import Any


class CausalKnowledge(threading.local):
    """What the mask function may know while a decoder runs.

    causal   the batch has neither positions nor a mask of its own
    skipped  {window: whether Transformers, when it looked, let the kernels' own causal mask do}, of the decoder that runs
    """

    causal = False
    skipped: dict[int | None, bool] = {}


KNOWN = CausalKnowledge()
PACKING = "packed_sequence_mask_function"


def parts_of(mask_function: Any) -> list[str]:
    """The names of the masks that Transformers' and_masks joined into one; of any other, its own."""
    name = getattr(mask_function, "__qualname__", "")
    if not name.startswith("and_masks."):
        return [name.partition(".")[0]]
    held = [c.cell_contents for c in mask_function.__closure__ or ()]
    return [part for joined in held if isinstance(joined, tuple) for f in joined for part in parts_of(f)]


def is_causal_alone(parts: list[str], length: int, window: int | None) -> bool:
    """Whether masks joined are the causal one where nothing is packed, and a window is no shorter than the sequence."""
    free = [PACKING, *(["sliding_window_overlay"] if window is not None and window >= length else [])]
    return {part for part in parts if part not in free} == {"causal_mask_function"}


def mask(*args, **options):
    """As Transformers' sdpa_mask; None, which is the kernels' own causal mask, where that is known to be the same.

    Where Transformers may look at the positions, it decides, and what it decided is noted. Where it may not, it adds the
    mask of packed sequences to be safe; without positions of the caller's own there are none.
    """
    from transformers.masking_utils import sdpa_mask

    length, window = options.get("q_length"), options.get("local_size")
    whole = not args and options.get("attention_mask") is None and not options.get("q_offset") and not options.get("use_vmap")
    if not (KNOWN.causal and whole and isinstance(length, int) and length == options.get("kv_length")):
        return sdpa_mask(*args, **options)
    parts = parts_of(options.get("mask_function"))
    if PACKING not in parts:
        made = sdpa_mask(*args, **options)
        KNOWN.skipped[window] = made is None
        return made
    known = KNOWN.skipped.get(window, False) and is_causal_alone(parts, length, window)
    return None if known else sdpa_mask(*args, **options)
