"""The mask function of whet's attention interface: a causal mask that is known to be one is not built."""

from typing import Any, cast


class Known:
    """What the mask function may know while a decoder runs."""

    causal = False  # the batch has neither positions nor a mask of its own
    spared = 0  # masks that were not built


def parts_of(mask_function: Any) -> list[str]:
    """The names of the masks that Transformers' and_masks joined into one; of any other, its own."""
    name = getattr(mask_function, "__qualname__", "")
    if not name.startswith("and_masks."):
        return [name.partition(".")[0]]
    held = [c.cell_contents for c in mask_function.__closure__ or ()]
    return [part for joined in held if isinstance(joined, tuple) for f in joined for part in parts_of(f)]


def is_causal_alone(parts: list[str], length: int, window: int | None) -> bool:
    """Whether masks joined are the causal one where nothing is packed, and a window is no shorter than the sequence."""
    free = ["packed_sequence_mask_function", *(["sliding_window_overlay"] if window is not None and window >= length else [])]
    return {part for part in parts if part not in free} == {"causal_mask_function"}


def mask(*args, **options):
    """As Transformers' sdpa_mask; None, which is the kernels' own causal mask, where that is known to be the same."""
    from transformers.masking_utils import sdpa_mask

    length = options.get("q_length")
    whole = not args and options.get("attention_mask") is None and not options.get("q_offset") and not options.get("use_vmap")
    square = isinstance(length, int) and length == options.get("kv_length")
    if not (Known.causal and whole and square):
        return sdpa_mask(*args, **options)
    if not is_causal_alone(parts_of(options.get("mask_function")), cast(int, length), options.get("local_size")):
        return sdpa_mask(*args, **options)
    Known.spared += 1
    return None
