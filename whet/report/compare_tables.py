"""A comparison of training runs as tables and sentences. Takes what whet.train.compare.compare returns: plain dicts."""

from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console

from whet.figures import figure, ms
from whet.report.cells import number
from whet.report.table import Column, Table

HEADLINES = ("time to target", "loss at equal training time", "loss at equal tokens", "tokens/s")
UNKNOWN = "whether this is significant cannot be known"
AFTER = {"tokens": " tokens", "time_s": " of training"}
SHOWN = 40  # letters of a recipe's value


def count(value: float | None) -> str:
    """819k, 1.24B: three digits that count."""
    if value is None:
        return "-"
    size, letter = next(((n, s) for n, s in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")) if abs(value) >= n), (1, ""))
    return f"{figure(value / size)}{letter}"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    size, unit = next(((n, u) for n, u in ((3600, "h"), (60, "min")) if abs(seconds) >= 2 * n), (1, "s"))
    return f"{figure(seconds / size)} {unit}"


FORMS: dict[str, Callable[[float | None], str]] = {
    "loss": lambda v: "-" if v is None else f"{v:.4f}", "time_s": duration, "tokens": count,
    "tok_s": lambda v: "-" if v is None else f"{v:,.0f}", "step": lambda v: "-" if v is None else f"{v:,.0f} steps",
    "ms": ms,
}


def spread(sample: dict, unit: str) -> str:
    """'3.2100 ± 0.0042': the mean over seeds and their standard deviation; how many have a figure where not all do."""
    values = sample["values"]
    known = [v for v in values if v is not None]
    if sample["mean"] is None:
        return f"{len(known)} of {len(values)} seeds" if known else "-"
    form = FORMS[unit]
    return form(sample["mean"]) + (f" ± {form(sample['sd'])}" if sample["sd"] is not None else "")


def signed(value: float, unit: str) -> str:
    text = FORMS[unit](abs(value))
    return f"{'-' if value < 0 else '+'}{text}"


ARMS = (
    Column("arm"), Column("seeds", "{:,}"), Column("parameters", count, 2), Column("steps", "{:,}", 1),
    Column("tokens", count, 1), Column("time", str, 1), Column("tokens/s", str), Column("step ms", str),
    Column("MFU", "{:.0%}", 3), Column("peak MiB", "{:,.0f}"), Column("loop over plan", "{:.3f}x", 3),
    Column("val loss", str),
)


def arms_table(c: dict) -> Table:
    table = Table("runs", ARMS)
    for a in c["arms"]:
        table.add(
            a["name"], len(a["runs"]), a["parameters"], a["steps"], a["tokens"], duration(a["time_s"]["mean"]),
            spread(a["tok_s"], "tok_s"), spread(a["ms"], "ms"), a["mfu"]["mean"], a["memory_mib"],
            a.get("overhead", {}).get("mean"),
            spread(a["final_loss"], "loss"),
        )
    return table


def setting(values: Sequence) -> str:
    """A recipe's value in an arm, or its values."""
    return " / ".join("-" if v is None else "''" if v == "" else str(v) for v in values)


def differences_table(c: dict) -> Table:
    """Only what is not the same in all runs."""
    names = [a["name"] for a in c["arms"]]
    table = Table("what differs", (Column("setting", code=True), *(Column(n, cut=SHOWN) for n in names)))
    for key, arms in [*c["differences"].items(), *c["other_differences"].items()]:
        table.add(key, *map(setting, arms))
    return table


def label(m: dict) -> str:
    """'val loss at 1,000 steps', 'time to val loss 3.2100'."""
    at = number(m["at"])
    if m["unit"] == "tok_s":
        return "tokens/s"
    if m["unit"] == "loss":
        where = m["key"].removeprefix("loss ") if at is None else f"at {FORMS[m['axis']](at)}"
        return f"val loss {where}" + ("" if at is None else AFTER.get(m["axis"], ""))
    return m["key"] if at is None else f"{m['key'].removesuffix('target')}val loss {at:.4f}"


def value(sample: dict, m: dict) -> str:
    never = m["unit"] in ("time_s", "tokens") and m["at"] is not None and not any(v is not None for v in sample["values"])
    return "never" if never else spread(sample, m["unit"])


def verdict(v: dict) -> str:
    """What a pair's figures allow to be said."""
    if v["significant"] is None:
        return f"{UNKNOWN}: {v['why']}" if v["difference"] is not None else v["why"]
    return f"significant: {v['winner']} is better" if v["significant"] else "not significant"


COMPARED = (
    Column("measure"), Column("arm"), Column("value", str), Column("difference", str), Column("95% interval", str, 1),
    Column("p", str, 2), Column("verdict"),
)


def measures_table(c: dict) -> Table:
    """Every other arm against the first; a significant better one is marked."""
    table = Table(f"against {c['base']}" if len(c["arms"]) > 1 else "measures", COMPARED, merge=1)
    for m in c["measures"]:
        name, unit, pairs = label(m), m["unit"], {v["arm"]: v for v in m["versus"]}
        for a, sample in zip(c["arms"], m["arms"]):
            v: dict[str, Any] = pairs.get(a["name"]) or {}
            known = v.get("difference") is not None
            why = "; ".join(reason.partition(": ")[0] for reason in m["withheld"])
            held = f"withheld: {why}" if why and a["name"] != c["base"] else ""
            interval = f"{signed(v['low'], unit)} to {signed(v['high'], unit)}" if v.get("low") is not None else None
            first = a["name"] == c["base"] and bool(pairs) and all(x["winner"] == c["base"] for x in pairs.values())
            table.add(
                name, a["name"], value(sample, m), signed(v["difference"], unit) if known else None, interval,
                None if v.get("p") is None else p_value(v["p"]), held or (verdict(v) if v else ""),
                marked=first or v.get("winner") == a["name"],
            )
    return table


def p_value(p: float, equals: str = "") -> str:
    return "under 0.0001" if p < 1e-4 else f"{equals}{p:.4f}"


def headline(c: dict) -> str:
    """The comparison in one sentence, or why there is none."""
    if len(c["arms"]) < 2:
        seeds = len(c["arms"][0]["runs"])
        return f"One arm, {c['base']}, with {seeds} seed{'s' * (seeds > 1)}: there is no other arm to compare it with."
    by_key = {m["key"]: m for m in c["measures"]}
    kinds = (("Losses", "loss"), ("Times", "time"))
    why = [f"{what} are not compared: {reason}" for what, key in kinds for reason in c["withheld"][key]]
    refused = f"No winner is called. {'. '.join(why)}." if why else ""
    for key in HEADLINES:
        m = by_key[key]
        pairs = [v for v in m["versus"] if v["difference"] is not None]
        if pairs:
            best = (min if m["better"] == "lower" else max)(pairs, key=lambda v: v["difference"])
            return f"{refused} {sentence(m, best)}".strip()
    return refused or "There is no point that all runs reach, and no loss: nothing to compare."


def sentence(m: dict, v: dict) -> str:
    """'b reaches a val loss of 3.2100 in 0.71 times the training time of a; ...'."""
    arm, base, ratio = v["arm"], v["against"], number(v["ratio"])
    if m["unit"] == "loss":
        way = "lower" if v["difference"] < 0 else "higher"
        size = f"{abs(v['difference']):.4f} {way} than" if v["difference"] else "the same as"
        text = f"A{label(m).removeprefix('val loss a')} the val loss of {arm} is {size} that of {base}"
    elif m["unit"] == "tok_s":
        text = f"{arm} has {ratio or 0:.2f} times the tokens/s of {base}"
    else:
        what = "training time" if m["unit"] == "time_s" else "tokens"
        text = f"{arm} reaches a val loss of {m['at']:.4f} in {ratio or 0:.2f} times the {what} of {base}"
    if v["significant"] is None:
        return f"{text}; {verdict(v)}."
    kind = "a significant difference" if v["significant"] else "which is not significant"
    return f"{text}, {kind} (95%, p {p_value(v['p'], '= ')})."


def show(console: Console, c: dict) -> None:
    console.print(arms_table(c))
    if c["differences"] or c["other_differences"]:
        console.print(differences_table(c))
    if len(c["arms"]) > 1:
        console.print(measures_table(c))
    console.print(headline(c))
    for line in c["notes"]:
        console.print(line)
