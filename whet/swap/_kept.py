"""What optimize() decided, kept in the lock: per group of like modules and per model, found again by what they rest on.

A group is found by its kind and words, the class and the sources of its modules, their sizes and modes, what the first of
them met at the full batch, the settings of the process and the sources of the recognisers. A decision that holds spares
timing; it never spares proof: of every kind of like modules one is proved anew, and then all replacements together.
"""

import datetime
import functools
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from whet.choices import Choices
from whet.figures import error_line
from whet.judge import Verdict
from whet.lock import Lock
from whet.machine import float32_precision
from whet.op import Call, base, discover
from whet.source import fingerprint
from whet.swap import Met, Site
from whet.swap._alike import digest, facts_of, form_of
from whet.swap._proof import prove
from whet.swap._replace import met_in
from whet.tune import save_swaps

if TYPE_CHECKING:
    from whet.swap._groups import SiteGroup
    from whet.swap._optimize import Optimized
    from whet.swap._ways import Way

GroupName = tuple[str, str, type]


@functools.cache
def recognisers() -> str:
    """The sources of what finds and judges."""
    here = Path(__file__).parent
    return digest(*(p.read_bytes() for p in (*sorted(here.glob("*.py")), here.parent / "judge.py")))


def settings(device: str) -> tuple:
    """What the process is set to that changes times or results."""
    autocast = str(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else ""
    return float32_precision(), autocast


def stale(entry: dict) -> str:
    """Why what an entry rests on is no longer what is here; empty where it is."""
    ops = discover()
    for name, impl in entry.get("impls", {}).items():
        if name not in ops or base(impl) not in ops[name].impls:
            return f"{name}/{impl} is no longer there"
        if entry.get("sources", {}).get(name) != fingerprint(ops[name], impl):
            return f"{name}/{impl} was edited since"
    return ""


def name_of(site: Site) -> GroupName:
    """Sites of one name are like sites, which are timed by their first."""
    return site.kind, site.words, type(site.module)


class Decisions:
    """The lock's decisions on the groups of one model at one size, those that hold and those that do not.

    calls   what the model is given: the largest batch first
    modes   in which groups are timed; a decision is of a group in one of them
    """

    def __init__(
        self, lock: Lock, model: nn.Module, calls: list[Met], kind: str, around: tuple = (), modes: tuple[str, ...] = ("eager",)
    ):
        self.lock, self.model, self.calls, self.kind, self.modes = lock, model, calls, kind, modes
        device = next((p.device.type for p in model.parameters()), "cpu")
        self.around = (*around, settings(device), kind, recognisers())
        self.keys: dict[GroupName, str] = {}  # with the mode after it, the key of an entry
        self.held: dict[tuple[GroupName, str], dict] = {}
        self.named: dict[GroupName, list[Site]] = {}
        self.coverable: set[GroupName] = set()  # groups that others may cover whole: decided only where those are not kept
        self.ignored: dict[str, str] = {}  # key: why the lock's entry does not count
        self.proved = 0
        self.timed = 0  # groups, and the whole

    def met_before(self) -> bool:
        """Whether the lock has a decision on a model of this class, at whatever size."""
        return any(key.startswith(f"model: {type(self.model).__name__},") for key in self.lock.swaps)

    def find(self, sites: Iterable[Site]) -> dict[GroupName, list[Site]]:
        """Sites by group; the keys of their entries, and the entries that hold."""
        named: dict[GroupName, list[Site]] = {}
        for site in sites:
            named.setdefault(name_of(site), []).append(site)
        heads = {like[0].path for like in named.values()}
        with torch.no_grad():
            met = [met_in(self.model, call, heads) for call in self.calls] if named else []
        covers = {at for like in named.values() for site in like for at in site.covers}
        self.keys, self.held, self.named = {}, {}, named
        self.coverable = {name for name, like in named.items() if all((s.kind, s.path) in covers for s in like)}
        for name, like in named.items():
            seen = [facts_of(m[like[0].path]) for m in met if like[0].path in m]
            forms = sorted({form_of(s.module) for s in like})
            key = self.keys[name] = f"{name[0]}: {name[1]} in {name[2].__name__} {digest(forms, seen, self.around)}"
            for mode, at in ((mode, f"{key} @ {mode}") for mode in self.modes):
                entry = self.lock.swaps.get(at)
                if entry is None or at in self.ignored:
                    continue
                if why := stale(entry):
                    self.ignored[at] = why
                else:
                    self.held[name, mode] = entry
        return named

    def entries(self, name: GroupName) -> list[dict]:
        """A group's decisions, one for each mode; none where one is missing that no replacement around it explains."""
        found = [self.held[name, mode] for mode in self.modes if (name, mode) in self.held]
        return found if len(found) == len(self.modes) or name in self.coverable else []

    def verdicts(self, sites: list[Site], seen: dict[str, Met], ops: Choices) -> dict[int, Verdict]:
        """{id of a site: its verdict} where a decision holds: one of each kind of like modules is proved anew.

        What is to be left as it is needs no proof; a site that is the whole model is proved with all the others.
        """
        found: dict[int, Verdict] = {}
        self.proved = 0
        for name, like in self.find(sites).items():
            entries = self.entries(name)
            if entries and like[0].alone:
                used = [e for e in entries if e["replaced"]] if like[0].path else []
                firsts = {form_of(s.module): s for s in reversed(like)}.values() if used else ()
                forms = list(dict.fromkeys(e.get("form", "") for e in used))
                why = next((w for s in firsts for f in forms if (w := self._fault(s.in_form(f), seen, ops))), "")
                if why:
                    self.ignore(name, f"of {like[0].path} it does not hold: {why}")
                    continue
            if entries:
                share = max(e.get("share", 0.0) for e in entries)
                found |= {id(s): Verdict(True, share, 1.0) for s in like}
        return found

    def _fault(self, site: Site, seen: dict[str, Met], ops: Choices) -> str:
        self.proved += 1
        try:
            verdict = prove(site, seen[site.path], ops)
        except Exception as e:
            return error_line(e)
        return "" if verdict.ok else verdict.why

    def ignore(self, name: GroupName, why: str) -> None:
        """From now on this group's entries do not count."""
        for mode in self.modes:
            self.ignored[f"{self.keys[name]} @ {mode}"] = why
            self.held.pop((name, mode), None)

    def ignore_all(self, why: str) -> None:
        for name in {name for name, _ in self.held}:
            self.ignore(name, why)

    def disagree(self, calls: Iterable[Call], ops: Choices, mode: str) -> bool:
        """Whether a decision was taken with another candidate than serves its op now; such ones are ignored from now on."""
        picked: dict[str, set[str]] = {}
        for call in calls:
            picked.setdefault(call.op, set()).add(ops.pick(discover()[call.op], call))
        for (name, at), entry in list(self.held.items()):
            for op, impl in entry.get("impls", {}).items() if at == mode else ():
                if impl not in picked.get(op, (impl,)):  # of what was not asked for now there is nothing to say
                    self.ignore(name, f"it was timed with {op}/{impl}, which is not what serves it now")
                    return True
        return False

    def of(self, group: "SiteGroup", mode: str) -> dict | None:
        """The decision on a group in a mode, where it holds."""
        return self.held.get((name_of(group.sites[0][0]), mode))

    def timed_ways(self, ways: Iterable["Way"]) -> list["Way"]:
        """Those whose groups were timed; any other follows from these."""
        return [way for way in ways if way.mode in self.modes]

    def whole_key(self, ways: list["Way"]) -> str:
        """Of the whole model with these groups replaced."""
        ways = self.timed_ways(ways)
        used = [(way.mode, g) for way in ways for g in way.groups if g.replaced]
        parts = sorted((mode, self.keys[name_of(g.sites[0][0])], len(g.sites), g.form) for mode, g in used)
        form = digest(form_of(self.model), parts, [facts_of(c) for c in self.calls], self.around)
        return f"model: {type(self.model).__name__}, {max((len(way.sites) for way in ways), default=0)} modules {form}"

    def whole(self, ways: list["Way"]) -> dict | None:
        """The whole model's decision, where those of all these groups hold."""
        timed = [(g, way.mode) for way in self.timed_ways(ways) for g in way.groups if g.replaced and g.sites[0][0].alone]
        if not timed or not all(self.of(g, mode) for g, mode in timed):
            return None
        entry = self.lock.swaps.get(key := self.whole_key(ways))
        if entry is None or key in self.ignored or len(entry.get("batches", ())) != len(self.calls):
            return None
        return entry if all(way.mode in b.get("ms", ()) for way in ways for b in entry["batches"]) else None

    def save(self, report: "Optimized", whole: dict | None, key: str) -> None:
        """What was decided now goes to the lock. A group of which a module failed its proof does not: it is proved in full."""
        date, made = datetime.datetime.now(datetime.timezone.utc).date().isoformat(), {}
        for way, group in ((w, g) for w in self.timed_ways(report.ways.values()) for g in w.groups):
            name, mode = name_of(group.sites[0][0]), way.mode
            known = (name, mode) in self.held or name not in self.keys
            if known or (group.before_ms is None and not group.same) or not self.complete(way, group, name):
                continue
            sources = {op: fingerprint(discover()[op], impl) for op, impl in group.impls.items()}
            made[f"{self.keys[name]} @ {mode}"] = {
                "what": f"{group.kind}: {group.words}", "date": date, "replaced": group.replaced, "share": group.share,
                "before_ms": group.before_ms, "after_ms": group.after_ms, "why": group.why, "impls": group.impls,
                "form": group.form, "sources": sources,
            }
        if whole is not None:
            made[key] = whole | {"date": date}
        if made:
            save_swaps(self.lock, made)

    def complete(self, way: "Way", group: "SiteGroup", name: GroupName) -> bool:
        """Whether every module of this name is in the group, or has no effect beside what is replaced."""
        gone = {at for g in way.groups if g.replaced for site, _ in g.sites for at in site.covers}
        return {s.path for s in self.named[name] if (s.kind, s.path) not in gone} == {s.path for s, _ in group.sites}

    def lines(self) -> list[str]:
        """What came from the lock, and which of its entries were ignored."""
        found = []
        names = {name for name, _ in self.held}
        if names:
            dates = sorted({e["date"] for e in self.held.values()})
            when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
            open_ = [n for n, like in self.named.items() if n not in names and n not in self.coverable and like[0].alone]
            found.append(
                f"decisions on {len(names)} of {len(names) + len(open_)} groups are the lock's, of {when}: one module of each "
                f"that is replaced was proved anew ({self.proved} proofs), then all of them together; "
                f"{'the rest was timed now' if self.timed else 'nothing was timed'}"
            )
        ignored = {key.partition(" @ ")[0].rpartition(" ")[0]: why for key, why in self.ignored.items()}
        return found + [f"the lock's decision on {what} was ignored: {why}" for what, why in ignored.items()]
