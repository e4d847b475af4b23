"""The training loop: data, the best plan of the step, evaluation, checkpoints, and what to do when the loss goes bad.

    outcome = train(read("gpt2-d12"), Path("runs/first"))
    train(read("gpt2-d12"), Path("runs/first"), resume=True)       # from the newest good checkpoint

A step is whet.compile_step's: the plan is chosen at the first batch. Losses are read from the device when they are logged.
"""

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from whet import machine
from whet.lock import Lock
from whet.measure import ceilings, now
from whet.step import CompiledStep, compile_step
from whet.train import checkpoint
from whet.train.build import TrainedModel, built, checkpoint_blocks
from whet.train.data import Loader, Shards
from whet.train.distributed import Processes, plain, processes
from whet.train.kernels import KernelChoices, select
from whet.train.log import FORMAT, RUN, RunLog, step_line
from whet.train.optim import Ema, MuonAdamW, make
from whet.train.recipe import TrainRecipe
from whet.train.schedule import set_lr
from whet.train.watch import Diverged, first_bad_module, gone_bad
from whet.workload import Workload, find_loss, in_precision

RETUNE_S = 0.05  # of timing for each candidate, while the run waits


@dataclass
class TrainOutcome:
    """How a run ended."""

    folder: Path
    step: int
    loss: float
    val_loss: float | None
    tokens: int
    seconds: float


@dataclass
class Training:
    """Everything that a run holds while it runs."""

    recipe: TrainRecipe
    made: TrainedModel
    shards: Shards
    loader: Loader
    optimizer: MuonAdamW
    log: RunLog
    world: Processes
    device: str
    progress: Callable[[str, int, int], None]
    kernels: KernelChoices = field(default_factory=KernelChoices)
    ema: Ema | None = None
    stepper: CompiledStep | None = None
    step: int = 0
    counted: tuple[int, int] = (0, 0)  # the step that this process went on from, and the tokens until there
    time_s: float = 0.0
    first_loss: float | None = None
    last_loss: float = math.nan
    val_loss: float | None = None
    example: dict = field(default_factory=dict)  # a batch, for choosing kernels and plans
    ceiling: float | None = None  # FLOP/s of a product in the run's precision, measured

    @property
    def autocast(self) -> str | None:
        """The precision that is set around the forward; None: the weights have it."""
        return None if self.recipe.train.precision == "bfloat16-weights" else self.recipe.train.precision

    def set(self) -> contextlib.AbstractContextManager:
        """That precision, while the block runs."""
        return in_precision(self.autocast, self.device) if self.autocast else contextlib.nullcontext()

    @property
    def folder(self) -> Path:
        return self.log.folder / "checkpoints"

    @property
    def tokens(self) -> int:
        return self.tokens_at(self.step)

    def tokens_at(self, step: int) -> int:
        """A run may go on with other batches: what is behind it keeps its count."""
        return self.counted[1] + (step - self.counted[0]) * self.recipe.tokens_per_step

    def batch(self, loader: Loader) -> dict[str, torch.Tensor]:
        found = self.made.inputs(loader.next())
        return {k: t.to(self.device, non_blocking=True) for k, t in found.items()}


def train(
    recipe: TrainRecipe, folder: Path, resume: bool = False, lock: Lock | None = None,
    say: Callable[[str], None] = print, progress: Callable[[str, int, int], None] = lambda text, done, total: None,
) -> TrainOutcome:
    """Train by the recipe into a run folder. ValueError in one line for whatever is wrong before step 0; Diverged after."""
    with processes(recipe.dist.mode) as world:
        run = prepared(recipe, folder, world, resume, say, progress)
        try:
            found = resumed(run) if resume else None
            with torch.random.fork_rng([torch.cuda.current_device()] if run.device == "cuda" else []):
                started(run, found, resume, lock)
            looped(run)
            return TrainOutcome(folder, run.step, run.last_loss, run.val_loss, run.tokens, run.time_s)
        finally:
            run.log.close()


def prepared(
    recipe: TrainRecipe, folder: Path, world: Processes, resume: bool, say: Callable, progress: Callable
) -> Training:
    """Data, model and optimizer, checked against each other."""
    if (folder / RUN).exists() and not resume:
        raise ValueError(f"train: {folder} holds a run already; go on with --resume, or name another with --run")
    device, t = world.device, recipe.train
    shards = Shards(recipe.data.path or None, recipe.data.val)
    loader = Loader(shards, t.batch_size, t.seq_len, world.rank, world.size, t.seed)
    meta = shards.meta or {}
    torch.manual_seed(t.seed)
    made = built(recipe, device, meta.get("vocab"))
    if meta.get("vocab", math.inf) > made.vocab:
        shards.check_vocab(made.vocab)
    if recipe.model.path:  # in training alone: what is exported keeps its own setting
        made.model.config.use_cache = False  # type: ignore[union-attr]
    if world.mode == "fsdp" and (t.optimizer == "muon" or t.ema):
        raise ValueError("train: dist.mode=fsdp has no Muon and no averaged weights: both need whole matrices; use ddp")
    made.model = world.wrapped(made.model)
    log = RunLog(folder, world.rank == 0, say)
    optimizer = make(made.model, recipe.optim)
    if recipe.run.val_batches and (held := shards.sequences("val", t.seq_len)) < world.size:
        log.say(f"no validation: {held} sequences of {t.seq_len} + 1 tokens are held out; raise data.val")
    run = Training(recipe, made, shards, loader, optimizer, log, world, device, progress)
    run.ema = Ema(plain(made.model), t.ema, optimizer) if t.ema else None
    return run


def resumed(run: Training) -> Path | None:
    """The newest good checkpoint, loaded; None where the run made none yet."""
    found = checkpoint.newest(run.folder, run.log.say)
    if found is not None:
        restored(run, found)
    elif there := sorted(p.name for p in run.folder.glob("step-*")):
        why = checkpoint.fault(run.folder / there[-1])
        raise ValueError(f"train: no checkpoint in {run.folder} is good: {there[-1]}: {why}; move them away to begin anew")
    return found


def started(run: Training, found: Path | None, resume: bool, lock: Lock | None) -> None:
    """Kernels chosen, the step made, run.json written; all without the random numbers of the run. found: what was loaded."""
    recipe, t = run.recipe, run.recipe.train
    example = run.example = run.batch(Loader(run.shards, t.batch_size, t.seq_len, run.world.rank, run.world.size, t.seed))
    model = plain(run.made.model)
    blocks = checkpoint_blocks(model, example, t.checkpointed_blocks)
    tuned = run.device == "cuda" if recipe.kernels.tune is None else recipe.kernels.tune
    if recipe.model.path and tuned:
        optimized(run, example, lock)
    work = Workload(model, (), example, precision=run.autocast)
    run.kernels = select(work, tuned, recipe.kernels.force, lock or Lock.read(), run.progress)
    if run.kernels.by_mode:
        run.kernels.hand_to(model)
    if run.kernels.entries:
        for line in run.kernels.lines(f"{t.batch_size} x {t.seq_len}"):
            run.log.say(line)
    elif not tuned:
        run.log.say("kernels: PyTorch's own calls" + ("" if run.device == "cuda" else ", since there is no GPU to choose for"))
    if run.device == "cuda" and t.precision != "tf32":  # whose ceiling is not measured
        run.ceiling = ceilings().tflops.get("bfloat16" if t.precision.startswith("bfloat16") else "float32", 0.0) * 1e12 or None
    facts = {
        "format": FORMAT, "recipe": recipe.to_dict(), "machine": machine.this_machine().as_dict(), "commit": machine.commit(),
        "seed": t.seed, "world": run.world.size, "parameters": run.made.parameters, "model": run.made.facts,
        "data": {"fingerprint": run.shards.fingerprint(), "tokens": run.shards.total, "source": run.shards.source},
        "choices": run.kernels.table(), "checkpointed_blocks": blocks,
    }
    run.log.start(facts, recipe.run.tensorboard, recipe.run.wandb)
    run.log.choices(str(run.kernels.table()), {"parameters": run.made.parameters})
    if resume:
        run.log.cut_back(run.step)
        if run.world.rank == 0:
            checkpoint.remove_after(run.folder, run.step)
        run.log.event(run.step, "resume", f"resumed from {found.name}" if found else "no good checkpoint: from the beginning")
    run.stepper = compile_step(
        run.made.model, run.optimizer, loss=scaled(t.accumulate), clip=t.clip or None, precision=run.autocast,
        plans=recipe.kernels.plan == "auto" and run.device == "cuda", log_to=ToLog(run.log, lambda: run.step),
    )
    planned(run)
    run.log.facts(facts | {"choices": run.kernels.table(), "plan": str(run.stepper.report)})


def planned(run: Training) -> None:
    """The step's plan chosen, and with it the mode whose kernels serve."""
    assert run.stepper is not None
    run.stepper.prepare(run.example)
    run.kernels.used = next(iter(run.stepper.served.values())).plan.mode


class ToLog:
    """Where compile_step writes its choices: into the run's log, by the names of a TensorBoard writer."""

    def __init__(self, log: RunLog, step: Callable[[], int]):
        self.log, self.step = log, step

    def add_text(self, name: str, text: str) -> None:
        self.log.event(self.step(), "plan", f"plan: {text}")

    def add_scalar(self, *_) -> None: ...


def optimized(run: Training, example: dict, lock: Lock | None) -> None:
    """A Hugging Face model's own parts replaced where that is proved and faster."""
    from whet.swap._optimize import optimize

    with run.set():
        report: Any = optimize(plain(run.made.model), example, lock=lock or Lock.read(), progress=run.progress).whet
    for line in str(report).splitlines():
        run.log.say(line)


def scaled(accumulate: int) -> Callable | None:
    """The loss of one of several forwards whose gradients are added up: their mean is that of one large batch."""
    if accumulate == 1:
        return None

    def share(out):
        loss = find_loss(out)
        assert loss is not None
        return loss / accumulate

    return share


def restored(run: Training, path: Path) -> None:
    """The state of a checkpoint; of the optimizer's settings those of the recipe, which may have changed since, count."""
    groups = run.optimizer.param_groups
    settings = [{k: v for k, v in group.items() if k != "params"} for group in groups]
    state = run.world.load(path, run.made.model, run.optimizer, run.ema)
    for group, mine in zip(groups, settings):
        group.update(mine)
    if state["fingerprint"] != run.shards.fingerprint():
        raise ValueError(f"train: {path} was trained on other data; resume with that, or start another run")
    for key in ("seq_len", "seed"):
        was, now_set = state["recipe"]["train"][key], getattr(run.recipe.train, key)
        if was != now_set:
            fix = f"the order of the data would be another; resume with {was}, or start another run"
            raise ValueError(f"train: {path} was trained with train.{key} {was}, and the recipe has {now_set}: {fix}")
    run.step, run.time_s, run.first_loss = state["step"], state["time_s"], state["first_loss"]
    run.counted, run.last_loss, run.val_loss = (run.step, state["tokens"]), state["loss"], state["val_loss"]
    run.loader.load_state(state["loader"])


def looped(run: Training) -> None:
    """Steps until the last one; what is due after a step is done with the losses read and the clock stopped."""
    r, steps = run.recipe.run, run.recipe.train.steps
    pending: list[tuple[int, torch.Tensor, float]] = []
    if run.device == "cuda":
        torch.cuda.reset_peak_memory_stats()  # choosing kernels and plans held copies
    began = now()
    while run.step < steps:
        lr = set_lr(run.optimizer, run.recipe.schedule, run.step)
        pending.append((run.step + 1, one_step(run), lr))
        run.step += 1
        due = {name: bool(every) and run.step % every == 0 or run.step == steps for name, every in (
            ("log", r.log_every), ("val", r.val_every), ("save", r.save_every), ("retune", run.recipe.kernels.retune_every))}
        due["retune"] &= run.step < steps
        if run.device == "cpu" or any(due.values()):
            flushed(run, pending, began, due["log"])
            pending, began = [], now()
        if due["val"]:
            evaluated(run)
        if due["save"]:
            saved(run)
        if due["retune"]:
            retuned(run)
        if any(due.values()):
            began = now()


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


def flushed(run: Training, pending: list[tuple[int, torch.Tensor, float]], began: float, shown: bool) -> None:
    """The losses of these steps read, logged and looked at; Diverged where one is bad."""
    losses = run.world.mean(torch.stack([loss for _, loss, _ in pending])).tolist()
    took = now() - began
    run.time_s += took
    per_step, r = took / len(pending), run.recipe
    tok_s = r.tokens_per_step / per_step
    flops = run.made.flops_per_token(r.train.seq_len) * tok_s
    mfu = flops / run.ceiling / run.world.size if run.ceiling else None
    memory = torch.cuda.max_memory_allocated() / 2**20 if run.device == "cuda" else None
    norm = grad_norm(run)
    for (step, _, lr), loss in zip(pending, losses):
        run.first_loss = loss if run.first_loss is None else run.first_loss
        run.last_loss = loss
        at = dict(
            step=step, tokens=run.tokens_at(step), loss=loss, lr=lr, grad_norm=norm if step == run.step else None,
            ms=round(1e3 * per_step, 3), tok_s=round(tok_s, 1),
            mfu=None if mfu is None else round(mfu, 4), memory_mib=None if memory is None else round(memory),
            time_s=round(run.time_s - per_step * (pending[-1][0] - step), 3),
        )
        run.log.write(kind="step", **at)
        if why := gone_bad(loss, run.first_loss):
            stopped(run, step, why)
    if norm is not None and not math.isfinite(norm):  # the weights are spoilt now: nothing is saved of them
        stopped(run, run.step, f"the norm of the gradients is {norm}")
    if shown:
        run.log.say(step_line(at | dict(steps=r.train.steps, left_s=per_step * (r.train.steps - run.step))))


def grad_norm(run: Training) -> float | None:
    """Of the last step's gradients, before they were clipped; None where they are not."""
    found = run.stepper.norm if run.stepper is not None else None
    if found is None:
        return None
    return (found.full_tensor() if isinstance(found, DTensor) else found).item()


def stopped(run: Training, step: int, why: str) -> None:
    """The run ends: with the newest good checkpoint, and the first module whose result is not finite."""
    where = first_bad_module(plain(run.made.model), run.batch(run.loader), run.autocast, run.device)
    good = checkpoint.newest(run.folder, lambda line: None)
    left = f"the last good checkpoint is {good}" if good else "there is no checkpoint yet"
    text = f"stopped at step {step}: {why}; {where}; {left}. Lower train.lr, lengthen train.warmup, or lower train.clip"
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
    loader = Loader(run.shards, size, r.train.seq_len, run.world.rank, run.world.size, split="val")
    model = run.made.model.eval()
    losses = []
    with run.ema.swapped() if run.ema is not None else contextlib.nullcontext():
        for _ in range(count):
            batch = run.batch(loader)
            with run.set():
                loss = find_loss(model(**batch))
            assert loss is not None
            losses.append(loss.float())
    model.train()
    run.val_loss = run.world.mean(torch.stack(losses)).mean().item()
    run.log.write(
        kind="val", step=run.step, tokens=run.tokens, loss=run.val_loss, time_s=round(run.time_s, 3), sequences=count * size
    )
    run.log.say(f"step {run.step}/{r.train.steps}  validation loss {run.val_loss:.4f} over {count * size} sequences")


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
