"""The decoder's figures: lines under a generated text, tables on a terminal, and the tables of README and docs."""

from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from whet.figures import ms, percent
from whet.report.fit import Table
from whet.report.markdown import Records, absent, by_machine, grid, read, source
from whet.report.tables import spread

TITLES = {
    "transformers": "Transformers, eager", "transformers-static": "Transformers, static cache, compiled",
    "gpt-fast": "gpt-fast style, compiled", "gpt-fast-tuned": "gpt-fast style, compiled and tuned",
    "whet graph": "whet, one graph a token", "whet persistent": "whet, one kernel for all tokens",
}
HEAD = ("batch", "context", "system", "weights", "ms a token", "± spread", "tokens/s", "TB/s", "of floor", "error / budget")


def told(made: dict) -> Iterator[str]:
    """What is said under a generated text."""
    count = len(made["tokens"])
    rate = f", {made['tokens_per_s']:.1f} tokens/s" if made["tokens_per_s"] else ""
    reused = f" ({made['reused_tokens']} of them still in the cache)" if made["reused_tokens"] else ""
    yield f"{count} tokens{rate}; the prompt has {made['prompt_tokens']}{reused}; ended by: {made['reason']}"
    if made["first_token_s"] is not None and made["since_start_s"] is not None:
        parts = f"imports {made['imported_s']:.2f}, weights {made['loaded_s']:.2f}"
        begun = f"{made['since_start_s']:.2f} s after the start of the command ({parts})"
        yield f"first token: {made['first_token_s']:.3f} s after the prompt was given, {begun}"
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
    keep, order = ("batch", "context", "system", "tokens/s"), ("ms a token", "weights", "of floor", "± spread", "TB/s")
    table = Table(*HEAD, keep=keep, order=order, title=f"{measured['model']}, {measured['weights']} weights: one token")
    rows = ordered(measured["rows"])
    for i, r in enumerate(rows):
        last = i + 1 == len(rows) or point(rows[i + 1]) != point(r)
        table.add_row(*cells(r, measured), style="bold green" if "whet" in r["system"] else None, end_section=last)
    console.print(table)
    for line in (*left_out(measured["rows"]), *notes(measured["rows"]), *prefill_lines(measured), *start_lines(measured)):
        console.print(line)
    if quality := measured.get("quality"):
        show_quality(console, quality)


def show_quality(console: Console, quality: dict) -> None:
    if "rows" not in quality:
        console.print(f"quality: not measured: {quality['why']}")
        return
    table = Table(*QUALITY, title=f"quality: {quality_of(quality)}")
    for r in quality["rows"]:
        table.add_row(*quality_cells(r))
    console.print(table)
    for line in verdict_lines(quality):
        console.print(line)


def point(r: dict) -> tuple[int, int]:
    return r["batch"], r["context"]


def ordered(rows: list[dict]) -> list[dict]:
    """What was timed, by batch and context, the slowest first: the last of a point is the best."""
    return sorted((r for r in rows if r.get("ms")), key=lambda r: (r["batch"], r["context"], r["tokens_per_s"]))


def cells(r: dict, measured: dict) -> list[str]:
    return [
        str(r["batch"]), str(r["context"]), TITLES.get(r["system"], r["system"]), weights_of(r, measured), ms(r["ms"]),
        ms(spread(r)), f"{r['tokens_per_s']:,.0f}", f"{r['tb_s']:.2f}" if "tb_s" in r else "-",
        percent(r["of_floor"]) if "of_floor" in r else "-", f"{r['share']:.2f}",
    ]


def weights_of(r: dict, measured: dict) -> str:
    """Quantised, with how much faster than the same system without in the same turns."""
    return (r["quant"] or measured["dtype"]) + (f", {r['speedup']:.2f}x" if "speedup" in r else "")


def left_out(rows: list[dict]) -> list[str]:
    """Every system that was not timed, with the reason; points that share one share a line."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for r in rows:
        if not r.get("ms"):
            at = f"{r['quant'] + ' ' if r['quant'] else ''}batch {r['batch']} context {r['context']}"
            reasons.setdefault((r["system"], r["why"] or "stopped before it was timed"), []).append(at)
    return [f"not timed: {TITLES.get(name, name)} ({', '.join(at)}): {why}" for (name, why), at in reasons.items()]


def notes(rows: list[dict]) -> list[str]:
    """What is to be known of a system that was timed."""
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
    for name, told_as in (kinds | {"warm": "weights in the page cache, median of three"}).items():
        if name not in start:
            continue
        r = start[name]
        parts = f"imports {r['imported_s']:.2f}, weights {r['loaded_s']:.2f}, prompt {r['first_token_s']:.2f}"
        yield f"start of the process to first token, {told_as}: {r['since_start_s']:.2f} s ({parts})"


QUALITY = ("weights", "perplexity", "in float32", "KL to float32", "± standard error", "same top-1 where decided", "of tokens")


def quality_of(q: dict) -> str:
    return f"{q['model']}, {q['weights']} weights, on {q['text']}, {q['path']}"


def quality_cells(r: dict) -> list[str]:
    top1 = "-" if r["top1"] is None else f"{100 * r['top1']:.2f}%"
    name = "bfloat16, Transformers" if r["name"] == "transformers" else r["name"]
    figures = ("-" if r[k] is None else f"{r[k]:.4g}" for k in ("perplexity", "reference_perplexity", "kl", "kl_error"))
    return [name, *figures, top1, f"{r['decided']} of {r['tokens']}"]


def verdict_lines(q: dict) -> Iterator[str]:
    for key, path in (("verdict", q["path"]), ("kernel_verdict", "one kernel for all tokens")):
        if said := q.get(key):
            how = "not worse than Transformers' eager model" + ("" if said["ok"] else f": refuted: {said['why']}")
            yield f"{q['base']}, {path}: {how}, by KL, NLL and top-1 on the same tokens"
    if said := q.get("transformers"):
        yield f"transformers: {said}"


def newest(root: Path) -> Iterator[tuple[Records, dict]]:
    """(the record under its name, what it measured), of each machine; the records of a model in the order of their age."""
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
    for used, measured in newest(root):
        rows = [cells(r, measured) for r in ordered(measured["rows"])]
        told_too = (*left_out(measured["rows"]), *notes(measured["rows"]), *prefill_lines(measured), *start_lines(measured))
        parts += [f"{heading(used, measured)}, greedy, {measured['tokens']} tokens a run.", grid(HEAD, rows, text=4)]
        parts += ["\n".join(f"- {line}" for line in told_too)] if told_too else []
        parts.append(source(used))
    return "\n\n".join(parts) or absent("decode")


def summary(root: Path, compared: bool = False) -> str:
    """Tokens a second by system, one row for each batch and context; whet's share of the floor, and its best in each quant.

    compared: only where a rival was timed too, and the model's name in the head of the table.
    """
    parts = []
    for used, measured in newest(root):
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
    """What quantising costs in quality."""
    parts = []
    for used, measured in newest(root):
        q = measured.get("quality") or {}
        if "rows" in q:
            parts += [f"{quality_of(q)}.", grid(QUALITY, [quality_cells(r) for r in q["rows"]])]
            parts += ["\n".join(f"- {line}" for line in lines)] if (lines := list(verdict_lines(q))) else []
            parts.append(source(used))
    return "\n\n".join(parts) or absent("decode")


def profiles(root: Path) -> str:
    """One token before and after, and what it is made of after, of each profile of a built-in decoder."""
    parts = []
    for name, r in read(root, "profile").items():
        before, after = r["measured"], r["measured"].get("after")
        if not after:
            continue
        floor = f"a token must read {after['bytes'] / 1e6:,.0f} MB, {ms(after['floor_ms'])} ms at the measured copy rate"
        both = [
            (told_as, ms(m["step"]["ms"]), f"{1e3 / m['step']['ms']:,.0f}", f"{m['launches']:g}", ms(m["busy_ms"]),
             percent(after["floor_ms"] / m["step"]["ms"]))
            for told_as, m in (("before: plain formulas, launched one by one", before), ("after: decode ops, one graph", after))
        ]
        head = ("one token", "ms", "tokens/s", "kernels", "GPU busy ms", "of floor")
        rows = [(p["part"], ms(p["ms"]), percent(p["share"]), f"{p['launches']:g}") for p in after["layers"]]
        parts += [f"{before['target']}: {floor}.", grid(head, both)]
        parts += [grid(("part, after, all layers", "ms", "share", "kernels"), rows), source({name: r})]
    return "\n\n".join(parts) or absent("profile")


TABLES = {"decode": full, "decode-summary": summary, "decode-quality": quality, "decode-profile": profiles}
