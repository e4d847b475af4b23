"""Several processes that train one model: torch's own DDP or FSDP2, started by torchrun.

One process is the plain case of the same calls. Checkpoints are whole tensors, written by rank 0 and cut anew at loading, so
that a run goes on with any number of processes; torch.distributed.checkpoint would keep its metadata as a pickle.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from whet.train import checkpoint


@dataclass(frozen=True)
class Processes:
    """This process among those that train."""

    rank: int = 0
    size: int = 1
    device: str = "cpu"
    mode: str = ""

    def wrapped(self, model: nn.Module) -> nn.Module:
        if self.mode == "ddp":
            from torch.nn.parallel import DistributedDataParallel

            return DistributedDataParallel(model)
        return model

    @contextlib.contextmanager
    def without_sync(self, model: Any, wait: bool) -> Iterator[None]:
        """While gradients are added up over several forwards only the last one talks to the others."""
        with model.no_sync() if wait and self.mode == "ddp" else contextlib.nullcontext():
            yield

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Over all processes."""
        values = values.detach().float()
        if self.size > 1:
            dist.all_reduce(values)
            values /= self.size
        return values

    def save(
        self, folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping, ema: Any, keep: int
    ) -> None:
        """Rank 0 writes; nobody goes on before it is done."""
        if self.rank == 0:
            checkpoint.save(folder, step, plain(model), optimizer, dict(state), ema, keep)
        if self.size > 1:
            dist.barrier()


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
