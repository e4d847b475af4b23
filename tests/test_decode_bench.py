"""What a system must show before it is timed, rivals that compute the same model, and a bench that keeps what it measured."""

import functools
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import DEVICE, without
from rich.console import Console
from test_cli import error_lines, example, invoke

from whet.child import Ended
from whet.decode.bench import agree, contender, evidence, prepare, quality, rivals
from whet.decode.bench import run as bench
from whet.decode.quantize import quantize
from whet.models.qwen3 import Qwen3Config, random_weights
from whet.report import decode as tables

SMALL = Qwen3Config(vocab=97, hidden=32, layers=2, heads=4, kv_heads=2, head_dim=16, ffn=64, max_positions=64)
STRETCHED = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
FAMILIES = {
    "qwen3": SMALL,
    "qwen2": replace(SMALL, name="qwen2", qk_norm=False, qkv_bias=True),
    "llama": replace(SMALL, name="llama", qk_norm=False, tied=False, rope_scaling=STRETCHED),
    "mistral": replace(SMALL, name="mistral", qk_norm=False, tied=False),
}


pytestmark = pytest.mark.usefixtures("one_thread")


def made(c: Qwen3Config = SMALL, device: str = "cpu"):
    """Biases and norms away from 0 and 1, where one that is left out would not show."""
    model = random_weights(c, device=device, dtype=torch.float32).requires_grad_(False)
    generator = torch.Generator(device).manual_seed(7)
    for name, p in model.named_parameters():
        if p.dim() == 1:
            p.add_(torch.rand(p.shape, generator=generator, device=device) - 0.5)
        elif name != "embed":
            p.mul_(5)
    return model


def tokens_of(c: Qwen3Config, *shape: int) -> torch.Tensor:
    return torch.randint(c.vocab, shape, generator=torch.Generator().manual_seed(3))


def truth_of(model, batch: int = 2, context: int = 11) -> agree.Truth:
    prompt, forced = (tokens_of(model.c, *shape).to(model.embed.device) for shape in ((1, context), (batch, agree.CHECKED)))
    return agree.Truth(model, prompt, forced)


@pytest.fixture
def uncompiled(monkeypatch):
    """Rivals as they are written: compiling each takes a minute and changes no meaning."""
    monkeypatch.setattr(rivals, "compiled", lambda one, tuned=False: one)


@pytest.fixture
def replaced_on_a_cpu(request):
    """There every replacement of so small a model is timed as slower and taken back; untimed, all of them are in the model."""
    if DEVICE == "cpu":
        request.getfixturevalue("swapped_at_once")


def assert_right_and_rewound(system: contender.Contender, model) -> None:
    verdict = truth_of(model).judge(system)
    assert verdict.ok, verdict.why
    before = system.chain(3)
    system.run(3)
    assert torch.equal(system.chain(3), before), "rewind gives the same tokens again"


@pytest.mark.parametrize("rival", rivals.RIVALS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_rival_computes_the_model_of_every_family(family, rival, device, uncompiled, replaced_on_a_cpu):
    model = made(FAMILIES[family], device)
    with rivals.quiet():
        system = rivals.RIVALS[rival](model, 2, 24)
        assert_right_and_rewound(system, model)
    if rival == "transformers-optimized" and DEVICE == "cpu":
        kinds = {"attention", "causal_mask", "gated_mlp", "residual_norm"}
        assert kinds < {group.kind for group in system.module.whet.kept}


def test_the_optimized_rival_is_right_after_its_kernels_were_verified_and_timed(device, monkeypatch):
    model = made(device=device)
    monkeypatch.setattr(rivals, "optimize", functools.partial(rivals.optimize, seconds=0.01))
    with rivals.quiet(), without("compile", "liger"):
        system = rivals.TransformersOptimized(model, 2, 24)
        assert_right_and_rewound(system, model)
    served = {call.split()[0] for call in system.module.whet.entries}
    assert served >= {"rms_norm", "qk_norm_rope", "attention", "add_rms_norm", "swiglu"}, served


def test_a_rival_takes_attention_that_lies_as_on_a_gpu(uncompiled, monkeypatch):
    """There the rows of all heads of one token may lie together, and a result cannot be viewed in another shape."""
    attention = rivals.F.scaled_dot_product_attention

    def lies_otherwise(*args, **kwargs):
        return attention(*args, **kwargs).transpose(1, 2).contiguous().transpose(1, 2)

    monkeypatch.setattr(rivals.F, "scaled_dot_product_attention", lies_otherwise)
    model = made()
    assert truth_of(model).judge(rivals.GptFast(model, 2, 24)).ok


def test_a_window_is_kept_by_hand_and_refused_where_it_cannot_be_rewound(uncompiled):
    model = made(replace(FAMILIES["mistral"], window=6))
    assert truth_of(model).judge(rivals.GptFast(model, 2, 24)).ok
    with pytest.raises(ValueError, match="sliding window"):
        rivals.Transformers(model, 2, 24)


@pytest.mark.parametrize("quant", ["", "int8", "int4", "fp8"])
def test_whets_own_decoder_is_held_to_the_same_truth(quant, device):
    model = made(replace(SMALL, hidden=64), device)
    if quant:
        quantize(model, quant)
    verdict = truth_of(model).judge(contender.GraphContender(model, 2, 24))
    assert verdict.ok, verdict.why


class Wrong(contender.GraphContender):
    def step(self, token):
        chosen, logits = super().step(token)
        return chosen, logits * 1.001


class Careless(contender.GraphContender):
    """Right logits, wrong tokens: what it would do by itself is looked at too."""

    def chain(self, tokens):
        return (super().chain(tokens) + 1) % SMALL.vocab


@pytest.mark.parametrize("kind, reason", [(Wrong, "logits: "), (Careless, "a chosen token's logit is ")])
def test_a_system_that_is_wrong_is_seen(kind, reason):
    verdict = truth_of(made()).judge(kind(made(), 2, 24))
    assert not verdict.ok and verdict.why.startswith(reason)


@pytest.fixture
def few(monkeypatch):
    """One system of whet's, so that a bench takes a second."""
    monkeypatch.setattr(bench, "OURS", {"whet graph": contender.GraphContender})
    monkeypatch.setattr(bench, "PREFILL", 16)
    monkeypatch.setattr(bench, "LEAST", 2)


def benched(*options: str, **given) -> dict:
    asked = "--model qwen3:tiny --context 16 --batch 1 --tokens 4 --seconds 0.01 --no-start --device cpu --json"
    result = invoke("bench", "decode", *asked.split(), *options)
    assert result.exit_code == given.get("exit_code", 0), result.output
    return json.loads(result.stdout)


def test_bench_example_verifies_times_and_keeps_a_record(few):
    result = invoke(*example("bench decode"))
    assert result.exit_code == 0, result.stderr
    measured = ("of floor",) if torch.cuda.is_available() else ()  # columns without a figure are left out
    for word in ("whet, one graph a token", "tokens/s", *measured, "prefill of 16 tokens", "record: records/"):
        assert word in result.stdout
    (path,) = Path("records").iterdir()
    kept = json.loads(path.read_text())
    (row,) = kept["measured"]["rows"]
    assert row["ok"] and 0 < row["low"] <= row["ms"] <= row["high"] and row["share"] < 1
    if kept["machine"]["device"] == "cpu":
        assert path.name == "cpu-decode-qwen3-tiny.json" and "say nothing about" in kept["measured"]["note"]
        assert "of_floor" not in row and "note: No GPU" in result.stdout
    assert row["tokens_per_s"] == pytest.approx(1e3 / row["ms"], rel=1e-3)


def test_bytes_are_the_weights_once_and_each_rows_cache(few):
    found = benched("--batch", "1,3", "--quant", "int8", "--skip-rivals")["measured"]["rows"]
    sizes = {(r["quant"], r["batch"]): r["bytes"] for r in found}
    cache = 2 * 2 * 2 * 64 * 18 * 4  # k and v, layers, heads, columns, tokens at the middle of the run, float32
    assert sizes["", 3] - sizes["", 1] == 2 * cache == sizes["int8", 3] - sizes["int8", 1]
    assert 3.5 < (sizes["", 1] - cache) / (sizes["int8", 1] - cache) < 4
    assert all(r["ok"] for r in found)
    plain = {r["batch"]: r["ms"] for r in found if not r["quant"]}
    assert all(r["speedup"] == pytest.approx(plain[r["batch"]] / r["ms"], rel=1e-2) for r in found if r["quant"])


class Absent(contender.Contender):
    def __init__(self, *_):
        raise ImportError("No module named 'transformers'")


def test_a_rival_that_is_missing_wrong_or_late_is_left_out_with_the_reason(few, monkeypatch):
    monkeypatch.setattr(rivals, "RIVALS", {"absent": Absent, "wrong": Wrong, "right": contender.GraphContender})
    rows = {r["system"]: r for r in benched("--rivals", "all")["measured"]["rows"]}
    assert rows["right"]["ms"] and rows["whet graph"]["together"] == 2
    assert rows["absent"]["why"] == "ImportError: No module named 'transformers'" and "exceeds" in rows["wrong"]["why"]
    screen = io.StringIO()
    tables.show(Console(file=screen, width=200), json.loads(next(Path("records").iterdir()).read_text())["measured"])
    assert "not timed: absent (batch 1 context 16): ImportError: No module named 'transformers'" in screen.getvalue()
    rows = {r["system"]: r for r in benched("--rivals", "right", "--rival-seconds", "0")["measured"]["rows"]}
    assert "used up" in rows["right"]["why"] and rows["whet graph"]["ms"]


def test_one_that_fails_while_it_is_timed_costs_itself_only(few, monkeypatch):
    class Breaks(contender.GraphContender):
        def run(self, tokens):
            raise RuntimeError("lost\nmore")

    monkeypatch.setattr(rivals, "RIVALS", {"breaks": Breaks})
    rows = {r["system"]: r for r in benched("--rivals", "all")["measured"]["rows"]}
    assert rows["breaks"]["why"] == "RuntimeError: lost" and not rows["breaks"]["ok"] and rows["whet graph"]["ms"]


def test_rivals_are_timed_at_the_points_asked_for(few, monkeypatch):
    monkeypatch.setattr(rivals, "RIVALS", {"right": contender.GraphContender})
    options = "--context 8,16,24 --batch 1,2,3 --rivals right --rival-context 16,24 --rival-batch 2,3"
    kept = benched(*options.split())
    found = [(r["batch"], r["context"]) for r in kept["measured"]["rows"] if r["system"] == "right"]
    assert found == [(2, 16), (2, 24), (3, 16)] and options in kept["command"]
    assert set(kept["measured"]["took_s"]) == {"whet", "prefill", "rivals"}
    result = invoke("bench", "decode", "--context", "8", "--rivals", "right", "--rival-context", "9")
    assert result.exit_code == 2 and "rival context 9" in error_lines(result)[0] and "[8]" in error_lines(result)[0]


def test_what_is_compiled_beforehand(monkeypatch):
    """Products for each kind of weights and batch, attention for each context; rivals that do not measure on the way."""
    monkeypatch.setattr(bench, "OURS", {"whet graph": contender.GraphContender, "whet kernel": contender.GraphContender})
    asked = bench.Asked(
        contexts=[128, 4096], batches=[1, 8], quants=["int8"], rivals=["transformers", "gpt-fast", "gpt-fast-tuned"],
    )
    ours = [(j.quant, j.batch, *j.contexts) for j in asked.jobs(3000) if j.system == "whet graph"]
    shortest = bench.FIRST
    assert ours == [
        ("", 1, 2048), ("", 1, 128), ("", 1, shortest), ("", 8, shortest), ("int8", 1, shortest), ("int8", 8, shortest),
    ]
    others = [(j.system, j.batch, *j.contexts) for j in asked.jobs(3000) if j.system != "whet graph"]
    assert others == [("gpt-fast", 1, 128), ("gpt-fast", 1, 4096), ("gpt-fast", 8, 128), ("whet kernel", 1, shortest)]


def test_processes_compile_side_by_side_and_a_failure_is_told():
    model = made(replace(FAMILIES["llama"], hidden=64))
    jobs = [prepare.Job("whet graph", quant, 2, (5,), 3) for quant in ("int8", "int3")]
    found = prepare.prepare(model, jobs, lambda *_: None)
    (failed,) = found["failed"]
    assert found["jobs"] == 2 and failed["quant"] == "int3" and "int3" in failed["why"]


def test_a_slow_system_is_timed_over_fewer_tokens(few, monkeypatch):
    monkeypatch.setattr(bench, "LONG_MS", 0.0)
    (row,) = benched("--tokens", "16", "--skip-rivals")["measured"]["rows"]
    assert row["tokens"] == 4 and row["tokens_per_s"] == pytest.approx(1e3 / row["ms"], rel=1e-3)


def test_a_stopped_bench_keeps_what_was_measured(few, monkeypatch):
    def stop(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(bench.Bench, "prefill", stop)
    kept = benched("--skip-rivals", exit_code=130)
    assert kept["measured"]["stopped"] and kept["measured"]["rows"][0]["ms"]
    assert json.loads(next(Path("records").iterdir()).read_text()) == kept
    monkeypatch.setattr(bench.Bench, "point", lambda *_, **__: stop(None))
    result = invoke("bench", "decode", "--model", "qwen3:tiny", "--skip-rivals", "--no-start", "--device", "cpu")
    assert result.exit_code == 130 and "stopped; nothing was measured" in error_lines(result)[0]


def test_a_fresh_process_says_how_long_it_took_to_its_first_token(tmp_path, monkeypatch):
    rivals.save_hf(made(), tmp_path / "model")
    told = evidence.child(tmp_path / "model", "cpu")
    assert told["since_start_s"] >= told["imported_s"] + told["loaded_s"] > 0
    monkeypatch.setattr(evidence, "child", lambda where, device: {"since_start_s": float(where.exists())})
    found = evidence.starts(made(), None)
    assert found["first"] == found["warm"] == {"since_start_s": 1.0}
    monkeypatch.undo()
    failed = Ended(2, stdout="", stderr="a warning\nwhet: no config.json\n")
    monkeypatch.setattr(evidence, "run_to_end", lambda *_: failed)
    with pytest.raises(ValueError, match="did not start: whet: no config.json"):
        evidence.child(tmp_path, "cpu")


def test_quality_compares_each_quant_and_transformers_and_says_what_was_random():
    found = evidence.measure_quality("qwen3:tiny", "cpu", ["int8", "int4"], lambda *_: None)
    assert {r["name"] for r in found["rows"]} == {"bfloat16", "transformers", "int8", "int4"} and found["verdict"]["ok"]
    kl = {r["name"]: r["kl"] for r in found["rows"]}
    assert kl["bfloat16"] < kl["int8"] < kl["int4"]
    assert found["weights"] in ("random", "real") and json.dumps(found)


def test_quality_scores_the_kernel_for_all_tokens_where_there_is_one(monkeypatch):
    """The graph's runner, which on a CPU makes plain calls, stands for the kernel."""
    model, tokens = made(), tokens_of(SMALL, 2, 9)
    assert evidence.kernel_of(model) == {}  # it is for GPUs
    steps = evidence.in_steps(contender.GraphContender(model, 1, 16))
    torch.testing.assert_close(steps(tokens), quality.plain(model)(tokens))

    def standing(model):
        return {evidence.ONE_KERNEL: evidence.in_steps(contender.GraphContender(model, 1, quality.WINDOW))}

    monkeypatch.setattr(evidence, "kernel_of", standing)
    found = evidence.measure_quality("qwen3:tiny", "cpu", ["int8"], lambda *_: None)
    assert {"bfloat16, one kernel", "int8, one kernel"} < {r["name"] for r in found["rows"]}
    assert found["kernel_verdict"]["ok"] and any("one kernel for all" in line for line in tables.verdict_lines(found))
