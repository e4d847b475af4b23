"""Whole training steps by plan, the machine they were measured on, and how the tests that need a GPU ended."""

from pathlib import Path

from whet.figures import ms, percent
from whet.report.markdown import absent, bold, by_machine, grid, read, short, source, versions


def built_in(root: Path) -> dict[str, dict]:
    """The records of `whet optimize` of the models in whet/models: what a user's function returned is in no page of theirs."""
    return {name: r for name, r in read(root, "optimize").items() if ".py:" not in r["measured"]["target"]}


def main_run(root: Path) -> tuple[str, dict] | None:
    """The record of `whet optimize` that README shows: the newest in float32, as `make run` makes it, else the newest."""
    found = list(built_in(root).items())
    plain = [(name, r) for name, r in found if r["measured"]["target"].endswith(" float32")]
    return (plain or found)[-1] if found else None


def plans(root: Path) -> str:
    """What `whet optimize` found, one table per record."""
    parts = []
    for name, r in read(root, "optimize").items():
        result = r["measured"]
        rows = []
        for p in result["plans"]:
            timed, chosen = p.get("ms"), p["name"] == result["chosen"]
            rows.append([bold(t, chosen) for t in (p["name"], verified(p))] + [
                bold(t, chosen) for t in (
                    ms(timed), ms(p.get("before_ms")), f"{p['samples_per_s']:.0f}" if timed else "-",
                    f"{p['speedup']:.2f}x" if timed else "-",
                    f"{p['peak_mb']:.0f}" if p.get("peak_mb") else "-",
                )
            ])
        tie = " (a tie: the simpler is kept)" if result["tied"] else ""
        stored = " The plans were read from the lock, not measured again by this command." if result.get("from_lock") else ""
        busy = f" While the plans ran, {result['busy']}." if result.get("busy") else ""
        step = "one forward" if result.get("kind") == "forward" else "one training step"
        parts += [
            f"{result['target']}, {step}; chosen: {result['chosen']}{tie}. `{result['config']}`.{stored}{busy}",
            grid(("plan", "verified", "step, ms", "baseline beside it, ms", "samples/s", "speed-up", "peak MB"), rows, text=2),
            source({name: r}),
        ]
    return "\n\n".join(parts) or absent("optimize")


def verified(plan: dict) -> str:
    if not plan["ok"]:
        return f"no: {plan['why']}"
    return f"yes, {percent(plan['share'])} of the error budget" if "share" in plan else "the baseline"


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
    """How the tests that need a GPU ended, as `make gpu-test` left it; a failure or a part that did not run is named."""
    parts = []
    for name, r in read(root, "gpu").items():
        found = r["measured"]
        notes = {"failed": list(found["failed"]), "failed first, passed when run again": found["passed after failing"]}
        for test, why in found["skipped"].items():
            notes.setdefault(f"skipped, {why}", []).append(test)
        lines = [f"- {what}: {listed(names)}" for what, names in notes.items() if names]
        parts += [counted(r), *(["\n".join(lines)] if lines else []), source({name: r})]
    return "\n\n".join(parts) or absent("gpu")


def machine(root: Path) -> str:
    """What was measured on: GPU, versions, and the measured ceilings that the rooflines refer to."""
    parts = []
    for group in by_machine(read(root, "bench") | read(root, "optimize")):
        m = next(iter(group.values()))["machine"]
        capability = f", compute capability {m['capability'][0]}.{m['capability'][1]}" if m["capability"] else ""
        rows = [
            ("GPU", f"{m['name']}{capability}, {m['sms']} SMs, {m['memory_gib']} GiB, L2 {m['l2_mib']:.0f} MiB"),
            ("versions", versions(m)),
        ]
        with_roof = {name: r for name, r in group.items() if r["measured"].get("ceilings")}
        for roof in [r["measured"]["ceilings"] for r in with_roof.values()][-1:]:
            rows.append(("copy, measured", f"{roof['copy_gbs']:.0f} GB/s, bytes read plus bytes written"))
            rows.append(("matmul, measured", ", ".join(f"{k} {v:.0f} TFLOP/s" for k, v in roof["tflops"].items())))
        parts += [grid(("", ""), rows, text=2), source(dict(list((with_roof or group).items())[-1:]))]
    return "\n\n".join(parts) or absent("bench")
