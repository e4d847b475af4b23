"""Linear layers with a bias, in training: the op is asked, results are right; what covers them; frozen parts, eval, compile."""

import copy
from dataclasses import replace

import pytest
import torch
from odd_sizes import odd_gpt, tokens
from swapping import FAMILIES, GPT, batch, biased, built, state
from test_swap_families import tokens as own_tokens
from torch import nn

from whet.choices import Choices, Recorder
from whet.swap import biased_linear
from whet.swap._groups import grouped, joined
from whet.swap._optimize import optimize, restore, together
from whet.swap._proof import cast, prove
from whet.swap._replace import as_call, prove_covered, recognise
from whet.swap._ways import Way

KIND = "biased_linear"
TRITON = Choices(default="triton")


def asked(found, model, call) -> dict[tuple, int]:
    """{(rows, in, out, layout of the weight): how often} the op is asked for in a forward."""
    recorder = Recorder()
    found.ask(recorder)
    model(*call.args, **call.kwargs)
    calls = [(call.case, n) for call, n in recorder.calls.values() if call.op == "linear_bias"]
    return {(c["M"], c["K"], c["N"], c.get("w_layout", "contiguous")): n for c, n in calls}


def paths(found) -> list[str]:
    return [s.path for s, _ in found.sites]


def stepped(model, call) -> tuple:
    """(loss, gradients by name) of one step."""
    model.zero_grad()
    out = model(*call.args, **call.kwargs)
    loss = out[1] if isinstance(out, tuple) else out.loss
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


MODELS = {
    "GPT2": (8, {(48, 64, 192, "transposed"): 2, (48, 64, 64, "transposed"): 2, (48, 64, 256, "transposed"): 2,
                 (48, 256, 64, "transposed"): 2}),
    "ViT": (12, {(34, 64, 64, "contiguous"): 8, (34, 64, 160, "contiguous"): 2, (34, 160, 64, "contiguous"): 2}),
    "Bert": (14, {(48, 64, 64, "contiguous"): 9, (48, 64, 160, "contiguous"): 2, (48, 160, 64, "contiguous"): 2,
                  (48, 64, 96, "contiguous"): 1}),
    "plain": (8, {(48, 64, 192, "contiguous"): 2, (48, 64, 64, "contiguous"): 2, (48, 64, 256, "contiguous"): 2,
                  (48, 256, 64, "contiguous"): 2}),
}


def made(name: str) -> tuple:
    """(model, what it is called with) in float32."""
    if name == "plain":
        torch.manual_seed(0)
        return GPT().train(), as_call(own_tokens())
    pytest.importorskip("transformers")
    return built(name, torch.float32), as_call(cast(FAMILIES[name].batch(), torch.float32))


@pytest.mark.parametrize("name", MODELS)
def test_every_bias_of_a_model_is_summed_by_the_op_with_the_models_loss_and_gradients(name):
    model, call = made(name)
    want, before = stepped(model, call), state(model)
    found = recognise(model, call, Choices(), only=(KIND,))
    count, calls = MODELS[name]
    assert len(found.sites) == count and not found.left and sorted(paths(found)) == sorted(biased(model))
    assert asked(found, model, call) == calls
    for choices in (Choices(), TRITON):
        found.restore()
        verdict = prove(together(found, call), call, choices)
        assert verdict.ok and verdict.share > 0, verdict.why
        found.ask(choices)
        got = stepped(model, call)
        assert torch.equal(got[0], want[0]) and got[1].keys() == want[1].keys(), "products have PyTorch's bits"
        assert all(g.stride() == want[1][n].stride() for n, g in got[1].items())
        assert all(torch.equal(g, want[1][n]) for n, g in got[1].items() if g.dim() > 1)
    found.restore()
    again = stepped(model, call)
    assert state(model) == before and torch.equal(again[0], want[0])
    assert all(torch.equal(g, want[1][n]) for n, g in again[1].items())


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 8)).train()


def test_a_frozen_bias_none_a_small_layer_a_model_in_eval_mode_and_inference_have_no_site():
    model, call = mlp(), as_call(torch.randn(40, 64))
    assert not recognise(nn.Sequential(nn.Linear(64, 64, bias=False)).train(), call, Choices(), only=(KIND,)).sites
    assert paths(recognise(model, call, Choices(), only=(KIND,))) == ["0", "2"]
    model[0].bias.requires_grad_(False)
    assert paths(recognise(model, call, Choices(), only=(KIND,))) == ["2"]
    assert not recognise(model, call, Choices(), only=(KIND,), train=False).sites
    assert not recognise(model.eval(), call, Choices(), only=(KIND,)).sites


def test_optimize_for_inference_has_no_site_though_the_model_is_in_training_mode():
    model = optimize(mlp(), torch.randn(40, 64), mode="infer", seconds=0.001)
    assert not [g for g in model.whet.groups if g.kind == KIND]
    assert "forward" not in vars(restore(model)[0])


@pytest.mark.parametrize("frozen", ["weight", "input", "both"])
def test_a_frozen_weight_and_an_input_without_a_gradient_get_none(frozen):
    model, x = mlp()[:1], torch.randn(40, 64)
    model[0].weight.requires_grad_(frozen == "input")
    given = x if frozen != "weight" else x.clone().requires_grad_()
    found = recognise(model, as_call(x), Choices(), only=(KIND,))
    want = torch.autograd.grad(model(given).square().sum(), model[0].bias)[0]
    found.ask(TRITON)
    model(given).square().sum().backward()
    torch.testing.assert_close(model[0].bias.grad, want)
    assert (model[0].weight.grad is None) == (frozen != "input") and (given.grad is None) == (frozen != "weight")


def test_few_rows_no_gradient_a_bias_frozen_later_and_compiled_code_run_the_layer_as_it_was(monkeypatch):
    monkeypatch.setattr(biased_linear, "FEWEST", 32)
    model, x = mlp(), torch.randn(4, 24, 64)
    found = recognise(model, as_call(x), Choices(), only=(KIND,))

    def count(run) -> int:
        recorder = Recorder()
        found.ask(recorder)
        run()
        return sum(n for call, n in recorder.calls.values() if call.op == "linear_bias")

    assert count(lambda: model(x)) == count(lambda: model(x[:, :8])) == 2 and count(lambda: model(x[0])) == 0
    with torch.no_grad():
        assert count(lambda: model(x)) == 0
    assert count(lambda: copy.deepcopy(model)(x)) == 2
    torch._dynamo.reset()
    compiled, want = torch.compile(model, backend="aot_eager", fullgraph=True), model(x)
    assert count(lambda: torch.testing.assert_close(compiled(x), want)) == 0
    model[0].bias.requires_grad_(False)
    assert count(lambda: model(x)) == 1


def test_hooks_are_called_and_a_forward_of_its_own_a_subclass_and_two_arguments_leave_a_layer_alone():
    model, x, seen = mlp(), torch.randn(40, 64), []
    model[0].register_forward_hook(lambda module, args, out: seen.append(out.shape))
    model[2].forward = model[2].forward
    found = recognise(model, as_call(x), Choices(), only=(KIND,))
    assert paths(found) == ["0"] and [x.path for x in found.left] == ["2"] and "forward of its own" in found.left[0].why
    seen.clear()
    found.ask(TRITON)
    model(x).sum().backward()
    assert seen == [(40, 128)]

    class Own(nn.Linear):
        pass

    assert not recognise(nn.Sequential(Own(64, 8)).train(), as_call(x), Choices(), only=(KIND,)).sites


def test_under_autocast_the_gradient_of_the_bias_is_as_close_as_the_modules_own():
    def grads(dtype, replaced, autocast):
        model, x = mlp().to(dtype), torch.randn(80, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
        found = recognise(model, as_call(x), Choices(), only=(KIND,))
        if replaced:
            found.ask(TRITON)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = model(x)
        (y.to(dtype) * torch.linspace(-1, 1, 8, dtype=dtype)).sum().backward()
        return y.dtype, {n: p.grad for n, p in model.named_parameters()}

    (_, truth), (kind, plain), (same, got) = (grads(*how) for how in (
        (torch.float64, False, False), (torch.float32, False, True), (torch.float32, True, True)))
    assert kind == same == torch.bfloat16
    for n, grad in got.items():
        worst = (plain[n] - truth[n]).norm() + torch.finfo(torch.bfloat16).eps * truth[n].norm()
        assert grad.dtype == torch.float32 and (grad - truth[n]).norm() <= 3 * worst, n


def test_linears_that_run_padded_are_covered_and_come_back_where_they_do_not():
    model, call = odd_gpt().bfloat16(), as_call(tokens())
    found = recognise(model, call, Choices())
    inside = {f"h.{i}.mlp.{j}" for i in (0, 1) for j in (0, 2)}
    mine = {s.path for s, _ in found.sites if s.kind == KIND}
    assert mine == set(biased(model)) - inside and {s.path for s in found.covered if s.kind == KIND} == inside
    more = prove_covered(found, Choices(), {(KIND, path) for path in inside})
    for kept in (True, False):
        way = Way("eager", Choices(), grouped(found.sites))
        for group in way.groups:
            group.replaced = kept or group.kind != "aligned_mlp"
        rest = joined(way.groups, [s for s in more if (s[0].kind, s[0].path) in way.uncovered])
        assert {s.path for s, _ in rest} == (set() if kept else inside)
        used = replace(found, sites=[(s, v) for g in [*way.groups, *grouped(rest)] if g.replaced for s, v in g.sites])
        verdict = prove(together(used, call), call, TRITON)
        assert verdict.ok, verdict.why


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(64, 96), nn.Linear(64, 96), nn.Linear(96, 64)

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def test_the_linears_of_a_gated_mlp_are_covered_since_its_products_may_be_one():
    torch.manual_seed(0)
    found = recognise(nn.Sequential(Gated()).train(), as_call(torch.randn(2, 24, 64)), Choices())
    assert [s.kind for s, _ in found.sites] == ["gated_mlp"]
    assert {s.path for s in found.covered} == {"0.gate", "0.up", "0.down"}


def test_a_head_with_a_bias_is_covered_where_the_loss_takes_it_over():
    pytest.importorskip("transformers")
    model = built("Phi", torch.float32)
    found = recognise(model, as_call(batch()), Choices())
    assert [s.path for s in found.covered if s.kind == KIND] == ["lm_head"]
    kept = recognise(model, as_call(batch()), Choices(), keep_logits=True)
    assert "lm_head" in {s.path for s, _ in kept.sites if s.kind == KIND} and not kept.covered
