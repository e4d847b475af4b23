"""Offer each mutant, a kernel with one fault, to whet's verification, and say which trial stops it.

Example: python tests/mutants/run.py --only "^rms_norm:" --dtype float32
The exit code is 1 where a kernel without a fault is rejected, 2 where no mutant matches.
"""

import argparse
import collections
import json
import os
import re
import sys
import time
from pathlib import Path

sys.path[0] = str(Path(__file__).parent.parent)
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # asks for a GPU without starting CUDA, which no fork survives

import torch  # noqa: E402

GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"

import rich  # noqa: E402
import rich.progress  # noqa: E402
import rich.table  # noqa: E402
import triton  # noqa: E402,F401
from mutants.children import Question, run, wall  # noqa: E402
from mutants.listing import KINDS, PACKAGE, Mutant, read_all  # noqa: E402


def question(mutant: Mutant, dtype: str, gpu_cases: bool, sample: bool) -> Question:
    case = mutant.sample if sample else mutant.gpu_case if gpu_cases and mutant.gpu_case else mutant.case
    call = dict(op=mutant.op, case=case, dtype=mutant.dtype or dtype, grad=mutant.grad)
    return Question(mutant, call, mutant.impl, mutant.path, "" if GPU else mutant.target)


def chosen(args: argparse.Namespace) -> list[Mutant]:
    """The mutants asked for that can run here."""
    def fits(m: Mutant) -> bool:
        here = m.needs in ("", "gpu" if GPU else "interpreter")
        return here and (not args.only or args.only.search(f"{m.id} [{m.kind}]") is not None)

    found = [m for m in read_all() if fits(m) and (m.sample or not args.sample)]
    return found[: args.sample] if args.sample else found


def asked(questions: list[Question], args: argparse.Namespace, told: str) -> dict[str, dict]:
    """{key or id: answer}"""
    found = {}
    console = rich.console.Console(stderr=True, soft_wrap=True)
    with rich.progress.Progress(console=console, disable=args.json or not sys.stderr.isatty(), transient=True) as bar:
        task = bar.add_task(told, total=len(questions))
        for q, answer in run(questions, args.jobs, args.limit, Path(args.whet)):
            found[q.mutant.id if q.mutant else q.key] = answer
            if q.mutant and not args.json:
                line = f"{wall(answer) or 'NOT STOPPED':24} {q.mutant.id} [{q.mutant.kind}]"
                console.print(line, markup=False, highlight=False)
            bar.advance(task)
    return found


def measured(args: argparse.Namespace) -> tuple[list[dict], list[str]]:
    """A row for each mutant, and what is wrong with the run itself: unmutated kernels that were rejected."""
    questions = [question(m, args.dtype, args.gpu_cases, bool(args.sample)) for m in chosen(args)]
    plain = list({q.key: q.of_whet for q in questions}.values())
    right = asked(plain, args, "unmutated kernels")
    faults = [f"whet as it is, {key}: {a.get('why') or a.get('error') or a.get('lost')}" for key, a in right.items() if wall(a)]
    answers = asked(questions, args, "mutants")
    rows = []
    for q in questions:
        m, a = q.mutant, answers[q.mutant.id]
        told = a.get("why") or a.get("error") or a.get("lost") or ""
        stopped = wall(a) if wall(a) != wall(right[q.key]) else None  # what stops the right kernel too stops no fault
        if told.startswith("refused"):
            faults.append(f"{m.id} was not tried: {told}")
        rows.append(dict(
            op=m.op, name=m.name, kind=m.kind, impl=m.impl, call=q.call, stopped_by=stopped, why=told,
            share=a.get("share"), seconds=a["seconds"], unmutated_seconds=right[q.key]["seconds"],
        ))
    return rows, faults


def table(rows: list[dict]) -> rich.table.Table:
    made = rich.table.Table(title="mutants stopped")
    for name, justify in (("kind", "left"), ("mutants", "right"), ("stopped", "right"), ("by", "left")):
        made.add_column(name, justify=justify)
    groups = [(kind, [r for r in rows if r["kind"] == kind]) for kind in KINDS]
    for kind, group in [(k, g) for k, g in groups if g] + [("all", rows)]:
        walls = collections.Counter(r["stopped_by"] for r in group if r["stopped_by"])
        if kind == "all":
            made.add_section()
        share = f"{sum(walls.values())} ({sum(walls.values()) / len(group):.0%})"
        made.add_row(kind, str(len(group)), share, ", ".join(f"{w} {n}" for w, n in walls.most_common()))
    return made


def summary(rows: list[dict]) -> dict:
    stopped = [r for r in rows if r["stopped_by"]]
    return dict(
        mutants=len(rows), stopped=len(stopped), share=round(len(stopped) / max(1, len(rows)), 4),
        walls=dict(collections.Counter(r["stopped_by"] or "nothing" for r in rows).most_common()),
    )


def save(rows: list[dict], faults: list[str], args: argparse.Namespace) -> None:
    """A record of the run; whet itself is imported only now, when nothing is forked any more."""
    sys.path.insert(0, str(Path(args.whet).parent))
    from whet.report import record

    found = dict(dtype=args.dtype, gpu_cases=args.gpu_cases, summary=summary(rows), rejected=faults, mutants=rows)
    command = " ".join(["python tests/mutants/run.py", *sys.argv[1:]])
    name = " ".join(["mutants", args.dtype, *(["gpu"] if args.gpu_cases else []), *([args.name] if args.name else [])])
    print(f"saved {record.write(record.make(command, found), args.record, name)}")


def pattern(text: str) -> re.Pattern:
    try:
        return re.compile(text)
    except re.error as e:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {e}") from None


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=pattern, metavar="PATTERN", help="a regular expression, found in 'op: name [kind]'")
    parser.add_argument("--sample", type=int, metavar="N", default=0, help="the first N of the test-suite's, at tiny sizes")
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="bfloat16", help="(default bfloat16)")
    parser.add_argument("--gpu-cases", action="store_true", help="at the sizes of real use, for a GPU")
    parser.add_argument("--jobs", type=int, default=2 if GPU else os.cpu_count(), help="at once (default: cores; 2 on a GPU)")
    parser.add_argument("--limit", type=float, default=300.0, metavar="S", help="seconds for one mutant (default 300)")
    parser.add_argument("--whet", default=str(PACKAGE), metavar="FOLDER", help="the package to mutate (default: this tree's)")
    parser.add_argument("--record", nargs="?", const="records", metavar="FOLDER", help="save a record (default: in records)")
    parser.add_argument("--name", default="", help="what to add to the record's name")
    parser.add_argument("--json", action="store_true", help="print rows as JSON")
    args = parser.parse_args()
    if not chosen(args):
        parser.error(f"no mutant that runs here matches; the ops are {', '.join(sorted({m.op for m in read_all()}))}")
    return args


def main() -> int:
    args, began = options(), time.monotonic()
    rows, faults = measured(args)
    if args.json:
        print(json.dumps(dict(summary=summary(rows), rejected=faults, mutants=rows)))
    else:
        for r in (r for r in rows if not r["stopped_by"]):
            print(f"not stopped  {r['op']}: {r['name']} [{r['kind']}]" + (f"  share {r['share']}" if r["share"] else ""))
        rich.print(table(rows))
        for fault in faults:
            print(f"wrong: {fault}")
        print(f"{len(rows)} mutants in {time.monotonic() - began:.0f} s")
    if args.record:
        save(rows, faults, args)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
