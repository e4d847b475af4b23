"""Several processes that train one model: torch's own DDP or FSDP2, started by torchrun.

One process is the plain case of the same calls. A checkpoint holds whole tensors, so that a run goes on with any number of
processes. Shares of tensors are written and read by torch.distributed.checkpoint as safetensors: its own format keeps metadata
as a pickle.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_checkpoint
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from whet.figures import error_line
from whet.train import checkpoint
from whet.train.optim import Ema, state_tensors
from whet.train.stored import CheckpointError, StoredTensors

SHARES = ".shares"  # beside checkpoints, while one is written


@dataclass(frozen=True)
class Processes:
    """This process among those that train."""

    rank: int = 0
    size: int = 1
    device: str = "cpu"
    mode: str = ""

    def wrapped(self, model: nn.Module) -> nn.Module:
        """The model as the processes share it: copies whose gradients are averaged, or each with its share of every tensor."""
        if self.mode == "ddp" and self.size > 1:
            return nn.parallel.DistributedDataParallel(model)
        if self.mode == "fsdp" and self.size > 1:
            shard(model, self.device, self.size)
        return model

    @contextlib.contextmanager
    def without_sync(self, model: Any, wait: bool) -> Iterator[None]:
        """While gradients are added up over several forwards only the last one talks to the others."""
        if self.mode == "fsdp" and self.size > 1:
            model.set_requires_gradient_sync(not wait)
        with model.no_sync() if wait and self.mode == "ddp" and self.size > 1 else contextlib.nullcontext():
            yield

    def agreed(self, folder: Path) -> Path:
        """Rank 0's: a name made of the time may differ."""
        if self.size > 1:
            found = [str(folder)]
            dist.broadcast_object_list(found, src=0)
            folder = Path(found[0])
        return folder

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Over all processes."""
        values = values.detach().float()
        if self.size > 1:
            dist.all_reduce(values)
            values /= self.size
        return values

    @contextlib.contextmanager
    def evaluating(self, model: nn.Module, ema: Ema | None) -> Iterator[None]:
        """Forwards without a backward, by the averaged weights where there are any.

        FSDP2 shares a unit out again after its backward, and the outermost one only then: without one it would keep the
        averages, and the next step would clear the gradients of the gathered weights in the place of those of the shares.
        """
        with ema.swapped() if ema is not None else contextlib.nullcontext():
            reshard(model)
            yield
            reshard(model)

    def save(
        self, folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping, ema: Any, keep: int
    ) -> None:
        """Rank 0 writes whole tensors, put together from what each process wrote; nobody goes on before it is done."""
        reshard(model)
        with shares_written(folder / SHARES, sharded(model, optimizer, ema), self.rank) as elsewhere:
            if self.rank == 0:
                checkpoint.save(folder, step, plain(model), optimizer, dict(state), ema, keep, elsewhere)
        if self.size > 1:
            dist.barrier()

    def load(self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, ema: Any) -> dict:
        """Every process reads what it keeps: all, or its share."""
        return checkpoint.load(path, plain(model), optimizer, ema, fill_shares)


def sharded(model: nn.Module, optimizer: torch.optim.Optimizer, ema: Ema | None) -> dict[str, DTensor]:
    """Parameters, state and averages that each process has a share of, by file and name in a checkpoint."""
    files: dict[str, Mapping[str, torch.Tensor]] = {
        checkpoint.MODEL: dict(plain(model).named_parameters()), checkpoint.OPTIMIZER: state_tensors(optimizer),
        checkpoint.EMA: {} if ema is None else ema.tensors,
    }
    return {f"{file}/{name}": t for file, named in files.items() for name, t in named.items() if isinstance(t, DTensor)}


@contextlib.contextmanager
def shares_written(scratch: Path, tensors: Mapping[str, DTensor], rank: int) -> Iterator[StoredTensors | None]:
    """By torch.distributed.checkpoint: each process writes its shares, rank 0 joins the files; what it needs is one tensor.

    What is left of a save that was killed is removed first. None where nothing is sharded.
    """
    if not tensors:
        yield None
        return
    if rank == 0:
        shutil.rmtree(scratch, ignore_errors=True)
    dist.barrier()
    try:
        writer = HuggingFaceStorageWriter(str(scratch), save_distributed=True, enable_consolidation=True)
        with in_one_line(f"{scratch} could not be written"):
            torch_checkpoint.save(dict(tensors), storage_writer=writer)
        found = StoredTensors(next(scratch.glob("*.safetensors"))) if rank == 0 else None
        if found is not None and (why := found.misfit(tensors, "the model")):
            raise CheckpointError(f"checkpoint: the shares in {scratch} do not fit: {why}; do all machines see this folder?")
        yield found
    finally:
        if rank == 0:
            shutil.rmtree(scratch, ignore_errors=True)


class OneFile(FileSystem):
    """Lists one file, whatever else is in its folder: names of tensors recur in other files of a checkpoint."""

    def __init__(self, file: Path):
        self.file = file

    def ls(self, path: str | os.PathLike) -> list[str]:
        return [str(self.file)]


def fill_shares(file: Path, wanted: Mapping[str, torch.Tensor]) -> list[str]:
    """Of a safetensors file each process reads the slices that it has a share of; no pickle is loaded."""
    shares = {name: t for name, t in wanted.items() if isinstance(t, DTensor)}
    if shares:
        reader = HuggingFaceStorageReader(str(file.parent))
        reader.fs = OneFile(file)
        with in_one_line(f"{file} could not be read"):
            torch_checkpoint.load(dict(shares), storage_reader=reader)
    return list(shares)


@contextlib.contextmanager
def in_one_line(what: str) -> Iterator[None]:
    """torch.distributed.checkpoint raises what every process raised, as no Exception."""
    try:
        yield
    except CheckpointException as e:
        why = next((error_line(failure[0]) for failure in e.failures.values()), "no reason is given")
        raise CheckpointError(f"checkpoint: {what}: {why}") from None


def shard(model: nn.Module, device: str, size: int) -> None:
    """FSDP2: every repeated block is a unit, and the rest is one."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device, (size,))
    for blocks in (m for m in model.modules() if isinstance(m, nn.ModuleList)):
        for block in blocks:
            fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def reshard(model: nn.Module) -> None:
    """Of FSDP2's units those that a forward gathered are shares again."""
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()


def plain(model: nn.Module) -> nn.Module:
    """The model without what DDP put around it."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


@contextlib.contextmanager
def processes(mode: str) -> Iterator[Processes]:
    """The processes that torchrun started, or this one alone."""
    size, rank, local = (int(os.environ.get(k, d)) for k, d in (("WORLD_SIZE", "1"), ("RANK", "0"), ("LOCAL_RANK", "0")))
    on_gpu = torch.cuda.is_available()
    if size == 1:
        yield Processes(device="cuda" if on_gpu else "cpu")
        return
    if not mode:
        raise ValueError(f"train: {size} processes were started; say how they share the work: --set dist.mode=ddp")
    if on_gpu:
        torch.cuda.set_device(local)
    started = not dist.is_initialized()
    if started:
        dist.init_process_group("nccl" if on_gpu else "gloo")
    try:
        yield Processes(rank, size, "cuda" if on_gpu else "cpu", mode)
    finally:
        if started:
            dist.destroy_process_group()
