"""Several processes on a CPU, by torchrun and gloo: the losses of one process, and resumes with another number of them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from test_train_loop import SMALL, losses, quiet, shards, small  # noqa: F401

CHILD = """
import json
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from whet.train.loop import train
from whet.train.recipe import made
train(made(json.loads(sys.argv[1]), "small"), Path(sys.argv[2]), resume=len(sys.argv) > 3, say=lambda text: None)
"""


def launched(flat: dict, folder: Path, world: int, *more: str) -> None:
    script = folder.with_suffix(".py")
    script.write_text(CHILD)
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world}", str(script)]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *command, json.dumps(flat), str(folder), *more], env=env, capture_output=True,
                          text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def values(folder: Path) -> torch.Tensor:
    return torch.tensor([loss for _, loss in losses(folder)])


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_a_run_of_two_processes_then_one_then_two_has_the_losses_of_one(shards, tmp_path, mode):  # noqa: F811
    flat = SMALL | {"data.path": str(shards), "run.save_every": 2, "train.schedule": "constant", "dist.mode": mode}
    launched(flat | {"train.steps": 4}, tmp_path / "run", 2)
    quiet(small(shards, train__steps=6, run__save_every=2, train__schedule="constant"), tmp_path / "run", resume=True)
    launched(flat | {"train.steps": 8}, tmp_path / "run", 2, "resume")
    quiet(small(shards, train__steps=8, train__schedule="constant"), tmp_path / "one")
    torch.testing.assert_close(values(tmp_path / "run"), values(tmp_path / "one"))
    assert json.loads((tmp_path / "run" / "run.json").read_text())["world"] == 2


def test_several_processes_must_be_told_how_to_share_the_work(shards, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="dist.mode=ddp"):
        quiet(small(shards), tmp_path / "run")
