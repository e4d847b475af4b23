"""Several processes that train one model: torch's own DDP or FSDP2, started by torchrun.

One process is the plain case of the same calls. Checkpoints are whole tensors, written by rank 0 and cut anew at loading, so
that a run goes on with any number of processes; torch.distributed.checkpoint would keep its metadata as a pickle.
"""

import collections
import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from whet.train import checkpoint


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
        """Rank 0 writes whole tensors; nobody goes on before it is done."""
        with whole(model, optimizer):
            if self.rank == 0:
                checkpoint.save(folder, step, plain(model), optimizer, dict(state), ema, keep)
        if self.size > 1:
            dist.barrier()

    def load(self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, ema: Any) -> dict:
        """Every process reads whole tensors and keeps its share."""
        with whole(model, optimizer, back=True):
            return checkpoint.load(path, plain(model), optimizer, ema)


def shard(model: nn.Module, device: str, size: int) -> None:
    """FSDP2: every repeated block is a unit, and the rest is one."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device, (size,))
    for blocks in (m for m in model.modules() if isinstance(m, nn.ModuleList)):
        for block in blocks:
            fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


@contextlib.contextmanager
def whole(model: nn.Module, optimizer: torch.optim.Optimizer, back: bool = False) -> Iterator[None]:
    """While it is on, sharded parameters and their optimizer's state are whole tensors; back: then sharded from those.

    FSDP's hooks of state_dict(), which would put the shards back, are off meanwhile.
    """
    units: list[Any] = [m for m in model.modules() if hasattr(m, "reshard")]
    for unit in units:
        unit.reshard()
    sharded: list[tuple[nn.Module, str, Any]] = [
        (m, name, p) for m in model.modules() for name, p in m._parameters.items() if isinstance(p, DTensor)
    ]
    if not sharded:
        yield
        return
    made = {id(p): nn.Parameter(p.full_tensor().detach(), p.requires_grad) for _, _, p in sharded}
    hooks = [(unit, unit._state_dict_pre_hooks) for unit in units]
    by_id, states = {id(p): p for _, _, p in sharded}, dict(optimizer.state)
    groups = [list(group["params"]) for group in optimizer.param_groups]
    for unit in units:
        unit._state_dict_pre_hooks = collections.OrderedDict()
    for module, name, p in sharded:
        module._parameters[name] = made[id(p)]
    for group in optimizer.param_groups:
        group["params"] = [made.get(id(p), p) for p in group["params"]]
    for key, p in by_id.items():
        kept = states.get(p, {})
        optimizer.state[made[key]] = {k: t.full_tensor() if isinstance(t, DTensor) else t for k, t in kept.items()}
        optimizer.state.pop(p, None)
    try:
        yield
        if back:
            for key, p in by_id.items():
                fill(p, made[key].detach())
                for name, t in optimizer.state[made[key]].items():
                    fill(states[p][name], t)
    finally:
        for unit, kept in hooks:
            unit._state_dict_pre_hooks = kept
        for module, name, p in sharded:
            module._parameters[name] = p
        for group, params in zip(optimizer.param_groups, groups):
            group["params"] = params
        optimizer.state.clear()
        optimizer.state.update(states)


@torch.no_grad()
def fill(mine: torch.Tensor, value: torch.Tensor) -> None:
    """Put a whole tensor, which every process holds, where this process has its share of it, or all."""
    if isinstance(mine, DTensor):
        value = distribute_tensor(value, mine.device_mesh, mine.placements, src_data_rank=None)
    mine.copy_(value)


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
