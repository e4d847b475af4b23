"""The doctor's checks of settings: precision of products, the optimizer, the loader, torch.compile, debugging switches."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from whet.diagnose.checks import flags, fp32_matmul, graph_breaks, input_stalls, optimizer
from whet.diagnose.run import Run
from whet.diagnose.target import target_of
from whet.diagnose.watch import watch
from whet.measure import Ceilings, Timing


def found(check, target):
    return list(check.CHECK.find(Run(target, seconds=0.05)))


class Line(nn.Module):
    def __init__(self, layers: int = 12):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(layers)))

    def forward(self, x):
        return self.layers(x).square().mean()


def line(make=None, layers: int = 12):
    model = Line(layers)
    return target_of("line", (model, torch.randn(8, 16)) + ((make(model.parameters()),) if make else ()))


def test_float32_products_are_counted_and_others_are_not():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.single, self.short = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False).bfloat16()

        def forward(self, x):
            return (self.single(x) + self.short(x.bfloat16()).float()).sum()

    single, every = fp32_matmul.float32_flops(watch(target_of("mixed", (Mixed(), torch.randn(4, 8)), "forward")).events)
    assert (single, every) == (2 * 4 * 8 * 8, 2 * 2 * 4 * 8 * 8)


@pytest.mark.parametrize("tflop, step_ms, idle, worth", [
    (0.5, 20.0, 0.1, True), (0.01, 20.0, 0.1, False), (0.5, 1000.0, 0.1, False), (0.5, 20.0, 0.8, False),
], ids=["products", "few", "long-step", "host-bound"])
def test_precision_is_tried_only_where_products_can_matter(tflop, step_ms, idle, worth):
    assert fp32_matmul.worth_trying(int(tflop * 1e12), 50.0, step_ms, idle) == worth


def test_precision_is_reported_from_a_twentieth_of_the_step():
    assert fp32_matmul.worth_reporting(10.0, 9.4) and not fp32_matmul.worth_reporting(10.0, 9.6)


def test_precision_set_by_torchs_newer_names_is_taken_as_chosen(monkeypatch):
    def refuse():
        raise RuntimeError("mix of the legacy and new APIs")

    monkeypatch.setattr(torch, "get_float32_matmul_precision", refuse)
    assert not found(fp32_matmul, line())


@pytest.mark.parametrize("step_ms, reported", [(6.0, True), (9.9, False)])
def test_precision_is_restored_and_reported_only_if_it_gains(step_ms, reported, monkeypatch):
    times = {"highest": Timing(10.0, 10.0, 10.0, 9), "high": Timing(step_ms, step_ms, step_ms, 9)}

    def compare(runs, **_):
        runs["high"]()
        assert torch.get_float32_matmul_precision() == "high"
        return times

    monkeypatch.setattr(fp32_matmul, "compare", compare)
    monkeypatch.setattr(fp32_matmul, "worth_trying", lambda *_: True)
    run = Run(line(), seconds=0.05)
    run.ceilings = Ceilings(copy_gbs=100.0, tflops={"float32": 1.0})
    findings = list(fp32_matmul.CHECK.find(run))
    assert torch.get_float32_matmul_precision() == "highest" and bool(findings) == reported
    assert all(f.gain_ms == 10.0 - step_ms and f.apply is None and "layers" in f.module for f in findings)
    monkeypatch.setattr(fp32_matmul, "made_for_halves", lambda: False)
    assert not any("whet.optimize" in f.fix for f in fp32_matmul.CHECK.find(run)), "it replaces none on such a GPU"
    monkeypatch.setattr(fp32_matmul, "made_for_halves", lambda: True)
    assert all("whet.optimize" in f.fix for f in fp32_matmul.CHECK.find(run))


@pytest.mark.parametrize("make, way", [
    (lambda p: torch.optim.AdamW(p), "fused"), (lambda p: torch.optim.SGD(p, momentum=0.9), "fused"),
    (lambda p: torch.optim.AdamW(p, fused=True), None), (lambda p: torch.optim.RMSprop(p), None),
    (lambda p: torch.optim.RMSprop(p, foreach=False), "foreach"),
])
def test_the_switch_that_could_be_on(make, way):
    assert optimizer.better(make(list(Line().parameters())), gpu=True) == way


def test_a_plain_optimizer_of_one_that_cannot_fuse_is_left_alone_on_a_cpu():
    assert optimizer.better(torch.optim.RMSprop(Line().parameters(), foreach=False), gpu=False) is None


def test_applied_optimizer_is_the_same_object_fused_and_goes_on_from_its_moments():
    target = optimizer.example(None)
    target.step()
    scheduler = torch.optim.lr_scheduler.StepLR(target.optimizer, 1)
    held, moments = target.optimizer, [s["exp_avg"].clone() for s in target.optimizer.state.values()]
    (finding,) = found(optimizer, target)
    assert finding.measured and 0 < finding.gain_ms == finding.cost_ms
    finding.apply(target)
    assert target.optimizer is held is scheduler.optimizer and all(g["fused"] for g in held.param_groups)
    assert all(torch.equal(s["exp_avg"], m) and s["step"] == 1 for s, m in zip(held.state.values(), moments))
    target.step()
    assert all(s["step"] == 2 for s in held.state.values())
    assert not found(optimizer, target)


def test_looking_at_an_optimizer_changes_neither_it_nor_the_parameters():
    target = optimizer.example(None)
    target.step()
    before = [t.clone() for t in (*target.model.parameters(), *(s["exp_avg"] for s in target.optimizer.state.values()))]
    held = target.optimizer
    found(optimizer, target)
    after = (*target.model.parameters(), *(s["exp_avg"] for s in target.optimizer.state.values()))
    assert target.optimizer is held and not any(g["fused"] for g in held.param_groups)
    assert all(torch.equal(a, b) for a, b in zip(before, after))


class Loop(torch.optim.Optimizer):
    """Momentum, a parameter at a time."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            m = self.state[p].setdefault("m", torch.zeros_like(p))
            m.mul_(0.9)
            m.add_(p.grad)
            p.mul_(0.999)
            p.sub_(m.sign() * self.param_groups[0]["lr"])


class Lists(Loop):
    @torch.no_grad()
    def step(self, closure=None):
        params = self.param_groups[0]["params"]
        torch._foreach_add_(params, [p.grad for p in params], alpha=-1e-3)


def test_an_optimizer_of_ones_own_that_loops_is_reported_with_its_line():
    (finding,) = found(optimizer, line(Loop))
    assert "Loop.step" in finding.cause and "test_check_settings.py:" in finding.line and finding.gain_ms > 0
    assert not found(optimizer, line(Lists)) and not found(optimizer, line(Loop, layers=2))


def test_wait_for_batches_is_measured_and_workers_are_proposed():
    (finding,) = found(input_stalls, input_stalls.example(True))
    assert finding.measured and "num_workers=0" in finding.evidence[-1] and "num_workers=" in finding.fix


def test_a_loader_of_one_batch_or_none_is_left_alone():
    target = input_stalls.example(True)
    for batches in ([], [target.args[0]]):
        target.loader = batches
        assert not found(input_stalls, target)


def test_advice_to_a_loader_goes_by_what_it_has():
    workers = DataLoader(input_stalls.Batches(False), batch_size=None, num_workers=2)
    assert "more than 2 workers" in input_stalls.advice(workers, 10.0, 5.0, gpu=False)
    assert "pin_memory" in input_stalls.advice(workers, 10.0, 5.0, gpu=True)
    assert "another process" in input_stalls.advice([1, 2], 10.0, 5.0, gpu=False)
    assert input_stalls.workers_for(1.0, 10.0) <= 2


class Calls(nn.Module):
    """A Python number that is another at each call."""

    def __init__(self):
        super().__init__()
        self.layer, self.calls = nn.Linear(4, 4), 0

    def forward(self, x):
        self.calls += 1
        return (self.layer(x) * self.calls).mean()


class Holds(nn.Module):
    def __init__(self, f):
        super().__init__()
        self.layer, self.act = nn.Linear(4, 4), torch.compile(f, backend="eager")

    def forward(self, x):
        return self.act(self.layer(x)).mean()


def test_a_break_is_reported_with_its_reason_and_line():
    (finding,) = found(graph_breaks, graph_breaks.example(True))
    assert "item()" in finding.cause and finding.line.startswith("graph_breaks.py:") and finding.line in finding.evidence[0]


def test_compiling_again_on_like_steps_is_reported_however_often_it_ran_before():
    target = target_of("calls", (torch.compile(Calls(), backend="eager"), torch.randn(2, 4)))
    for _ in range(10):
        target.step()
    (finding,) = found(graph_breaks, target)
    assert "compiled again" in finding.cause


def test_a_compiled_function_that_a_module_holds_is_seen():
    def breaks(x):
        torch._dynamo.graph_break()
        return x * 2

    (finding,) = found(graph_breaks, target_of("holds", (Holds(breaks), torch.randn(2, 4))))
    assert "act of the model" in finding.cause
    assert not found(graph_breaks, target_of("holds", (Holds(torch.relu), torch.randn(2, 4))))


def test_what_is_not_compiled_is_not_run(monkeypatch):
    monkeypatch.setattr(graph_breaks, "broken", lambda target: pytest.fail("it ran"))
    assert not found(graph_breaks, line())


@pytest.fixture
def anomaly():
    torch.autograd.set_detect_anomaly(True)
    yield
    torch.autograd.set_detect_anomaly(False)


def test_a_flag_on_in_the_whole_process_is_turned_off_by_its_fix(anomaly):
    target = line()
    (finding,) = found(flags, target)
    assert "anomaly" in finding.cause and "whole process" in finding.evidence[1] and finding.measured
    assert torch.is_anomaly_enabled()
    finding.apply(target)
    assert not torch.is_anomaly_enabled() and not found(flags, target)


def test_a_flag_on_within_the_step_is_seen_and_left_as_it_is():
    (finding,) = found(flags, flags.example(True))
    assert "within the step" in finding.evidence[1] and finding.apply is None and not torch.is_anomaly_enabled()


def test_a_flag_that_costs_nothing_is_not_reported(monkeypatch):
    monkeypatch.setattr(flags, "compare", lambda runs, **_: dict.fromkeys(runs, Timing(1.0, 1.0, 1.0, 9)))
    assert not found(flags, flags.example(True))


def test_deterministic_algorithms_are_held_at_both_values_and_put_back(monkeypatch):
    seen = []
    monkeypatch.setattr(flags, "compare", lambda runs, **_: {n: run() and Timing(len(n), 1, 1, 9) for n, run in runs.items()})
    target = line()
    target.model.register_forward_pre_hook(lambda *_: seen.append(torch.are_deterministic_algorithms_enabled()))
    torch.use_deterministic_algorithms(True)
    try:
        found(flags, target)
        assert torch.are_deterministic_algorithms_enabled() and seen == [True, True, False]
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_running_profiler_is_reported():
    target = line()
    with torch.autograd.profiler.profile():
        (finding,) = found(flags, target)
    assert "profiler" in finding.cause


def test_variables_of_the_environment_that_wait_for_the_gpu_are_reported():
    (finding,) = flags.variables({"CUDA_LAUNCH_BLOCKING": "1", "PYTORCH_NO_CUDA_MEMORY_CACHING": "0", "HOME": "/root"})
    assert "CUDA_LAUNCH_BLOCKING=1" in finding.cause and finding.cost_ms is None
