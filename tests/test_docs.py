"""Pages made whole, the pictures, README's excerpts and small tables; and that CONTRIBUTING's examples do what it says."""

import importlib.util
import inspect
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import typer
from test_decode_report import MEASURED
from test_readme import AFTER, BEFORE, ENTRIES, FOUND, PLANS, TESTED, fenced, record, root, table, write  # noqa: F401
from torch import nn
from typer.testing import CliRunner

import whet
from whet import models, subjects
from whet.choices import Choices
from whet.commands import app
from whet.diagnose.run import Run
from whet.op import Impl, discover
from whet.report import api, decode, front, pictures, readme
from whet.swap import Met, _replace

ROOT = Path(__file__).parent.parent
PICTURES = pytest.mark.parametrize("name", pictures.PICTURES)


@pytest.fixture
def recorded(root):  # noqa: F811
    write(root, "bench-a.json", record({"entries": ENTRIES}))
    write(root, "optimize-a.json", record(PLANS))
    return root


@PICTURES
def test_a_picture_is_in_step_with_its_records_and_shown_in_readme(name):
    path = ROOT / "docs" / "pictures" / f"{name}.svg"
    assert path.read_text() == pictures.PICTURES[name](ROOT), "run python -m whet.report.pictures"
    assert f"](docs/pictures/{name}.svg)" in (ROOT / "README.md").read_text()


@PICTURES
def test_a_picture_is_well_formed_the_same_each_time_and_names_its_record(name, recorded):
    made = pictures.PICTURES[name](recorded)
    assert made == pictures.PICTURES[name](recorded)
    assert ET.fromstring(made).tag.endswith("svg")
    file = {"plans": "optimize-a", "ops": "bench-a"}[name]
    assert f"records/{file}.json, commit {'a' * 12}" in made


def test_without_a_record_there_is_no_picture(root):  # noqa: F811
    assert pictures.rendered(root) == {} and pictures.main(["--root", str(root), "--check"]) == 0


def test_a_picture_changed_by_hand_is_noticed_and_drawn_anew(recorded, capsys):
    assert pictures.main(["--root", str(recorded)]) == 0
    path = recorded / "docs" / "pictures" / "plans.svg"
    right = path.read_text()
    path.write_text(right.replace("4.00 ms", "3.00 ms"))
    for check in (pictures.main, readme.main):
        assert check(["--root", str(recorded), "--check"]) == 1
        assert "docs/pictures/plans.svg: out of step with records/" in capsys.readouterr().out
    pictures.main(["--root", str(recorded)])
    assert path.read_text() == right and pictures.main(["--root", str(recorded), "--check"]) == 0


def test_bars_are_as_long_as_their_times_and_what_failed_has_none(recorded):
    drawn = ET.fromstring(pictures.plans(recorded))
    before, after = (float(bar.get("width")) for bar in drawn.iter("{http://www.w3.org/2000/svg}rect"))
    assert after / before == pytest.approx(AFTER["ms"] / BEFORE["ms"], rel=1e-3)


def test_names_in_a_picture_are_escaped(root):  # noqa: F811
    write(root, "optimize-a.json", record(PLANS | {"target": "a<b>&\"c\" float32"}))
    assert "a<b>&" in ET.fromstring(pictures.plans(root)).get("aria-label")


def test_readme_shows_the_float32_run_however_old_it_is(recorded):
    newer = PLANS | {"target": "tiny-llama:tiny tf32"}
    write(recorded, "optimize-b.json", record(newer, at="2031-01-01T00:00:00+00:00"))
    assert "optimize-a.json" in front.optimize_run(recorded) and "optimize-a.json" in pictures.plans(recorded)


def test_an_excerpt_is_what_the_terminal_shows(recorded):
    text = front.optimize_run(recorded)
    assert text.startswith("```text\n$ whet bench\nplans for tiny-llama:tiny float32: one training step\n")
    assert "│ choices " in text and "2.50x" in text and "grad norm is missing" in text
    write(recorded, "doctor-a.json", record(FOUND))
    text = front.finding(recorded)
    assert all(fact in text for fact in ("it copies", "1.000 ms, 25%", "a copy", "fix: Do not"))


def test_small_tables_hold_the_figures_of_the_large_ones(recorded):
    write(recorded, "decode-a.json", record(MEASURED))
    fewer = MEASURED | {"rows": [r for r in MEASURED["rows"] if not r["quant"]]}
    write(recorded, "decode-b.json", record(fewer))
    text = decode.summary(recorded, compared=True)
    assert text.startswith("| batch (qwen3:0.6b, random weights, tokens a second) | context |")
    assert "| 1 | 128 | 33 | 667 | 2,500 | 69% | 3,333 |" in text
    assert "| 8 | 128 |" not in text, "where no rival was timed there is nothing to compare"


def test_results_have_every_table_and_say_where_there_is_no_record(root):  # noqa: F811
    page = readme.results(root)
    assert page.count("Not measured yet") == len(re.findall(r"^## ", page, re.M)) == 6 and not re.search(r"\d+\.\d+x", page)


def test_the_reference_has_every_public_name_op_and_command():
    page = (ROOT / "docs" / "api.md").read_text()
    assert page == api.page(), "run python -m whet.report.readme"
    assert all(f"### whet.{name}\n" in page for name in whet._HOMES)
    assert all(f"(ops.md#{name})" in page for name in discover())
    assert all(f"### whet {command.name}\n" in page for command in app.registered_commands)


def test_a_signature_is_as_it_is_written():
    def given(a, b: int = 3, *rest, c: str | None = None, **more) -> dict:
        """Nothing."""

    assert api.signature("f", given) == "f(a, b: int=3, *rest, c: str | None=None, **more) -> dict"
    for path in (path for paths in api.GROUPS.values() for path in paths):
        assert inspect.getdoc(api.found(path)[1]), f"{path} has no docstring"


def test_ops_page_is_in_step_and_names_every_op_impl_and_limit():
    page = (ROOT / "docs" / "ops.md").read_text()
    assert page == readme.ops_page(discover())
    for op in discover().values():
        section = page.partition(f"\n## {op.name}\n")[2].partition("\n## ")[0]
        assert f"{op.name}(" in section
        for name, impl in op.impls.items():
            row = next(line for line in section.splitlines() if line.startswith(f"| {name} |"))
            assert all(limit in row for limit in impl.limits)


def test_a_changed_ops_page_is_noticed(root, capsys):  # noqa: F811
    table(root, "bench")
    (root / "docs" / "ops.md").write_text("# Ops\n")
    assert readme.main(["--root", str(root), "--check"]) == 1
    assert "docs/ops.md: out of step with whet/" in capsys.readouterr().out


def test_the_ops_page_knows_every_impl_and_says_what_it_implies_and_that_it_has_tiles():
    for op in discover().values():
        assert all(f"| {name} | {impl.words} |" in readme.op_section(op) for name, impl in op.impls.items())
    notes = readme.impl_notes("triton_fp8", Impl(print, implies={"precision": "fp8"}, tiles=lambda **_: ("a",)))
    assert notes[0] == "`impl=\"triton_fp8\"` sets `precision='fp8'` unless it is given." and "`triton_fp8@<tile>`" in notes[1]
    assert readme.impl_notes("triton", Impl(print)) == []


def test_gpu_tests_are_counted_and_what_did_not_pass_is_named(root):  # noqa: F811
    write(root, "gpu-tests.json", record(TESTED))
    text = table(root, "gpu-tests")
    counts = f"1,234 GPU tests passed, 1 failed, 5 skipped on Test GPU, at commit `{'a' * 12}`."
    assert text.startswith(counts) and table(root, "gpu-counts") == f"`make gpu-test` left `records/gpu-tests.json`: {counts}\n"
    assert "- failed: `tests/test_a.py::test_y`" in text and "run again: `tests/test_b.py::test_z`" in text
    assert "- skipped, too small: 4 of `tests/test_a.py`" in text and "- skipped, no ncu: `tests/test_b.py::test_w`" in text
    write(root, "gpu-tests.json", record(TESTED | {"counts": TESTED["counts"] | {"not run": 7}}))
    assert "5 skipped, 7 did not run on Test GPU" in table(root, "gpu-tests")


def example(which: int, name: str, folder: Path):
    """A module of CONTRIBUTING's examples: an op, a recogniser, a check, a model, a command."""
    path = folder / f"{name}.py"
    path.write_text(fenced((ROOT / "CONTRIBUTING.md").read_text(), "python")[which])
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class SwiGLU(nn.Module):
    """`first` False: silu of the second half, which is another function."""

    def __init__(self, first: bool = True):
        super().__init__()
        self.first = first

    def forward(self, x):
        gate, up = x.chunk(2, -1) if self.first else reversed(x.chunk(2, -1))
        return F.silu(gate) * up


def test_the_example_recogniser_finds_what_computes_its_op_and_says_why_it_leaves_the_rest(tmp_path, monkeypatch):
    monkeypatch.setattr(_replace, "discover", lambda: {"packed_swiglu": example(1, "packed_swiglu", tmp_path).find})
    model, x = nn.Sequential(SwiGLU(), nn.Flatten(2), SwiGLU(first=False)), torch.randn(2, 4, 64)
    before = model(x)
    found = _replace.recognise(model, Met((x,), {}), Choices())
    assert [(site.path, site.words) for site, _ in found.sites] == [("0", "SwiGLU of 64 packed")]
    assert [(left.path, left.why) for left in found.left] == [("2", "SwiGLU does not compute silu(first half) * second half")]
    found.ask(Choices(default="torch"))
    assert "forward" in vars(model[0]) and torch.allclose(model(x), before)


def test_the_example_check_flags_what_is_planted_and_nothing_else(tmp_path):
    check = example(2, "float64", tmp_path).CHECK
    (found,) = check.find(Run(check.planted(), seconds=0.01))
    assert found.check == check.name == "float64" and found.module == "linear" and found.fix
    assert not list(check.find(Run(check.clean(), seconds=0.01)))


def test_the_example_model_records_its_calls_and_every_parameter_has_a_gradient(tmp_path, monkeypatch, device):
    model = example(3, "tiny_mlp", tmp_path).MODEL
    monkeypatch.setattr(models, "discover", lambda: {model.name: model})
    found, size = models.find("tiny-mlp")
    config, recipe = found.sizes[size], found.recipes[size]
    calls = subjects.BuiltIn(found, config, recipe, device=device).calls("float32")
    assert [call.op for call, _ in calls] == ["rms_norm", "swiglu", "linear_cross_entropy"]
    weights = dict(found.build(config, found.plain, Choices(default="eager"), seed=recipe.seed).to(device).named_parameters())
    exact = subjects.oracle(found, config, recipe, weights, device)
    assert set(exact) == {"output loss", *(f"grad {name}" for name in weights)}


def test_the_example_command_runs_and_says_what_was_wrong(tmp_path):
    made = typer.Typer()
    made.command("shapes")(example(4, "shapes", tmp_path).command)
    right, wrong = CliRunner().invoke(made, ["rms_norm"]), CliRunner().invoke(made, ["softmax"])
    assert right.exit_code == 0 and "4096x384" in right.output
    assert wrong.exit_code == 2 and "shapes: there is no softmax; there are" in wrong.output
