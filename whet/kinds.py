"""What an argument of an op may be, in words that a machine reads: "tensor | None", "number", "int >= 1", "'mean' | 'sum'".

tensor      a strided tensor of real numbers with plain elements; its shape and dtype are for the op's own check
int         within int64;  number     such an int, or a float that is finite in float32;  bool     True or False;  'word';  None
dtype       a torch.dtype; which of them is for the op's own check
A number of numpy, or of any other type that Python's `numbers` knows, is taken for the int or the float that it equals.
A bool is no number, a float no int, and a tensor of one element neither.
"""

import contextlib
import inspect
import numbers
from collections.abc import Callable, Mapping

import torch

LARGEST = torch.finfo(torch.float32).max
OWN = (int, float, bool, str, type(None))
WORDS = {"tensor": "a tensor", "number": "a finite number", "int": "an int", "bool": "True, False", "dtype": "a torch.dtype"}


def kinds_of(function: Callable, declared: Mapping[str, str]) -> dict[str, str]:
    """The kind of every argument: as declared, else as its default says. None is the default of an optional tensor."""
    def kind(p: inspect.Parameter) -> str:
        if p.default is p.empty:
            return "tensor"
        named = {bool: "bool", int: "int", float: "number", type(None): "tensor | None"}
        if type(p.default) not in named:
            raise ValueError(f"the kind of {p.name} must be declared, since its default {p.default!r} does not say it")
        return named[type(p.default)]

    parameters = inspect.signature(function).parameters
    if unknown := set(declared) - set(parameters):
        raise ValueError(f"kinds must name arguments among {list(parameters)}, got {sorted(unknown)}")
    return {name: declared.get(name) or kind(p) for name, p in parameters.items()}


def wrong(name: str, kind: str, value) -> str | None:
    """None, or what the argument must be and what it is. Plain enough for torch.compile to trace."""
    for one in kind.split(" | "):
        if fits(one, value):
            return f"{name} {reason}" if one == "tensor" and (reason := odd(value)) else None
    return f"{name} must be {expected(kind)}, got {shown(value, kind)}"


def fits(one: str, value) -> bool:
    """Whether a value is of one kind."""
    what, _, least = one.partition(" >= ")
    if what == "tensor":
        return isinstance(value, torch.Tensor)
    if what == "dtype":
        return isinstance(value, torch.dtype)
    if what == "None":
        return value is None
    if what == "bool" or isinstance(value, bool):
        return what == "bool" and isinstance(value, bool)
    if what == "int":
        return isinstance(value, (int, torch.SymInt)) and (int(least) if least else -(2**63)) <= value < 2**63
    if what == "number":
        return fits("int", value) or (isinstance(value, (float, torch.SymFloat)) and -LARGEST <= value <= LARGEST)
    return isinstance(value, str) and value == what[1:-1]


def odd(t: torch.Tensor) -> str | None:
    """None, or what sets a tensor apart from those that formulas and kernels are written for, and the way out."""
    if t.is_nested:
        return "must be a tensor of one shape, got a nested one; use torch.nested.to_padded_tensor"
    if t.layout != torch.strided:
        return f"must be a strided tensor, got {t.layout}; use .to_dense()"
    if t.is_quantized:
        return f"must be a plain tensor, got {t.dtype}; use .dequantize()"
    if t.dtype.is_complex:
        return f"must be a tensor of real numbers, got {t.dtype}; use torch.view_as_real"
    return None


def memoryless(t: torch.Tensor) -> str | None:
    """None, or why a kernel that is handed an address cannot read this tensor. While tracing none is handed one."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return None
    if t.is_meta:
        return "needs tensors with memory, got one on meta"
    if type(t).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return f"needs plain tensors, got a {type(t).__name__}"
    return "needs tensors whose memory holds their values, got a negated view; use .resolve_neg()" if t.is_neg() else None


def expected(kind: str) -> str:
    """A kind as a message says it: "None or an int of at least 1"."""
    def describe(one: str) -> str:
        what, _, least = one.partition(" >= ")
        return WORDS.get(what, what) + (f" of at least {least}" if least else "")

    parts = ", ".join(describe(one) for one in kind.split(" | ")).split(", ")
    return " or ".join([", ".join(parts[:-1]), parts[-1]] if parts[1:] else parts)


def shown(value, kind: str) -> str:
    """A value as a message says it, in one short line, whatever it is."""
    if isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}; use .item()" if "number" in kind or "int" in kind else f"a {type(value).__name__}"
    if type(value) not in OWN or (value is None and kind == "tensor"):
        return type(value).__name__
    if isinstance(value, int) and not -(2**64) < value < 2**64:
        return f"an int of {value.bit_length()} bits"
    if isinstance(value, float) and LARGEST < abs(value) < float("inf"):
        return f"{value!r}, beyond float32"
    return repr(value) if len(repr(value)) <= 60 else f"{repr(value)[:60]}..."


def plain(kind: str, value):
    """A number of another type as Python's own, where the kind takes one; anything else as it is."""
    if type(value) in OWN or isinstance(value, torch.Tensor) or not isinstance(value, numbers.Real):
        return value
    with contextlib.suppress(Exception):  # a type whose conversion fails is then refused by its name
        if isinstance(value, numbers.Integral):
            return int(value) if "int" in kind or "number" in kind else value
        return float(value) if "number" in kind else value
    return value
