"""The proof's own tables in docs: which candidates it found right on a GPU, and which mutants it stopped."""

import collections
import json
from pathlib import Path

from whet.op import Call, base
from whet.proofs import OUTCOMES
from whet.report.markdown import absent, grid, read, source


def proved(root: Path) -> str:
    """Of each op: its candidates by outcome; then those that were not right, each with its reason."""
    parts = []
    for name, r in read(root, "prove").items():
        rows = r["measured"]["rows"]
        counts: dict[str, collections.Counter] = {}
        for row in rows:
            counts.setdefault(row["op"], collections.Counter())[row["outcome"]] += 1
        counts["all"] = collections.Counter(row["outcome"] for row in rows)
        calls = {(row["op"], row["dtype"], str(row["case"])) for row in rows}
        cut = ", until it was stopped" if r["measured"].get("stopped") else ""
        parts += [
            f"`{r['command']}`{cut}: {len(rows):,} candidates of {len(calls):,} calls.",
            grid(("op", *OUTCOMES), [(op, *(str(found[k]) for k in OUTCOMES)) for op, found in counts.items()]),
        ]
        if wrong := [row for row in rows if row["outcome"] in ("rejected", "failed")]:
            told = ((Call(row["op"], row["case"], row["dtype"], False).key.removesuffix(" fwd"), row) for row in wrong)
            parts.append("\n".join(f"- {base(row['impl'])}, {call}: {row['why']}" for call, row in told))
        parts.append(source({name: r}))
    return "\n\n".join(parts) or absent("prove")


def mutants(root: Path) -> str:
    """By kind of fault: how many there are, how many were stopped; then those that were not. Made without a GPU: no timing."""
    parts = []
    for path in sorted((root / "records").glob("*mutants-*.json")):
        r = json.loads(path.read_text())
        found = r["measured"]["mutants"]
        kinds = {kind: [m for m in found if m["kind"] == kind] for kind in sorted({m["kind"] for m in found})} | {"all": found}
        rows = [(kind, str(len(some)), str(sum(m["stopped_by"] is not None for m in some))) for kind, some in kinds.items()]
        left = [f"- {m['op']}: {m['name']}" for m in found if not m["stopped_by"]]
        where = "in Triton's interpreter" if r["machine"]["device"] != "cuda" else "on a GPU"
        parts += [
            f"{r['measured']['dtype']}, {where}, by the proof alone:", grid(("kind of fault", "mutants", "stopped"), rows),
            *(["Not stopped:", "\n".join(left)] if left else []), source({path.name: r}),
        ]
    return "\n\n".join(parts) or absent("mutants")
