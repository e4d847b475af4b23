"""The contract an op file fills in. Everything downstream reads this and nothing else.

An op is a mathematical function with one reference; an impl is one way to compute it. `eager` (the reference as it
stands) and `compile` (torch.compile of it) come with every op; the file adds `torch`, `triton`, `liger` or any other.
A candidate is an impl, or one of its tile variants: "triton", "triton@64x128w4s3".
"""

import ast
import functools
import importlib
import inspect
import math
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

import torch

from whet import machine
from whet.compiled import compiled
from whet.kinds import kinds_of, memoryless, plain, wrong

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}
DTYPE_NAMES = {v: k for k, v in DTYPES.items()}


@dataclass(frozen=True)
class Cost:
    """The least work any implementation can do: dividing it by a time gives the roofline fraction."""

    bytes: int
    flops: int
    bwd_bytes: int = 0
    bwd_flops: int = 0
    dtype: str = ""  # in which the forward's products run, where that is not the inputs'
    bwd_dtype: str = ""  # and the backward's
    products: int = 1  # of that dtype, that stand for one of the inputs' dtype: the floor is that of whichever is faster

    def of(self, backward: bool) -> tuple[int, int]:
        return (self.bytes + self.bwd_bytes, self.flops + self.bwd_flops) if backward else (self.bytes, self.flops)


def accepts(*args, **kwargs) -> None:
    return None


def untiled(*args, **kwargs) -> tuple[str, ...]:
    return ()


class Rank(IntEnum):
    """How simple an impl is: a tie keeps the lower, and of equal ones the one that its op lists earlier."""

    FORMULA, STOCK, COMPILED, KERNEL, PACKAGE = range(5)  # reference, PyTorch's calls, torch.compile, whet's own, a package's


@dataclass(frozen=True)
class Impl:
    """One way to compute an op. Of rank, ours and words, those that are left out follow from needs."""

    run: Callable  # the reference's arguments, the reference's results
    refuses: Callable[..., str | None] = accepts  # None, or the one sentence that says why these inputs cannot run
    needs: str = "torch"  # "torch", "triton", "cudnn" (with Triton, on a GPU alone), or the name of a package
    capability: tuple[int, int] | None = None  # lowest CUDA compute capability
    no_graph: str = ""  # why it cannot be captured as a CUDA graph; empty: it can
    spills: str = ""  # why a kernel of this impl may spill registers on sm_90; empty: it may not
    limits: tuple[str, ...] = ()  # what `refuses` rules out, for the docs; a test holds that each is said by refuses
    known_inaccurate: str = ""  # where a stock call is known to err past the budget; tuning finds that, and leaves it out
    caveat: str = ""  # what a stock call does that verifying its inputs' layouts cannot show, for the docs; a GPU test shows it
    implies: Mapping = field(default_factory=dict)  # arguments that naming this impl sets, where they are not given
    tiles: Callable[..., tuple[str, ...]] = untiled  # variants to try beside the default: run(..., tile=one of them)
    rank: int = -1  # smaller is simpler, and wins a tie
    ours: bool | None = None  # a kernel of whet's own; all others can be had without it
    words: str = ""  # what it is, in a phrase for the docs

    def __post_init__(self):
        kernel = self.needs in ("triton", "cudnn")
        rank = Rank.STOCK if self.needs == "torch" else Rank.KERNEL if kernel else Rank.PACKAGE
        words = {Rank.STOCK: "stock PyTorch calls", Rank.KERNEL: "whet's own kernel"}
        object.__setattr__(self, "rank", rank if self.rank < 0 else self.rank)
        object.__setattr__(self, "ours", kernel if self.ours is None else self.ours)
        object.__setattr__(self, "words", self.words or words.get(rank, f"the kernel of the package `{self.needs}`"))


@dataclass(frozen=True)
class Call:
    """An op met in a run: what is needed to make its inputs again elsewhere."""

    op: str
    case: Mapping[str, int | float | str | bool | None]
    dtype: str
    grad: bool

    @property
    def key(self) -> str:
        sizes = " ".join(f"{k}={v}" for k, v in self.case.items())
        return f"{self.op} {sizes} {self.dtype} {'fwd+bwd' if self.grad else 'fwd'}"

    @property
    def text(self) -> str:
        """The case as a Python literal: text is a constant to torch.compile."""
        return "{" + ", ".join([f"{k!r}: {v!r}" for k, v in self.case.items()]) + "}"

    def bucketed(self, op: "Op") -> "Call":
        """Dynamic sizes rounded up to a power of two, so that a new length meets a result already measured."""
        def rounded(k, v):
            return 1 << (v - 1).bit_length() if k in op.dynamic and isinstance(v, int) and v > 1 else v

        return Call(self.op, {k: rounded(k, v) for k, v in self.case.items()}, self.dtype, self.grad)


def base(name: str) -> str:
    """The impl of a candidate: "triton@64x128w4s3" -> "triton"."""
    return name.partition("@")[0]


def whole(case: dict) -> dict:
    return case


@dataclass(frozen=True)
class Op:
    """One mathematical function.

    reference(**args)             plain PyTorch, the meaning; fed float64 it is the oracle
    inputs(dtype, device, **case) -> args    random arguments for a case
    case_of(**args) -> case       the inverse: the case that describes these arguments (dtype apart)
    check(**args)                 None, or why no impl can take these arguments ("w must have shape ...")
    cases                         what tests and tuning cover: ragged, empty, strided, every option
    shapes                        {name: case} that `whet bench` times
    cost(**args) -> Cost
    grads                         names of the arguments that receive gradients; none: the op is for inference
    mutates                       names of the arguments that it changes in place, such as a cache; results like any other
    dynamic                       names of case sizes that vary from batch to batch, bucketed by powers of two
    proof(case) -> case           the case that is verified in its place, where the oracle of the whole would not fit
    hostile                       {name: family}: other values of the arguments that a kernel must stand, from whet.values
    smaller(case, most) -> case   a case of so few elements and the same kernels, on which hostile values and uses are tried
    coarse                        results in float32 whose arithmetic inside is in the inputs' dtype, by name: "output 1"
    scores(**args)                where output 0 is the index of the largest of some scores: those scores
    pieces(**args)                parts of a call too large for the oracle, for the proof of its whole size
    kinds                         {argument: what it may be, as kinds.py writes it}, where its default does not say that
    """

    name: str
    reference: Callable
    inputs: Callable[..., dict]
    case_of: Callable[..., dict]
    check: Callable[..., str | None]
    cases: tuple[dict, ...]
    shapes: dict[str, dict]
    cost: Callable[..., Cost]
    grads: tuple[str, ...]
    impls: dict[str, Impl]
    dynamic: tuple[str, ...] = ()
    tiny: dict = field(default_factory=dict)  # sizes that a call is cut to when kernels are only interpreted
    proof: Callable[[dict], dict] = whole
    mutates: tuple[str, ...] = ()
    hostile: Mapping[str, Callable[[dict], dict | None]] = field(default_factory=dict)
    smaller: Callable[[dict, int], dict] | None = None
    coarse: tuple[str, ...] = ()
    scores: Callable[..., torch.Tensor] | None = None
    pieces: Callable[..., Any] | None = None
    kinds: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self):
        object.__setattr__(self, "kinds", kinds_of(self.reference, self.kinds))
        every = {"eager": Impl(self.reference), "compile": Impl(compiled(self.reference))} | self.impls
        every["eager"] = replace(every["eager"], rank=Rank.FORMULA, words="the reference as it stands")
        every["compile"] = replace(every["compile"], rank=Rank.COMPILED, words="torch.compile of the reference")
        if bad := [name for name in every if name == "auto" or not name.isidentifier()]:
            raise ValueError(f"{self.name}: an impl's name must be an identifier other than 'auto', got {bad}")
        object.__setattr__(self, "impls", dict(sorted(every.items(), key=lambda item: item[1].rank)))

    @functools.cached_property
    def signature(self) -> inspect.Signature:
        return inspect.signature(self.reference)

    @property
    def stock(self) -> str:
        """What an untuned call gets: the best stock call, so that nobody is worse off than before."""
        return "torch" if "torch" in self.impls else "eager"

    def bind(self, args: tuple, options: dict) -> dict:
        """All arguments by name, defaults filled in; unknown options raise, naming the op."""
        try:
            bound = self.signature.bind(*args, **options)
        except TypeError as e:
            raise ValueError(f"{self.name}: {e}; the arguments are {self.signature}") from None
        bound.apply_defaults()
        return dict(bound.arguments)

    def impl(self, name: str) -> Impl:
        """The impl of a candidate's name, its tile apart."""
        if not isinstance(name, str) or base(name) not in self.impls:
            raise ValueError(f"{self.name}: impl must be 'auto' or one of {list(self.impls)}, got {name!r}")
        return self.impls[base(name)]

    def ours(self, name: str) -> bool:
        """Whether a candidate is a kernel of whet's own. One of an older version, in a record, is not known as such."""
        return base(name) in self.impls and bool(self.impls[base(name)].ours)

    def run(self, name: str) -> Callable:
        """What runs a candidate. Plain enough for torch.compile to trace."""
        impl, _, tile = name.partition("@")
        return functools.partial(self.impls[impl].run, tile=tile) if tile else self.impls[impl].run

    def candidate(self, name: str) -> Impl:
        """The impl of a candidate's name, with its tile in place."""
        return replace(self.impl(name), run=self.run(name))

    def candidates(self, args: dict) -> list[str]:
        """Every impl, each followed by its variants where they could be timed. The arguments may be on the meta device."""
        def variants(name: str, impl: Impl) -> tuple[str, ...]:
            timed = impl.needs != "triton" or machine.triton_mode() == "gpu"
            if impl.tiles is untiled or not timed or self.unavailable(name) or impl.refuses(**args):
                return ()
            return impl.tiles(**args)

        return [n for name, impl in self.impls.items() for n in (name, *(f"{name}@{t}" for t in variants(name, impl)))]

    def unavailable(self, name: str) -> str | None:
        """None, or why this machine cannot run this impl at all."""
        impl, mode = self.impl(name), machine.triton_mode()
        if impl.needs == "triton" and mode == "none":
            return "needs a GPU, or TRITON_INTERPRET=1 to run on the CPU"
        if impl.needs == "cudnn":
            if mode != "gpu" or not torch.backends.cudnn.is_available():
                return "needs a GPU with cuDNN"
        elif impl.needs not in ("torch", "triton"):
            if not machine.has(impl.needs):
                return f"needs the package {impl.needs}, which is not installed"
            if mode != "gpu":
                return "needs a GPU"
        capability = machine.this_machine().capability
        if impl.capability and torch.version.hip:
            return f"needs an NVIDIA GPU of compute capability {'.'.join(map(str, impl.capability))}"
        if impl.capability and capability and capability < impl.capability:
            needed, here = (".".join(map(str, c)) for c in (impl.capability, capability))
            return f"needs compute capability {needed}, this GPU has {here}"
        return None

    def misfits(self, name: str, args: dict) -> str | None:
        """None, or why this candidate cannot serve these arguments, wherever it runs. torch.compile traces it."""
        return self.unfit(args) or self.refused(base(name), args) or self.unknown_tile(name, args)

    def refused(self, name: str, args: dict) -> str | None:
        """None, or why this impl cannot serve arguments that fit the op: the one place where a call asks `refuses`."""
        impl = self.impls[name]
        for t in tensors(args) if impl.needs != "torch" else ():
            if reason := memoryless(t):
                return reason
        if impl.needs != "torch" and torch.cuda.is_available() and not all(t.is_cuda for t in tensors(args)):
            return "needs tensors on the GPU; TRITON_INTERPRET=1 on a machine without one runs kernels on the CPU"
        if reason := impl.refuses(**args):
            return reason
        for k in self.mutates:
            if args[k].requires_grad and torch.is_grad_enabled():
                return f"{k} is changed in place and must not ask for a gradient; detach it, or call under torch.no_grad()"
        return None

    def unknown_tile(self, name: str, args: dict) -> str | None:
        """None, or that a candidate's tile is none of those that its impl has for these arguments."""
        if "@" not in name:
            return None
        tile, call = name.partition("@")[2], self.call(args)
        known = tiles_of(self.name, base(name), call.dtype, call.text)
        if tile in known:
            return None
        return f"the tile must be one of {list(known)} for these arguments, got {tile!r}" if known else (
            f"has no tiles to choose among for these arguments here, got {tile!r}; impl={base(name)!r} takes its own"
        )

    def unfit(self, args: dict) -> str | None:
        """None, or why no impl can take these arguments: one of a wrong kind, else what the op's own check says."""
        for name, kind in self.kinds.items():
            if name in args and (reason := wrong(name, kind, args[name])):
                return reason
        return self.check(**args)

    def plain(self, args: dict) -> dict:
        """The arguments with numbers of numpy, or of another package, as Python's own."""
        return {name: plain(self.kinds[name], value) for name, value in args.items()}

    def why_not(self, name: str, args: dict) -> str | None:
        """None, or why this impl cannot serve these arguments on this machine."""
        return self.unavailable(name) or self.misfits(name, args)

    def call(self, args: dict) -> Call:
        grad = torch.is_grad_enabled() and any(args[g] is not None and args[g].requires_grad for g in self.grads)
        named = self.grads or tuple(self.signature.parameters)
        first = next(args[g] for g in named if isinstance(args[g], torch.Tensor))
        return Call(self.name, self.case_of(**args), DTYPE_NAMES[first.dtype], grad)


def autocast_of(t: torch.Tensor) -> torch.dtype | None:
    """The dtype that autocast gives to products of t, or None where it leaves them alone."""
    if t.is_meta or t.dtype == torch.float64 or not torch.is_autocast_enabled(t.device.type):
        return None
    return torch.get_autocast_dtype(t.device.type)


def tensors(args: Mapping) -> list[torch.Tensor]:
    return [a for a in args.values() if isinstance(a, torch.Tensor)]


def nbytes(*items: torch.Tensor | None) -> int:
    return sum(t.numel() * t.element_size() for t in items if t is not None)


def as_tuple(out) -> tuple[torch.Tensor, ...]:
    return tuple(out) if isinstance(out, (tuple, list)) else (out,)


def rows(x: torch.Tensor) -> torch.Tensor:
    """x as (M, N) over its last dimension: a view where the strides allow one, else a copy."""
    return x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def same_device(**named: torch.Tensor | None) -> str | None:
    """None, or the sentence that names the tensor on another device than the first."""
    (first, x), *others = [(k, t) for k, t in named.items() if t is not None]
    for k, t in others:
        if t.device != x.device:
            return f"{k} must be on {first}'s device {x.device}, got {t.device}"
    return None


def floating(**named: torch.Tensor | None) -> str | None:
    for k, t in named.items():
        if t is not None and t.dtype not in DTYPE_NAMES:
            return f"{k} must be one of {list(DTYPES)}, got {str(t.dtype).removeprefix('torch.')}"
    return None


LAYOUTS = ("contiguous", "sliced", "strided", "transposed", "expanded")


def lay(x: torch.Tensor, layout: str) -> torch.Tensor:
    """A tensor of x's shape with the named memory layout, values of x (expanded: of its first row)."""
    if layout == "sliced":  # rows of a wider matrix, as a slice of a packed projection gives; what is between them is NaN
        wide = x.new_empty(*x.shape[:-1], 2 * x.shape[-1] + 8)
        if x.is_floating_point() and x.element_size() > 1:
            wide.fill_(math.nan)
        wide[..., : x.shape[-1]] = x
        return wide[..., : x.shape[-1]]
    if layout == "strided":  # every other element
        return x.repeat_interleave(2, -1)[..., ::2]
    if layout == "transposed":  # last dimension not contiguous
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "expanded":  # stride 0, as the gradient of .sum() has
        return x[:1].expand(x.shape) if x.shape[0] else x
    if layout != "contiguous":
        raise ValueError(f"layout must be one of {LAYOUTS}, got {layout!r}")
    return x


def layout_of(x: torch.Tensor) -> str:
    """The layout word that describes x, for case_of."""
    if x.is_contiguous():
        return "contiguous"
    if x.dim() == 1:
        return "strided" if x.stride(0) else "expanded"
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        return "transposed"
    return "expanded" if 0 in x.stride() else "sliced"


@functools.cache
def discover() -> dict[str, Op]:
    """Every module or package in whet/ops that defines OP. No list to edit."""
    package = importlib.import_module("whet.ops")

    names = sorted(m.name for m in pkgutil.iter_modules(package.__path__) if not m.name.startswith("_"))
    modules = (importlib.import_module(f"whet.ops.{name}") for name in names)
    return {m.OP.name: m.OP for m in modules}


def tiles_of(op: str, impl: str, dtype: str, case: str) -> tuple[str, ...]:
    """An impl's tiles for a case, written out, so that torch.compile need not trace `tiles`."""
    found, sizes = discover()[op], ast.literal_eval(case)
    return found.impls[impl].tiles(**found.inputs(dtype=DTYPES[dtype], device="meta", **sizes))


tiles_of._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as torch.compiler.assume_constant_result marks it
