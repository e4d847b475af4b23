"""An optimised model inside what users have around it: PEFT's adapters, a Trainer, Accelerate, FSDP, generate."""

import inspect
import os

import pytest
import torch
from swapping import DECODER, GPT, batch, built, state
from test_swap_use import agree, replaced, trained
from torch import nn

from whet.choices import Choices, Recorder
from whet.swap._optimize import optimize, restore

transformers = pytest.importorskip("transformers")
ATTENTION, MLP = ["q_proj", "v_proj"], ["gate_proj", "up_proj", "down_proj"]


def adapted(model: nn.Module, targets) -> nn.Module:
    peft = pytest.importorskip("peft", reason="peft is not installed: LoRA is not tried")
    torch.manual_seed(5)
    config = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config).train()


@pytest.mark.parametrize("targets", [ATTENTION, MLP, "all-linear"], ids=["attention", "mlp", "all"])
def test_lora_before_or_after_trains_the_adapters_alone_with_the_same_gradients(targets, swapped_at_once):
    data = batch()
    model = adapted(built("Llama", torch.float32), targets)
    expected, before = trained(model, data), state(model)
    assert expected[1] and all("lora_" in name for name in expected[1])
    optimize(model, data)
    counts = {g.kind: len(g.sites) for g in model.whet.kept}
    assert counts == DECODER, model.whet.replaced.left
    agree(trained(model, data), expected)
    out = model(**data)
    assert out.logits is None and "logits" not in out and model.eval()(**data).logits is not None
    restore(model.train())
    assert state(model) == before
    plain = built("Llama", torch.float32)
    optimize(plain, data)
    model = adapted(plain, targets)
    agree(trained(model, data), expected)
    restore(plain)
    agree(trained(model, data), expected, exactly=True)


def test_adapters_are_saved_and_merged_as_without(tmp_path, swapped_at_once):
    data = batch()
    plain = adapted(built("Llama", torch.float32), "all-linear")
    model = optimize(adapted(built("Llama", torch.float32), "all-linear"), data)
    for which, made in (("plain", plain), ("optimised", model)):
        made.save_pretrained(tmp_path / which)
    files = sorted(os.listdir(tmp_path / "plain"))
    assert files == sorted(os.listdir(tmp_path / "optimised")) and "adapter_model.safetensors" in files
    for name in files:
        assert (tmp_path / "plain" / name).read_bytes() == (tmp_path / "optimised" / name).read_bytes(), name
    one, other = (m.merge_and_unload().requires_grad_() for m in (plain, model))
    agree(trained(other, data), trained(one, data))
    assert one.state_dict().keys() == other.state_dict().keys()


class Untied(GPT):
    def __init__(self):
        super().__init__()
        self.lm_head.weight = nn.Parameter(self.wte.weight.detach().clone())


class Around(nn.Module):
    """A language model inside a module of the user's."""

    def __init__(self, wants_logits: bool):
        super().__init__()
        self.inner, self.wants_logits = built("Llama", torch.float32), wants_logits

    def forward(self, input_ids, labels):
        out = self.inner(input_ids=input_ids, labels=labels)
        return (out.loss, out.logits.argmax(-1)) if self.wants_logits else out.loss


def test_the_head_is_found_inside_another_module_and_left_where_that_reads_the_logits():
    data = batch()
    for wants in (False, True):
        model = Around(wants)
        found = replaced(model, data, only=("lm_head", "norms"), keep_logits=False)
        left = [x.why for x in found.left]
        assert len(found.sites) == 6 - wants and len(left) == wants
        assert not wants or "what is around it fails without its logits" in left[0]


def test_a_replaced_forward_has_the_signature_of_the_models_own():
    model = built("Llama", torch.float32)
    own = inspect.signature(model.forward)
    replaced(model)
    assert inspect.signature(model.forward) == own and model._supports_logits_to_keep()


@pytest.mark.parametrize("own_head", [False, True], ids=["with the root", "a unit"])
@pytest.mark.parametrize("reshard", [True, False], ids=["resharded", "kept"])
def test_fully_sharded_afterwards_and_the_head_goes_its_own_way_where_it_is_a_unit(one_process, own_head, reshard):
    from torch.distributed.fsdp import fully_shard

    model, data = built("Llama", torch.float32), batch()
    expected = trained(model, data)
    model.zero_grad()
    replaced(model)
    for part in (*model.model.layers, *([model.model.norm, model.lm_head] if own_head else []), model):
        fully_shard(part, reshard_after_forward=reshard)
    for _ in range(2):
        loss, grads = trained(model, data)
        agree((loss, {n: g.full_tensor() for n, g in grads.items()}), expected)
    assert (model(**data).logits is None) == (not own_head) and model.eval()(**data).logits is not None
    with pytest.raises(ValueError, match="the model is sharded: optimize first, then fully_shard"):
        optimize(model, data)


def test_a_plain_models_head_that_is_a_unit_of_fsdp_computes_its_logits(one_process):
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model, tokens = Untied().train(), (batch()["input_ids"], batch()["labels"])
    model(*tokens)[1].backward()
    expected = {n: p.grad for n, p in model.named_parameters()}
    model.zero_grad()
    found = replaced(model, tokens, keep_logits=False)
    assert "plain_loss" in {s.kind for s, _ in found.sites}
    for part in (*model.h, model.lm_head, model):
        fully_shard(part)
    logits, loss = model(*tokens)
    assert logits is not None
    loss.backward()
    for n, p in model.named_parameters():
        torch.testing.assert_close(p.grad.full_tensor(), expected[n])


WAYS = {
    "greedy": dict(do_sample=False), "sampled": dict(do_sample=True, top_k=20), "beams": dict(num_beams=3, do_sample=False),
    "static cache": dict(do_sample=False, cache_implementation="static"), "no cache": dict(do_sample=False, use_cache=False),
}


@pytest.mark.parametrize("mode", ["train", "infer"])
@pytest.mark.parametrize("name", ["Llama", "GPT2"])
def test_generate_gives_the_same_tokens(name, mode, swapped_at_once):
    model, data = built(name, torch.float32), batch()
    model.train(mode == "train")

    def generated() -> dict[str, torch.Tensor]:
        found = {}
        for way, options in WAYS.items():
            torch.manual_seed(7)
            found[way] = model.generate(
                data["input_ids"][:, :6], attention_mask=torch.ones(2, 6), max_new_tokens=8, pad_token_id=0, **options)
        return found

    model.eval()
    expected = generated()
    optimize(model.train(mode == "train"), data, mode=mode)
    assert model.whet.mode == mode and len(model.whet.kept) == {"Llama": 6, "GPT2": 5}[name] + (mode == "train") * (
        {"Llama": 1, "GPT2": 5}[name])  # the head and its loss; of linear layers with a bias, four sizes
    model.eval()
    for way, tokens in generated().items():
        assert torch.equal(tokens, expected[way]), way
    assert model(**data).logits is not None


def test_a_rotation_at_sizes_that_nobody_measured_is_the_models_own():
    model, data, asked = built("Llama", torch.float32), batch(), []
    found = replaced(model, data, only=("rotary",))
    recorder = Recorder()
    found.ask(recorder)
    model(**data)
    (call, _), = recorder.calls.values()
    choices = Choices({call.key: "eager"})
    choices.rope = lambda *args, rope=choices.rope: asked.append(args[0].shape[2]) or rope(*args)
    found.ask(choices)
    model(**data)
    model(input_ids=data["input_ids"][:1, :1])
    model(**data)
    assert asked == [24] * 4
