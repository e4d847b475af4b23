"""The exercises: each trains for real and runs alone, each has one thing wrong, and what is slow is never wrong."""

import ast
import dataclasses
import importlib.util
import math
import os
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console

from whet import exercise
from whet.diagnose.script import run_script
from whet.diagnose.watch import watch
from whet.models.tiny_llama import TinyLlamaConfig
from whet.report.exercises import exercises_table
from whet.verify import judge

TINY = dict(batch_size=2, seq_len=32, num_steps=3, hidden_dim=64, num_layers=2, num_heads=4)
FLAGS = [word for name, value in TINY.items() for word in (f"--{name.replace('_', '-')}", str(value))]
SMALL = TinyLlamaConfig(hidden=64, layers=2, heads=4, kv_heads=2)
LN_VOCAB = math.log(TinyLlamaConfig().vocab)
EVERY_STAGE = pytest.mark.parametrize("number", exercise.STAGES)
REPLACES = {1: "init_weights", 2: "attend", 3: "timer", 4: "swiglu"}


@pytest.fixture(scope="module")
def rows() -> dict[int, dict]:
    """Every stage run once, as a user runs it; all at a time, since most of it is importing."""
    with ThreadPoolExecutor() as pool:
        return dict(zip(exercise.STAGES, (r[0] for r in pool.map(lambda n: exercise.run(n, **TINY), exercise.STAGES))))


@pytest.fixture(scope="module")
def loaded():
    """A stage's file as a module, and the file that all share."""
    def load(name: str):
        if name not in made:
            spec = importlib.util.spec_from_file_location(name, exercise.FOLDER / f"{name}.py")
            made[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(made[name])
        return made[name]

    made: dict = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(exercise.FOLDER))
        yield lambda number=None: load("common" if number is None else exercise.STAGES[number].script.removesuffix(".py"))
        sys.modules.pop("common", None)


@EVERY_STAGE
def test_stage_runs_alone_and_trains(number, rows, loaded):
    row = rows[number]
    assert row["gradients"] == len(list(loaded().Llama(SMALL).parameters()))
    assert row["loss"] > 20 if number == 1 else abs(row["loss"] - LN_VOCAB) < 1
    assert min(row["samples_per_s"], row["step_ms"], row["forward_ms"], row["backward_ms"], row["optimizer_ms"]) > 0


def test_a_timer_changes_no_bit_of_the_loss(rows):
    assert rows[3]["loss"] == rows[5]["loss"]


@EVERY_STAGE
def test_stage_replaces_one_piece_and_stage_5_none(number, loaded):
    tree = ast.parse(exercise.script(number).read_text())
    (call,) = (n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) == "main")
    assert not call.args and [k.arg for k in call.keywords] == ([REPLACES[number]] if number != 5 else [])
    assert set(REPLACES.values()) == {f.name for f in dataclasses.fields(loaded().Pieces)}
    assigned = [ast.unparse(t) for n in ast.walk(tree) if isinstance(n, ast.Assign) for t in n.targets]
    assert not [t for t in assigned if t.startswith(("common.", "main.", "ops."))], "nothing shared is changed"


def test_every_script_of_the_folder_is_a_stage():
    assert {p.name for p in exercise.FOLDER.glob("*.py")} == {"common.py", *(s.script for s in exercise.STAGES.values())}


def outcome(run, args: dict, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The output and the gradient of each argument, for one upstream gradient."""
    leaves = {k: t.to(dtype).requires_grad_() for k, t in args.items()}
    y = run(**leaves)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
    grads = torch.autograd.grad(y, list(leaves.values()), dy)
    return {"output": y.detach()} | {f"grad {k}": g for k, g in zip(leaves, grads)}


def verdict(run, plain, args: dict):
    return judge(outcome(run, args, torch.float32), outcome(plain, args, torch.float32), outcome(plain, args, torch.float64))


def by_products(x, w_gate, w_up):
    return F.silu(F.linear(x, w_gate)) * F.linear(x, w_up)


@pytest.mark.parametrize("shape", [(3, 5), (130,)], ids=str)
def test_the_kernel_by_hand_gives_the_values_and_gradients_of_the_products(shape, loaded, device):
    """Sizes that no tile divides."""
    args = dict(x=torch.randn(*shape, 40), w_gate=torch.randn(137, 40), w_up=torch.randn(137, 40))
    found = verdict(loaded(4).swiglu_by_hand, by_products, {k: t.to(device) for k, t in args.items()})
    assert found.ok, found.why


def test_a_wrong_gradient_of_the_kernel_would_be_seen(loaded, device):
    def wrong(x, w_gate, w_up):
        return loaded(4).swiglu_by_hand(x.detach() + (x - x.detach()) * 1.01, w_gate, w_up)

    args = dict(x=torch.randn(4, 40), w_gate=torch.randn(33, 40), w_up=torch.randn(33, 40))
    assert "grad x" in verdict(wrong, by_products, {k: t.to(device) for k, t in args.items()}).why


def test_the_kernel_by_hand_is_a_registered_op(loaded, device):
    args = [torch.randn(*s, device=device, requires_grad=True) for s in ((4, 32), (48, 32), (48, 32))]
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(loaded(4).swiglu_by_hand, args, test_utils=tests)


def test_the_copied_layout_gives_the_same_attention(loaded, device):
    args = dict(q=torch.randn(2, 4, 24, 16), k=torch.randn(2, 2, 24, 16), v=torch.randn(2, 2, 24, 16))
    found = verdict(loaded(2).attend, loaded().attend, {k: t.to(device) for k, t in args.items()})
    assert found.ok, found.why


def copies(number: int) -> list:
    """What a step of a stage copies in its forward, as the doctor sees it."""
    events = watch(run_script(exercise.script(number), FLAGS)).events
    return [e for e in events if e.op == "aten::clone" and e.phase == "forward"]


def test_stage_2_copies_keys_and_values_in_every_layer_from_one_line(device, monkeypatch):
    monkeypatch.delitem(sys.modules, "common", raising=False)
    extra = [e for e in copies(2) if e.line.startswith("stage2_slow_strides.py:")]
    assert len({e.line for e in extra}) == 1
    assert {e.module for e in extra} == {f"blocks.{i}.attention" for i in range(TINY["num_layers"])}
    assert sum(0 in e.inputs[0].strides for e in extra) == 2 * TINY["num_layers"], "keys and values, expanded"
    assert len(copies(2)) >= len(copies(5)) + 2 * TINY["num_layers"]


@pytest.mark.gpu
def test_parts_add_up_to_the_step_but_for_stage_3():
    """Twenty steps at the exercises' own sizes: replayed from graphs, and only stage 3's timer is fooled."""
    (true,), (fake,) = exercise.run(5), exercise.run(3)
    shares = [sum(r[f"{p}_ms"] for p in ("forward", "backward", "optimizer")) / r["step_ms"] for r in (true, fake)]
    assert true["captured"] and fake["captured"] and shares[0] > 0.5 > shares[1], shares


@pytest.mark.parametrize("flag, reason", [("--num-heads 3", "3 heads of even width"), ("--num-steps 1", "num-steps must be")])
def test_wrong_sizes_are_refused_in_one_line(flag, reason, loaded, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["stage5_optimized.py", *flag.split()])
    with pytest.raises(SystemExit):
        loaded().main()
    assert reason in capsys.readouterr().err.splitlines()[-1]


def test_a_stage_that_is_not_there_is_refused_by_name():
    with pytest.raises(ValueError, match="stage must be one of 1, 2, 3, 4, 5 or all, got '6'"):
        exercise.run("6")
    assert exercise.chosen("all") == [1, 2, 3, 4, 5] and exercise.chosen("2") == exercise.chosen(2) == [2]


def test_a_stage_that_fails_says_why_in_one_line(tmp_path):
    (tmp_path / "stage.py").write_text("import sys; sys.exit('usage: stage.py\\nstage.py: error: too wide')")
    with pytest.raises(ValueError, match=r"^exercise: stage.py: stage.py: error: too wide$"):
        exercise.measured(tmp_path / "stage.py", FLAGS)


def test_the_table_shows_every_stage_with_its_issue_and_fix(rows):
    console = Console(width=220, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(exercises_table(list(rows.values())))
    text = console.export_text()
    for number, stage in exercise.STAGES.items():
        line = next(line for line in text.splitlines() if line.startswith(f"│ {number}"))
        assert number == 5 or (stage.issue in line and stage.fix in line)
