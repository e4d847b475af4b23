"""The proof of the decode kernels: right ones pass, each planted fault is found and named."""

import dataclasses
import json

import pytest
import torch
from conftest import DEVICE

from whet.decode import decoded, hostile, proof
from whet.decode.bias import biased_part, faults
from whet.decode.oracle import widened
from whet.decode.proof import ProofPart, verify_shape
from whet.models.qwen3 import SIZES, Qwen3Config
from whet.op import discover

TINY = Qwen3Config(
    vocab=40, hidden=32, layers=2, heads=2, kv_heads=1, head_dim=16, ffn=32, max_positions=66, theta=1e4, tied=False,
)
OPS = discover()
POSITIONS = proof.positions
STEP = ProofPart("step", "float32", context=66, families=("plain",))


@pytest.fixture(autouse=True)
def verifying(monkeypatch):
    """Kernels are verified here, a step at its last place alone where they are interpreted: each takes a second."""
    if DEVICE == "cpu":
        monkeypatch.setattr(proof, "positions", lambda rows, last: [[last] * rows])


def plant(monkeypatch, name: str, wrong) -> None:
    """Put another function in the place of an op's kernel; it is given the right one and the arguments by name."""
    op, right = OPS[name], OPS[name].impls["triton"]
    run = lambda *args, **options: wrong(right.run, **op.bind(args, options))  # noqa: E731
    monkeypatch.setitem(op.impls, "triton", dataclasses.replace(right, run=run))


def without_the_last_key(run, k_cache, v_cache, positions, **args):
    lost = [t.clone() for t in (k_cache, v_cache)]
    for row, at in enumerate(positions.tolist()):
        for t in lost:
            t[row, :, max(0, at - 1)] = 0
    run(k_cache=k_cache, v_cache=v_cache, positions=positions, **args)
    return run(k_cache=lost[0], v_cache=lost[1], positions=positions, **args)


def first_head_scaled(run, **args):
    y = run(**args)
    y[..., :16] *= 1.01
    return y


def second_time_wrong(run, **args):
    """From the second step on: a layer has two of them."""
    second_time_wrong.calls += 1
    return run(**args) if second_time_wrong.calls < 3 else run(**args) * 1.001


FAULTS = {
    "last key missing": ("cached_attention", without_the_last_key, "plain"),
    "eps dropped": ("norm_linear", lambda run, eps, **args: run(eps=0.0, **args), "small"),
    "rope one position off": ("cached_attention", lambda run, cos, **args: run(cos=cos.roll(1, 0), **args), "plain"),
    "one head 1% off": ("cached_attention", first_head_scaled, "plain"),
    "negative norms taken as positive": ("norm_swiglu", lambda run, norm, **args: run(norm=norm.abs(), **args), "hostile"),
    "residual dropped": ("linear_add", lambda run, res, **args: run(res=torch.zeros_like(res), **args), "plain"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_kernel_of_a_step_is_rejected_by_name(fault, monkeypatch):
    name, wrong, family = FAULTS[fault]
    plant(monkeypatch, name, wrong)
    verdict = proof.prove(TINY, "fp32", dataclasses.replace(STEP, families=(family,)), DEVICE)
    assert not verdict.ok and f"{name}: " in verdict.why and STEP.name in verdict.why


def test_right_kernels_of_a_step_are_accepted():
    verdict = proof.prove(TINY, "fp32", dataclasses.replace(STEP, families=hostile.FAMILIES), DEVICE)
    assert verdict.ok and 0 < verdict.share < 1, verdict.why


@pytest.mark.parametrize("quant", ["int8", "int4", "fp8"])
def test_quantised_kernels_of_a_step_are_accepted(quant):
    wide = dataclasses.replace(TINY, hidden=64, ffn=64, heads=4, kv_heads=2)
    part = dataclasses.replace(STEP, dtype="bfloat16", families=("hostile",))
    verdict = proof.prove(wide, quant, part, DEVICE)
    assert verdict.ok, verdict.why


HEAD = ProofPart("head", "float32", families=("plain",))
HEADS = {
    "the last token is never seen": (lambda run, w, **args: run(w=w[:-1], **args), "was chosen, whose logit is"),
    "the last of equals": (lambda run, w, **args: (len(w) - 1 - (t := run(w=w.flip(0), **args))[0], t[1]), "the first counts"),
    "NaN goes unseen": (lambda run, x, **args: run(x=x.nan_to_num(), **args), "not a number"),
    "a logit 1% off": (lambda run, **args: ((t := run(**args))[0], t[1] * 1.01), "logit: "),
}


@pytest.mark.parametrize("fault", HEADS)
def test_a_wrong_head_is_rejected(fault, monkeypatch):
    wrong, said = HEADS[fault]
    plant(monkeypatch, "norm_argmax", wrong)
    verdict = proof.prove(TINY, "fp32", HEAD, DEVICE)
    assert not verdict.ok and "norm_argmax: " in verdict.why and said in verdict.why


def test_a_right_head_is_accepted():
    for rows, family in enumerate(hostile.FAMILIES, 1):
        verdict = proof.prove(TINY, "fp32", dataclasses.replace(HEAD, rows=rows, families=(family,)), DEVICE)
        assert verdict.ok, verdict.why


def test_prefill_is_verified_op_by_op(monkeypatch):
    part = ProofPart("prefill", "float32", context=0, families=("plain",))
    assert proof.prove(TINY, "fp32", part, DEVICE).ok
    plant(monkeypatch, "norm_rope", lambda run, start, **args: run(start=max(0, start - 1), **args) * 1.001)
    assert "norm_rope: " in proof.prove(TINY, "fp32", part, DEVICE).why


DECODE = ProofPart("decode", "float32", context=40, families=("plain",))


def test_what_the_runner_decodes_is_verified_whole(monkeypatch):
    monkeypatch.setattr(decoded, "STEPS", 1)
    monkeypatch.setattr(decoded, "OLD", (9,))
    one = dataclasses.replace(TINY, layers=1)
    assert (right := proof.prove(one, "fp32", DECODE, DEVICE)).ok, right.why
    second_time_wrong.calls = 0
    plant(monkeypatch, "linear_add", second_time_wrong)
    assert "other bits" in proof.prove(one, "fp32", DECODE, DEVICE).why


@torch.no_grad()
def test_a_small_fault_is_seen_by_where_the_error_leans():
    """In bfloat16 one of four heads 1% off is within the rule's budget; its direction gives it away."""
    c = dataclasses.replace(TINY, hidden=256, heads=4, kv_heads=2, head_dim=64, ffn=256, vocab=700)
    model = hostile.model_of_family(c, "plain", torch.bfloat16, DEVICE, ops="eager")
    start = decoded.Start([20], hostile.caches(model, [20], 44, "plain"), torch.tensor([3], device=DEVICE), 24)
    tokens = torch.randint(c.vocab, (1, 24), device=DEVICE)
    wide, step = widened(model, torch.float32), torch.finfo(torch.bfloat16).eps
    again = lambda m: decoded.expected(m, start, tokens)  # noqa: E731
    wanted, eager = again(wide), again(model)
    rounded = {name: t.to(eager[name].dtype) for name, t in wanted.items()}
    assert biased_part(wide, rounded, eager, wanted, again, step) is None
    off = dict(faults(wide))["the output of head 2 in layer 1"]
    kept = off.clone()
    off.mul_(1.01)
    found = {name: t.to(eager[name].dtype) for name, t in again(wide).items()}
    off.copy_(kept)
    assert decoded.judge({"logits": found["logits"]}, {"logits": eager["logits"]}, {"logits": wanted["logits"]}, step).ok
    assert "head 2 in layer 1" in biased_part(wide, found, eager, wanted, again, step)
    rounded["keys"][0, :, 1] *= 1.01
    assert "keys of layer 0, head 1" in biased_part(wide, rounded, eager, wanted, again, step)


def test_what_is_proved_covers_the_batches_and_contexts_that_choose_other_kernels():
    wide = SIZES["0.6b"]
    assert proof.buckets(1) == [1] and proof.buckets(3) == [1, 2, 3] and proof.buckets(12) == [1, 2, 4, 8, 12]
    found = proof.parts(wide, "bf16", "graph", rows=8)
    steps = {(p.rows, p.context) for p in found if p.kind == "step" and p.dtype == "bfloat16"}
    assert {(1, 256), (1, 1024), (1, 16384), (2, 256), (4, 256), (8, 256), (8, 1024)} <= steps
    assert {p.kind for p in found} == {"step", "head", "prefill", "decode"}
    assert {p.dtype for p in found if p.kind == "step"} == {"bfloat16", "float32"}
    assert {p.context for p in found if p.kind == "prefill"} == {2048}  # behind a whole chunk, and all before
    assert {p.context for p in proof.parts(TINY, "fp32", "graph") if p.kind in ("step", "decode")} == {66}
    drafted = proof.parts(wide, "bf16", "graph", 1, drafts=True)
    assert not any(p.tokens > 1 for p in found) and any(p.tokens == 8 for p in drafted)
    assert [p.kind for p in proof.parts(wide, "int4", "persistent")] == ["persistent"]
    for wrong, said in ((dict(fmt="int3"), "fmt must"), (dict(path="fast"), "path must"), (dict(rows=65), "rows must")):
        with pytest.raises(ValueError, match=said):
            verify_shape(TINY, **({"device": "cpu"} | wrong))


def test_a_step_is_proved_at_both_ends_of_a_context_and_of_a_span():
    assert {0, 1, 63, 64, 65, 255} == {p for (p,) in POSITIONS(1, 255)}
    (ragged,) = POSITIONS(8, 1023)
    assert len(ragged) == 8 and {0, 63, 64, 1023} <= set(ragged)


def test_a_question_survives_its_way_to_the_child():
    stretched = dict(rope_type="linear", factor=2.0)
    c = dataclasses.replace(TINY, rope_scaling=stretched, eos=(1, 2))
    request = json.loads(json.dumps(proof.request(c, "int8", STEP, "cpu")))
    assert Qwen3Config(**request["config"] | {"eos": tuple(request["config"]["eos"])}) == c
    assert ProofPart(**request["part"] | {"families": tuple(request["part"]["families"])}) == STEP
