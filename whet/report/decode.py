"""The decoder's figures: the summary of a generated text, and the tables of its benchmark for terminal, README and docs."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from rich.console import Console

from whet.figures import ms, percent
from whet.report.findings import layers_table, must_read, tokens_table
from whet.report.markdown import Records, absent, bullets, by_machine, grid, read, source
from whet.report.table import Column, Table, columns
from whet.report.tables import spread

TITLES = {
    "transformers": "Transformers, eager", "transformers-optimized": "Transformers, eager, whet.optimize",
    "transformers-static": "Transformers, static cache, compiled",
    "gpt-fast": "gpt-fast style, compiled", "gpt-fast-tuned": "gpt-fast style, compiled and tuned",
    "whet graph": "whet, one graph a token", "whet persistent": "whet, one kernel for all tokens",
}
ROWS = (
    *columns("batch", "context", "system"), Column("weights", rank=2), Column("ms a token", ms, 1), Column("± spread", ms, 4),
    Column("tokens/s", "{:,.0f}"), Column("TB/s", "{:.2f}", 5), Column("of floor", percent, 3),
    Column("error / budget", "{:.2f}", 6),
)
QUALITY = (
    Column("weights"), *columns("perplexity", "in float32", "KL to float32", "± standard error", form="{:.4g}", rank=1),
    Column("same top-1 where decided", "{:.2%}", 1), Column("of tokens", str, 2),
)


def summary_lines(made: dict) -> Iterator[str]:
    """The summary printed under a generated text: tokens, rate, time to first token, share of the bandwidth floor."""
    count = len(made["tokens"])
    rate = f", {made['tokens_per_s']:.1f} tokens/s" if made["tokens_per_s"] else ""
    reused = f" ({made['reused_tokens']} of them still in the cache)" if made["reused_tokens"] else ""
    yield f"{count} tokens{rate}; the prompt has {made['prompt_tokens']}{reused}; ended by: {made['reason']}"
    if made["first_token_s"] is not None and made["since_start_s"] is not None:
        parts = f"imports {made['imported_s']:.2f}, weights {made['loaded_s']:.2f}"
        since_start = f"{made['since_start_s']:.2f} s after the start of the command ({parts})"
        yield f"first token: {made['first_token_s']:.3f} s after the prompt was given, {since_start}"
    if made["floor_share"]:
        reads = f"a token reads {made['bytes_per_token'] / 1e9:.3f} GB, at least {made['floor_s'] * 1e6:.0f} us here"
        yield f"{percent(made['floor_share'])} of the bandwidth floor: {reads}"
    elif made["bytes_per_token"] is not None and made["floor_s"] is None:
        yield "share of the bandwidth floor: the copy rate of this GPU is not measured yet; `whet machine` does that, once"
    elif made["bytes_per_token"] is None:
        yield "share of the bandwidth floor: not measured on a CPU"
    if made["speculation"] is not None:
        off = "" if made["speculation"] == "on" else f"; {made['speculation']}"
        share = None if made["accepted"] is None else f"{percent(made['accepted'])} of the drafted tokens accepted"
        yield f"speculation: {share or 'nothing repeated, so nothing was drafted'}{off}"


def show(console: Console, measured: dict) -> None:
    if measured["note"]:
        console.print(f"note: {measured['note']}")
    console.print(rows_table(measured))
    for line in lines_under(measured):
        console.print(line)
    if quality := measured.get("quality"):
        show_quality(console, quality)


def lines_under(measured: dict) -> list[str]:
    """What was not timed and why, notes on systems, prefill, and the start of the process."""
    rows = measured["rows"]
    return [*left_out(rows), *notes(rows), *prefill_lines(measured), *start_lines(measured)]


def show_quality(console: Console, quality: dict) -> None:
    if "rows" not in quality:
        console.print(f"quality: not measured: {quality['why']}")
        return
    console.print(quality_table(quality))
    for line in verdict_lines(quality):
        console.print(line)


def point(r: dict) -> tuple[int, int]:
    return r["batch"], r["context"]


def ordered(rows: list[dict]) -> list[dict]:
    """The timed rows by batch and context, the slowest first."""
    return sorted((r for r in rows if r.get("ms")), key=lambda r: (r["batch"], r["context"], r["tokens_per_s"]))


def rows_table(measured: dict) -> Table:
    """Every system that was timed, at every batch and context; the fastest there is marked."""
    table = Table(f"{measured['model']}, {measured['weights']} weights: one token", ROWS, merge=2)
    rows = ordered(measured["rows"])
    fastest = {point(r): r for r in rows}
    for r in rows:
        names = (str(r["batch"]), str(r["context"]), TITLES.get(r["system"], r["system"]), weights_of(r, measured))
        figures = (r["ms"], spread(r), r["tokens_per_s"], r.get("tb_s"), r.get("of_floor"), r["share"])
        table.add(*names, *figures, marked=r is fastest[point(r)])
    return table


def weights_of(r: dict, measured: dict) -> str:
    """The dtype or quantisation, and its speed-up over the same system unquantised, timed in turns."""
    return (r["quant"] or measured["dtype"]) + (f", {r['speedup']:.2f}x" if "speedup" in r else "")


def left_out(rows: list[dict]) -> list[str]:
    """One line per system and reason why it was not timed, with the batches and contexts."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for r in rows:
        if not r.get("ms"):
            at = f"{r['quant'] + ' ' if r['quant'] else ''}batch {r['batch']} context {r['context']}"
            reasons.setdefault((r["system"], r["why"] or "stopped before it was timed"), []).append(at)
    return [f"not timed: {TITLES.get(name, name)} ({', '.join(at)}): {why}" for (name, why), at in reasons.items()]


def notes(rows: list[dict]) -> list[str]:
    """The notes on systems that were timed."""
    noted = [r for r in rows if r.get("ms") and r.get("note")]
    return [f"{TITLES.get(r['system'], r['system'])}, batch {r['batch']} context {r['context']}: {r['note']}" for r in noted]


def prefill_lines(measured: dict) -> Iterator[str]:
    for r in measured.get("prefill", []):
        name = "whet" if r["system"] == "whet" else TITLES.get(r["system"], r["system"])
        if not r.get("ms"):
            yield f"prefill of {r['context']} tokens, {name}: not timed: {r['why']}"
            continue
        rate = f"{r['tflops']:.{0 if r['tflops'] >= 10 else 2}f} TFLOP/s"
        share = f", {percent(r['of_ceiling'])} of the {measured['dtype']} matmul ceiling" if "of_ceiling" in r else ""
        yield f"prefill of {r['context']} tokens, {name}: {ms(r['ms'])} ms, {rate}{share}"


def start_lines(measured: dict) -> Iterator[str]:
    start = measured.get("start")
    if not start:
        return
    if "warm" not in start:
        yield f"start to first token: not timed: {start['why']}"
        return
    kinds = {"first": "kernels compiled where they were not", "cold": f"weights {start['cold_is']}"}
    for name, state in (kinds | {"warm": "weights in the page cache, median of three"}).items():
        if name not in start:
            continue
        r = start[name]
        parts = f"imports {r['imported_s']:.2f}, weights {r['loaded_s']:.2f}, prompt {r['first_token_s']:.2f}"
        yield f"start of the process to first token, {state}: {r['since_start_s']:.2f} s ({parts})"


def quality_of(q: dict) -> str:
    return f"{q['model']}, {q['weights']} weights, on {q['text']}, {q['path']}"


def quality_table(q: dict) -> Table:
    """Each quantisation against the same model in float32."""
    table = Table(f"quality: {quality_of(q)}", QUALITY)
    for r in q["rows"]:
        name = "bfloat16, Transformers" if r["name"] == "transformers" else r["name"]
        figures = (r[k] for k in ("perplexity", "reference_perplexity", "kl", "kl_error", "top1"))
        table.add(name, *figures, f"{r['decided']} of {r['tokens']}")
    return table


def verdict_lines(q: dict) -> Iterator[str]:
    for key, path in (("verdict", q["path"]), ("kernel_verdict", "one kernel for all tokens")):
        if verdict := q.get(key):
            how = "not worse than Transformers' eager model" + ("" if verdict["ok"] else f": refuted: {verdict['why']}")
            yield f"{q['base']}, {path}: {how}, by KL, NLL and top-1 on the same tokens"
    if note := q.get("transformers"):
        yield f"transformers: {note}"


def recorded(root: Path) -> Iterator[tuple[Records, dict]]:
    """({file name: record}, what it measured) of every decode record, by machine, oldest first."""
    for group in by_machine(read(root, "decode")):
        for name, r in group.items():
            yield {name: r}, r["measured"]


def heading(record: Records, measured: dict) -> str:
    gpu = next(iter(record.values()))["machine"]["name"]
    size = f"{measured['parameters'] / 1e6:,.0f}M parameters"
    return f"{gpu}, {measured['model']} ({size}, {measured['weights']} weights, {measured['dtype']})"


def full(root: Path) -> str:
    """Every system at every batch and context, then prefill and start."""
    parts = []
    for used, measured in recorded(root):
        parts += [f"{heading(used, measured)}, greedy, {measured['tokens']} tokens a run.", rows_table(measured).to_markdown()]
        parts += [*bullets(lines_under(measured)), source(used)]
    return "\n\n".join(parts) or absent("decode")


def most_systems(found: Iterable[tuple[Records, dict]]) -> list[tuple[Records, dict]]:
    """Of each model the record in which the most systems were timed, the first of several."""
    by_model: dict[str, list[tuple[Records, dict]]] = {}
    for used, measured in found:
        by_model.setdefault(measured["model"], []).append((used, measured))
    return [max(group, key=lambda g: len({(r["system"], r["quant"]) for r in g[1]["rows"]})) for group in by_model.values()]


def summary(root: Path, compared: bool = False) -> str:
    """Tokens a second by system, one row for each batch and context; whet's share of the floor, and its best in each quant.

    compared: only where a rival was timed too, and of each model the record with the most systems; the model's name is in
    the first column's title.
    """
    parts = []
    for used, measured in most_systems(recorded(root)) if compared else recorded(root):
        timed = ordered(measured["rows"])
        rows = [r for r in timed if not r["quant"]]
        quants = [q for q in dict.fromkeys(r["quant"] for r in measured["rows"]) if q]
        systems = [s for s in TITLES if any(r["system"] == s for r in rows)]
        lines = []
        for at in dict.fromkeys(point(r) for r in rows):
            here = {r["system"]: r for r in rows if point(r) == at}
            if compared and all("whet" in s for s in here):
                continue
            ours = max((r for s, r in here.items() if "whet" in s), key=lambda r: r["tokens_per_s"], default=None)
            rates = [f"{here[s]['tokens_per_s']:,.0f}" if s in here else "-" for s in systems]
            floor = percent(ours["of_floor"]) if ours and "of_floor" in ours else "-"
            best = [max((r["tokens_per_s"] for r in timed if point(r) == at and r["quant"] == q), default=None) for q in quants]
            lines.append([str(at[0]), str(at[1]), *rates, floor, *("-" if b is None else f"{b:,.0f}" for b in best)])
        first = f"batch ({measured['model']}, {measured['weights']} weights, tokens a second)" if compared else "batch"
        head = (first, "context", *(TITLES[s] for s in systems), "whet, of floor", *(f"whet, {q}" for q in quants))
        if lines:
            parts += [] if compared else [f"{heading(used, measured)}, greedy, tokens a second."]
            parts += [grid(head, lines, text=2), source(used)]
    return "\n\n".join(parts) or absent("decode")


def quality(root: Path) -> str:
    """The loss of quality by quantisation."""
    parts = []
    for used, measured in recorded(root):
        q = measured.get("quality") or {}
        if "rows" in q:
            parts += [f"{quality_of(q)}.", quality_table(q).to_markdown(), *bullets(list(verdict_lines(q))), source(used)]
    return "\n\n".join(parts) or absent("decode")


def profiles(root: Path) -> str:
    """Of each profile of a built-in decoder: one token before and after, and its parts after."""
    parts = []
    for name, r in read(root, "profile").items():
        made, after = r["measured"], r["measured"].get("after")
        if not after:
            continue
        parts += [f"{made['target']}: {must_read(after)}.", tokens_table(made).to_markdown()]
        parts += ["After, all layers together:", layers_table(after).to_markdown(), source({name: r})]
    return "\n\n".join(parts) or absent("profile")


TABLES = {"decode": full, "decode-summary": summary, "decode-quality": quality, "decode-profile": profiles}
