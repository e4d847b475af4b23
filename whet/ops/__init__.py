"""Every op as a function: whet.ops.rms_norm(x, w, eps, impl="auto").  One file per op, found by discovery."""

from whet.choices import public
from whet.op import discover

globals().update({name: public(op) for name, op in discover().items()})
__all__ = sorted(discover())
