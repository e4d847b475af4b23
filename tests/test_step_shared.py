"""whet.compile_step of several processes: the same plan in all, verified with what they send, and no process left waiting."""

import contextlib
import functools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from warm import together

from whet import step_shared
from whet.measure import Race
from whet.race import Outcome, timing
from whet.step import compile_step
from whet.step_plans import AS_IT_IS
from whet.step_shared import COMPILED, CompiledParts
from whet.train.distributed import shard

CLIP = 0.5
WIDTH = 16


class Block(nn.Module):
    def __init__(self, drop: float):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), nn.Dropout(drop)

    def forward(self, x):
        return x + self.drop(self.down(F.gelu(self.up(x))))


class Net(nn.Module):
    """Returns its loss; dropout is there to be switched off while plans are tried."""

    def __init__(self, drop: float = 0.0):
        super().__init__()
        torch.manual_seed(3)
        self.blocks, self.head = nn.ModuleList(Block(drop) for _ in range(3)), nn.Linear(WIDTH, 5)

    def forward(self, x, labels):
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x), labels)


def batches(count: int, rank: int, rows: int = 6) -> list[dict]:
    made = torch.Generator().manual_seed(10 + rank)
    draw = lambda: dict(x=torch.randn(rows, WIDTH, generator=made), labels=torch.randint(5, (rows,), generator=made))  # noqa: E731
    return [draw() for _ in range(count)]


def wrapped(mode: str, model: nn.Module) -> nn.Module:
    if mode == "ddp":
        return DistributedDataParallel(model)
    shard(model, "cpu", dist.get_world_size())
    return model


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in model.parameters()]


def winning(name: str):
    """A race that this plan wins, with everything in it run once in turns as a race does."""
    def race(runs, keep, slowest, **_):
        times = {n: [slowest(float(n != name) + 1)] for n in runs}
        for run in runs.values():
            run()
        return Race({n: timing(t) for n, t in times.items()}, Outcome(name, "planted", {}, True), "", times)

    return mock.patch.object(step_shared, "race", race)


def quickly():
    """torch.compile without a compiler: what it traces runs as it was traced."""
    return mock.patch.object(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))


@contextlib.contextmanager
def unsent(model: nn.Module, when: bool):
    """Gradients are added up in each process, to be sent by a later step."""
    if isinstance(model, DistributedDataParallel):
        with model.no_sync() if when else contextlib.nullcontext():
            yield
    else:
        model.set_requires_gradient_sync(not when)
        yield


def loop(model: nn.Module, data: list[dict], **options):
    """(losses, the step): updates after each batch but the first, whose gradients are sent with the second's."""
    step, losses = compile_step(model, adam(model), clip=CLIP, seconds=0.001, **options), []
    for i, batch in enumerate(data):
        with unsent(model, i == 0):
            losses.append(step(batch, update=i != 0))
    return torch.stack(losses), step


def plain(model: nn.Module, data: list[dict], precision: str | None) -> torch.Tensor:
    """The loop that compile_step stands for."""
    optimizer, losses = adam(model), []
    for i, batch in enumerate(data):
        if i != 1:
            optimizer.zero_grad()
        with unsent(model, i == 0):
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
                loss = model(**batch)
            loss.backward()
        losses.append(loss.detach())
        if i != 0:
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
    return torch.stack(losses)


def same_steps(rank, world, folder, mode, precision):
    data, model = batches(4, rank), wrapped(mode, Net())
    twin = wrapped(mode, Net())
    with winning(COMPILED.name), quickly():
        losses, step = loop(model, data, precision=precision)
    (served,) = step.served.values()
    assert served.plan == COMPILED and isinstance(served.work.run, CompiledParts), str(step.report)
    assert len(served.work.run.forwards) == (1 if mode == "ddp" else 3)
    assert not any("forward" in vars(m) for m in model.modules()), "outside of a step the model is as it was"
    torch.testing.assert_close(losses, plain(twin, data, precision))
    torch.testing.assert_close(weights(model), weights(twin))
    said = "the step in float32" if mode == "fsdp" else ""
    assert said in str(step.report) and "in 2 processes" in str(step.report)


@pytest.mark.parametrize("mode, precision", [("ddp", "float32"), ("ddp", "bfloat16"), ("fsdp", "bfloat16")])
def test_compiled_steps_of_two_processes_are_those_of_the_plain_loop(mode, precision, tmp_path):
    together(functools.partial(same_steps, mode=mode, precision=precision), 2, tmp_path)


def off_by_a_little(forward, alike):
    """A part whose result is wrong in the second process, and whose gradients are not: means would show them to both."""
    def compiled(*args, **kwargs):
        out = forward(*args, **kwargs)
        return out + 0.001 * dist.get_rank() * out.detach()

    return compiled


def no_compiler(forward, alike):
    """A part that the second process cannot compile."""
    def compiled(*args, **kwargs):
        if dist.get_rank() == 1:
            raise RuntimeError("no compiler here")
        return forward(*args, **kwargs)

    return compiled


def one_wrong(rank, world, folder):
    data = batches(2, rank)
    for mode, planted, said in (
        ("ddp", off_by_a_little, "torch.compile is out: rank 1: output loss: worst error"),
        ("ddp", no_compiler, "rank 1: torch.compile: RuntimeError: no compiler here"),
        ("fsdp", off_by_a_little, "torch.compile is out: rank "),
        ("fsdp", no_compiler, "rank 1: torch.compile: RuntimeError: no compiler here"),
    ):
        model = wrapped(mode, Net())
        twin = [w.clone() for w in weights(model)]
        with winning(COMPILED.name), mock.patch.object(step_shared, "compiled_alike", planted):
            step = compile_step(model, adam(model))
            step.prepare(data[0])
        (served,) = step.served.values()
        assert served.plan == AS_IT_IS and said in str(step.report), str(step.report)
        assert all(torch.equal(a, b) for a, b in zip(weights(model), twin))
        assert all(p.grad is None for p in model.parameters())
        step(data[1])


def test_what_is_wrong_or_fails_in_one_process_costs_the_plan_in_all(tmp_path):
    together(one_wrong, 2, tmp_path)


def of_other_shapes(rank, world, folder):
    """A rank with shorter batches, and one that alone meets a new shape: nobody waits for a choice that others do not make."""
    model = wrapped("ddp", Net(drop=0.5))
    modes = [m.training for m in model.modules()]
    step = compile_step(model, adam(model), seconds=0.001)
    with winning(COMPILED.name), quickly():
        step(batches(1, rank, rows=6 - rank)[0])
        assert "dropout is off" in str(step.report) and [m.training for m in model.modules()] == modes
        with mock.patch.object(step_shared, "gathered", side_effect=AssertionError("a second trial")):
            step(batches(1, rank, rows=6 if rank else 9)[0])
            step(batches(1, rank, rows=6)[0])
    lines = str(step.report).splitlines()
    assert len(lines) == 2 and "processes that train together choose once" in lines[1], lines
    assert all(s.plan == COMPILED for s in step.served.values())


def test_a_shape_that_one_process_meets_later_runs_by_the_plan_of_the_first(tmp_path):
    together(of_other_shapes, 2, tmp_path)


def with_gradients(rank, world, folder):
    """A loop that chose late: what it had added up lies in the buckets that the trial writes to."""
    model = DistributedDataParallel(Net(), gradient_as_bucket_view=True)
    first, second = batches(2, rank)
    for _ in range(2):  # buckets are made anew after the first backward
        model.zero_grad()
        model(**first).backward()
    before = [p.grad.clone() for p in model.parameters()]
    step = compile_step(model, adam(model), seconds=0.001)
    with winning(COMPILED.name), quickly():
        step.prepare(second)
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), before, strict=True))


def test_gradients_that_were_there_before_the_choice_stay(tmp_path):
    together(with_gradients, 2, tmp_path)


class Noisy(Net):
    def forward(self, x, labels):
        return super().forward(x + 1e-3 * torch.randn_like(x), labels)


class Alone(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(WIDTH, 5)

    def forward(self, x, labels):
        return F.cross_entropy(self.net(x), labels)


class Noted(Net):
    def forward(self, x, labels, note=None):
        return super().forward(x, labels)


def one_strange(rank, world, folder):
    model = wrapped("ddp", Noted())
    step = compile_step(model, adam(model), seconds=0.001)
    step(batches(1, rank)[0] | (dict(note=object()) if rank else {}))
    (served,) = step.served.values()
    assert served.plan == AS_IT_IS and "rank 1: the batch holds a object" in str(step.report), str(step.report)


def test_a_batch_that_one_process_cannot_see_into_costs_the_plan_in_all(tmp_path):
    together(one_strange, 2, tmp_path)


def left_as_they_are(rank, world, folder):
    for make, options, said in (
        (lambda: Net(), {}, "only DDP's and FSDP2's steps are tried"),
        (lambda: wrapped("ddp", Noisy()), {}, "random numbers"),
        (lambda: wrapped("fsdp", Alone()), {}, "FSDP2 has one unit"),
        (lambda: wrapped("ddp", Net()), dict(plans=["CUDA graph"]), "CUDA graphs are not tried of several processes"),
        (lambda: wrapped("ddp", Net()), dict(compiled=False), "no other plan is tried"),
        (lambda: wrapped("ddp", Net()), dict(plans=False), "no other plan is tried"),
    ):
        model = make()
        step = compile_step(model, adam(model), seconds=0.001, **options)
        with quickly():
            step(batches(1, rank)[0])
        (served,) = step.served.values()
        assert served.plan == AS_IT_IS and said in str(step.report), str(step.report)


def test_what_cannot_be_tried_in_several_processes_runs_as_it_is_and_says_why(tmp_path):
    together(left_as_they_are, 2, tmp_path)


def checkpointed(rank, world, folder):
    """Blocks that keep no activations."""
    from whet.train.build import checkpoint_blocks

    for mode in ("ddp", "fsdp"):
        inner, twin = Net(), Net()
        assert checkpoint_blocks(inner, batches(1, rank)[0], -1) == 3
        model, other = wrapped(mode, inner), wrapped(mode, twin)
        with winning(COMPILED.name), quickly():
            losses, step = loop(model, batches(4, rank), precision="bfloat16")
        assert all(s.plan == COMPILED for s in step.served.values()), str(step.report)
        torch.testing.assert_close(losses, plain(other, batches(4, rank), "bfloat16"))


def test_checkpointed_blocks_are_compiled_as_they_are(tmp_path):
    together(checkpointed, 2, tmp_path)


def raced_for_real(rank, world, folder):
    """Nothing planted: the compiler's own code, and a race whose figures are the same in both processes."""
    model = wrapped("ddp", Net())
    step = compile_step(model, adam(model), loss=lambda m, b: m(**b), seconds=0.01)
    batch = batches(1, rank)[0]
    step(batch)
    said = step_shared.gathered(str(step.report))
    assert said[0] == said[1] and "ms before" in said[0], said


def test_processes_that_race_together_see_the_same_figures(tmp_path):
    together(raced_for_real, 2, tmp_path)
