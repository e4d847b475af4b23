"""A gated MLP that is wide keeps gate and up for the backward and no more: right, smaller, and only where that is possible."""

import copy
import sys

import pytest
import torch
import torch.nn.functional as F
from odd_sizes import APART, ONE
from swapping import FAMILIES, OwnMLP, built
from test_swap_biases import stepped
from torch import nn

import whet
from whet.choices import Choices, Recorder
from whet.swap import gated_mlp
from whet.swap._optimize import together
from whet.swap._proof import prove
from whet.swap._replace import as_call, recognise

TRITON = Choices(default="triton")


@pytest.fixture(autouse=True)
def narrow_is_wide(monkeypatch):
    monkeypatch.setattr(gated_mlp, "WIDE", 1)


def found_in(model: nn.Module, call):
    return recognise(model, call, Choices(), only=("gated_mlp",))


def asked(found, run) -> set[str]:
    recorder = Recorder()
    found.ask(recorder)
    run()
    found.restore()
    return {call.op for call, _ in recorder.calls.values()}


def kept_elements(run) -> int:
    """Elements of the tensors that a forward keeps for its backward, each once."""
    held: dict[int, int] = {}

    def pack(t):
        held[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes() // t.element_size()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = run()
    assert out.requires_grad
    return sum(held.values())


@pytest.mark.parametrize("form", [APART, ONE])
def test_the_activation_is_not_kept_and_gradients_are_the_modules(form):
    torch.manual_seed(0)
    mlp, x = OwnMLP(32, 96).train(), torch.randn(8, 10, 32, requires_grad=True)
    want = torch.autograd.grad(mlp(x).square().sum(), [x, *mlp.parameters()])
    found = found_in(mlp, as_call((x.detach(),)))
    sites = [(s.with_forms([form]), v) for s, v in found.sites]
    weights = sum(p.numel() for p in mlp.parameters())
    found.ask(TRITON, sites)
    assert kept_elements(lambda: mlp(x)) <= x.numel() + 2 * 80 * 96 + 2 * weights, "x, gate, up, and no third of their size"
    got = torch.autograd.grad(mlp(x).square().sum(), [x, *mlp.parameters()])
    found.restore()
    assert kept_elements(lambda: mlp(x)) > x.numel() + 3 * 80 * 96
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", ["Llama", "Gemma2", "ModernBert"])
def test_families_train_with_the_models_loss_and_gradients(name):
    pytest.importorskip("transformers")
    model = built(name, torch.float32)
    call = as_call(FAMILIES[name].batch())
    want = stepped(model, call)
    found = found_in(model, call)
    assert found.sites and asked(found, lambda: model(*call.args, **call.kwargs)) == {"gated_linear"}
    verdict = prove(together(found, call), call, TRITON)
    assert verdict.ok and verdict.share > 0, verdict.why
    found.ask(TRITON)
    got = stepped(model, call)
    torch.testing.assert_close(got[0], want[0])
    for k, grad in got[1].items():
        torch.testing.assert_close(grad, want[1][k], msg=lambda text, k=k: f"{k}: {text}")


def test_it_is_asked_for_in_training_of_plain_layers_without_a_bias_and_outside_torch_compile_alone(monkeypatch):
    mlp, x = OwnMLP(32, 96).train(), torch.randn(80, 32)
    found = found_in(mlp, as_call((x,)))
    assert asked(found, lambda: mlp(x)) == {"gated_linear"}
    with torch.no_grad():
        assert asked(found, lambda: mlp(x)) == {"swiglu"}
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert asked(found, lambda: mlp(x)) == {"swiglu"}
    monkeypatch.undo()
    monkeypatch.setattr(gated_mlp, "WIDE", 33)
    assert asked(found, lambda: mlp(x)) == {"swiglu"}
    monkeypatch.setattr(gated_mlp, "WIDE", 32)
    seen: list = []
    hook = mlp.w2.register_forward_hook(lambda module, args, out: seen.append(out.shape))
    assert asked(found, lambda: mlp(x)) == {"swiglu"} and seen, "a layer with a hook is called"
    hook.remove()
    biased = copy.deepcopy(mlp)
    biased.w2 = nn.Linear(96, 32)
    assert asked(found_in(biased, as_call((x,))), lambda: biased(x)) == {"swiglu"}


@pytest.fixture
def needed(monkeypatch):
    """(dgate, dw) as each backward was asked for them."""
    module, seen = sys.modules["whet.ops.gated_linear"], []
    real = module.FUSED.backward

    def backward(dy, gate, up, w, activation, need_dgate, need_dw):
        seen.append((need_dgate, need_dw))
        return real(dy, gate, up, w, activation, need_dgate, need_dw)

    monkeypatch.setitem(vars(module.FUSED), "backward", backward)
    return seen


@pytest.mark.parametrize("frozen", [("w2",), ("w1", "w3")])
def test_only_what_trains_is_computed_and_right(frozen, needed):
    torch.manual_seed(0)
    mlp, x = OwnMLP(32, 96).train(), torch.randn(80, 32)
    for name in frozen:
        getattr(mlp, name).weight.requires_grad_(False)
    found, trained = found_in(mlp, as_call((x,))), [p for p in mlp.parameters() if p.requires_grad]
    want = torch.autograd.grad(mlp(x).sum(), trained)
    needed.clear()
    found.ask(TRITON)
    got = torch.autograd.grad(mlp(x).sum(), trained)
    assert needed == [("w1" not in frozen, "w2" not in frozen)]
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b)


def test_autocast_multiplies_in_its_dtype_and_wide_activations_are_rounded_once(needed):
    torch.manual_seed(0)
    mlp, x = OwnMLP(32, 96).train(), torch.randn(80, 32)
    found_in(mlp, as_call((x,))).ask(TRITON)
    needed.clear()
    with torch.autocast("cpu", torch.bfloat16):
        out = mlp(x)
    out.float().sum().backward()
    assert out.dtype == torch.bfloat16 and mlp.w2.weight.grad.dtype == torch.float32 and needed == [(True, True)]
    gate, up, w = torch.randn(80, 96), torch.randn(80, 96), mlp.w2.weight
    with torch.autocast("cpu", torch.bfloat16):
        wide = whet.ops.gated_linear(gate, up, w, impl="triton")
        assert torch.equal(wide, F.linear(whet.ops.swiglu(gate, up, impl="triton"), w)), "rounded once, before the product"


def test_vmap_around_it_has_the_gradients_of_a_loop():
    torch.manual_seed(0)
    mlp, x = OwnMLP(32, 96).train(), torch.randn(2, 80, 32)
    found_in(mlp, as_call((x[0],))).ask(TRITON)
    want = torch.autograd.grad(sum(mlp(one).square().sum() for one in x), list(mlp.parameters()))
    got = torch.autograd.grad(torch.vmap(mlp)(x).square().sum(), list(mlp.parameters()))
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b)


def test_hooks_of_all_modules_see_every_layer():
    mlp, x, seen = OwnMLP(32, 96).train(), torch.randn(80, 32), []
    found = found_in(mlp, as_call((x,)))
    hook = torch.nn.modules.module.register_module_forward_hook(lambda module, args, out: seen.append(type(module)))
    try:
        assert asked(found, lambda: mlp(x)) == {"swiglu"} and seen.count(nn.Linear) == 3
    finally:
        hook.remove()


def test_with_checkpoints_it_is_computed_again_with_the_rest():
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    mlp, x = OwnMLP(32, 96).train(), torch.randn(80, 32, requires_grad=True)
    found_in(mlp, as_call((x.detach(),))).ask(TRITON)
    want = torch.autograd.grad(mlp(x).sum(), [x, *mlp.parameters()])
    got = torch.autograd.grad(checkpoint(mlp, x, use_reentrant=False).sum(), [x, *mlp.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(got, want))
