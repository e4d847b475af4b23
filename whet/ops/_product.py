"""The products of decoding as ops: what norm_linear, linear_add, norm_swiglu and norm_argmax have alike, written once.

Each has x (M, K), w and its scale; norm, res, bias and eps where its reference takes them.
"""

import inspect
from collections.abc import Callable
from typing import Any

from whet.op import Impl, Op, layout_of
from whet.ops._gemv import PRODUCT_LIMITS, check_product, multiply, product_refused
from whet.ops._weights import quant_of
from whet.torch_ops import Forward

SCHEMA = {inspect.Parameter.empty: "Tensor", None: "Tensor?"}  # of an argument, by its default; others are numbers


def check(scale=None, eps=0.0, **args) -> str | None:
    return check_product(scale=scale, **args)


def refuses(eps=0.0, **args) -> str | None:
    return product_refused(**args)


def product_op(
    name: str, reference: Callable, run_torch: Callable, launch: Callable | None = None, fake: Callable | None = None,
    returns: str = "Tensor", rows: str = "N", paired: bool = False, **parts: Any,
) -> Op:
    """One of these ops, of what it alone has; parts are Op's own.

    launch, fake, returns   of another kernel than multiply's, as Forward takes them
    rows, paired            what the rows of w are called in a case; whether two of them, gate and up, make a column of y
    """
    given = {k: p.default for k, p in inspect.signature(reference).parameters.items()}

    def case_of(x, w, bias=None, **_):
        case = dict(M=x.shape[0], K=x.shape[1]) | {rows: w.shape[0] // (1 + paired)}
        case |= {"quant": quant} if (quant := quant_of(w)) else {}
        case |= {} if bias is None else {"bias": True}
        return case if x.is_contiguous() else case | {"layout": layout_of(x)}

    def multiplied(*args):
        a = dict(zip((*given, "tile"), args))
        return multiply(
            a["x"], a.get("norm"), a["w"], a["scale"], a.get("bias"), a.get("res"), a.get("eps", 0.0), paired=paired,
            tile=a["tile"],
        )

    def empty(*args):
        a = dict(zip(given, args))
        return a["x"].new_empty(a["x"].shape[0], a["w"].shape[0] // (1 + paired))

    types = [f"{SCHEMA.get(default, 'float')} {k}" for k, default in given.items()]
    kernel = Forward(name, f"({', '.join(types)}, str? tile) -> {returns}", launch or multiplied, fake or empty)

    def run_triton(*args, tile=None, **named):
        bound = given | dict(zip(given, args)) | named
        return kernel(*bound.values(), tile)

    triton = Impl(run_triton, refuses, needs="triton", limits=PRODUCT_LIMITS)
    made: dict[str, Any] = dict(check=check, grads=(), dynamic=("M",)) | parts
    return Op(name=name, reference=reference, case_of=case_of, impls={"torch": Impl(run_torch), "triton": triton}, **made)
