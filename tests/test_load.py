"""Weights and text from files: what is there arrives, what is not as it should be is named, and no character is cut in two."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers import models as kinds

from whet.decode.load import HF_NAMES, open_model, places
from whet.decode.text import LLAMA3, QWEN2, Text
from whet.models.qwen3 import Qwen3, Qwen3Config, random_weights

GIVEN = dict(
    architectures=["Qwen3ForCausalLM"], vocab_size=320, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, intermediate_size=96, max_position_embeddings=64, tie_word_embeddings=True,
    eos_token_id=7,
)
TEXTS = [
    "Hello, world! It's 12345 o'clock.\n\n  indented\t\ttabs   ", "déjà vu naïve 日本語 🎉👩‍👩‍👧 ½",
    "x=3.14;\r\n\r\nfor i in range(10):\n    pass\n", "   ", "", "<|im_start|>user\nHi<|im_end|>",
]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def reference() -> Qwen3:
    return random_weights(Qwen3Config.from_hf(GIVEN))


def tensors(model: Qwen3) -> dict[str, torch.Tensor]:
    return {n: t.clone().contiguous() for n, t in places(model, HF_NAMES).items()}


def folder(path: Path, named: dict | None = None, **changes) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(GIVEN | changes))
    save_file(tensors(reference()) if named is None else named, path / "model.safetensors")
    return path


def same(a: Qwen3, b: Qwen3) -> bool:
    pairs = list(zip(a.named_parameters(), b.named_parameters()))
    return all(n == m and torch.equal(p, q) for (n, p), (m, q) in pairs) and len(pairs) == len(list(a.parameters()))


def test_a_folder_gives_its_weights_in_the_dtype_asked_for(tmp_path):
    model, text = open_model(folder(tmp_path), device="cpu")
    assert same(model, reference()) and text is None and model.c.eos == (7,)
    assert not any(p.requires_grad for p in model.parameters()) and model.head.data is model.embed
    half, _ = open_model(tmp_path, device="cpu", dtype="bfloat16")
    assert same(half, reference().bfloat16())


def test_shards_are_read_by_their_index_and_a_lost_one_is_named(tmp_path):
    named = tensors(reference())
    folder(tmp_path, {})
    (tmp_path / "model.safetensors").unlink()
    names, where = sorted(named), {}
    for i in range(3):
        part = {n: named[n] for n in names[i::3]}
        save_file(part, tmp_path / f"part-{i}.safetensors")
        where |= {n: f"part-{i}.safetensors" for n in part}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    assert same(open_model(tmp_path, device="cpu")[0], reference())
    (tmp_path / "part-1.safetensors").unlink()
    with pytest.raises(ValueError, match="part-1.safetensors is missing, .*model.safetensors.index.json.* .1 of 3"):
        open_model(tmp_path, device="cpu")


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), r"layers.1.mlp.up_proj.weight \(96, 64\) is missing$"),
        (lambda t: t.update(extra=torch.zeros(3)), r"extra \(3,\) is not a tensor of qwen3"),
        (
            lambda t: t.update({"model.layers.0.self_attn.k_proj.weight": torch.zeros(32, 64)}),
            r"self_attn.k_proj.weight must have shape \(64, 64\), got \(32, 64\)",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(64, dtype=torch.int8)}),
            "model.norm.weight must be stored as BF16, F16, F32, got I8",
        ),
        (lambda t: [t.pop(n) for n in list(t)[:5]], r"embed_tokens.weight .* is missing; .*; .* \(5 such in all\)"),
    ],
    ids=["missing", "unexpected", "shape", "dtype", "many"],
)
def test_tensors_that_do_not_fit_are_named_with_both_shapes(change, said, tmp_path):
    named = tensors(reference())
    change(named)
    with pytest.raises(ValueError, match=said):
        open_model(folder(tmp_path, named), device="cpu")


def test_what_a_tied_model_stores_besides_is_no_error(tmp_path):
    named = tensors(reference())
    named |= {"lm_head.weight": named["model.embed_tokens.weight"].clone(), "model.rotary_emb.inv_freq": torch.zeros(16)}
    assert same(open_model(folder(tmp_path, named), device="cpu")[0], reference())
    named.pop("lm_head.weight")
    with pytest.raises(ValueError, match=r"lm_head.weight \(320, 64\) is missing"):
        open_model(folder(tmp_path, named, tie_word_embeddings=False), device="cpu")


def write(name: str, text: str):
    return lambda path: (path / name).write_text(text)


@pytest.mark.parametrize(
    "spoil, said",
    [
        (shutil.rmtree, "no such folder, GGUF file or model in .*; nothing is downloaded"),
        (lambda path: (path / "config.json").unlink(), "a model folder must have config.json"),
        (write("config.json", "{"), "config.json: not readable as JSON"),
        (write("config.json", json.dumps(GIVEN | dict(architectures=["T5"]))), "T5 is not supported; there are Qwen3For"),
        (lambda path: (path / "model.safetensors").unlink(), "there are no .safetensors files"),
        (write("model.safetensors", "no tensors"), "not a safetensors file, or cut short"),
        (write("tokenizer.json", "{}"), "tokenizer.json cannot be read"),
    ],
    ids=["nothing", "no-config", "no-json", "family", "no-weights", "no-tensors", "tokenizer"],
)
def test_a_folder_that_is_no_model_is_refused_in_a_line(spoil, said, tmp_path):
    spoil(folder(tmp_path / "model"))
    with pytest.raises(ValueError, match=said) as refused:
        open_model(tmp_path / "model", device="cpu")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "changes, said",
    [
        (dict(hidden_size="64"), "hidden_size must be a whole number from 1 on, got '64'"),
        (dict(num_hidden_layers=2.0), "num_hidden_layers must be a whole number from 1 on, got 2.0"),
        (dict(rope_scaling=[1]), "rope_scaling must be an object or null, got [1]"),
        (dict(rope_scaling=dict(type="linear", factor="2")), "rope_scaling.factor must be a number above 0, got '2'"),
        (dict(rms_norm_eps=-1), "rms_norm_eps must be a number above 0, got -1"),
        (dict(architectures=5), "architectures must be a list of names, got 5"),
        (dict(eos_token_id="7"), "eos_token_id must be a whole number from 0 on or a list of them, got '7'"),
        (dict(tie_word_embeddings="false"), "tie_word_embeddings must be true or false, got 'false'"),
        (dict(layer_types="full"), "layer_types must be a list of names, got 'full'"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_a_field_of_a_wrong_kind_is_named_with_what_was_expected(changes, said, tmp_path):
    with pytest.raises(ValueError) as refused:
        open_model(folder(tmp_path, **changes), device="cpu")
    assert str(refused.value) == f"{tmp_path}: config.json: {said}"


def test_ends_of_a_wrong_kind_are_laid_to_the_file_that_has_them(tmp_path):
    write("generation_config.json", '{"eos_token_id": ["7"]}')(folder(tmp_path))
    with pytest.raises(ValueError, match="generation_config.json: eos_token_id must be a whole number"):
        open_model(tmp_path, device="cpu")


def test_one_architecture_may_be_a_name_and_an_index_may_name_nothing(tmp_path):
    folder(tmp_path, architectures="Qwen3ForCausalLM")
    for index in ("{}", '{"weight_map": {}}'):
        write("model.safetensors.index.json", index)(tmp_path)
        assert same(open_model(tmp_path, device="cpu")[0], reference())
    write("model.safetensors.index.json", '{"weight_map": ["a"]}')(tmp_path)
    with pytest.raises(ValueError, match="weight_map must be .* got list"):
        open_model(tmp_path, device="cpu")


@pytest.mark.parametrize(
    "options, said",
    [
        (dict(random_weights="qwen3:tiny", dtype="int8"), "dtype must be auto, bfloat16, float16, float32, got 'int8'"),
        (dict(random_weights="qwen3:tiny", device="gpu"), "device must be auto, cpu or cuda, got 'gpu'"),
        (dict(random_weights="qwen3:9b"), "qwen3 has no size '9b'; there are tiny, 0.6b"),
        (dict(random_weights="tiny-llama:small"), "tiny-llama:small cannot be decoded with; there are qwen3:tiny, qwen3:0.6b"),
        (dict(path="here", random_weights="qwen3:tiny"), "give a model or random weights, not both"),
    ],
    ids=["dtype", "device", "size", "model", "both"],
)
def test_options_that_make_no_sense_are_named(options, said):
    with pytest.raises(ValueError, match=said):
        open_model(**dict(device="cpu") | options)


def test_random_weights_need_no_file():
    model, text = open_model(random_weights="qwen3:tiny", device="cpu", dtype="bfloat16")
    assert text is None and model.embed.dtype == torch.bfloat16
    assert torch.isfinite(model(torch.zeros(1, 3, dtype=torch.int64))).all()


def test_a_name_is_found_in_the_cache_of_hugging_face(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    cached = tmp_path / "hub" / "models--some--model"
    (cached / "snapshots").mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc")
    folder(cached / "snapshots" / "abc")
    assert same(open_model("some/model", device="cpu")[0], reference())


def trained(pre) -> Tokenizer:
    tokenizer = Tokenizer(kinds.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre, decoders.ByteLevel()
    start = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=SPECIAL, initial_alphabet=start, show_progress=False)
    tokenizer.train_from_iterator(TEXTS * 4, trainer)
    return tokenizer


def split(pattern: str):
    return pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    ])


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
DIGITS = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), BYTES])
AS_HUGGING_FACE = {  # as the tokenizer.json of a model with that name in llama.cpp cuts text
    "smollm": DIGITS, "gpt-2": BYTES, "llama-bpe": split(LLAMA3), "qwen2": split(QWEN2),
}
CHAT = """{%- for m in messages %}
    {%- if m.role == 'robot' %}{{ raise_exception('no robots') }}{% endif %}
    {%- if m.role == 'skip' %}{% continue %}{% endif %}
<|im_start|>{{ m['role'] }}
{% generation %}{{ m['content'] }}{% endgeneration %}<|im_end|>
{%- endfor %}
    {% if tools %}{{ tools | tojson(indent=1) }}{% endif %}
{{ bos_token }}{{ strftime_now('%Y') | length }}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@pytest.mark.parametrize("pre", AS_HUGGING_FACE)
def test_a_tokenizer_from_gguf_cuts_text_as_its_original(pre):
    original = trained(AS_HUGGING_FACE[pre])
    text = Text.from_gguf(metadata(original, pre))
    for sample in TEXTS:
        assert text.encode(sample, special=False) == original.encode(sample).ids
        assert text.decode(text.encode(sample, special=False), skip_special=False) == sample
    assert text.bos == 1 and set(text.eos) == {0, 2}
    assert text.encode("a", special=True)[0] == (1 if pre == "llama-bpe" else text.encode("a", special=False)[0])


def metadata(tokenizer: Tokenizer, pre: str) -> dict:
    merges = [" ".join(m) for m in json.loads(tokenizer.to_str())["model"]["merges"]]
    tokens = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
    named = dict(tokens=tokens, token_type=[3 if t in SPECIAL else 1 for t in tokens], merges=merges, model="gpt2", pre=pre)
    found = {f"tokenizer.ggml.{k}": v for k, v in named.items()}
    return found | {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.chat_template": CHAT}


@pytest.mark.parametrize(
    "change, said", [({"pre": "tekken"}, "pre must be one of default, .*, got 'tekken'"), ({"model": "llama"}, "must be gpt2")]
)
def test_a_tokenizer_that_cannot_be_built_is_refused(change, said):
    meta = metadata(trained(DIGITS), "smollm") | {f"tokenizer.ggml.{k}": v for k, v in change.items()}
    with pytest.raises(ValueError, match=said):
        Text.from_gguf(meta)


def test_a_stream_gives_whole_characters_and_all_of_them():
    text = Text.from_gguf(metadata(trained(DIGITS), "smollm"))
    for sample in TEXTS:
        tokens, stream = text.encode(sample), text.stream(skip_special=False)
        pieces = [stream.push(t) for t in tokens]
        assert "".join(pieces) == sample and not any("\ufffd" in p for p in pieces) and stream.end() == ""
    cut = text.encode("🎉")[:-1]
    stream = text.stream()
    assert [stream.push(t) for t in cut] == [""] * len(cut) and stream.end() == "\ufffd" and stream.end() == ""
    assert text.stream().extend(text.encode("a<|im_end|>b")) == "ab"


def test_a_chat_is_rendered_as_transformers_does(tmp_path):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=trained(DIGITS), chat_template=CHAT, bos_token="<|im_start|>", eos_token="<|im_end|>"
    )
    theirs.save_pretrained(tmp_path)
    text = Text.from_folder(tmp_path)
    messages = [dict(role="user", content="Hi ½"), dict(role="skip", content=""), dict(role="assistant", content="  {% x %} ")]
    for answer in (True, False):
        for tools in (None, [dict(name="é")]):
            wanted = theirs.apply_chat_template(messages, tools=tools, add_generation_prompt=answer, tokenize=False)
            assert text.chat_text(messages, answer, tools=tools) == wanted
    assert text.chat(messages) == theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    model, own = open_model(folder(tmp_path), device="cpu")
    assert own.eos == (2,) and model.c.eos == (7, 2) and own.encode("Hi") == theirs("Hi")["input_ids"]
    (tmp_path / "generation_config.json").write_text(json.dumps(dict(eos_token_id=[5, 6])))
    assert open_model(tmp_path, device="cpu")[0].c.eos == (5, 6, 2)


@pytest.mark.parametrize(
    "messages, template, said",
    [
        ([dict(role="robot", content="")], CHAT, "its chat template refuses the messages: no robots"),
        ([dict(role="user", content="")], None, "tester has no chat template: give a plain prompt"),
        ([dict(role="user", content="")], "{% if %}", "its chat template refuses the messages"),
        ([dict(role="user", content="")], "{{ ''.__class__.__mro__ }}", "unsafe"),
        ("hi", CHAT, "messages must be a list of"),
        ([], CHAT, "messages must be a list of"),
        (None, CHAT, "messages must be a list of"),
        ([dict(role="user")], CHAT, r"messages\[0\] must have role and content"),
        ([dict(role="user", content=5)], CHAT, r"^chat: content of messages\[0\] must be text, got int$"),
        ([dict(role="user", content="a\udcff")], CHAT, r"messages\[0\] must be text, got half a character, '.udcff'"),
    ],
    ids=["refused", "none", "broken", "unsafe", "text", "empty", "null", "no-content", "number", "half"],
)
def test_a_chat_that_cannot_be_rendered_says_why(messages, template, said):
    with pytest.raises(ValueError, match=said):
        Text(trained(DIGITS), template, name="tester").chat(messages)
