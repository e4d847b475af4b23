"""Decode kernels are used only where they were verified: right ones once, wrong ones never, and generation goes on without."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import DEVICE
from small_decoder import Letters
from test_cli import invoke
from test_proof import STEP, TINY, first_head_scaled, plant

from whet import machine, measure
from whet.choices import Choices
from whet.decode import persistent, proof, trust
from whet.decode.engine import LLM
from whet.decode.request import Completion
from whet.lock import Lock
from whet.models.qwen3 import random_weights
from whet.tune import save_decoder


@pytest.fixture(autouse=True)
def verifying(monkeypatch):
    """Kernels are verified here, a step at its last place alone where they are interpreted: each takes a second."""
    if DEVICE == "cpu":
        monkeypatch.setattr(proof, "positions", lambda rows, last: [[last] * rows])


class Inside:
    """A worker in this process; it counts what it is asked."""

    asked: list[str] = []
    said: dict | None = None  # instead of a proof

    def start(self):
        pass

    stop = start

    def ask(self, limit_s, what, call, **request):
        Inside.asked.append(request["part"]["kind"])
        return Inside.said or proof.answer(None, **json.loads(json.dumps(request)))


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """A decoder's kernels are wanted here too, and verified in this process, by one part of the proof."""
    Inside.asked, Inside.said = [], None
    monkeypatch.setattr(trust, "wanted", lambda model: True)
    monkeypatch.setattr(trust.Verifier, "worker", staticmethod(lambda: Inside()))
    monkeypatch.setattr(proof, "parts", lambda *_: [dataclasses.replace(STEP, context=20)])


def tiny_model():
    return random_weights(TINY, device=DEVICE, dtype=torch.float32).requires_grad_(False)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_right_kernels_are_verified_once_and_found_in_the_lock(capsys):
    llm = LLM.of(tiny_model(), Letters())
    assert llm.trust.kernels and llm.model.ops.default == "triton" and Inside.asked == ["step"]
    assert "verifying the decode kernels" in capsys.readouterr().err
    (verdict,) = Lock.read().decoders.values()
    assert verdict["ok"] and verdict["why"] == "" and 0 < verdict["share"] < 1
    again = LLM.of(tiny_model(), Letters())
    assert again.trust.kernels and Inside.asked == ["step"] and capsys.readouterr().err == ""
    other, Inside.said = dataclasses.replace(TINY, ffn=48), {"ok": True, "share": 0.5, "why": ""}
    LLM.of(random_weights(other, device=DEVICE).requires_grad_(False), Letters())
    assert Inside.asked == ["step", "step"]


@pytest.mark.usefixtures("as_on_a_gpu")
def test_wrong_kernels_leave_generation_to_stock_calls_and_one_line_says_why(monkeypatch, capsys):
    wanted = LLM.of(tiny_model(), Letters(), verify=False)
    wanted.model.ops = Choices()
    plain = wanted.generate([1, 2, 3], max_new_tokens=3).tokens
    plant(monkeypatch, "cached_attention", first_head_scaled)
    llm = LLM.of(tiny_model(), Letters())
    said = capsys.readouterr().err.splitlines()
    assert not llm.trust.kernels and llm.model.ops.default is None and not llm.runner.kernels
    assert len(said) == 2 and "stock calls" in said[1] and "cached_attention: " in said[1]
    assert llm.generate([1, 2, 3], max_new_tokens=3).tokens == plain
    LLM.of(tiny_model(), Letters())
    assert Inside.asked == ["step"] and len(capsys.readouterr().err.splitlines()) == 1  # known, and said again


@pytest.mark.usefixtures("as_on_a_gpu")
def test_an_edited_source_is_verified_again(monkeypatch):
    Inside.said = {"ok": True, "share": 0.5, "why": ""}
    LLM.of(tiny_model(), Letters())
    assert not trust.nothing_verified_yet()
    monkeypatch.setattr(trust, "sources", lambda: "edited")
    assert trust.nothing_verified_yet()
    LLM.of(tiny_model(), Letters())
    assert Inside.asked == ["step", "step"]


def test_the_sources_are_the_kernels_the_runner_and_the_proof(tmp_path):
    root = tmp_path / "whet"
    shutil.copytree(Path(trust.__file__).parent.parent, root, ignore=shutil.ignore_patterns("__pycache__"))
    before = trust.hash_of(root)
    for name, counts in (
        ("ops/_split_kv.py", True), ("ops/attention/forward.py", True), ("decode/cuda/products.cu", True),
        ("decode/runner.py", True), ("decode/proof.py", True), ("ops/cross_entropy.py", False), ("decode/text.py", False),
    ):
        text = (root / name).read_text()
        (root / name).write_text(text + "\n")
        assert (trust.hash_of(root) != before) == counts, name
        (root / name).write_text(text)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_verification_can_be_left_out(monkeypatch, capsys):
    plant(monkeypatch, "cached_attention", first_head_scaled)
    llm = LLM.of(tiny_model(), Letters(), verify=False)
    assert llm.trust.kernels and llm.model.ops.default == "triton"
    assert Inside.asked == [] and capsys.readouterr().err == "" and not Lock.read().decoders


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_verdict_for_want_of_memory_is_not_kept():
    Inside.said = {"error": "out of memory: tried to allocate 1 EiB"}
    llm = LLM.of(tiny_model(), Letters())
    assert not llm.trust.kernels and "out of memory" in llm.trust.why[0] and not Lock.read().decoders
    Inside.said = {"ok": True, "share": 0.5, "why": ""}
    assert LLM.of(tiny_model(), Letters()).trust.kernels


def test_a_kernel_that_ends_the_process_costs_only_the_kernels(monkeypatch, capsys):
    """In a child as it is started for a user."""
    monkeypatch.setattr(trust, "wanted", lambda model: True)
    monkeypatch.setattr(trust, "CHILD", str(Path(__file__).with_name("planted_decoder.py")))
    monkeypatch.setattr(proof, "parts", lambda *_: [STEP])
    llm = LLM.of(tiny_model(), Letters())
    assert not llm.trust.kernels and "the process died" in capsys.readouterr().err
    assert len(llm.generate([1, 2, 3], max_new_tokens=2).tokens) == 2
    (verdict,) = Lock.read().decoders.values()
    assert not verdict["ok"] and "the process died" in verdict["why"]


def test_a_cpu_decodes_by_stock_calls_and_verifies_nothing(monkeypatch, capsys):
    monkeypatch.setattr(trust.Verifier, "verdicts", None)
    llm = LLM(random_weights="qwen3:tiny", device="cpu")
    assert not llm.trust.kernels and not llm.trust.why and llm.model.ops.default is None and capsys.readouterr().err == ""
    assert persistent.wanted(llm.model, "auto") is False


def test_generate_has_an_option_to_leave_verification_out():
    common = ("generate", "5 6", "--random-weights", "qwen3:tiny", "--max-new-tokens", "2", "--device", "cpu", "--json")
    first, second = (json.loads(invoke(*common, *more).stdout)["tokens"] for more in ((), ("--no-verify",)))
    assert first == second
    assert "--no-verify" in invoke("generate", "--help").stdout


def test_the_floor_is_not_measured_for_a_completion(monkeypatch, tmp_path):
    monkeypatch.setenv("WHET_CACHE", str(tmp_path / "nothing"))
    monkeypatch.setattr(measure, "_measure_ceilings", lambda: pytest.fail("a benchmark beside a loaded model"))
    done = Completion(tokens=[0] * 101, decode_s=0.1, bytes_per_token=10**9)
    assert done.floor_share is None and measure.known_ceilings() is None


def test_a_verdict_is_saved_for_this_machine_alone(tmp_path, monkeypatch):
    path = tmp_path / "some.lock"
    save_decoder(Lock.read(path), "a key", {"ok": True, "why": ""})
    assert Lock.read(path).decoders == {"a key": {"ok": True, "why": ""}}
    other = dataclasses.replace(machine.this_machine(), name="Another GPU")
    monkeypatch.setattr(machine, "this_machine", lambda: other)
    assert Lock.read(path).decoders == {}
