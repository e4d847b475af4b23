"""Records read back and grouped, and the parts of the markdown pages made from them."""

import argparse
import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from whet.op import Call, discover
from whet.report.table import Column, Table
from whet.report.tables import best, versions

ROOT = Path(__file__).resolve().parents[2]
MODES = ("graph", "eager")
Records = dict[str, dict]  # file name -> record


def read(root: Path, kind: str) -> Records:
    """The records of one kind, oldest first."""
    found = {}
    for path in (root / "records").glob(f"{kind}-*.json"):
        try:
            found[path.name] = json.loads(path.read_text())
            missing = {"machine", "commit", "at", "measured"} - set(found[path.name])
        except (ValueError, TypeError) as e:
            raise ValueError(f"records/{path.name} cannot be read: {e}") from None
        if missing:
            raise ValueError(f"records/{path.name} has no {', '.join(sorted(missing))}: it is not a record")
        if found[path.name]["machine"]["device"] != "cuda":
            raise ValueError(f"records/{path.name} was made without a GPU, so it feeds no table; name it cpu-*")
    return dict(sorted(found.items(), key=lambda item: (item[1]["at"], item[0])))


def grid(head: Sequence[str], rows: Iterable[Sequence[str]], text: int = 1) -> str:
    """A markdown table of texts; the first `text` columns are set to the left, the rest, figures, to the right."""
    table = Table("", [Column(title, None if i < text else str) for i, title in enumerate(head)])
    for row in rows:
        table.add(*row)
    return table.to_markdown()


def bullets(lines: Sequence[str]) -> list[str]:
    """The lines as one markdown list; nothing where there are none."""
    return ["\n".join(f"- {line}" for line in lines)] if lines else []


def absent(kind: str) -> str:
    return f"Not measured yet: there is no `records/{kind}-*.json`."


def short(commit: str) -> str:
    """The first twelve digits of a commit, and whatever follows its hash."""
    return re.sub(r"^([0-9a-f]{12})[0-9a-f]{28}", r"\1", commit)


def source(records: Records) -> str:
    """The line under every table: which file, which commit, which machine."""
    places: dict[str, list[str]] = {}
    for name, r in records.items():
        place = f"{r['machine']['name']}, {versions(r['machine'])}"
        places.setdefault(place, []).append(f"`records/{name}` (commit `{short(r['commit'])}`, {r['at'][:10]})")
    return "\n".join(f"Source: {', '.join(files)}; {place}." for place, files in places.items())


def by_machine(records: Records) -> list[Records]:
    """Figures of different machines or versions never share a table."""
    groups: dict[str, Records] = {}
    for name, r in records.items():
        groups.setdefault(r["machine"]["key"], {})[name] = r
    return list(groups.values())


def merged(records: Records) -> list[tuple[str, dict]]:
    """(file, entry) of every call and mode; of several records of one call the newest counts."""
    entries: dict[tuple[str, str], tuple[str, dict]] = {}
    for name, r in records.items():
        for e in r["measured"]["entries"]:
            entries[Call(**e["call"]).key, e["mode"]] = (name, e)
    return list(entries.values())


def shape(e: dict) -> str:
    """The op's own name for the shape, else its sizes."""
    case, op = e["call"]["case"], discover().get(e["call"]["op"])
    names = [name for name, c in op.shapes.items() if c == case] if op else []
    return names[0] if names else " ".join(f"{k}={v}" for k, v in case.items())


def order(e: dict) -> tuple:
    op = discover().get(e["call"]["op"])
    names = list(op.shapes) if op else []
    name = shape(e)
    return e["call"]["op"], names.index(name) if name in names else len(names), name, MODES.index(e["mode"])


def ours(e: dict, name: str) -> bool:
    """Whether a candidate of an entry is a kernel of whet's own."""
    op = discover().get(e["call"]["op"])
    return op is not None and op.ours(name)


def times(e: dict) -> dict[str, float]:
    """{impl: ms}, of its tiles the best."""
    return {impl: ms for impl, name in best(e).items() if (ms := e["candidates"][name].get("ms"))}


def keep(
    prog: str, doc: str, rendered: Callable[[Path], dict[Path, str]], argv: list[str] | None,
    stale: Callable[[str, str], str] = lambda held, wanted: "",
) -> int:
    """The command that writes generated files, or with --check lists those that are out of step.

    stale   names the parts of a file that differ, given its text and the text wanted
    """
    parser = argparse.ArgumentParser(prog=prog, description=doc.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if something is out of step (default off)")
    parser.add_argument("--root", type=Path, default=ROOT, metavar="DIR", help="the checkout (default: this file's)")
    options = parser.parse_args(argv)
    try:
        wanted = rendered(options.root)
    except ValueError as e:
        parser.error(str(e))
    held = {path: path.read_text() if path.exists() else "" for path in wanted}
    old = [path for path in wanted if held[path] != wanted[path]]
    for path in old:
        name = path.relative_to(options.root).as_posix()
        if options.check:
            made_from = "whet/" if path.name in ("ops.md", "api.md") else "records/"
            print(f"{name}: {stale(held[path], wanted[path])}out of step with {made_from}; run {prog}")
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(wanted[path])
            print(f"{name}: rewritten")
    return int(options.check and bool(old))
