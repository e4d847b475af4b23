"""Triton's interpreter made to round as a GPU does, to keep a NaN in E4M3, and to prepare its language once a launch.

As it comes it cuts the low bits off a float32 that becomes a bfloat16, which makes every result too small by 0.3% on average: a
bias that no GPU has and that a verifier of rounding errors must not see. And each call of one jitted function by another
patches the whole of triton.language again, which takes half of a kernel's time.
"""

import functools

import numpy as np

from whet import machine


def nearest_bfloat16(bits: np.ndarray) -> np.ndarray:
    """The bits of float32 values as the bits of the nearest bfloat16 ones; NaN stays NaN."""
    bits = bits.astype(np.uint32)
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(nan, (bits >> 16) | 0x40, rounded).astype(np.uint16)


@functools.cache
def mend() -> None:
    """Mend the interpreter of this process, where kernels are interpreted at all."""
    if machine.triton_mode() != "interpret":
        return
    from triton.runtime import interpreter

    round_to_nearest(interpreter)
    if hasattr(interpreter, "_LangPatchScope"):
        patch_once(interpreter)


def patch_once(interpreter) -> None:
    """Within a launch, a set of language modules is patched when a function first needs it and not again."""
    import triton.language as tl

    patch, launch, done = interpreter._patch_lang, interpreter.GridExecutor.__call__, set()

    @functools.cache
    def modules(fn) -> frozenset:
        return frozenset(name for name, lang in (("tl", tl), ("core", tl.core)) if lang in fn.__globals__.values())

    def patch_lang(fn):
        if modules(fn) in done:
            return interpreter._LangPatchScope()
        done.add(modules(fn))
        return patch(fn)

    def launched(self, *args, **kwargs):
        done.clear()
        return launch(self, *args, **kwargs)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_lang, launched


def round_to_nearest(interpreter) -> None:
    import triton.language as tl

    cuts = interpreter._convert_float
    nans = {tl.float16: np.uint16(0x7E00), tl.float32: np.uint32(0x7FC00000)}

    def convert(values, source, target, rounding_mode):
        if source == tl.float32 and target == tl.bfloat16:
            return nearest_bfloat16(np.ascontiguousarray(values).view(np.uint32)).reshape(values.shape)
        if source == tl.bfloat16 and target == tl.float32:  # exact either way; two passes instead of dozens
            return (np.ascontiguousarray(values).view(np.uint16).astype(np.uint32) << 16).reshape(values.shape)
        converted = cuts(values, source, target, rounding_mode)
        if target == tl.float8e4nv and source in (tl.float32, tl.float16):
            return np.where(np.isnan(values), np.uint8(0x7F), converted)
        if source == tl.float8e4nv and target in nans:
            nan = (np.ascontiguousarray(values).view(np.uint8).reshape(values.shape) & 0x7F) == 0x7F
            return np.where(nan, nans[target], converted)
        return converted

    interpreter._convert_float = convert
