"""The command line as a user meets it: examples that run, errors in one line, JSON that parses, nothing lost on Ctrl-C."""

import importlib
import inspect
import io
import json
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import pytest
import typer
from conftest import without
from rich.console import Console
from typer.testing import CliRunner

import whet.tune
from whet.commands import PlainHelp, _console, app
from whet.commands._shapes import calls_of_shapes
from whet.lock import Lock
from whet.op import discover
from whet.report import tables

COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
WHET = [sys.executable, "-m", "whet"]
RESULT = {
    "target": "tiny-llama:tiny float32", "config": "TinyLlamaConfig()", "chosen": "eager", "tied": False, "speedup": 2.0,
    "note": "No GPU.", "calls": [], "from_lock": False, "seconds": 1.0, "entries": [
        {
            "call": {"op": "rope", "case": {"B": 2, "S": 8}, "dtype": "float32", "grad": True},
            "mode": "eager", "count": 3, "chosen": "eager",
            "candidates": {
                "eager": {"ok": True, "share": 0.0, "why": "", "ms": 1.0, "low": 0.9, "high": 1.1, "samples": 9},
                "triton": {"ok": False, "share": 0.0, "why": "rope[triton]: cannot read [/usr/lib/x] :warning:"},
            },
        }
    ],
    "plans": [
        {"name": "before: plain eager", "ok": True, "why": "", "ms": 4.0, "low": 3.9, "high": 4.1, "samples": 9}
        | {"samples_per_s": 2000.0, "speedup": 1.0},
        {"name": "eager", "ok": True, "why": "", "share": 0.4, "ms": 2.0, "low": 1.9, "high": 2.1, "samples": 9}
        | {"samples_per_s": 4000.0, "speedup": 2.0},
        {"name": "torch.compile", "ok": False, "why": "RuntimeError: swiglu[triton]: no [/tmp/kernel.so]"},
    ],
}


def invoke(*args: str):
    return CliRunner().invoke(app, args, env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"})


def shown_help(command: str) -> str:
    return re.sub(r"\s+", " ", invoke(command, "--help").output)


def example(command: str) -> list[str]:
    found = re.search(r"Example: whet ([^╭\n]+)", invoke(command, "--help").output)
    assert found, f"{command} --help has no example"
    return shlex.split(found[1].strip())


def error_lines(result) -> list[str]:
    return result.stderr.strip().splitlines()


@pytest.fixture
def few():
    """No torch.compile of single ops: the subprocess test tries it."""
    with without("compile", "liger"):
        yield


@pytest.fixture
def planted(monkeypatch):
    """optimize answers at once; what it was asked is kept."""
    asked = []
    monkeypatch.setattr("whet.plans.best_plan", lambda *args: asked.append(args) or RESULT)
    return asked


@pytest.fixture(scope="module")
def benched(tmp_path_factory):
    """The bench example of the help text in a process of its own, output to a pipe."""
    folder = tmp_path_factory.mktemp("bench")
    done = subprocess.run([*WHET, *example("bench"), "--seconds", "0.02"], cwd=folder, capture_output=True, text=True)
    return done, folder


def test_bench_example_verifies_times_and_keeps_a_record(benched):
    done, folder = benched
    assert done.returncode == 0, done.stderr
    for word in ("rms_norm M=64 N=128", "eager", "torch", "compile", "chosen", "of roofline"):
        assert word in done.stdout
    (path,) = (folder / "records").iterdir()
    assert f"record: records/{path.name}" in done.stdout
    kept = json.loads(path.read_text())
    assert kept["command"].startswith("whet bench rms_norm --shapes M=64,N=128") and "--dtype bfloat16" in kept["command"]


def test_no_bar_and_no_colour_where_the_output_is_no_terminal(benched):
    for text in (benched[0].stdout, benched[0].stderr):
        assert "\x1b" not in text and "\r" not in text and "starting" not in text
    assert not (benched[1] / "whet.lock").exists(), "a bench leaves the choices alone"


def test_a_terminal_gets_a_bar(monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(_console, "console", Console(file=screen, force_terminal=True, width=100))
    with _console.progress_bar(True) as progress:
        progress("verifying rope/triton", 3, 8)
    assert "\x1b" in screen.getvalue() and "verifying rope/triton" in screen.getvalue()
    before = screen.getvalue()
    with _console.progress_bar(False) as progress:
        progress("verifying rope/triton", 3, 8)
    assert screen.getvalue() == before, "--json shows none"


def test_bench_json_is_a_whole_record(few):
    options = "--shapes M=8,N=32 --dtype float32 --forward-only --seconds 0.01 --json --name mine"
    result = invoke("bench", "rms_norm", *options.split())
    assert result.exit_code == 0, result.stderr
    made = json.loads(result.stdout)
    assert set(made) >= {"command", "machine", "commit", "at", "measured"}
    assert made["command"] == "whet bench rms_norm --shapes M=8,N=32 --mode both --dtype float32 --seconds 0.01 --forward-only"
    assert made["machine"]["torch"] and made["machine"]["key"]
    assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?|unknown", made["commit"])
    entry = made["measured"]["entries"][0]
    assert entry["call"] == {"op": "rms_norm", "case": {"M": 8, "N": 32}, "dtype": "float32", "grad": False}
    assert entry["candidates"]["torch"]["ms"] > 0 and entry["chosen"] in entry["candidates"]
    (path,) = Path("records").glob("*mine.json")
    assert json.loads(path.read_text()) == made


def test_machine_example_runs_and_gives_ceilings_with_units():
    result = invoke(*example("machine"))
    assert result.exit_code == 0
    assert "GB/s" in result.stdout and "TFLOP/s" in result.stdout and "torch" in result.stdout and "Triton" in result.stdout
    found = json.loads(invoke("machine", "--json").stdout)
    assert found["ceilings"]["copy_gbs"] > 0 and found["ceilings"]["tflops"]["float32"] > 0
    assert found["machine"]["device"] in ("cpu", "cuda")


def test_ops_example_runs_and_lists_every_op_with_its_impls():
    result = invoke("ops")
    assert result.exit_code == 0 and all(name in result.stdout for name in discover())
    one = invoke(*example("ops"))
    assert one.exit_code == 0 and "bottom-right" in one.stdout and "rms_norm" not in one.stdout
    listed = json.loads(invoke("ops", "--json").stdout)
    assert set(listed) == set(discover())
    for name, op in discover().items():
        assert set(listed[name]["impls"]) == set(op.impls) and listed[name]["doc"] and listed[name]["signature"].startswith("(")


def test_optimize_example_shows_calls_plans_and_the_choice(planted):
    result = invoke(*example("optimize"))
    assert result.exit_code == 0, result.stderr
    target, lock, precision, again, seconds, _, *options = planted[0]
    assert (target, precision, again, seconds, options) == ("tiny-llama:tiny", "float32", False, 0.5, ["", [], 0])
    assert str(lock.path) == "whet.lock"
    assert "stock: 2.00x the plain eager model, every gradient verified. No GPU." in result.stdout
    assert "before: plain eager" in result.stdout and "4,000" in result.stdout and "lock: whet.lock" in result.stdout


def test_reasons_are_printed_as_they_are(planted):
    """Square brackets and colons in a reason are no markup."""
    result = invoke("optimize", "tiny-llama:tiny")
    text = re.sub(r"[\s│]+", " ", result.stdout)
    assert "not a candidate: triton for rope: rope[triton]: cannot read [/usr/lib/x] :warning:" in text
    assert "RuntimeError: swiglu[triton]: no [/tmp/kernel.so]" in text


def test_a_call_is_named_by_every_size_and_option_it_has():
    case = {"M": 0, "N": 1, "layout": "contiguous", "interleaved": True, "bias": False, "R": None, "kind": "packed"}
    entry = {"call": dict(op="rope", case=case, dtype="float16", grad=True)}
    assert tables.entry_id(entry) == "rope M=0 N=1 interleaved kind=packed float16"


def test_an_impl_has_one_line_with_the_best_of_its_tiles(capsys, monkeypatch):
    def timed(ms: float, **more) -> dict:
        return {"ok": True, "share": 0.5, "why": "", "ms": ms, "low": ms, "high": ms, "samples": 9} | more

    candidates = {
        "eager": {"ok": False, "share": 0.0, "why": "refused: the scores do not fit"}, "torch": timed(4.0),
        "triton": timed(2.0), "triton@a": timed(1.0, proved="rope B=1 float16 fwd"), "triton@b": timed(3.0),
    }
    call = dict(op="rope", case={"B": 2}, dtype="float16", grad=True)
    made = {"call": call, "mode": "graph", "count": 1, "chosen": "triton@a", "rival": "torch", "vs_rival": 4.0}
    made |= {"candidates": candidates, "floor_ms": 0.5, "bound": "compute", "flops": 6e11}
    screen = io.StringIO()
    tables.show_calls(Console(file=screen, width=200, markup=False), [made])
    text = re.sub(r"[ │]+", " ", screen.getvalue())
    assert "triton@a 1.000 0.0100 50% compute, 600 TFLOP/s 0.50 * chosen, 4.00x torch, best of 3 tiles" in text
    assert "torch 4.000 0.0400 12% compute, 150 TFLOP/s 0.50" in text
    assert "triton@b" not in text and " triton 2.000" not in text
    smaller = next(line for line in text.splitlines() if line.startswith("* rope B=2 float16 "))
    assert "verified as rope B=1 float16 fwd" in smaller
    assert "not a candidate: eager for rope: refused: the scores do not fit" in text


def shapes_of(*asked: str) -> list[str]:
    op = discover()["rms_norm"]
    names = {str(case): name for name, case in op.shapes.items()}
    return [names[str(call.case)] for call, _ in calls_of_shapes(["rms_norm"], list(asked), "bfloat16", True)]


def test_shapes_are_picked_by_name_or_part_of_it_each_once():
    assert shapes_of("4096x384") == ["4096x384"] and shapes_of() == list(discover()["rms_norm"].shapes)
    assert shapes_of("16384x", "16384x4096", "x1024") == ["16384x1024", "16384x4096"]


def test_a_forward_bench_has_a_record_of_its_own(monkeypatch):
    monkeypatch.setattr(whet.tune, "tune", lambda *_, **__: None)
    for options in ((), ("--forward-only",)):
        assert invoke("bench", "rms_norm", "--shapes", "4096x384", *options).exit_code == 0
    names = sorted(p.stem.removeprefix("cpu-") for p in Path("records").iterdir())
    assert names == ["bench-rms-norm-4096x384", "bench-rms-norm-4096x384-forward"]


def test_the_command_in_a_record_can_be_typed_again(monkeypatch):
    monkeypatch.setattr(whet.tune, "tune", lambda *_, **__: None)
    monkeypatch.setitem(discover()["rms_norm"].shapes, "mid (10k, 1k)", {"M": 8, "N": 32})
    made = json.loads(invoke("bench", "rms_norm", "--shapes", "mid (10k", "--json").stdout)
    assert shlex.split(made["command"])[:5] == ["whet", "bench", "rms_norm", "--shapes", "mid (10k"]


def test_plans_that_were_never_timed_have_a_line_too():
    screen = io.StringIO()
    before = {"name": "before", "ok": True, "why": "", "speedup": 1.0}
    lost = {"name": "eager", "ok": False, "why": "out of memory"}
    Console(file=screen, width=160).print(tables.plans_table(RESULT | {"plans": [before, lost], "chosen": "before"}))
    assert "out of memory" in screen.getvalue() and "chosen" in screen.getvalue()


def test_optimize_json_is_a_record_and_options_reach_it(planted):
    options = "--precision bfloat16 --again --seconds 0.1 --lock my.lock --records kept --json --against tiny-llama"
    more = ["--max-memory", "2GiB", "--only", "torch.compile, choices,stock + CUDA graph"]
    result = invoke("optimize", "tiny-llama:tiny", *options.split(), *more)
    made = json.loads(result.stdout)
    assert made["measured"] == RESULT and "tiny-llama:tiny --precision bfloat16" in made["command"]
    target, lock, *rest, _, against, only, most = planted[0]
    assert (target, str(lock.path), rest) == ("tiny-llama:tiny", "my.lock", ["bfloat16", True, 0.1])
    assert (against, most) == ("tiny-llama", 2**31) and only == ["torch.compile", "eager + choices", "eager + CUDA graph"]
    assert made["command"].endswith("--against tiny-llama --only 'torch.compile, choices,stock + CUDA graph' --max-memory 2GiB")
    (path,) = Path("kept").iterdir()
    assert json.loads(path.read_text()) == made and "within-2GiB" in path.name


WRONG = {
    "op": ("bench nope", "'nope'; there are activated_linear, add_layer_norm, add_rms_norm, "),
    "no-shape": ("bench rms_norm --shapes ''", "M=...,N=... or one of ['4096x384', "),
    "shape": ("bench rms_norm --shapes tall", "M=...,N=... or one of ['4096x384', "),
    "negative": ("bench rms_norm --shapes M=-8,N=8", "M=...,N=... or one of ['4096x384', "),
    "size": ("bench rms_norm --shapes M=8,Q=3", "M=...,N=... or one of ['4096x384', "),
    "missing": ("bench rope --shapes B=8", "B=...,S=...,Hq=...,Hk=...,D=..."),
    "together": ("bench rope --shapes B=1,S=8,Hq=2,Hk=2,D=7", "rope: rotary_dim must be even"),
    "layout": ("bench rms_norm --shapes M=8,N=8,layout=3", "layout must be one of"),
    "no-op": ("ops attentoin", "attentoin; there are activated_linear, add_layer_norm, add_rms_norm, attention, "),
    "dtype": ("bench rms_norm --dtype int8", "dtype must be one of ['float32', 'float16', 'bfloat16', 'float64'], got 'int8'"),
    "mode": ("bench rms_norm --mode fast", "mode must be eager, graph or both, got 'fast'"),
    "model": ("optimize gpt-9", "'gpt-9'; there are "),
    "model-size": ("optimize tiny-llama:huge", "has no size 'huge'; there are small, tiny"),
    "precision": ("optimize tiny-llama:tiny --precision fp8", "precision must be one of ('float32', 'tf32', 'bfloat16')"),
}


@pytest.mark.parametrize("command, reason", WRONG.values(), ids=WRONG)
def test_a_wrong_argument_is_one_line_that_names_the_choices(command, reason, monkeypatch):
    monkeypatch.setattr("whet.worker.Worker.start", lambda self: pytest.fail("a process was started"))
    result = invoke(*shlex.split(command))
    assert result.exit_code == 2 and result.stdout == ""
    assert len(error_lines(result)) == 1 and error_lines(result)[0].startswith("whet: ") and reason in error_lines(result)[0]


@pytest.mark.parametrize("command", ["", "sharpen", "bench --shape M=1", "optimize", "machine --fast"])
def test_unknown_commands_and_options_are_refused(command):
    assert invoke(*shlex.split(command)).exit_code == 2


UNITS = {
    "machine": ("GB/s", "TFLOP/s"),
    "bench": ("candidate, seconds.", "[default: 0.25]"),
    "optimize": ("plan, seconds.", "[default: 0.5]"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_help_gives_units_defaults_and_an_example(command):
    text = shown_help(command)
    assert "Example: whet " + command in text
    for option in COMMANDS[command].params:
        if option.param_type_name == "option" and option.name != "help":
            assert option.help, f"{option.name} has no help"
            shown = option.show_default and option.default not in (None, "", False)
            assert shown or "default" in option.help, f"{option.name}: the help has no default"
    for words in UNITS.get(command, ()):
        assert words in text


@pytest.mark.parametrize("command", COMMANDS)
def test_brackets_in_a_commands_help_are_shown_as_they_are(command):
    """Of the text that its file has: rich would take [cpu] for markup."""
    whole = re.sub(r"[│\s]+", " ", invoke(command, "--help").output)
    source = importlib.import_module(f"whet.commands.{re.sub('[ -]', '_', command)}").command
    assert re.sub(r"\s+", " ", source.__doc__).strip() in whole
    helps = [a.help for p in inspect.signature(source).parameters.values() for a in getattr(p.annotation, "__metadata__", ())]
    assert helps and all(part in whole for text in helps for part in re.findall(r"\[[^]]*\]", text or ""))


def test_brackets_of_arguments_and_options_are_shown_as_they_are():
    def planted(
        run: Annotated[str, typer.Argument(help="of [cpu]")] = "", size: Annotated[int, typer.Option(help="or [gpu]")] = 1,
    ):
        """Of the table [model]
        and of [/train]."""

    made = typer.Typer()
    made.command(cls=PlainHelp)(planted)
    text = CliRunner().invoke(made, ["--help"], env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"}).output
    assert "Of the table [model] and of [/train]." in text and "of [cpu]" in text and "or [gpu]" in text


def interrupt(*_, **__):
    raise KeyboardInterrupt


def test_a_bench_stopped_before_anything_was_timed_says_so(monkeypatch):
    monkeypatch.setattr(whet.tune, "tune", interrupt)
    result = invoke("bench", "rms_norm", "--shapes", "M=8,N=32")
    assert result.exit_code == 130
    assert len(error_lines(result)) == 1 and "stopped; nothing was timed" in error_lines(result)[0]


def test_a_bench_stopped_half_way_keeps_what_was_timed(monkeypatch, few, tmp_path):
    real = whet.tune.tune

    def half(calls, *rest, **options):
        real(calls[:1], *rest, **options)
        rest[0].calls["another @ eager"] = {"call": {}, "mode": "eager", "candidates": {}}
        raise KeyboardInterrupt

    monkeypatch.setattr(whet.tune, "tune", half)
    shapes = ("--shapes", "M=8,N=32", "--shapes", "M=4,N=32")
    result = invoke("bench", "rms_norm", *shapes, "--seconds", "0.01", "--records", str(tmp_path), "--name", "half")
    assert result.exit_code == 130 and "stopped; 1 of 2" in error_lines(result)[-1]
    kept = json.loads(next(tmp_path.glob("*half.json")).read_text())["measured"]
    assert kept["stopped"] and [e["call"]["case"] for e in kept["entries"]] == [{"M": 8, "N": 32}]


FEWER = """
import whet.__main__
from whet.op import discover
for op in discover().values():
    op.impls.pop("compile", None)
whet.__main__.main()
"""


def test_ctrl_c_ends_a_real_run_and_keeps_what_is_done(tmp_path):
    """Of what is compiled only attention's flex is a candidate: the lock is there once the slowest has been verified."""
    child = subprocess.Popen(
        [sys.executable, "-c", FEWER, "optimize", "tiny-llama:tiny"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # a background job is born deaf to it
    )
    deadline = time.monotonic() + 120
    while not (tmp_path / "whet.lock").exists() and child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=60)
    assert child.returncode == 130, errors
    # Among the lines: stopped inside a backward that torch.compile traces, torch warns of that, before or after.
    (line,) = (line for line in errors.splitlines() if line.startswith("whet: stopped"))
    assert "whet.lock" in line
    assert any(e["candidates"] for e in Lock.read(tmp_path / "whet.lock").calls.values())


def test_an_interrupt_during_the_imports_ends_without_a_traceback():
    """The commands' import, PyTorch's with it, is where the first seconds go."""
    script = "import builtins, whet.__main__; real = builtins.__import__\n"
    script += "def slow(name, *rest):\n    if name == 'torch': raise KeyboardInterrupt\n    return real(name, *rest)\n"
    script += "builtins.__import__ = slow; whet.__main__.main()"
    done = subprocess.run([sys.executable, "-c", script, "machine"], capture_output=True, text=True)
    assert done.returncode == 130 and done.stderr.startswith("whet: stopped") and done.stderr.count("\n") == 1
