"""How far may a result lie from the truth?  Rules about single values, and about what averages out.

Every rule measures against eager PyTorch in the same dtype: no tolerance is set by hand.

worst, rms   error <= factor * (eager's error + one rounding step of the dtype * size), factor 2 for values, 3 for gradients
bias         rounding is random, a bug is systematic: the error regressed on the truth, on a constant, and on each argument
             of the same shape, over everything, along every axis, and among like values of each argument (a polynomial that
             is wrong near -1). Rounding errors average out, so over n values a slope has a standard error near
             step / sqrt(n). A slope counts where it lies beyond eager's own, beyond a share of a rounding, and beyond
             chance. For 16-bit dtypes: float32's own step is as sharp already.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

VALUE_FACTOR, GRAD_FACTOR = 2.0, 3.0
SHARE, AXIS_SHARE = 1 / 2, 1.0  # of half a rounding step, that the slope of a right kernel may lie beyond eager's: over
# everything, and at one index of an axis, where a factor that is rounded first (a norm's weight) meets the same few bits again
CHANCE = 1e-9  # how often a test of slopes may reject by chance
FEWEST = 64  # values of a group without which a slope says nothing
GROUPS, GROUP = 64, 512  # groups of like values of an argument: at most, and of how many at least
SAMPLE = 2**22  # values of a tensor that slopes are taken over at most: their standard error is then some millionths
Given = torch.Tensor | None


@dataclass(frozen=True)
class Verdict:
    ok: bool
    error: float = 0.0  # |impl - oracle| at the tightest output
    budget: float = float("inf")
    why: str = ""
    rule: str = ""  # what was being tried when it failed: "values", "float32", "small values", "frozen w", "M=63" ...

    @property
    def share(self) -> float:
        """How much of the budget was used."""
        return self.error / self.budget if self.budget else 0.0


def judge(
    actual: dict, eager: dict, oracle: dict, step: float | None = None, coarse: Mapping[str, float] | None = None,
    beside: Mapping[str, torch.Tensor] | None = None, leaks: str = "", usual: Mapping[str, dict] | None = None,
    slack: float = 1.0,
) -> Verdict:
    """The worst verdict over named tensors; the same rule serves one op and a whole model.

    step    the relative rounding step of the arithmetic inside, where it is coarser than the dtype of the results: under
            autocast a float32 loss carries bfloat16 errors, and eager's own may be near zero by luck
    coarse  the same for single results, by name
    beside  arguments to regress errors on; None: slopes are not looked at, as for a whole model, whose errors add up
    leaks   "NaN", "inf": in one row of the inputs; only what it leaves alone is judged, and that a NaN is seen in the outputs.
            "undefined": what the oracle has no number for may be anything
    slack   times the usual budget
    usual   {result: {norm: eager's error as a share of the size}} over several draws: of few values one draw may be lucky
    """
    worst = Verdict(True, 0.0, float("inf"))
    for name, o in oracle.items():
        factor = slack * (GRAD_FACTOR if name.startswith("grad") else VALUE_FACTOR)
        own = step or (coarse or {}).get(name)
        verdict = compare(name, actual[name], eager[name], o, factor, own, beside, leaks, (usual or {}).get(name))
        if not verdict.ok:
            return verdict
        worst = max(worst, verdict, key=lambda v: v.share)
    return worst


def compare(
    name: str, a: Given, e: Given, o: Given, factor: float, step: float | None = None,
    beside: Mapping[str, torch.Tensor] | None = None, leaks: str = "", usual: Mapping[str, float] | None = None,
) -> Verdict:
    if o is None or e is None:  # zeros say the same, as torch.compile says it
        absent = a is None or not a.any()
        return Verdict(absent, why="" if absent else f"{name}: expected none")
    if a is None:
        return Verdict(False, why=f"{name} is missing: the graph is cut")
    if a.shape != e.shape or a.dtype != e.dtype:
        return Verdict(False, why=f"{name} must be {tuple(e.shape)} {e.dtype}, got {tuple(a.shape)} {a.dtype}")
    if not a.numel():
        return Verdict(True, 0.0, float("inf"))
    if not a.is_floating_point():
        return Verdict(torch.equal(a, o), why=f"{name}: {(a != o).sum().item()} of {a.numel()} differ")
    if leaks == "NaN" and name.startswith("output") and (hidden := torch.isnan(o) & torch.isnan(e) & torch.isfinite(a)).any():
        return Verdict(False, why=f"{name} has {hidden.sum().item()} numbers where a NaN should be seen")
    kept, why = same_kinds(a, e, o, leaks)
    if why:
        return Verdict(False, float("nan"), 0.0, f"{name} {why}")
    coarse = step is not None
    step = step or torch.finfo(e.dtype).eps
    a64, e64, o64 = (torch.where(kept, t.double(), 0.0) for t in (a, e, o))
    e64 = torch.where(torch.isfinite(e64), e64, o64)  # where eager overflows it sets no budget
    quantum = torch.finfo(e.dtype).smallest_normal * torch.finfo(e.dtype).eps  # below the normal range steps are absolute
    tightest = Verdict(True)
    for norm, size in NORMS.items():
        known = max(size(e64 - o64), (usual or {}).get(norm, 0.0) * size(o64))
        error, budget = size(a64 - o64), factor * (known + step * size(o64) + quantum)
        if error > budget:
            return Verdict(False, error, budget, f"{name}: {norm} error {error:.2e} exceeds {budget:.2e}")
        tightest = max(tightest, Verdict(True, error, budget), key=lambda v: v.share)
    if beside is not None and e.element_size() == 2 and not coarse and not leaks:
        same = {k: t for k, t in beside.items() if t.shape == o.shape and t.is_floating_point()}
        return biased(name, a64, e64, o64, same, factor, step, quantum) or tightest
    return tightest


def usual_errors(draws: list[tuple[dict, dict]]) -> dict[str, dict]:
    """{result: {norm: largest share of its size by which eager errs}} over several (eager, oracle)."""
    found: dict[str, dict] = {}
    for eager, oracle in draws:
        for name, o in oracle.items():
            if o is not None and o.is_floating_point() and o.numel() and eager[name] is not None:
                error = torch.nan_to_num(eager[name].double() - o, posinf=0.0, neginf=0.0)
                o = torch.nan_to_num(o.double(), posinf=0.0, neginf=0.0)
                mine = found.setdefault(name, dict.fromkeys(NORMS, 0.0))
                for norm, size in NORMS.items():
                    mine[norm] = max(mine[norm], size(error) / max(size(o), 1e-300))
    return found


NORMS = {"worst": lambda t: t.abs().max().item(), "rms": lambda t: t.square().mean().sqrt().item()}


def same_kinds(a: torch.Tensor, e: torch.Tensor, o: torch.Tensor, leaks: str) -> tuple[torch.Tensor, str]:
    """The elements to be compared, and what is wrong with those that are no numbers.

    What the dtype cannot hold is infinite in it. Where eager overflows, a candidate may, too.
    """
    rounded = o.to(e.dtype)
    finite = torch.isfinite(rounded)
    if leaks:
        if o.dim() > 1:  # within a row that is no number somewhere, what is left of the others is anyone's choice
            finite = finite & finite.all(-1, keepdim=True)
        bad = finite & torch.isfinite(e) & ~torch.isfinite(a)
        if bad.any():
            return finite, f"has {bad.sum().item()} elements that are no numbers where no input of theirs is one"
        return finite & torch.isfinite(a), ""
    agree = torch.isfinite(a) == finite
    agree &= finite | (a == rounded) | (torch.isnan(a) & torch.isnan(rounded))  # the same infinity, or NaN for NaN
    agree |= ~torch.isfinite(e) & finite
    agree |= torch.isfinite(o) & (o.abs() > 0.99 * torch.finfo(e.dtype).max)  # at the edge of the range either is right
    return finite & torch.isfinite(a), "" if agree.all() else "has non-finite or unwritten elements"


def biased(name: str, a, e, o, beside: Mapping, factor: float, step: float, quantum: float) -> Verdict | None:
    """None, or the verdict on an error that does not average out."""
    keep = sampled(o)
    a, e, o = (t[keep] for t in (a, e, o))
    size = o.square().mean().sqrt().clamp_min(1e-300)
    half = step / 2
    bases = {"itself": o, "a constant": torch.ones_like(o) * size}
    bases |= {k: torch.nan_to_num(t[keep].double(), posinf=0.0, neginf=0.0) for k, t in beside.items()}
    for base, b in bases.items():
        for axis in (None, *(d for d in range(o.dim()) if o.numel() // max(1, o.shape[d]) >= FEWEST and o.shape[d] > 1)):
            if axis is None and o.numel() < FEWEST:
                continue
            if found := slope_beyond(a, e, o, b, axis, factor, half, quantum):
                i, error, budget = found
                return regular(name, base, "everywhere" if axis is None else f"at index {i} of axis {axis}", error, budget)
    for k in beside:
        groups = min(GROUPS, o.numel() // GROUP)
        if groups < 2:
            break
        order = bases[k].flatten().argsort()[: o.numel() // groups * groups].view(groups, -1)
        a_, e_, o_ = (t.flatten()[order] for t in (a, e, o))
        for base in ("itself", "a constant"):
            if found := slope_beyond(a_, e_, o_, bases[base].flatten()[order], 0, factor, half, quantum):
                i, error, budget = found
                ends = bases[k].flatten()[order[i][[0, -1]]].tolist()
                return regular(name, base, f"where {k} is from {ends[0]:.3g} to {ends[1]:.3g}", error, budget)
    return None


def regular(name: str, base: str, where: str, error: float, budget: float) -> Verdict:
    why = f"{name}: off by {error:.2e} of {base} {where}, more than {budget:.2e}: no rounding error is so regular"
    return Verdict(False, error, budget, why)


def slope_beyond(a, e, o, b, axis: int | None, factor: float, half: float, quantum: float) -> tuple[int, float, float] | None:
    """None, or where the error of a is most biased towards b, its slope there, and the slope allowed."""
    got, noise, scale = slopes(a - o, b, o, axis, half, quantum)
    usual, usual_noise, _ = slopes(e - o, b, o, axis, half, quantum)
    z = math.sqrt(2 * math.log(max(1, got.numel()) / CHANCE))
    allowed = factor * usual.abs().max() + (SHARE if axis is None else AXIS_SHARE) * half * scale
    excess = got.abs() - allowed - z * (noise.square() + usual_noise.square()).sqrt()
    if not (excess > 0).any():
        return None
    i = int(excess.argmax())
    return i, got.flatten()[i].abs().item(), (got.abs() - excess).flatten()[i].item()


def sampled(o: torch.Tensor) -> tuple:
    """An index that keeps at most SAMPLE values: rows evenly spaced."""
    if o.numel() <= SAMPLE or o.dim() < 2:
        return (slice(0, SAMPLE),) if o.dim() == 1 else (...,)
    axis = o.dim() - 2 if o.shape[-2] > 1 else 0
    stride = -(-o.numel() // SAMPLE)
    return tuple(slice(None, None, stride) if d == axis else slice(None) for d in range(o.dim()))


def slopes(error, b, o, axis: int | None, half: float, quantum: float):
    """(slope of the error on b, its standard error, size of o over size of b): over all, or for each index of an axis."""
    others = [d for d in range(o.dim()) if d != axis]

    def total(t):
        return t.sum(others) if others else t

    power = total(b * b).clamp_min(1e-300)
    slope = total(error * b) / power
    b3, b4 = b * b * b, (b * b).square()
    left = total((error * b).square()) - 2 * slope * total(error * b3) + slope.square() * total(b4)
    rounding = total(((half * o.abs() + quantum) * b).square()) / 3  # of errors spread evenly over half a step
    noise = torch.maximum(left.clamp_min(0.0), rounding).sqrt() / power
    return slope, noise, (total(o * o) / power).sqrt()
