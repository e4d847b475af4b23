"""The training loop: data, the best plan of the step, evaluation, checkpoints, and what to do when the loss goes bad.

    outcome = train(read("gpt2-d12"), Path("runs/first"))
    train(read("gpt2-d12"), Path("runs/first"), resume=True)       # from the newest good checkpoint

A step is whet.compile_step's: the plan is chosen at the first batch. Losses are read from the device when they are logged.
"""

import math
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed.tensor import DTensor

from whet import interrupts
from whet.graphs import Mark
from whet.lock import Lock
from whet.measure import now
from whet.train import checkpoint
from whet.train.distributed import plain, processes
from whet.train.log import Progress, step_line
from whet.train.recipe import TrainRecipe
from whet.train.schedule import set_lr
from whet.train.start import Training, planned, prepared, resumed, started
from whet.train.tasks import GPTasks, shown_task
from whet.train.watch import Diverged, first_bad_module, gone_bad
from whet.workload import find_loss

AGREE_S = 1.0  # of steps between two looks of several processes at each other's signals
NOTICE = "whet: the run ends after this step, with a checkpoint; the same again ends it at once, without one\n"
RETUNE_S = 0.05  # of timing for each candidate, while the run waits
VOTES = 3
MOST_STEPS = 1000  # whose losses wait on the device to be read
Pending = tuple[int, torch.Tensor, float]  # a step, its loss, which is still on the device, and its learning rate


@dataclass
class TrainOutcome:
    """How a run ended."""

    folder: Path
    step: int
    loss: float
    val_loss: float | None
    tokens: int
    seconds: float


def train(
    recipe: TrainRecipe, folder: Path, resume: bool = False, lock: Lock | None = None,
    say: Callable[[str], None] = print, progress: Progress = lambda text, done, total: None,
    after: Callable[[Training], None] = lambda run: None, live: Progress = lambda text, done, total: None,
) -> TrainOutcome:
    """Train by the recipe into a run folder. ValueError in one line for whatever is wrong before step 0; Diverged after.

    SIGINT and SIGTERM end it after the step under way, with a checkpoint: KeyboardInterrupt.

    after   called with the run when its last step is done and saved
    live    is given the line of each step whose loss is read, also of those that are not printed
    """
    with processes(recipe.dist.mode) as world:
        folder = world.agreed(folder)
        run = prepared(recipe, folder, world, resume, say, progress)
        run.log.live = live
        try:
            found = resumed(run) if resume else None
            with torch.random.fork_rng([torch.cuda.current_device()] if run.device == "cuda" else []):
                started(run, found, resume, lock)
            if world.rank:  # else dropout would be the same in all of them
                torch.manual_seed((recipe.train.seed * 1_000_003 + run.step) * world.size + world.rank)
            if run.device == "cuda":
                torch.cuda.reset_peak_memory_stats()  # choosing kernels and plans held copies
            with interrupts.deferred("" if world.rank else NOTICE, now) as run.asked:
                looped(run)
                settled(run, run.world.mean(torch.cat(votes(run, torch.zeros(1, device=run.device)))).tolist())
                if run.stop:
                    ended(run)
            outcome = TrainOutcome(folder, run.step, run.last_loss, run.val_loss, run.tokens, run.time_s)
            after(run)
            return outcome
        finally:
            run.log.close()


@dataclass
class Losses:
    """Of steps whose end nobody has waited for: on their way to the host."""

    steps: list[Pending]
    values: torch.Tensor  # of each step, then the votes, then the norm of the last one's gradients where they are clipped
    end: Mark
    shown: bool = True

    @classmethod
    def of(cls, run: Training, steps: list[Pending], shown: bool) -> "Losses":
        found = torch.stack([loss.detach() for _, loss, _ in steps])
        found = run.world.mean(torch.cat([found, *votes(run, found)]) if run.world.size > 1 else found)
        norm = run.stepper.norm if run.stepper is not None else None
        if norm is not None:
            norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
            found = torch.cat([found, norm.detach().reshape(1).to(found)])
        if found.is_cuda:
            found = torch.empty(found.shape, pin_memory=True).copy_(found, non_blocking=True)
        return cls(steps, found, Mark(torch.device(run.device)), shown)

    def read(self, run: Training) -> tuple[list[float], float | None]:
        """The losses and the norm, once the device has come so far."""
        self.end.wait()
        values: list[float] = self.values.tolist()
        losses, rest = values[: len(self.steps)], values[len(self.steps) :]
        if run.world.size > 1:
            settled(run, rest[:VOTES])
            rest = rest[VOTES:]
        return losses, rest[0] if rest else None


def votes(run: Training, like: torch.Tensor) -> list[torch.Tensor]:
    """What all processes agree on, as this one has it. Filled on the device: a copy from the host would wait for it."""
    asked = run.asked.signal
    return [like.new_full((1,), float(x)) for x in (asked == signal.SIGINT, asked == signal.SIGTERM, run.step_s)]


def settled(run: Training, found: list[float]) -> None:
    """The votes, averaged: the signal that ends the run, and how many steps until all look again."""
    interrupt, terminate, step_s = found
    run.stop = signal.SIGTERM if terminate else signal.SIGINT if interrupt else 0
    run.agree_every = max(1, min(round(AGREE_S / step_s), MOST_STEPS)) if step_s else run.agree_every


def ended(run: Training) -> NoReturn:
    """By a signal, of which this process may not have had one."""
    interrupts.received = run.stop
    raise KeyboardInterrupt


def looped(run: Training, until: int | None = None, only_log: bool = False) -> None:
    """Steps until the last one. What is due after a step is done with the clock stopped.

    Losses that are only logged are read when the step after them is launched, so that the device never waits for the host.
    until, only_log   the step to end with, and whether nothing but the log is due, also at the end
    """
    steps = run.recipe.train.steps if until is None else until
    pending: list[Pending] = []
    waiting: Losses | None = None
    began = now()
    while run.step < steps:
        lr = set_lr(run.optimizer, run.recipe.schedule, min(run.step, run.recipe.train.steps - 1))
        pending.append((run.step + 1, one_step(run), lr))
        run.step += 1
        if waiting is not None:
            began, waiting = flushed(run, waiting, began), None
        if run.world.size == 1:
            run.stop = run.asked.signal
        due = due_after(run, steps, only_log)
        agrees = any(due.values()) or run.world.size > 1 and len(pending) >= run.agree_every
        if run.starting == len(pending) and not agrees:
            torch.cuda.synchronize()  # compiled and captured: these count as long as the steps that are logged with them
            began = now()
        if run.reads_at_once or agrees:
            waiting, pending = Losses.of(run, pending, due["log"]), []
            if run.reads_at_once or run.step == steps or any(due[name] for name in ("val", "save", "retune")):
                began, waiting = flushed(run, waiting, began), None
        if due["val"]:
            evaluated(run)
        if due["save"]:
            saved(run)
            if run.stop and not only_log:
                ended(run)
        if due["retune"]:
            retuned(run)
        if any(due[name] for name in ("val", "save", "retune")):
            began = now()


def due_after(run: Training, steps: int, only_log: bool) -> dict[str, bool]:
    """What is to be done after a step; where a signal ends the run no more than its checkpoint."""
    r = run.recipe.run
    if run.stop and not only_log:
        return {"log": True, "val": False, "save": True, "retune": False}
    every = {"log": r.log_every, "val": r.val_every, "save": r.save_every, "retune": run.recipe.kernels.retune_every}
    due = {name: bool(n) and run.step % n == 0 or run.step == steps for name, n in every.items()}
    due = {name: now_due and (name == "log" or not only_log) for name, now_due in due.items()}
    due["retune"] &= run.step < steps
    return due


def one_step(run: Training) -> torch.Tensor:
    """One update; the loss over all its forwards, still on the device."""
    total: torch.Tensor | None = None
    for i in range(run.recipe.train.accumulate):
        assert run.stepper is not None
        with run.world.without_sync(run.made.model, i + 1 < run.recipe.train.accumulate):
            loss = run.stepper(run.batch(run.loader), update=i + 1 == run.recipe.train.accumulate)
        total = loss if total is None else total + loss
    if run.ema is not None:
        run.ema.update()
    assert total is not None
    return total


def flushed(run: Training, given: Losses, began: float) -> float:
    """These losses read, logged and looked at; when their steps ended. Diverged where one is bad."""
    losses, norm = given.read(run)
    ended, pending = now(), given.steps
    timed = len(pending) - run.starting
    per_step, r = (ended - began) / (timed if timed > 0 else len(pending)), run.recipe
    run.starting = max(0, -timed)
    run.step_s = per_step
    run.time_s += per_step * len(pending)
    tok_s = r.tokens_per_step / per_step
    flops = run.made.flops_per_token(r.train.seq_len) * tok_s
    mfu = flops / run.ceiling / run.world.size if run.ceiling else None
    memory = torch.cuda.max_memory_allocated() / 2**20 if run.device == "cuda" else None
    last = pending[-1][0]
    for (step, _, lr), loss in zip(pending, losses):
        run.first_loss = loss if run.first_loss is None else run.first_loss
        run.last_loss = loss
        at = dict(
            step=step, tokens=run.tokens_at(step), loss=loss, lr=lr, grad_norm=norm if step == last else None,
            ms=round(1e3 * per_step, 3), tok_s=round(tok_s, 1),
            mfu=None if mfu is None else round(mfu, 4), memory_mib=None if memory is None else round(memory),
            time_s=round(run.time_s - per_step * (last - step), 3),
        )
        run.log.write(kind="step", **at)
        if run.watched and (why := gone_bad(loss, run.first_loss)):
            stopped(run, step, why)
    if run.watched and norm is not None and not math.isfinite(norm):  # the weights are spoilt now: nothing is saved of them
        stopped(run, last, f"the norm of the gradients is {norm}")
    at |= dict(steps=r.train.steps, left_s=per_step * (r.train.steps - last))
    unit = "points" if r.data.tasks else "tok"
    if given.shown:
        run.log.say(step_line(at, unit))
    run.log.live(step_line(at | dict(lr=None), unit), last, r.train.steps)
    return ended


def stopped(run: Training, step: int, why: str) -> None:
    """The run ends: with the newest good checkpoint, and the first module whose result is not finite."""
    where = first_bad_module(plain(run.made.model), run.batch(run.loader), run.autocast, run.device)
    good = checkpoint.newest(run.folder, lambda line: None)
    left = f"the last good checkpoint is {good}" if good else "there is no checkpoint yet"
    clip = "lower train.clip" if run.recipe.train.clip else "set train.clip=1"
    text = f"stopped at step {step}: {why}; {where}; {left}. Lower train.lr, lengthen train.warmup, or {clip}"
    run.log.write(kind="event", step=step, what="stop", text=text)
    raise Diverged(f"train: {text}")


@torch.no_grad()
def evaluated(run: Training) -> None:
    """The mean loss over the first batches of the validation part, with averaged weights where there are any."""
    r = run.recipe
    there = run.shards.sequences("val", r.train.seq_len)
    size = min(r.train.batch_size, there // run.world.size * run.world.size)
    if not size or not r.run.val_batches:
        return
    count = max(1, min(r.run.val_batches, there // size))
    loader = run.shards.loader(size, r.train.seq_len, run.world.rank, run.world.size, split="val")
    model = run.made.model.eval()
    losses = []
    with run.world.evaluating(model, run.ema):
        for _ in range(count):
            batch = run.batch(loader)
            with run.set():
                loss = find_loss(model(**batch))
            assert loss is not None
            losses.append(loss.float())
        draw_task(run)
    model.train()
    run.val_loss = run.world.mean(torch.stack(losses)).mean().item()
    line: dict = dict(loss=run.val_loss, time_s=round(run.time_s, 3), sequences=count * size)
    said = f"validation loss {run.val_loss:.4f} over {count * size} sequences"
    if isinstance(run.shards, GPTasks):
        exact = run.shards.exact_log_likelihood(size, r.train.seq_len, count, run.world.rank, run.world.size)
        exact = run.world.mean(torch.tensor([exact], device=run.device)).item()
        line |= dict(log_likelihood=-run.val_loss, exact_gp=exact)
        said = f"log-likelihood {-run.val_loss:.4f} a target over {count * size} held-out tasks, of the exact GP {exact:.4f}"
    run.log.write(kind="val", step=run.step, tokens=run.tokens, **line)
    run.log.say(f"step {run.step}/{r.train.steps}  {said}")
    if run.device == "cuda":
        torch.cuda.reset_peak_memory_stats()  # what is logged is what training steps take


def draw_task(run: Training) -> None:
    """One held-out task as the model predicts it, into the run's folder, for its page. FSDP's model has no weights apart."""
    if not isinstance(run.shards, GPTasks) or run.world.rank or run.world.mode == "fsdp":
        return
    model: Any = plain(run.made.model)
    with run.set():
        found = shown_task(run.shards, lambda features: model.predict(features, run.recipe.data.context))
    run.log.task({"step": run.step, **found})


def saved(run: Training) -> None:
    state = {
        "loader": run.loader.state(), "tokens": run.tokens, "time_s": run.time_s, "first_loss": run.first_loss,
        "recipe": run.recipe.to_dict(), "model": run.made.facts, "fingerprint": run.shards.fingerprint(),
        "choices": run.kernels.table(), "loss": run.last_loss, "val_loss": run.val_loss,
    }
    run.world.save(run.folder, run.step, run.made.model, run.optimizer, state, run.ema, run.recipe.run.keep)
    run.log.write(kind="event", step=run.step, what="checkpoint", text=f"checkpoint step-{run.step:08d}")


def retuned(run: Training) -> None:
    """The verified candidates timed again at the live shapes; where another is faster now, it serves from here on."""
    before = run.kernels.table()
    if not run.kernels.tuned:  # the same on every rank, which the entries are not
        return
    again = run.kernels.retimed(RETUNE_S)
    if again.table() == before:
        run.log.event(run.step, "retune", "kernels timed again: the same are fastest")
        return
    changed = [f"{key}: {before[key]} -> {impl}" for key, impl in again.table().items() if before.get(key) != impl]
    run.kernels = again
    again.hand_to(plain(run.made.model))
    assert run.stepper is not None
    run.stepper.reset()
    planned(run)
    run.log.event(run.step, "retune", f"kernels timed again: {'; '.join(changed)}")
    run.log.choices(str(again.table()), {})
