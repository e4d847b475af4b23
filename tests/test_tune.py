"""The tuner: bad candidates lose, good ones are remembered, a killed run resumes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import without

from whet.choices import Choices, Recorder, use
from whet.lock import FORMAT, Lock
from whet.measure import dispatch_us
from whet.op import Call, discover
from whet.tune import tune

CALL = Call("rms_norm", {"M": 8, "N": 32, "layout": "contiguous"}, "float32", True)
PLANTED = str(Path(__file__).with_name("planted.py"))


def entry(lock: Lock) -> dict:
    return lock.calls[f"{CALL.key} @ eager"]


@pytest.fixture
def two():
    """eager and torch, which is the planted one: what the child has."""
    with without(*(set(discover()["rms_norm"].impls) - {"eager", "torch"})):
        yield


@pytest.mark.usefixtures("two")
def test_results_are_saved_and_a_second_run_starts_no_process(tmp_path, monkeypatch):
    monkeypatch.setenv("WHET_PLANT", "wrong")
    path = tmp_path / "whet.lock"
    tune([(CALL, 3)], Lock(path), modes=("eager",), seconds=0.01, preload=PLANTED)
    stored = json.loads(path.read_text())
    assert stored["format"] == FORMAT and entry(Lock.read(path))["count"] == 3
    monkeypatch.setattr("whet.worker.Worker.start", lambda self: pytest.fail("a process was started"))
    choices = tune([(CALL, 3)], Lock.read(path), modes=("eager",)).choices
    assert choices["eager"].table == {CALL.key: "eager"}


def test_a_killed_run_keeps_what_is_done_and_the_next_goes_on(tmp_path):
    path = tmp_path / "whet.lock"
    code = f"""
from whet.lock import Lock
from whet.op import Call
from whet.tune import tune
call = Call(**{dict(op=CALL.op, case=CALL.case, dtype=CALL.dtype, grad=True)!r})
tune([(call, 1)], Lock.read({str(path)!r}), modes=("eager",), preload={PLANTED!r})
"""
    child = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"WHET_PLANT": "hang"}, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (path.exists() and "eager" in entry(Lock.read(path))["candidates"]) and time.monotonic() < deadline:
        time.sleep(0.1)
    child.send_signal(signal.SIGKILL)
    child.wait()
    kept = entry(Lock.read(path))
    assert kept["candidates"]["eager"]["ok"] and "torch" not in kept["candidates"] and "chosen" not in kept
    with without("compile", "liger"):
        tune([(CALL, 1)], Lock.read(path), modes=("eager",), seconds=0.01)
    assert entry(Lock.read(path))["chosen"] in discover()["rms_norm"].impls


def test_recording_counts_distinct_calls():
    recorder = Recorder()
    x, w = torch.randn(6, 16, requires_grad=True), torch.ones(16)
    for _ in range(3):
        recorder.rms_norm(x, w, 1e-6)
    recorder.rms_norm(x[:2], w)
    counts = {call.case["M"]: count for call, count in recorder.calls.values()}
    assert counts == {6: 3, 2: 1}


def test_a_length_not_met_before_falls_into_its_bucket():
    op = discover()["rms_norm"]
    choices = Choices({Call("rms_norm", {"M": 128, "N": 16, "layout": "contiguous"}, "float32", False).key: "eager"})
    for rows, name in ((128, "eager"), (100, "eager"), (65, "eager"), (64, "torch"), (129, "torch")):
        call = Call("rms_norm", {"M": rows, "N": 16, "layout": "contiguous"}, "float32", False)
        assert choices.pick(op, call) == name


def test_auto_asks_the_choices_in_use():
    import whet.ops

    x, w, seen = torch.randn(4, 16), torch.ones(16), []

    class Watching(Choices):
        def pick(self, op, call):
            seen.append(call.key)
            return "eager"

    with use(Watching()):
        whet.ops.rms_norm(x, w)
    assert seen == ["rms_norm M=4 N=16 layout=contiguous float32 fwd"]


def test_a_look_up_is_timed_as_it_is_and_as_a_plain_loop():
    found = dispatch_us(calls=20, turns=5)
    assert list(found) == ["dispatch_us", "dispatch_plain_us"] and all(0 < us < 1000 for us in found.values())


def test_dispatch_adds_little_to_the_call_itself():
    """A sanity bound for a loaded CPU; the figure that counts is the GPU machine's, in records/."""
    import timeit

    x, w, choices = torch.randn(4, 16), torch.ones(16), Choices(default="torch")
    direct, chosen = discover()["rms_norm"].impls["torch"].run, choices.rms_norm
    with torch.no_grad():
        chosen(x, w, 1e-6)
        base = min(timeit.repeat(lambda: direct(x, w, 1e-6), number=500, repeat=20)) / 500
        through = min(timeit.repeat(lambda: chosen(x, w, 1e-6), number=500, repeat=20)) / 500
    assert through - base < 20e-6


def _rank(rank: int, port: int, folder: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    lock = Lock(Path(folder) / f"{rank}.lock")
    if rank == 0:
        lock.calls[f"{CALL.key} @ eager"] = {"call": {}, "candidates": {}, "chosen": "torch"}
    chosen = tune([(CALL, 1)], lock, modes=("eager",)).choices["eager"].table
    (Path(folder) / f"{rank}.json").write_text(json.dumps(chosen))
    torch.distributed.destroy_process_group()


def test_rank_zero_decides_and_the_others_follow(tmp_path):
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    torch.multiprocessing.spawn(_rank, args=(port, str(tmp_path)), nprocs=2)
    first, second = (json.loads((tmp_path / f"{r}.json").read_text()) for r in (0, 1))
    assert first == second == {CALL.key: "torch"}


@pytest.mark.usefixtures("two", "fresh_children")
def test_the_child_is_the_whet_that_runs_here_whatever_the_folder_holds(tmp_path, monkeypatch):
    (tmp_path / "whet").mkdir()  # as in the parent of a clone
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WHET_PLANT", "wrong")
    lock = Lock()
    tune([(CALL, 1)], lock, modes=("eager",), seconds=0.01, preload=PLANTED)
    assert entry(lock)["candidates"]["eager"]["ok"]


def test_nothing_is_chosen_where_no_candidate_can_run(monkeypatch):
    monkeypatch.setattr("whet.worker.Worker.ask", lambda *_, **__: {"error": "ImportError: no module"})
    lock = Lock()
    with pytest.raises(ValueError, match="rms_norm: no candidate .* eager: ImportError"):
        tune([(CALL, 1)], lock, modes=("eager",))
    assert "chosen" not in entry(lock)


def test_wrong_choices_are_refused_in_words():
    with pytest.raises(ValueError, match="default must be None or an impl of some op, one of"):
        Choices(default="cuda")
    with pytest.raises(ValueError, match="choices must be a Choices"), use("eager"):
        pass


@pytest.mark.parametrize("impl", ["auto", "torch"])
def test_what_is_not_a_tensor_is_named(impl):
    import whet.ops

    with pytest.raises(ValueError, match=rf"rms_norm\[{impl}\]: w must be a tensor, got NoneType"):
        whet.ops.rms_norm(torch.ones(2, 8), None, impl=impl)
