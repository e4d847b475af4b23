"""The mask function of whet's attention interface: a mask that is known to be full or causal is not built."""

import sys
import threading
from typing import Any

import torch

PACKED, WINDOW, CAUSAL = "packed_sequence_mask_function", "sliding_window_overlay", "causal_mask_function"
REMAPPED = "remap_positions_for_packed_sequence"  # from Transformers 5.23 on: a mask of positions within what is packed
JOINED = "and_mask"  # what and_masks returns; or_masks' is another
FULL = "allow_is_bidirectional_skip"  # an option of masks without a direction alone


class CausalKnown(threading.local):
    """Of which decoder this thread runs the forward, by its config, where the batch has neither positions nor a mask."""

    def __init__(self):
        self.config: Any = None  # not of the class: torch.compile's guards want it on the instance


KNOWN = CausalKnown()


def parts_of(mask_function: Any) -> list[str]:
    """The names of the masks that Transformers' and_masks joined into one; of any other, its own.

    A mask over remapped positions counts as the mask itself: where nothing is packed they are those of the row.
    """
    name = getattr(mask_function, "__qualname__", "")
    held = [c.cell_contents for c in getattr(mask_function, "__closure__", None) or ()]
    if name.startswith(f"{REMAPPED}."):
        return [part for inner in held if callable(inner) for part in parts_of(inner)]
    if not name.startswith("and_masks."):
        return [name.partition(".")[0]]
    return [part for joined in held if isinstance(joined, tuple) for f in joined for part in parts_of(f)]


def is_causal_alone(parts: list[str], length: int, window: int | None) -> bool:
    """Whether masks joined are the causal one where nothing is packed, and a window is no shorter than the sequence."""
    free = [PACKED, *([WINDOW] if window is not None and window >= length else [])]
    return {part for part in parts if part not in free} == {CAUSAL}


def is_causal_by_name(options: dict) -> bool:
    """The same where Dynamo traces: of a mask that was joined it says no more than its name.

    That is enough. Without vmap, which a caller's own function takes, Transformers joins to the causal mask what is
    packed, and a window or a chunk, whose size it names. Blocks are joined by or_masks, and have another name.
    """
    name, window = getattr(options.get("mask_function"), "__name__", ""), options.get("local_size")
    plain = name == JOINED or (name == CAUSAL and options.get("allow_is_causal_skip", True))
    return plain and FULL not in options and (window is None or window >= options["q_length"])


def from_the_start(options: dict) -> bool:
    """Whether queries and keys both begin at the first; of a static cache it is a tensor, which is not read."""
    return all(type(start) is int and start == 0 for start in (options.get("q_offset", 0), options.get("kv_offset", 0)))


def causal(options: dict) -> bool:
    """Whether the mask that is asked for while Transformers may not look is the kernels' own causal one.

    Where it may look at the positions it finds what is packed itself. What it joins where it may not says nothing; that
    it then allows no mask to be spared comes from that alone.
    """
    if KNOWN.config is None or options.get("config") is not KNOWN.config or options.get("use_vmap"):
        return False
    length, window = options.get("q_length"), options.get("local_size")
    if options.get("attention_mask") is not None or not isinstance(length, int):
        return False
    if length != options.get("kv_length") or not from_the_start(options):
        return False
    if torch.compiler.is_compiling():
        return is_causal_by_name(options)
    parts = parts_of(options.get("mask_function"))
    return (PACKED in parts or options.get("allow_is_causal_skip", True)) and is_causal_alone(parts, length, window)


def full(options: dict) -> bool:
    """Whether every query sees every key, by what the host knows. Transformers spares such a mask too where it may look."""
    if not options.get(FULL) or options.get("use_vmap") or options.get("attention_mask") is not None:
        return False
    window = options.get("local_size")
    return window is None or (options["q_length"] < window and options["kv_length"] < window and from_the_start(options))


def mask(*args, **options):
    """As Transformers' sdpa_mask; None, for no mask or the kernels' own causal one, where that is known to be the same.

    Transformers is not imported here: torch.compile traces this, and of a module that loads lazily it makes nothing.
    """
    masking = sys.modules["transformers.masking_utils"]  # its caller
    if not args and (full(options) or (masking.is_tracing() and causal(options))):
        return None
    return masking.sdpa_mask(*args, **options)
