"""The ways in which a model may be replaced: as is best launched by the host, as is best as CUDA graphs, and one between.

What is best as CUDA graphs takes the least time on the GPU; launched by the host it may keep the GPU waiting, where a kernel
saves a hundredth of a millisecond and takes the host one more. The way between takes a graph's candidates only where they
are worth what their launches cost: the times of the calls in both modes say of each op what it saves on the GPU and what it
costs the host. Which way is used a race of the whole model decides.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from whet.choices import Choices
from whet.judge import Verdict
from whet.measure import Race
from whet.race import TIE, paired
from whet.swap import Site
from whet.swap._groups import BEFORE, SiteGroup
from whet.swap._kept import name_of

MIXED, HOST, GRAPH = "mixed", "eager", "graph"
WORTH = 0.3  # of the host's time that it costs, what a candidate must save of the GPU's


@dataclass
class Way:
    """What would be replaced, and by which candidates, as timed in one mode: launched by the host, as CUDA graphs, or mixed."""

    mode: str
    choices: Choices
    groups: list[SiteGroup] = field(default_factory=list)
    wrong: str = ""  # why all of it together is not right

    @property
    def sites(self) -> list[tuple[Site, Verdict]]:
        return [s for g in self.groups if g.replaced for s in g.sites]

    @property
    def uncovered(self) -> set[tuple[str, str]]:
        """(kind, path) of what a group covers that is not replaced, and none that is."""
        covers = {done: {at for g in self.groups if g.replaced is done for s, _ in g.sites for at in s.covers}
                  for done in (True, False)}
        return covers[False] - covers[True]


def balance(entries: Mapping[str, dict]) -> dict[str, tuple[float, float]]:
    """{op: (GPU ms that the graph's candidates save, host ms that they cost)} over all calls of a step, where they differ."""
    found: dict[str, tuple[float, float]] = {}
    for key, launched in entries.items():
        call, _, mode = key.rpartition(" @ ")
        captured = entries.get(f"{call} @ {GRAPH}")
        if mode != HOST or captured is None or launched.get("chosen") == captured.get("chosen"):
            continue
        ours, theirs = captured.get("chosen", ""), launched.get("chosen", "")
        gpu = [captured["candidates"].get(name, {}).get("ms") for name in (theirs, ours)]
        host = [launched["candidates"].get(name, {}).get("host_us") for name in (ours, theirs)]
        if None in gpu or None in host:
            continue
        op, count = launched["call"]["op"], launched.get("count", 1)
        saved, cost = found.get(op, (0.0, 0.0))
        found[op] = saved + count * (gpu[0] - gpu[1]), cost + count * (host[0] - host[1]) / 1e3
    return found


def paths(group: SiteGroup) -> tuple:
    return name_of(group.sites[0][0]), frozenset(s.path for s, _ in group.sites)


def described(groups: list[SiteGroup]) -> dict:
    """What is done to which sites."""
    return {paths(g): (g.replaced, g.form, g.impls if g.replaced else {}) for g in groups}


def exchangeable(group: SiteGroup, other: SiteGroup | None, ops: set[str], covered: set[tuple[str, str]]) -> bool:
    """Whether the other may stand in a group's place: it asks for these ops alone, and leaves no other group without cover."""
    if other is None or not set(other.impls) <= ops:
        return False
    entangled = any(s.covers or (s.kind, s.path) in covered for s, _ in group.sites)
    return other.replaced == group.replaced or not entangled


def mixed(ways: Mapping[str, Way], entries: Mapping[str, dict]) -> Way | None:
    """The graph's way, with the host's decision on each group whose ops are not worth their launches; None if it is no third.

    entries   the lock's, of the calls that are made, in both modes
    """
    if HOST not in ways or GRAPH not in ways:
        return None
    host, graph = ways[HOST], ways[GRAPH]
    ops = {op for op, (saved, cost) in balance(entries).items() if cost > 0 and saved < WORTH * cost}
    others = {paths(g): g for g in host.groups}
    covered = {at for way in (host, graph) for g in way.groups for s, _ in g.sites for at in s.covers}
    while ops:
        stuck = [g for g in graph.groups if ops & set(g.impls) and not exchangeable(g, others.get(paths(g)), ops, covered)]
        if not stuck:
            break
        ops = ops.difference(*(g.impls for g in stuck))
    groups = [others[paths(g)] if ops & set(g.impls) else g for g in graph.groups]
    if described(groups) in (described(host.groups), described(graph.groups)):
        return None

    def merged(of_host: Mapping, of_graph: Mapping) -> dict:
        return {k: v for k, v in of_graph.items() if k.split()[0] not in ops} | {
            k: v for k, v in of_host.items() if k.split()[0] in ops}

    table = merged(host.choices.table, graph.choices.table)
    return Way(MIXED, Choices(table, evidence=merged(host.choices.evidence, graph.choices.evidence)), groups)


def best_of(batches: list[dict], modes: list[str]) -> tuple[str, str]:
    """The way that is slower at no batch and takes the least time; where every one is slower somewhere, at which batch.

    Of ways that tie, the one that takes the least memory.
    """
    fine = [m for m in modes if not any(m in b["slower_in"] for b in batches)]
    times = {m: sum(b["ms"][m] for b in batches) for m in fine or modes}
    tied = [m for m in times if times[m] <= (1 + TIE) * min(times.values())]
    mode = min(tied, key=lambda m: (max(b.get("mib", {}).get(m) or 0.0 for b in batches), times[m]))
    return mode, "" if fine else next(b["batch"] for b in batches if mode in b["slower_in"])


def slower_in(raced: Race, modes: list[str]) -> list[str]:
    """The ways that are not to be used by this race: none is where the model as it was won, nor one that is slower than it."""
    if raced.outcome.chosen == BEFORE and not raced.outcome.tied:
        return modes
    over = {m: paired(raced.times[m], raced.times[BEFORE], len(modes)) for m in modes}
    return [m for m in modes if m != raced.outcome.chosen and (over[m].slower or over[m].value > 1 + TIE)]
