"""Predicted memory: a step on fake tensors against what the allocator says of the real one."""

import copy

import pytest
import torch
from memory_events import measured_peak
from odd_sizes import odd_gpt, tokens
from swapping import batch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import whet
from whet.choices import Choices
from whet.compiled import NotTraced
from whet.lock import Lock
from whet.models import find, recipe_of
from whet.models.gpt2 import GPT2, GPT2Config
from whet.ops.attention import stock
from whet.plan_memory import WITHIN, PredictedMemory, StorageBytes, lacking, predict
from whet.plans import Trial, best_plan
from whet.report.tables import plans_table
from whet.step_plans import checkpointed
from whet.subjects import BuiltIn, subject_of
from whet.workload import Workload

ADAMW = dict(AdamW=lambda p: torch.optim.AdamW(p, fused=True), foreach=lambda p: torch.optim.AdamW(p, foreach=True),
             loop=lambda p: torch.optim.AdamW(p), SGD=lambda p: torch.optim.SGD(p, momentum=0.9))


def built(target: str, variant: str, precision: str, optimizer: str, impl: str | None = None, lean: bool = False) -> Workload:
    """A training step of a built-in model, made anew."""
    model, size = find(target)
    config = model.sizes[size]
    module = model.build(config, getattr(model, variant), Choices(default=impl) if impl else Choices(), seed=0)
    made = Workload(
        module, (), model.batch(config, recipe_of(target), "cpu"), precision=precision,
        optimizer=ADAMW[optimizer](module.parameters()),
    )
    if lean:
        checkpointed(made)
    return made


def two_steps(make) -> Workload:
    work = make()
    work.step()
    work.step()
    return work


def within(predicted: PredictedMemory, measured: tuple[int, int]) -> None:
    peak, kept = measured
    assert abs(predicted.peak - peak) <= WITHIN * peak, f"predicted {predicted.peak:,}, measured {peak:,}"
    assert abs(predicted.kept - kept) <= WITHIN * kept, f"predicted {predicted.kept:,}, measured {kept:,}"


@pytest.mark.parametrize("case", [
    ("tiny-llama:tiny", "plain", "float32", "loop", "eager"),
    ("tiny-llama:tiny", "stock", "float32", "AdamW"),
    ("tiny-llama:tiny", "tuned", "bfloat16", "foreach"),
    ("gpt2:tiny", "stock", "float32", "AdamW"),
    ("gpt2:tiny", "tuned", "bfloat16", "SGD"),
], ids=lambda c: "-".join(str(x) for x in c))
def test_the_predicted_peak_is_within_15_percent_of_the_allocators(case):
    """The allocator's events know nothing of dispatch: they are what the process asked for and gave back."""
    predicted = predict(lambda: built(*case))
    within(predicted, measured_peak(lambda: two_steps(lambda: built(*case))))


def test_checkpointed_blocks_are_followed_as_they_run_again():
    case = "tiny-llama:tiny", "stock", "float32", "AdamW"
    made = built(*case, lean=True)
    plain, lean = predict(lambda: built(*case)), predict(lambda: made)
    within(lean, measured_peak(lambda: two_steps(lambda: built(*case, lean=True))))
    assert lean.peak < 0.85 * plain.peak and lean.kept == plain.kept


@pytest.mark.parametrize("target", ["transformer-np:tiny", "gpt2:tiny", "tiny-llama:tiny"])
def test_a_block_that_is_computed_again_keeps_the_sum_of_the_residual_and_gives_the_same_bits(target):
    """And not both of its parts: beside an input for each block only the embedding and what the loss reads."""
    plain, lean = (built(target, "tuned", "bfloat16", "AdamW", lean=lean) for lean in (False, True))
    for work in (plain, lean):
        work.optimizer = None
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        lean.forward()
    stream = plain.model.blocks[1].norm1
    width = getattr(stream, "weight", stream).shape[0]
    inputs = {t.data_ptr() for t in kept if t.dim() == 3 and t.shape[-1] == width}
    assert len(inputs) <= len(plain.model.blocks) + 2
    expected, found = plain.evidence(), lean.evidence()
    assert expected.keys() == found.keys() and all(torch.equal(t, found[name]) for name, t in expected.items())


def hugging_face() -> Workload:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=2000, hidden_size=128, intermediate_size=352, num_hidden_layers=2,
                                      num_attention_heads=4, num_key_value_heads=2)
    model = transformers.AutoModelForCausalLM.from_config(config).train()
    return Workload(model, (), batch(8, 128), optimizer=torch.optim.AdamW(model.parameters()), clip=1.0)


def padded() -> Workload:
    model, data = odd_gpt(), tokens()
    whet.pad_weights(model, data)
    return Workload(
        model, data, loss_with=lambda out: out[0].float().logsumexp(-1).mean(), optimizer=torch.optim.AdamW(model.parameters()),
    )


@pytest.mark.parametrize("make", [hugging_face, padded])
def test_a_live_model_is_predicted_and_stays_as_it_is(make):
    work = two_steps(make)
    state, moments = copy.deepcopy(work.model.state_dict()), copy.deepcopy(work.optimizer.state_dict()["state"])
    drawn = torch.get_rng_state()
    predicted = predict(lambda: work)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(torch.equal(t, state[n]) for n, t in work.model.state_dict().items())
    torch.testing.assert_close(work.optimizer.state_dict()["state"], moments)
    within(predicted, measured_peak(lambda: two_steps(make)))


def test_ties_are_counted_once_and_views_not_at_all():
    model = nn.ModuleList([nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)])
    model[1].weight = model[0].weight
    with StorageBytes("cpu") as counted:
        for p in (*model[0].parameters(), *model[1].parameters()):
            counted.count(p)
        x = torch.zeros(64, 64)
        views = [x.t(), x[:3], x.view(-1)]
        assert counted.now == 2 * 64 * 64 * 4
        del x, views
        assert counted.now == 64 * 64 * 4 and counted.peak == 2 * 64 * 64 * 4


def test_kernels_of_whet_are_followed_without_being_run():
    """Their fakes give the shapes: what linear_cross_entropy keeps is less than the logits that eager keeps."""
    eager = predict(lambda: built("tiny-llama:tiny", "tuned", "float32", "AdamW", "eager"))
    triton = predict(lambda: built("tiny-llama:tiny", "tuned", "float32", "AdamW", "triton"))
    assert triton.peak < eager.peak and triton.kept == eager.kept


@pytest.mark.parametrize("impl, precision, logits", [("triton", "float32", 4), ("triton_fp8", "bfloat16", 4)])
def test_what_an_op_allocates_inside_itself_counts_while_it_runs(impl, precision, logits, monkeypatch):
    """A chunk of logits; in FP8 also their gradient, twice. The interpreter copies tensors, so nothing is measured here."""
    config = GPT2Config(vocab=5003, width=64, layers=1, heads=2, kv_heads=2, fp8_head=impl == "triton_fp8")
    data = dict.fromkeys(("tokens", "labels"), torch.randint(5003, (2, 256)))
    calls = Workload(GPT2(config, ops=Choices()), kwargs=data, precision=precision).calls()
    table = {call.key: impl for call, _ in calls if call.op == "linear_cross_entropy"}

    def made() -> Workload:
        return Workload(GPT2(config, ops=Choices(table)), kwargs=data, precision=precision)

    told = predict(made)
    monkeypatch.setattr("whet.plan_memory.INSIDE", {})
    untold, inside = predict(made), 2 * 256 * 5056 * logits
    assert told.kept == untold.kept and 0.5 * inside < told.peak - untold.peak < 1.2 * inside


def test_what_looks_at_values_raises():
    class Looks(nn.Linear):
        def forward(self, x):
            return super().forward(x).sum() * (1 if x.max() > 0 else 2)

    with pytest.raises(Exception, match="item|_local_scalar_dense|data"):
        predict(lambda: Workload(Looks(8, 8), (torch.ones(4, 8),)))


def test_a_call_that_torch_compile_serves_is_not_predicted_and_runs_afterwards():
    """Traced under fake tensors it would be skipped for good, and the plan itself would fail."""
    config = GPT2Config(vocab=101, width=64, layers=1, heads=2, kv_heads=2)
    tokens = torch.randint(101, (2, 32))
    batch = dict(tokens=tokens, labels=tokens)
    calls = Workload(GPT2(config, ops=Choices()), kwargs=batch).calls()
    made = Choices({call.key: "compile" for call, _ in calls if call.op == "rms_norm"})
    with pytest.raises(RuntimeError, match="rms_norm runs under torch.compile in some plan, which decides itself"):
        predict(lambda: Workload(GPT2(config, ops=made), kwargs=batch))
    assert torch.isfinite(Workload(GPT2(config, ops=made), kwargs=batch).outcome())


def test_no_mask_of_fake_tensors_is_kept_for_the_real_ones():
    stock.block_mask.cache_clear()
    with FakeTensorMode():
        q = torch.ones(1, 2, 256, 64)
        with pytest.raises(NotTraced, match="attention runs under torch.compile"):
            stock.run_flex(q, q, q, "top-left")
    assert stock.block_mask.cache_info().currsize == 0
    stock.run_flex(*(torch.ones(1, 2, 256, 64) for _ in range(3)), "top-left")  # PyTorch 2.11 takes no tensor twice


def test_a_forward_alone_keeps_no_activations():
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
    x = torch.ones(512, 256)
    forward, train = (predict(lambda kind=kind: Workload(model, (x,), kind=kind, loss_with=lambda y: y.sum()))
                      for kind in ("forward", "train"))
    assert forward.peak < train.peak and forward.kept < train.kept


def test_a_captured_step_keeps_its_pool_between_replays():
    step = PredictedMemory(100, 40)
    assert step.captured("cpu") == PredictedMemory(100, 100)


def test_a_plan_that_surely_does_not_fit_is_not_built_and_says_what_it_takes(monkeypatch):
    model, size = find("tiny-llama:tiny")
    subject = BuiltIn(model, model.sizes[size], recipe_of("tiny-llama:tiny@2x64"), "tiny-llama:tiny@2x64")
    trial, plan = Trial(subject, "float32", 0.01), subject.plans()[0]
    predicted = trial.memory.of(plan, Choices(), "float32")
    assert predicted is not None and trial.before_result.predicted_mb
    monkeypatch.setattr(whet.plans, "PlanRunner", lambda *_: pytest.fail("it was built"))
    for module in (whet.plans, whet.plan_limits):  # before one plan, and before all
        monkeypatch.setattr(module, "free_bytes", lambda device: int(0.8 * predicted.peak))
    result, runner, _ = trial.prepare(plan)
    assert runner is None and result.why.startswith("out of memory: a step takes") and result.why.endswith("GiB are free")
    assert result.to_record()["predicted_mb"] == round(predicted.peak / 1e6, 1)
    with pytest.raises(ValueError, match="optimize: tiny-llama:tiny@2x64: a step takes .* by prediction, and .* smaller"):
        best_plan("tiny-llama:tiny@2x64", Lock(), seconds=0.01)


def test_a_prediction_that_is_too_high_by_less_than_it_may_be_refuses_nothing():
    assert not lacking(PredictedMemory(100, 40), 86) and lacking(PredictedMemory(100, 40), 84) and not lacking(None, 0)


def test_predictions_stand_in_the_table_of_plans_beside_what_was_measured():
    rows = [{"name": "eager", "ok": True, "why": "", "ms": 1.0, "peak_mb": 100.0, "predicted_mb": 97.0}]
    table = plans_table({"plans": rows, "chosen": "eager", "target": "x"})
    titles = [column.title for column in table.columns]
    assert table.rows[0][titles.index("predicted MB")] == 97.0 and table.rows[0][titles.index("peak MB")] == 100.0


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("target", ["tiny-llama:small", "tiny-llama:medium", "gpt2:d12@4x512", "gpt2:d12-fast@4x512"])
def test_the_predicted_peak_of_every_plan_that_is_not_compiled_is_within_15_percent_on_a_gpu(target, precision):
    model, size = find(target)
    trial = Trial(BuiltIn(model, model.sizes[size], recipe_of(target), target), precision, 0.01)
    trial.choices = {mode: Choices() for mode in ("eager", "graph")}
    for plan in (p for p in trial.subject.plans() if not p.compiled):
        trial.run(plan)
    results = [trial.before_result, *trial.results.values()]
    assert len(results) == 5 and all(r.peak_mb and r.predicted_mb for r in results), [r.why for r in results]
    far = {r.name: (r.predicted_mb, r.peak_mb) for r in results if abs(r.predicted_mb / r.peak_mb - 1) > WITHIN}
    assert not far, f"predicted and measured MB: {far}"


@pytest.mark.parametrize("target", ["tiny-llama:tiny", "gpt2:tiny", "transformer-np:tiny"])
def test_a_model_that_was_not_built_yet_is_predicted_as_one_that_was(target):
    """The first thing that `whet optimize` asks: nn.Module.to cannot swap fake parameters that an op has written to."""
    fresh, built = subject_of(target), subject_of(target)
    plan = fresh.plans()[0]
    built.first(plan.variant)
    found = [predict(lambda s=s: s.workload(plan, Choices(), "float32")) for s in (fresh, built)]
    assert found[0] == found[1] and found[0].peak > found[0].kept > 0
