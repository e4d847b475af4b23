"""One step seen op by op: what each read and wrote, in which module, from which line of the user's code."""

import contextlib
import copy
import os
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from whet.diagnose.modules import Modules, tensors_in, watched_step
from whet.diagnose.target import Target

HERE = os.path.dirname(os.path.abspath(__file__))
OURS = os.path.dirname(HERE)
THEIRS = tuple({os.path.dirname(torch.__file__), sysconfig.get_paths()["stdlib"], OURS, "<"})
MODELS = os.path.join(OURS, "models")
PACKAGES = sysconfig.get_paths()["purelib"]
EVAL_FRAME = os.path.join(os.path.dirname(torch.__file__), "_dynamo", "eval_frame.py")  # a frame of it is around compiled code
SYNCS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::equal", "aten::masked_select")


@dataclass(frozen=True)
class Seen:
    """A tensor as an op met it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...]
    device: str
    storage: int  # which memory: two tensors of one storage are views of one another
    name: str = ""  # the parameter's name, where it is one
    offset: int = 0  # where in that memory it begins, in elements

    @property
    def numel(self) -> int:
        n = 1
        for size in self.shape:
            n *= size
        return n

    @property
    def bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def contiguous(self) -> bool:
        """Whether it lies in memory in the order of its dimensions, without gaps."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides)):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True

    def __str__(self) -> str:
        strides = "" if self.contiguous else f" strides {list(self.strides)}"
        return f"{self.name or 'tensor'} {str(self.dtype).removeprefix('torch.')}{list(self.shape)}{strides}"


@dataclass(frozen=True)
class Event:
    """One op of the step, views left out of what costs."""

    index: int
    op: str  # "aten::mm", "whet::rms_norm", "mylib::swiglu"
    phase: str  # "forward", "backward" or "optimizer"
    module: str  # path of the module it ran in
    line: str  # "model.py:31", of the user's code; in the backward, of nothing: empty
    inputs: tuple[Seen, ...]
    outputs: tuple[Seen, ...]
    flops: int
    view: bool  # nothing is computed: the output is other strides over an input's memory
    args: tuple = ()  # what else was given: numbers, dtypes, flags
    compiled: bool = False  # it lies in a torch.compile region: whether it is an op of its own there is the compiler's choice

    @property
    def bytes(self) -> int:
        """What must be read and written once."""
        return 0 if self.view else sum(t.bytes for t in (*self.inputs, *self.outputs))

    @property
    def custom(self) -> bool:
        """An op that is neither torch's nor whet's."""
        return self.op.split("::")[0] not in ("aten", "prims", "prim", "whet", "c10d", "_c10d_functional", "profiler")


@dataclass
class Watched:
    """A step as it was seen."""

    events: list[Event] = field(default_factory=list)
    kept: dict[str, int] = field(default_factory=dict)  # module path -> bytes its forward keeps for the backward
    loss: float | None = None
    grads: dict[str, str] = field(default_factory=dict)  # parameter name -> "none", "zero", "nan" or "ok"
    outputs: dict[str, tuple[float, float]] = field(default_factory=dict)  # module path -> mean and std of its first output

    def of(self, *ops: str, phase: str | None = None) -> list[Event]:
        return [e for e in self.events if e.op in ops and phase in (None, e.phase)]


def users_line() -> str:
    """'file.py:12': the innermost line that is neither torch's, Python's own, nor whet's; packages only if nothing else."""
    frame, package = sys._getframe(1), ""
    while frame is not None and not starts_step(frame.f_code.co_filename, frame.f_code.co_name):
        file = frame.f_code.co_filename
        if not file.startswith(THEIRS) or file.startswith(MODELS):
            line = f"{os.path.basename(file)}:{frame.f_lineno}"
            if not file.startswith(PACKAGES):
                return line
            package = package or line
        frame = frame.f_back  # type: ignore[assignment]
    return package


def starts_step(file: str, function: str) -> bool:
    """Whether a frame is where whet calls the user's code: what called whet is no line of that code."""
    return os.path.dirname(file) == HERE and function in ("forward", "step", "loss", "watched_step", "trace")


def in_compiled() -> bool:
    """Whether what is running was handed to torch.compile, and not taken out again by torch.compiler.disable."""
    frame = sys._getframe(1)
    while frame is not None:
        code, ours = frame.f_code, frame.f_code.co_filename == __file__
        frame = frame.f_back  # type: ignore[assignment]
        if ours and frame is not None and frame.f_code.co_name == "_fn":
            frame = frame.f_back  # type: ignore[assignment]  # torch disables its compiler around every dispatch mode
        elif code.co_filename == EVAL_FRAME and code.co_name in ("compile_wrapper", "_fn"):
            return code.co_name == "compile_wrapper"
    return False


def compiler_off() -> contextlib.AbstractContextManager:
    """torch.compile runs nothing under a dispatch mode, and with fullgraph=True raises: what it was handed runs as written."""
    return torch.compiler.set_stance("force_eager")


class OpWatch(TorchDispatchMode):
    def __init__(self, modules: Modules, names: dict[int, str]):
        super().__init__()
        self.modules, self.names = modules, names
        self.events: list[Event] = []
        self.count = 0
        self.nodes: dict[int, bool] = {}  # sequence number of an autograd node -> whether compiled code made it
        self.serials: dict[int, int] = {}  # memory is used again once it is free: what is new there gets a number of its own

    def seen(self, t: torch.Tensor, fresh: bool = False) -> Seen:
        at = t.untyped_storage()._cdata
        if fresh or at not in self.serials:
            self.count += 1
            self.serials[at] = self.count
        name = self.names.get(t.data_ptr(), "") if t.numel() and t.layout == torch.strided else ""
        return Seen(tuple(t.shape), t.dtype, tuple(t.stride()), t.device.type, self.serials[at], name, int(t.storage_offset()))

    def compiled(self, phase: str) -> bool:
        """Of a backward's op: whether the forward's op that made its node was."""
        node = torch._C._current_autograd_node() if phase == "backward" else None
        if node is not None:
            return self.nodes.get(node._sequence_nr(), False)
        inside = in_compiled()
        self.nodes.setdefault(torch.autograd._get_sequence_nr() - 1, inside)
        return inside

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        inputs = tuple(self.seen(t) for t in tensors_in((args, kwargs)) if t.layout == torch.strided)
        out = func(*args, **kwargs)
        given = {t.untyped_storage()._cdata for t in tensors_in((args, kwargs)) if t.layout == torch.strided}
        made = [t for t in tensors_in(out) if t.layout == torch.strided]
        outputs = tuple(self.seen(t, fresh=t.untyped_storage()._cdata not in given) for t in made)
        view = bool(outputs) and not func._schema.is_mutable and {o.storage for o in outputs} <= {i.storage for i in inputs}
        phase = self.modules.phase
        line = users_line() if phase != "backward" else ""
        rest = tuple(a for a in (*args, *kwargs.values()) if not isinstance(a, (torch.Tensor, tuple, list, dict)))
        flops = flops_of(func, args, kwargs, out)
        self.events.append(
            Event(len(self.events), func._schema.name, phase, self.modules.path, line, inputs, outputs, flops, view, rest,
                  self.compiled(phase))
        )
        return out


def flops_of(func, args, kwargs, out) -> int:
    """Two a multiply-add, by torch's own formulas; those that it lacks, whet's ops among them, by shapes."""
    count = flop_registry.get(func._overloadpacket)
    if count is not None:
        with contextlib.suppress(Exception):  # a formula of torch's that does not know these arguments
            return int(count(*args, **kwargs, out_val=out))
    name, sizes = func._schema.name.partition("::")[2], [a.shape for a in args if isinstance(a, torch.Tensor)]
    back = name.endswith(("_bwd", "_backward"))
    if name.startswith("linear_cross_entropy") and not back:
        return 6 * sizes[0].numel() * sizes[1][0]  # both gradients are made in the forward
    if name.startswith(("attention", "_scaled_dot_product")):
        fours = [s for s in sizes if len(s) == 4]
        q, k = (fours[1], fours[2]) if back else (fours[0], fours[1])
        return (10 if back else 4) * q.numel() * k[2]
    return 0


class SavedTensors:
    """Bytes that a forward keeps for its backward, by module; parameters, inputs and what was kept already not counted."""

    def __init__(self, modules: Modules, known: set[int]):
        self.modules, self.known = modules, set(known)
        self.bytes: dict[str, int] = {}

    def pack(self, t: torch.Tensor):
        storage = t.untyped_storage()
        if storage._cdata not in self.known:
            self.known.add(storage._cdata)
            self.bytes[self.modules.path] = self.bytes.get(self.modules.path, 0) + storage.nbytes()
        return t


@contextlib.contextmanager
def output_scales(model: torch.nn.Module, into: dict[str, tuple[float, float]]) -> Iterator[None]:
    """Mean and standard deviation of what each module returns first."""
    def after(path, out):
        first = next((t for t in tensors_in(out) if t.is_floating_point() and t.numel() > 1), None)
        if first is not None:
            with torch.no_grad():
                flat = first.detach().float()
                into.setdefault(path, (flat.mean().item(), flat.std().item()))

    with contextlib.ExitStack() as stack:
        for path, module in model.named_modules():
            hook = module.register_forward_hook(lambda module, args, out, path=path: after(path, out))
            stack.callback(hook.remove)
        yield


def watch(target: Target) -> Watched:
    """One step of the target, seen. Training state is as before but for gradients, which are cleared."""
    found = Watched()
    with restored(target), compiler_off(), output_scales(target.model, found.outputs), torch.no_grad():
        if target.step_with is None:
            target.forward()
    modules = Modules(target.model)
    names = {p.data_ptr(): n for n, p in target.model.named_parameters() if p.numel()}
    known = {p.untyped_storage()._cdata for p in (*target.model.parameters(), *target.model.buffers())}
    known |= {t.untyped_storage()._cdata for t in tensors_in((target.args, target.kwargs))}
    ops, kept = OpWatch(modules, names), SavedTensors(modules, known)
    with restored(target), compiler_off(), ops, torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda t: t):
        loss = watched_step(target, modules)
        found.events, found.kept = ops.events, kept.bytes
    found.loss = None if loss is None else loss.item()
    if target.kind == "train":
        found.grads = {n: state_of(p.grad) for n, p in target.model.named_parameters() if p.requires_grad}
    return found


def state_of(grad: torch.Tensor | None) -> str:
    if grad is None:
        return "none"
    if grad.is_sparse:
        grad = grad.coalesce().values()
    if not torch.isfinite(grad).all():
        return "nan"
    return "ok" if grad.any() else "zero"


@contextlib.contextmanager
def restored(target: Target) -> Iterator[None]:
    """Parameters, buffers and the optimizer's state as they were: a watched step is not a step of the user's training."""
    before = [t.detach().clone() for t in (*target.model.parameters(), *target.model.buffers())]
    state = copy.deepcopy(target.optimizer.state_dict()) if target.optimizer is not None else None
    try:
        yield
    finally:
        with torch.no_grad():
            for t, b in zip((*target.model.parameters(), *target.model.buffers()), before):
                t.copy_(b)
        if target.optimizer is not None and state is not None:
            target.optimizer.load_state_dict(state)

