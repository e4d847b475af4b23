"""Does every mutant change a result? Each is compared, bit by bit, with whet as it is over many valid uses of its op.

One that never differs is no fault but another way to write the same thing, and has no place in the list.
Example: python tests/mutants/shows.py --only "rms_norm"
"""

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

sys.path[0] = str(Path(__file__).parent.parent)
import torch  # noqa: E402
from mutants import run as runner  # noqa: E402
from mutants.children import Question, run  # noqa: E402

FEW = 16  # rows where values and uses are many
STAGES = ("plain", "values", "uses", "sizes")
VALUES = "overflow clipped sign tie non-finite cancellation option eps"
USES = "frozen-argument stale-buffer upstream-gradient output-alone"
LIKELY = dict.fromkeys(VALUES.split(), "values") | dict.fromkeys(USES.split(), "uses")
LIKELY |= {"neighbour-size": "sizes", "stride": "sizes"}


def digest(*found) -> str:
    """Of tensors, their strides left out, and of anything that prints alike; a NaN is a NaN."""
    made = hashlib.sha256()
    for f in found:
        if isinstance(f, torch.Tensor):
            f = f.detach().cpu()
            f = torch.nan_to_num(f.float(), nan=12345.0) if f.is_floating_point() else f
            made.update(f.contiguous().numpy().tobytes())
        else:
            made.update(repr(f).encode())
    return made.hexdigest()[:16]


class Use:
    """One op's impl at one case, called in ways that its contract allows."""

    def __init__(self, question: Question, few: bool):
        from whet import machine
        from whet.op import DTYPES, discover

        call = question.call
        self.op, self.impl, self.case, self.grad = discover()[call["op"]], question.impl, dict(call["case"]), call["grad"]
        if few and self.case.get("M", 0) > FEW:
            self.case["M"] = FEW
        self.device, self.dtypes = machine.this_machine().device, DTYPES

    def args(self, dtype: str = "bfloat16", seed: int = 0, **other) -> dict:
        torch.manual_seed(seed)
        return self.op.inputs(dtype=self.dtypes[dtype], device=self.device, **(self.case | other))

    def result(self, args: dict, wanted=None, outputs=None, lay: Callable = lambda t: t) -> str:
        """Outputs, gradients, arguments and upstream gradients afterwards."""
        from whet.op import as_tuple

        if self.op.misfits(self.impl, args):
            return "refused"
        args = {k: kept_apart(v) if k in self.op.mutates else v for k, v in args.items()}
        for k in (self.op.grads if wanted is None else wanted) if self.grad else ():
            if args[k] is not None:
                args[k] = args[k].detach().requires_grad_()
        leaves = [v for v in args.values() if isinstance(v, torch.Tensor) and v.requires_grad]
        outs = as_tuple(self.op.run(self.impl)(**args))
        used = [o for i, o in enumerate(outs) if o.requires_grad and outputs in (None, i)]
        generator = torch.Generator().manual_seed(7)
        douts = [torch.randn(o.shape, generator=generator).to(o.device, o.dtype) for o in used]
        douts = [d if i else lay(d) for i, d in enumerate(douts)]  # the others stay packed: strides unlike each other
        grads = torch.autograd.grad(used, leaves, douts, allow_unused=True) if used and leaves else ()
        return digest(*outs, *grads, *douts, *args.values(), torch.is_grad_enabled(), torch.get_default_dtype(), torch.rand(3))

    def first_of_two(self) -> str:
        """The first call's results and gradients, taken after a second call of the same size on other values."""
        from whet.op import as_tuple

        made = []
        for seed in (0, 1):
            args = self.args(seed=seed)
            for k in self.op.grads if self.grad else ():
                args[k] = args[k] if args[k] is None else args[k].detach().requires_grad_()
            made.append((args, as_tuple(self.op.run(self.impl)(**args))))
        grads: list = []
        for args, outs in (made[0], made[0], made[1]):
            leaves = [v for v in args.values() if isinstance(v, torch.Tensor) and v.requires_grad]
            used = [o for o in outs if o.requires_grad]
            if douts := [torch.full_like(o, 0.5) for o in used]:
                grads += torch.autograd.grad(used, leaves, douts, allow_unused=True, retain_graph=True)
        args, outs = made[0]
        args["x" if "x" in args else next(iter(args))].detach().mul_(2)  # another value at the same address
        with torch.no_grad():
            again = as_tuple(self.op.run(self.impl)(**args))
        return digest(*outs, *grads, *made[1][1], *again)

    def plain(self) -> Iterator[tuple[str, Callable[[], str]]]:
        yield "at the call", lambda: self.result(self.args())
        yield "in float32", lambda: self.result(self.args("float32"))

    def values(self) -> Iterator[tuple[str, Callable[[], str]]]:
        def changed(change: Callable, dtype: str = "float32") -> str:
            args = self.args(dtype)
            named = {k: v for k, v in args.items() if isinstance(v, torch.Tensor) and v.is_floating_point()}
            return self.result(args | {k: change(k, v) for k, v in named.items() if k not in ("cos", "sin", "scale")})

        def where(rank: int, f: Callable) -> Callable:
            return lambda k, v: f(v) if (v.dim() == 1) == (rank == 1) else v

        signs = where(1, lambda v: v * torch.where(torch.arange(len(v), device=v.device) % 2 == 0, -1.0, 1.0).to(v.dtype))
        yield "small values", lambda: changed(where(2, lambda v: v * 1e-3))
        for size in (30.0, 1e5, 1e19):
            yield f"values of {size:g}", partial(changed, where(2, lambda v, size=size: v * size), "bfloat16")
        yield "a common offset", lambda: changed(where(2, lambda v: v + 300.0))
        yield "weights of both signs", lambda: changed(signs)
        yield "a constant row", lambda: changed(where(2, lambda v: torch.cat([torch.ones_like(v[:1]), v[1:]])))
        yield "equal rows", lambda: changed(where(2, lambda v: v[:1].expand(v.shape).contiguous()))
        yield "an infinite column", lambda: changed(where(2, lambda v: torch.cat([v[..., :1] * 0 - torch.inf, v[..., 1:]], -1)))
        yield "a NaN", lambda: changed(where(2, lambda v: torch.cat([v[:-1], v[-1:] * torch.nan])))
        yield "a largest of 472", lambda: changed(where(2, lambda v: v.clamp(max=1.0) * 472.0), "bfloat16")
        for eps in (1e-2, 1e-12):
            if "eps" in self.args():
                yield f"eps {eps}", partial(lambda eps: self.result(self.args("float32") | {"eps": eps}), eps)
        if "target" in self.args():
            yield "nothing counts", lambda: self.result(self.args() | {"target": torch.full_like(self.args()["target"], -100)})

    def uses(self) -> Iterator[tuple[str, Callable[[], str]]]:
        yield "after a second call", self.first_of_two
        for k in self.op.grads if self.grad else ():
            others = [g for g in self.op.grads if g != k]
            yield f"frozen {k}", partial(lambda o: self.result(self.args(), wanted=o), others)
        for i in (0, 1):
            yield f"output {i} alone", partial(lambda i: self.result(self.args(), outputs=i), i)
        for layout in ("transposed", "sliced", "expanded"):
            yield f"upstream {layout}", partial(lambda name: self.result(self.args(), lay=partial(laid, name)), layout)

    def sizes(self) -> Iterator[tuple[str, Callable[[], str]]]:
        for k in self.op.dynamic:
            if isinstance(n := self.case.get(k), int) and n > 1:
                for other in (n - 1, n // 2 + 1):
                    yield f"{k}={other}", partial(lambda k, o: self.result(self.args(**{k: o})), k, other)
        for k, v in self.args().items():
            if isinstance(v, torch.Tensor) and v.dim() > 1:
                yield f"sliced {k}", partial(lambda k: self.result(self.args() | {k: laid("sliced", self.args()[k])}), k)


def kept_apart(t: torch.Tensor) -> torch.Tensor:
    """A copy of the same strides."""
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).copy_(t.detach())


def laid(layout: str, t: torch.Tensor) -> torch.Tensor:
    from whet.op import lay

    if t.dim() == 1 and layout == "sliced":
        return t.repeat_interleave(2)[::2]
    return lay(t, layout) if t.dim() > 1 else t


def serve(question: Question, stage: str) -> None:
    use, found = Use(question, few=stage in ("values", "uses")), {}
    for name, result in getattr(use, stage)():
        torch.set_grad_enabled(True)
        torch.set_default_dtype(torch.float32)
        try:
            found[name] = result()
        except Exception as e:
            found[name] = f"{type(e).__name__}"
    print(json.dumps({"uses": found}), flush=True)
    os._exit(0)


def compared(left: list[Question], stage: str, jobs: int) -> list[Question]:
    """Prints at which use each mutant first differs from whet as it is. Returns those that do not."""
    asked = partial(run, jobs=jobs, limit_s=600.0, serve=partial(serve, stage=stage))
    right = {q.key: a for q, a in asked(list({q.key: q.of_whet for q in left}.values()))}
    alike = []
    for q, a in asked(left):
        known = right[q.key].get("uses", {})
        seen = next((use for use, bits in a.get("uses", {"ends": ""}).items() if known.get(use) != bits), None)
        print(f"{seen:24} {q.mutant.id}", flush=True) if seen else alike.append(q)
    return alike


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="PATTERN", help="mutants whose 'op: name [kind]' matches")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="at a time (default: cores)")
    args = parser.parse_args()
    args.sample = 0
    left = [runner.question(m, "bfloat16", False, False) for m in runner.chosen(args) if not m.path]
    for likely in (True, False):  # first where a mutant of its kind is likely to show
        for stage in STAGES:
            tried = [q for q in left if (LIKELY.get(q.mutant.kind, "plain") == stage) == likely]
            left = [q for q in left if q not in tried] + compared(tried, stage, args.jobs)
    for q in left:
        print(f"NEVER                    {q.mutant.id}")
    return len(left) > 0


if __name__ == "__main__":
    sys.exit(main())
