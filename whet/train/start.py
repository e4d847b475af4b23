"""The start of a training run: data, model, optimizer, a checkpoint to go on from, the kernels and the plan of its step."""

import contextlib
import math
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from whet import machine
from whet.interrupts import StopSignal
from whet.lock import Lock
from whet.measure import ceilings
from whet.step import CompiledStep, compile_step
from whet.step_plans import AS_IT_IS
from whet.train import checkpoint
from whet.train.build import TrainedModel, built, checkpoint_blocks, config_of
from whet.train.data import Loader, Shards
from whet.train.distributed import Processes, plain
from whet.train.kernels import KernelChoices, select
from whet.train.log import FORMAT, RUN, RunLog
from whet.train.optim import Ema, MuonAdamW, make
from whet.train.recipe import TrainRecipe
from whet.train.runs import DamagedFacts, read_facts
from whet.train.tasks import GPTasks, TaskLoader
from whet.workload import Workload, find_loss, in_precision

IN_STATE = {"loader", "tokens", "time_s", "first_loss", "recipe", "model", "fingerprint", "loss", "val_loss"}  # of a checkpoint
STARTING = 2  # steps in which a step is compiled and captured


@dataclass
class Training:
    """Everything that a run holds while it runs."""

    recipe: TrainRecipe
    made: TrainedModel
    shards: Shards | GPTasks
    loader: Loader | TaskLoader
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
    watched: bool = True  # whether a bad loss ends it
    starting: int = 0  # steps until all is compiled and captured
    asked: StopSignal = field(default_factory=StopSignal)  # by a signal to this process
    stop: int = 0  # the signal that ends the run, once all processes know of it
    step_s: float = 0.0  # of the steps that were read last
    agree_every: int = 10  # steps between two looks at each other's signals
    ceiling: float | None = None  # FLOP/s of a product in the run's precision, measured

    @property
    def autocast(self) -> str | None:
        """The precision that is set around the forward; None: the weights have it."""
        return None if self.recipe.train.precision == "bfloat16-weights" else self.recipe.train.precision

    def set(self) -> contextlib.AbstractContextManager:
        """That precision, while the block runs."""
        return in_precision(self.autocast, self.device) if self.autocast else contextlib.nullcontext()

    @property
    def reads_at_once(self) -> bool:
        """Whether losses are read after each step: a CPU has computed them by then."""
        return self.device == "cpu"

    @property
    def folder(self) -> Path:
        return self.log.folder / "checkpoints"

    @property
    def tokens(self) -> int:
        return self.tokens_at(self.step)

    def tokens_at(self, step: int) -> int:
        """A run may go on with other batches: what is behind it keeps its count."""
        return self.counted[1] + (step - self.counted[0]) * self.recipe.tokens_per_step

    def batch(self, loader: Loader | TaskLoader) -> dict[str, torch.Tensor]:
        found = self.made.inputs(loader.next())
        return {k: t.to(self.device, non_blocking=True) for k, t in found.items()}


def check_folder(folder: Path, resume: bool) -> None:
    """ValueError where a run cannot be in this folder."""
    try:
        there, wrong = (folder / RUN).exists(), folder.exists() and not folder.is_dir()
    except OSError as e:
        raise ValueError(f"train: {folder} cannot be a run's folder: {e.strerror}; name another with --name") from None
    if wrong:
        raise ValueError(f"train: {folder} is a file, and a run is a folder; name another with --name")
    above = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        why = "is write-protected" if above.is_dir() else "is no folder"
        raise ValueError(f"train: {folder} cannot be a run's folder: {above} {why}; name another with --name or --runs")
    if there and not resume:
        raise ValueError(f"train: {folder} holds a run already; go on with --resume, or name another with --name")


def prepared(
    recipe: TrainRecipe, folder: Path, world: Processes, resume: bool, say: Callable, progress: Callable
) -> Training:
    """Data, model and optimizer, checked against each other."""
    check_folder(folder, resume)
    if recipe.model.path and recipe.kernels.force:
        raise ValueError("train: kernels.force is for models of whet's own; a folder's parts are chosen by whet.optimize")
    device, t = world.device, recipe.train
    shards = source_of(recipe, device)
    loader = shards.loader(t.batch_size, t.seq_len, world.rank, world.size, t.seed)
    meta = shards.meta or {}
    torch.manual_seed(t.seed)
    made = built(recipe, device, meta.get("vocab"))
    if isinstance(shards, Shards) and (not shards.whole or meta.get("vocab", math.inf) > made.vocab):  # one of another making
        shards.check_vocab(made.vocab)
    if isinstance(shards, Shards):
        shards.vocab = made.vocab
    if recipe.model.path:  # in training alone: what is exported keeps its own setting
        made.model.config.use_cache = False  # type: ignore[union-attr]
    made.model = world.wrapped(made.model)
    log = RunLog(folder, world.rank == 0, say)
    if made.note and not resume:
        log.say(f"model.path: {made.note}")
    log.packages(recipe.run.tensorboard, recipe.run.wandb)  # before kernels are chosen, which takes minutes
    optimizer = make(made.model, recipe.optim)
    if recipe.run.val_batches and (held := shards.sequences("val", t.seq_len)) < world.size:
        log.say(f"no validation: {held} sequences of {t.seq_len} + 1 tokens are held out; raise data.val")
    run = Training(recipe, made, shards, loader, optimizer, log, world, device, progress)
    run.ema = Ema(plain(made.model), t.ema, optimizer) if t.ema else None
    return run


def source_of(recipe: TrainRecipe, device: str) -> Shards | GPTasks:
    """Where batches come from; a model that takes something else is refused before anything is opened."""
    if not recipe.model.path:
        config_of(recipe, None)
    if recipe.data.tasks:
        return GPTasks(recipe.data.context, device)
    return Shards(recipe.data.path or None, recipe.data.val)


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
    example = run.example = run.batch(run.shards.loader(t.batch_size, t.seq_len, run.world.rank, run.world.size, t.seed))
    model = plain(run.made.model)
    blocks = checkpoint_blocks(model, example, t.checkpointed_blocks)
    chosen(run, example, lock)
    if run.device == "cuda" and t.precision != "tf32":  # whose ceiling is not measured
        run.ceiling = ceilings().tflops.get("bfloat16" if t.precision.startswith("bfloat16") else "float32", 0.0) * 1e12 or None
    earlier = earlier_facts(run.log) if resume and (run.log.folder / RUN).exists() else {}
    facts = {
        "format": FORMAT, "id": earlier.get("id") or secrets.token_hex(6),
        "recipe": recipe.to_dict(), "machine": machine.this_machine().as_dict(), "commit": machine.commit(),
        "seed": t.seed, "world": run.world.size, "parameters": run.made.parameters, "model": run.made.facts,
        "data": {"fingerprint": run.shards.fingerprint(), "tokens": run.shards.total, "source": run.shards.source},
        "choices": run.kernels.table(), "checkpointed_blocks": blocks,
    }
    run.log.start(facts, recipe.run.tensorboard, recipe.run.wandb, run.step)
    run.log.choices(str(run.kernels.table()), {"parameters": run.made.parameters})
    if resume:
        run.log.cut_back(run.step)
        if run.world.rank == 0:
            checkpoint.remove_after(run.folder, run.step)
        text = f"resumed from {found.name}" if found else f"{run.folder} has no checkpoint: from the beginning"
        run.log.event(run.step, "resume", text + changed_since(earlier.get("recipe", {}), recipe.to_dict()))
        if run.step >= t.steps:
            run.log.say(f"nothing is left to train: train.steps is {t.steps}")
    run.stepper = compile_step(
        run.made.model, run.optimizer, loss=scaled(t.accumulate), clip=t.clip or None, precision=run.autocast,
        plans=plans_of(run), log_to=ToLog(run.log, lambda: run.step),
    )
    planned(run)
    run.log.facts(facts | {"choices": run.kernels.table(), "plan": str(run.stepper.report)})


def chosen(run: Training, example: dict, lock: Lock | None) -> None:
    """The kernels of the run, and what there is to say of them."""
    recipe, t, model = run.recipe, run.recipe.train, plain(run.made.model)
    tuned = run.device == "cuda" if recipe.kernels.tune is None else recipe.kernels.tune
    if tuned and run.device == "cpu":
        how = "which takes minutes, once: the lock keeps what is found; without --tune PyTorch's own calls serve"
        run.log.say(f"kernels: PyTorch's and torch.compile's are timed on this CPU, {how}")
    if recipe.model.path and tuned and run.world.mode == "fsdp":
        run.log.say("kernels: the folder's own parts, since whet.optimize proves them on whole weights, and these are sharded")
    elif recipe.model.path and tuned:
        optimized(run, example, lock)
    work = Workload(model, (), example, precision=run.autocast)
    run.kernels = select(work, tuned, recipe.kernels.force, Lock.of(lock), run.progress)
    if run.kernels.by_mode:
        run.kernels.hand_to(model)
    if run.kernels.entries:
        for line in run.kernels.lines(f"{t.batch_size} x {t.seq_len}"):
            run.log.say(line)
    elif not tuned:
        run.log.say("kernels: PyTorch's own calls" + ("" if run.device == "cuda" else ", since there is no GPU to choose for"))
    for line in run.kernels.forced_lines():
        run.log.say(line)
    if recipe.kernels.retune_every and not run.kernels.tuned:
        run.log.say("kernels.retune_every does nothing here: no kernels were chosen that could be timed again")


def earlier_facts(log: RunLog) -> dict:
    """What run.json says of the run that is resumed; the checkpoints hold all that it needs."""
    try:
        return read_facts(log.folder)
    except DamagedFacts:
        log.say(f"{log.folder / RUN} is damaged, and is written anew")
        return {}


def changed_since(before: dict, recipe: dict) -> str:
    """', with train.lr 0.001, which was 0.002': what a resumed run does not do as it began."""
    found = []
    for part, values in recipe.items():
        old = before.get(part)
        if isinstance(values, dict) and isinstance(old, dict):
            now, was = ({key: of.get(key) if of.get(key) != "" else "''" for key in values} for of in (values, old))
            found += [f"{part}.{key} {v}, which was {was[key]}" for key, v in now.items() if was[key] != v]
    return f", with {'; '.join(found)}" if found else ""


def plans_of(run: Training) -> bool | tuple[str, ...]:
    """What compile_step is to try."""
    plan = run.recipe.kernels.plan
    if run.device != "cuda" and plan not in ("auto", AS_IT_IS.name):
        run.log.say(f"kernels.plan={plan} does not serve here: it needs a GPU; the step runs as it is")
    if run.device != "cuda" or plan == AS_IT_IS.name:
        return False
    return True if plan == "auto" else (plan,)


def planned(run: Training) -> None:
    """The step's plan chosen, and with it the mode whose kernels serve."""
    assert run.stepper is not None
    run.stepper.prepare(run.example)
    run.starting = STARTING if run.device == "cuda" else 0
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
        report: Any = optimize(plain(run.made.model), example, lock=Lock.of(lock), progress=run.progress).whet
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
    if why := misfit(run, checkpoint.state_of(path)):
        other = checkpoint.newest(run.folder, lambda line: None, lambda p: not misfit(run, checkpoint.state_of(p)))
        fits = f"; {other.name} is of this one: move {path.name} away to go on from it" if other else ""
        raise ValueError(f"train: {path} {why}{fits}")
    groups = run.optimizer.param_groups
    settings = [{k: v for k, v in group.items() if k != "params"} for group in groups]
    state = run.world.load(path, run.made.model, run.optimizer, run.ema)
    for group, mine in zip(groups, settings):
        group.update(mine)
    run.step, run.time_s, run.first_loss = state["step"], state["time_s"], state["first_loss"]
    run.counted, run.last_loss, run.val_loss = (run.step, state["tokens"]), state["loss"], state["val_loss"]
    run.loader.load_state(state["loader"])


def misfit(run: Training, state: dict) -> str:
    """Why this run cannot go on from a checkpoint with this state; empty where it can."""
    if missing := sorted(IN_STATE - set(state)):
        return f"is no checkpoint of `whet train`: its state has no {missing[0]}; start another run"
    part, mine = state["recipe"]["model"], run.recipe.model
    was, wanted = part["path"] or part["name"], mine.path or mine.name
    if was != wanted and not (part["path"] and mine.path):  # a folder may have moved
        return f"is of {was}, and the recipe's model is {wanted}; resume with the recipe it began with, or start another run"
    if state["fingerprint"] != run.shards.fingerprint():
        return "was trained on other data; resume with that, or start another run"
    for key, now in run.made.facts.items():
        if key != "path" and (before := state["model"].get(key, now)) != now:
            fix = f"resume with --set model.{key}={before}, or start another run"
            return f"is of a model with {key} {before}, and the recipe's has {now}; {fix}"
    for key in ("seq_len", "seed"):
        before, now = state["recipe"]["train"][key], getattr(run.recipe.train, key)
        if before != now:
            fix = f"the order of the data would be another; resume with {before}, or start another run"
            return f"was trained with train.{key} {before}, and the recipe has {now}: {fix}"
    return ""
