"""What a user meets at the prompt: the names of the package, its types, and choices that print their evidence."""

import subprocess
import sys
from pathlib import Path

import whet
from whet.choices import Choices, evidence_of

ROOT = Path(whet.__file__).parent


def test_dir_shows_what_there_is_and_nothing_else():
    script = "import whet; print(*dir(whet)); whet.Choices; print(*dir(whet))"
    fresh, later = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout.splitlines()
    assert fresh == later, "the same before and after something is loaded"
    names = fresh.split()
    assert {"LLM", "use", "Choices", "ops", "auto_select_kernels", "__version__"} <= set(names)
    assert not {"importlib", "_HOMES", "_MODULES"} & set(names) and callable(whet.optimize)
    assert all(hasattr(whet, name) for name in names)


def test_the_package_says_that_it_is_typed():
    assert (ROOT / "py.typed").is_file()
    if (project := ROOT.parent / "pyproject.toml").is_file():
        assert '\nwhet = ["py.typed"]\n' in project.read_text()


def test_printed_choices_show_op_call_impl_time_and_the_others():
    key, other = "rms_norm M=64 N=128 float32 fwd+bwd", "rope B=2 float32 fwd"
    entry = {"chosen": "torch", "ms": 0.0123, "vs_eager": 2.5, "rival": "compile", "vs_rival": 1.25, "candidates": {}}
    entries = {f"{key} @ eager": entry, f"{other} @ graph": entry, f"{other} @ eager": {"chosen": "eager", "ms": 1.0}}
    table = {key: "torch", other: "triton"}
    head, names, *lines = str(Choices(table, evidence=evidence_of(entries, "eager", table))).splitlines()
    assert head == "Choices(2 calls tuned, default stock)" and names.split() == ["op", "call", "impl", "ms", "versus"]
    assert lines[0].split("  ")[0] == "rms_norm" and "M=64 N=128 float32 fwd+bwd" in lines[0]
    assert lines[0].endswith("torch   0.0123  1.25x compile, 2.50x eager")
    assert lines[1].endswith("triton  -       -"), "another impl's time is not shown as its own"
    assert str(Choices()) == repr(Choices()) == "Choices(0 calls tuned, default stock)"
