"""What is tried of a candidate before it may be timed: the call itself, then what a real run does to it.

values       the call as it was met, and its float32 twin: the same sizes and layout where errors of a millionth show
families     hostile values from the op's contract: small, large, outliers, ties, negative weights, a row of NaN
use          each argument frozen, each output alone, upstream gradients of other layouts, arguments of unlike strides
autocast     the call as a model in mixed precision makes it, where the op takes weights in float32 beside 16 bits there
sizes        the neighbours of a size that was rounded up to a bucket
repeat       the same call after all of that, and with its inputs overwritten: the same bits, the new values
whole size   where the oracle of the whole call does not fit: sampled parts of it

A trial that a candidate refuses is no fault: it will refuse it in a user's run as well. The first that fails ends the proof.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from whet import machine
from whet.figures import error_line
from whet.judge import Verdict, usual_errors
from whet.op import DTYPES, Call, Op, Rank, base, lay, nbytes, tensors
from whet.values import EXACT, OVERFLOWING, POISONED, UNDEFINED, Option
from whet.verify import Evidence, Use, Violation, autocast, evaluate, evidence, leaf_copies, unchanged, verify
from whet.whole import verify_whole

FEW, FEW_INTERPRETED = 2**21, 2**14  # elements of the arguments on which hostile values and uses are tried
PROVABLE = 2**27  # elements of the arguments whose float64 oracle fits beside those of other children
KEPT = 2**21  # elements under which the oracle's results are kept for the next candidate of the call
KEPT_BYTES = 2**32  # on a GPU they are kept of any call, up to so much in a child: there the oracle is most of the work,
KEPT_SHARE = 1 / 32  # and up to such a share of the GPU's memory: eight children verify side by side
MANY, DRAWS = 2**12, 8  # values of a result among which eager's worst error is no luck, and draws in place of them
FURTHER = 2.0  # of the budget in every trial but the call itself: of so many, eager's own error is small by luck in some
FURTHER_EXACT = 4.0  # the same in float32, where luck is wider and faults are a thousand times the budget
GROSS = 64.0  # of the budget where the formula itself is short of digits
LAYOUTS = ("sliced", "transposed", "expanded")
COARSE_TWIN = 2.0**-10  # the step by which a float32 twin is judged of a call that is known to compute its products coarser

Trial = tuple[str, Callable[[], Verdict | None]]


def prove(op: Op, name: str, call: Call, device: str) -> Verdict:
    """The verdict on a candidate for a call: the first trial that fails, by name, or the share of the call's own budget."""
    proof = Proof(op, name, call, device)
    first = None
    for rule, trial in proof.trials():
        try:
            verdict = trial()
        except Violation as e:
            verdict = Verdict(False, why=str(e))
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as e:
            if first is None:
                raise  # the call itself cannot run: raised as it is
            verdict = Verdict(False, why=error_line(e))
        if verdict is None:
            continue
        if not verdict.ok:
            return replace(verdict, rule=rule, why=verdict.why if rule == "values" else f"{rule}: {verdict.why}")
        first = first or verdict
    return first or Verdict(True)


@dataclass(frozen=True)
class TrialInputs:
    """Arguments of one trial: case and dtype, family of values, seed."""

    case: tuple
    dtype: str
    family: str = ""
    seed: int = 0


_kept: dict = {}  # (call key, TrialInputs, Use) -> Evidence, for the next candidate of the same call


class Proof:
    """Every trial of one candidate for one call."""

    def __init__(self, op: Op, name: str, call: Call, device: str):
        self.op, self.name, self.call, self.device = op, name, call, device
        self.impl = op.candidate(name)
        self.tile = "@" in name
        self.compiled = self.impl.rank == Rank.COMPILED  # each new size or dtype is compiled anew: fewer of them,
        self.once = self.compiled and device == "cpu"  # and none where a C++ compiler takes a quarter of a minute for each
        self.case = tuple(provable(op, dict(call.case), call.dtype).items())
        self.small = tuple(smaller(op, dict(self.case), call.dtype).items())
        if any(key[0] != call.key for key in _kept):
            _kept.clear()

    def inputs(self, made: TrialInputs) -> dict | None:
        """The arguments of a trial, or None where the family changes nothing."""
        torch.manual_seed(made.seed)
        args = self.op.inputs(dtype=DTYPES[made.dtype], device=self.device, **dict(made.case))
        if made.family:
            torch.manual_seed(made.seed + 1)
            return self.op.hostile[made.family](args)
        return args

    def args(self, made: TrialInputs) -> dict | None:
        """The arguments of a trial, or None where there are none or the candidate refuses them."""
        args = self.inputs(made)
        return None if args is None or self.op.misfits(base(self.name), args) else args

    def evidence(self, made: TrialInputs, args: dict, use: Use) -> Evidence:
        key = (self.call.key, made, use)
        if key in _kept:
            return _kept[key]
        baseline = evidence(self.op, args, use)
        if made.family == EXACT:
            baseline = replace(baseline, scores=None)
        if any(t is not None and t.numel() < MANY for t in baseline.oracle.values()):
            baseline = replace(baseline, usual=self.usual(made, use, baseline))
        if self.keeps(args, baseline):
            _kept[key] = baseline
        return baseline

    def keeps(self, args: dict, made: Evidence) -> bool:
        """Whether what the oracle made of these arguments is kept."""
        if self.device == "cpu":
            return sum(t.numel() for t in tensors(args)) <= KEPT
        return held_bytes(made) + sum(map(held_bytes, _kept.values())) <= most_kept()

    def usual(self, made: TrialInputs, use: Use, baseline: Evidence) -> dict:
        """Eager's errors over several draws: of few values a single one may be lucky."""
        few = [name for name, t in baseline.oracle.items() if t is not None and t.numel() < MANY]

        def kept(found: Evidence) -> tuple[dict, dict]:
            return {name: found.eager[name] for name in few}, {name: found.oracle[name] for name in few}

        drawn = [kept(baseline)]
        for seed in range(1, DRAWS):
            if (args := self.inputs(replace(made, seed=100 * seed))) is not None:
                drawn.append(kept(evidence(self.op, args, use)))
        return usual_errors(drawn)

    def verify(self, made: TrialInputs, use: Use | None = None, like: Use | None = None, sliced: str = "") -> Verdict | None:
        """One trial.

        use    how the call is used; like: another use whose evidence serves, since only layouts or what is asked for differ
        sliced an argument that is given as a slice of a wider one, unlike the others
        """
        plain, use = self.inputs(made), use or Use(self.call.grad)
        if plain is None:
            return None
        args = plain | {sliced: lay(plain[sliced], "sliced")} if sliced else plain
        if self.op.misfits(base(self.name), leaf_copies(self.op, args, use.grad, use.wanted)[0]):
            return None
        baseline = self.evidence(made, plain, like or use)
        step = COARSE_TWIN if self.impl.known_inaccurate and made.dtype == "float32" and self.device == "cuda" else None
        average = not made.family and all(owns_its_elements(t) for t in tensors(args))
        leaks = made.family.split()[-1] if made.family in POISONED else "undefined" if made.family == UNDEFINED else ""
        itself = made == TrialInputs(self.case, self.call.dtype) and use == Use(self.call.grad)
        slack = GROSS if made.family == OVERFLOWING else 1.0 if itself else further(made.dtype)
        return verify(
            self.op, self.impl, args, use=use, baseline=baseline, leaks=leaks, step=step, average=average, slack=slack
        )

    def twin(self) -> str | None:
        """The sharpest dtype that is sharper than the call's own and that the candidate takes."""
        for dtype in ("float32", "float16"):
            sharper = torch.finfo(DTYPES[dtype]).eps < torch.finfo(DTYPES[self.call.dtype]).eps
            if sharper and self.args(TrialInputs(self.small, dtype)) is not None:
                return dtype
        return None

    def trials(self) -> Iterator[Trial]:
        own = TrialInputs(self.case, self.call.dtype)
        yield "values", partial(self.verify, own)
        twin = None if self.tile or self.once or self.call.dtype not in ("bfloat16", "float16") else self.twin()
        if twin:
            yield twin, partial(self.verify, TrialInputs(self.case, twin))
        for dtype in (twin, self.call.dtype):
            if dtype and not (dtype == "float16" == twin):  # float16 has a range of its own, which is not the call's
                yield from self.families(dtype, "" if dtype == self.call.dtype else f", {dtype}")
        yield from self.uses()
        if not (self.tile or self.compiled or self.call.dtype == "float64"):
            yield "autocast", self.autocast
        yield from self.sizes(twin)
        yield "repeat", self.repeat
        if self.case != tuple(self.call.case.items()):
            yield "whole size", self.whole

    def families(self, dtype: str, where: str) -> Iterator[Trial]:
        for family in self.op.hostile:
            if not (self.compiled and isinstance(self.op.hostile[family], Option)):  # there it is another graph
                # Of scores that overflow the values are looked at: cuDNN's gradients overflow with them.
                use = Use(self.call.grad and family != OVERFLOWING)
                yield family + where, partial(self.verify, TrialInputs(self.small, dtype, family), use)

    def uses(self) -> Iterator[Trial]:
        made, usual = TrialInputs(self.small, self.call.dtype), Use(self.call.grad)
        if self.call.grad and not self.tile:
            yield from self.uses_of_gradients(made, usual)
        if self.compiled:
            return
        args = {k: t for k, t in (self.args(made) or {}).items() if isinstance(t, torch.Tensor)}
        for name, t in args.items():
            plain = t.dim() > 1 and t.is_contiguous() and t.numel()
            if plain and len(args) > 1:
                yield f"{name} sliced", partial(self.verify, made, sliced=name)

    def uses_of_gradients(self, made: TrialInputs, usual: Use) -> Iterator[Trial]:
        names = [k for k in self.op.grads if (self.args(made) or {}).get(k) is not None]
        subsets = {tuple(k for k in names if k != left) for left in names} | {(k,) for k in names} if len(names) > 1 else set()
        for wanted in sorted(subsets, key=lambda s: (-len(s), s))[: 0 if self.once else 1 if self.compiled else None]:
            frozen = ", ".join(k for k in names if k not in wanted)
            yield f"{frozen} frozen", partial(self.verify, made, replace(usual, wanted=wanted), like=usual)
        for layout in LAYOUTS:
            if not self.impl.caveat:  # what it does with other layouts of upstream gradients is known, and in the docs
                use = replace(usual, layout=layout)
                like = use if layout == "expanded" else usual
                yield f"upstream gradient {layout}", partial(self.verify, made, use, like=like)
        args = self.args(made)
        outs = len([k for k in self.evidence(made, args, usual).oracle if k.startswith("output")]) if args else 0
        if outs > 1 and not self.impl.caveat:
            yield "upstream gradients unlike", partial(self.verify, made, replace(usual, layout="unlike"), like=usual)
        for i in range(outs if outs > 1 else 0):
            yield f"output {i} alone", partial(self.verify, made, replace(usual, outputs=(i,)))

    def autocast(self) -> Verdict | None:
        """The call under autocast, in float32 what the op takes so there alone. One in float32 is all in float32."""
        name = "bfloat16" if self.call.dtype == "float32" else self.call.dtype
        low, wide = (self.inputs(TrialInputs(self.small, dtype)) or {} for dtype in (name, "float32"))
        use, given = Use(self.call.grad, autocast=DTYPES[name]), [k for k in self.op.grads[1:] if low[k] is not None]
        apart = [k for k in given if self.op.check(**low | {k: wide[k]})]
        with autocast(use.autocast, low):
            mixed = {k: wide[k] for k in apart if not self.op.check(**low | {k: wide[k]})}
            args = wide if self.call.dtype == "float32" else low | mixed
            refused = self.op.misfits(base(self.name), leaf_copies(self.op, args, use.grad)[0])
        if refused or not mixed:
            return None
        step = torch.finfo(DTYPES[name]).eps
        return verify(self.op, self.impl, args, use=use, step=step, slack=further(name))

    def sizes(self, twin: str | None) -> Iterator[Trial]:
        few = self.tile or self.compiled
        for words, case in neighbours(self.op, dict(self.case))[: 0 if self.once else 1 if few else None]:
            for dtype in {self.call.dtype: None} if few or not twin else {twin: None, self.call.dtype: None}:
                where = "" if dtype == self.call.dtype else f", {dtype}"
                yield words + where, partial(self.verify, TrialInputs(tuple(case.items()), dtype))

    def repeat(self) -> Verdict | None:
        """The call twice, then with another between its forward and its backward, then with a second backward, then with other
        values in the same memory, then as at first."""
        made = TrialInputs(self.case, self.call.dtype)
        args, use, slack = self.args(made), Use(self.call.grad), further(self.call.dtype)
        other = self.args(replace(made, seed=7))
        if args is None or other is None:
            return None
        first = self.run(args, use)
        returned = {k: t.clone() for k, t in first.items() if t is not None}
        torch.rand(1)
        numbers = random_states()
        second = self.run(args, use)
        if not all(torch.equal(a, b) for a, b in zip(numbers, random_states())):
            return Verdict(False, why="it draws random numbers, or sets their seed")
        baseline = self.evidence(made, args, use)
        between = partial(self.run, other, use)
        verdict = verify(self.op, self.impl, args, use=use, baseline=baseline, slack=slack, between=between)
        if not verdict.ok:
            return replace(verdict, why=f"another call before its backward: {verdict.why}")
        if self.call.grad and self.impl.needs == "triton":  # Liger's kernels overwrite what a second backward would read
            verdict = verify(self.op, self.impl, args, use=replace(use, again=True), baseline=baseline, slack=slack)
            if not verdict.ok:
                return replace(verdict, why=f"a second backward over the same graph: {verdict.why}")
        before = {k: t.clone() for k, t in args.items() if isinstance(t, torch.Tensor) and owns_its_elements(t)}
        for k in before:
            args[k].copy_(other[k])
        verdict = verify(self.op, self.impl, args, use=use, slack=slack)
        if not verdict.ok:
            return replace(verdict, why=f"inputs overwritten in place: {verdict.why}")
        for _ in range(2):  # buffers that take turns come round
            self.run(args, use)
        if not all(unchanged(t, first[k]) for k, t in returned.items()):
            return Verdict(False, why="what a call returned is overwritten by later ones")
        for k, t in before.items():
            args[k].copy_(t)
        verdict = verify(self.op, self.impl, args, use=use, baseline=baseline, slack=slack)
        if not verdict.ok or self.impl.needs != "triton" or not same_bits(first, second):
            return verdict
        if not same_bits(first, self.run(args, use)):
            return Verdict(False, why="the same call after other work gives other bits")
        return verdict

    def run(self, args: dict, use: Use) -> dict:
        return evaluate(self.op, self.impl.run, args, use.grad, use=use)

    def whole(self) -> Verdict | None:
        args = self.args(TrialInputs(tuple(self.call.case.items()), self.call.dtype))
        if args is None or self.op.pieces is None:
            return None
        return verify_whole(self.op, self.impl, args, self.call.grad)


def wrong_now(op: Op, names: list[str], call: Call, device: str) -> dict[str, str]:
    """{candidate: why} of those that are wrong on inputs never seen before: asked after they were timed, many calls later."""
    wrong, baseline, made = {}, None, None
    for name in names:
        proof = Proof(op, name, call, device)
        made = made or TrialInputs(proof.case, call.dtype, seed=13)
        if (args := proof.args(made)) is None:
            continue
        baseline = baseline or proof.evidence(made, args, Use(call.grad))
        verdict = verify(op, proof.impl, args, use=Use(call.grad), baseline=baseline, slack=further(call.dtype))
        if not verdict.ok:
            wrong[name] = f"after it was timed: {verdict.why}"
    return wrong


def run_once(op: Op, name: str, call: Call, device: str) -> None:
    """The candidate on few elements, whatever comes of it."""
    proof = Proof(op, name, call, device)
    if (args := proof.args(TrialInputs(proof.small, call.dtype))) is not None:
        proof.run(args, Use(call.grad))


def most_kept() -> int:
    """Bytes of evidence that this process keeps on its GPU."""
    there = torch.cuda.get_device_properties().total_memory if torch.cuda.is_available() else 2**63
    return min(KEPT_BYTES, int(KEPT_SHARE * there))


def forget_evidence() -> None:
    """What is kept of a call is let go of."""
    _kept.clear()


def held_bytes(made: Evidence) -> int:
    return nbytes(*(t for found in (made.oracle, made.eager) for t in found.values()), made.scores)


def further(dtype: str) -> float:
    return FURTHER_EXACT if dtype == "float32" else FURTHER


def random_states() -> list[torch.Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else [])]


def owns_its_elements(t: torch.Tensor) -> bool:
    return not any(s == 0 and n > 1 for s, n in zip(t.stride(), t.shape))


def same_bits(a: dict, b: dict) -> bool:
    return all((a[k] is None) == (b[k] is None) and (a[k] is None or unchanged(a[k], b[k])) for k in a)


def elements(op: Op, case: dict, dtype: str) -> int:
    return sum(t.numel() for t in tensors(op.inputs(dtype=DTYPES[dtype], device="meta", **case)))


def provable(op: Op, case: dict, dtype: str) -> dict:
    """The case itself, or the largest like it whose oracle fits; the rest is proved by parts."""
    case = op.proof(dict(case))
    return case if op.pieces is None or op.smaller is not None else halved(op, case, dtype, PROVABLE)


def smaller(op: Op, case: dict, dtype: str) -> dict:
    """The case itself, or one of fewer elements that the same kernels serve."""
    limit = FEW_INTERPRETED if machine.triton_mode() == "interpret" else FEW
    return op.smaller(case, limit) if op.smaller is not None else halved(op, case, dtype, limit)


def halved(op: Op, case: dict, dtype: str, limit: int) -> dict:
    """The case with sizes that vary halved until its arguments have so few elements."""
    case = dict(case)
    while elements(op, case, dtype) > limit:
        sizes = {k: n for k in op.dynamic if isinstance(n := case.get(k), int) and n >= 16}
        if not sizes:
            break
        widest = max(sizes, key=sizes.__getitem__)
        case[widest] = math.ceil(sizes[widest] / 2)
    return case


def neighbours(op: Op, case: dict) -> list[tuple[str, dict]]:
    """Sizes that were rounded up to the case's own: one less, and just past the half."""
    found = []
    for name in op.dynamic:
        n = case.get(name)
        if isinstance(n, int) and n > 1:
            found += [(f"{name}={m}", case | {name: m}) for m in dict.fromkeys((n - 1, n // 2 + 1)) if m < n]
    return found
