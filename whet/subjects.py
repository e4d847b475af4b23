"""What plans are tried on: a model in whet/models, or the model and batch that a user's function returned."""

import collections
import functools
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import nn
from torch._guards import detect_fake_mode

from whet.choices import Choices, Recorder
from whet.diagnose.target import CannotRun, Target, raised_at, resolve
from whet.figures import error_line
from whet.machine import this_machine
from whet.measure import free_memory
from whet.models import Model, Recipe, find, recipe_of
from whet.op import Call
from whet.plan import BEFORE, Plan, compiled
from whet.plan_memory import moved, own_copy
from whet.swap import Journal, Met
from whet.swap import _memory as memory
from whet.swap._replace import recognise
from whet.torch_ops import own_code
from whet.workload import ROUNDING, Workload, asking, asks, coarsest_rounding, tensors_in, watched_dtypes

ORACLE_SCORES = {"cuda": 2**37, "cpu": 2**33}  # of attention in all layers, that float64 makes: by estimate a minute on an H200
SWAPPED = "swapped"  # the variant of a user's model in which proved parts are replaced
Evidence = dict[str, torch.Tensor]


class BuiltIn:
    """A model in whet/models, with its variants and the recipe that it is trained by.

    name, config, samples   what it is called, what describes it, how many samples one step takes
    kind, notes             "train" or "forward" (see Workload), and what could not be done as asked
    stored                  whether the name and the config say all of it, so that the lock's result may be used again
    part                    of a larger model, that is verified in its place: "1 of 12 layers"
    """

    kind, stored, lean, part = "train", True, False, ""

    def __init__(self, model: Model, config, recipe: Recipe, name: str = "", device: str = ""):
        self.model, self.sizes, self.recipe, self.name = model, config, recipe, name or model.name
        self.device = device or this_machine().device
        self.config, self.samples, self.notes = f"{config} {recipe}", recipe.batch, list[str]()
        self.made: dict[str, nn.Module] = {}

    @functools.cached_property
    def plain(self) -> Evidence:
        return {n: p.detach() for n, p in self.built(self.model.plain).named_parameters()}

    def built(self, variant: str, choices: Choices | None = None) -> nn.Module:
        """A module of its own with the first weights, which are drawn once for each variant; choices: what it asks."""
        (module,) = own_copy(self.first(variant))
        for part in asks(module) if choices is not None else ():
            part.ops = choices
        return module

    def first(self, variant: str) -> nn.Module:
        """The module of a variant that others are copied from; one of fake tensors, inside `predict`, is not kept."""
        if variant in self.made:
            return self.made[variant]
        made = moved(self.model.build(self.sizes, variant, Choices(), seed=self.recipe.seed), self.device)
        if detect_fake_mode() is None:
            self.made[variant] = made
        return made

    def proof(self) -> "BuiltIn":
        """What is verified in this one's place: the same with fewer layers, where float64 would make too many scores in all.

        The batch stays as it is, and so does every call of a layer that is left.
        """
        c, r, most = self.sizes, self.recipe, ORACLE_SCORES[self.device]
        of_a_layer = r.batch * getattr(c, "heads", 0) * r.seq_len * getattr(r, "context", r.seq_len)
        least, all_layers = len(getattr(c, "pattern", "")) or 1, getattr(c, "layers", 1)
        if all_layers * of_a_layer <= most or all_layers <= least:
            return self
        layers = max(least, most // of_a_layer)
        found = BuiltIn(self.model, replace(c, layers=layers), r, self.name, self.device)
        found.part, found.lean = f"{layers} of {all_layers} layers", True
        why = "attention of all has too many scores for float64, and before runs in the precision of the others"
        self.notes.append(f"verified with {found.part}, at the whole batch: {why}")
        self.before_in_less()
        return found

    def before(self) -> Plan:
        """As it runs without whet: plain formulas, or PyTorch's own calls where memory does not hold those."""
        return Plan(BEFORE, self.model.stock, "stock") if self.lean else Plan(BEFORE, self.model.plain, "eager")

    def before_in_less(self) -> bool:
        """From now on before() takes less memory; False: it cannot."""
        if self.lean:
            return False
        self.notes.append("before is the eager model with PyTorch's own calls: plain formulas take more memory than there is")
        self.lean = True
        return True

    def plans(self) -> list[Plan]:
        """Simplest first: a tie keeps the earlier. Each is also tried under a CUDA graph where there is a GPU."""
        plain = [Plan("eager", self.model.stock, "stock"), Plan("eager + choices", self.model.tuned, "tuned")]
        return plain + compiled(plain)

    @functools.cached_property
    def blocks(self) -> list[str]:
        """The paths of the repeated blocks, which may be computed again in the backward."""
        call = Met((), self.model.batch(self.sizes, self.recipe, self.device))
        return [path for path, _ in memory.blocks_of(self.built(self.model.tuned), call)]

    def calls(self, precision: str) -> list[tuple[Call, int]]:
        """The ops that one forward asks for, and how often."""
        module = self.built(self.model.tuned)
        work = Workload(module, (), self.model.batch(self.sizes, self.recipe, self.device), precision=precision)
        refuse_broken_weights(self.name.partition(":")[0], module)
        return work.calls()

    def rounding(self, precision: str) -> float | None:
        """The relative rounding step of the arithmetic inside, where it is coarser than the dtype of the results."""
        return ROUNDING[precision]

    def truth(self) -> Evidence:
        """The evidence of one step in float64."""
        module = self.built(self.model.plain, Choices(default="eager"))
        return in_float64(module, self.model.batch(self.sizes, self.recipe, self.device))

    def workload(self, plan: Plan, choices: Choices | None, precision: str) -> Workload:
        """A model of its own that runs by the plan. choices: None leaves the model's own."""
        module = self.built(plan.variant, choices)
        memory.compute_again(module, self.blocks[: plan.blocks] if plan.blocks else [])
        before = plan.name == BEFORE
        how: dict = dict(fused=None if before else True, capturable=not before and self.device == "cuda")
        return Workload(
            module, (), self.model.batch(self.sizes, self.recipe, self.device), precision=precision,
            optimizer=torch.optim.AdamW(module.parameters(), lr=self.recipe.lr, **how),
            run=torch.compile(own_code(module.forward), dynamic=False) if plan.compiled else None,
        )

    def weights(self, plan: Plan) -> Mapping[str, torch.Tensor]:
        """The parameters, and the buffers that a step changes, by the plan's names."""
        self.first(plan.variant)
        return self.model.adapt(self.sizes, plan.variant, self.plain)

    def canonical(self, gradients: Mapping) -> dict:
        """Gradients by the names that they have in the truth."""
        return self.model.canonical(self.sizes, gradients)


def oracle(model: Model, config, recipe: Recipe, weights: dict, device: str, rows: int | None = None) -> Evidence:
    """Loss and gradients of the plain variant with these weights in float64. rows: see in_float64."""
    module = model.build(config, model.plain, Choices(default="eager")).to(device)
    with torch.no_grad():
        for name, p in module.named_parameters():
            p.copy_(weights[name])
    return in_float64(module, model.batch(config, recipe, device), rows)


def in_float64(module: nn.Module, batch: dict, rows: int | None = None) -> Evidence:
    """The evidence of a module whose loss is the mean over the rows of a batch.

    rows   that run at once; None: all of them, and fewer where memory does not hold that
    """
    work, whole = Workload(module.double()), len(next(iter(batch.values())))
    at_once = rows or whole
    while True:
        try:
            return in_parts(work, batch, at_once)
        except torch.OutOfMemoryError:
            if rows or at_once == 1:
                raise
        work.clear()
        free_memory()
        at_once = next(n for n in range(at_once // 2, 0, -1) if whole % n == 0)


def in_parts(work: Workload, batch: dict, rows: int) -> Evidence:
    """in_float64, from equal parts of the batch."""
    whole = len(next(iter(batch.values())))
    if whole == rows:
        work.kwargs = batch
        return work.evidence()
    work.clear()
    losses = []
    for part in zip(*(t.split(rows) for t in batch.values())):
        loss = work.model(**dict(zip(batch, part))) * (rows / whole)
        loss.backward()
        losses.append(loss.detach())
    work.kwargs = {}
    return work.evidence(lambda: torch.stack(losses).sum())


def refuse_broken_weights(name: str, module: nn.Module) -> None:
    if bad := [n for n, p in module.named_parameters() if not torch.isfinite(p).all()]:
        raise ValueError(f"{name}: parameter {bad[0]} has NaN or infinite values ({len(bad)} such); fix them first")


@dataclass
class Given:
    """A model that nobody wrote for whet, with its batch and maybe its optimizer. It is asked what a BuiltIn is asked.

    What was given is copied, never run on.

    It runs as it is, under torch.compile and as a CUDA graph; plans with choices are there only where it asks a Choices,
    and swapped ones where a recogniser of whet/swap proved that an op computes what a part of it does.
    """

    target: Target
    stored: bool = field(default=False, init=False)
    makes = Workload  # what a copy becomes

    def __post_init__(self):
        t = self.target
        if t.step_with is not None:
            raise CannotRun(f"{t.name}: a step of your own cannot run on copies of the model; return model and batch")
        if isinstance(t.model, torch._dynamo.OptimizedModule):
            t.model = t.model._orig_mod
            t.notes.append("the model came compiled; it is taken as it was before, and compiled anew by its plans")
        self.name, self.device, self.kind, self.notes = t.name, t.device, t.kind, t.notes
        self.asks = bool(asks(t.model))
        refuse_broken_weights(self.name, t.model)
        self._without_chance()
        batched = [x for x in tensors_in((t.args, t.kwargs)) if x.dim()]
        self.samples = len(batched[0]) if batched else 1
        count = sum(p.numel() for p in t.model.parameters())
        shapes = ", ".join(str(tuple(x.shape)) for x in batched)
        self.config = f"{type(t.model).__name__}, {count:,} parameters, batch of {shapes or 'no tensors'}"

    def _without_chance(self) -> None:
        """Dropout is switched off: two plans draw different numbers, so their values could not be compared."""
        if not self._draws():
            return
        for module in self.target.model.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd):
                module.eval()
        self.notes.append("dropout is off, so that plans can be compared")
        if self._draws():
            raise CannotRun(
                f"{self.name}: a step draws random numbers, so no plan can be verified; "
                "set its dropout to 0, or return model.eval()"
            )

    def _draws(self) -> bool:
        """Whether a step moves the state of a random generator, found on a copy."""
        work, gpu = self._copy(), self.device == "cuda"
        with torch.random.fork_rng(range(torch.cuda.device_count()) if gpu else ()):
            before = [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if gpu else ())]
            self._tried(work.evidence, "the step")
            after = [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if gpu else ())]
        if self.kind == "train" and not work.gradients():
            raise CannotRun(f"{self.name}: no gradient reaches a parameter of a copy of the model, so nothing can be verified")
        return not all(map(torch.equal, before, after))

    def _tried(self, run: Callable[[], Evidence], what: str) -> Evidence:
        try:
            return run()
        except torch.OutOfMemoryError as e:
            raise CannotRun(f"{self.name}: out of memory in {what}: {str(e).splitlines()[0]}") from e
        except (Exception, SystemExit) as e:
            raise CannotRun(f"{self.name}: {what} raised {raised_at(e)}") from e

    def _copy(self) -> Workload:
        """Model, batch and optimizer anew, still belonging to each other; the optimizer without what it remembers of steps."""
        t = self.target
        try:
            model, args, kwargs, optimizer = own_copy(t.model, t.args, t.kwargs, t.optimizer)
        except Exception as e:
            raise CannotRun(f"{self.name}: the model cannot be copied: {raised_at(e)}") from e
        if optimizer is not None:
            optimizer.state.clear()
        return self.makes(
            model, args, kwargs, t.kind, optimizer, t.precision, loss_with=t.loss_with, around=t.around, clip=t.clip
        )

    def proof(self) -> "Given":
        return self

    def before(self) -> Plan:
        return Plan(BEFORE, "", "own")

    def before_in_less(self) -> bool:
        return False

    def plans(self) -> list[Plan]:
        tuned = [Plan("eager + choices", "", "tuned")] if self.asks else []
        tuned += [Plan("eager + swapped", SWAPPED, "tuned")] if self.swaps else []
        graph = [Plan("CUDA graph", "", "own", graph=True)] if self.device == "cuda" else []
        return [*graph, *tuned, *compiled([Plan("eager", "", "own"), *tuned])]

    @functools.cached_property
    def swaps(self) -> list[tuple[str, Callable]]:
        """(path, edits) of each part that an op computes, proved on a copy; edits(module, ops) replaces it in another."""
        work = self._copy()
        try:
            found = recognise(work.model, Met(work.args, work.kwargs), Choices(), train=work.kind == "train")
        except Exception as e:  # what cannot be recognised runs as it is
            self.notes.append(f"no part of the model was replaced: {error_line(e)}")
            return []
        if found.sites:
            kinds = collections.Counter(site.kind for site, _ in found.sites)
            shown = ", ".join(f"{kind} {n}" for kind, n in kinds.items())
            left = f"; left as they are: {len(found.left)}" if found.left else ""
            self.notes.append(f"swapped: parts that were proved on a copy: {shown}{left}")
        return [(site.path, site.edits) for site, _ in found.sites]

    @functools.cached_property
    def blocks(self) -> list[str]:
        """The paths of the repeated blocks, which may be computed again in the backward; none of a forward alone."""
        work = self._copy()
        return [path for path, _ in memory.blocks_of(work.model, Met(work.args, work.kwargs))] if self.kind == "train" else []

    def swap(self, model: nn.Module, ops: Choices) -> None:
        """Replace, in a copy of the model, what was proved."""
        for path, edits in self.swaps:
            Journal().make(edits(model.get_submodule(path), ops))

    def calls(self, precision: str) -> list[tuple[Call, int]]:
        if not self.asks and not self.swaps:
            return []
        work, recorder = replace(self._copy(), precision=asked(precision)), Recorder()
        self.swap(work.model, recorder)
        with asking(work.model, recorder), torch.set_grad_enabled(self.kind == "train"):
            work.forward()
        return list(recorder.calls.values())

    def rounding(self, precision: str) -> float | None:
        """Of the coarsest of what was asked for, what the process is set to, and what any module returns."""
        if precision != "float32":
            return ROUNDING[precision]
        work = self._copy()
        with torch.no_grad(), watched_dtypes(work.model) as found:
            work.forward()
        return coarsest_rounding(found)

    def truth(self) -> Evidence:
        return self._in_float64()

    def _in_float64(self, lean: Callable[[Workload], None] = lambda work: None) -> Evidence:
        """lean: called with the copy that runs, for one that takes less memory and computes the same."""
        work = self._copy()
        work.model.double()
        work.args, work.kwargs = torch.utils._pytree.tree_map_only(
            torch.Tensor, lambda t: t.double() if t.is_floating_point() else t, (work.args, work.kwargs)
        )
        for module in asks(work.model):
            module.ops = Choices(default="eager")
        work.optimizer = work.precision = None

        def run() -> Evidence:
            lean(work)
            return work.evidence()

        return self._tried(run, "the step in float64, which every plan is compared to,")

    def workload(self, plan: Plan, choices: Choices | None, precision: str) -> Workload:
        work = self._copy()
        for module in asks(work.model) if choices is not None else ():
            module.ops = choices
        if plan.variant == SWAPPED and choices is not None:
            self.swap(work.model, choices)
        memory.compute_again(work.model, self.blocks[: plan.blocks] if plan.blocks else [])
        for group in work.optimizer.param_groups if work.optimizer and self.device == "cuda" and plan.name != BEFORE else ():
            if "capturable" in group:
                group["capturable"] = True
        work.precision = asked(precision)
        if plan.compiled:
            work.run = compiled_forward(work.model)
        return work

    def weights(self, plan: Plan) -> Mapping[str, torch.Tensor]:
        return {n: t.detach() for n, t in (*self.target.model.named_parameters(), *self.target.model.named_buffers())}

    def canonical(self, gradients: Mapping) -> dict:
        return dict(gradients)


def compiled_forward(model: nn.Module) -> Callable:
    """The model's forward under torch.compile, with a cache of its own where nothing is hooked around it."""
    alone = isinstance(model.forward, types.MethodType) and not model._forward_hooks and not model._forward_pre_hooks
    return torch.compile(own_code(model.forward) if alone else model, dynamic=False)


Subject = BuiltIn | Given


def subject_of(target: str) -> Subject:
    """'tiny-llama:small', 'gpt2:d12@4x512', or 'file.py:function' as `whet doctor` understands it."""
    path, _, function = target.partition(":")
    if path.endswith(".py"):
        if not function:
            raise CannotRun(f"{target}: optimize runs no script; name a function that returns model and batch: {path}:function")
        return Given(resolve(target))
    model, size = find(target)
    _, at, batch = target.partition("@")
    return BuiltIn(model, model.sizes[size], recipe_of(target), f"{model.name}:{size}{at}{batch}")


def asked(precision: str) -> str | None:
    """What a user's workload is set to: float32 is whatever its file has set."""
    return None if precision == "float32" else precision
