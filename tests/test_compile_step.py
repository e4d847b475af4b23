"""whet.compile_step: the same steps as the plain loop's, by whichever plan, and nothing changed by choosing one."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import whet
from whet import step as step_module
from whet import step_plans
from whet.judge import judge
from whet.plan import Plan
from whet.step_plans import AS_IT_IS, ChosenStep, LoopWork, LossOf, Rates, choose, outside_because

COMPILED, GRAPH = Plan("torch.compile", "", "own", compiled=True), Plan("CUDA graph", "", "own", graph=True)
CLIP = 0.5


class Small(nn.Module):
    """Returns its loss where it is given labels."""

    def __init__(self, drop: float = 0.0):
        super().__init__()
        self.up, self.norm = nn.Linear(12, 24, bias=False), nn.BatchNorm1d(24)
        self.drop, self.down = nn.Dropout(drop), nn.Linear(24, 5)

    def forward(self, x, labels=None):
        out = self.down(self.drop(F.gelu(self.norm(self.up(x)))))
        return out if labels is None else F.cross_entropy(out, labels)


def batches(count: int, rows: int = 6) -> list[dict]:
    made = torch.Generator().manual_seed(1)
    drawn = [(torch.randn(rows, 12, generator=made), torch.randint(5, (rows,), generator=made)) for _ in range(count)]
    return [dict(x=x, labels=labels) for x, labels in drawn]


def on(device: str, data: list[dict], dtype: torch.dtype = torch.float32) -> list[dict]:
    return [dict(x=b["x"].to(device, dtype), labels=b["labels"].to(device)) for b in data]


def adam(model: nn.Module, **options) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, **options)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, dampening=0.1)


def evidence(model: nn.Module, losses: list) -> dict:
    weights = {f"output {n}": p.detach() for n, p in model.named_parameters()}
    return {f"output loss {i}": t for i, t in enumerate(losses)} | weights


def plain(model, optimizer, data, decay: float = 1.0) -> dict:
    """The loop that compile_step stands for."""
    scheduler, losses = torch.optim.lr_scheduler.ExponentialLR(optimizer, decay), []
    for batch in data:
        optimizer.zero_grad()
        loss = model(**batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        scheduler.step()
        losses.append(loss.detach())
    return evidence(model, losses)


def stepped(model, optimizer, data, decay: float = 1.0, **options) -> tuple[dict, step_module.CompiledStep]:
    step, losses = whet.compile_step(model, optimizer, clip=CLIP, seconds=0.001, **options), []
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, decay)
    for batch in data:
        losses.append(step(batch))
        scheduler.step()
    return evidence(model, losses), step


def assert_same_steps(make, data, decay: float = 1.0, device: str = "cpu", **options) -> step_module.CompiledStep:
    """Losses and weights of compile_step lie as near the loop in float64 as the plain loop's do."""
    torch.manual_seed(0)
    model = Small().to(device)
    twin, wide = copy.deepcopy(model), copy.deepcopy(model).double()
    truth = plain(wide, make(wide), on(device, data, torch.float64), decay)
    eager = plain(twin, make(twin), on(device, data), decay)
    actual, step = stepped(model, make(model), on(device, data), decay, **options)
    verdict = judge(actual, eager, truth)
    assert verdict.ok, verdict.why
    return step


def choosing(monkeypatch, plan: Plan) -> list:
    """Every choice falls on this plan; returns the works that were chosen for."""
    asked: list = []

    def chosen(work, seconds, *rest):
        asked.append(work)
        return ChosenStep(plan, "planted", {"speedup": 2.0})

    monkeypatch.setattr(step_module, "choose", chosen)
    return asked


class Replayed:
    """A graph's ways on a CPU: it runs what it was captured with, and reads the tensors that it then found."""

    def __init__(self, run, warm_up: int = 3, beside=None):
        self.run, self.work = run, run.__self__
        for _ in range(warm_up):
            run()
        groups = self.work.optimizer.param_groups
        self.lr, self.grads = [g["lr"] for g in groups], [p.grad for p in self.work.model.parameters()]

    def __call__(self):
        groups = self.work.optimizer.param_groups
        before = [g["lr"] for g in groups]
        for group, lr in zip(groups, self.lr):
            group["lr"] = lr
        out = self.run()
        for group, lr in zip(groups, before):
            group["lr"] = lr
        for p, grad in zip(self.work.model.parameters(), self.grads):
            grad.copy_(p.grad)
            p.grad = grad
        return out


@pytest.fixture
def replays(monkeypatch):
    """CUDA graphs are played on the CPU, and every optimizer is taken as one that can be captured."""
    monkeypatch.setattr(step_plans, "Graph", Replayed)
    for module in (step_plans, step_module):
        monkeypatch.setattr(module, "outside_because", lambda optimizer: "")


def test_three_steps_as_it_is_are_the_plain_loops_to_the_bit(monkeypatch):
    choosing(monkeypatch, AS_IT_IS)
    torch.manual_seed(0)
    model = Small()
    twin = copy.deepcopy(model)
    want = plain(twin, adam(twin), batches(3))
    got, step = stepped(model, adam(model), batches(3))
    assert all(torch.equal(got[name], want[name]) for name in want)
    assert str(step.report) == "x (6, 12), labels (6,): as it is: planted"


def test_three_compiled_steps_give_the_loss_and_weights_of_the_plain_loop(monkeypatch):
    choosing(monkeypatch, COMPILED)
    assert "torch.compile" in str(assert_same_steps(sgd, batches(3)).report)


def test_a_chosen_plan_is_verified_and_choosing_changes_nothing(capsys, one_thread):
    model = Small(drop=0.3)
    model.norm.eval()
    optimizer = adam(model)
    data = batches(2)
    model(**data[1]).backward()
    optimizer.step()
    kept = copy.deepcopy((model.state_dict(), optimizer.state_dict(), [p.grad for p in model.parameters()]))
    modes, random = [m.training for m in model.modules()], torch.get_rng_state()
    found = choose(LoopWork(model, (), data[0], optimizer=optimizer, clip=CLIP), seconds=0.001)
    assert found.plan.name in ("as it is", "torch.compile") and "dropout is off" in found.why, found.why
    assert "is out" not in found.why, found.why
    same = torch.utils._pytree.tree_map(
        lambda a, b: torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, kept,
        (model.state_dict(), optimizer.state_dict(), [p.grad for p in model.parameters()]),
    )
    assert all(torch.utils._pytree.tree_flatten(same)[0])
    assert [m.training for m in model.modules()] == modes and torch.equal(torch.get_rng_state(), random)


def test_the_graph_of_a_step_is_verified_and_raced_like_any_plan_and_a_wrong_one_is_out(monkeypatch, replays, one_thread):
    monkeypatch.setattr(step_plans.Loop, "plans", lambda self: [GRAPH])
    model = Small()
    work = LoopWork(model, (), batches(1)[0], optimizer=adam(model), clip=CLIP)
    right = choose(work, seconds=0.001)
    assert "is out" not in right.why and "could be tried" not in right.why, right.why

    class Wrong(Replayed):
        def __call__(self):
            return super().__call__() * 1.001

    monkeypatch.setattr(step_plans, "Graph", Wrong)
    found = choose(work, seconds=0.001)
    assert found.plan is AS_IT_IS and "CUDA graph is out: output loss: worst error" in found.why, found.why


def test_what_cannot_be_tried_runs_as_it_is_and_says_why(capsys):
    model = Small()
    model.down.register_forward_hook(lambda m, args, out: out + 0 * torch.rand_like(out))
    step = whet.compile_step(model, adam(model))
    step(batches(1)[0])
    assert "as it is: no other plan could be tried" in str(step.report) and "random numbers" in str(step.report)
    assert capsys.readouterr().out.startswith("whet compile_step: x (6, 12), labels (6,): as it is")


@pytest.mark.parametrize("make", [adam, sgd])
def test_a_graph_follows_the_schedule_and_its_capture_leaves_no_trace(make, monkeypatch, replays):
    choosing(monkeypatch, GRAPH)
    step = assert_same_steps(make, batches(5), decay=0.5)
    (served,) = step.served.values()
    assert served.graph is not None and served.plan is GRAPH
    assert all(type(group["lr"]) is float for group in step.optimizer.param_groups), "schedulers go on setting numbers"


def test_a_graph_serves_each_shape_and_a_shape_that_comes_back(monkeypatch, replays):
    asked = choosing(monkeypatch, GRAPH)
    step = assert_same_steps(adam, [*batches(2), *batches(2, rows=4), *batches(1)])
    assert len(asked) == 2 and all(s.graph is not None for s in step.served.values())


def test_an_optimizer_that_cannot_be_captured_runs_outside_the_graph_and_the_report_says_so(monkeypatch):
    choosing(monkeypatch, GRAPH)
    monkeypatch.setattr(step_plans, "Graph", Replayed)
    step = assert_same_steps(sgd, batches(4), decay=0.5)
    assert "the optimizer runs outside the graph: SGD has no capturable form" in str(step.report)
    model = Small()
    assert outside_because(adam(model)) == "AdamW was made without capturable=True"
    ready = adam(model, capturable=True)
    assert not outside_because(ready)
    ready.register_step_post_hook(lambda *_: None)
    assert "hooks around its step" in outside_because(ready)


@pytest.mark.parametrize("change", ["freeze", "eval", "betas", "move"])
def test_a_graph_is_not_replayed_after_what_it_has_fixed_was_changed(change, monkeypatch, replays):
    choosing(monkeypatch, GRAPH)
    model = Small()
    optimizer = adam(model)
    step = whet.compile_step(model, optimizer, clip=CLIP)
    for batch in batches(3):
        step(batch)
    if change == "freeze":
        model.up.weight.requires_grad_(False)
    elif change == "eval":
        model.norm.eval()
    elif change == "betas":
        optimizer.param_groups[0]["betas"] = (0.5, 0.9)
    else:
        model.up.weight.data = model.up.weight.data.clone()
    before = model.up.weight.detach().clone()
    step(batches(1)[0])
    (served,) = step.served.values()
    assert served.graph is None and "changed after the capture" in str(step.report)
    assert torch.equal(model.up.weight, before) == (change == "freeze")
    step.reset()
    assert str(step.report) == "no batch yet"


def test_a_capture_that_fails_costs_the_graph_and_changes_no_weight(monkeypatch, replays):
    class Failing(Replayed):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            raise RuntimeError("operation not permitted when stream is capturing")

    choosing(monkeypatch, GRAPH)
    monkeypatch.setattr(step_plans, "Graph", Failing)
    step = assert_same_steps(adam, batches(3))
    assert "could not be captured: RuntimeError: operation not permitted" in str(step.report)


@pytest.mark.parametrize("plan", [AS_IT_IS, GRAPH])
def test_gradients_accumulate_until_an_update(plan, monkeypatch, replays):
    choosing(monkeypatch, plan)
    model = Small()
    twin = copy.deepcopy(model)
    optimizer, theirs = adam(model), adam(twin)
    step = whet.compile_step(model, optimizer, clip=CLIP)
    mixed = [*batches(2, rows=4), *batches(1), *batches(1, rows=4)]
    for parts in (batches(1), batches(3), batches(1), batches(2), mixed, batches(1), [*batches(1), *batches(1, rows=4)]):
        theirs.zero_grad()
        for i, batch in enumerate(parts):
            last, weight = i == len(parts) - 1, model.up.weight.detach().clone()
            loss = twin(**batch)
            loss.backward()
            assert torch.equal(step(batch, update=last), loss) and torch.equal(model.up.weight, weight) != last
        nn.utils.clip_grad_norm_(twin.parameters(), CLIP)
        theirs.step()
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters())) or plan is GRAPH
        for a, b in zip(model.parameters(), twin.parameters()):
            torch.testing.assert_close(a, b)
    assert all((s.adding is None) == (plan is AS_IT_IS) for s in step.served.values()), str(step.report)


def test_four_shapes_get_a_plan_and_the_others_run_as_they_are(monkeypatch):
    asked = choosing(monkeypatch, AS_IT_IS)
    model = Small()
    step = whet.compile_step(model, adam(model))
    for rows in (2, 3, 4, 5, 6, 7, 2):
        step(batches(1, rows=rows)[0])
    lines = str(step.report).splitlines()
    assert len(asked) == 4 and len(lines) == 5
    assert lines[-1] == "2 steps of other shapes: as it is: plans are chosen for the first 4 shapes"


def test_a_loss_is_the_models_a_function_of_its_output_or_of_model_and_batch(monkeypatch):
    choosing(monkeypatch, AS_IT_IS)
    batch = batches(1)[0]
    model = Small()
    want = model(**batch).detach()
    fixed = lambda out: F.cross_entropy(out, batch["labels"])  # noqa: E731
    forms = [(None, batch), (fixed, batch["x"]), (lambda m, b: F.cross_entropy(m(b[0]), b[1]), (batch["x"], batch["labels"])),
             (lambda m, b: m(**b), batch)]
    for loss, given in forms:
        twin = copy.deepcopy(model)
        assert torch.equal(whet.compile_step(twin, adam(twin), loss)(given), want)
        assert not torch.equal(twin.up.weight, model.up.weight)
    for criterion in (nn.CrossEntropyLoss(), F.cross_entropy):
        with pytest.raises(ValueError, match="loss must take the output, or the model and the batch.*input, target"):
            LossOf(model, criterion)


def test_a_model_without_a_loss_and_wrong_arguments_are_refused_in_one_line(monkeypatch):
    choosing(monkeypatch, AS_IT_IS)
    model = Small()
    with pytest.raises(ValueError, match="compile_step: the model returned no loss.*give loss="):
        whet.compile_step(model, adam(model))(batches(1)[0]["x"])
    for given, why in (
        (("model", adam(model)), "model must be a torch.nn.Module, got str"),
        ((model, None), "optimizer must be a torch.optim.Optimizer, got NoneType"),
        ((model, adam(model), None, -1.0), "clip must be a norm above 0"),
        ((model, adam(model), None, "1.0"), "clip must be a norm above 0 or None, got '1.0'"),
        ((model, adam(model), None, None, "int8"), "precision must be one of"),
    ):
        with pytest.raises(ValueError, match=f"compile_step: {why}"):
            whet.compile_step(*given)


def test_a_batch_with_what_cannot_be_looked_into_runs_as_it_is(monkeypatch):
    asked = choosing(monkeypatch, GRAPH)

    class Pair:
        def __init__(self, batch):
            self.batch = batch

    model = Small()
    step = whet.compile_step(model, adam(model), lambda m, pair: m(**pair.batch))
    for batch in batches(2):
        step(Pair(batch))
    assert not asked and str(step.report) == "Pair: as it is: the batch holds a Pair, whose tensors are not seen"


def test_a_precision_is_set_around_the_step_and_another_one_around_the_loop_is_another_plan(monkeypatch):
    asked = choosing(monkeypatch, AS_IT_IS)
    model, batch = Small(), batches(1)[0]
    seen = []
    model.down.register_forward_hook(lambda m, args, out: seen.append(out.dtype))
    whet.compile_step(model, adam(model), precision="bfloat16")(batch)
    step = whet.compile_step(model, adam(model))
    step(batch)
    with torch.autocast("cpu", torch.bfloat16):
        step(batch)
    assert seen == [torch.bfloat16, torch.float32, torch.bfloat16] and len(asked) == 3


def test_rates_are_tensors_while_lent_and_follow_what_a_scheduler_sets():
    model = Small()
    optimizer = torch.optim.AdamW([{"params": model.up.parameters(), "lr": 0.5}, {"params": model.down.parameters()}], lr=0.25)
    rates = Rates(optimizer)
    with rates.lent():
        assert [g["lr"] for g in optimizer.param_groups] == rates.tensors
    assert [g["lr"] for g in optimizer.param_groups] == [0.5, 0.25] == [t.item() for t in rates.tensors]
    optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["lr"] = 0.125, torch.tensor(2.0)
    rates.follow()
    assert [t.item() for t in rates.tensors] == [0.125, 2.0]
