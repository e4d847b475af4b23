"""A training run that is stopped by a signal, in one process and in several; and errors of processes that torchrun started."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT
from test_train_loop import SMALL, losses, quiet, shards, small  # noqa: F401
from typer.testing import CliRunner

from whet import interrupts
from whet.commands import app
from whet.train import loop
from whet.train.checkpoint import newest

ENDLESS = SMALL | {"train.steps": 5_000, "train.schedule": "constant"}  # what a failing test leaves ends itself
ENDLESS |= {f"run.{what}_every": 0 for what in ("save", "val", "log")}
START_S = 120  # of a process, to its first steps


def settings(flat: dict) -> list[str]:
    return [word for key, value in flat.items() for word in ("--set", f"{key}={value}")]


def begun(words: list[str], folder: Path, ranks: int = 1, module: str = "whet") -> subprocess.Popen:
    """`whet train` in processes of their own, with their output in a file."""
    start = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{folder}", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *start, "-m", module, "train", "gpt2-d12", "--name", "run", *words], cwd=folder, env=env, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # a background job is born deaf to it
    )


def reached(process: subprocess.Popen, run: Path, step: int) -> None:
    """Wait until the run has logged this step."""
    deadline = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < deadline:
        if (run / "log.jsonl").exists() and (done := losses(run)) and done[-1][0] >= step:
            return
        time.sleep(0.02)
    process.kill()
    pytest.fail(f"no step {step}: {process.communicate()}")


def last_step(run: Path) -> int:
    """Of the log; the newest checkpoint must be of it."""
    step = losses(run)[-1][0]
    assert newest(run / "checkpoints").name == f"step-{step:08d}"
    return step


def stop_lines(errors: str) -> list[str]:
    return [line for line in errors.splitlines() if line.startswith("whet: stopped")]


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_run_after_its_step_with_a_checkpoint(stop, shards, tmp_path):  # noqa: F811
    child = begun(settings(ENDLESS | {"data.path": shards}), tmp_path)
    reached(child, tmp_path / "runs/run", 3)
    child.send_signal(stop)
    _, errors = child.communicate(timeout=60)
    step = last_step(tmp_path / "runs/run")
    assert child.returncode == 128 + stop
    said = f"whet: stopped; runs/run keeps its checkpoints; go on with --resume --name run, from step-{step:08d}"
    assert errors == loop.NOTICE + said + "\n"


def test_a_run_that_a_signal_ended_goes_on_with_the_losses_of_one_that_was_not(shards, tmp_path, monkeypatch):  # noqa: F811
    def stopping(run):
        if run.step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(run)

    quiet(small(shards), tmp_path / "whole")
    real = loop.one_step
    monkeypatch.setattr(loop, "one_step", stopping)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        quiet(small(shards), tmp_path / "part")
    assert last_step(tmp_path / "part") == 5 and signal.getsignal(signal.SIGTERM) is before
    monkeypatch.setattr(loop, "one_step", real)
    quiet(small(shards), tmp_path / "part", resume=True)
    assert losses(tmp_path / "part") == losses(tmp_path / "whole")


@pytest.mark.parametrize("apart", [0.0, 2 * interrupts.TOGETHER_S])
def test_a_second_signal_ends_at_once_unless_it_is_the_first_one_passed_on(apart, monkeypatch):
    clock = iter([0.0, apart])
    with interrupts.deferred("", lambda: next(clock)) as asked:
        os.kill(os.getpid(), signal.SIGINT)
        assert asked.signal == signal.SIGINT
        if apart:
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
        else:
            os.kill(os.getpid(), signal.SIGINT)


def test_handlers_of_others_stay_and_a_thread_sets_none():
    heard, before = [], signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
    try:
        with interrupts.deferred("", lambda: 0.0) as asked:
            os.kill(os.getpid(), signal.SIGTERM)
        assert heard == [1] and asked.signal == 0
        thread = threading.Thread(target=lambda: interrupts.deferred("", lambda: 0.0).__enter__())
        thread.start()
        thread.join()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_signal_during_the_last_step_ends_the_seeds_that_follow(shards, tmp_path, monkeypatch):  # noqa: F811
    def stopping(run):
        os.kill(os.getpid(), signal.SIGINT)
        return real(run)

    real = loop.saved
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loop, "saved", stopping)
    flat = SMALL | {"data.path": shards, "train.steps": 1}
    result = CliRunner().invoke(app, ["train", "gpt2-d12", "--name", "run", "--seeds", "1,2", *settings(flat)])
    assert result.exit_code == 130 and "--resume --name run, from step-00000001" in result.stderr
    assert last_step(tmp_path / "runs/run-seed1") == 1 and not (tmp_path / "runs/run-seed2").exists()


def children_of(process: subprocess.Popen) -> list[int]:
    found = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [pid for pid in map(int, found) if b"gpt2-d12" in Path(f"/proc/{pid}/cmdline").read_bytes()]


AS_ON_A_GPU = """
from whet.train.start import Training
Training.reads_at_once = False
from whet.__main__ import main
main()
"""


@pytest.mark.parametrize(("whom", "module"), [("torchrun", "whet"), ("one", "whet"), ("one", "own")])
def test_processes_end_at_one_step_whichever_of_them_a_signal_reaches(whom, module, shards, tmp_path):  # noqa: F811
    """Also where losses are read while the next step runs, as on a GPU, and the log asks for none."""
    (tmp_path / "own.py").write_text(AS_ON_A_GPU)
    child = begun(settings(ENDLESS | {"data.path": shards, "dist.mode": "ddp"}), tmp_path, 2, module)
    reached(child, tmp_path / "runs/run", 3)
    os.kill(child.pid if whom == "torchrun" else children_of(child)[1], signal.SIGTERM)
    _, errors = child.communicate(timeout=60)
    step = last_step(tmp_path / "runs/run")
    assert child.returncode and len(stop_lines(errors)) == 1, errors
    assert f"--resume --name run, from step-{step:08d}" in errors
    assert "another one did" not in errors


def test_processes_look_at_each_others_signals_once_in_a_second_of_steps():
    run = SimpleNamespace(stop=0, agree_every=10)
    for step_s, steps in ((0.01, 100), (0.3, 3), (20.0, 1), (1e-9, loop.MOST_STEPS), (0.0, 10)):
        run.agree_every = 10
        loop.settled(run, [0.0, 0.5, step_s])
        assert (run.agree_every, run.stop) == (steps, signal.SIGTERM)
    loop.settled(run, [0.0, 0.0, 0.1])
    assert run.stop == 0


ONE_RANK = """
import os, sys, time
if os.environ["RANK"] == "0":
    time.sleep(1000)  # where it waits for the other one in C++ torchrun's SIGTERM is heard late
sys.argv += ["--set", "train.lrr=1"]
from whet.__main__ import main
main()
"""


@pytest.mark.parametrize("where", ["all", "one"])
def test_an_error_that_all_processes_meet_is_printed_once_and_that_of_one_by_that_one(where, shards, tmp_path):  # noqa: F811
    (tmp_path / "own.py").write_text(ONE_RANK)
    flat = SMALL | {"data.path": shards, "dist.mode": "ddp"} | ({"train.lrr": 1} if where == "all" else {})
    child = begun(settings(flat), tmp_path, 2, "whet" if where == "all" else "own")
    _, errors = child.communicate(timeout=START_S)
    said = [line for line in errors.splitlines() if line.startswith("whet: ")]
    assert child.returncode and len([line for line in said if "train has no 'lrr'" in line]) == 1, errors
    assert where == "one" or len(said) == 1, errors
