"""Muon's matrices: which parameters it updates, and their momentum orthogonalized, also where processes share the rows."""

import fnmatch
import re
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from whet.padding import logical_shapes

COEFFICIENTS, ITERATIONS = (3.4445, -4.7750, 2.0315), 5
EDGE_NAMES = re.compile(r"wte|wpe|w?emb(ed\w*)?|(un)?embed\w*|\w*embeddings?|lm_head|head|score|classifier")  # a part of a name


def hidden_matrices(model: nn.Module, adamw_names: tuple[str, ...] = ()) -> list[str]:
    """Names of the parameters that Muon updates: matrices, without embeddings, what is tied to them, and the head.

    A head is known by its name, or as a matrix outside numbered blocks with a row for each entry of an embedding.
    """
    tables = [m for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))]
    shapes = logical_shapes(model)
    embeddings, entries = {id(m.weight) for m in tables}, {m.num_embeddings for m in tables}

    def edge(name: str, p: Tensor) -> bool:
        parts = name.split(".")
        named = any(EDGE_NAMES.fullmatch(part) for part in parts)
        like_a_head = not any(part.isdigit() for part in parts) and shapes.get(id(p), p.shape)[0] in entries
        return id(p) in embeddings or named or like_a_head or any(fnmatch.fnmatchcase(name, n) for n in adamw_names)

    found = ((name, p) for name, p in model.named_parameters() if p.requires_grad and p.dim() == 2 and min(p.shape) > 1)
    return [name for name, p in found if not edge(name, p)]


def orthogonalized(x: Tensor) -> Tensor:
    """Each matrix of a batch (..., rows, columns) with its singular values near 1 and its singular vectors kept; in x's dtype.

    Five Newton-Schulz iterations of the odd polynomial a s + b s^3 + c s^5, whose slope at 0 is so steep that small singular
    values rise fast; it does not converge to 1 but stays within 0.68 to 1.14. On CUDA in bfloat16, elsewhere in float32.
    """
    a, b, c = COEFFICIENTS
    wide = torch.promote_types(x.dtype, torch.float32)
    y = x.to(wide).reshape(-1, *x.shape[-2:])
    y = y / (torch.linalg.matrix_norm(y, keepdim=True) + 1e-7)
    y = y.to(torch.bfloat16 if x.device.type == "cuda" else wide)
    tall = y.shape[-2] > y.shape[-1]
    y = y.mT if tall else y
    for _ in range(ITERATIONS):
        gram = torch.bmm(y, y.mT)
        y = torch.baddbmm(y, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    return (y.mT if tall else y).reshape(x.shape).to(x.dtype)


def local(tensors: Iterable[Tensor]) -> list[Tensor]:
    """What this process keeps of each, in its own memory: the share of one that is sharded over processes, or all of it."""
    return [t.to_local() if isinstance(t, DTensor) else t for t in tensors]


def orthogonalized_shares(shares: Tensor, like: DTensor) -> Tensor:
    """As `orthogonalized`, of n matrices of whose rows this process has some: (n, own rows, columns), and so the result.

    Each process gathers about n / processes of the matrices whole, orthogonalizes those and sends their rows back: two
    all-to-alls. A process may have no rows, or no matrix to orthogonalize.
    like   a tensor that is sharded as each of the matrices: by rows, over one dimension of processes
    """
    assert like.placements == (Shard(0),), like.placements
    mesh, (rows, columns) = like.device_mesh, like.shape
    size, rank, group = mesh.size(), mesh.get_local_rank(), mesh.get_group()
    block = -(-rows // size)  # rows of each process but the last ones, as torch.chunk divides them
    rows_of = [len(range(rows)[r * block : (r + 1) * block]) for r in range(size)]
    count_of = [len(shares) // size + (r < len(shares) % size) for r in range(size)]
    out = [count * rows_of[rank] * columns for count in count_of]
    back = [count_of[rank] * share * columns for share in rows_of]
    received = shares.new_empty(sum(back))
    dist.all_to_all_single(received, shares.reshape(-1), back, out, group=group)
    parts = [part.view(count_of[rank], -1, columns) for part in received.split(back) if len(part)]
    whole = orthogonalized(torch.cat(parts, 1)) if parts else received
    sent = torch.cat([part.reshape(-1) for part in whole.split(rows_of, 1)]) if parts else received
    found = torch.empty_like(shares)
    dist.all_to_all_single(found.view(-1), sent, out, back, group=group)
    return found
