"""Under torch.compile a causal mask is not built where none is needed, and is wherever one is."""

import copy

import pytest
import torch
from swapping import batch, built, masks_seen, packed, padded
from test_swap_causal import llama, logits, made, spared
from test_swap_use import trained

from whet.swap._spared_masks import KNOWN

transformers = pytest.importorskip("transformers")
masking = pytest.importorskip("transformers.masking_utils")
IDS = batch()["input_ids"]
BLOCKS = torch.tensor([-1] * 4 + [0] * 8 + [-1] * 12).expand(2, -1)


@pytest.fixture
def traced(monkeypatch):
    """traced(model) -> by torch.compile, in one graph; traced.masks: those that SDPA is called with, also in its graph."""
    def compiled(model, **options):
        torch._dynamo.reset()
        return torch.compile(model, backend="eager", fullgraph=True, **options)

    compiled.masks = masks_seen(monkeypatch)
    yield compiled
    torch._dynamo.reset()
    assert KNOWN.config is None


@pytest.mark.parametrize("only", [("causal_mask",), ("causal_mask", "attention")], ids=["sdpa", "replaced"])
@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Mistral", "GPTNeoX", "Gemma3", "Phi3"])
def test_torch_compile_builds_no_mask_for_a_batch_of_tokens_alone(name, only, traced):
    model, data = built(name, torch.float32), batch() | {"use_cache": False}
    expected = trained(model, data)
    assert not any(m is not None for m in traced.masks)
    if "attention" not in only:  # once for each model: tracing is what takes the time
        loss = traced(model)(**data).loss
        assert not any(m is None for m in traced.masks[2:]), "what Transformers does"
        torch.testing.assert_close(loss, expected[0])
    spared(model, data, only)
    traced.masks.clear()
    compiled = traced(model)
    model.zero_grad()
    loss = compiled(**data).loss
    loss.backward()
    assert traced.masks and not any(m is not None for m in traced.masks)
    assert torch.equal(loss, expected[0])
    grads = {n: p.grad for n, p in model.named_parameters()}
    assert all(torch.equal(grads[n], g) for n, g in expected[1].items())


@pytest.mark.parametrize("data,dynamic", [
    (dict(input_ids=IDS, position_ids=packed()["position_ids"]), None), (dict(input_ids=batch(length=40)["input_ids"]), None),
    (dict(input_ids=IDS, attention_mask=padded()["attention_mask"]), True), (dict(input_ids=IDS[:, :1]), True),
], ids=["packed", "longer", "padded, sizes not fixed", "one token, sizes not fixed"])
def test_torch_compile_computes_the_same(data, dynamic, traced):
    plain = llama()
    model = spared(copy.deepcopy(plain), only=("causal_mask",))
    compiled = traced(model, dynamic=dynamic)
    expected = logits(plain, **data, use_cache=False)
    for _ in range(2):
        torch.testing.assert_close(logits(compiled, **data, use_cache=False), expected)
        torch.testing.assert_close(logits(compiled, input_ids=IDS, use_cache=False), logits(plain, input_ids=IDS))


@pytest.mark.parametrize("window", [8, 23, 24, 64])
@pytest.mark.parametrize("name", ["Mistral", "Gemma3", "Qwen2"])
def test_under_torch_compile_a_window_counts_where_it_is_shorter_than_the_sequence(name, window, traced):
    options = dict(sliding_window=window) | (dict(use_sliding_window=True) if name == "Qwen2" else {})
    plain = made(name, **options, attn_implementation="sdpa")
    expected = [logits(plain, input_ids=ids, use_cache=False) for ids in (IDS, batch(length=40)["input_ids"])]
    model = spared(copy.deepcopy(plain))
    compiled = traced(model)
    traced.masks.clear()
    torch.testing.assert_close(logits(compiled, input_ids=IDS, use_cache=False), expected[0])
    assert any(m is not None for m in traced.masks) == (window < 24)
    torch.testing.assert_close(logits(compiled, **dict(batch(length=40), labels=None), use_cache=False), expected[1])


@pytest.mark.parametrize("static", [False, True])
def test_under_torch_compile_a_cache_that_is_given(static, traced):
    plain = llama().eval()
    model = spared(copy.deepcopy(plain)).eval()
    expected, compiled = logits(plain, input_ids=IDS), torch.compile(model, backend="eager")
    kept = (transformers.StaticCache(config=plain.config, max_cache_len=32) if static
            else transformers.DynamicCache(config=plain.config))
    cut = [IDS[:, :10], IDS[:, 10:20], *IDS[:, 20:].split(1, 1)]
    got = [logits(compiled, input_ids=ids, past_key_values=kept) for ids in cut]
    torch.testing.assert_close(torch.cat(got, 1), expected)


@pytest.mark.parametrize("option", [
    dict(and_mask_function=lambda b, h, q, k: k != 3), dict(or_mask_function=lambda b, h, q, k: k < 3),
    dict(allow_is_causal_skip=False, position_ids=None), dict(config=None), dict(block_sequence_ids=BLOCKS),
    dict(block_sequence_ids=BLOCKS, position_ids=None), dict(attention_mask=padded()["attention_mask"]), dict(is_causal=False),
], ids=lambda option: "-".join(option))
def test_under_torch_compile_a_mask_that_is_asked_for_otherwise_is_built(option, traced):
    model = spared(llama())
    given = dict(inputs_embeds=torch.zeros(2, 24, 8), attention_mask=None, past_key_values=None, position_ids=IDS)
    given["config"] = copy.deepcopy(model.config) if "config" in option else model.config
    given |= {k: v for k, v in option.items() if k not in ("config", "is_causal")}
    if "is_causal" in option:
        model.config.is_causal, given["allow_is_causal_skip"] = False, False
    given["position_ids"] = given["position_ids"] if "position_ids" in option else torch.arange(24)[None]

    def asked():
        return masking.create_causal_mask(**given)

    KNOWN.config = model.config
    try:
        mine = traced(asked)()
    finally:
        KNOWN.config = None
    plain = copy.deepcopy(given["config"])
    plain._attn_implementation_internal = "sdpa"
    theirs = traced(lambda: masking.create_causal_mask(**given | {"config": plain}))()
    assert mine is not None and torch.equal(mine, theirs)
