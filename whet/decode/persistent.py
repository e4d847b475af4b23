"""Greedy tokens of one sequence in one persistent kernel (cuda/*.cu): no launch, no grid barrier between its stages.

It takes a model of the family in bfloat16, its weights so or in int8 or int4, whose sizes fit, on a GPU with bulk copies
(sm_90 and later); model_refused() says why another does not fit, and the runner's graph decodes it. It is compiled once for
each model's sizes, by NVRTC, in a thread of its own while the prompt is read.
"""

import concurrent.futures
import ctypes
import functools
import logging
from collections.abc import Callable
from pathlib import Path

import torch

from whet.decode import nvrtc
from whet.decode.quantize import weights
from whet.models.qwen3 import Qwen3, Qwen3Config
from whet.ops._weights import quant_of
from whet.ops.attention.common import LOG2E

PARTS = ("sizes", "device", "stream", "products", "attention", "decode")  # of the source, one after the other
LEAST = 64  # old keys up to which one block reads a head alone; at 128 keys 192 and 256 take longer
TRUSTED = ((9, 0),)  # compute capabilities on which auto takes it: those on which it was verified, its bits repeated and timed
PATIENCE = 1 << 22  # polls: seconds, where a wait is of microseconds
BITS = {None: 16, "int8": 8, "int4": 4}  # of a weight
POINTERS = (
    "layers", "embed", "norm", "head", "head_scale", "cosine", "sine", "cache_k", "cache_v", "mailbox", "token", "position",
    "out_tokens", "logit", "logits", "epoch", "failed",
)
log = logging.getLogger(__name__)


def source() -> str:
    return "\n".join(Path(__file__).with_name("cuda").joinpath(f"{part}.cu").read_text() for part in PARTS)


class Args(ctypes.Structure):
    """sizes.cu's Args."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in POINTERS), ("stride_l", ctypes.c_longlong), ("stride_h", ctypes.c_longlong),
        ("steps", ctypes.c_int), ("least", ctypes.c_int), ("patience", ctypes.c_int),
        ("scale", ctypes.c_float), ("eps", ctypes.c_float),
    ]


def sizes_of(model: Qwen3, blocks: int, shared: int) -> dict[str, int]:
    c = model.c
    return dict(
        P=blocks, L=c.layers, K=c.hidden, H=c.heads, KV=c.kv_heads, F=c.ffn, V=c.vocab, QK_NORM=int(c.qk_norm),
        QKV_BIAS=int(c.qkv_bias), BITS=BITS[quant_of(model.head.data)], LIMIT=shared,
    )


def blocks_for(model: Qwen3, processors: int) -> int:
    """As few as leave the residual's rows of a block as they are: more would wait for those that have one row more."""
    return -(-model.c.hidden // -(-model.c.hidden // processors))


def model_refused(model: Qwen3) -> str | None:
    """Why a model cannot be decoded so, whatever the GPU; None where it can."""
    c = model.c
    if model.embed.dtype != torch.bfloat16:
        return f"the dtype must be bfloat16, got {str(model.embed.dtype).removeprefix('torch.')}"
    stored = [w for _, w in weights(model)]
    quants = {quant_of(w.data) for w in stored}
    if len(quants) > 1 or not quants <= BITS.keys():
        return f"weights must all be bfloat16, int8 or int4, got {' and '.join(sorted(q or 'bfloat16' for q in quants))}"
    if any(not t.is_contiguous() or t.data_ptr() % 16 for w in stored for t in (w.data, w.scale) if t is not None):
        return "weights must be contiguous and begin at a multiple of 16 bytes"
    if c.window is not None or c.o_bias:
        return "a sliding window or a bias of the output projection is not built in"
    if c.head_dim != 128 or c.heads not in (c.kv_heads, 2 * c.kv_heads, 4 * c.kv_heads):
        return f"heads must be of 128, and 1, 2 or 4 to a key head, got {c.heads} of {c.head_dim} on {c.kv_heads}"
    if wrong := [f"{n} {v}" for n, v in (("hidden", c.hidden), ("heads", c.heads * 128), ("ffn", c.ffn)) if v % 1024]:
        return f"hidden, heads * head_dim and ffn must be multiples of 1024, got {wrong[0]}"
    return None


def layer_table(model: Qwen3) -> torch.Tensor:
    """(layers, 13) pointers, as sizes.cu's Layer has them."""
    def row(y) -> list[torch.Tensor | None]:
        matrices = [t for w in (y.qkv, y.o, y.gate_up, y.down) for t in (w.data, w.scale)]
        return [y.norm1, y.qkv_bias, y.q_norm, y.k_norm, y.norm2, *matrices]

    return torch.tensor([[0 if t is None else t.data_ptr() for t in row(y)] for y in model.layers])


def arguments(model: Qwen3, tensors: dict[str, torch.Tensor], steps: int, least: int, patience: int) -> Args:
    """tensors: those named in POINTERS that are no weights, logits where all are wanted; caches (layers, KV, S, D)."""
    c, k = model.c, tensors["cache_k"]
    given = tensors | dict(
        embed=model.embed, norm=model.norm, head=model.head.data, head_scale=model.head.scale, cosine=model.cos, sine=model.sin,
    )
    pointers = {name: t.data_ptr() if (t := given.get(name)) is not None else None for name in POINTERS}
    return Args(
        **pointers, stride_l=k.stride(0), stride_h=k.stride(1), steps=steps, least=least, patience=patience,
        scale=c.head_dim**-0.5 * LOG2E, eps=c.eps,
    )


class Persistent:
    """The kernel for one model on its device, with the mailbox through which its blocks exchange results.

    failed   1 once a block has given up waiting for another; what was chosen since means nothing
    """

    def __init__(self, model: Qwen3):
        self.model, device = model, model.embed.device
        if why := device_refused(device) or model_refused(model):
            raise ValueError(f"the persistent kernel does not fit: {why}")
        with torch.cuda.device(device):
            props = torch.cuda.get_device_properties(device)
            self.blocks = blocks_for(model, props.multi_processor_count)
            sizes = sizes_of(model, self.blocks, nvrtc.max_shared_memory(device))
            self.code = compiler().submit(nvrtc.cached, source(), f"sm_{props.major}{props.minor}a", sizes)
            self.kernel: nvrtc.LoadedKernel | None = None
            self.layers = layer_table(model).to(device)
            self.epoch, self.failed = (torch.zeros(1, dtype=torch.int32, device=device) for _ in range(2))

    def load(self) -> None:
        """Waits for the compiler, the first time."""
        if self.kernel is not None:
            return
        device = self.model.embed.device
        with torch.cuda.device(device):
            kernel = nvrtc.LoadedKernel(self.code.result(), "decode")
            self.threads, self.shared = kernel.constant("BLOCK_THREADS"), kernel.constant("SHARED_BYTES")
            kernel.reserve(self.shared)
            self.mailbox = torch.zeros(kernel.constant("MAILBOX_WORDS"), dtype=torch.int64, device=device)
        self.kernel = kernel

    def steps(self, n: int, cache: list[torch.Tensor], token, position, out_tokens, logit, logits=None) -> None:
        """n tokens of one sequence, enqueued. cache: keys and values (layers, KV, S, D); position and token move on by n."""
        if n < 1:
            raise ValueError(f"the persistent kernel decodes at least one token, got {n}")
        self.load()
        tensors = dict(
            layers=self.layers, cache_k=cache[0], cache_v=cache[1], mailbox=self.mailbox, token=token, position=position,
            out_tokens=out_tokens, logit=logit, epoch=self.epoch, failed=self.failed,
        )
        args = arguments(self.model, tensors if logits is None else tensors | {"logits": logits}, n, LEAST, PATIENCE)
        assert self.kernel is not None
        self.kernel.launch(self.blocks, self.threads, self.shared, args)


def device_refused(device: torch.device) -> str | None:
    """Why a GPU cannot run it; None where it can."""
    if device.type != "cuda" or torch.version.hip:
        return f"it is for CUDA GPUs, got {device}"
    major, minor = torch.cuda.get_device_capability(device)
    return None if major >= 9 else f"it needs bulk copies, sm_90 or later, got sm_{major}{minor}"


@functools.cache
def compiler() -> concurrent.futures.Executor:
    return concurrent.futures.ThreadPoolExecutor(1, "whet-nvrtc")


def wanted(model: Qwen3, path: str) -> bool:
    """Whether it decodes this model, if it compiles and is right. auto: on the GPUs where it is TRUSTED."""
    device = model.embed.device
    if path == "graph" or device_refused(device) or model_refused(model):
        return False
    return path == "persistent" or torch.cuda.get_device_capability(device) in TRUSTED


def refuse_early(c: Qwen3Config | None, device: torch.device, dtype: torch.dtype) -> None:
    """ValueError where the kernel cannot be had, by what is known before a weight is read. c: None where that is not known."""
    why = device_refused(device) or (model_refused(Qwen3(c, device="meta", dtype=dtype)) if c is not None else None)
    if why:
        raise ValueError(f"path='persistent' does not fit: {why}; use path='auto' or 'graph'")


def kernel_for(model: Qwen3, path: str) -> Persistent | None:
    """The kernel where it is wanted and fits. auto: on the GPUs where it is TRUSTED."""
    if path == "persistent":
        return Persistent(model)
    return instead_of_graph(lambda: Persistent(model)) if wanted(model, path) else None


def instead_of_graph(made: Callable[[], Persistent]) -> Persistent | None:
    """What auto does where the kernel cannot be made or loaded: it says why, and the graph decodes."""
    try:
        return made()
    except (ValueError, RuntimeError) as e:
        log.warning("one sequence is decoded by a graph: %s", e)
        return None


def loaded(kernel: Persistent | None, path: str) -> Persistent | None:
    """The kernel, ready to be launched; for auto None where it does not compile or load."""
    if kernel is None or kernel.kernel is not None:
        return kernel

    def load() -> Persistent:
        kernel.load()
        return kernel

    return instead_of_graph(load) if path == "auto" else load()
