"""Counters: what ncu writes becomes rows, and where there is no ncu the command says so."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from whet import machine, ncu
from whet.child import Ended
from whet.commands import app
from whet.op import Call
from whet.report import readme, tables

CALL = Call("rms_norm", dict(M=64, N=128), "bfloat16", True)


def page(*kernels: dict) -> str:
    """A raw page as ncu writes it: messages, a head, units, a line per kernel."""
    head = ["ID", "Kernel Name", *ncu.metrics()]
    lines = [head, ["", "", *("%" for _ in ncu.metrics())]]
    lines += [[str(i), k["name"], *(k.get(m, "1") for m in ncu.metrics())] for i, k in enumerate(kernels)]
    return "==PROF== Connected\n\n" + "\n".join(",".join(f'"{v}"' for v in line) for line in lines) + "\n"


def kernel(name="_forward_kernel", **busy):
    return {"name": name} | {ncu.UNITS[u]: str(n) for u, n in busy.items()}


def test_a_row_says_time_units_and_waits():
    given = kernel(tensor=48.47, exp=50.06) | {
        "gpu__time_duration.sum": "504,768", "sm__cycles_elapsed.avg.per_second": "1,759,459,221.11",
        ncu.STALL.format("wait"): "1.61", ncu.STALL.format("barrier"): "0.82", ncu.STALL.format("gmma"): "1.2",
    }
    row = ncu.parse(page(given, kernel("_delta_kernel", dram=53.6)))[0]
    assert (row["kernel"], row["us"], row["mhz"], row["tensor"]) == ("_forward_kernel", 504.77, 1759.46, 48.47)
    assert row["busiest"] == "exp" and list(row["stalls"].items())[:2] == [("wait", 1.61), ("gmma", 1.2)]
    assert ncu.parse(page(kernel("_delta_kernel", dram=53.6)))[0]["busiest"] == "dram"


def test_a_counter_that_a_gpu_has_not_is_none():
    row = ncu.parse(page(kernel() | {m: "n/a" for m in ncu.metrics()}))[0]
    assert row["tensor"] is None and row["busiest"] is None and row["stalls"] == {}
    assert ncu.parse("==ERROR== no kernel\n") == []


@pytest.fixture
def pretend(monkeypatch):
    """A GPU, and an ncu that writes what it is given."""
    def give(text: str, stderr: str = ""):
        def run(command, limit_s):
            Path(command[command.index("--log-file") + 1]).write_text(text)
            return Ended(0, "", stderr)

        monkeypatch.setattr(ncu, "run_to_end", run)

    here = machine.this_machine()
    monkeypatch.setattr(ncu.machine, "this_machine", lambda: type(here)(**(here.__dict__ | {"device": "cuda"})))
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    return give


def test_the_command_writes_a_record_that_the_tables_of_readme_ignore(pretend, tmp_path):
    pretend(page(kernel(tensor=70.0), kernel("_dkdv_kernel", l1=61.0)))
    made = CliRunner().invoke(app, ["counters", "rms_norm", "--shapes", "M=64,N=128", "--records", str(tmp_path / "records")])
    assert made.exit_code == 0, made.output
    assert "_dkdv_kernel" in made.output and "record: " in made.output
    kept = json.loads(next((tmp_path / "records").glob("*.json")).read_text())
    assert kept["command"] == "whet counters rms_norm --shapes M=64,N=128 --dtype bfloat16"
    assert [r["impl"] for r in kept["measured"]["kernels"]] == ["triton", "triton"]
    assert len(tables.counters_table(kept["measured"]["kernels"])) == 2
    for name, table in readme.TABLES.items():
        assert isinstance(table(tmp_path), str), name


def test_what_ncu_says_when_it_counts_nothing_is_passed_on(pretend):
    pretend("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters\n")
    with pytest.raises(ValueError, match=r"ncu read no kernel of triton: .*ERR_NVGPUCTRPERM"):
        ncu.read(CALL, "triton")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_ncu_one_line_says_what_is_needed():
    made = CliRunner().invoke(app, ["counters", "rms_norm", "--shapes", "M=64,N=128"])
    assert made.exit_code == 2 and "needs an NVIDIA GPU and its profiler, ncu" in made.output


@pytest.mark.parametrize("args, words", [
    (["counters", "no_such_op"], "unknown op"), (["counters", "rms_norm", "--impl", "no_such"], "impl must be"),
    (["counters", "rms_norm", "--shapes", "K=1"], "a shape of rms_norm is"),
])
def test_a_wrong_argument_is_one_line(args, words):
    made = CliRunner().invoke(app, args)
    assert made.exit_code == 2 and words in made.output


@pytest.mark.gpu
@pytest.mark.skipif(shutil.which("ncu") is None, reason="ncu is not installed")
def test_gpu_counters_of_a_norm_are_those_of_a_kernel_that_moves_memory():
    rows = ncu.read(Call("rms_norm", dict(M=16384, N=4096), "bfloat16", False), "triton")
    assert any(r["dram"] > 50 and r["tensor"] < 5 and r["us"] > 10 for r in rows)
