"""What the five stages share: a tiny Llama, its pieces, and a training loop that times each part of a step.

A stage runs this with one piece of its own. Stage 5 runs it as it is: Triton for what is bound by memory, cuBLAS for products.
On a GPU each part of the step is captured once as a CUDA graph and replayed.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from whet.choices import Choices
from whet.graphs import Graph
from whet.measure import Stopwatch
from whet.models import Recipe
from whet.models.tiny_llama import TinyLlamaConfig, batch
from whet.ops.rope import tables
from whet.workload import Workload

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WARM_UP = 3  # steps that compile kernels and fill the optimizer's state, before anything is captured or timed
# Under a CUDA graph the Triton kernels beat the stock calls at these sizes: records/optimize-tiny-llama-small-tf32.json
ops = Choices(default="triton" if DEVICE == "cuda" else None)


def init_weights(model: nn.Module) -> None:
    """N(0, 0.02) for every matrix; those that lead back into the residual stream narrower by depth."""
    for name, p in model.named_parameters():
        if p.dim() == 2:
            narrow = name.endswith(("o.weight", "down.weight"))
            nn.init.normal_(p, std=0.02 / (2 * len(model.blocks)) ** 0.5 if narrow else 0.02)


def attend(q, k, v):
    """Causal attention of (B, H, S, D) queries over (B, G, S, D) keys and values, each shared by H / G heads."""
    return ops.attention(q, k, v, causal=True)


def swiglu(x, weight):
    """silu(x Wg^T) * (x Wu^T), where weight is Wg above Wu."""
    return ops.swiglu(F.linear(x, weight))


@dataclass(frozen=True)
class Pieces:
    """What a stage can replace."""

    init_weights: Callable[[nn.Module], None] = init_weights
    attend: Callable = attend
    swiglu: Callable = swiglu
    timer: type[Stopwatch] = Stopwatch


class Attention(nn.Module):
    def __init__(self, c: TinyLlamaConfig, pieces: Pieces):
        super().__init__()
        self.c, self.attend = c, pieces.attend
        self.rows = [*c.splits["qkv"].values()]
        self.qkv, self.o = nn.Linear(c.hidden, sum(self.rows), bias=False), nn.Linear(c.hidden, c.hidden, bias=False)

    def forward(self, y, cos, sin):
        q, k, v = (t.unflatten(-1, (-1, self.c.head_dim)).transpose(1, 2) for t in self.qkv(y).split(self.rows, dim=-1))
        q, k = ops.rope(q, k, cos, sin)
        return self.o(self.attend(q, k, v).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, c: TinyLlamaConfig, pieces: Pieces):
        super().__init__()
        self.swiglu, width = pieces.swiglu, c.ffn_mult * c.hidden
        self.gate_up, self.down = nn.Linear(c.hidden, 2 * width, bias=False), nn.Linear(width, c.hidden, bias=False)

    def forward(self, y):
        return self.down(self.swiglu(y, self.gate_up.weight))


class Block(nn.Module):
    def __init__(self, c: TinyLlamaConfig, pieces: Pieces):
        super().__init__()
        self.eps, self.attention, self.mlp = c.eps, Attention(c, pieces), MLP(c, pieces)
        self.norm1, self.norm2 = nn.Parameter(torch.ones(c.hidden)), nn.Parameter(torch.ones(c.hidden))

    def forward(self, h, delta, cos, sin):
        """h is the residual stream, delta what is still to be added to it: the next norm adds it on the way."""
        if delta is None:
            y = ops.rms_norm(h, self.norm1, self.eps)
        else:
            y, h = ops.add_rms_norm(delta, h, self.norm1, self.eps)
        y, h = ops.add_rms_norm(self.attention(y, cos, sin), h, self.norm2, self.eps)
        return h, self.mlp(y)


class Llama(nn.Module):
    def __init__(self, c: TinyLlamaConfig, pieces: Pieces = Pieces()):  # noqa: B008  (frozen)
        super().__init__()
        self.c = c
        self.embed = nn.Embedding(c.vocab, c.hidden)  # also the head: tied
        self.blocks = nn.ModuleList(Block(c, pieces) for _ in range(c.layers))
        self.norm = nn.Parameter(torch.ones(c.hidden))
        for name, table in zip(("cos", "sin"), tables(c.max_positions, c.head_dim, c.theta)):
            self.register_buffer(name, table, persistent=False)
        pieces.init_weights(self)

    def forward(self, tokens, labels):
        h, delta = self.embed(tokens), None
        for block in self.blocks:
            h, delta = block(h, delta, self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]])
        y, _ = ops.add_rms_norm(delta, h, self.norm, self.c.eps)
        return ops.linear_cross_entropy(y, self.embed.weight, labels)


class Training:
    """A step in three parts, each a function of what the one before left."""

    def __init__(self, model: nn.Module, lr: float, data: dict):
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True, capturable=DEVICE == "cuda")
        self.work = Workload(model, kwargs={name: t.clone() for name, t in data.items()}, optimizer=optimizer)
        self.loss: torch.Tensor | None = None
        self.parts = {"forward": self.forward, "backward": self.backward, "optimizer": optimizer.step}

    def forward(self):
        self.loss = self.work.forward_to_loss()

    def backward(self):
        self.work.backward(self.loss)

    def capture(self) -> None:
        """Each part as a CUDA graph, captured in the order in which they will be replayed."""
        self.loss = None  # with it goes the last step's graph, whose nodes would bring their own stream along
        self.parts = {name: Graph(run, warm_up=0) for name, run in self.parts.items()}

    def step(self, data: dict, timer: Stopwatch) -> None:
        for name, t in data.items():
            self.work.kwargs[name].copy_(t)
        for name, run in self.parts.items():
            with timer(name):
                run()


def train(c: TinyLlamaConfig, recipe: Recipe, steps: int, pieces: Pieces) -> dict:
    """Train for real. The parts are timed by the stage's timer, all timed steps together by one that synchronises."""
    torch.manual_seed(recipe.seed)
    torch.set_float32_matmul_precision("high")
    model, batches = Llama(c, pieces).to(DEVICE), [batch(c, recipe, DEVICE, step) for step in range(steps)]
    training, timer, whole = Training(model, recipe.lr, batches[0]), pieces.timer(DEVICE), Stopwatch(DEVICE)
    training.step(batches[0], timer)
    alive = gradients(training.work)
    warm = min(WARM_UP, steps - 1)
    for data in batches[1:warm]:
        training.step(data, timer)
    captured = DEVICE == "cuda" and warm == WARM_UP
    if captured:
        training.capture()
    with whole("steps"):
        for data in batches[warm:]:
            training.step(data, timer)
    seconds, parts = whole.total("steps") / (steps - warm), {f"{part}_ms": timer.ms(part, warm) for part in training.parts}
    return {
        "device": DEVICE, "captured": captured, "gradients": alive, "loss": training.loss.item(),
        "samples_per_s": recipe.batch / seconds, "step_ms": seconds * 1e3, **parts,
    }


def gradients(work: Workload) -> int:
    """How many parameters there are, if a gradient reached every one."""
    total = len(list(work.model.parameters()))
    if dead := work.without_gradient():
        raise RuntimeError(f"no gradient reaches {', '.join(dead[:5])} ({len(dead)} of {total} parameters)")
    return total


def config(a: argparse.Namespace) -> TinyLlamaConfig:
    if min(a.batch_size, a.seq_len, a.hidden_dim, a.num_layers, a.num_heads) < 1:
        raise ValueError("sizes must be at least 1")
    c = TinyLlamaConfig(
        hidden=a.hidden_dim, layers=a.num_layers, heads=a.num_heads, kv_heads=max(1, a.num_heads // 2),
        max_positions=a.seq_len,
    )
    if c.hidden % c.heads or c.head_dim % 2 or c.heads % c.kv_heads:
        raise ValueError(f"hidden-dim {c.hidden} must split into {c.heads} heads of even width, in {c.kv_heads} equal groups")
    if a.num_steps < 2:
        raise ValueError(f"num-steps must be at least 2, since the first is not timed, got {a.num_steps}")
    return c


def main(**piece) -> None:
    """Run the stage in which these pieces stand in for those above."""
    script = Path(sys.argv[0]).name
    parser = argparse.ArgumentParser(description=f"{script}: trains a tiny Llama and times each part of a step.")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences a step (default 8)")
    parser.add_argument("--seq-len", type=int, default=128, help="tokens a sequence (default 128)")
    parser.add_argument("--num-steps", type=int, default=20, help="training steps (default 20)")
    parser.add_argument("--hidden-dim", type=int, default=512, help="width (default 512)")
    parser.add_argument("--num-layers", type=int, default=8, help="layers (default 8)")
    parser.add_argument("--num-heads", type=int, default=8, help="query heads; half as many key/value heads (default 8)")
    parser.add_argument("--json", action="store_true", help="print one JSON object (default off)")
    a = parser.parse_args()
    try:
        c = config(a)
    except ValueError as e:
        parser.error(str(e))
    recipe = Recipe(a.batch_size, a.seq_len)
    r = {"script": script, **train(c, recipe, a.num_steps, Pieces(**piece))}
    if a.json:
        print(json.dumps(r))
        return
    how = "captured as CUDA graphs" if r["captured"] else "not captured"
    print(f"{script} on {r['device']}: batch {recipe.batch} x {recipe.seq_len}, {a.num_steps} steps, {how}")
    print(f"Final loss: {r['loss']:.4f}, a gradient in each of {r['gradients']} parameters")
    print(f"Training speed: {r['samples_per_s']:.1f} samples/s, {r['step_ms']:.2f} ms a step")
    for part in ("forward", "backward", "optimizer"):
        print(f"{part}: {r[f'{part}_ms']:.3f} ms")
