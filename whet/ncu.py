"""What bounds a kernel, read from the GPU's own counters: one step of an impl under NVIDIA's ncu, a row for each kernel."""

import csv
import json
import shutil
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch

from whet import machine
from whet.child import Lost, run_to_end
from whet.choices import error
from whet.measure import stepper
from whet.op import DTYPES, Call, discover

LIMIT_S = 300.0
ACTIVE, ELAPSED = "avg.pct_of_peak_sustained_active", "avg.pct_of_peak_sustained_elapsed"
UNITS = {  # what a kernel may be bound by, each in percent of the most it can do
    "tensor": f"sm__pipe_tensor_cycles_active.{ACTIVE}", "exp": f"sm__inst_executed_pipe_xu.{ACTIVE}",
    "fma": f"sm__inst_executed_pipe_fma.{ACTIVE}", "alu": f"sm__inst_executed_pipe_alu.{ACTIVE}",
    "issue": f"smsp__issue_active.{ACTIVE}", "l1": f"l1tex__throughput.{ACTIVE}", "l2": f"lts__throughput.{ELAPSED}",
    "dram": f"gpu__dram_throughput.{ELAPSED}",
}
SIZES = {  # name: (metric, what it is divided by)
    "us": ("gpu__time_duration.sum", 1e3), "mhz": ("sm__cycles_elapsed.avg.per_second", 1e6),
    "programs": ("launch__grid_size", 1), "threads": ("launch__block_size", 1),
    "registers": ("launch__registers_per_thread", 1), "shared_kib": ("launch__shared_mem_per_block", 1024),
    "fit_by_registers": ("launch__occupancy_limit_registers", 1), "fit_by_shared": ("launch__occupancy_limit_shared_mem", 1),
    "warps": ("sm__warps_active.avg.per_cycle_active", 1),
}
STALLS = (
    "barrier", "dispatch_stall", "gmma", "lg_throttle", "long_scoreboard", "math_pipe_throttle", "mio_throttle",
    "no_instruction", "not_selected", "short_scoreboard", "wait",
)
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"


def metrics() -> list[str]:
    return [*UNITS.values(), *(metric for metric, _ in SIZES.values()), *(STALL.format(s) for s in STALLS)]


def read(call: Call, impl: str) -> list[dict]:
    """A row for each kernel of one step of a candidate: time, share of what each unit can do, what its warps wait for."""
    ncu = shutil.which("ncu")
    if not ncu or machine.this_machine().device != "cuda" or torch.version.hip:
        raise ValueError("counters: needs an NVIDIA GPU and its profiler, ncu (Nsight Compute), on the PATH")
    root = str(Path(__file__).resolve().parent.parent)
    start = f"import sys; sys.path[0] = {root!r}; from whet.ncu import main; main()"
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "counters.csv"
        asked = ["--profile-from-start", "off", "--clock-control", "none", "--metrics", ",".join(metrics())]
        output = ["--page", "raw", "--csv", "--print-units", "base", "--log-file", str(log)]
        command = [ncu, *asked, *output, sys.executable, "-c", start, json.dumps(asdict(call)), impl]
        try:
            done = run_to_end(command, LIMIT_S)
        except Lost as e:
            raise ValueError(f"counters: {impl} under ncu: {e}") from None
        written = log.read_text() if log.exists() else ""
        rows = parse(written)
        if not rows:
            errors = [line for line in (*written.splitlines(), *done.stderr.splitlines()) if "ERROR" in line or "Error" in line]
            raise ValueError(f"counters: ncu read no kernel of {impl}: {(errors or ['it gave no reason'])[-1].strip()[:200]}")
    return rows


def parse(text: str) -> list[dict]:
    """ncu's raw page, as CSV with a line of units under the head; lines before it are messages."""
    lines = text.splitlines()
    first = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    rows = list(csv.reader(lines[first:]))
    return [row_of(dict(zip(rows[0], row))) for row in rows[2:]]


def row_of(values: dict[str, str]) -> dict:
    def number(metric: str, divisor: float = 1) -> float | None:
        try:
            return round(float(values[metric].replace(",", "")) / divisor, 2)
        except (KeyError, ValueError):  # a GPU that does not count this
            return None

    units = {name: number(metric) for name, metric in UNITS.items()}
    stalls = {s: number(STALL.format(s)) for s in STALLS}
    largest = sorted(((n, s) for s, n in stalls.items() if n), reverse=True)
    return {
        "kernel": values.get("Kernel Name", "?"), **{name: number(*given) for name, given in SIZES.items()}, **units,
        "busiest": max((n, u) for u, n in units.items() if n is not None)[1] if any(units.values()) else None,
        "stalls": {s: n for n, s in largest[:3]},
    }


def main() -> None:
    """The child that ncu watches: argv is a call and an impl. Only the last of three steps is counted."""
    call, impl = Call(**json.loads(sys.argv[1])), sys.argv[2]
    op = discover()[call.op]
    torch.manual_seed(0)
    args = op.inputs(dtype=DTYPES[call.dtype], device="cuda", **call.case)
    if reason := op.why_not(impl, args):
        raise error(call.op, impl, reason)
    step = stepper(op, op.candidate(impl).run, args, call.grad)
    step()
    step()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    step()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()
