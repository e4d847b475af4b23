"""A model with replaced parts, and what else one does to a model: checkpointing, autocast, compile, LoRA, saving, DDP."""

import pytest
import torch
import torch.nn.functional as F
from swapping import GPT, batch, built
from torch import nn

from whet.choices import Choices
from whet.swap import _optimize
from whet.swap._optimize import optimize, restore
from whet.swap._replace import Replaced, as_call, recognise
from whet.tune import Tuned

pytest.importorskip("transformers")


def replaced(model: nn.Module, data=None, **options) -> Replaced:
    """The model with every proved part replaced, on stock kernels: nothing is tuned."""
    found = recognise(model, as_call(batch() if data is None else data), Choices(), **options)
    assert found.sites
    found.ask(Choices())
    return found


def trained(model: nn.Module, data: dict) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients of one step."""
    model.zero_grad()
    loss = model(**data).loss
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def agree(one: tuple, other: tuple, exactly: bool = False) -> None:
    torch.testing.assert_close(one[0], other[0])
    assert one[1].keys() == other[1].keys()
    assert not exactly or torch.equal(one[0], other[0]) and all(torch.equal(g, other[1][n]) for n, g in one[1].items())
    for name, grad in one[1].items():
        torch.testing.assert_close(grad, other[1][name], msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("name", ["Llama", "GPT2", "Gemma3"])
def test_gradient_checkpointing_switched_on_before_or_after(name):
    model, data = built(name, torch.float32), batch()
    expected = trained(model, data)
    found = replaced(model)
    model.gradient_checkpointing_enable()
    agree(trained(model, data), expected)
    found.restore()
    found = replaced(model)  # recognised with checkpointing on
    agree(trained(model, data), expected)


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "GPT2", "ModernBert"])
def test_autocast_over_float32_weights(name):
    model, data = built(name, torch.float32), batch()
    with torch.autocast("cpu", torch.bfloat16):
        expected = trained(model, data)
    replaced(model)
    with torch.autocast("cpu", torch.bfloat16):
        got = trained(model, data)
    truth = trained(built(name, torch.float64), data)
    assert abs(got[0] - truth[0]) <= 2 * (abs(expected[0] - truth[0]) + torch.finfo(torch.bfloat16).eps * abs(truth[0]))
    for n, grad in got[1].items():
        size, worst = truth[1][n].norm(), (expected[1][n] - truth[1][n]).norm()
        assert (grad - truth[1][n]).norm() <= 3 * (worst + torch.finfo(torch.bfloat16).eps * size), n


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Bert"])
def test_compiled_afterwards(name):
    model, data = built(name, torch.float32), batch()
    expected = trained(model, data)
    replaced(model)
    torch._dynamo.reset()
    loss, grads = trained(torch.compile(model, backend="aot_eager"), data)
    agree((loss, {n.removeprefix("_orig_mod."): g for n, g in grads.items()}), expected)


@pytest.mark.parametrize("name", ["Llama", "GPT2"])
def test_saved_and_loaded_it_is_the_plain_model(name, tmp_path):
    model, data = built(name, torch.float32), batch()
    model.save_pretrained(tmp_path / "plain")
    expected = trained(model, data)
    replaced(model)
    model.save_pretrained(tmp_path / "replaced")
    texts = [(tmp_path / which / "config.json").read_text() for which in ("plain", "replaced")]
    assert texts[0] == texts[1]
    again = type(model).from_pretrained(tmp_path / "replaced").train()
    assert again.config._attn_implementation == "sdpa" and not any("_whet_forward" in vars(m) for m in again.modules())
    agree(trained(again, data), expected, exactly=True)


def test_tied_weights_stay_tied_and_share_one_gradient():
    model, data = built("GPT2", torch.float32), batch()
    assert model.lm_head.weight is model.transformer.wte.weight
    expected = trained(model, data)
    replaced(model)
    assert model.lm_head.weight is model.transformer.wte.weight
    agree(trained(model, data), expected)
    torch.manual_seed(0)
    plain, tokens = GPT().train(), (data["input_ids"], data["labels"])
    plain(*tokens)[1].backward()
    grad = plain.wte.weight.grad.clone()
    plain.zero_grad()
    replaced(plain, tokens, keep_logits=False)
    assert plain.lm_head.weight is plain.wte.weight
    plain(*tokens)[1].backward()
    torch.testing.assert_close(plain.wte.weight.grad, grad)


def test_hooks_that_were_there_still_fire_once_for_each_call():
    model, data, seen = built("Llama", torch.float32), batch(), []
    layer = model.model.layers[0]
    for part in (layer.input_layernorm, layer.mlp, layer.self_attn, model):
        part.register_forward_hook(lambda module, args, out: seen.append(("forward", type(module).__name__)))
    for part in (layer.post_attention_layernorm, layer.mlp, layer.self_attn.o_proj):
        part.register_full_backward_hook(lambda module, gin, gout: seen.append(("backward", type(module).__name__)))
    expected = trained(model, data)
    plain = sorted(seen)
    found = replaced(model)
    seen.clear()
    agree(trained(model, data), expected)
    assert sorted(seen) == plain and len(plain) >= 7
    found.restore()
    seen.clear()
    trained(model, data)
    assert sorted(seen) == plain


@pytest.fixture
def at_once(monkeypatch):
    """Nothing is tuned, and all that is proved counts as faster."""
    monkeypatch.setattr(_optimize, "tune", lambda *args, **options: Tuned({"eager": Choices()}, {}))
    monkeypatch.setattr(_optimize, "_time_group", lambda group, *rest: None)


@pytest.mark.parametrize("keep_logits", [None, True, False])
def test_a_plain_model_in_training_gives_up_its_logits_only_where_that_is_asked(at_once, keep_logits):
    torch.manual_seed(0)
    model, tokens = GPT(), (batch()["input_ids"], batch()["labels"])
    optimize(model, tokens, keep_logits=keep_logits, seconds=0.001)
    shown, kinds = str(model.whet), {g.kind for g in model.whet.groups}
    expected = {"norms", "residual_norm", "activations", "sdpa_calls", "biased_linear"}
    assert kinds == expected | ({"plain_loss"} if keep_logits is False else set())
    assert ("optimize(keep_logits=False)" in shown) == (keep_logits is not False) and "wrong" not in shown
    assert keep_logits is False or model(*tokens)[0] is not None


@pytest.mark.parametrize("keep_logits", [None, True])
def test_head_and_loss_of_a_model_that_returns_its_loss_alone_are_one_unless_logits_are_kept(at_once, keep_logits):
    class Model(GPT):
        def forward(self, idx, targets):
            logits = self.lm_head(self.ln_f(self.wte(idx)))
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    torch.manual_seed(0)
    model, tokens = Model(), (batch()["input_ids"], batch()["labels"])
    plain = model(*tokens)
    optimize(model, tokens, keep_logits=keep_logits, seconds=0.001)
    assert ("plain_loss" in {g.kind for g in model.whet.groups}) == (keep_logits is None)
    torch.testing.assert_close(model(*tokens), plain)
    model.lm_head.register_forward_hook(lambda head, args, out: seen.append(out.std().item()))
    seen: list[float] = []
    torch.testing.assert_close(model(*tokens), plain)
    assert seen and seen[-1] > 0, "a hook on the head has logits to look at"


def test_a_second_optimize_takes_back_the_first(at_once):
    model, data = built("Llama", torch.float32), batch()
    expected = trained(model, data)
    for _ in range(2):
        optimize(model, data, seconds=0.001)
        assert len(model.whet.groups) == 7
        assert all(not hasattr(getattr(m, "_whet_forward", None), "_whet_forward") for m in model.modules())
    optimize(model, data, seconds=0.001, keep_logits=True)
    assert len(model.whet.groups) == 6 and model(**data).logits is not None and "logits are kept" in str(model.whet)
    restore(model)
    agree(trained(model, data), expected, exactly=True)


def test_distributed_data_parallel_around_it(tmp_path):
    if not torch.distributed.is_available():
        pytest.skip("this torch has no torch.distributed")
    model, data = built("Llama", torch.float32), batch()
    expected = trained(model, data)
    replaced(model)
    model.zero_grad()
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(model)
        got = trained(wrapped, data)
        assert wrapped(**data).logits is None
    finally:
        torch.distributed.destroy_process_group()
    agree((got[0], {n.removeprefix("module."): g for n, g in got[1].items()}), expected)
