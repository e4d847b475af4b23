"""The tables of calls, plans, proofs and the machine, and the lines under them. All take plain dicts, as records hold them."""

import collections
import inspect
import re
from collections.abc import Callable

from rich.console import Console

from whet import ncu
from whet.figures import ms, percent
from whet.op import Call, Op, base
from whet.proofs import OUTCOMES
from whet.race import FASTEST, NARROW, TIE, TIED, Timing
from whet.report.cells import number, shown
from whet.report.table import Column, Table, columns

OVER = "over 100%"  # of a roof that is beaten
MODES = {"eager": "with launches", "graph": "graph"}  # a mode as it is printed: eager is an impl's name too
SLACK = 0.05  # a share of the time: the roof of memory is a copy's, and other mixes of reads and writes differ slightly


def mode_label(e: dict) -> str:
    return MODES.get(e.get("mode", ""), e.get("mode") or "")


def plan_label(name: str) -> str:
    """A plan's name as it is printed, or a text that names it: "eager" becomes "stock", since eager is an impl's name."""
    return re.sub(r"(^|kept )eager\b(?: \+ (choices|swapped))?", lambda m: m[1] + (m[2] or "stock"), name)


def spread(item: dict) -> float | None:
    """The spread of anything that holds a timing's fields, by the clock's own rule; None where it was not timed."""
    if not item.get("ms") or any(number(item.get(k)) is None for k in ("ms", "low", "high", "samples")):
        return None
    return Timing(item["ms"], item["low"], item["high"], item["samples"]).spread


def budget(item: dict) -> str:
    """The error over the largest allowed; * where a smaller call was verified than was timed."""
    return shown(item.get("share"), ".2f", " *" if item.get("proved") else "")


def of_roof(share: float, spread: float = 0.0) -> str:
    """A share of what the machine was measured to reach; above it by more than the spread, the ceiling is wrong."""
    return percent(share) if share <= 1 + max(spread, SLACK) else OVER


def roofline(e: dict, timed: float | None, spread: float = 0.0) -> str:
    """The share of the floor in a time and what bounds it; where that is compute, the rate too. spread: also as a share."""
    if not timed or not e.get("floor_ms"):
        return "-"
    share, rate = f"{of_roof(e['floor_ms'] / timed, spread)} {e['bound']}", e.get("flops", 0) / timed / 1e9
    return f"{share}, {rate:.{0 if rate >= 10 else 2}f} TFLOP/s" if e["bound"] == "compute" and rate else share


def versus(item: dict) -> str:
    """A candidate's time over the fastest one's, and the interval of that ratio: the figures that decide."""
    if "vs_best" not in item:
        return "-"
    low, high = f"{item['vs_best_low']:.2f}", f"{item['vs_best_high']:.2f}"
    return f"{item['vs_best']:.2f}x" + (f" ({low}-{high})" if low != high else "")


def best(e: dict) -> dict[str, str]:
    """{impl: candidate}: of each impl's verified variants the chosen one, else the fastest."""
    found: dict[str, list[str]] = {}
    for name, c in e["candidates"].items():
        if c["ok"]:
            found.setdefault(base(name), []).append(name)

    def rank(name: str) -> tuple:
        return name != e.get("chosen"), e["candidates"][name].get("ms") or float("inf")

    return {impl: min(names, key=rank) for impl, names in found.items()}


def hardware(m: dict) -> str:
    """A device's capability, cores and memory in one line; what a record lacks is left out."""
    cc, cores = m.get("capability"), "SMs" if m.get("device") == "cuda" else "cores"
    capability = f"compute capability {cc[0]}.{cc[1]}" if cc else "no CUDA capability" if m.get("device") else ""
    counted = {"sms": cores, "threads": "threads", "memory_gib": "GiB"}
    found = [capability, *(f"{m[k]} {unit}" for k, unit in counted.items() if m.get(k))]
    return ", ".join(filter(None, [*found, f"L2 {m['l2_mib']:.0f} MiB" if m.get("l2_mib") else ""]))


def versions(m: dict) -> str:
    return ", ".join(f"{k} {m[k.lower()]}" for k in ("torch", "triton", "whet", "Python") if m.get(k.lower()))


TRITON = {
    "gpu": "compiles and runs on this GPU", "interpret": "interprets kernels on the CPU (TRITON_INTERPRET=1)",
    "none": "no GPU to run on: kernels are checked in the interpreter and compiled ahead of time, never timed",
}


def machine_table(m: dict, roof: dict | None) -> Table:
    """A machine, its versions, and the ceilings that were measured on it."""
    table = Table("this machine", columns("", ""), head=False)
    table.add("GPU" if m["device"] == "cuda" else "CPU (no GPU found)", m["name"])
    table.add("", hardware(m))
    table.add("versions", versions(m))
    table.add("Triton", TRITON.get(m.get("triton_mode", ""), "") if m["triton"] else "not installed")
    if roof:
        table.add("copy, measured", f"{roof['copy_gbs']:.0f} GB/s, bytes read plus bytes written")
        if roof.get("busy"):
            table.add("measured under load", f"{roof['busy']}: not kept, measured again next time")
        table.add("matmul, measured", ", ".join(f"{k} {v:.{0 if v >= 10 else 2}f} TFLOP/s" for k, v in roof["tflops"].items()))
    return table


def ops_table(ops: dict[str, Op], whole: bool = False) -> Table:
    """One row per op; whole: all of its meaning, not the first line alone."""
    table = Table("ops", columns("op", "meaning", "impls", "refuses"), lines=True)
    for op in ops.values():
        refusing: dict[str, list[str]] = {}
        for name, impl in op.impls.items():
            for limit in impl.limits:
                refusing.setdefault(limit, []).append(name)
        limits = [f"{', '.join(names)}: {limit}" for limit, names in refusing.items()]
        meaning = inspect.cleandoc(op.reference.__doc__ or "")
        meaning = meaning if whole else meaning.splitlines()[0]
        table.add(f"{op.name}{op.signature}", meaning, ", ".join(op.impls), "\n".join(limits) or "-")
    return table


def entry_id(entry: dict) -> str:
    call = Call(**entry["call"])
    sizes = {k: v for k, v in call.case.items() if v is not None and v is not False and v != "contiguous"}
    return " ".join([call.op, *(k if v is True else f"{k}={v}" for k, v in sizes.items()), call.dtype])


def counted_id(entry: dict) -> str:
    """A call and how often a step makes it."""
    return f"{entry_id(entry)} (x{entry.get('count', 1)})"


CALLS = (
    Column("call", code=True), Column("mode", rank=2), Column("impl"), Column("ms", ms), Column("± spread", ms, 5),
    Column("vs fastest", str, 1), Column("of roofline", str, 3), Column("error / budget", str, 4),
    Column("extra MiB", "{:,.1f}", 7), Column("host us", "{:.0f}", 6), Column("note"),
)


def calls_table(entries: list[dict], title: str = "candidates: verified, then timed in turns") -> Table:
    """One row per impl of each call, of its tiles the best, the chosen one marked. What was refused is in `left_out`."""
    table = Table(title, CALLS, merge=2)
    for e in entries:
        for name in best(e).values():
            c = e["candidates"][name]
            timed = number(c.get("ms"))
            reached = roofline(e, timed, (spread(c) or 0.0) / (timed or 1.0))
            table.add(
                counted_id(e), mode_label(e), name, timed, spread(c), versus(c), reached, budget(c),
                c.get("peak_mib"), c.get("host_us"), note(e, name), marked=name == e.get("chosen"),
            )
    return table


def note(e: dict, name: str) -> str:
    notes = ["interpreted only, sizes reduced"] if e["candidates"][name].get("interpreted") else []
    if name == e.get("chosen"):
        notes = ["chosen", *([e["why"]] if e.get("why", FASTEST) != FASTEST else [])]
        notes += [beside_rival(e)] if e.get("rival") else []
    tiles = sum(base(n) == base(name) and "ms" in c for n, c in e["candidates"].items())
    return ", ".join([*filter(None, notes), *([f"best of {tiles} tiles"] if tiles > 1 else [])])


def beside_rival(e: dict) -> str:
    """The chosen candidate against the best other: how many times as fast, a tie, or undecided."""
    over, rival, why = e["vs_rival"], e["rival"], e.get("why", FASTEST)
    if why.startswith(TIED):
        return f"tied with {rival}" if abs(over - 1) <= NARROW else ""
    if why == FASTEST and e["candidates"].get(rival, {}).get("vs_best_low", over) <= 1 + TIE:
        return f"a tie with {rival}"
    return f"{over:.2f}x {rival}" if over >= 1 else f"{rival} took {over:.2f}x its time, undecided"


def busy(entries: list[dict], result: dict | None = None) -> list[str]:
    """One line where the machine was busy while something was timed."""
    found = [(entry_id(e), e["busy"]) for e in entries if e.get("busy")]
    found += [("the plans", result["busy"])] if result and result.get("busy") else []
    if not found:
        return []
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    what = f"{found[-1][1]} while {found[-1][0]}{more} ran"
    return [f"the machine was busy: {what}; run again on an idle machine for reliable figures"]


def stale(entries: list[dict]) -> list[str]:
    """One line where a time is shorter than the measured ceilings allow."""
    if not any(OVER in roofline(e, e.get("ms")) for e in entries):
        return []
    return [f"{OVER}: faster than the measured ceilings allow, so they are stale, unless the data sits in a CPU's cache; "
            "`whet machine --again` measures them again"]


def left_out(entries: list[dict]) -> list[str]:
    """The candidates that were refused or rejected, one line per reason."""
    reasons: dict[str, dict[str, list[str]]] = {}
    for e in entries:
        for name, c in e["candidates"].items():
            if not c["ok"]:
                reasons.setdefault(c["why"], {}).setdefault(name, []).append(e["call"]["op"])
    return [
        f"not a candidate: {', '.join(names)} for {', '.join(dict.fromkeys(sum(names.values(), [])))}: {why}"
        for why, names in reasons.items()
    ]


def proved(entries: list[dict], name: Callable[[dict], str] = entry_id) -> list[str]:
    """The calls, marked * in a table, that were verified at a smaller size than they were timed; one line per call."""
    smaller = {name(e): c["proved"] for e in entries for c in e["candidates"].values() if c.get("proved")}
    why = "the float64 reference of the whole is too large"
    return [f"{call} was timed at full size and verified as {key}: {why}" for call, key in smaller.items()]


def show_calls(console: Console, entries: list[dict]) -> None:
    console.print(calls_table(entries))
    for line in (*(f"* {line}" for line in proved(entries)), *left_out(entries), *stale(entries)):
        console.print(line)


def counters_table(rows: list[dict]) -> Table:
    """One row per kernel: time, clock, utilisation of each unit in percent, warps and their stall reasons."""
    keys = {"us": "us", "MHz": "mhz", "regs": "registers", "KiB": "shared_kib", "warps": "warps"} | {u: u for u in ncu.UNITS}
    figures = [Column(title, "{:.0f}", rank) for rank, title in enumerate(keys)]
    names = (Column("call"), Column("impl"), Column("kernel", cut=40))
    table = Table(
        "counters: percent of what each unit can do", (*names, *figures, Column("warps wait for", rank=len(keys))), merge=2
    )
    for row in rows:
        stalls = ", ".join(f"{s} {n:g}" for s, n in row["stalls"].items())
        table.add(row["call"], row["impl"], row["kernel"].partition("(")[0], *(row[k] for k in keys.values()), stalls)
    return table


def chosen_note(result: dict) -> str:
    """How the plan was chosen; older records have only whether it was a tie."""
    why = result.get("why") or (TIED if result.get("tied") else FASTEST)
    return "chosen" if why == FASTEST else f"chosen, {plan_label(why)}"


PLANS = (
    Column("plan"), Column("step ms", ms), Column("± spread", ms, 6), Column("baseline beside it, ms", ms, None),
    Column("vs fastest", str, 2), Column("samples/s", "{:,.0f}", 3), Column("speed-up", "{:.2f}x", 1),
    Column("peak MB", "{:,.0f}", 5), Column("predicted MB", "{:,.0f}", 7), Column("error / budget", str, 4), Column("note"),
)


def plans_table(result: dict) -> Table:
    """One row per plan, the chosen one marked; a plan that failed has its reason."""
    stored = ", from the lock" if result.get("from_lock") else ""
    step = "one forward" if result.get("kind") == "forward" else "one training step"
    table = Table(f"plans for {result.get('target') or 'a model'}: {step}{stored}", PLANS)
    for p in result.get("plans") or []:
        timed, chosen = number(p.get("ms")), p.get("name") == result.get("chosen")
        rates = [p.get(k) if timed else None for k in ("samples_per_s", "speedup")]
        table.add(
            plan_label(p.get("name") or ""), timed, spread(p), p.get("before_ms"), versus(p), *rates, p.get("peak_mb") or None,
            p.get("predicted_mb"), budget(p), chosen_note(result) if chosen else p.get("why") or "", marked=chosen,
        )
    return table


def against_line(other: dict) -> str:
    """The chosen plan beside another model that ran in turns with it."""
    between = f"{other['speedup_low']:.2f} to {other['speedup_high']:.2f}"
    took = f"{ms(other['ms'])} ms" + (f", {other['peak_mb']:,.0f} MB" if other.get("peak_mb") else "")
    return f"{other['speedup']:.2f}x ({between}) as fast as {other['name']}: {ms(other['plan_ms'])} ms to {took}, in turns."


def proofs_table(rows: list[dict], by_impl: bool = True) -> Table:
    """How many calls of each op, or of each of its impls, were right, refused, rejected or failed; then of all."""
    keys = ("op", "impl") if by_impl else ("op",)
    table = Table("proofs", [*columns(*keys), *columns(*OUTCOMES, form="{:,}")])
    counts: dict[tuple, collections.Counter] = {}
    for row in rows:
        for key in ((row["op"], base(row["impl"]))[:len(keys)], ("all", "")[:len(keys)]):
            counts.setdefault(key, collections.Counter())[row["outcome"]] += 1
    for key in sorted(counts, key=lambda key: key[0] == "all"):
        table.add(*key, *(counts[key][k] for k in OUTCOMES))
    return table


def not_right(rows: list[dict]) -> list[str]:
    """Each candidate that was rejected or failed, with its call and the reason."""
    wrong = [row for row in rows if row["outcome"] in ("rejected", "failed")]
    calls = [Call(row["op"], row["case"], row["dtype"], False).key.removesuffix(" fwd") for row in wrong]
    return [f"{row['outcome']}: {row['impl']}, {call}: {row['why']}" for row, call in zip(wrong, calls)]


def show_proofs(console: Console, rows: list[dict]) -> None:
    console.print(proofs_table(rows))
    for line in not_right(rows):
        console.print(line)
