"""Training on tasks of Gaussian processes: what is drawn, the exact GP beside the model, resumes, the run's folder and page."""

import json
import math

import pytest
import torch
from typer.testing import CliRunner

from whet.commands import app
from whet.train import gp, loop
from whet.train.export import load_run
from whet.train.gp import GPLaw
from whet.train.log import read_log
from whet.train.loop import train
from whet.train.recipe import TrainRecipe, checked, made, parse_setting, read
from whet.train.runs import read_run, write_page
from whet.train.tasks import GPTasks, shown_task

SMALL = {
    "model.name": "transformer-np", "model.size": "tiny", "model.width": 32, "model.heads": 2, "model.ffn": 21,
    "train.steps": 12, "train.batch_size": 4, "train.seq_len": 24, "train.lr": 3e-3, "train.precision": "float32",
    "data.tasks": "gp", "data.context": 8, "run.log_every": 4, "run.val_every": 6, "run.save_every": 3, "run.keep": 10,
    "run.val_batches": 2,
}
LAWS = [GPLaw(kernel, 0.4, 1.2, 0.1, 0.9) for kernel in gp.KERNELS]
laws = pytest.mark.parametrize("law", LAWS, ids=gp.KERNELS)

pytestmark = pytest.mark.usefixtures("one_thread")


def small(**changes) -> TrainRecipe:
    return checked(made(SMALL | {k.replace("__", "."): v for k, v in changes.items()}, "small"))


def quiet(recipe: TrainRecipe, folder, **options):
    return train(recipe, folder, say=lambda text: None, **options)


def losses(folder) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in read_log(folder / "log.jsonl") if line["kind"] == "step"]


def points(n: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return gp.LOW + (gp.HIGH - gp.LOW) * torch.rand(1, n, generator=generator, dtype=torch.float64)


@laws
def test_a_kernel_is_1_at_0_symmetric_and_positive(law):
    x = points(40)
    k = gp.covariance([law], x, x)[0]
    torch.testing.assert_close(k.diagonal(), torch.full((40,), law.scale**2, dtype=torch.float64))
    assert torch.equal(k, k.mT) and torch.linalg.eigvalsh(k).min() > -1e-12 * k.numel()
    if law.kernel == "periodic":
        torch.testing.assert_close(gp.covariance([law], x, x + law.period)[0], k)


@laws
@pytest.mark.parametrize("length", gp.LENGTHS)
def test_the_waves_of_many_points_have_the_covariance_of_the_kernel(law, length):
    law, x = GPLaw(law.kernel, length, law.scale, law.noise, law.period), points(60)
    (drawn,) = gp.waves(law, x[0])
    assert (drawn @ drawn.mT - gp.covariance([law], x, x)[0]).abs().max() < 1e-8


@laws
def test_functions_drawn_have_the_covariance_of_their_kernel(law, monkeypatch):
    """Of both ways, over many draws: within what chance leaves."""
    x, draws = points(5), 4000
    wanted = gp.covariance([law], x, x)[0]
    for most in (gp.DENSE, 0):
        monkeypatch.setattr(gp, "DENSE", most)
        normals = torch.randn(draws, gp.normals_for(5), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        if most:
            f = gp.draw_functions([law] * draws, x.expand(draws, 5), normals)
        else:
            f = normals @ next(iter(gp.waves(law, x[0]))).mT
            torch.testing.assert_close(gp.draw_functions([law], x, normals[:1]), f[:1])
        assert (f.mT @ f / draws - wanted).abs().max() < 6 * law.scale**2 * (2 / draws) ** 0.5


@laws
def test_the_exact_gp_is_the_conditional_of_the_joint_normal(law, monkeypatch):
    x, m = points(9, 3), 6
    k = gp.covariance([law], x, x)[0] + (law.noise**2 + gp.JITTER * law.scale**2) * torch.eye(9, dtype=torch.float64)
    normals = torch.randn(9, 1, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    y = (torch.linalg.cholesky(k) @ normals).mT

    def log_prob(at: list[int]) -> torch.Tensor:
        inner = k[at][:, at]
        return torch.distributions.MultivariateNormal(torch.zeros(len(at), dtype=torch.float64), inner).log_prob(y[0, at])

    seen = list(range(m))
    wanted = torch.stack([log_prob([*seen, i]) - log_prob(seen) for i in range(m, 9)])
    for most in (gp.DENSE, 0):
        monkeypatch.setattr(gp, "DENSE", most)
        found = gp.log_density(y[:, m:], *gp.predict([law], x[:, :m], y[:, :m], x[:, m:]))[0]
        assert (found - wanted).abs().max() < 1e-5  # the jitter, and the waves' 1e-9, over a variance of 0.01


def test_on_average_nobody_is_more_likely_than_the_exact_gp():
    drawn = GPTasks(16).loader(256, 32, split="val").draw()
    y, (mean, sd) = drawn.y[:, 16:], drawn.exact()
    exact = gp.log_density(y, mean, sd).mean()
    others = {
        "wider": (mean, 1.3 * sd), "narrower": (mean, 0.8 * sd), "off": (mean + 0.3 * sd, sd),
        "prior": (torch.zeros_like(y), gp.column(drawn.laws, "scale", y)[:, 0].hypot(gp.column(drawn.laws, "noise", y)[:, 0])),
        "wrong kernel": gp.predict([GPLaw("rbf", 0.5, 1.0, 0.1)] * 256, drawn.x[:, :16], drawn.y[:, :16], drawn.x[:, 16:]),
    }
    for name, (m, s) in others.items():
        assert gp.log_density(y, m, s).mean() < exact, name
    z = (y - mean) / sd
    assert abs(z.mean()) < 0.1 and abs(z.std() - 1) < 0.1


def test_a_matrix_without_a_factor_is_nan_and_not_another_function():
    assert gp.factor(torch.tensor([[[1.0, 2], [2, 1]], [[4.0, 0], [0, 4]]])).isnan().all((1, 2)).tolist() == [True, False]


def test_tasks_are_those_of_their_seed_and_number_whatever_the_ranks():
    source = GPTasks(8)
    whole = source.loader(4, 24, seed=3)
    first, second = whole.next(), whole.next()
    halves = [source.loader(4, 24, rank, 2, seed=3).next() for rank in (0, 1)]
    for rank, half in enumerate(halves):
        for name in first:
            torch.testing.assert_close(half[name], first[name][rank::2])
    again = source.loader(2, 24, seed=3)
    again.load_state({"epoch": 0, "index": 4})
    torch.testing.assert_close(again.next()["features"], second["features"][:2])
    assert whole.state() == {"epoch": 0, "index": 8}
    assert not torch.equal(source.loader(4, 24, seed=4).next()["features"], first["features"])
    held = [source.loader(4, 24, seed=seed, split="val").next()["features"] for seed in (3, 4)]
    assert torch.equal(*held) and not torch.equal(held[0], first["features"])


def test_the_model_is_not_shown_what_it_is_to_predict():
    drawn = GPTasks(8).loader(2, 24).draw()
    batch = drawn.batch()
    features, targets = batch["features"], batch["targets"]
    assert features.shape == (2, 24, 3) and targets.shape == (2, 16) and features.dtype == targets.dtype == torch.float32
    assert features[:, :8, 2].eq(1).all() and not features[:, 8:, 1:].any()
    torch.testing.assert_close(features[:, :8, 1], drawn.y[:, :8].float())
    torch.testing.assert_close(targets, drawn.y[:, 8:].float())
    noise = (drawn.y - drawn.f).std(1) / torch.tensor([law.noise for law in drawn.laws])
    assert ((noise > 0.5) & (noise < 1.6)).all()


def test_many_points_are_drawn_without_their_covariance_matrix():
    drawn = GPTasks(5000).loader(1, 6000).draw()
    mean, sd = drawn.exact()
    z = (drawn.y[:, 5000:] - mean) / sd
    assert drawn.f.isfinite().all() and 0.9 < z.std() < 1.1


def test_the_loss_falls_and_the_exact_gp_is_beside_it(tmp_path):
    said: list[str] = []
    recipe = small(train__steps=60, train__batch_size=16, train__lr=1e-2, run__val_every=30, run__val_batches=4)
    outcome = train(recipe, tmp_path / "run", say=said.append)
    lines = read_log(tmp_path / "run" / "log.jsonl")
    vals = [line for line in lines if line["kind"] == "val"]
    found = [loss for _, loss in losses(tmp_path / "run")]
    assert sum(found[-10:]) / 10 < sum(found[:10]) / 10 - 0.1
    assert [line["step"] for line in vals] == [30, 60] and vals[0]["exact_gp"] == vals[1]["exact_gp"]
    assert vals[-1]["log_likelihood"] == -vals[-1]["loss"] == -outcome.val_loss < vals[-1]["exact_gp"]
    exact = GPTasks(8).exact_log_likelihood(16, 24, 4)
    assert vals[-1]["exact_gp"] == pytest.approx(exact) and vals[-1]["sequences"] == 64
    line = next(text for text in said if "held-out tasks" in text)
    assert f"log-likelihood {vals[0]['log_likelihood']:.4f} a target over 64 held-out tasks, of the exact" in line
    assert line.endswith(f"GP {exact:.4f}")
    assert any("points/s" in text for text in said)


@pytest.mark.parametrize("changes", [
    {}, dict(train__optimizer="muon"), dict(train__accumulate=2), dict(train__precision="bfloat16-weights"),
], ids=["adamw", "muon", "accumulate", "masters"])
def test_a_resumed_run_has_the_losses_of_one_that_was_not_stopped_bit_for_bit(tmp_path, monkeypatch, changes):
    recipe, real = small(**changes), loop.saved
    quiet(recipe, tmp_path / "whole")

    class Enough(Exception):
        pass

    def saved(run):
        real(run)
        if run.step == 9:
            raise Enough

    monkeypatch.setattr(loop, "saved", saved)
    with pytest.raises(Enough):
        quiet(recipe, tmp_path / "part")
    monkeypatch.setattr(loop, "saved", real)
    quiet(recipe, tmp_path / "part", resume=True)
    assert losses(tmp_path / "part") == losses(tmp_path / "whole") and len(losses(tmp_path / "whole")) == 12
    vals = [[v.loss for v in read_run(tmp_path / name).vals] for name in ("part", "whole")]
    assert vals[0] == vals[1] and len(vals[0]) == 2


def test_a_run_is_not_resumed_on_other_tasks(tmp_path):
    quiet(small(train__steps=3), tmp_path / "run")
    with pytest.raises(ValueError, match="was trained on other data"):
        quiet(small(train__steps=6, data__context=9), tmp_path / "run", resume=True)


@pytest.mark.parametrize("changes, said", [
    (dict(data__path="shards"), "data.tasks = 'gp' draws its own data and takes no data.path, got 'shards'"),
    (dict(data__tasks="ode"), "data.tasks must be one of '', 'gp', got 'ode'"),
    (dict(data__context=24), "data.context must be from 1 to below train.seq_len, the 24 points of a task, got 24"),
    (dict(data__context=0), "data.context must be from 1 to below"),
    (dict(data__tasks=""), "data.context is of tasks, got 8 without them"),
    (dict(model__path="folder"), "data.tasks is for models of whet's own, got model.path 'folder'"),
])
def test_a_recipe_that_mixes_tasks_and_tokens_is_refused(changes, said):
    with pytest.raises(ValueError, match=said):
        small(**changes)


def test_a_model_gets_what_it_takes(tmp_path):
    with pytest.raises(ValueError, match="gpt2 takes tokens, got data.tasks 'gp'; leave data.tasks empty"):
        plain = {k: v for k, v in SMALL.items() if k not in ("model.width", "model.heads", "model.ffn")}
        quiet(made(plain | {"model.name": "gpt2"}, "x"), tmp_path / "a")
    with pytest.raises(ValueError, match='transformer-np takes tasks, got data.tasks \'\'; set data.tasks = "gp"'):
        quiet(small(data__tasks="", data__context=0), tmp_path / "b")
    assert not (tmp_path / "a").exists() and not (tmp_path / "b").exists()


def test_the_recipe_is_read_for_a_gpu_and_for_a_cpu():
    gpu, cpu = read("transformer-np"), read("transformer-np", {}, "cpu")
    assert gpu.train.seq_len == 564 and gpu.data.context == 64 and gpu.model.size == "small"
    assert cpu.model.size == "tiny" and 0 < cpu.data.context < cpu.train.seq_len
    assert read("transformer-np", dict([parse_setting("data.context=32")])).data.context == 32


def test_the_page_shows_a_task_and_two_runs_with_negative_losses_are_compared(tmp_path):
    for name in ("a", "b"):
        quiet(small(train__seed=1 if name == "a" else 2, train__lr=3e-3 if name == "a" else 1e-2), tmp_path / name)
        log = tmp_path / name / "log.jsonl"
        lines = [line | ({"loss": line["loss"] - 3} if "loss" in line else {}) for line in read_log(log)]
        log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = write_page(tmp_path / "a").read_text()
    for text in ("A task", "the exact GP", "mean ± 2 standard deviations", "context", "curve arm0 area", "log-likelihood"):
        assert text in page, text
    task = json.loads((tmp_path / "a" / "task.json").read_text())
    assert task["step"] == 12 and len(task["context_x"]) == 8 and len(task["x"]) == len(task["sd"]) == 80
    found = CliRunner().invoke(app, ["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--json"])
    assert found.exit_code == 0, found.output
    compared = json.loads(found.stdout)
    target = compared["target"]["loss"]
    times = [m for m in compared["measures"] if m["key"] == "time to target"][0]["arms"]
    assert target < 0 and not compared["withheld"]["loss"] and all(a["mean"] is not None for a in times)
    shown = CliRunner().invoke(app, ["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--html", str(tmp_path / "c.html")])
    assert shown.exit_code == 0 and (tmp_path / "c.html").exists()


def test_the_shown_task_is_that_of_the_exact_gp_where_the_model_is():
    """Its prediction is asked at evenly spaced points, in the model's own order of features."""
    asked: list[torch.Tensor] = []

    def predict(features):
        asked.append(features)
        return torch.zeros(1, 80), torch.ones(1, 80)

    task = shown_task(GPTasks(8), predict)
    assert asked[0].shape == (1, 88, 3) and task["x"][0] == gp.LOW and task["x"][-1] == gp.HIGH
    apart = max(abs(t - e) for t, e in zip(task["truth"], task["exact_mean"]))
    assert 0 < apart < 3 and all(math.isfinite(v) for v in task["truth"])
    assert set(task["law"]) >= {"kernel", "length", "scale", "noise"}


def test_a_run_on_tasks_is_neither_sampled_nor_exported(tmp_path):
    quiet(small(train__steps=3), tmp_path / "run")
    with pytest.raises(ValueError, match="was trained on tasks: transformer-np predicts numbers, which are no text"):
        load_run(tmp_path / "run")
    for words in (["sample", str(tmp_path / "run")], ["export", str(tmp_path / "run"), str(tmp_path / "out")]):
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 2 and len(done.output.strip().splitlines()) <= 3 and "trained on tasks" in done.output
    assert not (tmp_path / "out").exists()


def test_products_are_counted_over_the_context_and_the_heads_of_targets_alone():
    from whet.train.build import built

    made_of = built(small(), "cpu")
    heads = sum(p.numel() for p in made_of.model.parameters() if p.dim() == 3)
    rest = sum(p.numel() for p in made_of.model.parameters() if p.dim() == 2)
    layers, width = made_of.facts["layers"], made_of.facts["width"]
    assert made_of.flops_per_token(24) == pytest.approx(6 * (rest + heads * 16 / 24) + 12 * layers * width * 8)
