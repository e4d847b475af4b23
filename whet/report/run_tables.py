"""Whole training steps by plan, the machine they were measured on, and the results of the tests that need a GPU."""

from pathlib import Path

from whet.report.markdown import absent, bullets, by_machine, read, short, source
from whet.report.tables import machine_table, plan_label, plans_table


def planned(root: Path) -> dict[str, dict]:
    """The records of `whet optimize` that have plans: those of a model's folder have replaced modules instead."""
    return {name: r for name, r in read(root, "optimize").items() if "plans" in r["measured"]}


def built_in(root: Path) -> dict[str, dict]:
    """The records of `whet optimize` of the models in whet/models: what a user's function returned is in no page of theirs."""
    return {name: r for name, r in planned(root).items() if ".py:" not in r["measured"]["target"]}


def main_run(root: Path) -> tuple[str, dict] | None:
    """The record of `whet optimize` that README shows: what `make run` runs, else the newest in float32, else the newest."""
    found = list(built_in(root).items())
    for end in ("tiny-llama:small float32", " float32", ""):
        if those := [(name, r) for name, r in found if r["measured"]["target"].endswith(end)]:
            return those[-1]
    return None


def plans(root: Path) -> str:
    """What `whet optimize` found, one table per record."""
    parts = []
    for name, r in planned(root).items():
        result = r["measured"]
        tie = " (a tie: the simpler is kept)" if result["tied"] else ""
        stored = " The plans were read from the lock, not measured again by this command." if result.get("from_lock") else ""
        busy = f" While the plans ran, {result['busy']}." if result.get("busy") else ""
        chosen = f"chosen: {plan_label(result['chosen'])}{tie}"
        step = "one forward" if result.get("kind") == "forward" else "one training step"
        parts += [f"{result['target']}, {step}; {chosen}. `{result['config']}`.{stored}{busy}"]
        parts += [plans_table(result).to_markdown(), source({name: r})]
    return "\n\n".join(parts) or absent("optimize")


def listed(tests: list[str]) -> str:
    """A few tests by name, more by their number in each file."""
    if len(tests) <= 3:
        return ", ".join(f"`{test}`" for test in tests)
    files = [test.partition("::")[0] for test in tests]
    return ", ".join(f"{files.count(file)} of `{file}`" for file in dict.fromkeys(files))


def counted(r: dict) -> str:
    """How many tests passed, failed, were skipped and did not run, and at which commits."""
    counts = r["measured"]["counts"]
    waiting = f", {counts['not run']:,} did not run" if counts["not run"] else ""
    others = {short(commit): len(tests) for commit, tests in r["measured"].get("at other commits", {}).items()}
    at = {short(r["commit"]): sum(counts.values()) - sum(others.values())} | others
    commits = ", ".join(f"`{commit}` ({n:,} of them)" for commit, n in at.items()) if len(at) > 1 else f"`{short(r['commit'])}`"
    return (
        f"{counts['passed']:,} GPU tests passed, {counts['failed']:,} failed, {counts['skipped']:,} skipped{waiting} "
        f"on {r['machine']['name']}, at commit{'s' if len(at) > 1 else ''} {commits}."
    )


def gpu_counts(root: Path) -> str:
    """The counts and commits alone, for README."""
    found = (f"`make gpu-test` left `records/{name}`: {counted(r)}" for name, r in read(root, "gpu").items())
    return "\n\n".join(found) or absent("gpu")


def gpu_tests(root: Path) -> str:
    """The results of the tests that need a GPU, as recorded by `make gpu-test`; failures and skips are named."""
    parts = []
    for name, r in read(root, "gpu").items():
        found = r["measured"]
        notes = {"failed": list(found["failed"]), "failed first, passed when run again": found["passed after failing"]}
        for test, why in found["skipped"].items():
            notes.setdefault(f"skipped, {why}", []).append(test)
        lines = [f"{what}: {listed(names)}" for what, names in notes.items() if names]
        parts += [counted(r), *bullets(lines), source({name: r})]
    return "\n\n".join(parts) or absent("gpu")


def machine(root: Path) -> str:
    """The machine of the records: GPU, versions, and the measured ceilings that rooflines refer to."""
    parts = []
    for group in by_machine(read(root, "bench") | read(root, "optimize")):
        m = next(iter(group.values()))["machine"]
        with_roof = {name: r for name, r in group.items() if r["measured"].get("ceilings")}
        roof = next((r["measured"]["ceilings"] for r in reversed(with_roof.values())), None)
        parts += [machine_table(m, roof).to_markdown(), source(dict(list((with_roof or group).items())[-1:]))]
    return "\n\n".join(parts) or absent("bench")
