"""Models with quantised linears: those stay as they are, what is around them is replaced, packed weights are never cast."""

import pytest
import torch
import torch.nn.functional as F
from swapping import batch, built
from test_swap_use import agree, replaced, trained
from torch import nn

from whet.swap._packed import is_packed
from whet.swap._proof import Float64Everywhere, copied, own_dtype

pytest.importorskip("transformers")


class Linear4bit(nn.Module):
    """As bitsandbytes has it: two weights in a byte, a state beside them, products in a dtype of its own."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, None
        w = linear.weight.detach().float()
        scale = w.abs().amax(1, keepdim=True) / 7
        q = (w / scale).round().to(torch.int8) + 8
        self.weight = nn.Parameter((q[:, ::2] * 16 + q[:, 1::2]).to(torch.uint8), requires_grad=False)
        self.quant_state, self.compute_dtype = {"absmax": scale}, torch.float32

    def forward(self, x):
        assert self.weight.dtype is torch.uint8
        q = torch.stack([self.weight // 16, self.weight % 16], -1).flatten(1).to(self.compute_dtype) - 8
        w = q * self.quant_state["absmax"].to(self.compute_dtype)
        return F.linear(x.to(self.compute_dtype), w.to(x.to(self.compute_dtype).dtype)).to(x.dtype)


class Float8Linear(nn.Module):
    """A float8 weight and its scale, as scaled products take them: for bfloat16 and float32 alone."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        scale = linear.weight.detach().abs().max() / 448
        self.weight = nn.Parameter((linear.weight.detach() / scale).to(torch.float8_e4m3fn), requires_grad=False)
        self.register_buffer("scale", scale)

    def forward(self, x):
        assert self.weight.dtype is torch.float8_e4m3fn
        return F.linear(x, self.weight.to(x.dtype) * self.scale.to(x.dtype))


class Blocks(nn.Module):
    """As GPTQ: integers in a buffer, and no weight; half precision or single, nothing else."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        scale = linear.weight.detach().abs().max() / 127
        self.register_buffer("qweight", (linear.weight.detach() / scale).round().to(torch.int32))
        self.register_buffer("scales", scale)

    def forward(self, x):
        if x.dtype not in (torch.float32, torch.float16):
            raise TypeError(f"no kernel for {x.dtype}")
        return F.linear(x, self.qweight.to(x.dtype) * self.scales.to(x.dtype))


class Int8Tensor(torch.Tensor):
    """As torchao's: a tensor that says it is float32 and holds integers; a linear layer is all that it can serve."""

    @staticmethod
    def __new__(cls, q, scale):
        return torch.Tensor._make_wrapper_subclass(cls, q.shape, dtype=torch.float32)

    def __init__(self, q, scale):
        self.q, self.scale = q, scale

    def __deepcopy__(self, memo):
        return Int8Tensor(self.q.clone(), self.scale.clone())

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.linear:
            x, w, *rest = args
            return F.linear(x, w.q.float() * w.scale, *rest)
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return Int8Tensor(args[0].q, args[0].scale)
        raise NotImplementedError(f"Int8Tensor has no {func}")


def subclassed(linear: nn.Linear) -> nn.Linear:
    scale = linear.weight.detach().abs().max() / 127
    made = nn.Linear(linear.in_features, linear.out_features, bias=False, device="meta")
    w = Int8Tensor((linear.weight.detach() / scale).round().to(torch.int8), scale)
    made.weight = nn.Parameter(w, requires_grad=False)
    return made


def quantised(make, head: bool) -> nn.Module:
    model = built("Llama", torch.float32)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and (head or name != "lm_head"):
                setattr(module, name, make(child))
    return model


COUNTED = ("norms", "residual_norm", "gated_mlp", "rotary", "attention", "lm_head")


@pytest.mark.parametrize("make", [Linear4bit, Float8Linear, Blocks, subclassed])
@pytest.mark.parametrize("head", [False, True], ids=["plain head", "packed head"])
def test_linears_stay_as_they_are_and_what_is_around_them_is_replaced(make, head):
    model, data = quantised(make, head), batch()
    linears = {n: set(vars(m)) for n, m in model.named_modules() if is_packed(m)}
    assert len(linears) == 14 + head
    expected = trained(model, data)
    found = replaced(model)
    counts = {k: sum(s.kind == k for s, _ in found.sites) for k in COUNTED}
    assert counts == dict(norms=3, residual_norm=2, gated_mlp=2, rotary=2, attention=2, lm_head=1 - head), found.left
    assert [x.why.startswith("its head") for x in found.left] == [True] * head
    assert {n: set(vars(model.get_submodule(n))) for n in linears} == linears
    agree(trained(model, data), expected)


def test_a_copy_keeps_packed_weights_and_casts_the_others():
    model = nn.Sequential(nn.Linear(8, 8), Linear4bit(nn.Linear(8, 8)), Float8Linear(nn.Linear(8, 8)), nn.BatchNorm1d(8))
    twin = copied(model, torch.float64, torch.float32)
    dtypes = [twin[0].weight.dtype, twin[1].weight.dtype, twin[2].weight.dtype, twin[3].running_mean.dtype]
    assert dtypes == [torch.float64, torch.uint8, torch.float8_e4m3fn, torch.float64]
    x = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    with Float64Everywhere():
        twin(x).sum().backward()
    assert x.grad.dtype is torch.float64 and own_dtype(model[2:].parameters()) is torch.float32


class Spoiled(Linear4bit):
    """Nothing of its output can be differentiated."""

    def forward(self, x):
        return super().forward(x.detach())


def test_a_gradient_that_a_packed_linear_cuts_is_cut_in_the_proof_too():
    model, data = quantised(Spoiled, False), batch()
    expected = trained(model, data)
    replaced(model)
    agree(trained(model, data), expected)
