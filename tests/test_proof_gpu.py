"""The proof of the decode kernels on a GPU, at a real model's width: right ones pass, in seconds, and wrong ones do not."""

import dataclasses

import pytest
import torch

from whet.decode import persistent, trust
from whet.decode.engine import LLM
from whet.decode.proof import verify_shape
from whet.lock import Lock
from whet.models.qwen3 import SIZES, random_weights


@pytest.fixture(autouse=True)
def verifying():
    """Kernels are verified here."""


WIDE = dataclasses.replace(SIZES["0.6b"], layers=2)
FORMATS = ["bf16", "int8", "int4", "fp8"]


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", FORMATS)
def test_on_a_gpu_the_graph_kernels_of_a_real_width_are_accepted(fmt):
    verdict = verify_shape(WIDE, "graph", fmt, "cuda", rows=16)
    assert verdict.ok, verdict.why


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", FORMATS[:3])
def test_on_a_gpu_the_persistent_kernel_of_a_real_width_is_accepted(fmt):
    if why := persistent.device_refused(torch.device("cuda")):
        pytest.skip(why)
    verdict = verify_shape(WIDE, "persistent", fmt, "cuda")
    assert verdict.ok, verdict.why


@pytest.mark.gpu
def test_on_a_gpu_steps_with_drafts_are_accepted():
    verdict = verify_shape(WIDE, "graph", "bf16", "cuda", rows=1, drafts=True, only=lambda part: part.tokens > 1)
    assert verdict.ok, verdict.why


SOURCES = {
    "softmax scaled by 1.01": ("x[i] *= a.scale;", "x[i] *= a.scale * 1.01f;"),
    "eps of the heads' norms dropped": ("/ D + a.eps);", "/ D);"),
    "eps of the layers' norms dropped": ("* (1.0f / K) + a.eps)", "* (1.0f / K))"),
}


@pytest.mark.gpu
@pytest.mark.parametrize("fault", SOURCES)
def test_on_a_gpu_a_wrong_persistent_kernel_is_rejected(fault, monkeypatch, tmp_path):
    if why := persistent.device_refused(torch.device("cuda")):
        pytest.skip(why)
    (old, new), right = SOURCES[fault], persistent.source()
    assert old in right
    monkeypatch.setenv("WHET_CACHE", str(tmp_path))
    monkeypatch.setattr(persistent, "source", lambda: right.replace(old, new))
    assert not verify_shape(WIDE, "persistent", "bf16", "cuda").ok


@pytest.mark.gpu
def test_on_a_gpu_verifying_takes_seconds_and_the_second_start_none(capsys):
    model = random_weights(WIDE, device="cuda", dtype=torch.bfloat16).requires_grad_(False)
    llm = LLM.of(model, max_batch=1)
    assert llm.trust.kernels and not llm.trust.why
    took = {key.split()[0]: verdict["s"] for key, verdict in Lock.read().decoders.items()}
    with capsys.disabled():
        print(f"\nverified, process start and compiling included: {took} s")
    assert max(took.values()) < 60
    monkey = pytest.MonkeyPatch()
    monkey.setattr(trust.Verifier, "verdicts", None)
    assert LLM.of(model, max_batch=1).trust == llm.trust
    monkey.undo()


@pytest.mark.gpu
def test_on_a_gpu_stock_calls_decode_what_was_not_verified(monkeypatch):
    """Alone, in a batch, drawn, and with speculation."""
    monkeypatch.setattr(trust, "verdicts", lambda model, asked, *_: {p: {"ok": False, "why": "planted"} for p in asked})
    model = random_weights(WIDE, device="cuda", dtype=torch.bfloat16).requires_grad_(False)
    llm = LLM.of(model, max_batch=4)
    assert not llm.runner.kernels and llm.runner.persistent is None and model.ops.default is None
    for options in (dict(), dict(temperature=0.8)):
        one = llm.generate([1, 2, 3], max_new_tokens=20, ignore_eos=True, **options)
        several = llm.generate([[1, 2, 3], [4] * 70, [5]], max_new_tokens=20, ignore_eos=True, **options)
        assert [len(c.tokens) for c in (one, *several)] == [20] * 4
    guessed = LLM.of(model, speculate="ngram").generate([1, 2, 3, 1, 2, 3, 1, 2], max_new_tokens=20, ignore_eos=True)
    assert len(guessed.tokens) == 20
