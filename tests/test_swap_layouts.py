"""Parts are proved and timed on inputs that lie in memory as those of the model do."""

import pytest
import torch
from swapping import OwnRMSNorm
from torch import nn

from whet.choices import Choices
from whet.op import lay, layout_of
from whet.swap import Met
from whet.swap._groups import grouped, recorded, serving, stepper
from whet.swap._proof import cast, laid_as
from whet.swap._replace import as_call, kept, met_in, recognise
from whet.workload import Workload

X = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0))
LAID = {name: lay(X, name) for name in ("contiguous", "sliced", "strided", "transposed", "expanded")} | {
    "one of each row": X[:, 0], "expanded, apart": X[:, :1, :3].expand(4, 6, 3), "heads": X.transpose(0, 1)[1:],
    "scalar": X[0, 0, 0], "none": X[:0], "a number for all": torch.randn(1).expand(3),
    "whole numbers": torch.arange(20).view(4, 5)[:, 1:3],
}


@pytest.mark.parametrize("name", LAID)
def test_a_copy_lies_as_the_tensor_does_and_is_a_leaf_of_its_own(name):
    t = LAID[name]
    dtype = torch.float64 if t.is_floating_point() else t.dtype
    for copy in (laid_as(t, dtype), kept((t,))[0], *([cast(t, dtype)] if t.is_floating_point() else [])):
        assert copy.shape == t.shape and torch.equal(copy.to(t.dtype), t)
        far = {"one of each row": (16, 1), "expanded, apart": (16, 0, 1)}
        assert copy.stride() == far.get(name, t.stride())
        assert layout_of(copy) == layout_of(t)
        assert not t.numel() or copy.untyped_storage().data_ptr() != t.untyped_storage().data_ptr()
        assert not t.is_floating_point() or copy.requires_grad_().is_leaf


def test_what_shares_places_is_copied_apart():
    t = torch.arange(10.0).unfold(0, 4, 1)
    assert laid_as(t, t.dtype).is_contiguous() and torch.equal(laid_as(t, t.dtype), t)


def test_a_few_elements_far_apart_take_little_memory():
    t = torch.zeros(1000, 500)[:, 0]
    assert laid_as(t, t.dtype).untyped_storage().nbytes() <= 4 * 16 * t.numel()
    t = torch.zeros(4, 64, 2000)[:, -1:]
    copy = laid_as(t, torch.float64)
    assert copy.untyped_storage().nbytes() <= 8 * 1.1 * t.numel() and layout_of(copy) == layout_of(t) == "sliced"


def test_what_has_no_strides_is_cloned():
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)])
    packed = torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8)
    one, other = kept((nested, packed))
    assert one.is_nested and other.is_quantized and torch.equal(other.dequantize(), packed.dequantize())


class Pooled(nn.Module):
    """The norm of each row's first token, as a classifier's head takes it."""

    def __init__(self):
        super().__init__()
        self.norm = OwnRMSNorm(32)

    def forward(self, x):
        return self.norm((x * 2)[:, 0]).square().mean()


def test_the_call_that_is_timed_is_the_call_that_the_model_makes():
    model, call = Pooled(), as_call(torch.randn(6, 5, 32))
    found = recognise(model, call, Choices(), only=("norms",))
    made = recorded(found, [Workload(model, call.args, {}, "train")], found.sites)
    (group,), (met,) = grouped(found.sites), [met_in(model, call)["norm"]]
    assert isinstance(met, Met) and met.args[0].stride() == (40, 1)
    asked: list = []
    ops = Choices()
    ops.pick = lambda op, call: asked.append(call) or "eager"  # type: ignore[method-assign]
    serving(group.sites[0][0], stepper(model.norm, met, True), ops)
    assert [c.case["layout"] for c, _ in made] == [c.case["layout"] for c in asked] == ["sliced"]
