"""Every kernel compiles for GPUs that are not here, fits their shared memory, and does not spill on sm_90."""

import ast
import json
import subprocess

import pytest
from conftest import ROOT, every_op, has_triton, python

from whet.child import Ended

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")


def child(*command: str, interpret: str = "0") -> subprocess.CompletedProcess:
    process = python(*command, interpret=interpret)
    return subprocess.CompletedProcess(process.args, stdout=process.communicate()[0], returncode=process.returncode)


EACH_IN_A_FORK = """
import os, runpy, sys, traceback
import whet.aot
from whet.op import discover
discover()
for path in sys.argv[1:]:
    if not (pid := os.fork()):
        file, code = os.open(path + ".out", os.O_WRONLY | os.O_CREAT), 1
        os.dup2(file, 1), os.dup2(file, 2)
        try:
            runpy.run_path(path, run_name="__main__")
            code = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)
    with open(path + ".code", "w") as file:
        file.write(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory) -> dict[str, subprocess.CompletedProcess]:
    """What became of each script of this file, by name, in a process of its own: forked from one that has imported torch."""
    given = dict(planted=PLANTED, tiled=TILED, decoding=DECODING, real=REAL, narrow=NARROW, noted=NOTED, lone=LONE)
    folder = tmp_path_factory.mktemp("scripts")
    for name, text in given.items():
        (folder / f"{name}.py").write_text(text)
    done = child("-c", EACH_IN_A_FORK, *(str(folder / f"{name}.py") for name in given))
    assert done.returncode == 0, done.stdout
    code, printed = ({n: (folder / f"{n}.py.{end}").read_text() for n in given} for end in ("code", "out"))
    return {n: subprocess.CompletedProcess(n, int(code[n]), printed[n]) for n in given}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("op", every_op(has_triton))
def test_kernels_compile_fit_and_do_not_spill_without_a_reason(op, target, compiled_rows):
    mine = [r for r in compiled_rows if (r["op"], r["target"]) == (op.name, target)]
    assert mine, f"nothing was compiled for {target}"
    assert all(r["registers"] > 0 for r in mine if not r["problem"])
    problems = [f"{r['kernel']} {r['dtype']} {r['config']} ({r['case']}): {r['problem']}" for r in mine if r["problem"]]
    assert not problems, "\n".join(problems)


def kernels() -> list[str]:
    """Every launched kernel in whet/ops: decorated with triton.jit or gluon.jit and named so."""
    files = sorted((ROOT / "whet" / "ops").rglob("*.py"))
    functions = [node for path in files for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
    jitted = {"triton.jit", "gluon.jit"}
    return [f.name for f in functions if f.name.endswith("_kernel") and jitted & set(map(ast.unparse, f.decorator_list))]


@pytest.mark.parametrize("kernel", kernels())
def test_every_kernel_is_among_the_compiled_ones(kernel, compiled_rows):
    assert {r["target"] for r in compiled_rows if r["kernel"] == kernel} >= {"sm_90"}


PLANTED = '''
import json
import torch, triton, triton.language as tl
from dataclasses import asdict
from whet.aot import Launch, row

@triton.jit
def _greedy_kernel(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < N, other=0.0)
    for k in range(N):
        x += tl.sum(x * k) * tl.load(x_ptr + k * N + i, mask=i < N, other=0.0)
    tl.store(y_ptr + i, x, mask=i < N)

@triton.jit
def _broken_kernel(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    tl.store(y_ptr + tl.arange(0, BLOCK), undefined_name)

x = torch.empty(64, device="meta")
def launch(fn, BLOCK):
    return Launch("planted", "triton", "", "float32", fn, (x, x, 1000), dict(BLOCK=BLOCK, num_warps=1))
from whet import aot
known = aot.Known(None)
rows = [row(launch(_greedy_kernel, 8192), "sm_90", "", known), row(launch(_greedy_kernel, 8192), "sm_90", "stated", known),
        row(launch(_greedy_kernel, 64), "sm_90", ""), row(launch(_broken_kernel, 64), "sm_90", "")]
from unittest import mock
known, compiled = aot.Known(None), []
with mock.patch.object(aot, "compile_for", lambda launch, target: compiled.append(target) or aot.Compiled(1, 0, 0)):
    for fn, BLOCK, target in ((_greedy_kernel, 64, "sm_90"), (_greedy_kernel, 64, "sm_90"), (_greedy_kernel, 128, "sm_90"),
                              (_greedy_kernel, 64, "sm_80"), (_broken_kernel, 64, "sm_90")):
        row(launch(fn, BLOCK), target, "", known)
print(json.dumps([*(asdict(r) for r in rows), compiled]))
'''


def test_planted_spills_and_errors_are_found_and_a_stated_reason_excuses_spills(scripts):
    done = scripts["planted"]
    assert done.returncode == 0, done.stdout
    greedy, excused, modest, broken, compiled = json.loads(done.stdout.splitlines()[-1])
    assert greedy["spills"] > 0 and "spills" in greedy["problem"] and "no reason" in greedy["problem"]
    assert excused["spills"] == greedy["spills"] and not excused["problem"]
    assert modest["spills"] == 0 and modest["registers"] > 0 and not modest["problem"]
    assert compiled == ["sm_90", "sm_90", "sm_80", "sm_90"], "once each: by tile, by target and by source"
    assert broken["problem"].startswith("does not compile") and "undefined_name" in broken["problem"]


TILED = '''
from dataclasses import replace
from whet.aot import launches
from whet.op import discover

op = discover()["rms_norm"]
plain = op.impls["triton"]
op.impls["triton"] = replace(plain, run=lambda x, w, eps, out_dtype, tile="": plain.run(x[:1] if tile else x, w, eps))
both = (launches(op, name, dict(M=8, N=32), "float32") for name in ("triton", "triton@one"))
print([(seen[0].impl, seen[0].args[0].shape[0]) for seen in both])
'''


def test_launches_of_a_tile_are_recorded_under_its_name(scripts):
    assert scripts["tiled"].stdout.splitlines()[-1] == "[('triton', 8), ('triton@one', 1)]"


DECODING = '''
import json
from whet.aot import wanted
from whet.op import discover

seen = set()
found = [w for op in discover().values() if not op.grads for w in wanted(op, "triton", seen)]
print(json.dumps([(launch.op, launch.kernel, launch.case, launch.dtype, target, launch.options) for launch, target in found]))
'''


def test_of_inference_what_a_decoder_launches_is_compiled_and_each_kernel_once_in_the_rest(scripts):
    found = json.loads(scripts["decoding"].stdout.splitlines()[-1])
    own = {kernel for _, kernel, *_ in found}
    assert len(found) < 100, "compiling is most of what they cost"
    later = {"_some_kernel", "_sum_kernel"}  # in 16 bits, from sm_90 on
    for target in TARGETS:
        here = own if target in ("sm_90", "sm_100") else own - later
        assert {kernel for _, kernel, _, _, t, _ in found if t == target} == here
        linked = [options["PDL"] for *_, t, options in found if t == target and "PDL" in options]  # a prompt's are not
        assert set(linked) == {target in ("sm_90", "sm_100")}
    assert {kernel for _, kernel, _, dtype, *_ in found if dtype == "float32"} == own - later
    for op in (p.values[0] for p in every_op(lambda op: not op.grads)):
        cases = {case for name, _, case, dtype, target, _ in found if (name, dtype, target) == (op.name, "bfloat16", "sm_90")}
        shapes = [" ".join(f"{k}={v}" for k, v in case.items()) for case in op.shapes.values()]
        least = 1 if op.name == "norm_rope" else 3  # norm_rope's kernel is one for all sizes
        assert shapes[0] in cases and len(cases & set(shapes)) >= least
    for kernel in ("_few_kernel", "_many_kernel", "_head_kernel"):
        assert {options["QUANT"] for _, k, *_, options in found if k == kernel} == {"", "int8", "int4", "fp8"}


REAL = """
import json
from whet.aot import SHARED_LIMIT, launches, row
from whet.op import discover

WIDTHS = {"qwen3-1.7b": (2048, 6144), "mistral-7b": (4096, 14336), "llama-70b": (8192, 28672)}
found = []
for model, (K, F) in WIDTHS.items():
    for launch in launches(discover()["norm_swiglu"], "triton", dict(M=8, K=K, F=F), "bfloat16"):
        made = row(launch, "sm_90", "spills are another matter")
        found.append((model, launch.kernel, made.shared, made.problem))
print(json.dumps(found))
"""


def test_products_of_real_models_at_batch_8_fit_the_shared_memory(scripts):
    found = json.loads(scripts["real"].stdout.splitlines()[-1])
    assert {model for model, *_ in found} == {"qwen3-1.7b", "mistral-7b", "llama-70b"}
    assert not [problem for *_, problem in found if problem]


def test_interpreter_mode_is_refused_with_the_reason():
    done = child("-m", "whet.aot", interpret="1")
    assert done.returncode == 2 and "TRITON_INTERPRET must be off" in done.stdout


def test_unknown_op_names_the_choices():
    done = child("-m", "whet.aot", "no_such_op")
    assert done.returncode == 2 and "op must be among" in done.stdout and "rms_norm" in done.stdout


NOTED = """
import torch
from whet import aot
from whet.decode.note import note

whole, real = (dict(dtype=t, device="meta") for t in (torch.int64, torch.float32))
for target in aot.TARGETS:
    with aot.recorded() as seen, aot.pretended(target):
        note(torch.empty(8, **whole), torch.empty(8, **real), torch.empty(8, **whole), torch.empty(8, 64, **whole),
             torch.empty(8, 64, **real), torch.empty(11, **whole), torch.empty(11, **whole), 8)
    (fn, args, options), = seen
    made = aot.compile_for(aot.Launch("note", "triton", "", "int64", fn, args, options), target)
    print(target, made.spills)
"""


NARROW = """
from whet import aot
from whet.op import discover

for launch in aot.launches(discover()["norm_swiglu"], "triton", dict(M=64, K=576, F=1536), "bfloat16"):
    made = aot.row(launch, "sm_90", "")
    print(made.kernel, made.shared, made.problem)
"""


def test_a_narrow_product_of_gate_and_up_fits_shared_memory(scripts):
    found = [line.split(maxsplit=2) for line in scripts["narrow"].stdout.splitlines()]
    assert "_many_kernel" in [kernel for kernel, *_ in found] and all(len(rest) == 1 for _, *rest in found), found


LONE = """
from whet import aot
from whet.op import discover

name = "triton_fused_bwd@g64x128w8s2"
for case in (dict(Lq=200, Lk=300, D=64), dict(Lq=1, Lk=129, D=16, causal="bottom-right", window=2)):
    for launch in aot.launches(discover()["attention"], name, dict(B=1, H=1, KV=1) | case, "bfloat16"):
        print(launch.kernel, aot.row(launch, "sm_90", "a few bytes").problem)
"""


def test_one_head_of_one_sequence_compiles_in_gluon(scripts):
    """There Triton makes a constant of each size that is 1, and a constant has none of a tensor's methods."""
    found = [line.strip() for line in scripts["lone"].stdout.splitlines()]
    assert found.count("_fused_hopper_kernel") == 2 and all(line.isidentifier() for line in found), found


def test_the_kernel_at_the_end_of_a_step_compiles_without_spills(scripts):
    found = scripts["noted"].stdout.splitlines()
    assert sorted(found) == sorted(f"{target} 0" for target in TARGETS)


SERIAL = """
ptxas info    : (C7514) Potential Performance Loss: wgmma.mma_async instructions are serialized due to non wgmma instructions \
reading accumulator registers of a wgmma between start and end of the pipeline stage in the function '_kernel'
ptxas info    : Used 168 registers, used 3 barriers
"""


def test_asynchronous_products_that_ptxas_serialises_are_a_problem(monkeypatch):
    from whet import aot

    monkeypatch.setattr(aot, "run_to_end", lambda *_, **options: Ended(0, "", SERIAL))
    assert aot._read_ptxas("", 90, asynchronous=False) == (168, 0)
    with pytest.raises(RuntimeError, match="products are serialized due to non wgmma instructions reading"):
        aot._read_ptxas("", 90, asynchronous=True)
