"""Several processes on a CPU, by torchrun and gloo: the losses of one process, and resumes with another number of them."""

import json
from pathlib import Path

import pytest
import torch
from test_train_loop import SMALL, losses, quiet, shards, small  # noqa: F401
from torch import nn
from torch.distributed.tensor import DTensor
from warm import launched, together

from whet.commands import app
from whet.train.checkpoint import fault, newest
from whet.train.distributed import SHARES, Processes, shard
from whet.train.export import load_run
from whet.train.log import read_log
from whet.train.optim import Ema, MuonAdamW, make, state_tensors
from whet.train.recipe import made
from whet.train.stored import CheckpointError, StoredTensors

EVERYTHING = {
    "train.optimizer": "muon", "train.ema": 0.5, "train.accumulate": 2, "train.clip": 0.1, "train.checkpointed_blocks": -1,
}


def values(folder: Path) -> torch.Tensor:
    """The losses of steps, their gradients' norms before clipping, and the validation losses."""
    lines = read_log(folder / "log.jsonl")
    found = [[line["loss"], *([line["grad_norm"]] if "grad_norm" in line else [])] for line in lines if "loss" in line]
    return torch.tensor([value for values in found for value in values])


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a run's newest checkpoint, but for random numbers, by file and name."""
    files = [p for p in newest(folder / "checkpoints").glob("*.safetensors") if p.stem != "rng"]
    return {f"{p.stem}/{name}": t for p in files for name, t in StoredTensors(p).but().items()}


@pytest.mark.parametrize("changes", [{}, EVERYTHING], ids=["adamw", "muon-ema-accumulate-clip-checkpointed"])
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_a_run_of_two_processes_then_one_then_two_has_the_losses_of_one(shards, tmp_path, mode, changes):  # noqa: F811
    flat = SMALL | {"data.path": str(shards), "run.save_every": 3, "run.val_every": 1, "train.schedule": "constant"} | changes
    launched(flat | {"train.steps": 3, "dist.mode": mode}, tmp_path / "run", 2)
    quiet(made(flat | {"train.steps": 4}, "small"), tmp_path / "run", resume=True)
    launched(flat | {"train.steps": 7, "dist.mode": mode}, tmp_path / "run", 2, resume=True)
    quiet(made(flat | {"train.steps": 7}, "small"), tmp_path / "one")
    torch.testing.assert_close(values(tmp_path / "run"), values(tmp_path / "one"))
    run, one = stored(tmp_path / "run"), stored(tmp_path / "one")
    assert {name.split("/")[0] for name in one} == {"model", "optimizer", *(["ema"] if changes else [])}
    torch.testing.assert_close(run, one)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["world"] == 2


def test_weights_in_16_bits_are_sharded_with_their_float32_masters(shards, tmp_path):  # noqa: F811
    """The gradients' sums are rounded elsewhere than in one process: the losses are compared as bfloat16."""
    changes = EVERYTHING | {"train.precision": "bfloat16-weights", "train.schedule": "constant", "run.val_every": 1}
    flat = SMALL | {"data.path": str(shards), "train.steps": 3} | changes
    launched(flat | {"dist.mode": "fsdp"}, tmp_path / "run", 2)
    quiet(made(flat | {"train.steps": 5}, "small"), tmp_path / "run", resume=True)
    quiet(made(flat | {"train.steps": 5}, "small"), tmp_path / "one")
    torch.testing.assert_close(*(torch.tensor([x for _, x in losses(tmp_path / n)]).bfloat16() for n in ("run", "one")))
    kept = {name: t for name, t in stored(tmp_path / "run").items() if name.endswith("master") or name.startswith("ema/")}
    assert len(kept) > 2 and all(t.dtype == torch.float32 for t in kept.values())


def net_of_few_rows() -> nn.Module:
    """Of three processes the last has no share of some matrices, and of some shapes there are fewer matrices than processes."""
    torch.manual_seed(0)
    sizes = (4, 4, 4, 4, 4, 7, 2)
    return nn.Sequential(*(nn.Linear(n, m, bias=False) for n, m in zip(sizes, sizes[1:])))


def muon_steps(net: nn.Module) -> tuple[MuonAdamW, Ema]:
    optimizer = make(net, kind="muon", lr=0.1)
    ema = Ema(net, 0.5, optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        net(torch.arange(8.0).view(2, 4)).square().sum().backward()
        optimizer.step()
        ema.update()
    return optimizer, ema


def steps_of_a_group(rank: int, world: int, folder: Path) -> None:
    """What each process does: steps, a checkpoint, and its shares read back from that."""
    net, other = net_of_few_rows(), net_of_few_rows()
    for model in (net, other):
        shard(model, "cpu", world)
    shares = {p.to_local().shape[0] for p in net.parameters()}
    assert (0 in shares) == (rank == 2), shares
    optimizer, ema = muon_steps(net)
    here = Processes(rank, world, "cpu", "fsdp")
    here.save(folder, 3, net, optimizer, {}, ema, 1)
    of_other = make(other, kind="muon")
    averages = Ema(other, 0.5, of_other)
    here.load(folder / "step-00000003", other, of_other, averages)
    pairs = [*zip(net.parameters(), other.parameters()), *zip(ema.tensors.values(), averages.tensors.values())]
    pairs += zip(state_tensors(optimizer).values(), state_tensors(of_other).values())
    assert all(torch.equal(a.to_local(), b.to_local()) for a, b in pairs)


def test_muon_of_processes_with_uneven_and_empty_shares_has_the_weights_of_one(tmp_path):
    together(steps_of_a_group, 3, tmp_path)
    net, loaded = net_of_few_rows(), net_of_few_rows()
    optimizer, ema = muon_steps(net)
    of_loaded = make(loaded, kind="muon")
    averages = Ema(loaded, 0.5, of_loaded)
    Processes().load(tmp_path / "step-00000003", loaded, of_loaded, averages)
    torch.testing.assert_close(list(loaded.parameters()), list(net.parameters()))
    torch.testing.assert_close(state_tensors(of_loaded), state_tensors(optimizer))
    torch.testing.assert_close(averages.tensors, ema.tensors)


def test_several_processes_must_be_told_how_to_share_the_work(shards, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="dist.mode=ddp"):
        quiet(small(shards), tmp_path / "run")


def test_averaged_weights_of_two_processes_are_sampled_by_one(shards, tmp_path):  # noqa: F811
    flat = SMALL | {"data.path": str(shards), "train.steps": 2, "train.ema": 0.5, "dist.mode": "fsdp", "run.val_every": 0}
    launched(flat, tmp_path / "run", 2)
    run = load_run(tmp_path / "run")
    wanted = {name.removeprefix("ema/"): t for name, t in stored(tmp_path / "run").items() if name.startswith("ema/")}
    assert run.step == 2 and all(torch.equal(p, wanted[name]) for name, p in run.trained.model.named_parameters())


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
