"""Is an impl right?  One run of it: values and gradients against the reference in float64, on fresh NaN-poisoned outputs.

`verify` tries one set of arguments, used in one way; `judge` has the rules; `prove` says what is tried of a call.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace

import torch

from whet.graphs import finish, patient
from whet.judge import GRAD_FACTOR, VALUE_FACTOR, Verdict, compare, judge
from whet.op import DTYPES, Impl, Op, as_tuple, base, lay, tensors

__all__ = ["GRAD_FACTOR", "VALUE_FACTOR", "Evidence", "Use", "Verdict", "compare", "evaluate", "judge", "verify", "verify_case"]


class Violation(Exception):
    """A candidate did something that no result could make right; the message says what."""


@dataclass(frozen=True)
class Use:
    """How a call is used: what is differentiated, and by which upstream gradient.

    grad      whether gradients are asked for at all
    layout    memory layout of the upstream gradients; "unlike": the first contiguous, the second sliced, and so on
    wanted    arguments whose gradient is asked for; None: all that have one
    outputs   outputs that the loss depends on, by index; None: all
    given     upstream gradients by index of the output, in place of the usual ones
    again     whether gradients are those of a second backward over the same graph
    autocast  dtype in which products are made, in the forward of a model in mixed precision
    """

    grad: bool = True
    layout: str = "contiguous"
    wanted: tuple[str, ...] | None = None
    outputs: tuple[int, ...] | None = None
    given: Mapping[int, torch.Tensor] | None = None
    again: bool = False
    autocast: torch.dtype | None = None


@dataclass(frozen=True)
class Evidence:
    """What a candidate is compared with: the oracle's results and eager's."""

    oracle: dict
    eager: dict
    scores: torch.Tensor | None = None  # the oracle's scores, where the op picks the largest
    usual: dict = field(default_factory=dict)  # eager's errors over several draws, where one has few values


def evidence(op: Op, args: dict, use: Use) -> Evidence:
    exact = {k: widen(v) for k, v in args.items()}
    with patient():
        eager = evaluate(op, op.reference, args, use.grad, use=use)
        dtypes = [t.dtype for k, t in eager.items() if k.startswith("output")]
        oracle = evaluate(op, op.reference, exact, use.grad, use=replace(use, autocast=None), dtypes=dtypes)
    gradients = [v for k, v in oracle.items() if k.startswith("grad ")]
    if gradients and oracle["output 0"].numel() and all(v is None for v in gradients):
        raise Violation("the oracle has no gradient to compare with")
    scores = op.scores(**exact) if op.scores else None
    return Evidence(oracle, eager, scores)


def verify_case(
    op: Op, name: str, case: dict, dtype: str, device: str, grad: bool = True, dout_layout: str = "contiguous", seed: int = 0
) -> Verdict:
    """Make the case's inputs and verify the named candidate on them, also where another tile would be tried."""
    torch.manual_seed(seed)
    args = op.inputs(dtype=DTYPES[dtype], device=device, **case)
    if reason := op.why_not(base(name), args):
        return Verdict(False, why=f"refused: {reason}")
    return verify(op, op.candidate(name), args, grad=grad, dout_layout=dout_layout)


def verify(
    op: Op, impl: Impl, args: dict, grad: bool = True, dout_layout: str = "contiguous",
    use: Use | None = None, baseline: Evidence | None = None, leaks: str = "", step: float | None = None, average: bool = True,
    slack: float = 1.0, between: Callable[[], object] | None = None,
) -> Verdict:
    """The verdict on one run.

    baseline what to compare with, where it is known already
    leaks    "NaN", "inf": in one row of the inputs; "undefined": the formula has no value for these inputs
    step     rounding step of the arithmetic, where it is coarser than the dtype's
    average  whether values are ordinary ones, whose rounding errors average out: else only the worst and the rms count
    slack    times the usual budget
    between  run after the forward and before the backward: what another call may not disturb
    """
    use = use or Use(grad, dout_layout)
    before = {k: v.clone() for k, v in args.items() if isinstance(v, torch.Tensor)}
    baseline = baseline or evidence(op, args, use)
    try:
        with poisoned_empty(impl.needs != "torch"):
            actual = evaluate(op, impl.run, args, use.grad, use=use, between=between)
    except Violation as e:
        return Verdict(False, why=str(e))
    for k, v in before.items():
        if not unchanged(v, args[k]):
            return Verdict(False, why=f"input {k} was changed in place")
    expected = baseline.eager
    if use.wanted is not None:
        expected = {k: v for k, v in expected.items() if not k.startswith("grad ") or k.removeprefix("grad ") in use.wanted}
    if set(actual) != set(expected):
        return Verdict(False, why=f"returns {sorted(actual)}, expected {sorted(expected)}")
    if leaks in ("NaN", "inf"):  # the gradient of what all rows share is no number either, or may be: only rows are comparable
        clean = {k for k in op.grads if isinstance(args[k], torch.Tensor) and torch.isfinite(args[k]).all()}
        expected = {k: v for k, v in expected.items() if k.removeprefix("grad ") not in clean}
    oracle = {k: baseline.oracle[k] for k in expected}
    if baseline.scores is not None:
        actual, verdict = picked(actual, expected, oracle, baseline.scores)
        if not verdict.ok:
            return verdict
    coarse = coarse_steps(op, args)
    beside = {k: v for k, v in args.items() if isinstance(v, torch.Tensor)} if average else None
    return judge(actual, expected, oracle, step, coarse, beside, leaks, baseline.usual, slack)


def coarse_steps(op: Op, args: dict) -> dict[str, float]:
    """The rounding step of results in float32 whose arithmetic inside is in the inputs' dtype."""
    return {name: torch.finfo(next(iter(args.values())).dtype).eps for name in op.coarse}


def picked(actual: dict, eager: dict, oracle: dict, scores: torch.Tensor) -> tuple[dict, Verdict]:
    """The index of the largest score: any whose score the oracle cannot distinguish from the largest, given eager's own error.

    In exact arithmetic it is the first of equals; which of nearly equal ones is picked hangs on the last bits.
    """
    index, value = actual["output 0"], eager["output 1"]
    if index.dtype != eager["output 0"].dtype or index.shape != eager["output 0"].shape or not index.numel():
        return actual, Verdict(True)
    if (index < 0).any() or (index >= scores.shape[-1]).any():
        return actual, Verdict(False, why=f"output 0: an index outside 0 .. {scores.shape[-1] - 1}")
    best = scores.max(-1).values
    short = best - scores.gather(-1, index.long()[..., None])[..., 0]
    rounding = torch.finfo(torch.float64).eps * scores.abs().amax(-1) * scores.shape[-1]
    slack = torch.maximum(rounding, 2 * (value.double() - oracle["output 1"]).abs())
    if (short > slack).any():
        row = int((short - slack).argmax())
        why = f"output 0: row {row} picks a score {short.flatten()[row].item():.2e} under the largest"
        return actual, Verdict(False, why=why)
    return actual | {"output 0": oracle["output 0"].to(index.dtype)}, Verdict(True)


def unchanged(a: torch.Tensor, b: torch.Tensor) -> bool:
    """The same values, NaN for NaN; single bytes bit by bit."""
    if a.element_size() == 1:
        return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    return torch.equal(a, b) or torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))


def leaf_copies(op: Op, args: dict, grad: bool, wanted: tuple[str, ...] | None = None) -> tuple[dict, list[str]]:
    """The arguments with every tensor detached, and the names of those that now require a gradient."""
    leaves = {k: v.detach() if isinstance(v, torch.Tensor) else v for k, v in args.items()}
    asked = [k for k in op.grads if leaves[k] is not None and (wanted is None or k in wanted)] if grad else []
    for k in asked:
        leaves[k].requires_grad_()
    return leaves, asked


def evaluate(
    op: Op, run, args: dict, grad: bool, dout_layout: str = "contiguous", use: Use | None = None,
    between: Callable[[], object] | None = None, dtypes: Sequence[torch.dtype] = (),
) -> dict:
    """{'output 0': y, ..., 'grad x': dx, ...} of one run on leaf copies, with a fixed random upstream gradient.

    dtypes   those of the results that upstream gradients are made for, where they are not this run's own
    """
    use = use or Use(grad, dout_layout)
    leaves, wanted = leaf_copies(op, args, grad, use.wanted)
    leaves |= {k: own(leaves[k]) for k in op.mutates}
    with torch.inference_mode(False), torch.set_grad_enabled(grad):
        with autocast(use.autocast, args):
            outs = as_tuple(run(**leaves))
        finish()
        if torch.is_grad_enabled() != grad or torch.is_inference_mode_enabled():
            mode = "inference mode" if torch.is_inference_mode_enabled() else "grad mode"
            raise Violation(f"leaves {mode} changed")
        for i, o in enumerate(outs):
            if not isinstance(o, torch.Tensor):
                raise Violation(f"output {i} must be a tensor, got {type(o).__name__}")
        named: dict = {f"output {i}": o.detach() for i, o in enumerate(outs)}
        named |= {f"changed {k}": leaves[k] for k in op.mutates}
        if between is not None:
            between()
        if grad:
            live = [i for i, o in enumerate(outs) if o.requires_grad and (use.outputs is None or i in use.outputs)]
            dtypes = dtypes or [o.dtype for o in outs]
            made = use.given or {i: upstream(outs[i], i, use.layout, dtypes[i]) for i in live}
            douts = [made[i].to(outs[i].dtype) for i in live]
            kept = [d.clone() for d in douts]
            sources = [leaves[k] for k in wanted]
            given = [outs[i] for i in live]
            if use.again and given:
                torch.autograd.grad(given, sources, douts, allow_unused=True, retain_graph=True)
            grads = torch.autograd.grad(given, sources, douts, allow_unused=True) if given else [None] * len(wanted)
            finish()
            for i, before, after in zip(live, kept, douts):
                if not unchanged(before, after):
                    raise Violation(f"the upstream gradient of output {i} was changed in place")
            named |= {f"grad {k}": g for k, g in zip(wanted, grads)}
    return named


def autocast(dtype: torch.dtype | None, args: dict) -> AbstractContextManager:
    """Within the block products take this dtype, on the arguments' device; None: nothing changes."""
    return nullcontext() if dtype is None else torch.autocast(tensors(args)[0].device.type, dtype)


def own(t: torch.Tensor) -> torch.Tensor:
    """A copy to be changed in place, of the same strides unless elements share memory."""
    shared = any(s == 0 and n > 1 for s, n in zip(t.stride(), t.shape))
    return t.clone() if shared else torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).copy_(t)


def upstream(out: torch.Tensor, i: int, layout: str, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Drawn in fp32, rounded to the dtype of a result, by default out's: with all its digits, and the oracle's too."""
    where = out.device if out.numel() > 2**16 else torch.device("cpu")  # large ones on the device, where it takes no time
    generator = torch.Generator(device=where).manual_seed(1234 + i)
    values = torch.randn(out.shape, generator=generator, device=where).to(out.device).to(dtype or out.dtype)
    if layout == "unlike":
        layout = "sliced" if i % 2 else "contiguous"
    if out.dim() == 1 and layout in ("sliced", "transposed"):
        layout = "strided"
    return lay(values, layout) if out.dim() else values


def widen(v):
    """An argument as the oracle takes it: in float64, and a dtype asked of a result is that too."""
    if isinstance(v, torch.dtype):
        return torch.float64
    return v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v


@contextmanager
def poisoned_empty(active: bool = True):
    """Fill fresh buffers with NaN (integers: their lowest value), so an element a kernel never writes cannot pass."""
    if not active:
        yield
        return
    originals = {(owner, f): getattr(owner, f) for owner, f in POISONED}

    def poisoning(make):
        def made(*args, **kwargs):
            t = make(*args, **kwargs)
            if t.dtype == torch.bool:
                return t
            return t.fill_(float("nan") if t.is_floating_point() else torch.iinfo(t.dtype).min)

        return made

    for (owner, f), make in originals.items():
        setattr(owner, f, poisoning(make))
    try:
        yield
    finally:
        for (owner, f), make in originals.items():
            setattr(owner, f, make)


POISONED = ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (torch.Tensor, "new_empty"))
