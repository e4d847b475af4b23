"""Is an impl right?  Values and gradients against the reference in float64, on fresh NaN-poisoned outputs.

The budget is never a constant: an impl may err by at most twice (gradients: three times) the error of eager PyTorch in
the same dtype plus one rounding step, both at the worst element and in root mean square.
"""

from contextlib import contextmanager
from dataclasses import dataclass

import torch

from whet.op import DTYPES, Impl, Op, as_tuple, base, lay

VALUE_FACTOR, GRAD_FACTOR = 2.0, 3.0
Given = torch.Tensor | None


@dataclass(frozen=True)
class Verdict:
    ok: bool
    error: float = 0.0  # |impl - oracle| at the tightest output
    budget: float = float("inf")
    why: str = ""

    @property
    def share(self) -> float:
        """How much of the budget was used."""
        return self.error / self.budget if self.budget else 0.0


def verify_case(
    op: Op, name: str, case: dict, dtype: str, device: str, grad: bool = True, dout_layout: str = "contiguous", seed: int = 0
) -> Verdict:
    """Make the case's inputs and verify the named candidate on them, also where another tile would be tried."""
    torch.manual_seed(seed)
    args = op.inputs(dtype=DTYPES[dtype], device=device, **case)
    if reason := op.why_not(base(name), args):
        return Verdict(False, why=f"refused: {reason}")
    return verify(op, op.candidate(name), args, grad=grad, dout_layout=dout_layout)


def verify(op: Op, impl: Impl, args: dict, grad: bool = True, dout_layout: str = "contiguous") -> Verdict:
    before = {k: v.clone() for k, v in args.items() if isinstance(v, torch.Tensor)}
    oracle = evaluate(op, op.reference, {k: widen(v) for k, v in args.items()}, grad, dout_layout)
    eager = evaluate(op, op.reference, args, grad, dout_layout)
    with poisoned_empty(impl.needs != "torch"):
        actual = evaluate(op, impl.run, args, grad, dout_layout)
    for k, v in before.items():
        if not unchanged(v, args[k]):
            return Verdict(False, why=f"input {k} was changed in place")
    if set(actual) != set(eager):
        return Verdict(False, why=f"returns {sorted(actual)}, expected {sorted(eager)}")
    return judge(actual, eager, oracle)


def unchanged(a: torch.Tensor, b: torch.Tensor) -> bool:
    """The same values, NaN for NaN; single bytes bit by bit."""
    if a.element_size() == 1:
        return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    return torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))


def judge(actual: dict, eager: dict, oracle: dict, step: float | None = None) -> Verdict:
    """The worst verdict over named tensors; the same rule serves one op and a whole model.

    step  the relative rounding step of the arithmetic inside, where it is coarser than the dtype of the results: under
          autocast a float32 loss carries bfloat16 errors, and eager's own may be near zero by luck
    """
    worst = Verdict(True, 0.0, float("inf"))
    for name, o in oracle.items():
        verdict = compare(name, actual[name], eager[name], o, GRAD_FACTOR if name.startswith("grad") else VALUE_FACTOR, step)
        if not verdict.ok:
            return verdict
        worst = max(worst, verdict, key=lambda v: v.share)
    return worst


def leaf_copies(op: Op, args: dict, grad: bool) -> tuple[dict, list[str]]:
    """The arguments with every tensor detached, and the names of those that now require a gradient."""
    leaves = {k: v.detach() if isinstance(v, torch.Tensor) else v for k, v in args.items()}
    wanted = [k for k in op.grads if leaves[k] is not None] if grad else []
    for k in wanted:
        leaves[k].requires_grad_()
    return leaves, wanted


def evaluate(op: Op, run, args: dict, grad: bool, dout_layout: str = "contiguous") -> dict[str, torch.Tensor | None]:
    """{'output 0': y, ..., 'grad x': dx, ...} of one run on leaf copies, with a fixed random upstream gradient."""
    leaves, wanted = leaf_copies(op, args, grad)
    leaves |= {k: own(leaves[k]) for k in op.mutates}
    outs = as_tuple(run(**leaves))
    named: dict[str, torch.Tensor | None] = {f"output {i}": o.detach() for i, o in enumerate(outs)}
    named |= {f"changed {k}": leaves[k] for k in op.mutates}
    if grad:
        live = [o for o in outs if o.requires_grad]
        douts = [upstream(o, i, dout_layout) for i, o in enumerate(outs) if o.requires_grad]
        sources = [leaves[k] for k in wanted]
        grads = torch.autograd.grad(live, sources, douts, allow_unused=True) if live else [None] * len(wanted)
        named |= {f"grad {k}": g for k, g in zip(wanted, grads)}
    return named


def own(t: torch.Tensor) -> torch.Tensor:
    """A copy to be changed in place, of the same strides unless elements share memory."""
    shared = any(s == 0 and n > 1 for s, n in zip(t.stride(), t.shape))
    return t.clone() if shared else torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).copy_(t)


def upstream(out: torch.Tensor, i: int, layout: str) -> torch.Tensor:
    """The same values for every dtype: drawn on the CPU in fp32, rounded to bf16, so that all dtypes hold them exactly."""
    generator = torch.Generator().manual_seed(1234 + i)
    if out.numel() > 2**26:  # large shapes: drawn on the device, still the same for every candidate
        on_device = torch.Generator(device=out.device).manual_seed(1234 + i)
        values = torch.randn(out.shape, generator=on_device, device=out.device, dtype=torch.float32)
    else:
        values = torch.randn(out.shape, generator=generator).to(out.device)
    values = values.bfloat16().to(out.dtype)
    return lay(values, layout) if out.dim() > 1 else values


def widen(v):
    return v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v


def compare(name: str, a: Given, e: Given, o: Given, factor: float, step: float | None = None) -> Verdict:
    if o is None or e is None:
        return Verdict(a is None, why="" if a is None else f"{name}: expected none")
    if a is None:
        return Verdict(False, why=f"{name} is missing: the graph is cut")
    if a.shape != e.shape or a.dtype != e.dtype:
        return Verdict(False, why=f"{name} must be {tuple(e.shape)} {e.dtype}, got {tuple(a.shape)} {a.dtype}")
    if not a.numel():
        return Verdict(True, 0.0, float("inf"))
    if not a.is_floating_point():
        return Verdict(torch.equal(a, o), why=f"{name}: {(a != o).sum().item()} of {a.numel()} differ")
    finite = torch.isfinite(o)
    agree = torch.isfinite(a) == finite
    agree &= finite | (a == o) | (torch.isnan(a) & torch.isnan(o))  # the same infinity, or NaN for NaN
    if not agree.all():
        return Verdict(False, float("nan"), 0.0, f"{name} has non-finite or unwritten elements")
    step = step or torch.finfo(e.dtype).eps
    overflowed = ~torch.isfinite(e)  # there eager sets no budget
    a, e, o = (torch.where(finite, t.double(), 0.0) for t in (a, e, o))
    e = torch.where(overflowed, o, e)
    tightest = Verdict(True)
    for norm, size in NORMS.items():
        error, budget = size(a - o), factor * (size(e - o) + step * size(o))
        if error > budget:
            return Verdict(False, error, budget, f"{name}: {norm} error {error:.2e} exceeds {budget:.2e}")
        tightest = max(tightest, Verdict(True, error, budget), key=lambda v: v.share)
    return tightest


NORMS = {"worst": lambda t: t.abs().max().item(), "rms": lambda t: t.square().mean().sqrt().item()}


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
