"""Several processes on a CPU, by torchrun and gloo: the losses of one process, and resumes with another number of them."""

import json
from pathlib import Path

import pytest
import torch
from test_train_loop import SMALL, losses, quiet, shards, small  # noqa: F401
from torch import nn
from torch.distributed.tensor import DTensor
from warm import launched

from whet.commands import app
from whet.train.checkpoint import fault
from whet.train.distributed import SHARES, Processes, shard
from whet.train.export import load_run
from whet.train.optim import make, state_tensors
from whet.train.stored import CheckpointError, StoredTensors


def values(folder: Path) -> torch.Tensor:
    return torch.tensor([loss for _, loss in losses(folder)])


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_a_run_of_two_processes_then_one_then_two_has_the_losses_of_one(shards, tmp_path, mode):  # noqa: F811
    flat = SMALL | {"data.path": str(shards), "run.save_every": 2, "train.schedule": "constant", "dist.mode": mode}
    launched(flat | {"train.steps": 4}, tmp_path / "run", 2)
    quiet(small(shards, train__steps=6, run__save_every=2, train__schedule="constant"), tmp_path / "run", resume=True)
    launched(flat | {"train.steps": 8}, tmp_path / "run", 2, resume=True)
    quiet(small(shards, train__steps=8, train__schedule="constant"), tmp_path / "one")
    torch.testing.assert_close(values(tmp_path / "run"), values(tmp_path / "one"))
    assert json.loads((tmp_path / "run" / "run.json").read_text())["world"] == 2


def test_several_processes_must_be_told_how_to_share_the_work(shards, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="dist.mode=ddp"):
        quiet(small(shards), tmp_path / "run")


def test_averaged_weights_of_two_processes_are_sampled_by_one(shards, tmp_path):  # noqa: F811
    flat = SMALL | {"data.path": str(shards), "train.steps": 2, "train.ema": 0.5, "dist.mode": "ddp", "run.val_every": 0}
    launched(flat, tmp_path / "run", 2)
    assert load_run(tmp_path / "run").step == 2


@pytest.fixture
def alone(tmp_path):
    """A group of this one process, in which tensors can be sharded."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_shares_are_joined_by_torchs_own_checkpoints_and_read_back_as_slices_without_pickle(alone, tmp_path, monkeypatch):
    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 7), nn.ModuleList([nn.Linear(7, 3)])[0])

    torch.manual_seed(0)
    one, other, plain_one = net(), net(), net()
    shard(one, "cpu", 1)
    shard(other, "cpu", 1)
    of_one, of_other, of_plain = (make(m, lr=0.1) for m in (one, other, plain_one))
    one(torch.ones(2, 5)).sum().backward()
    of_one.step()
    left = tmp_path / "checkpoints" / SHARES / "sharded"
    left.mkdir(parents=True)  # by a save that was killed
    (left / "torn.safetensors").write_bytes(b"torn")
    world = Processes(mode="fsdp")
    world.save(tmp_path / "checkpoints", 1, one, of_one, {}, None, 3)
    path = tmp_path / "checkpoints" / "step-00000001"
    assert not left.parent.exists() and not list(path.glob(".*")) and not fault(path)
    monkeypatch.setattr("pickle.load", None)
    world.load(path, other, of_other, None)
    world.load(path, plain_one, of_plain, None)
    wanted = [p.full_tensor() for p in one.parameters()]
    assert all(torch.equal(p.full_tensor(), w) for p, w in zip(other.parameters(), wanted))
    assert all(torch.equal(p, w) for p, w in zip(plain_one.parameters(), wanted))
    tensors = [state_tensors(o) for o in (of_one, of_other, of_plain)]
    for name, t in tensors[0].items():
        t, *others = (x[name].full_tensor() if isinstance(x[name], DTensor) else x[name] for x in tensors)
        assert t.any() and all(torch.equal(t, x) for x in others)


def test_torchrun_leaves_every_option_of_train_to_it():
    """Its parser takes a word that begins one of its own options for that, also behind the script."""
    from torch.distributed.run import parse_args
    from typer.main import get_command

    options = [o for p in get_command(app).commands["train"].params for o in (*p.opts, *p.secondary_opts) if o.startswith("--")]
    assert "--name" in options and "--resume" in options
    for option in options:
        parsed = parse_args(["--standalone", "--nproc_per_node=2", "-m", "whet", "train", "gpt2-d12", option])
        assert parsed.training_script_args[-1] == option


def test_shares_that_cannot_be_written_or_do_not_fit_are_one_line(alone, tmp_path, monkeypatch):
    net = nn.Sequential(nn.Linear(5, 7))
    shard(net, "cpu", 1)
    (tmp_path / SHARES).write_text("a file where the folder would be")
    with pytest.raises(CheckpointError, match="could not be written") as caught:
        Processes(mode="fsdp").save(tmp_path, 1, net, make(net), {}, None, 3)
    assert "\n" not in str(caught.value)
    (tmp_path / SHARES).unlink()
    monkeypatch.setattr(StoredTensors, "misfit", lambda *_: "0.weight has shape (4, 5)")
    with pytest.raises(CheckpointError, match="do all machines see this folder"):
        Processes(mode="fsdp").save(tmp_path, 1, net, make(net), {}, None, 3)
    assert not list(tmp_path.glob("step-*"))
