"""host_syncs and launch_bound: which ops make a host wait, what is laid to their charge, and when launches are the cause."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from whet.diagnose.checks import host_syncs
from whet.diagnose.checks.host_syncs import CHECK as SYNCS
from whet.diagnose.checks.host_syncs import COPIED, MASKED, READ, idle_after, wait_of, waited_us, waits
from whet.diagnose.checks.launch_bound import CHECK as LAUNCHES
from whet.diagnose.checks.launch_bound import decoding, launching
from whet.diagnose.profile import Kernel, Profile
from whet.diagnose.run import Run
from whet.diagnose.target import Target, target_of
from whet.diagnose.watch import Event, Seen
from whet.measure import Ceilings, Timing


class Calls(nn.Module):
    """A linear layer in two blocks, and after it whatever a test wants."""

    def __init__(self, then):
        super().__init__()
        self.then, self.blocks = then, nn.ModuleList(Block(then) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Block(nn.Module):
    def __init__(self, then):
        super().__init__()
        self.then, self.linear = then, nn.Linear(16, 16)

    def forward(self, x):
        return self.then(self.linear(x))


def found_in(then):
    return list(SYNCS.find(Run(target_of("example", (Calls(then), torch.randn(4, 16))), seconds=0.01)))


def reads(x):
    return x * 2 if x.sum() > 0 else x + 1


def picks(x):
    return x + x[x > 0].sum()


def puts(x):
    y = x.clone()
    y[x > 0] = 2 * x[x > 0]
    return y


WAITING = dict(
    reads=reads, picks=picks, puts=puts, item=lambda x: x * x.max().item(), nonzero=lambda x: x + (x > 0).nonzero().shape[0],
    where_of_one=lambda x: x + torch.where(x > 0)[0].numel(), select=lambda x: x + x.masked_select(x > 0).mean(),
    unique=lambda x: x + torch.unique(x).numel(), equal=lambda x: x if torch.equal(x, x * 2) else x + 1,
    repeats=lambda x: x + x.repeat_interleave((x[0] > 0).long(), dim=1).sum(),
)


def fills(x):
    y = x.clone()
    y[y < 0] = 0.0
    return y


HEALTHY = dict(
    where=lambda x: torch.where(x > 0, x, 0.0), clamp=lambda x: x.clamp(min=0), fills=fills,
    masked_fill=lambda x: x.masked_fill(x > 0, 1.0), gathers=lambda x: x[torch.tensor([0, 1, 2, 3])],
    one_hot=lambda x: x + F.one_hot(x.argmax(-1), 16), constant=lambda x: x * torch.linspace(0, 1, 3)[1].item(),
    repeats=lambda x: x.repeat_interleave(1, dim=1), sorts=lambda x: x.sort(-1).values, dropout=lambda x: F.dropout(x, 0.5),
    top=lambda x: x + x.topk(2).values.sum(), selects=lambda x: x.index_select(0, torch.arange(4)),
)


@pytest.mark.parametrize("name", WAITING)
def test_an_op_that_waits_is_found(name):
    assert found_in(WAITING[name])


@pytest.mark.parametrize("name", HEALTHY)
def test_an_op_that_does_not_wait_is_left_alone(name):
    assert not found_in(HEALTHY[name])


def test_layers_share_a_finding_that_names_line_and_modules():
    finding, = found_in(reads)
    line = reads.__code__.co_firstlineno + 1
    assert finding.line == f"test_check_syncs.py:{line}"
    assert "2 times" in finding.cause and "blocks.*" in finding.cause and "on a GPU" in finding.cause
    assert finding.cost_ms is None and not finding.wrong
    assert any("aten::_local_scalar_dense forward, 2 " in text for text in finding.evidence)


def test_a_backward_wait_belongs_to_the_line_that_made_it():
    finding, = found_in(picks)
    assert any("backward" in text for text in finding.evidence), finding.evidence
    assert "torch.where" in finding.fix


def test_an_optimizers_counters_are_no_waits():
    model = Calls(lambda x: x)
    target = target_of("example", (model, torch.randn(4, 16), torch.optim.AdamW(model.parameters(), foreach=False)))
    run = Run(target, seconds=0.01)
    assert any(e.op == "aten::_local_scalar_dense" for e in run.watched.events)
    assert not list(SYNCS.find(run))

    def step():
        target.model(*target.args).backward()
        target.optimizer.step()

    step()
    assert not list(SYNCS.find(Run(Target(model, name="example", step_with=step))))


def seen(*shape, dtype=torch.float32, device="cuda"):
    return Seen(shape, dtype, tuple(0 for _ in shape), device, 0)


def event(op, inputs, outputs=(), args=()):
    return Event(0, op, "forward", "", "", tuple(inputs), tuple(outputs), 0, False, tuple(args))


def test_on_a_gpu_only_what_lies_there_is_waited_for():
    assert wait_of(event("aten::_local_scalar_dense", [seen()]), gpu=True) == READ
    assert not wait_of(event("aten::_local_scalar_dense", [seen(device="cpu")]), gpu=True)
    mask = seen(8, dtype=torch.bool)
    assert wait_of(event("aten::index", [seen(8), mask], [seen(3)]), gpu=True) == MASKED
    assert not wait_of(event("aten::index", [mask, seen(3, dtype=torch.int64)], [seen(3)]), gpu=True)
    assert wait_of(event("aten::index_put_", [seen(8), mask, seen()]), gpu=True) == MASKED
    assert not wait_of(event("aten::index_put_", [seen(8), mask, seen(device="cpu")]), gpu=True)


def test_a_copy_to_the_cpu_waits_unless_it_says_not_to():
    there, here = seen(8), seen(8, device="cpu")
    assert wait_of(event("aten::_to_copy", [there], [here]), gpu=True) == COPIED
    assert wait_of(event("aten::copy_", [here, there], [here]), gpu=True) == COPIED
    assert not wait_of(event("aten::_to_copy", [there], [here], args=(True,)), gpu=True)
    assert not wait_of(event("aten::_to_copy", [here], [there]), gpu=True)
    assert not wait_of(event("aten::_to_copy", [there], [there]), gpu=True)


def test_idle_time_after_waits_ends_at_the_next_kernel_and_is_counted_once():
    assert idle_after([10.0, 30.0], [0.0, 15.0, 35.0]) == 10.0
    assert idle_after([10.0, 12.0], [15.0]) == 5.0
    assert idle_after([50.0], [0.0, 15.0]) == 0.0


class Span:
    """An event as the profiler gives it: times in microseconds."""

    def __init__(self, name, start, us, device):
        self.given = name, start, us, device

    def name(self):
        return self.given[0]

    def start_ns(self):
        return int(self.given[1] * 1e3)

    def duration_ns(self):
        return int(self.given[2] * 1e3)

    def device_type(self):
        return self.given[3]


def test_waits_on_a_gpu_cost_the_idle_time_that_follows_them(monkeypatch):
    host, gpu = torch.autograd.DeviceType.CPU, torch.autograd.DeviceType.CUDA
    spans = [
        Span("add", 0, 5, gpu), Span("cudaStreamSynchronize", 4, 6, host), Span("add", 40, 5, gpu),
        Span("aten::add", 12, 3, host), Span("cudaDeviceSynchronize", 44, 2, host),
    ]
    results = SimpleNamespace(events=lambda: spans)
    made = profile(count=2, us=5.0, step_ms=0.05, syncs=1)
    made.trace = SimpleNamespace(profiler=SimpleNamespace(kineto_results=results))
    assert waited_us(made) == 30.0
    made.syncs = 0
    assert waited_us(made) == 0.0
    monkeypatch.setattr(Run, "gpu", True)
    monkeypatch.setattr(host_syncs, "wait_of", lambda e, gpu: wait_of(e, False))
    run = Run(target_of("example", (Calls(picks), torch.randn(4, 16))))
    run.__dict__["profile"] = made
    assert not list(SYNCS.find(run)), "waits that cost nothing are left alone"
    made.syncs = 1
    finding, = SYNCS.find(run)
    assert finding.cost_ms == finding.gain_ms == 0.03 and "on a GPU" not in finding.cause
    assert any("0.03 ms" in text for text in finding.evidence)


def profile(count=400, us=3.0, step_ms=8.0, host_us=7900.0, syncs=0):
    kernels = [Kernel("k", us, "forward", "", "aten::add") for _ in range(count)]
    return Profile(Timing(step_ms, step_ms, step_ms, 9, host_us), kernels, {}, syncs, "cuda", host_us)


def test_short_kernels_and_a_slow_host_are_launch_bound():
    found = launching(profile())
    assert found is not None and found.launches == 400 and found.median_us == 3.0
    assert found.idle_ms == found.step_ms - found.busy_ms > 6


@pytest.mark.parametrize("made, given", [
    (dict(us=19.0), {}),  # the GPU is busy
    (dict(us=12.0, step_ms=9.0, host_us=8900.0), {}),  # idle, but its kernels outlast a launch
    (dict(host_us=900.0), {}),  # the host is done early: something else is waited for
    (dict(count=20, us=3.0, step_ms=0.4, host_us=390.0), {}),  # few launches
    (dict(step_ms=200.0, host_us=199000.0), {}),  # the host works at other things
    ({}, dict(replays=3)),
    (dict(syncs=40), dict(waited=6000.0)),
])
def test_other_reasons_to_idle_are_not_launches(made, given):
    assert launching(profile(**made), **given) is None


def test_waits_that_explain_little_do_not_excuse_the_launches():
    assert launching(profile(syncs=1), waited=100.0) is not None


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(1000, 64), nn.Linear(64, 1000, bias=False)

    def forward(self, tokens):
        return self.head(self.embed(tokens))


def test_decoding_is_held_against_the_bytes_of_the_parameters_it_reads():
    model = Decoder()
    tokens = torch.zeros(2, 1, dtype=torch.long)
    run = Run(Target(model, (tokens,), kind="decode", name="example"), seconds=0.01)
    run.__dict__.update(profile=profile(step_ms=8.0), ceilings=Ceilings(1000.0, {"float32": 1.0}))
    now, best = decoding(run)
    assert now.startswith("250 tokens/s")
    floor_ms = model.head.weight.numel() * 4 / 1000.0 / 1e6  # the embedding's rows are looked up, not read
    assert f"{2 / floor_ms * 1e3:.0f} tokens/s" in best
    finding, = LAUNCHES.find(run)
    assert now in finding.evidence and finding.gain_ms == finding.cost_ms == pytest.approx(8.0 - 1.2)


@pytest.mark.gpu
def test_waits_on_a_gpu_have_a_cost():
    torch.manual_seed(0)
    target = target_of("example", (Calls(picks).cuda(), torch.randn(64, 16, device="cuda")))
    run = Run(target, seconds=0.1)
    assert waits(run.watched, True) and run.profile.syncs >= 2
    finding, = SYNCS.find(run)
    assert 0 < finding.cost_ms <= run.step_ms
