"""What README and docs say is so: figures come from records, commands exist, snippets run."""

import ast
import importlib
import importlib.util
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import typer
from test_house import ORDER
from typer.testing import CliRunner

import whet
from whet import choices
from whet.autoselect import ModelConfig
from whet.commands import app
from whet.op import Call, Op, discover
from whet.prove import prove
from whet.report import bench_tables, decode, readme
from whet.verify import verify_case

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
README = (ROOT / "README.md").read_text()
FILES = {  # the record that feeds a table; decoding and families have tests of their own, and checks need none
    "bench": "bench-a", "summary": "bench-a", "machine": "bench-a", "ops": "bench-a", "predictions": "bench-a",
    "plans": "optimize-a", "optimize-run": "optimize-a", "finding": "doctor-a", "proved": "prove-a",
    "mutants": "cpu-mutants-a", "gpu-tests": "gpu-tests", "ways": "step-a",
}
LINES = 170  # of README: what is longer belongs into docs/
EVERY_PAGE = pytest.mark.parametrize("page", [pytest.param(p, id=p.name) for p in PAGES])


def fenced(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)


def timing(ms: float | None, ok: bool = True, why: str = "", mib: float = 7.0) -> dict:
    made = {"ok": ok, "share": 0.25, "why": why}
    return made | {"ms": ms, "low": ms, "high": ms, "samples": 9, "host_us": None, "peak_mib": mib} if ms else made


def entry(op: str, case: dict, mode: str, chosen: str, named: dict | None = None, **candidates) -> dict:
    candidates |= named or {}
    return {
        "call": {"op": op, "case": case, "dtype": "bfloat16", "grad": True}, "mode": mode, "candidates": candidates, "count": 1,
        "floor_ms": 0.5, "bound": "memory", "chosen": chosen,
    }


def record(measured: dict, at: str = "2030-01-02T03:04:05+00:00", commit: str = "a" * 40, **machine) -> dict:
    where = {
        "device": "cuda", "name": "Test GPU", "capability": [9, 0], "sms": 7, "memory_gib": 8.0, "l2_mib": 9.0,
        "torch": "2.0", "triton": "3.0", "whet": "0.0", "python": "3.9", "key": "Test GPU | torch 2.0",
    }
    return {"command": "whet bench", "machine": where | machine, "commit": commit, "at": at, "measured": measured}


RMS, CE = {"M": 4096, "N": 384}, {"M": 8, "D": 16, "V": 32}
ENTRIES = [
    entry("rms_norm", RMS, "graph", "triton", eager=timing(4.0), torch=timing(2.0), compile=timing(3.0), triton=timing(1.0)),
    entry("rms_norm", RMS, "eager", "torch", eager=timing(4.0), torch=timing(2.0), compile=timing(1.99), triton=timing(5.0)),
    entry("rms_norm", {"M": 3, "N": 5}, "graph", "triton", eager=timing(9.0), torch=timing(8.0), triton=timing(1.0)),
    entry(
        "linear_cross_entropy", CE, "eager", "compile", eager=timing(9.0, mib=900.0), compile=timing(8.0, mib=80.0),
        liger=timing(None, False, "no | way"),
    ),
]
BEFORE = {
    "name": "before: plain eager", "ok": True, "why": "", "ms": 10.0, "low": 10.0, "high": 10.0, "samples": 9, "speedup": 1.0,
    "samples_per_s": 800, "peak_mb": 9,
}
AFTER = {
    "name": "eager + choices", "ok": True, "why": "", "ms": 4.0, "low": 4.0, "high": 4.0, "samples": 9, "before_ms": 10.0,
    "speedup": 2.5, "samples_per_s": 2000.0, "peak_mb": 60.0,
}
FAILED = {"name": "torch.compile", "ok": False, "why": "grad norm is missing: the graph is cut", "share": 0.0}
PLANS = {
    "target": "tiny-llama:tiny float32", "config": "TinyLlamaConfig(hidden=8)", "chosen": "eager + choices", "tied": False,
    "plans": [BEFORE, AFTER | {"share": 0.41}, FAILED],
}

TESTED = {
    "counts": {"passed": 1234, "failed": 1, "skipped": 5, "not run": 0}, "passed after failing": ["tests/test_b.py::test_z"],
    "failed": {"tests/test_a.py::test_y": "no"},
    "skipped": {f"tests/test_a.py::test_x[{i}]": "too small" for i in range(4)} | {"tests/test_b.py::test_w": "no ncu"},
}

FINDING = {
    "cause": "it copies", "evidence": ["a copy"], "fix": "Do not", "cost_ms": 1.0, "gain_ms": 1.0, "wrong": False,
    "measured": True, "applies": False,
}
FOUND = {"sentence": "Slow.", "findings": [FINDING], "step": {"ms": 4.0}}
STEP = {"target": "gpt2", "batch": [16, 1024], "ways": [
    {"way": "as it is", "timing": {"ms": 80.0}, "memory_mib": 18432}, {"way": "liger", "why": "it has none"},
    {"way": "torch.compile", "timing": {"ms": 40.0}, "memory_mib": 10240}, {"way": "whet.compile_step", "timing": {"ms": 32.0}},
]}
PROVED = {"op": "rms_norm", "impl": "torch", "case": {"M": 1, "N": 8}, "dtype": "float32", "outcome": "right", "why": ""}


@pytest.fixture
def root(tmp_path) -> Path:
    """A checkout with one region of each kind and no records."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "records").mkdir()
    regions = (f"# {name}\n<!-- table:{name} -->\n<!-- /table -->\n" for name in readme.TABLES)
    (tmp_path / "README.md").write_text("".join(regions))
    return tmp_path


def write(root: Path, name: str, made: dict) -> None:
    (root / "records" / name).write_text(json.dumps(made))


def table(root: Path, name: str) -> str:
    assert readme.main(["--root", str(root)]) == 0
    return readme.regions((root / "README.md").read_text())[name]


def test_every_table_is_in_step_with_its_records_and_the_ops():
    assert readme.main(["--check"]) == 0, "run python -m whet.report.readme"


def test_a_figure_changed_by_hand_is_noticed_and_put_right(root, capsys):
    write(root, "bench-a.json", record({"entries": ENTRIES}))
    table(root, "bench")
    page = root / "README.md"
    right = page.read_text()
    page.write_text(right.replace("2.00x", "3.00x"))
    assert page.read_text() != right
    assert readme.main(["--root", str(root), "--check"]) == 1
    assert "README.md: table bench" in capsys.readouterr().out
    readme.main(["--root", str(root)])
    assert page.read_text() == right and readme.main(["--root", str(root), "--check"]) == 0


@pytest.mark.parametrize("name", [*FILES, "gpu-counts", "decoders", "families"])
def test_a_region_without_a_record_makes_no_claim(name, root):
    text = table(root, name)
    assert text.startswith("Not measured yet") and not re.search(r"\d", text)


@pytest.mark.parametrize("name", FILES)
def test_every_table_names_its_record_gpu_versions_and_commit(name, root):
    write(root, "bench-a.json", record({"entries": ENTRIES, "ceilings": {"copy_gbs": 4000.0, "tflops": {"float32": 50.0}}}))
    write(root, "optimize-a.json", record(PLANS, at="2029-01-01T00:00:00+00:00"))
    write(root, "gpu-tests.json", record(TESTED))
    write(root, "doctor-a.json", record(FOUND))
    write(root, "prove-a.json", record({"rows": [PROVED], "stopped": False}))
    mutant = {"kind": "edge", "op": "rms_norm", "name": "no mask", "stopped_by": "values"}
    write(root, "cpu-mutants-a.json", record({"dtype": "bfloat16", "mutants": [mutant]}))
    write(root, "step-a.json", record(STEP))
    line = next(line for line in table(root, name).splitlines() if line.startswith("Source: "))
    assert f"`records/{FILES[name]}.json` (commit `{'a' * 12}`, 20" in line and "Test GPU, torch 2.0, triton 3.0" in line


def test_a_step_by_every_way_is_a_row_and_whets_best_is_compared_with_the_best_of_the_others(root):
    write(root, "step-a.json", record(STEP))
    assert "| gpt2, 16 x 1,024 | 80.000, 18.0 GiB | - | 40.000, 10.0 GiB | 32.000 | 1.25x |" in table(root, "ways")


def test_every_table_is_held_by_a_test():
    assert set(readme.TABLES) == {*FILES, *decode.TABLES, "checks", "gpu-counts", "decoders", "families"}


def test_bench_rows_show_the_chosen_its_rivals_the_roofline_and_the_reasons(root):
    write(root, "bench-a.json", record({"entries": ENTRIES}))
    text = table(root, "bench")
    assert "| rms_norm | 4096x384 | graph | 4.000 | 2.000 | 3.000 | - | **1.000** | triton | 2.00x | 50% memory |" in text
    assert "| rms_norm | 4096x384 | eager | 4.000 | **2.000** | 1.990 | - | 5.000 | torch | 0.99x | 25% memory |" in text
    assert "| rms_norm | M=3 N=5 | graph |" in text
    assert "| linear_cross_entropy | M=8 D=16 V=32 | 900 | - | 80 | - | - |" in text
    assert "- not a candidate: liger for linear_cross_entropy: no | way" in text


LONG = {"B": 1, "L": 9}
TILED = entry(
    "attention", LONG, "graph", "triton_fused_bwd@b", eager=timing(None, False, "refused: too large"), torch=timing(4.0),
    sdpa_flash=timing(2.0), triton=timing(3.0), triton_fused_bwd=timing(1.2), named={
        "triton@a": timing(2.5), "triton@b": timing(None, False, "too much shared memory"),
        "triton@c": timing(None, False, "too much shared memory"),
        "triton_fused_bwd@a": timing(0.99), "triton_fused_bwd@b": timing(1.0, mib=3.0) | {"proved": "attention B=1 L=3"},
    },
) | {"bound": "compute", "flops": 7e11}


def test_an_op_with_other_impls_has_a_table_of_its_own_with_the_best_tile_of_each(root):
    write(root, "bench-a.json", record({"entries": [TILED, *ENTRIES]}))
    text = table(root, "bench")
    assert "| op | shape | mode | torch | sdpa_flash | triton | triton_fused_bwd | chosen | vs best other |" in text
    times = "4.000 | 2.000 | 2.500 | **1.000** | triton_fused_bwd@b | 2.00x | 50% compute, 700 TFLOP/s |"
    assert f"| attention | B=1 L=9 * | graph | {times}" in text
    assert "| op | shape | mode | eager | torch | compile | liger | triton | chosen |" in text
    assert text.count("| rms_norm |") == 3 and text.index("| rms_norm |") > text.index("| attention |")


def test_what_was_verified_smaller_and_what_was_left_out_is_said_once(root):
    write(root, "bench-a.json", record({"entries": [TILED, TILED | {"mode": "eager"}, *ENTRIES]}))
    text = table(root, "bench")
    smaller = [line for line in text.splitlines() if line.startswith("- \\* attention B=1 L=9 ")]
    assert len(smaller) == 1 and "verified as attention B=1 L=3" in smaller[0]
    assert "- not a candidate: triton@b, triton@c for attention: too much shared memory" in text
    assert text.count("not a candidate: eager for attention: refused: too large") == 1


def test_every_kernel_of_whets_own_counts_as_whets(root):
    write(root, "bench-a.json", record({"entries": [TILED]}))
    assert "| attention | 1 | 2.00x (2.00x) | - | 1 of 1 |" in table(root, "summary")


def test_extra_memory_is_that_of_the_tile_shown(root, monkeypatch):
    monkeypatch.setattr(bench_tables, "MEMORY", ("attention",))
    write(root, "bench-a.json", record({"entries": [TILED]}))
    assert "| attention | B=1 L=9 | 7 | 7 | 7 | 3 |" in table(root, "bench")


def test_summary_is_the_geometric_mean_and_the_worst_per_mode(root):
    write(root, "bench-a.json", record({"entries": ENTRIES}))
    text = table(root, "summary")
    assert "| rms_norm | 2 | 4.00x (2.00x) | 0.99x (0.99x) | 2 of 3 |" in text
    assert "| linear_cross_entropy | 1 | - | 1.00x (1.00x) | 0 of 1 |" in text
    assert "| all | 3 | 4.00x (2.00x) | 1.00x (0.99x) | 2 of 4 |" in text


def test_of_two_records_of_a_call_the_newest_counts(root):
    newer = entry("rms_norm", RMS, "graph", "torch", eager=timing(4.0), torch=timing(1.5))
    write(root, "bench-a.json", record({"entries": [newer]}, at="2031-01-01T00:00:00+00:00"))
    write(root, "bench-b.json", record({"entries": ENTRIES[:1]}, at="2030-01-01T00:00:00+00:00"))
    text = table(root, "bench")
    assert "**1.500**" in text and "**1.000**" not in text and "bench-b" not in text


def test_machines_never_share_a_table(root):
    write(root, "bench-a.json", record({"entries": ENTRIES[:1]}))
    write(root, "bench-b.json", record({"entries": ENTRIES[:1]}, name="Other GPU", key="Other GPU | torch 2.0"))
    assert table(root, "summary").count("| all | 1 |") == 2


def test_plans_show_what_failed_and_why(root):
    write(root, "optimize-a.json", record(PLANS))
    text = table(root, "plans")
    rows = {line.split(" | ")[0].strip("|* "): line for line in text.splitlines()}
    assert all(f"**{figure}**" in rows["choices"] for figure in ("4.000", "10.000", "2,000", "2.50x", "60", "0.41", "chosen"))
    assert "grad norm is missing: the graph is cut" in rows["torch.compile"] and "x |" not in rows["torch.compile"]
    before = rows["before: plain eager"]
    assert all(f" {f} |" in before for f in ("10.000", "800", "1.00x", "9")) and "from the lock" not in text


@pytest.mark.parametrize(
    "name, text, reason",
    [
        ("records/bench-a.json", "{", "records/bench-a.json cannot be read"),
        ("records/bench-a.json", "{}", "it is not a record"),
        ("records/bench-a.json", json.dumps(record({"entries": []}, device="cpu")), "was made without a GPU"),
        ("README.md", "<!-- table:nonsense -->\n<!-- /table -->\n", "unknown table 'nonsense'"),
        ("README.md", "<!-- table:bench -->\n", "not closed"),
    ],
)
def test_what_cannot_be_rendered_is_one_line(name, text, reason, root, capsys):
    (root / name).write_text(text)
    with pytest.raises(SystemExit) as stopped:
        readme.main(["--root", str(root), "--check"])
    assert stopped.value.code == 2 and reason in capsys.readouterr().err


def shell(text: str) -> list[str]:
    """The command lines in a page's shell blocks."""
    lines = [line.partition(" #")[0].strip() for block in fenced(text, "sh") for line in block.splitlines()]
    return [line for line in lines if line]


def inline(text: str) -> list[str]:
    """What stands between single backticks in a page's prose."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S))


def command_of(line: str):
    """The command that a `whet ...` line names, and what it is given."""
    _, *words = shlex.split(line)
    commands = typer.main.get_command(app).commands
    n = 2 if " ".join(words[:2]) in commands else 1
    assert CliRunner().invoke(app, [*words[:n], "--help"]).exit_code == 0, line
    return commands[" ".join(words[:n])], words[n:]


def parse(line: str) -> None:
    command, given = command_of(line)
    command.make_context(command.name, given)  # raises what a user would see


@EVERY_PAGE
def test_every_whet_command_is_one_the_command_line_takes(page):
    text = page.read_text()
    for line in shell(text):
        if line.startswith("whet "):
            parse(line)
    for line in inline(text):  # in prose an argument may be left out, an option may not be made up
        if re.fullmatch(r"whet [a-z][\w .:=,-]*", line):
            command, given = command_of(line)
            known = {o for p in command.params for o in (*p.opts, *p.secondary_opts)}
            assert {word for word in given if word.startswith("-")} <= known, line


def test_readme_is_short_and_begins_with_the_two_commands():
    assert len(README.splitlines()) <= LINES
    assert shell(README)[:2] == ["make run", "make test"]


def test_readme_has_commands_and_a_wrong_one_is_seen():
    assert {"bench", "doctor", "generate"} <= {line.split()[1] for line in shell(README) if line.startswith("whet ")}
    for line in ("whet sharpen", "whet bench --no-such-option"):
        with pytest.raises(Exception):  # noqa: B017  (an assertion here, the parser's own error there)
            parse(line)


@EVERY_PAGE
def test_every_module_and_make_target_that_is_named_exists(page):
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    for line in shell(page.read_text()) + inline(page.read_text()):
        if found := re.match(r"(?:TRITON_INTERPRET=\d )?python -m ([\w.]+)", line):
            assert importlib.util.find_spec(found[1]), line
        if found := re.fullmatch(r"make ([\w-]+)", line):
            assert found[1] in targets, line


@EVERY_PAGE
def test_every_link_leads_to_a_file_and_a_heading(page):
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        file, _, anchor = target.partition("#")
        text = (page.parent / file).read_text() if file else page.read_text()
        headings = [re.sub(r"[^\w -]", "", h).strip().lower().replace(" ", "-") for h in re.findall(r"^#+ (.*)$", text, re.M)]
        assert not anchor or anchor in headings, target


@EVERY_PAGE
def test_names_imported_in_snippets_exist(page):
    for block in fenced(page.read_text(), "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("whet"):
                module = importlib.import_module(node.module)
                assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)


def test_the_tour_runs_here(tmp_path, monkeypatch):
    """As a user would run it, in an empty folder: it tunes for real and leaves a lock behind."""
    monkeypatch.setattr(choices, "_active", [])
    tour = next(b for b in fenced((ROOT / "docs" / "optimize.md").read_text(), "python") if "Recorder()" in b)
    scope: dict = {"__name__": "tour"}
    exec(compile(tour, "optimize.md", "exec"), scope)
    assert (tmp_path / "whet.lock").exists()
    assert list(scope["choices"].table.values())[0] in discover()["rms_norm"].impls and scope["y"].shape == (8, 64)


def test_the_example_op_fills_the_contract(tmp_path, device):
    """The op of CONTRIBUTING is loaded, verified and described like those of the package."""
    path = tmp_path / "relu_squared.py"
    path.write_text(fenced((ROOT / "CONTRIBUTING.md").read_text(), "python")[0])
    spec = importlib.util.spec_from_file_location("relu_squared", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    op: Op = module.OP
    assert list(op.impls) == ["eager", "torch", "compile"]
    for case in op.cases:
        for dtype in ("float32", "float16", "bfloat16"):
            verdict = verify_case(op, "torch", case, dtype, device)
            assert verdict.ok, verdict.why
    assert "whet bench relu_squared" in readme.op_section(op) and len(op.hostile) >= 6
    verdict = prove(op, "torch", Call(op.name, dict(M=9, N=96), "bfloat16", True), device)
    assert verdict.ok, verdict.why


def test_the_house_in_the_design_is_the_house_that_is_tested():
    section = (ROOT / "docs" / "design.md").read_text().partition("## The house")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", section, re.M) == ORDER


def test_facts_written_in_prose_are_those_of_the_code():
    """One source per fact: each copy is held to it."""
    words = {p.name: re.sub(r"\s+", " ", p.read_text()) for p in PAGES}
    for page in ("design.md", "measuring.md"):
        assert f"in the order {', '.join(bench_tables.having())}" in words[page]
    selection = (ROOT / "docs" / "kernel-selection.md").read_text()
    listed = re.findall(r"^\| `(\w+)` \| (\S+) \|", selection, re.M)
    fields = {name: repr(value) for name, value in vars(ModelConfig()).items()}
    assert {name: value.strip("`").replace('"', "'") for name, value in listed} == fields
    assert all(hasattr(whet, name) for name in re.findall(r"^## (\w+)\(", selection, re.M))


def test_the_licence_is_whole():
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "END OF TERMS AND CONDITIONS" in text and "the whet authors" in text


def test_a_checkout_without_records_still_renders(root):
    shutil.rmtree(root / "records")
    assert table(root, "bench").startswith("Not measured yet")
