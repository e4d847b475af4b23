"""The causal mask that is not built: never where one is needed, though Transformers may not look at the batch."""

import contextlib
import copy
import threading

import pytest
import torch
from swapping import batch, built, packed, padded, sound
from test_swap_use import agree, trained
from torch import nn

from whet.choices import Choices
from whet.swap import Met
from whet.swap._replace import as_call, recognise
from whet.swap._spared_masks import KNOWN, is_causal_alone, parts_of
from whet.swap.causal_mask import find, why_not

transformers = pytest.importorskip("transformers")
masking = pytest.importorskip("transformers.masking_utils")
IDS = batch()["input_ids"]
GEMMA3 = dict(vocab_size=96, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4, head_dim=16,
              num_key_value_heads=2, max_position_embeddings=64, layer_types=["sliding_attention", "full_attention"])


class Dense:
    """How many masks whet's function had Transformers build, and how many it was asked for."""

    def __init__(self):
        self.built, self.asked = 0, 0


@pytest.fixture
def blind(monkeypatch):
    """Transformers may not look at the batch, as where a CUDA graph is captured; what it builds is counted."""
    real, known, count = masking.sdpa_mask, masking.ALL_MASK_ATTENTION_FUNCTIONS, Dense()

    def sdpa_mask(*args, **options):
        made = real(*args, **options)
        count.built += made is not None
        return made

    @contextlib.contextmanager
    def on():
        from whet.swap import _spared_masks

        def mask(*args, **options):
            count.asked += 1
            return _spared_masks.mask(*args, **options)

        count.built = count.asked = 0
        with monkeypatch.context() as patched:
            patched.setattr(masking, "is_tracing", lambda tensor=None: True)
            patched.setattr(masking, "sdpa_mask", sdpa_mask)
            patched.setitem(known._global_mapping, "whet", mask)
            yield count
        assert KNOWN.config is None

    return on


def spared(model: nn.Module, data: dict | None = None, only: tuple[str, ...] = ("causal_mask", "attention")) -> nn.Module:
    """The model with its mask and its attention replaced, as found on a batch without a mask."""
    found = recognise(model, as_call(batch() if data is None else data), Choices(), only=only)
    assert "causal_mask" in {s.kind for s, _ in found.sites}, found.left
    found.ask(Choices())
    return model


def llama() -> nn.Module:
    return built("Llama", torch.float32)


def made(name: str, **options) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config" if name != "Gemma3" else "Gemma3TextConfig")
    return getattr(transformers, f"{name}ForCausalLM")(config(**GEMMA3 | options)).train()


def logits(model: nn.Module, *args, **data) -> torch.Tensor:
    with torch.no_grad():
        return model(*args, **data).logits


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "GPT2", "GPTNeoX", "Olmo2", "Phi3"])
def test_a_batch_of_tokens_alone_has_no_mask_built_and_the_same_gradients(name, blind):
    model, data = built(name, torch.float32), batch()
    expected = trained(model, data)
    spared(model)
    with blind() as count:
        agree(trained(model, data | {"use_cache": False}), expected)
    assert count.asked and not count.built
    model.gradient_checkpointing_enable()
    with blind() as count:
        agree(trained(model, data), expected)
    assert count.asked and not count.built


@pytest.mark.parametrize("data", [
    dict(input_ids=IDS, attention_mask=padded()["attention_mask"]), dict(input_ids=IDS, position_ids=packed()["position_ids"]),
    dict(input_ids=IDS, attention_mask=torch.tril(torch.ones(24, 24, dtype=torch.bool)).logical_and(
        torch.arange(24) > 3).logical_or(torch.eye(24, dtype=torch.bool)).expand(2, 1, -1, -1)),
    dict(input_ids=IDS, attention_mask=torch.zeros(2, 24, dtype=torch.long) + (torch.arange(24) > 5)),
], ids=["padded", "packed", "a mask of its own", "padded left"])
def test_what_the_batch_says_of_its_mask_is_followed(data, blind):
    plain = llama()
    model = spared(copy.deepcopy(plain))
    expected = logits(plain, **data, use_cache=False)
    assert (logits(plain, input_ids=IDS) - expected).abs().max() > 1e-3, "the mask matters"
    with blind():
        torch.testing.assert_close(logits(model, **data, use_cache=False), expected)
    values = list(data.values())
    if "attention_mask" in data:
        with blind():
            torch.testing.assert_close(logits(model, *values, use_cache=False), expected)
    hidden = plain.model(**data, use_cache=False).last_hidden_state
    if "attention_mask" in data:
        with blind():
            torch.testing.assert_close(model.model(*values, use_cache=False).last_hidden_state, hidden)
    torch.testing.assert_close(logits(model, **data, use_cache=False), expected)


def test_embeddings_in_place_of_tokens(blind):
    plain = llama()
    model, embedded = spared(copy.deepcopy(plain)), plain.get_input_embeddings()(IDS).detach()
    with blind() as count:
        torch.testing.assert_close(logits(model, inputs_embeds=embedded, use_cache=False), logits(plain, input_ids=IDS))
    assert not count.built


@pytest.mark.parametrize("static", [False, True])
def test_a_cache_that_is_given_and_one_that_is_made(static, blind):
    plain = llama().eval()
    model = spared(copy.deepcopy(plain)).eval()
    expected = logits(plain, input_ids=IDS)

    def cache():
        if static:
            return transformers.StaticCache(config=plain.config, max_cache_len=32)
        return transformers.DynamicCache(config=plain.config)

    with blind():
        torch.testing.assert_close(logits(model, input_ids=IDS, use_cache=True), expected)
        kept = cache()
        first = logits(model, input_ids=IDS[:, :10], past_key_values=kept)
        rest = logits(model, input_ids=IDS[:, 10:20], past_key_values=kept)
        last = [logits(model, input_ids=IDS[:, i : i + 1], past_key_values=kept) for i in range(20, 24)]
    torch.testing.assert_close(torch.cat([first, rest, *last], 1), expected)


@pytest.mark.parametrize("beams", [1, 2])
def test_generate(beams, blind):
    plain = llama().eval()
    model = spared(copy.deepcopy(plain)).eval()
    asked = dict(max_new_tokens=6, do_sample=False, num_beams=beams, pad_token_id=0)
    mask = padded()["attention_mask"].flip(1)
    expected = [plain.generate(IDS, **asked), plain.generate(IDS, attention_mask=mask, **asked)]
    got = [model.generate(IDS, **asked), model.generate(IDS, attention_mask=mask, **asked)]
    assert all(torch.equal(a, b) for a, b in zip(got, expected))


@pytest.mark.parametrize("window", [8, 23, 24, 64])
@pytest.mark.parametrize("name", ["Mistral", "Gemma3", "Qwen2"])
def test_a_window_counts_where_it_is_shorter_than_the_sequence(name, window, blind):
    options = dict(sliding_window=window) | (dict(use_sliding_window=True) if name == "Qwen2" else {})
    plain = made(name, **options, attn_implementation="sdpa")
    model = spared(copy.deepcopy(plain))
    expected = trained(plain, batch())
    with blind() as count:
        agree(trained(model, batch() | {"use_cache": False}), expected)
    assert count.built == (window < 24), "one for all layers with a window"
    longer = batch(length=40)
    with blind():
        agree(trained(model, longer | {"use_cache": False}), trained(plain, longer))


def test_masks_joined_with_the_causal_one_are_told_apart():
    causal, joined = masking.causal_mask_function, masking.and_masks
    window, packing = masking.sliding_window_causal_mask_function(4), masking.packed_sequence_mask_function(torch.zeros(1, 4))

    def fits(function, window=None):
        return is_causal_alone(parts_of(function), 8, window)

    assert fits(causal) and fits(joined(causal, packing)) and fits(window, 8) and fits(joined(window, packing), 9)
    assert not fits(window, 7) and not fits(window) and not fits(joined(causal, lambda *a: True))
    assert not fits(masking.or_masks(causal, causal)) and not fits(masking.bidirectional_mask_function)
    assert not fits(masking.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.long))) and not fits(None)
    assert not fits(joined(causal, masking.padding_mask_function(torch.ones(1, 8)))) and not fits(joined(packing))


@pytest.mark.parametrize("option", [
    dict(and_mask_function=lambda b, h, q, k: k != 3), dict(or_mask_function=lambda b, h, q, k: k < 3),
    dict(allow_is_causal_skip=False), dict(config=None), dict(attention_mask=padded()["attention_mask"]),
], ids=lambda option: next(iter(option)))
def test_a_mask_that_is_asked_for_otherwise_is_built(option, blind):
    model = spared(llama())
    config = copy.deepcopy(model.config) if "config" in option else model.config
    given = dict(config=config, inputs_embeds=torch.zeros(2, 24, 8), attention_mask=None, past_key_values=None)
    given |= {k: v for k, v in option.items() if k != "config"}
    if "config" in option:  # of another module, whose positions are its own business
        given["position_ids"] = packed()["position_ids"]
    with blind() as count:
        KNOWN.config = model.config
        try:
            assert masking.create_causal_mask(**given) is not None and count.built == 1
        finally:
            KNOWN.config = None


def test_nothing_is_spared_where_transformers_may_look():
    model = spared(llama())
    KNOWN.config = model.config
    try:
        given = dict(config=model.config, inputs_embeds=torch.zeros(2, 24, 8), attention_mask=None, past_key_values=None)
        assert masking.create_causal_mask(**given, position_ids=packed()["position_ids"]) is not None
        assert masking.create_causal_mask(**given, position_ids=torch.arange(24)[None]) is None
    finally:
        KNOWN.config = None


def test_a_forward_that_raises_leaves_nothing_known(blind):
    model = spared(llama())
    with blind(), pytest.raises(IndexError):
        model(input_ids=torch.full((2, 24), 4000))
    assert KNOWN.config is None


class Twice(nn.Module):
    """A decoder in whose forward it runs again on packed rows, as a model with a part of its own does."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.inner = None
        model.model.layers[0].register_forward_pre_hook(self.again)

    def again(self, *_):
        if self.inner is None:
            self.inner = False
            self.inner = self.model.model(input_ids=IDS, position_ids=packed()["position_ids"], use_cache=False)

    def forward(self):
        return self.model(input_ids=IDS, use_cache=False).logits


def test_a_forward_within_a_forward_has_its_own_mask(blind):
    plain = llama()
    expected = plain.model(**packed() | {"labels": None}, use_cache=False).last_hidden_state
    model = Twice(spared(copy.deepcopy(plain)))
    with blind():
        got = model()
    torch.testing.assert_close(got, logits(plain, input_ids=IDS))
    torch.testing.assert_close(model.inner.last_hidden_state, expected)


def test_what_one_thread_knows_another_does_not(blind):
    plain = llama()
    model, data, got = spared(copy.deepcopy(plain)), dict(packed(), labels=None, use_cache=False), []

    def beside(*_):
        """While the first thread is within the forward, another is."""
        hook.remove()
        thread = threading.Thread(target=lambda: got.append(logits(model, **data)))
        thread.start()
        thread.join(60)

    hook = model.model.embed_tokens.register_forward_hook(beside)
    with blind():
        mine = logits(model, input_ids=IDS, use_cache=False)
    torch.testing.assert_close(mine, logits(plain, input_ids=IDS))
    torch.testing.assert_close(got[0], logits(plain, **data))


def test_prompt_and_prefix_tuning(blind):
    peft = pytest.importorskip("peft", reason="peft is not installed: prompts are not tried")
    for config in (peft.PromptTuningConfig, peft.PrefixTuningConfig):
        asked = config(task_type="CAUSAL_LM", num_virtual_tokens=5)
        torch.manual_seed(3)
        plain = peft.get_peft_model(llama(), asked).eval()
        expected = [logits(plain, input_ids=IDS), logits(plain, **dict(padded(), labels=None))]
        spared(plain.base_model)
        with blind():
            torch.testing.assert_close(logits(plain, input_ids=IDS), expected[0])
            torch.testing.assert_close(logits(plain, **dict(padded(), labels=None)), expected[1])


def test_a_decoder_beside_an_encoder(blind):
    plain = built("Whisper", torch.float32)
    model, data = copy.deepcopy(plain), sound()
    found = recognise(model, as_call(data), Choices(), only=("causal_mask", "attention"))
    found.ask(Choices())
    with blind():
        agree(trained(model, data), trained(plain, data))


def test_a_decoder_that_needs_its_mask_is_left():
    class Own(nn.Module):
        def forward(self, x):
            return create_causal_mask(x, allow_is_causal_skip=False)  # noqa: F821

    class Counting(nn.Module):
        def forward(self, x):
            return create_causal_mask(x, x.cumsum(-1))  # noqa: F821

    assert "always built" in why_not(Own()) and "counts" in why_not(Counting())
    model = built("Llama", torch.float32)
    data = as_call(packed())
    assert not list(find(model, {"model": data, "": data})), "given positions"
    data = Met((IDS, padded()["attention_mask"]), {})
    assert not list(find(model, {"model": data, "": data})), "given a mask, in order"
