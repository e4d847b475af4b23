"""attention_spans: attention in which each query sees one run of keys: padded batches, packed documents, windows."""

import torch
import torch.nn.functional as F

from whet.compiled import compiled
from whet.op import Impl, Op
from whet.ops._rows import KERNEL_DTYPES
from whet.ops.attention.common import Tile, block_d, has_descriptors, shaped
from whet.ops.attention.meaning import KINDS, dtype_of, per_query_head, proof, scale_of, smaller
from whet.ops.attention.stock import BIG_MASK, MASK_LIMIT, SCORES_LIMITS, TF32, formula_refuses
from whet.ops.attention_spans import kernels, meaning
from whet.torch_ops import Fused
from whet.values import changed, families

# forward/dq/dkdv by BLOCK_D; the first is the default, the rest are what tuning tries beside it.
DESCRIBED = {
    16: ("64x64w4s3/64x64w4s3/64x64w4s3",), 32: ("64x64w4s3/64x64w4s3/64x64w4s3",),
    64: ("64x64w4s3/64x64w4s3/32x64w4s3", "128x64w4s3/64x64w4s2/64x64w4s3", "64x128w4s2/128x64w8s2/64x128w8s2"),
    128: ("64x64w4s3/64x64w4s2/32x64w4s2", "128x64w8s3/64x64w8s2/64x64w8s2", "128x128w8s2/128x64w8s2/32x64w4s2"),
    256: ("64x64w8s2/64x32w8s2/32x64w8s2",),
}
OTHERS = {
    16: ("64x64w4s3/64x64w4s2/64x64w4s2",), 32: ("64x64w4s3/64x64w4s2/64x64w4s2",),
    64: ("64x64w4s3/64x64w4s2/64x64w4s2", "128x64w4s3/64x64w4s2/32x64w4s2"),
    128: ("64x32w4s2/64x32w4s2/32x64w4s2", "128x32w8s3/64x32w4s1/32x64w8s1"),
    256: ("32x32w4s2/32x32w4s1/32x32w4s1",),
}
WIDE = {  # float32: three TF32 products each, which take most of the registers
    16: ("64x32w4s1/64x32w4s1/32x64w4s1",), 32: ("64x32w4s1/64x32w4s1/32x64w4s1",), 64: ("64x32w4s1/64x32w4s1/32x64w4s1",),
    128: ("64x32w4s1/64x32w8s1/32x64w8s1",), 256: ("32x16w4s1/32x16w4s1/16x32w4s1",),
}


def table(q) -> tuple[str, ...]:
    """The tiles for these inputs on this GPU, the default first."""
    return (WIDE if q.dtype == torch.float32 else DESCRIBED if has_descriptors() else OTHERS)[block_d(q.shape[3])]


def tiles(q, k, v, first, last, scale=None) -> tuple[str, ...]:
    return table(q)[1:]


def tiles_of(q, tile: str) -> list[Tile]:
    """The tiles of forward, dq and dkdv: those asked for, else this GPU's for these inputs."""
    return [Tile.read(part) for part in (tile or table(q)[0]).split("/")]


def launch_forward(q, k, v, first, last, scale, tile):
    return kernels.forward(q, k, v, first, last, scale, tiles_of(q, tile)[0])


def launch_backward(do, q, k, v, first, last, o, lse, scale, tile):
    return kernels.backward(do, q, k, v, first, last, o, lse, scale, *tiles_of(q, tile)[1:])


def _fake(q, k, v, first, last, scale, tile):
    return shaped(q), q.new_empty(q.shape[:3], dtype=torch.float32)


def _fake_backward(do, q, k, v, first, last, o, lse, scale, tile):
    return shaped(q), shaped(k), shaped(v)


SPANNED = Fused(
    "attention_spans",
    "(Tensor q, Tensor k, Tensor v, Tensor first, Tensor last, float scale, str tile) -> (Tensor, Tensor)",
    launch_forward, _fake,
    "(Tensor do, Tensor q, Tensor k, Tensor v, Tensor first, Tensor last, Tensor o, Tensor lse, float scale, str tile)"
    " -> (Tensor, Tensor, Tensor)", launch_backward, _fake_backward,
    save=lambda args, results: ((*args[:5], *results), args[5:]), grads_to=(0, 1, 2, None, None, None, None),
)


def run_triton(q, k, v, first, last, scale=None, tile=""):
    q, k, v = (t.to(dtype_of(q)) for t in (q, k, v))
    return SPANNED(q, k, v, first, last, float(scale_of(scale, q)), tile)


def triton_refuses(q, k, v, first, last, scale=None):
    if dtype_of(q) not in KERNEL_DTYPES:
        return f"q, k and v must be float32, float16 or bfloat16, got {dtype_of(q)}"
    if not 16 <= q.shape[3] <= 256:
        return f"the head size must be 16 to 256, got {q.shape[3]}"
    if scale is not None and scale <= 0:
        return f"scale must be positive, got {scale}"
    if max(q.shape[2], k.shape[2]) >= 2**30:
        return f"lengths must be under 2^30, got {q.shape[2]} and {k.shape[2]}"
    return None


def run_torch(q, k, v, first, last, scale=None):
    """SDPA with the mask that the spans stand for. Heads are repeated: with a mask and grouped heads it has no fast kernel."""
    Lk = k.shape[2]
    blind = last.clamp(max=Lk) <= first.clamp(min=0)
    see = meaning.seen(first.masked_fill(blind, 0), last.masked_fill(blind, Lk), Lk)
    k, v = per_query_head(k, q), per_query_head(v, q)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=see, scale=scale).masked_fill(blind[:, None, :, None], 0.0)


def torch_refuses(q, k, v, first, last, scale=None):
    if not q.numel() or not k.shape[2]:
        return f"q, k and v must not be empty, got {tuple(q.shape)} and {tuple(k.shape)}"
    if k.shape[2] == 1:
        return "a query must see two keys or more: over one the gradient of q and k is rounding error"
    if scale is not None and scale <= 0:
        return f"scale must be positive: with a mask SDPA may give NaN for others, got {scale}"
    if q.shape[0] * q.shape[2] * k.shape[2] > MASK_LIMIT:
        return f"the mask must take no more than {MASK_LIMIT >> 30} GiB, got {q.shape[0]} x {q.shape[2]} x {k.shape[2]} bytes"
    return None


def scores_refuse(q, k, v, first, last, scale=None):
    return formula_refuses(q, k, v)


OP = Op(
    name="attention_spans",
    reference=meaning.reference,
    inputs=meaning.inputs,
    case_of=meaning.case_of,
    check=meaning.check,
    cases=meaning.CASES,
    shapes=meaning.SHAPES,
    cost=meaning.cost,
    grads=("q", "k", "v"),
    impls={
        "eager": Impl(meaning.reference, scores_refuse, limits=SCORES_LIMITS),
        "compile": Impl(compiled(meaning.reference), scores_refuse, limits=SCORES_LIMITS),
        "torch": Impl(
            run_torch, torch_refuses, known_inaccurate=TF32,
            limits=("empty inputs", "one key to a query", "a scale of 0 or less", BIG_MASK),
        ),
        "triton": Impl(
            run_triton, triton_refuses, needs="triton", tiles=tiles,
            limits=(
                "dtypes other than fp32, fp16, bf16", "head sizes under 16 or over 256", "a scale of 0 or less",
                "lengths of 2^30 and more",
            ),
            spills="float32, whose products take three times the operands; head size 256; and 48 bytes where heads of 64 are "
            "grouped, in a tile that tuning tries",
        ),
    },
    dynamic=("B", "Lq", "Lk"),
    tiny=dict(B=2, H=2, KV=1, Lq=200, Lk=200),
    proof=proof,
    smaller=smaller,
    hostile=families(
        ("q", "k", "v"), limit=2.0, shifted=("k",), offset=5.0, tails=("v",), tied=("k", "v"),
        sharp_weights=changed(("q",), lambda q: 4 * q), overflowing_scores=changed(("k",), lambda k: k + 60),
    ),
    kinds=dict(scale=KINDS["scale"]),
)
