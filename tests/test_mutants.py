"""The list of mutants stays true to the source, and a sample of one fault of each of fifteen kinds is stopped."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from mutants.children import overlay, wall
from mutants.listing import HERE, KINDS, PACKAGE, Mutant, read, read_all

from whet.op import discover

MUTANTS, SAMPLE, LEAST = read_all(), 15, 120


@pytest.mark.parametrize("path", sorted(HERE.glob("*.toml")), ids=lambda p: p.stem)
def test_every_mutant_of_a_file_still_fits_the_source(path):
    for m in read(path):
        assert m.patched() != (PACKAGE / m.file).read_text(), m.id
        assert m.kind in KINDS and (m.case or m.needs == "gpu"), m.id


def test_mutants_have_names_of_their_own_and_every_op_with_a_kernel_has_some():
    assert len(MUTANTS) >= LEAST and len({m.id for m in MUTANTS}) == len(MUTANTS)
    kernels = {name for name, op in discover().items() if any(impl.needs == "triton" for impl in op.impls.values())}
    assert {m.op for m in MUTANTS} == {*kernels, "decode"}


def test_a_mutant_whose_text_is_gone_says_so():
    gone = Mutant("gelu", "a fault", "scale", "ops/gelu.py", old="no such text", new="")
    with pytest.raises(ValueError, match="found 0 times"):
        gone.patched()


def test_a_copy_holds_the_fault_and_whet_is_left_alone(tmp_path):
    mutant = next(m for m in MUTANTS if m.op == "gelu")
    before = (PACKAGE / mutant.file).read_text()
    overlay(str(tmp_path), mutant)
    assert (tmp_path / "whet" / mutant.file).read_text() == mutant.patched()
    assert (PACKAGE / mutant.file).read_text() == before


@pytest.mark.parametrize("answer, expected", [
    ({"ok": True, "why": ""}, None), ({"ok": False, "why": "output 0: worst error 1 exceeds 0"}, "values"),
    ({"ok": False, "why": "w", "rule": "bias"}, "bias"), ({"error": "IndexError"}, "raises"),
    ({"lost": "signal 11"}, "the child"),
])
def test_the_wall_is_the_rule_that_stopped_it(answer, expected):
    assert wall(answer) == expected


@pytest.mark.parametrize("given, said", [
    (["--only", "^no_such_op:"], "no mutant that runs here matches; the ops are activated_linear, "),
    (["--only", "("], "'(' is no regular expression: missing ), unterminated subpattern"),
    (["--dtype", "bf16"], "invalid choice: 'bf16'"),
])
def test_what_was_asked_for_wrongly_is_one_line_and_exit_code_2(given, said, tmp_path):
    done = subprocess.run([sys.executable, str(Path(HERE) / "run.py"), *given], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and said in done.stderr.splitlines()[-1] and not done.stdout


def test_a_sample_of_each_kind_is_stopped_and_no_right_kernel_is(tmp_path):
    chosen = [m for m in MUTANTS if m.sample]
    assert len(chosen) == SAMPLE == len({m.kind for m in chosen})
    command = [sys.executable, str(Path(HERE) / "run.py"), "--sample", str(SAMPLE), "--json"]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ, capture_output=True, text=True)
    answer = json.loads(done.stdout)
    assert answer["rejected"] == []
    assert [f"{m['op']}: {m['name']}" for m in answer["mutants"] if not m["stopped_by"]] == []
