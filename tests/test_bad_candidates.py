"""Candidates that misbehave cost their candidacy, with the reason; the child is clean for the next one; the run goes on."""

import os
import sys
import threading
import time
import timeit
from pathlib import Path

import planted_bad
import pytest
import torch
from compiling import COMPILING
from conftest import every_op, first_case, without

import whet.tune
import whet.worker
from whet import isolation
from whet.child import Child, Lost
from whet.isolation import SETTINGS, UNREADABLE, Leftovers, isolated
from whet.lock import Lock
from whet.op import Call, discover
from whet.tune import tune
from whet.verify import verify_case
from whet.worker import well_formed

OP = discover()["rms_norm"]
CALL = Call("rms_norm", {"M": 8, "N": 32, "layout": "contiguous"}, "float32", True)
ANSWERING = str(Path(__file__).with_name("answering.py"))
LIMIT_S = 60.0  # of a candidate that answers: far more than it takes
HANG_S = 1.0  # of one that hangs


@pytest.fixture(scope="module")
def tuned(tmp_path_factory) -> dict:
    """What one tuning in real children says of every planted candidate."""
    def ask(worker, call, name, limit_s, asked=whet.tune._ask_verify):
        return asked(worker, call, name, HANG_S if name.endswith("hang") else LIMIT_S)

    with pytest.MonkeyPatch.context() as patch, without(*(set(OP.impls) - {"eager", "torch"})):
        patch.setattr(whet.tune, "_ask_verify", ask)
        patch.setattr(whet.worker, "HUNG", {})
        OP.impls.update(planted_bad.impls(OP))
        lock = Lock(tmp_path_factory.mktemp("tuned") / "whet.lock")
        tune([(CALL, 1)], lock, modes=("eager",), seconds=0.01, limit_s=LIMIT_S, preload=planted_bad.__file__)
    return lock.calls[f"{CALL.key} @ eager"]


REASONS = {
    "grad_mode": "grad mode|graph is cut", "inference_mode": "inference mode|graph is cut", "default_dtype": "default dtype",
    "everything": "the default device", "exit": "SystemExit: 3", "interrupt": "KeyboardInterrupt", "doubled": "exceeds",
    "wrong": "exceeds", "fail": "kernel does not compile", "out_of_memory": "out of memory", "leak": "file descriptors open",
    "segfault": "the process died (signal 11)", "hang": "took longer than",
    "hangs_gpu": "a kernel hangs", "dies_when_timed": "the process died (signal 6)",
}


@pytest.mark.parametrize("tile", REASONS)
def test_a_candidate_that_misbehaves_costs_its_candidacy_with_the_reason(tile, tuned):
    found = tuned["candidates"][f"torch@{tile}"]
    assert not found["ok"] and any(reason in found["why"] for reason in REASONS[tile].split("|")) and "ms" not in found


def test_the_others_are_verified_and_timed_and_one_of_them_is_chosen(tuned):
    candidates = tuned["candidates"]
    right = ["eager", "torch", "torch@print", "torch@input"]
    assert [name for name, c in candidates.items() if c["ok"]] == right and all("ms" in candidates[name] for name in right)
    assert tuned["chosen"] in right


def test_all_that_a_candidate_leaves_changed_is_named(tuned):
    said = tuned["candidates"]["torch@everything"]["why"]
    named = ("deterministic algorithms", "number of threads", "float32 precision", "SDPA's backends", "working directory")
    assert all(word in said for word in (*named, "sys.stdout", "a timer"))


@pytest.fixture
def asked(tmp_path):
    """What a child of plain Python is asked, and the processes it starts: none of them may be left."""
    notes = tmp_path / "pids"
    notes.touch()
    child = Child([sys.executable, ANSWERING, str(notes)], dict(os.environ))

    def ask(how: str, limit_s: float = LIMIT_S) -> dict:
        return child.ask(limit_s, {"how": how})

    yield ask
    child.stop()
    left = [int(pid) for pid in notes.read_text().split()]
    deadline = time.monotonic() + 10
    while any(map(running, left)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(running, left)), "processes that a candidate started outlive its child"


def running(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


DEAD = {
    "segfault": "signal 11", "exit": "exit 0", "forks and crashes": "signal 6", "prints and dies": "(exit 3): and the last",
    "close": "closed the pipe", "close all": "closed the pipe", "endless line": "without an end",
    "many lines": "something else", "garbage": "something else", "brackets": "something else",
    "list": "something else", "another id": "something else",
}


@pytest.mark.parametrize("how", DEAD)
def test_a_child_that_gives_no_answer_is_lost_with_the_reason(how, asked):
    assert asked("well") == {"answer": "well"}
    with pytest.raises(Lost) as lost:
        asked(how)
    assert DEAD[how] in str(lost.value) and not lost.value.hung and "\n" not in str(lost.value)


@pytest.mark.parametrize("how", ["hang", "half a line", "forks and hangs"])
def test_a_child_that_hangs_is_ended_at_its_limit_with_all_it_started(how, asked):
    assert asked("well") == {"answer": "well"}
    before = time.monotonic()
    with pytest.raises(Lost, match="took longer than 0.3 s") as lost:
        asked(how, 0.3)
    assert lost.value.hung and 0.3 <= time.monotonic() - before < LIMIT_S


def test_a_child_that_does_not_start_says_why():
    child = Child([sys.executable, ANSWERING, os.devnull, "does not start"], dict(os.environ))
    with pytest.raises(Lost, match=r"the process died \(exit 1\): no such module") as lost:
        child.ask(LIMIT_S, {"how": "well"})
    assert not lost.value.hung


def test_a_hang_beside_others_is_final_and_a_failure_gets_a_turn_alone(monkeypatch):
    asked: list[str] = []

    def answers(worker, limit_s, what, call, **request):
        asked.append(request.get("impl", what))
        if request.get("impl") == "torch":
            raise Lost("took longer than 1 s", hung=True)
        return {"error": "out of memory"} if request.get("impl") == "eager" else {"error": "no clock"}

    monkeypatch.setattr("whet.worker.Worker.start", lambda self: None)
    monkeypatch.setattr("whet.worker.Worker.ask", answers)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    with without(*(set(OP.impls) - {"eager", "torch"})), pytest.raises(ValueError, match="no candidate could run"):
        tune([(CALL, 1)], Lock(), modes=("eager",))
    assert sorted(asked) == ["eager", "eager", "torch"]


def test_a_candidate_of_which_a_kernel_hung_is_run_for_no_other_call(monkeypatch):
    asked: list[tuple] = []

    class Hangs:
        def ask(self, limit_s, request):
            asked.append((request["call"]["case"]["M"], request.get("impls") or request["impl"]))
            raise Lost("a kernel hangs", hung=True, on_gpu="torch" in asked[-1][1])

    monkeypatch.setattr(whet.worker, "HUNG", {})
    monkeypatch.setattr("whet.worker.Worker.start", lambda self: setattr(self, "child", Hangs()))
    both = ["eager", "torch"]
    for M, impls in ((8, both), (8, "eager"), (8, "torch"), (16, "torch"), (16, both), (16, "eager")):
        one = isinstance(impls, str)
        request = dict(what="verify", impl=impls) if one else dict(what="measure", impls=impls)
        with pytest.raises(Lost) as lost:
            whet.worker.Worker().ask(1.0, call=dict(op="rms_norm", case=dict(M=M), dtype="float32", grad=True), **request)
        again = (M, impls) not in asked
        assert lost.value.hung and again == ("not run again, since at rms_norm M=8" in str(lost.value))
    assert asked == [(8, ["eager", "torch"]), (8, "eager"), (8, "torch"), (16, "eager")]


@pytest.fixture(autouse=True)
def compilers_apart(request, monkeypatch):
    """Kernels are compiled beside the tests, by processes that come and go: what those start is nobody's leftover."""
    job = request.config.stash.get(COMPILING, None)
    if job is not None and (beside := job.process) is not None:
        descendants = isolation.descendants
        monkeypatch.setattr(isolation, "descendants", lambda pid: [] if pid == beside.pid else descendants(pid))


@pytest.fixture
def answer(monkeypatch):
    """The child's own handling of a request, here, with an answer made by a function."""
    def given(does) -> dict:
        def answering(call):
            does()
            return {"ok": True}

        for what in ("verify", "once"):
            monkeypatch.setitem(whet.worker.ANSWERS, what, answering)
        return whet.worker._answer({"what": "verify", "call": dict(op="rms_norm", case={}, dtype="float32", grad=True)})

    return given


def test_what_is_left_behind_each_time_costs_the_candidacy_and_the_child(answer):
    over = threading.Event()
    kept: list = []
    try:
        said = answer(lambda: threading.Thread(target=over.wait).start())
        assert said == {"error": "leaves threads running (1 more) after each turn", "poisoned": True}
        said = answer(lambda: kept.extend(os.open(os.devnull, os.O_RDONLY) for _ in range(40)))
        assert said == {"error": "leaves file descriptors open (40 more) after each turn", "poisoned": True}
        assert answer(lambda: kept.extend(os.dup(0) for _ in range(120 - len(kept)))) == {"ok": True}, "a first use alone"
    finally:
        over.set()
        for fd in kept:
            os.close(fd)


def test_processes_that_a_candidate_leaves_running_are_counted(answer):
    import subprocess

    before = Leftovers.now().processes  # kernels may be compiling beside the tests
    kept: list[subprocess.Popen] = []
    sleep = [sys.executable, "-S", "-c", "import time; time.sleep(3600)"]
    try:
        said = answer(lambda: kept.append(subprocess.Popen(sleep)))
        assert said == {"error": "leaves processes running (1 more) after each turn", "poisoned": True}
    finally:
        for process in kept:
            process.kill()
            process.wait()
    assert Leftovers.now().processes == before


def test_standard_streams_that_a_candidate_closes_cost_the_candidacy_and_the_child(answer, capfd):
    spare = os.dup(1)
    try:
        said = answer(lambda: os.close(1))
    finally:
        os.dup2(spare, 1)
        os.close(spare)
    assert said == {"error": "closes or replaces the standard streams", "poisoned": True}


def test_an_answer_of_another_form_is_none():
    right = {"ok": True, "share": 0.5, "why": ""}
    assert well_formed("verify", right) and well_formed("verify", {"error": "no"}) and well_formed("measure", {"timings": {}})
    for wrong in ({}, {"error": 3}, right | {"ok": 1}, right | {"why": None}, {"timings": {}}):
        assert not well_formed("verify", wrong)
    assert not well_formed("measure", right) and not well_formed("measure", {"timings": [1]})


def test_isolation_puts_back_every_setting_and_names_what_it_can(tmp_path):
    before = [setting.read() for setting in SETTINGS]
    random = torch.get_rng_state()
    with pytest.raises(ValueError, match="in passing"), isolated() as changed:
        assert changed == []
        planted_bad.everything()
        planted_bad.inference_mode()
        torch.set_default_dtype(torch.float64)
        torch.autocast("cpu").__enter__()
        torch.randn(3)
        raise ValueError("in passing")
    for setting, value in zip(SETTINGS, before):
        assert value is UNREADABLE or setting.read() == value, setting.name
    assert torch.equal(torch.get_rng_state(), random) and not torch.is_inference_mode_enabled()
    assert torch.ones(2, requires_grad=True).sin().requires_grad and torch.ones(2).device.type == "cpu"
    assert {"inference mode", "the default dtype", "autocast", "torch modes"} <= set(changed) and "" not in changed
    planted_bad.kept.pop()


@pytest.mark.parametrize("outside", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_isolation_changes_nothing_itself(outside):
    with outside():
        expected = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        with isolated() as changed:
            assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == expected
        assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == expected and changed == []


def test_isolation_costs_well_under_a_millisecond():
    def once():
        with isolated():
            pass

    assert min(timeit.repeat(once, number=1, repeat=200)) < 1e-3


@pytest.mark.parametrize("op", every_op())
def test_no_impl_leaves_its_process_changed(op, device):
    """On the CPU without the compiled formula, which a C++ compiler would have to make."""
    here = [name for name in op.impls if op.unavailable(name) is None and (name != "compile" or device == "cuda")]
    case = first_case(op)
    for name in here:
        with isolated():
            verify_case(op, name, case, "bfloat16", device)
        before = Leftovers.now()
        with isolated() as changed:
            verify_case(op, name, case, "bfloat16", device)
        assert (changed, Leftovers.now().since(before)) == ([], ""), name


def test_a_precision_that_is_set_and_set_back_is_no_change_left_behind():
    """torch then says "ieee" where it said "none", and both mean float32."""
    torch.set_float32_matmul_precision("highest")  # whatever an earlier test left
    with isolated() as changed:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        torch.set_float32_matmul_precision(before)
    assert not changed
    with isolated() as changed:
        torch.set_float32_matmul_precision("high")
    assert changed == ["float32 precision"] and torch.get_float32_matmul_precision() == before
