"""Regression tasks drawn as training goes: functions of Gaussian processes, M context points and N targets of each.

    source = GPTasks(context=64)
    batch = source.loader(32, 564).next()         # dict(features=(32, 564, 3), targets=(32, 500))
    source.exact_log_likelihood(32, 564, 8)       # of the held-out tasks, by who knows the true kernel

A task is made of a seed and its number alone, not of the number of processes. Held-out tasks are numbered apart from those of
training and are the same for every seed.
"""

import functools
import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from whet.train import gp
from whet.train.gp import GPLaw

HELD_OUT = 2**31  # tasks for validation: more than anyone takes
VERSION = 1  # of what is drawn: a run goes on with its own alone
SHOWN, SHOWN_CONTEXT = 80, 200  # points of the plotted task: targets, and context


@dataclass
class Drawn:
    """A batch of tasks, the context first: x, y = f + noise, and f are (B, P) in float64."""

    laws: list[GPLaw]
    x: Tensor
    y: Tensor
    f: Tensor
    context: int

    def batch(self) -> dict[str, Tensor]:
        """What the model takes: (x, y or 0, whether it is context) of each point, and the y of the targets."""
        seen = torch.arange(self.x.shape[1], device=self.x.device) < self.context
        features = torch.stack([self.x, self.y * seen, seen.expand_as(self.x)], -1)
        return dict(features=features.float(), targets=self.y[:, self.context :].float())

    def exact(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of the targets by the exact GP: true kernel, true hyperparameters."""
        m = self.context
        return gp.predict(self.laws, self.x[:, :m], self.y[:, :m], self.x[:, m:])


class GPTasks:
    """A source of tasks, in the place of Shards: what a run asks of its data.

    context   points of each task that the model sees with their y; the rest of a task are targets
    """

    meta = None
    total = 0  # tokens on disk

    def __init__(self, context: int, device: str = "cpu"):
        self.context, self.device = context, device
        law = f"{'/'.join(gp.KERNELS)} kernels, length scales {gp.LENGTHS[0]:g} to {gp.LENGTHS[1]:g}"
        law += f", noise {gp.NOISES[0]:g} to {gp.NOISES[1]:g}"
        self.source = f"tasks of Gaussian processes, each point counted as a token: {context:,} context points; {law}"
        self._exact = functools.cache(self._exact_log_likelihood)

    def sequences(self, split: str, seq_len: int) -> int:
        return HELD_OUT

    def fingerprint(self) -> str:
        """sha256 of what the tasks are drawn from; the same for every seed."""
        ranges = (gp.KERNELS, gp.LOW, gp.HIGH, gp.LENGTHS, gp.SCALES, gp.NOISES, gp.PERIODS)
        return hashlib.sha256(f"gp {VERSION} {self.context} {ranges}".encode()).hexdigest()

    def loader(
        self, batch: int, seq_len: int, rank: int = 0, world: int = 1, seed: int = 0, split: str = "train"
    ) -> "TaskLoader":
        return TaskLoader(self, batch, seq_len, rank, world, seed, split)

    def exact_log_likelihood(self, batch: int, seq_len: int, count: int, rank: int = 0, world: int = 1) -> float:
        """Per target point, over the first batches of the held-out tasks: what the exact GP gives; computed once."""
        return self._exact(batch, seq_len, count, rank, world)

    def _exact_log_likelihood(self, batch: int, seq_len: int, count: int, rank: int, world: int) -> float:
        loader, found = self.loader(batch, seq_len, rank, world, split="val"), []
        for _ in range(count):
            drawn = loader.draw()
            found.append(gp.log_density(drawn.y[:, self.context :], *drawn.exact()).mean())
        return torch.stack(found).mean().item()


class TaskLoader:
    """Batches of tasks, without end: those of training by their seed and number, held-out ones by their number alone.

    batch   tasks of all ranks together; a rank gets batch / world of them, every world-th
    The state counts tasks of all ranks, so a run may go on with another world or batch.
    """

    def __init__(self, source: GPTasks, batch: int, points: int, rank: int, world: int, seed: int, split: str):
        if batch < 1 or not 0 < source.context < points:
            wanted = f"of {points:,} points, {source.context:,} of them context"
            raise ValueError(f"tasks: a batch needs a task or more, and a task context and targets; got {batch} tasks {wanted}")
        if not 0 <= rank < world or batch % world:
            fix = f"set train.batch_size to a multiple of {world}"
            raise ValueError(f"tasks: a batch of {batch} tasks cannot be divided among {world} processes; {fix}")
        self.source, self.batch, self.points, self.rank, self.world = source, batch, points, rank, world
        self.seed, self.split = seed, split
        self.position = 0  # tasks that all ranks have drawn

    def numbers(self) -> list[int]:
        """Which tasks this rank's next batch has."""
        return list(range(self.position + self.rank, self.position + self.batch, self.world))

    def draw(self, targets: Tensor | None = None) -> Drawn:
        """The next batch of this rank. Random numbers are drawn on the CPU, so that they are the same on every device.

        targets   where they lie; None: at random, as the context does
        """
        laws, x, normals, noise = [], [], [], []
        for number in self.numbers():
            named = f"{self.seed} {number}" if self.split == "train" else f"held out {number}"
            words = hashlib.sha256(named.encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(words[:8], "little", signed=True))
            one: Any = dict(generator=generator, dtype=torch.float64)
            laws.append(gp.draw_law(generator))
            x.append(gp.LOW + (gp.HIGH - gp.LOW) * torch.rand(self.points, **one))
            if targets is not None:
                x[-1][self.source.context :] = targets
            normals.append(torch.randn(gp.normals_for(self.points), **one))
            noise.append(torch.randn(self.points, **one) * laws[-1].noise)
        self.position += self.batch
        points, of_f, of_y = (torch.stack(part).to(self.source.device) for part in (x, normals, noise))
        f = gp.draw_functions(laws, points, of_f)
        return Drawn(laws, points, f + of_y, f, self.source.context)

    def next(self) -> dict[str, Tensor]:
        return self.draw().batch()

    def state(self) -> dict[str, int]:
        return {"epoch": 0, "index": self.position}

    def load_state(self, state: dict[str, int]) -> None:
        if state["epoch"] or state["index"] < 0:
            raise ValueError(f"tasks: {state} is no state of tasks, which have no epochs; resume with the run's own data")
        self.position = state["index"]


@torch.no_grad()
def shown_task(source: GPTasks, predict: Callable[[Tensor], tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """A held-out task, its targets evenly apart, with the model's prediction beside the exact GP's: plain values for a page.

    predict   features (1, P, 3) -> mean and standard deviation (1, N)
    """
    m, grid = source.context, torch.linspace(gp.LOW, gp.HIGH, SHOWN, dtype=torch.float64)
    drawn = source.loader(1, m + SHOWN, split="val").draw(grid)
    (mean, sd), exact = predict(drawn.batch()["features"]), drawn.exact()
    found = {"x": drawn.x[0, m:], "truth": drawn.f[0, m:], "mean": mean[0], "sd": sd[0], "exact_mean": exact[0][0]}
    found |= {"context_x": drawn.x[0, :m][:SHOWN_CONTEXT], "context_y": drawn.y[0, :m][:SHOWN_CONTEXT]}
    law = {k: v for k, v in asdict(drawn.laws[0]).items() if k != "period" or drawn.laws[0].kernel == "periodic"}
    return {name: [round(v, 4) for v in t.double().tolist()] for name, t in found.items()} | {"law": law}
