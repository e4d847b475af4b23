"""Models whose sizes are no whole loads of the tensor cores, and a watch over the rows of their products."""

import torch
from swapping import GPT, Mixed, OwnMLP, batch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from whet.alignment import aligned

INNER, WORDS, PADDED = 93, 101, 128
APART, ONE = "gate and up apart", "gate and up in one product"
FORMS = (APART, ONE, f"padded to {PADDED}", f"{ONE}, padded to {PADDED}")
MATRICES = {"mm": 0, "addmm": 1, "bmm": 0}  # products: where their matrices begin


class Watched(TorchDispatchMode):
    """The rows in memory of every product, of both matrices and of the result; its sizes M, K, N; where its matrices lie."""

    def __init__(self):
        super().__init__()
        self.rows: list[tuple[int, ...]] = []
        self.sizes: list[tuple[int, ...]] = []
        self.places: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        at = MATRICES.get(func.overloadpacket.__name__)
        if at is not None:
            a, b = args[at], args[at + 1]
            self.rows.append(tuple(max(t.stride()[-2:]) for t in (a, b, out)))
            self.sizes.append((*a.shape[-2:], b.shape[-1]))
            self.places.append((a.data_ptr(), b.data_ptr()))
        return out

    def misaligned(self, dtype: torch.dtype) -> list[tuple[int, ...]]:
        """Of products over more than one: Transformers 5.17 makes the angles of a rotary embedding as a column times a row."""
        products = [rows for rows, (_, K, _) in zip(self.rows, self.sizes) if K > 1]
        return [rows for rows in products if not all(aligned(size, dtype) for size in rows)]


def odd_gpt() -> nn.Module:
    """A plain model with tied weights, an odd vocabulary and an odd inner size."""
    torch.manual_seed(0)
    model = GPT(vocab=WORDS)
    for block in model.h:
        block.mlp = nn.Sequential(nn.Linear(64, INNER), nn.GELU(), nn.Linear(INNER, 64), nn.Dropout(0.1))
        block.mlp[3].p = 0.0
    return model.train()


def odd_mixed() -> nn.Module:
    torch.manual_seed(0)
    model = Mixed()
    model.mlp = OwnMLP(64, INNER)
    return model.train()


def tokens() -> tuple:
    ids = batch()["input_ids"]
    return ids, ids.roll(-1, 1)


def stepped(model: nn.Module, *args) -> tuple:
    """(output, gradients, the products of a step)."""
    model.zero_grad()
    with Watched() as seen:
        out = model(*args)
        out = out[0] if isinstance(out, tuple) else out
        (out.float() * torch.linspace(-1, 1, out.shape[-1])).sum().backward()
    return out.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}, seen
