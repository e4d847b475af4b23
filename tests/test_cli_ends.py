"""What the command line refuses, and how it ends: one line, the right exit code, and nothing of the user's touched."""

import shlex
import signal
import subprocess
import sys

import pytest
import torch
from test_cli import RESULT, error_lines, interrupt, invoke

import whet.tune
from whet.commands import _memory
from whet.lock import Lock
from whet.models import Recipe, find
from whet.models.tiny_llama import RECIPES, SIZES, TinyLlamaConfig


@pytest.mark.parametrize("command", ["ops", "--help", "machine --json"])
@pytest.mark.parametrize("stream, code, line", [
    (">&-", 1, "whet: standard output is closed; send it to a file, a pipe or /dev/null"),
    (">/dev/full", 1, "whet: standard output cannot be written (No space left on device); what was printed is not whole"),
    ("<&-", 0, ""), ("2>&-", 0, ""),
], ids=["no-output", "full", "no-input", "no-errors"])
def test_a_closed_or_full_stream_is_no_traceback(command, stream, code, line):
    asked = " ".join([shlex.quote(sys.executable), "-m whet", command, stream])
    done = subprocess.run(["sh", "-c", asked], capture_output=True, text=True)
    assert (done.returncode, done.stderr.strip()) == (code, line)
    assert bool(done.stdout) == (code == 0)


def test_a_prompt_from_a_closed_input_is_one_line():
    done = subprocess.run(["sh", "-c", f"{shlex.quote(sys.executable)} -m whet generate - <&-"], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("whet: generate: standard input is closed")
    assert done.stderr.count("\n") == 1


@pytest.fixture
def planted(monkeypatch):
    """optimize answers at once."""
    monkeypatch.setattr("whet.plans.best_plan", lambda *args: RESULT)


@pytest.mark.parametrize("command", ["bench rms_norm", "optimize tiny-llama:tiny", "prove rms_norm", "counters rms_norm"])
@pytest.mark.parametrize("folder", ["file", "file/records"])
def test_records_that_cannot_be_written_are_refused_before_the_work(command, folder, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr("whet.worker.Worker.start", lambda self: pytest.fail("a process was started"))
    result = invoke(*command.split(), "--records", folder)
    assert result.exit_code == 2 and result.stdout == "" and (tmp_path / "file").read_text() == "in the way"
    assert len(error_lines(result)) == 1 and f"--records: {folder} cannot be written" in error_lines(result)[0]


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_record_that_could_not_be_written_after_all_is_exit_code_2(options, planted, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_text", full)
    result = invoke("optimize", "tiny-llama:tiny", *options)
    assert result.exit_code == 2 and result.stdout and "record: " not in result.stdout
    assert len(error_lines(result)) == 1 and "No space left on device" in error_lines(result)[0]


OTHERS = ["my notes\n", '{"name": "package"}', "[1, 2]", '{"machines": {}}', '{"format": 2', "\x00\xff"]


@pytest.mark.parametrize("text", OTHERS)
@pytest.mark.parametrize("by", ["option", "environment"])
def test_a_file_that_is_no_lock_and_was_named_is_left_alone(text, by, planted, tmp_path, monkeypatch):
    (tmp_path / "notes").write_text(text)
    if by == "environment":
        monkeypatch.setenv("WHET_LOCK", "notes")
    result = invoke("optimize", "tiny-llama:tiny", *(("--lock", "notes") if by == "option" else ()))
    assert result.exit_code == 2 and len(error_lines(result)) == 1
    assert "notes is no lock" in error_lines(result)[0]
    assert (tmp_path / "notes").read_text() == text and not list(tmp_path.glob("*.bad*"))


def test_locks_whole_damaged_empty_or_absent_are_taken(planted, tmp_path):
    whole = '{\n "format": 2,\n "machines": {}\n}\n'
    for text in (whole, whole[:-5], "", None):
        path = tmp_path / f"{len(text or '')}.lock"
        if text is not None:
            path.write_text(text)
        assert invoke("optimize", "tiny-llama:tiny", "--lock", path.name).exit_code == 0


def test_a_stopped_optimize_says_what_is_in_its_lock_and_nothing_else(monkeypatch, tmp_path):
    monkeypatch.setattr("whet.subjects.BuiltIn.calls", lambda *_: [])
    monkeypatch.setattr("whet.plans.Tuning", interrupt)
    monkeypatch.setitem(SIZES, "test", TinyLlamaConfig(hidden=32, layers=1, heads=2, kv_heads=1, vocab=31))
    monkeypatch.setitem(RECIPES, "test", Recipe(batch=2, seq_len=8))
    stopped = lambda: invoke("optimize", "tiny-llama:test", "--lock", "my.lock")  # noqa: E731
    assert stopped().exit_code == 130
    (line,) = error_lines(stopped())
    assert "nothing of this run is in my.lock" in line and not (tmp_path / "my.lock").exists()

    def saved(calls, lock, **_):
        whet.tune.save_decoder(lock, "a decoder", {"ok": True, "why": ""})
        raise KeyboardInterrupt

    monkeypatch.setattr("whet.plans.Tuning", saved)
    (line,) = error_lines(stopped())
    assert "kept in my.lock" in line and "a decoder" in Lock.read(tmp_path / "my.lock").decoders
    monkeypatch.setattr("whet.plans.Tuning", interrupt)
    (line,) = error_lines(stopped())
    assert "nothing of this run is in my.lock" in line, "what it holds is of the run before"


def test_tf32_is_refused_where_there_is_no_gpu(planted, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = invoke("optimize", "tiny-llama:tiny", "--precision", "tf32")
    assert result.exit_code == 2 and len(error_lines(result)) == 1
    assert "--precision tf32 needs a GPU" in error_lines(result)[0] and "float32 or bfloat16" in error_lines(result)[0]


def test_counters_name_themselves_in_what_they_refuse():
    assert error_lines(invoke("counters", "nosuch"))[0].startswith("whet: counters: unknown op 'nosuch'")
    assert error_lines(invoke("counters", "rms_norm", "--shapes", "tall"))[0].startswith("whet: counters: a shape of rms_norm")


def test_a_model_too_large_for_the_memory_is_refused_with_the_figures(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("whet.plans.best_plan", lambda *_: pytest.fail("it was begun"))
    monkeypatch.setattr(_memory, "free_bytes", lambda device: 20 * 2**30)
    result = invoke("optimize", "qwen3:8b")
    assert result.exit_code == 2 and len(error_lines(result)) == 1
    parts = ("qwen3:8b", "8.19 billion", "763 GiB", "20.0 GiB", "CPU", "qwen3:tiny fits")
    assert all(part in error_lines(result)[0] for part in parts)


@pytest.mark.parametrize("target", ["tiny-llama:tiny", "qwen3:tiny"])
def test_parameters_are_counted_without_building_the_model(target):
    model, size = find(target)
    built = model.build(model.sizes[size], model.plain, whet.choices.Choices(default="eager"))
    assert _memory.parameters(model, size) == sum(p.numel() for p in built.parameters())


def loaded_by(code: str) -> set[str]:
    """The modules that a fresh Python has after this code."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}\nprint(*sys.modules)"], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_help_needs_no_pytorch_so_it_answers_at_once():
    assert not {"torch", "triton", "numpy"} & loaded_by("import whet.commands")


def test_generate_imports_neither_the_doctor_nor_the_benchmark():
    loaded = loaded_by("import whet.commands.generate, whet.decode.engine, whet.report.decode")
    assert "whet.decode.trust" in loaded
    assert not [name for name in loaded if name.startswith(("whet.diagnose", "whet.decode.bench", "whet.plans"))]


EARLY = """
import importlib.machinery, os, signal, sys, types
from whet import interrupts
signal.signal(signal.SIGINT, signal.default_int_handler)
interrupts.listen()
interrupts.begun, stop = {begun}, signal.{stop}
sys.modules["torch"] = torch = types.ModuleType("torch")
torch.__spec__ = importlib.machinery.ModuleSpec("torch", None)
torch.__spec__._initializing = {importing}
try:
    os.kill(os.getpid(), stop)
except KeyboardInterrupt:
    print("raised")
"""


@pytest.mark.parametrize("stop", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize(("begun", "importing", "answered"), [(False, False, False), (True, True, False), (True, False, True)])
def test_an_interrupt_that_an_import_would_swallow_ends_the_process_at_once(stop, begun, importing, answered):
    script = EARLY.format(begun=begun, importing=importing, stop=stop)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    if answered:
        assert (done.returncode, done.stdout, done.stderr) == (0, "raised\n", "")
    else:
        code = 128 + signal.Signals[stop]
        assert (done.returncode, done.stdout, done.stderr) == (code, "", "whet: stopped; nothing was begun yet\n")


@pytest.mark.parametrize(("does", "code"), [("exec('raise KeyboardInterrupt')", 130), ("raise SystemExit(0)", 0)])
def test_an_interrupt_that_passed_an_exec_or_comes_last_leaves_the_exit_code(does, code, tmp_path):
    """An exec, as a dataclass is made by, has Python kill itself at its end. What is registered first is called last."""
    (tmp_path / "own.py").write_text(f"""
import atexit, os, signal, whet.__main__ as own
if {code} == 0:
    atexit.register(os.kill, os.getpid(), signal.SIGINT)
def command(_):
    try:
        {does}
    except KeyboardInterrupt:
        raise SystemExit(130)
own.with_output = command
own.main()
""")
    signal_heard = lambda: signal.signal(signal.SIGINT, signal.default_int_handler)  # noqa: E731
    done = subprocess.run([sys.executable, "-m", "own"], cwd=tmp_path, capture_output=True, text=True, preexec_fn=signal_heard)
    assert (done.returncode, done.stderr) == (code, "")
