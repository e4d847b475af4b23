"""Terminal tables. Each takes plain dicts, as records hold them."""

import inspect
import re
from collections.abc import Callable

from rich.console import Console

from whet import ncu
from whet.figures import ms, percent
from whet.op import Call, Op, base
from whet.proofs import OUTCOMES
from whet.race import FASTEST, NARROW, TIE, TIED, Timing
from whet.report.fit import Table

OVER = "over 100%"  # of a roof that is beaten
MODES = {"eager": "with launches", "graph": "graph"}  # a mode as it is printed: eager is an impl's name too
SLACK = 0.05  # a share of the time: the roof of memory is a copy's, and other mixes of reads and writes differ by a little


def mode_label(e: dict) -> str:
    return MODES.get(e.get("mode", ""), e.get("mode") or "")


def plan_label(name: str) -> str:
    """A plan's name as it is printed, or a text about it: "eager" alone is an impl, and a plan of stock calls."""
    return re.sub(r"(^|kept )eager\b( \+ choices)?", lambda m: m[1] + ("choices" if m[2] else "stock"), name)


def spread(item: dict) -> float | None:
    """The spread of anything that holds a timing's fields, by the clock's own rule."""
    return Timing(item["ms"], item["low"], item["high"], item["samples"]).spread if item.get("ms") else None


def of_roof(share: float, spread: float = 0.0) -> str:
    """A share of what the machine was measured to reach; who beats that by more than the spread shows it to be wrong."""
    return percent(share) if share <= 1 + max(spread, SLACK) else OVER


def roofline(e: dict, timed: float | None, spread: float = 0.0) -> str:
    """The share of the floor in a time and what bounds it; where that is compute, the rate too. spread: also as a share."""
    if not timed or not e.get("floor_ms"):
        return "-"
    share, rate = f"{of_roof(e['floor_ms'] / timed, spread)} {e['bound']}", e.get("flops", 0) / timed / 1e9
    return f"{share}, {rate:.{0 if rate >= 10 else 2}f} TFLOP/s" if e["bound"] == "compute" and rate else share


def versus(item: dict) -> str:
    """A candidate's time over the fastest one's, and the interval in which that ratio lies: the figures that decided."""
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


def machine_table(m: dict, roof: dict | None) -> Table:
    table = Table(title="this machine", show_header=False)
    kind = f"compute capability {m['capability'][0]}.{m['capability'][1]}" if m["capability"] else "no CUDA capability"
    table.add_row("GPU" if m["device"] == "cuda" else "CPU (no GPU found)", m["name"])
    threads = f", {m['threads']} threads" if m.get("threads") else ""
    table.add_row("", f"{kind}, {m['sms']} {'SMs' if m['device'] == 'cuda' else 'cores'}{threads}, {m['memory_gib']} GiB")
    table.add_row("versions", f"torch {m['torch']}, triton {m['triton']}, whet {m['whet']}, Python {m['python']}")
    words = {
        "gpu": "compiles and runs on this GPU", "interpret": "interprets kernels on the CPU (TRITON_INTERPRET=1)",
        "none": "no GPU to run on: kernels are checked in the interpreter and compiled ahead of time, never timed",
    }
    table.add_row("Triton", words[m["triton_mode"]] if m["triton"] else "not installed")
    if roof:
        table.add_row("copy, measured", f"{roof['copy_gbs']:.0f} GB/s read + written")
        if roof.get("busy"):
            table.add_row("measured under load", f"{roof['busy']}: not kept, measured again next time")
        table.add_row("matmul, measured", ", ".join(f"{k} {v:.1f} TFLOP/s" for k, v in roof["tflops"].items()))
    return table


def ops_table(ops: dict[str, Op], whole: bool = False) -> Table:
    """One row per op; whole: all of its meaning, not the first line alone."""
    columns = ("op", "meaning", "impls", "refuses")
    table = Table(*columns, keep=columns, title="ops", show_lines=True)
    for op in ops.values():
        refusing: dict[str, list[str]] = {}
        for name, impl in op.impls.items():
            for limit in impl.limits:
                refusing.setdefault(limit, []).append(name)
        limits = [f"{', '.join(names)}: {limit}" for limit, names in refusing.items()]
        meaning = inspect.cleandoc(op.reference.__doc__ or "")
        meaning = meaning if whole else meaning.splitlines()[0]
        table.add_row(f"{op.name}{op.signature}", meaning, ", ".join(op.impls), "\n".join(limits) or "-")
    return table


def entry_id(entry: dict) -> str:
    call = Call(**entry["call"])
    told = {k: v for k, v in call.case.items() if v is not None and v is not False and v != "contiguous"}
    return " ".join([call.op, *(k if v is True else f"{k}={v}" for k, v in told.items()), call.dtype])


def calls_table(entries: list[dict], title: str = "candidates: verified, then timed in turns") -> Table:
    """One line per impl of each call, of its tiles the best, the chosen one marked. What was refused is in `left_out`."""
    columns = ("call", "mode", "impl", "ms", "± spread", "vs fastest", "of roofline", "error / budget", "extra MiB", "host us")
    order = ("vs fastest", "mode", "of roofline", "error / budget", "± spread", "host us", "extra MiB")
    table = Table(*columns, "", keep=("call", "impl", "ms", ""), order=order, title=title)
    for e in entries:
        rows = {name: e["candidates"][name] for name in best(e).values()}
        for i, (name, c) in enumerate(rows.items()):
            timed, chosen = c.get("ms"), name == e.get("chosen")
            table.add_row(
                f"{entry_id(e)} (x{e['count']})" if i == 0 else "", mode_label(e) if i == 0 else "", name,
                ms(timed), ms(spread(c)), versus(c), roofline(e, timed, (spread(c) or 0.0) / (timed or 1.0)),
                f"{c['share']:.2f}{' *' if c.get('proved') else ''}",
                "-" if c.get("peak_mib") is None else f"{c['peak_mib']:.1f}",
                "-" if c.get("host_us") is None else f"{c['host_us']:.0f}", note(e, name),
                style="bold green" if chosen else None, end_section=i == len(rows) - 1,
            )
    return table


def note(e: dict, name: str) -> str:
    words = ["interpreted only, sizes reduced"] if e["candidates"][name].get("interpreted") else []
    if name == e.get("chosen"):
        words = ["chosen", *([e["why"]] if e.get("why", FASTEST) != FASTEST else [])]
        words += [beside_rival(e)] if e.get("rival") else []
    tiles = sum(base(n) == base(name) and "ms" in c for n, c in e["candidates"].items())
    return ", ".join([*filter(None, words), *([f"best of {tiles} tiles"] if tiles > 1 else [])])


def beside_rival(e: dict) -> str:
    """The chosen one beside the best other: how many times as fast, or that it is a tie, or that the other seemed faster."""
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
    return [f"a busy machine: {found[-1][1]} while {found[-1][0]}{more} ran; run again when it is quiet for surer figures"]


def stale(entries: list[dict]) -> list[str]:
    """One line where a time beats the measured ceilings."""
    if not any(OVER in roofline(e, e.get("ms")) for e in entries):
        return []
    return [f"{OVER}: faster than the measured ceilings allow, so they are stale, unless the data sits in a CPU's cache; "
            "`whet machine --again` measures them anew"]


def left_out(entries: list[dict]) -> list[str]:
    """Every candidate that lost its candidacy, with the reason; those that share a reason share a line."""
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
    """The calls, marked * in a table, that were verified at a smaller size than they were timed; said once per call."""
    smaller = {name(e): c["proved"] for e in entries for c in e["candidates"].values() if c.get("proved")}
    why = "the float64 reference of the whole is too large"
    return [f"{call} was timed as it stands and verified as {key}: {why}" for call, key in smaller.items()]


def show_calls(console: Console, entries: list[dict]) -> None:
    console.print(calls_table(entries))
    for line in (*(f"* {line}" for line in proved(entries)), *left_out(entries), *stale(entries)):
        console.print(line)


def counters_table(rows: list[dict]) -> Table:
    """One line per kernel: time, clock, how busy each unit is in percent, how many warps there were and what they awaited."""
    columns = ("call", "impl", "kernel", "us", "MHz", "regs", "KiB", "warps", *ncu.UNITS, "warps wait for")
    table = Table(*columns, keep=("call", "impl", "kernel", "us"), title="counters: percent of what each unit can do")
    before = None
    for row in rows:
        told = (row["call"], row["impl"])
        waits = ", ".join(f"{s} {n:g}" for s, n in row["stalls"].items())
        numbers = [row[k] for k in ("us", "mhz", "registers", "shared_kib", "warps", *ncu.UNITS)]
        table.add_row(
            *(told if told != before else ("", "")), row["kernel"].partition("(")[0][:40],
            *("-" if n is None else f"{n:.0f}" for n in numbers), waits,
        )
        before = told
    return table


def chosen_note(result: dict) -> str:
    """How the plan was chosen; older records say only whether it was a tie."""
    why = result.get("why") or (TIED if result.get("tied") else FASTEST)
    return "chosen" if why == FASTEST else f"chosen, {plan_label(why)}"


def plans_table(result: dict) -> Table:
    stored = ", from the lock" if result.get("from_lock") else ""
    columns = ("plan", "step ms", "± spread", "vs fastest", "samples/s", "speed-up", "peak MB", "error / budget", "")
    order = ("speed-up", "vs fastest", "samples/s", "error / budget", "peak MB", "± spread")
    title = f"plans for {result['target']}: {'one forward' if result.get('kind') == 'forward' else 'one training step'}{stored}"
    table = Table(*columns, keep=("plan", "step ms", ""), order=order, title=title)
    for r in result["plans"]:
        timed = r.get("ms")
        note = chosen_note(result) if r["name"] == result["chosen"] else r["why"]
        table.add_row(
            plan_label(r["name"]), ms(timed), ms(spread(r)), versus(r),
            f"{r['samples_per_s']:.0f}" if timed else "-", f"{r['speedup']:.2f}x" if timed else "-",
            f"{r['peak_mb']:.0f}" if r.get("peak_mb") else "-", f"{r['share']:.2f}" if "share" in r else "-", note,
            style="bold green" if r["name"] == result["chosen"] else None,
        )
    return table


def proofs_table(rows: list[dict]) -> Table:
    """How many calls of each impl were right, refused, rejected or failed; then each of the last two, with its reason."""
    table = Table("op", "impl", *OUTCOMES, "why", keep=("op", "impl", *OUTCOMES))
    counts: dict[tuple[str, str], dict[str, int]] = {}
    for row in rows:
        mine = counts.setdefault((row["op"], base(row["impl"])), {})
        mine[row["outcome"]] = mine.get(row["outcome"], 0) + 1
    for (op, impl), found in counts.items():
        table.add_row(op, impl, *(str(found.get(k, 0)) for k in OUTCOMES), "")
    for row in rows:
        if row["outcome"] in ("rejected", "failed"):
            call = Call(row["op"], row["case"], row["dtype"], True).key.removesuffix(" fwd+bwd")
            marks = ("1" if row["outcome"] == k else "" for k in OUTCOMES)
            table.add_row("", row["impl"], *marks, f"{call}: {row['why']}")
    return table
