"""The clock: candidates in turns, medians with their spread, ties, ceilings that are measured once, inputs left alone."""

import json
import math
from dataclasses import asdict, replace

import pytest
import torch

from whet import busy, machine, measure
from whet.measure import Ceilings, Stopwatch, ceilings, compare, known_ceilings, race, sm_mhz, stepper
from whet.op import DTYPES, Cost, discover
from whet.race import Timing, tie

FOUND = Ceilings(100.0, {"float32": 2.0, "bfloat16": 8.0})


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


class Clock:
    """A clock that only moves when a run says so."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(measure.time, "perf_counter", lambda: self.now)

    def run(self, *ms: float):
        """A run that takes the given times, one after another, the last ever after."""
        left = list(ms)

        def step():
            self.now += (left.pop(0) if len(left) > 1 else left[0]) / 1e3

        return step


def test_candidates_run_in_turns():
    order = []
    runs = {name: lambda name=name: order.append(name) for name in "abc"}
    timings = compare(runs, seconds=0.0, least=5, flush=False)
    rounds = [order[-15:][i : i + 3] for i in range(0, 15, 3)]
    assert all(sorted(r) == list("abc") for r in rounds) and len({tuple(r) for r in rounds}) > 1
    assert {name: t.samples for name, t in timings.items()} == dict.fromkeys("abc", 5)


def test_warm_up_is_left_out_and_the_median_and_quartiles_are_told(on_cpu, monkeypatch):
    clock = Clock(monkeypatch)
    timings = compare({"a": clock.run(900.0, 700.0, 5.0, 1.0, 3.0, 2.0, 4.0), "b": clock.run(1.0)}, seconds=0.0, least=5)
    assert [round(v, 9) for v in (timings["a"].ms, timings["a"].low, timings["a"].high)] == [3.0, 2.0, 4.0]
    assert timings["b"].ms == timings["b"].low == timings["b"].high or math.isclose(timings["b"].low, timings["b"].high)
    assert timings["a"].host_us is None and timings["a"].peak_mib is None, "neither is known on a CPU"


def test_rounds_fill_the_time_given_within_bounds(on_cpu, monkeypatch):
    clock = Clock(monkeypatch)
    assert compare({"a": clock.run(10.0), "b": clock.run(30.0)}, seconds=0.4)["a"].samples == pytest.approx(20, abs=1)
    assert compare({"a": clock.run(1e6)}, seconds=0.4, least=3)["a"].samples == 3
    assert compare({"a": clock.run(1e-3)}, seconds=0.4)["a"].samples == 100


def test_one_sample_has_no_quartiles_of_its_own(on_cpu, monkeypatch):
    t = compare({"a": Clock(monkeypatch).run(7.0)}, seconds=0.0, least=1)["a"]
    assert t.samples == 1 and t.low == t.ms == t.high and t.spread == pytest.approx(0.07)


def test_what_a_run_raises_comes_through():
    def broken():
        raise RuntimeError("no such kernel")

    with pytest.raises(RuntimeError, match="no such kernel"):
        compare({"a": broken}, seconds=0.0)


def test_modes_are_named_when_wrong(on_cpu):
    with pytest.raises(ValueError, match=r"mode must be one of \('eager', 'graph'\), got 'fast'"):
        compare({"a": lambda: None}, mode="fast")
    with pytest.raises(ValueError, match="graph needs a GPU"):
        compare({"a": lambda: None}, mode="graph")
    assert compare({}) == {}


def test_spread_is_the_notch_of_the_quartiles_and_never_under_one_percent():
    assert Timing(1.0, 0.9, 1.1, 25).spread == pytest.approx(1.57 * 0.2 / 5)
    assert Timing(1.0, 0.9, 1.1, 100).spread == pytest.approx(1.57 * 0.2 / 10)
    assert Timing(2.0, 2.0, 2.0, 100).spread == pytest.approx(0.02)


def test_a_difference_inside_either_spread_is_a_tie():
    quiet, noisy = Timing(1.0, 1.0, 1.0, 100), Timing(1.05, 0.9, 1.2, 25)
    assert noisy.spread > 0.05 > quiet.spread
    assert tie(quiet, noisy) and tie(noisy, quiet)
    assert not tie(quiet, Timing(1.05, 1.05, 1.05, 100))
    assert tie(quiet, quiet)


def test_a_timing_comes_back_from_json_as_it_was():
    t = Timing(0.123456, 0.1, 0.2, 30, 12.5, None)
    assert Timing(**json.loads(json.dumps(t.as_dict()))) == t


def test_floor_is_the_slower_of_memory_and_compute():
    cost = Cost(bytes=10**8, flops=10**9, bwd_bytes=10**8, bwd_flops=9 * 10**9)
    assert FOUND.floor_ms(cost, False, "float32") == pytest.approx(1.0)  # 1e8 bytes at 100 GB/s; 0.5 ms of flops
    assert FOUND.floor_ms(cost, True, "float32") == pytest.approx(5.0)  # 1e10 flops at 2 TFLOP/s; 2 ms of bytes
    assert FOUND.floor_ms(cost, True, "bfloat16") == pytest.approx(2.0)  # 1.25 ms of flops
    assert FOUND.floor_ms(cost, True, "float64") == FOUND.floor_ms(cost, True, "float32"), "a rate not measured is float32's"
    assert FOUND.bound(cost, False, "float32") == FOUND.bound(cost, True, "bfloat16") == "memory"
    assert FOUND.bound(cost, True, "float32") == "compute"
    assert FOUND.floor_ms(Cost(0, 0), True, "float32") == 0.0


@pytest.fixture
def counted(monkeypatch, tmp_path):
    """A cache of the test's own, and the list of the times that ceilings were measured."""
    measured = []
    monkeypatch.setenv("WHET_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(measure, "_under_load", {})
    monkeypatch.setattr(measure, "_measure_ceilings", lambda: measured.append(1) or FOUND)
    return measured


def test_ceilings_are_measured_once_and_again_only_when_asked(counted):
    assert ceilings() == ceilings() == FOUND
    assert len(counted) == 1
    ceilings(again=True)
    assert len(counted) == 2


def test_ceilings_of_another_machine_are_not_used(counted, monkeypatch):
    ceilings()
    here = machine.this_machine()
    for other in (replace(here, name="Another GPU"), replace(here, torch="9.9.9"), replace(here, triton="9.9.9")):
        monkeypatch.setattr(machine, "this_machine", lambda other=other: other)
        ceilings()
    assert len(counted) == 4


BROKEN = [
    "", "{", "[]", "null", "\x00\xff", '{"copy_gbs": 1.0}', '{"copy_gbs": "x", "tflops": {"float32": 1}}',
    '{"copy_gbs": 1.0, "tflops": {}}', '{"copy_gbs": 0, "tflops": {"float32": 1}}',
]


@pytest.mark.parametrize("text", BROKEN)
def test_a_corrupt_cache_is_measured_over(text, counted, tmp_path):
    ceilings()
    (path,) = (tmp_path / "cache").iterdir()
    path.write_bytes(text.encode("latin-1"))
    assert ceilings() == FOUND and len(counted) == 2
    assert json.loads(path.read_text()) == asdict(FOUND)
    assert ceilings() == FOUND and len(counted) == 2


def test_a_cache_that_cannot_be_written_costs_only_the_cache(counted, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("WHET_CACHE", str(tmp_path / "file" / "cache"))
    assert ceilings() == ceilings() == FOUND
    assert len(counted) == 2


def test_known_ceilings_are_read_and_never_measured(counted):
    assert known_ceilings() is None and not counted
    ceilings()
    assert known_ceilings() == FOUND and len(counted) == 1


def test_ceilings_measured_under_load_are_used_and_not_kept(counted, monkeypatch, tmp_path):
    loaded = replace(FOUND, copy_gbs=1.0, busy="other work took 1.8 of 2 cores")
    monkeypatch.setattr(measure, "_under_load", {})
    monkeypatch.setattr(measure, "_measure_ceilings", lambda: counted.append(1) or loaded)
    assert ceilings() == ceilings() == loaded and len(counted) == 1, "once for this process"
    assert known_ceilings() is None and not (tmp_path / "cache").exists()
    monkeypatch.setattr(measure, "_measure_ceilings", lambda: counted.append(1) or FOUND)
    assert ceilings(again=True) == FOUND and known_ceilings() == FOUND


def test_a_ceiling_that_varies_is_measured_again_and_the_steadiest_counts(monkeypatch):
    left = [Timing(22.0, 10.0, 40.0, 9), Timing(9.0, 4.0, 13.0, 9), Timing(2.0, 1.9, 2.1, 9), Timing(1.0, 1.0, 1.0, 9)]
    monkeypatch.setattr(measure, "compare", lambda runs, **_: {"run": left.pop(0)})
    assert measure._steady(lambda: None).ms == 2.0 and len(left) == 1


def test_ceilings_say_what_they_were_measured_beside(on_cpu, monkeypatch):
    monkeypatch.setattr(measure, "_steady", lambda run: Timing(1.0, 0.9, 1.3, 9))
    monkeypatch.setattr(busy.Watch, "other_load", lambda self: "other work took 1.8 of 2 cores")
    found = measure._measure_ceilings()
    assert "1.8 of 2 cores" in found.busy and "40%" in found.busy
    monkeypatch.setattr(busy.Watch, "other_load", lambda self: "")
    monkeypatch.setattr(measure, "_steady", lambda run: Timing(1.0, 0.99, 1.01, 9))
    assert measure._measure_ceilings().busy == ""


def counts(monkeypatch, before: tuple[int, int], after: tuple[int, int], own: float, threads: int = 2) -> str:
    """What is said of two cores whose ticks, and idle ones, went from one to the other while this process took `own`."""
    counted = iter([before, after])
    took = iter([0.0, own])
    monkeypatch.setattr(busy, "cores", lambda: {0, 1})
    monkeypatch.setattr(busy, "ticks", lambda: next(counted))
    monkeypatch.setattr(busy, "own_ticks", lambda: next(took))
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    return busy.Watch().other_load()


def test_others_on_the_cores_that_this_process_has_threads_for_are_noticed(on_cpu, monkeypatch):
    assert counts(monkeypatch, (1000, 900), (1200, 900), own=80).endswith("1.2 of 2 cores")
    assert counts(monkeypatch, (1000, 900), (1200, 910), own=180) == "", "its own work is no load"
    assert counts(monkeypatch, (1000, 900), (1200, 910), own=95, threads=1) == "", "the other core is free to be used"
    assert counts(monkeypatch, (1000, 900), (1010, 900), own=0) == "", "too short to count"


def test_without_the_systems_counts_the_load_average_is_used(monkeypatch):
    monkeypatch.setattr(busy, "ticks", lambda: None)
    monkeypatch.setattr(busy, "cores", lambda: {0, 1})
    monkeypatch.setattr(busy.os, "getloadavg", lambda: (7.25, 1.0, 1.0))
    assert busy.Watch().other_load().endswith("7.2 on 2 cores")
    monkeypatch.setattr(busy.os, "getloadavg", lambda: (2.5, 1.0, 1.0))
    assert busy.Watch().other_load() == ""


def test_a_race_says_what_was_out_of_the_ordinary(on_cpu, monkeypatch):
    monkeypatch.setattr(busy.Watch, "other_load", lambda self: "")
    clock = Clock(monkeypatch)
    assert race({"a": clock.run(1.0)}, "a").busy == ""
    unsteady = clock.run(*(1.0, 3.0) * 500)
    assert "times vary by" in race({"a": unsteady}, "a").busy
    clocks = iter([1980.0, 1410.0])
    monkeypatch.setattr(measure, "sm_mhz", lambda: next(clocks))
    assert race({"a": clock.run(1.0)}, "a").busy == "the GPU's clock went from 1980 to 1410 MHz"


@pytest.mark.gpu
def test_the_clock_of_the_gpu_is_told_in_mhz():
    first, second = sm_mhz(), sm_mhz()
    assert first and second and 200 < first < 4000 and 200 < second < 4000


def test_without_a_gpu_there_is_no_clock_to_tell(on_cpu):
    assert sm_mhz() is None


def test_a_cpus_key_has_its_threads_and_follows_them(on_cpu):
    before = torch.get_num_threads()
    try:
        keys = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            keys.append(machine.this_machine().key)
            assert f"threads {threads}" in keys[-1]
        assert keys[0] != keys[1]
    finally:
        torch.set_num_threads(before)
    assert "threads" not in replace(machine.this_machine(), threads=None).key, "a GPU's key has none"


def test_sections_are_timed_apart_and_together(on_cpu, monkeypatch):
    clock, watch = Clock(monkeypatch), Stopwatch("cpu")
    for forward, backward in ((100.0, 200.0), (1.0, 2.0), (3.0, 4.0), (2.0, 6.0)):
        with watch("step"):
            with watch("forward"):
                clock.run(forward)()
            with watch("backward"):
                clock.run(backward)()
    assert watch.ms("forward", skip=1) == pytest.approx(2.0)
    assert watch.ms("backward", skip=1) == pytest.approx(4.0)
    assert watch.ms("step", skip=1) == pytest.approx(7.0)
    assert watch.ms("forward") == pytest.approx(2.5)
    assert watch.ms("forward", skip=9) == watch.ms("forward"), "with nothing left, everything counts"
    assert watch.total("step") == pytest.approx(0.318)


def made(dtype: str = "float32") -> tuple:
    op = discover()["rms_norm"]
    device = machine.this_machine().device
    args = op.inputs(dtype=DTYPES[dtype], device=device, M=6, N=16)
    return op, args


def test_a_step_leaves_its_inputs_alone():
    op, args = made()
    args["x"].requires_grad_()
    args["x"].grad = torch.full_like(args["x"], 7.0)
    before = {k: args[k].detach().clone() for k in ("x", "w")}
    step = stepper(op, op.reference, args, grad=True)
    step()
    step()
    assert torch.equal(args["x"].grad, torch.full_like(args["x"], 7.0)) and args["w"].grad is None
    assert args["x"].requires_grad and not args["w"].requires_grad
    assert all(torch.equal(args[k], before[k]) for k in before)


def test_a_step_is_forward_and_backward_or_forward_alone():
    op, args = made()
    dx, dw = stepper(op, op.reference, args, grad=True)()
    assert dx.shape == args["x"].shape and dw.shape == args["w"].shape and dx.any() and dw.any()
    out = stepper(op, op.reference, args, grad=False)()
    assert not out.requires_grad and torch.equal(out, op.reference(**args))


def test_a_step_drives_every_output_that_has_a_gradient():
    op = discover()["add_rms_norm"]
    args = op.inputs(dtype=torch.float32, device=machine.this_machine().device, M=6, N=16)
    used = []

    def run(**leaves):
        outs = op.reference(**leaves)
        for i, o in enumerate(outs):
            o.register_hook(lambda g, i=i: used.append(i))
        return outs

    step = stepper(op, run, args, grad=True)
    used.clear()
    step()
    assert sorted(used) == [0, 1]
