"""Parameters followed through one more step of a target: which op, forward or backward, loses their gradient.

Forward, the values of each parameter are followed from op to op by the memory they lie in: where they go on without asking for
a gradient, the graph is cut. Backward, the nodes are watched: the first that takes a sound gradient and hands on none, zeros or
NaN is the culprit.
"""

import contextlib
import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from whet.diagnose.modules import Modules, tensors_in
from whet.diagnose.target import Target
from whet.diagnose.watch import MODELS, PACKAGES, THEIRS, compiler_off, restored, starts_step, state_of, users_line
from whet.workload import find_loss

STATES = {"none": "no gradient", "zero": "a gradient of zeros", "nan": "a gradient that is not finite"}
FORMULALESS = "an op without an autograd formula"
TAKES_OUT = frozenset((torch.Tensor.detach, torch.Tensor.detach_, torch.Tensor.data.__get__))  # type: ignore[attr-defined]
FILLS = ("full", "fill", "where", "scalar_tensor", "empty", "copy", "index_put", "masked", "lift_fresh", "pad")
NUDGE = 0.02  # drawn for weights of zeros: such a start (LoRA, adaLN-zero) blocks gradients for the first step alone, by design


@dataclass
class MadeTensor:
    """The op that last wrote a piece of memory."""

    at: int
    op: str
    line: str
    module: str
    differentiable: bool  # floating point
    recorded: bool  # grad mode was on, or an autograd.Function stands for it
    region: str  # where grad mode was switched off, for what was made there


@dataclass
class Cut:
    what: str
    does: str
    line: str
    fix: str
    state: str = "none"
    wrong: bool = True
    modules: dict[str, None] = field(default_factory=dict)
    bits: int = 0
    differentiable: bool = True
    cause: str = ""  # the whole sentence, where it is not "what, at line, does"


class Detaches(TorchFunctionMode):
    """Whether a detach is one that Python code asks for: autograd detaches by itself what a node keeps of its own output."""

    asked = False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        before, self.asked = self.asked, self.asked or func in TAKES_OUT
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.asked = before


@dataclass
class NotFinite:
    """The first tensor of a forward that is not finite, and the op that read or made it."""

    what: str  # "the parameter a.weight", "the input x", "the result of aten::sqrt"
    does: str
    by: MadeTensor


class Flow(TorchDispatchMode):
    """Follows parameters through a forward by storage. A set of parameters is an int, one bit each; so is a set of cuts."""

    def __init__(self, modules: Modules, bits: dict[int, int], names: dict[int, str] | None = None):
        super().__init__()
        self.modules, self.at, self.region = modules, 0, ""
        self.names, self.detaches = names or {}, Detaches()  # names: storage -> "the parameter a.weight"
        self.alive = dict(bits)  # storage -> parameters whose gradient can still come back through it
        self.past: dict[int, int] = {}  # storage -> cuts that its values have gone through
        self.made: dict[int, MadeTensor] = {}
        self.detached: dict[int, MadeTensor] = {}
        self.cuts: dict[tuple[str, str], Cut] = {}
        self.used = 0
        self.customs: dict[str, str] = {}  # line -> op that is not torch's
        self.last: dict[int, MadeTensor] = {}  # set of parameters -> the last op that read them
        self.bad: NotFinite | None = None
        self.dead: MadeTensor | None = None  # the first that made zeros alone of numbers that parameters gave

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if torch._C._current_autograd_node() is not None:
            return func(*args, **kwargs)
        given = [t for t in tensors_in((args, kwargs)) if t.layout == torch.strided]
        inputs = [(t.untyped_storage()._cdata, t.requires_grad) for t in given]
        worst = max(map(badness, given), default=0)
        lively = any(self.alive.get(s) and t.is_floating_point() and bool(t.any()) for t, (s, _) in zip(given, inputs))
        out = func(*args, **kwargs)
        self.at += 1
        inside, on = in_function(), torch.is_grad_enabled()
        line = users_line()
        self.region = "" if on or inside else self.region or line
        op, results = func._schema.name, [t for t in tensors_in(out) if t.layout == torch.strided]
        floating = all(t.is_floating_point() or t.is_complex() for t in results)
        made = MadeTensor(self.at, op, line, self.modules.path, floating, on or inside, self.region)
        if not op.startswith("aten::"):
            self.customs[line] = op
        if self.bad is None:
            self.bad = self.not_finite(made, worst, given, results)
        if lively and floating and results and not any(t.numel() < 2 or bool(t.any()) for t in results):
            self.dead = self.dead or made
        if op != "aten::detach" or self.detaches.asked:
            self.follow(made, inputs, [t.untyped_storage()._cdata for t in results], inside)
        return out

    def not_finite(
        self, made: MadeTensor, worst: int, given: list[torch.Tensor], results: list[torch.Tensor]
    ) -> NotFinite | None:
        """What is first read as NaN or infinity, or first made so: a parameter, an input, a result. -inf alone is a mask's."""
        if worst:
            bad = max(given, key=badness)
            what = self.names.get(bad.untyped_storage()._cdata)
            return NotFinite(what, f"is not finite in {count_bad(bad):,} of its {bad.numel():,} values", made) if what else None
        worst_made = max(map(badness, results), default=0)
        if not worst_made or any(word in made.op for word in FILLS):
            return None
        return NotFinite(made.op, f"makes {'a NaN' if worst_made > 1 else 'an infinity'} of finite numbers", made)

    def follow(self, made: MadeTensor, inputs: list[tuple[int, bool]], outputs: list[int], inside: bool) -> None:
        bits = past = 0
        for storage, needs in inputs:
            carried = self.alive.get(storage, 0)
            past |= self.past.get(storage, 0)
            if carried and not needs and not inside:
                past |= self.cut(storage, carried)
            else:
                bits |= carried
        self.used |= bits
        if bits:
            self.last[bits] = made
        known = {storage for storage, _ in inputs}
        for storage in outputs:
            if made.op == "aten::detach":
                self.detached[storage] = made
            elif storage not in known:
                self.alive[storage], self.past[storage], self.made[storage] = bits, past, made
            else:
                self.alive[storage] = self.alive.get(storage, 0) | bits
                self.past[storage] = self.past.get(storage, 0) | past

    def cut(self, storage: int, bits: int) -> int:
        """Note that these parameters end here; which cut it is, as a bit."""
        made, detached = self.made.get(storage), self.detached.get(storage)
        by, what, does, fix = blame(made, detached)
        line = by.region or by.line
        found = self.cuts.setdefault((line, what), Cut(what, does, line, fix, differentiable=by.differentiable))
        found.bits |= bits
        found.modules.setdefault(by.module)
        return 1 << list(self.cuts).index((line, what))

    def end(self, loss: torch.Tensor | None) -> int:
        """The cuts behind the loss, the loss itself taken as the last thing read."""
        if loss is None:
            return 0
        storage = loss.untyped_storage()._cdata
        carried = self.alive.get(storage, 0)
        past = self.past.get(storage, 0)
        return past | self.cut(storage, carried) if carried and not loss.requires_grad else past


def blame(made: MadeTensor | None, detached: MadeTensor | None) -> tuple[MadeTensor, str, str, str]:
    """(op to blame, its name, what it does, what to do instead) for memory whose gradient is lost."""
    freeze = "or set requires_grad to False on what is not to be trained"
    if made is not None and not made.differentiable:
        return made, made.op, "gives whole numbers, which carry no gradient", f"Put something differentiable there, {freeze}"
    if made is not None and not made.recorded:
        return made, "torch.no_grad()", "cuts the graph", f"Take the forward out of torch.no_grad(), {freeze}"
    if detached is not None:
        return detached, "a detach (.detach() or .data)", "cuts the graph", f"Take out the .detach() or .data, {freeze}"
    assert made is not None
    return made, made.op, "gives a result that asks for no gradient", f"Register an autograd formula for {made.op}, {freeze}"


def badness(t: torch.Tensor) -> int:
    """2 where there is a NaN, 1 where there is an infinity above zero, else 0: -inf is how a mask says never."""
    if not t.is_floating_point() or t.device.type == "meta" or not t.numel():
        return 0
    top = t.max()
    return 2 if top.isnan() else 1 if top == float("inf") else 0


def count_bad(t: torch.Tensor) -> int:
    return int((t.isnan() | (t == float("inf"))).sum())


def in_function() -> bool:
    """Whether an autograd.Function is in its forward, where grad mode is off and yet a graph is made."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "apply" and frame.f_code.co_filename.endswith("function.py"):
            return "torch" in frame.f_code.co_filename
        frame = frame.f_back  # type: ignore[assignment]
    return False


class Nodes:
    """The backward watched node by node: which turned a sound gradient into none, zeros or NaN."""

    def __init__(self, loss: torch.Tensor, modules: Modules, bits: dict[int, int]):
        self.cuts: list[Cut] = []
        self.paths: dict[object, str] = {}
        self.reach: dict[object, int] = {}
        waiting = [(loss.grad_fn, False)]
        while waiting:
            node, left = waiting.pop()
            if node is None or (node in self.reach and not left):
                continue
            below = [n for n, _ in node.next_functions if n is not None]
            if not left:
                self.reach[node] = bits.get(id(getattr(node, "variable", None)), 0)
                waiting += [(node, True), *((n, False) for n in below)]
                continue
            for n in below:
                self.reach[node] |= self.reach.get(n, 0)
            if self.reach[node] and not hasattr(node, "variable"):
                node.register_prehook(lambda _, node=node: self.paths.update({node: modules.path}))
                node.register_hook(lambda into, out, node=node: self.passed(node, into, out))

    def passed(self, node, into: Iterable, out: Iterable) -> None:
        """One node has run: `out` is the gradient that it was given, `into` what it hands on."""
        given = {state_of(g) for g in out if g is not None}
        if "ok" not in given or "nan" in given:
            return
        for grad, (below, _) in zip(into, node.next_functions):
            state = state_of(grad)
            if below is not None and state != "ok" and self.reach.get(below):
                name = node.name() if callable(getattr(node, "name", None)) else type(node).__name__
                fix = f"Look at {name}: what it hands on must be finite, and other than zero where its input counts"
                if name.endswith("NotImplemented"):
                    name, fix = FORMULALESS, "Register one with torch.library.register_autograd"
                where = {self.paths.get(node, ""): None}
                does = f"hands on {STATES[state]}"
                self.cuts.append(Cut(name, does, line_of(node), fix, state, modules=where, bits=self.reach[below]))


def line_of(node) -> str:
    """The user's line that made a node, from the traceback that anomaly mode keeps."""
    package = ""
    for frame in reversed(node.metadata.get("traceback_", [])):
        found = re.search(r'File "([^"]+)", line (\d+), in (\w*)', frame)
        if found and starts_step(found[1], found[3]):
            break
        if found and (not found[1].startswith(THEIRS) or found[1].startswith(MODELS)):
            line = f"{os.path.basename(found[1])}:{found[2]}"
            if not found[1].startswith(PACKAGES):
                return line
            package = package or line
    return package


@dataclass
class Trace:
    names: list[str]
    states: dict[str, str]
    flow: Flow
    behind: int  # cuts behind the loss
    nodes: Nodes | None
    loss: float | None

    def bit(self, name: str) -> int:
        return 1 << self.names.index(name)


def trace(target: Target, names: list[str], nudge: bool) -> Trace:
    """One more step, followed. Weights of zeros are drawn anew first where a gradient of zeros is to be explained."""
    named = dict(target.model.named_parameters())
    states = dict.fromkeys(names, "none")
    bits: dict[int, int] = {}
    by_id = {}
    for i, name in enumerate(names):
        storage = named[name].untyped_storage()._cdata
        bits[storage] = bits.get(storage, 0) | 1 << i
        by_id[id(named[name])] = 1 << i
    modules = Modules(target.model)
    flow, nodes, behind = Flow(modules, bits, tensor_names(target)), None, 0

    def note(p, name):
        states[name] = state_of(p.grad)

    with restored(target), compiler_off(), torch.enable_grad(), contextlib.ExitStack() as stack:
        if nudge:
            redraw(target.model)
        for name in names:
            named[name].grad = None
            stack.callback(named[name].register_post_accumulate_grad_hook(lambda p, name=name: note(p, name)).remove)
        with torch.autograd.set_detect_anomaly(True, check_nan=False), modules():
            with flow.detaches, flow:
                loss = find_loss(target.step_with()) if target.step_with else target.loss(target.forward())
                behind = flow.end(loss)
            if target.step_with is None and loss is not None and loss.requires_grad:
                nodes = Nodes(loss, modules, by_id)
                loss.backward()
        for p in named.values():
            p.grad = None
    return Trace(names, states, flow, behind, nodes, None if loss is None else float(loss.detach()))


def tensor_names(target: Target) -> dict[int, str]:
    """Storage -> what the user calls it: inputs, buffers, parameters."""
    given = [*((f"input {i}", a) for i, a in enumerate(target.args)), *((f"input {k}", v) for k, v in target.kwargs.items())]
    found = {t.untyped_storage()._cdata: f"the {name}" for name, value in given for t in tensors_in(value)}
    found |= {t.untyped_storage()._cdata: f"the buffer {name}" for name, t in target.model.named_buffers()}
    return found | {t.untyped_storage()._cdata: f"the parameter {name}" for name, t in target.model.named_parameters()}


@torch.no_grad()
def redraw(model: nn.Module) -> None:
    for p in model.parameters():
        if p.requires_grad and p.numel() and not p.any():
            p.normal_(std=NUDGE)
