"""Arguments of a wrong kind: for every op and every way to call it, one line that names the argument, or the right result."""

import decimal
import fractions
import itertools
import re

import numpy
import pytest
import torch
from conftest import every_op, first_case
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

import whet.ops
from whet.choices import Choices, use
from whet.kinds import expected, kinds_of, wrong
from whet.op import Impl, discover

NEVER = {  # of no kind that an op takes
    "text": "1e-6", "no text": "", "lines": "one\ntwo", "long text": "q" * 5000, "bytes": b"mean", "complex": 1 + 2j,
    "list": [1], "tuple": (1,), "dict": {}, "object": object(), "function": print, "class": torch.Tensor, "dtype": torch.int8,
    "Decimal": decimal.Decimal(1), "numpy bool": numpy.bool_(True), "numpy array": numpy.array(1e-6),
    "nan": float("nan"), "inf": float("inf"), "1e300": 1e300, "long": 10**5000, "huge Fraction": fractions.Fraction(10**400),
}
SOMETIMES = {
    "None": None, "True": True, "False": False, "0": 0, "1": 1, "-1": -1, "2**70": 2**70, "1.0": 1.0, "2.5": 2.5,
    "float32 of numpy": numpy.float32(1e-6), "float64 of numpy": numpy.float64(0.5), "int64 of numpy": numpy.int64(1),
    "Fraction": fractions.Fraction(1, 3), "tensor of one": torch.tensor(1e-6), "tensor of none": torch.ones(0),
}


class Mine(torch.Tensor):
    """A subclass that changes nothing."""


def never_taken(t: torch.Tensor) -> dict:
    """A tensor's values in forms that no op takes."""
    wide = t.float()
    forms = {
        "coo": t.to_sparse(), "quantised": torch.quantize_per_tensor(wide, 0.1, 0, torch.qint8), "complex": t + 0j, "list": [t],
        "nested": torch.nested.nested_tensor([t, t]), "jagged": torch.nested.nested_tensor([t, t], layout=torch.jagged),
        "numpy": t.numpy(), "float8": wide.to(torch.float8_e5m2), "uint16": t.to(torch.uint16), "bool": t.bool(),
    }
    forms |= {"mkldnn": wide.to_mkldnn()} if t.dim() else {}
    return forms | ({"csr": t.to_sparse_csr()} if t.dim() == 2 else {})


def taken_by_some(t: torch.Tensor) -> dict:
    """A tensor's values in forms that some ops and some impls take."""
    return {
        "double": t.double(), "half": t.half(), "int32": t.int(), "int64": t.long(), "leaf": t.clone().float().requires_grad_(),
        "mine": t.as_subclass(Mine), "two": TwoTensor(t.clone(), t.clone()), "scalar": t.new_zeros(()), "flat": t.flatten(),
        "empty": t.new_zeros(0), "wider": t[None], "meta": t.to("meta"),
        "fake": FakeTensorMode(allow_non_fake_inputs=True).from_tensor(t),
    }


def copied(args: dict) -> dict:
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in args.items()}


def outcome(op, impl: str, args: dict) -> str:
    """"" where the call succeeds, else what it says; anything but a one-line ValueError of this op fails."""
    try:
        getattr(whet.ops, op.name)(**args, impl=impl)
    except ValueError as e:
        said = str(e)
        assert said.startswith(f"{op.name}[{impl}]: ") and "\n" not in said and len(said) < 500, said
        return said
    return ""


@pytest.fixture
def uncompiled():
    """What "compile" is handed is what counts here; a C++ compiler for each kind of argument is not needed."""
    with pytest.MonkeyPatch.context() as patch:
        for op in discover().values():
            patch.setitem(op.impls, "compile", Impl(op.reference))
        yield


@pytest.mark.filterwarnings("ignore")  # of nested, quantised and sparse tensors, which are made only to be refused
@pytest.mark.parametrize("op", every_op())
def test_an_argument_of_any_kind_is_served_or_refused_in_one_line(op, uncompiled):
    """Each value through "auto", where a right call came before, and through one impl after the other."""
    right = op.inputs(dtype=torch.float32, device="cpu", **first_case(op))
    impls = itertools.cycle(name for name in op.impls if op.unavailable(name) is None)
    with use(Choices()):
        assert outcome(op, "auto", copied(right)) == ""
        for name, kind in op.kinds.items():
            like = right[name] if isinstance(right[name], torch.Tensor) else torch.ones(4)
            never, some = NEVER | never_taken(like), SOMETIMES | taken_by_some(like)
            for form, value in (never | some).items():
                for impl in ("auto", next(impls)):
                    said = outcome(op, impl, copied(right) | {name: value})
                    assert form in some or re.search(rf"\b{name}\b", said), f"{form} for {name}, {kind}: {said or 'taken'}"


@pytest.mark.parametrize("impl", ["auto", "eager", "triton"])
def test_a_number_of_numpy_is_taken_for_the_number_that_it_equals(impl):
    x, w = torch.randn(3, 16), torch.rand(16)
    for value in (numpy.float32(0.5), numpy.float64(0.5), numpy.float16(0.5), fractions.Fraction(1, 2)):
        assert torch.equal(whet.ops.rms_norm(x, w, value, impl=impl), whet.ops.rms_norm(x, w, 0.5, impl=impl))
    q, k, (cos, sin) = torch.randn(1, 1, 3, 4), torch.randn(1, 1, 3, 4), torch.randn(2, 8, 2)
    moved = whet.ops.rope(q, k, cos, sin, numpy.int64(2), impl=impl)
    assert torch.equal(moved[0], whet.ops.rope(q, k, cos, sin, 2, impl=impl)[0])


def test_a_right_call_lets_no_equal_value_of_another_kind_pass():
    x, w, made = torch.randn(3, 16), torch.rand(16), Choices()
    made.rms_norm(x, w, 1)
    made.rms_norm(x, w, 1.0)
    assert torch.equal(made.rms_norm(x, w, numpy.float32(1)), made.rms_norm(x, w, 1.0))
    for value in (True, numpy.bool_(True), 1 + 0j, torch.tensor(1.0), "1.0"):
        with pytest.raises(ValueError, match=r"rms_norm\[auto\]: eps must be a finite number, got "):
            made.rms_norm(x, w, value)
    with pytest.raises(ValueError, match=r"rms_norm\[auto\]: w must be on x's device cpu, got meta"):
        made.rms_norm(x, w.to("meta"), 1.0)


def test_an_error_of_a_call_that_was_seen_before_is_the_arguments_where_they_are_wrong():
    x, w, made = torch.zeros(1, 1).expand(3, 16), torch.rand(16), Choices()
    assert made.rms_norm(x, w).shape == (3, 16)
    with pytest.raises(ValueError, match=r"rms_norm\[auto\]: x must be a strided tensor, got torch.sparse_coo") as raised:
        made.rms_norm(torch.ones(3, 16).to_sparse(), w)  # whose strides read 0, as those of an expanded tensor
    assert raised.value.__suppress_context__


@pytest.mark.parametrize("impl", ["auto", "eager", "triton"])
def test_parameters_and_plain_subclasses_are_tensors(impl):
    x, w = torch.randn(3, 16), torch.rand(16)
    expected = whet.ops.rms_norm(x, w, impl=impl)
    for given in (torch.nn.Parameter(w), w.as_subclass(Mine)):
        assert torch.equal(torch.Tensor(whet.ops.rms_norm(x, given, impl=impl).detach()), expected)


def test_a_tensor_without_memory_of_its_own_is_refused_by_kernels_and_served_by_formulas():
    x, w = torch.randn(3, 16), torch.rand(16)
    negated = torch.complex(x, x).conj().imag
    for given, word in ((TwoTensor(x, x), "TwoTensor"), (x.to("meta"), "meta"), (negated, "resolve_neg")):
        weight = w.to(given.device)
        with pytest.raises(ValueError, match=rf"rms_norm\[triton\]: .*{word}"):
            whet.ops.rms_norm(given, weight, impl="triton")
        with use(Choices(default="triton")):
            assert whet.ops.rms_norm(given, weight).shape == x.shape
    assert torch.equal(whet.ops.rms_norm(negated, w), whet.ops.rms_norm(-x, w))


def test_compiled_calls_take_numbers_that_change_and_refuse_wrong_kinds():
    torch._dynamo.reset()
    q, cos, sin = torch.randn(1, 1, 3, 4), torch.randn(8, 2), torch.randn(8, 2)

    def both(q, start, eps):
        return whet.ops.rope(q, q, cos, sin, start)[0], whet.ops.rms_norm(q, cos.new_ones(4), eps, impl="triton")

    run = torch.compile(both, backend="aot_eager", fullgraph=True)
    for start, eps in ((0, 1e-6), (2, 0.5), (3, 0.25)):
        assert all(torch.equal(a, b) for a, b in zip(run(q, start, eps), both(q, start, eps)))
    with pytest.raises(Exception, match=r"rms_norm\[triton\]: eps must be a finite number, got 'small'"):
        run(q, 0, "small")


def test_kinds_follow_from_defaults_and_say_themselves():
    def function(x, b=None, eps=1e-6, n=3, flag=False, how="none"):
        pass

    declared = dict(how="'none' | 'tanh' | None", n="None | int >= 1")
    kinds = dict(x="tensor", b="tensor | None", eps="number", flag="bool") | declared
    assert kinds_of(function, declared) == kinds
    assert expected(declared["how"]) == "'none', 'tanh' or None" and expected(declared["n"]) == "None or an int of at least 1"
    assert wrong("n", declared["n"], 0) and not wrong("n", declared["n"], 1) and wrong("flag", "bool", 1)
    with pytest.raises(ValueError, match="the kind of how must be declared"):
        kinds_of(function, {})
    with pytest.raises(ValueError, match="kinds must name arguments among .*'eps'.* got .*'size'"):
        kinds_of(function, dict(size="int"))


@pytest.mark.parametrize("op", every_op())
def test_defaults_are_of_their_own_kind(op):
    given = {k: p.default for k, p in op.signature.parameters.items() if p.default is not p.empty}
    assert not [reason for k, v in given.items() if (reason := wrong(k, op.kinds[k], v))]
