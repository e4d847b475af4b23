"""The tables of proofs in docs: the outcome of every candidate on a GPU, and of every mutant."""

import json
from pathlib import Path

from whet.report.markdown import absent, bullets, grid, read, source
from whet.report.tables import not_right, proofs_table


def proved(root: Path) -> str:
    """The candidates of each op by outcome; then those rejected or failed, each with its reason."""
    parts = []
    for name, r in read(root, "prove").items():
        rows = r["measured"]["rows"]
        calls = {(row["op"], row["dtype"], str(row["case"])) for row in rows}
        cut = ", until it was stopped" if r["measured"].get("stopped") else ""
        parts += [f"`{r['command']}`{cut}: {len(rows):,} candidates of {len(calls):,} calls."]
        parts += [proofs_table(rows, by_impl=False).to_markdown(), *bullets(not_right(rows))]
        parts.append(source({name: r}))
    return "\n\n".join(parts) or absent("prove")


def mutants(root: Path) -> str:
    """The mutants by kind of fault, how many the proof rejected, and those it did not. No times, so no GPU is needed."""
    parts = []
    for path in sorted((root / "records").glob("*mutants-*.json")):
        r = json.loads(path.read_text())
        found = r["measured"]["mutants"]
        kinds = {kind: [m for m in found if m["kind"] == kind] for kind in sorted({m["kind"] for m in found})} | {"all": found}
        rows = [(kind, str(len(some)), str(sum(m["stopped_by"] is not None for m in some))) for kind, some in kinds.items()]
        left = [f"{m['op']}: {m['name']}" for m in found if not m["stopped_by"]]
        where = "in Triton's interpreter" if r["machine"]["device"] != "cuda" else "on a GPU"
        parts += [
            f"{r['measured']['dtype']}, {where}, by the proof alone:", grid(("kind of fault", "mutants", "stopped"), rows),
            *(["Not stopped:", *bullets(left)] if left else []), source({path.name: r}),
        ]
    return "\n\n".join(parts) or absent("mutants")
