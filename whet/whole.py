"""The proof of a call that is too large for its oracle: parts of its results, each against the oracle of that part."""

from collections.abc import Iterator

import torch

from whet.judge import Verdict, judge
from whet.op import Impl, Op
from whet.parts import Group
from whet.verify import Use, coarse_steps, evaluate, poisoned_empty, upstream, widen


def verify_whole(op: Op, impl: Impl, args: dict, grad: bool) -> Verdict | None:
    """The verdict on a call of any size, by parts. None where the op has no parts for it."""
    assert op.pieces is not None
    with poisoned_empty(impl.needs != "torch"):
        actual = evaluate(op, impl.run, args, grad)
    outs = [t for k, t in actual.items() if k.startswith("output")]
    douts = {i: upstream(t, i, "contiguous") for i, t in enumerate(outs) if t.is_floating_point()}
    coarse = coarse_steps(op, args)
    worst = None
    for group in op.pieces(**args):
        for verdict in judge_group(op, group, actual, douts, grad, coarse):
            if not verdict.ok:
                return verdict
            worst = verdict if worst is None else max(worst, verdict, key=lambda v: v.share)
    return worst


def judge_group(op: Op, group: Group, actual: dict, douts: dict, grad: bool, coarse: dict) -> Iterator[Verdict]:
    regions = {name: at for name, at in group.regions.items() if actual.get(name) is not None}
    exact = {name: torch.zeros_like(actual[name][at], dtype=torch.float64) for name, at in regions.items()}
    rounded = {name: t.clone() for name, t in exact.items()}
    for part in group.parts:
        given = {i: d[part.upstream[f"output {i}"]] for i, d in douts.items()}
        oracle = evaluate(op, op.reference, {k: widen(v) for k, v in part.args.items()}, grad, use=Use(grad, given=given))
        eager = evaluate(op, op.reference, part.args, grad, use=Use(grad, given=given))
        direct = [name for name in oracle if name in part.index and oracle[name] is not None]
        here = {name: actual[name][part.index[name]] if actual[name] is not None else None for name in direct}
        yield judge(here, {n: eager[n] for n in direct}, {n: oracle[n] for n in direct}, coarse=coarse, beside={})
        for name, at in part.added.items():
            if name in exact:
                exact[name][at] += oracle[name]
                rounded[name][at] += eager[name].double()
    found: dict = {name: actual[name][at] for name, at in regions.items()}
    yield judge(found, {n: t.to(found[n].dtype) for n, t in rounded.items()}, exact, coarse=coarse, beside={})
