"""attention's kernels as torch.library ops, which tile serves which inputs, and what the impls refuse."""

import functools
import re

import torch

from whet import machine
from whet.op import Impl
from whet.ops._pairs import padded
from whet.ops._rows import KERNEL_DTYPES
from whet.ops.attention import float32, fp8, hybrid
from whet.ops.attention.backward import backward
from whet.ops.attention.common import LN2, Tile, block_d, has_descriptors, shaped
from whet.ops.attention.forward import forward
from whet.ops.attention.fused import fused, one_tile
from whet.ops.attention.meaning import NO_FP8, any_blind, dtype_of, scale_of, span
from whet.torch_ops import Fused

# forward/dq/dkdv by BLOCK_D; the first is the default, the rest are what tuning tries beside it. Products of 64 rows keep
# three programs on an SM, which overlap better than one that is pipelined by hand: see docs/kernels.md. At a head size of
# 128 the forward has two warpgroups that take turns; where there are few queries, tuning may prefer the plain one.
HOPPER = {
    16: ("64x128w4s2/64x64w4s3/64x64w4s3",), 32: ("64x128w4s2/64x64w4s3/64x64w4s3",),
    64: (
        "64x128w4s2/64x64w4s3/64x64w4s3r168", "64x128w4s2/64x64w4s3/g64x64w4s2", "64x64w4s2/64x64w4s3/64x64w4s2r168",
        "64x128w4s2/64x64w4s2/32x64w4s3",
    ),
    128: (
        "g128x128w8s2/g64x64w4s2/g64x128w8s2", "64x64w4s3/g64x64w4s2/g64x128w8s2", "64x64w4s2/g64x32w4s2/g32x64w4s2",
        "g128x128w8s2/64x64w4s2/g32x64w4s2",
    ),
    256: ("64x64w8s2/64x32w8s2/32x64w8s2",),
}
HOPPER_WINDOW = {  # beside those where there is a window: smaller tiles waste less at its edges
    64: ("64x64w4s2/64x64w4s3/g64x64w4s2", "64x64w4s2/64x64w4s2/g64x64w4s2"),
}
NEWER_FORWARD = "64x64w4s3"  # in the place of Gluon's forward on GPUs after Hopper
OTHERS = {
    16: ("64x64w4s3/64x64w4s2/64x64w4s2",), 32: ("64x64w4s3/64x64w4s2/64x64w4s2",),
    64: ("64x64w4s3/64x64w4s2/64x64w4s2", "128x64w4s3/64x64w4s2/32x64w4s2", "64x64w4s3/64x32w4s2/32x64w4s3"),
    128: ("64x32w4s2/64x32w4s2/32x64w4s2", "128x32w8s3/64x32w4s1/32x64w8s1"),
    256: ("32x32w4s2/32x32w4s1/32x32w4s1",),
}
WIDE = {  # float32: three TF32 products each, which take most of the registers
    16: ("64x32w4s1/64x32w4s1/32x64w4s1",), 32: ("64x32w4s1/64x32w4s1/32x64w4s1",), 64: ("64x32w4s1/64x32w4s1/32x64w4s1",),
    128: ("64x32w4s1/64x32w8s1/32x64w8s1",), 256: ("32x16w4s1/32x16w4s1/16x32w4s1",),
}
# The backward of five products, by BLOCK_D. At 64 two programs to an SM; at 128 one that spills is faster than eight warps that
# do not. On Hopper tuning tries warps of their own for products, copies and sums beside it.
FUSED_HOPPER = {16: "64x64w4s2", 32: "64x64w4s2", 64: "64x64w4s2", 128: "64x64w4s1", 256: "32x32w8s1"}
FUSED_OTHERS = {16: "64x64w4s2", 32: "64x64w4s2", 64: "32x64w4s2", 128: "32x64w8s2", 256: "32x32w8s1"}
FUSED_WIDE = {16: "32x32w4s1", 32: "32x32w4s1", 64: "32x32w4s1", 128: "16x16w4s1", 256: "16x16w4s1"}
FUSED_GLUON = "g64x128w8s2"
ONE_TILE = Tile(64, 64, 4, 2)  # past 64 keys or a head of 64 it spills, and two passes are faster


def table(q, window: int | None = None) -> tuple[str, ...]:
    """The tiles for these inputs on this GPU, the default first. Gluon's are for Hopper; newer GPUs take plain Triton's."""
    D, capability = block_d(q.shape[3]), machine.this_machine().capability
    if q.dtype == torch.float32:
        return WIDE[D]
    if not has_descriptors():
        return OTHERS[D]
    found = HOPPER[D] + (() if window is None else HOPPER_WINDOW.get(D, ()))
    if capability and capability[0] == 9:
        return found
    return tuple(dict.fromkeys(re.sub("^g[^/]*", NEWER_FORWARD, t).replace("g", "") for t in found))


def tiles(q, k, v, causal=None, window=None, scale=None, return_lse=False, precision=None) -> tuple[str, ...]:
    """What tuning tries beside the default. One tile of keys leaves the backward no choice, so there is nothing to try."""
    return () if fits_one_tile(q, k) else table(q, window)[1:]


def tiles_of(q, tile: str) -> tuple[Tile, Tile, Tile]:
    """The tiles of forward, dq and dkdv: those asked for, else this GPU's for these inputs.

    A forward in Gluon asked for where there is none is the default's.
    """
    forward_tile, dq, dkdv = read_tiles(tile or table(q)[0])
    if forward_tile.gluon and not table(q)[0].startswith("g"):
        forward_tile = tiles_of(q, "")[0]
    return forward_tile, dq, dkdv


@functools.cache
def read_tiles(text: str) -> tuple[Tile, Tile, Tile]:
    parts = text.split("/")
    if len(parts) != 3:
        raise ValueError(f"attention: tile must be forward/dq/dkdv, such as {HOPPER[64][0]}, got {text!r}")
    return Tile.read(parts[0]), Tile.read(parts[1]), Tile.read(parts[2])


def fits_one_tile(q, k) -> bool:
    return 0 < k.shape[2] <= ONE_TILE.N and block_d(q.shape[3]) <= 64 and q.dtype != torch.float32


def launch_forward(q, k, v, scale, offset, left, right, tile):
    chosen = tiles_of(q, tile)[0]
    return forward(q, k, v, scale, offset, left, right, ONE_TILE if fits_one_tile(q, k) else chosen)


def upstream(do, dlse, o, lse, k, offset, left, right):
    """The upstream gradients, zeros for queries that see no key: whatever comes in there, a NaN too, goes nowhere."""
    do = torch.zeros_like(o) if do is None else do
    if any_blind(offset, None if left < 0 else left, None if right < 0 else right, o.shape[2], k.shape[2]):
        blind = lse == float("-inf")
        do = do.masked_fill(blind[..., None], 0.0)
        dlse = dlse if dlse is None else dlse.masked_fill(blind, 0.0)
    return do, dlse


def launch_backward(do, dlse, q, k, v, o, lse, scale, offset, left, right, tile):
    do, dlse = upstream(do, dlse, o, lse, k, offset, left, right)
    if fits_one_tile(q, k) and q.numel():
        return one_tile(do, dlse, q, k, v, o, lse, scale, offset, left, right, ONE_TILE)
    return backward(do, dlse, q, k, v, o, lse, scale, offset, left, right, *tiles_of(q, tile)[1:])


def launch_fused_forward(q, k, v, scale, offset, left, right, tile):
    """Its tile is the backward's alone."""
    return launch_forward(q, k, v, scale, offset, left, right, "")


def launch_fused(do, dlse, q, k, v, o, lse, scale, offset, left, right, tile):
    if fits_one_tile(q, k) or not (q.numel() and k.numel()):
        return launch_backward(do, dlse, q, k, v, o, lse, scale, offset, left, right, "")
    do, dlse = upstream(do, dlse, o, lse, k, offset, left, right)
    return fused(do, dlse, q, k, v, o, lse, scale, offset, left, right, Tile.read(tile or fused_tile(q)))


def launch_hybrid(do, dlse, q, k, v, o, lse, scale, offset, left, right, tile):
    """cuDNN takes no gradient of the log-sum-exp: with one, and without one of the output, the backward is ours.

    So it is under torch.use_deterministic_algorithms: cuDNN's sums in no fixed order, and this op of torch's does not refuse;
    and where the user has switched cuDNN's attention off.
    """
    wanted = torch.backends.cuda.cudnn_sdp_enabled() and not torch.are_deterministic_algorithms_enabled()
    if do is None or dlse is not None or not wanted:
        return launch_backward(do, dlse, q, k, v, o, lse, scale, offset, left, right, tile)
    return hybrid.backward(do, q, k, v, o, lse, scale, causal=right == 0)


def fused_tile(q) -> str:
    by_dtype = FUSED_WIDE if q.dtype == torch.float32 else FUSED_HOPPER if has_descriptors() else FUSED_OTHERS
    return by_dtype[block_d(q.shape[3])]


def fused_tiles(q, k, v, causal=None, window=None, scale=None, return_lse=False, precision=None) -> tuple[str, ...]:
    """What tuning tries beside the default: on Hopper one in Gluon, of 16 bits and head sizes up to 128."""
    capability = machine.this_machine().capability
    served = q.dtype != torch.float32 and block_d(q.shape[3]) <= 128 and not fits_one_tile(q, k)
    return (FUSED_GLUON,) if served and capability and capability[0] == 9 else ()


def fused_inside_backward(do, dlse, q, k, v, o, lse, scale, offset, left, right, tile) -> int:
    """The sum of dq in fp32, and delta: what the launcher allocates besides the gradients."""
    if fits_one_tile(q, k):
        return 0
    B, H, Lq, D = q.shape
    M = Tile.read(tile or fused_tile(q)).M
    return 4 * B * H * (-(-Lq // M) * M * block_d(D) + Lq)


def launch_fp8_backward(do, dlse, q, k, v, o, lse, scale, offset, left, right, tile):
    """The gradient of what the forward computed: of the rounded q, k, v, in their own precision, passed straight through."""
    q, k, v = fp8.dequantized(q, k, v)
    return launch_backward(do, dlse, q, k, v, o, lse, scale, offset, left, right, "")


def _fake(q, k, v, scale, offset, left, right, tile):
    return shaped(q), q.new_empty(q.shape[:3], dtype=torch.float32)


def _fake_backward(do, dlse, q, k, v, o, lse, scale, offset, left, right, tile):
    return shaped(q), shaped(k), shaped(v)


def _fake_fp8(q, k, v, scale, offset, left, right, tile):
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


def _fake_fp8_backward(do, dlse, q, k, v, o, lse, scale, offset, left, right, tile):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)  # dequantized copies are contiguous


def registered(name, impl, run_forward, run_backward, fake=_fake, fake_backward=_fake_backward, bwd_inside=None) -> Fused:
    options = "float scale, int offset, int left, int right, str tile"
    kept = "Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse"
    return Fused(
        name,
        f"(Tensor q, Tensor k, Tensor v, {options}) -> (Tensor, Tensor)", run_forward, fake,
        f"(Tensor? do, Tensor? dlse, {kept}, {options}) -> (Tensor, Tensor, Tensor)", run_backward, fake_backward,
        save=lambda args, results: ((*args[:3], *results), args[3:]),
        grads_to=(0, 1, 2, None, None, None, None, None), n_out=2, grads_from=((0, 1), (0, 1), (0,)),
        bwd_inside=bwd_inside, label=f"attention[{impl}]",
    )


TWO_PASS = registered("attention", "triton", launch_forward, launch_backward)
ONE_PASS = registered(
    "attention_fused_bwd", "triton_fused_bwd", launch_fused_forward, launch_fused, bwd_inside=fused_inside_backward
)
CUDNNS = registered("attention_cudnn_bwd", "triton_cudnn_bwd", launch_forward, launch_hybrid)
IN_FP8 = registered("attention_fp8", "triton_fp8", fp8.forward, launch_fp8_backward, _fake_fp8, _fake_fp8_backward)


def launch_float32_backward(do, dlse, q, k, v, peaks, o, lse, scale, offset, left, right):
    do, dlse = upstream(do, dlse, o, lse, k, offset, left, right)
    return float32.backward(do, dlse, q, k, v, peaks, o, lse, scale, offset, left, right)


def _fake_float32(q, k, v, scale, offset, left, right):
    halves = (t.new_empty((2 * t.shape[0], *t.shape[1:3], padded(t.shape[3])), dtype=torch.float16) for t in (q, k, v))
    peaks = q.new_empty(sum(float32.heads(q.shape[0], q.shape[1], k.shape[1])), dtype=torch.int32)
    o = q.new_empty(q.shape[0], q.shape[2], q.shape[1], q.shape[3]).transpose(1, 2)
    return o, q.new_empty(q.shape[:3]), *halves, peaks


def _fake_float32_backward(do, dlse, q, k, v, peaks, o, lse, scale, offset, left, right):
    return tuple(o.new_empty((o.shape[0], *t.shape[1:3], o.shape[3])) for t in (q, k, v))


def inside_float32(q, k, v, *rest) -> int:
    """Of a padded head, what is cut to o."""
    return 0 if q.shape[3] == padded(q.shape[3]) else 4 * q.shape[:3].numel() * padded(q.shape[3])


def inside_float32_backward(do, dlse, q, k, v, peaks, o, lse, *rest) -> int:
    """The halves of do, a sum for each row and, of a padded head, what is cut to the gradients: as large as halves are."""
    return q.nbytes + lse.nbytes + (q.nbytes + k.nbytes + v.nbytes if q.shape[3] > o.shape[3] else 0)


IN_HALVES = Fused(
    "attention_float32",
    "(Tensor q, Tensor k, Tensor v, float scale, int offset, int left, int right)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)", float32.forward, _fake_float32,
    "(Tensor? do, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor peaks, Tensor o, Tensor lse,"
    " float scale, int offset, int left, int right) -> (Tensor, Tensor, Tensor)",
    launch_float32_backward, _fake_float32_backward,
    save=lambda args, results: ((*results[2:], *results[:2]), args[3:]),
    grads_to=(0, 1, 2, None, None, None, None), n_out=2, grads_from=((0, 1), (0, 1), (0,)), label="attention[triton_float32]",
    inside=inside_float32, bwd_inside=inside_float32_backward,
)


def float32_refuses(q, k, v, causal=None, window=None, scale=None, return_lse=False, precision=None):
    if precision is not None:
        return NO_FP8
    if dtype_of(q) != torch.float32:
        return f"q, k and v must be float32, got {dtype_of(q)}: of 16 bits there is no half to add"
    if q.shape[3] > float32.MAX_D:
        return f"the head size must be at most {float32.MAX_D}, got {q.shape[3]}"
    return kernel_refuses(q, k, v, causal, window, scale, return_lse, precision)


def fp8_tiles(q, k, v, causal=None, window=None, scale=None, return_lse=False, precision=None) -> tuple[str, ...]:
    return fp8.TILES[fp8.padded(q.shape[3])][1:]


def kernel_refuses(q, k, v, causal=None, window=None, scale=None, return_lse=False, precision=None):
    if dtype_of(q) not in KERNEL_DTYPES:
        return f"q, k and v must be float32, float16 or bfloat16, got {dtype_of(q)}"
    if not 16 <= q.shape[3] <= 256:
        return f"the head size must be 16 to 256, got {q.shape[3]}"
    if scale is not None and scale <= 0:
        return f"scale must be positive, got {scale}"
    if k.shape[2] == 1 or window == 1:
        return "a query must see two keys or more: over one the gradient of q and k is rounding error"
    if max(q.shape[2], k.shape[2]) >= 2**30:
        return f"lengths must be under 2^30, got {q.shape[2]} and {k.shape[2]}"
    return None


def refuses(q, k, v, causal=None, window=None, scale=None, return_lse=False, precision=None):
    if precision is not None:
        return NO_FP8
    return kernel_refuses(q, k, v, causal, window, scale, return_lse, precision)


def hybrid_refuses(q, k, v, causal=None, window=None, scale=None, return_lse=False, precision=None):
    given = (q, k, v, causal, window, scale, return_lse, precision)
    return refuses(*given) or hybrid.refuses(*given)


def fp8_refuses(q, k, v, causal=None, window=None, scale=None, return_lse=False, precision=None):
    if precision != "fp8":
        return "changes the precision, which is done only where asked for: precision='fp8'"
    if dtype_of(q) != torch.bfloat16:
        return f"q, k and v must be bfloat16, got {dtype_of(q)}"
    return kernel_refuses(q, k, v, causal, window, scale, return_lse, precision)


def runner(op: Fused, tiled: bool = True):
    """tiled: the kernel is told its tile."""
    def run(q, k, v, causal=None, window=None, scale=None, return_lse=False, precision=None, tile=""):
        q, k, v = (t.to(dtype_of(q)) for t in (q, k, v))
        offset, left, right = span(causal, window, q.shape[2], k.shape[2])
        left, right = (-1 if limit is None else limit for limit in (left, right))
        o, lse = op(q, k, v, float(scale_of(scale, q)), offset, left, right, *((tile,) if tiled else ()))
        return (o, lse * LN2) if return_lse else o  # from base 2, in which the kernels keep it

    return run


LIMITS = (
    "dtypes other than fp32, fp16, bf16", "head sizes under 16 or over 256", "a scale of 0 or less", "one key to a query",
    "lengths of 2^30 and more",
)
IMPLS = {
    "triton": Impl(
        runner(TWO_PASS), refuses, needs="triton", tiles=tiles, limits=("precision='fp8'", *LIMITS),
        spills="float32, whose products take three times the operands; head size 256; and a few bytes where a tile is held to "
        "168 registers, or the Gluon backward has a window",
    ),
    "triton_fused_bwd": Impl(
        runner(ONE_PASS), refuses, needs="triton", tiles=fused_tiles, words="whet's own kernel, its backward in one pass",
        limits=("precision='fp8'", *LIMITS),
        spills="five products share one program's registers: at head sizes over 64, in float32, "
        "and where a tile is held to 168; a few bytes outside its loop in Gluon",
    ),
    "triton_cudnn_bwd": Impl(
        runner(CUDNNS), hybrid_refuses, needs="cudnn", capability=(8, 0),
        words="whet's own kernel forward, cuDNN's backward",
        limits=(
            "precision='fp8'", "dtypes other than fp16, bf16", f"head sizes over {hybrid.MAX_D} or no multiple of 8",
            "empty inputs", "a single query", "a window, or bottom-right where the lengths differ", *LIMITS[1:],
        ),
    ),
    "triton_float32": Impl(
        runner(IN_HALVES, tiled=False), float32_refuses, needs="triton",
        words="whet's own kernel, each float32 value split into two float16",
        limits=("precision='fp8'", "dtypes other than fp32", f"head sizes over {float32.MAX_D}", *LIMITS[2:]),
        spills="at head sizes over 64 the sum of dk beside a tile's products takes a few bytes more than there are",
    ),
    "triton_fp8": Impl(
        runner(IN_FP8), fp8_refuses, needs="triton", capability=(8, 9),
        implies=dict(precision="fp8"), tiles=fp8_tiles, words="whet's own kernel in FP8",
        limits=("any precision but 'fp8'", "dtypes other than bf16", *LIMITS[1:]),
    ),
}
