"""The house rules that a machine can hold: imports point one way, one clock, one writer of the lock, a line budget."""

import ast
import collections
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = sorted((ROOT / "whet").rglob("*.py"))
ORDER = [
    "interrupts", "machine", "figures", "alignment", "padding", "interpret", "interpret_gluon", "launch", "torch_ops", "kinds",
    "values", "parts", "compiled", "op", "source", "lock_file", "lock_faults", "lock", "choices", "ops", "isolation", "child",
    "aot", "graphs", "judge", "verify", "whole", "prove", "race", "plan", "busy", "roof", "measure", "ncu", "worker", "tune",
    "proofs", "workload", "plan_memory", "swap", "models", "decode", "diagnose", "subjects", "duel", "report", "plan_limits",
    "plans", "trackers", "matrix", "step_plans", "step_shared", "step", "step_rivals", "callback", "autoselect", "train",
    "exercise", "commands", "__main__",
]
FILE_LINES, FUNCTION_LINES, PACKAGE_LINES = 400, 50, 51800


def tracked() -> list[Path]:
    """The files of the repository, new ones included; outside a checkout, the sources."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        return [p for p in ROOT.rglob("*") if p.suffix in (".py", ".md", ".toml") and ".venv" not in p.parts]
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


PYTHON = [p for p in tracked() if p.suffix == ".py"]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def files(paths):
    return pytest.mark.parametrize("path", [pytest.param(p, id=name(p)) for p in paths])


def layer(path: Path) -> str:
    return path.relative_to(ROOT / "whet").parts[0].removesuffix(".py")


def imported(tree: ast.Module) -> list[str]:
    """The layers a module imports at its top level."""
    found = []
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module == "whet":
            found += [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("whet."):
            found.append(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            found += [a.name.split(".")[1] for a in node.names if a.name.startswith("whet.")]
    return found


def jitted(node: ast.FunctionDef) -> bool:
    return any(ast.unparse(d).startswith(("triton.jit", "gluon.jit")) for d in node.decorator_list)


def functions(path: Path) -> list[ast.FunctionDef]:
    return [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef)]


def lines_with(pattern: str, paths) -> list[str]:
    found = re.compile(pattern)
    numbered = ((p, i, line) for p in paths for i, line in enumerate(p.read_text().splitlines(), 1))
    return [f"{name(p)}:{i}: {line.strip()}" for p, i, line in numbered if found.search(line)]


@files([p for p in PACKAGE if p != ROOT / "whet" / "__init__.py"])
def test_imports_point_one_way(path):
    mine = layer(path)
    assert mine in ORDER, f"{mine} needs its place in ORDER"
    for other in imported(ast.parse(path.read_text())):
        if other in ORDER:
            assert ORDER.index(other) <= ORDER.index(mine), f"{name(path)} imports {other}, which stands below it"


def test_import_checker_sees_every_form():
    tree = ast.parse("from whet import tune, plans\nfrom whet.verify import x\nimport whet.ops.rope\nimport torch\n")
    assert imported(tree) == ["tune", "plans", "verify", "ops"]


def test_a_class_name_stands_for_one_class():
    """Of those at a module's top level: `Runner` of plans and `Runner` of decode would be two things of one name."""
    found = collections.Counter(n.name for p in PACKAGE for n in ast.parse(p.read_text()).body if isinstance(n, ast.ClassDef))
    assert not {name for name, times in found.items() if times > 1}


def test_only_measure_reads_a_clock():
    """Marks in a queue of work are read by what measure offers; the checks that look for clocks in others' code name them."""
    clock = r"perf_counter|\btime\.time\(|monotonic\(|elapsed_time|do_bench|cuda\.Event\(|^\s*(import time|from time)\b"
    watchers = [ROOT / "whet/diagnose/script.py", ROOT / "whet/diagnose/checks/unsynchronised_timing.py"]
    assert not lines_with(clock, [p for p in PACKAGE if p.name not in ("measure.py", "graphs.py") and p not in watchers])


def test_only_tune_saves_the_lock():
    assert not lines_with(r"[Ll]ock(\.read\(.*\))?\.save\(", [p for p in PACKAGE if p.name != "tune.py"])


def test_kernels_are_deterministic_by_construction():
    """Sums without an order are nowhere: atomics are those of _turns.py, where programs add one after another, and maxima."""
    ops = [p for p in PACKAGE if layer(p) == "ops" and p.name != "_turns.py"]
    assert not lines_with(r"(tl|gl)\.atomic_(?!max)|atomicAdd|index_add_|scatter_add_", ops)


@files(PYTHON)
def test_file_keeps_the_line_budget(path):
    assert len(path.read_text().splitlines()) <= FILE_LINES
    for f in functions(path):
        if not jitted(f):
            length = f.end_lineno - f.lineno + 1
            assert length <= FUNCTION_LINES, f"{f.name} has {length} lines"


def test_package_keeps_the_line_budget():
    """Raising the figure is a decision to be seen in a diff."""
    assert sum(len(p.read_text().splitlines()) for p in PACKAGE) <= PACKAGE_LINES


@files(PYTHON)
def test_module_says_what_it_is_for(path):
    assert ast.get_docstring(ast.parse(path.read_text())), "no module docstring"


KERNELS = [(p, f) for p in PACKAGE for f in functions(p) if jitted(f) and f.name.endswith("_kernel")]


@pytest.mark.parametrize("path, kernel", [pytest.param(p, f, id=f.name) for p, f in KERNELS])
def test_kernel_says_what_it_moves_and_how_it_rounds(path, kernel):
    text = ast.get_docstring(kernel) or ""
    assert re.search(r"^Moves\b", text, re.M), f"{kernel.name}: the docstring has no line Moves"
    assert re.search(r"^Rounds\b", text, re.M), f"{kernel.name}: the docstring has no line Rounds"


@pytest.mark.parametrize("path, kernel", [pytest.param(p, f, id=f.name) for p, f in KERNELS])
def test_kernel_keeps_the_house_names(path, kernel):
    """Constexprs last and capitalised, at most two of them switches."""
    args = kernel.args.args
    constexprs = [bool(a.annotation) and ast.unparse(a.annotation) == "tl.constexpr" for a in args]
    assert constexprs == sorted(constexprs), "constexprs come last"
    names = [a.arg for a, c in zip(args, constexprs) if c]
    assert all(n[0].isupper() for n in names), names
    assert sum(n.startswith(("HAS_", "IS_", "USE_", "WITH_", "NEEDS_")) for n in names) <= 2, names


def test_no_banner_comments_no_leftovers():
    assert not lines_with(r"^\s*#\s*[-=#*~]{3,}|^\s*#.*[-=#*~]{5,}\s*$", PYTHON)
    assert not lines_with(r"#.*\b(TO[D]O|FIX[M]E|XX[X]|HA[C]K)\b|\bbreakpoint\(\)|\bpdb\b", PYTHON)


def test_no_tolerance_is_set_by_hand():
    assert not lines_with(r"\b[ar]tol *= *[0-9]", PYTHON)


def test_no_test_is_skipped_without_a_reason_or_rerun():
    assert not lines_with(r"mark\.(xfail|fla[k]y)|rer[u]ns|mark\.skip\(\s*\)|mark\.skip$|pytest\.skip\(\s*\)", PYTHON)


def test_files_speak_of_the_project_alone():
    words = r"/[w]ork/|/[w]arm/|/\.[l]ibrary/|the device [t]ool|this [s]ession|the [C]EO|/tmp/[v]\b"
    kinds = (".py", ".md", ".toml", ".txt", ".json", ".html", "")
    texts = [p for p in tracked() if p.suffix in kinds and p.stat().st_size < 2**20]
    assert not lines_with(words, texts)
