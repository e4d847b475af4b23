"""Attention as PyTorch offers it: the formula, SDPA and each of its backends, FlexAttention."""

import contextlib
import functools
import re
import warnings

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from whet.compiled import compiled, refuse_fake_tensors
from whet.op import Impl, Rank
from whet.ops.attention.meaning import NO_FP8, any_blind, reference, scale_of, seen, span

SCORES_LIMIT, MASK_LIMIT = 16 << 30, 4 << 30  # bytes
NO_GPU = "needs tensors on the GPU; impl='torch' runs anywhere"


def formula_refuses(q, k, v, causal=None, window=None, scale=None, return_lse=False, precision=None):
    """The scores are kept for the backward, beside their softmax: past the limit they fit no GPU."""
    size = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] * max(4, q.element_size())
    if size > SCORES_LIMIT:
        return f"the scores must take no more than {SCORES_LIMIT >> 30} GiB, got {size / 2**30:.1f} GiB for q {tuple(q.shape)}"
    return None


def sdpa_options(q, k, causal, window):
    """(mask, is_causal) that say a span to SDPA: its own word where it has one, else a boolean mask on q's device."""
    Lq, Lk = q.shape[2], k.shape[2]
    offset, left, right = span(causal, window, Lq, Lk)
    if left is None and right is None:
        return None, False
    if left is None and offset == 0:
        return None, True
    return seen(offset, left, right, Lq, Lk, q.device), False


def sdpa_refuses(q, k, v, causal=None, window=None, scale=None, return_lse=False, precision=None):
    Lq, Lk = q.shape[2], k.shape[2]
    if precision is not None:
        return NO_FP8
    if scale is not None and scale <= 0:
        return f"scale must be positive: with a causal mask SDPA gives NaN for others, got {scale}"
    if return_lse:
        return "return_lse must be False: SDPA gives no logarithm of the sum, got True"
    if not q.numel() or not Lk:
        return f"q, k and v must not be empty, got {tuple(q.shape)} and {tuple(k.shape)}"
    offset, left, right = span(causal, window, Lq, Lk)
    if any_blind(offset, left, right, Lq, Lk):
        return f"every query must see a key: of {Lq}, some see none of {Lk} keys with causal={causal!r}, window={window!r}"
    if (left is not None or offset) and Lq * Lk > MASK_LIMIT:
        return f"the mask must take no more than {MASK_LIMIT >> 30} GiB, got {Lq} x {Lk} bytes"
    return None


def run_torch(q, k, v, causal=None, window=None, scale=None, return_lse=False, precision=None):
    mask, is_causal = sdpa_options(q, k, causal, window)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def sdpa(backend: SDPBackend, name: str, able: str, *limits: str, known_inaccurate: str = "", caveat: str = "") -> Impl:
    """SDPA held to one backend.

    able  the function of torch.backends.cuda that says whether the backend takes a call; what it warns of is the reason
    """

    def run(q, k, v, causal=None, window=None, scale=None, return_lse=False, precision=None):
        with sdpa_kernel(backend):
            return run_torch(q, k, v, causal, window, scale)

    def refuses(q, k, v, causal=None, window=None, scale=None, return_lse=False, precision=None):
        if reason := sdpa_refuses(q, k, v, causal, window, scale, return_lse, precision):
            return reason
        if not q.is_cuda:
            return NO_GPU
        if torch.compiler.is_compiling():  # torch asks the backend again when the graph runs
            return None
        with sdpa_kernel(backend):  # so that a backend switched off elsewhere is asked as it will run
            return torchs_reason(able, q, k, v, causal, window)

    words = f"SDPA held to its {name} backend"
    return Impl(run, refuses, limits=(*SDPA_LIMITS, *limits), known_inaccurate=known_inaccurate, caveat=caveat, words=words)


def torchs_reason(able: str, q, k, v, causal, window):
    """None, or why torch says that a backend cannot take this call. Asked as for training wherever gradients are on."""
    offset, left, right = span(causal, window, q.shape[2], k.shape[2])
    mask = None
    if left is not None or offset:  # a stand-in of the mask's shape: none of its elements is looked at
        mask = torch.ones(1, k.shape[2], dtype=torch.bool, device=q.device).expand(q.shape[2], k.shape[2])
    q, k, v = (t.detach().requires_grad_(torch.is_grad_enabled()) for t in (q, k, v))
    is_causal = mask is None and right is not None
    params = torch.backends.cuda.SDPAParams(q, k, v, mask, 0.0, is_causal, q.shape[1] != k.shape[1])
    with warnings.catch_warnings(record=True) as caught, warning_each_time():
        warnings.simplefilter("always")
        if getattr(torch.backends.cuda, able)(params, debug=True):
            return None
        with contextlib.suppress(RuntimeError):  # asked, it writes its reasons to stderr; called, it fails and warns of them
            F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, enable_gqa=q.shape[1] != k.shape[1])
    said = [cleaned(str(w.message)) for w in caught]
    reasons = [text for text in said if text and not re.search(r"not used because:$|has been runtime disabled", text)]
    return reasons[0] if reasons else f"torch.backends.cuda.{able} says no, without a reason"


@contextlib.contextmanager
def warning_each_time():
    """Some of torch's reasons are given once a process: the second time there would be none."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        yield
    finally:
        torch.set_warn_always(before)


def cleaned(text: str) -> str:
    """A warning of torch's C++ code less where it came from: one line, no full stop."""
    return " ".join(re.sub(r"\(Triggered internally at .*?\)", "", text, flags=re.DOTALL).split()).rstrip(".")


def flex_refuses(q, k, v, causal=None, window=None, scale=None, return_lse=False, precision=None):
    Lq, Lk = q.shape[2], k.shape[2]
    if precision is not None:
        return NO_FP8
    if not q.is_cuda:
        return NO_GPU
    if q.dtype == torch.float64 or q.shape[3] < 16:
        return f"q must be float32, float16 or bfloat16 with a head size of at least 16, got {q.dtype} and {q.shape[3]}"
    if not q.numel() or not Lk:
        return f"q, k and v must not be empty, got {tuple(q.shape)} and {tuple(k.shape)}"
    if Lq < 128:
        return f"q must have 128 rows or more: for fewer it takes a kernel that not every group of heads has, got {Lq}"
    if span(causal, window, Lq, Lk)[1:] != (None, None) and Lq * Lk > MASK_LIMIT:
        return f"the mask that its block mask is made of must take no more than {MASK_LIMIT >> 30} GiB, got {Lq} x {Lk} bytes"
    return None


def run_flex(q, k, v, causal=None, window=None, scale=None, return_lse=False, precision=None):
    Lq, Lk = q.shape[2], k.shape[2]
    offset, left, right = span(causal, window, Lq, Lk)
    mask = None
    if not torch.compiler.is_compiling():
        refuse_fake_tensors("attention")  # before a mask is kept that is one
    if left is not None or right is not None:
        make = make_block_mask if torch.compiler.is_compiling() else block_mask
        mask = make(offset, left, right, Lq, Lk, q.device)
    return flex(q, k, v, mask, scale_of(scale, q), return_lse)


def make_block_mask(offset, left, right, Lq, Lk, device):
    from torch.nn.attention.flex_attention import create_block_mask  # imports dynamo: a second that others need not wait

    def sees(b, h, i, j):
        ahead = j - i - offset  # a span limited at all is limited to the right
        return ahead <= right if left is None else (ahead >= -left) & (ahead <= right)

    with torch.inference_mode(False):  # it is kept, and a later call may train
        return create_block_mask(sees, None, None, Lq, Lk, device=device)


block_mask = functools.lru_cache(maxsize=64)(make_block_mask)


def fused_flex(q, k, v, mask, scale, return_lse):
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    group = q.shape[1] != k.shape[1]
    if not return_lse:
        return flex_attention(q, k, v, block_mask=mask, scale=scale, enable_gqa=group)
    o, aux = flex_attention(q, k, v, block_mask=mask, scale=scale, enable_gqa=group, return_aux=AuxRequest(lse=True))
    return o, aux.lse


flex = compiled(fused_flex)

FP8_LIMIT, BIG_MASK = "precision='fp8'", f"a mask of more than {MASK_LIMIT >> 30} GiB"
SDPA_LIMITS = (
    FP8_LIMIT, "return_lse", "a scale of 0 or less", "empty inputs", "queries that see no key",
    f"{BIG_MASK} (any window, or bottom-right)",
)
SCORES_LIMITS = (f"scores of more than {SCORES_LIMIT >> 30} GiB",)
ON_GPU = "tensors that are not on the GPU"
TF32 = "float32 on a GPU: the memory-efficient kernel takes each product as three TF32 ones"
PLANS = (
    "its gradients where cuDNN serves it. torch (2.11) keeps cuDNN's plan for a backward by the sizes and strides of q, k and "
    "v alone, and reads the upstream gradient by the strides that it had in the first call of such a size: of another layout "
    "later on (a slice, a sum over the batch), the gradients are silently wrong"
)

STOCK = {
    "eager": Impl(reference, formula_refuses, limits=SCORES_LIMITS),
    "compile": Impl(compiled(reference), formula_refuses, limits=SCORES_LIMITS),
    "torch": Impl(run_torch, sdpa_refuses, limits=SDPA_LIMITS, known_inaccurate=TF32, caveat=PLANS),
    "sdpa_flash": sdpa(
        SDPBackend.FLASH_ATTENTION, "FlashAttention", "can_use_flash_attention", ON_GPU,
        "what torch says FlashAttention cannot do: masks, fp32",
    ),
    "sdpa_efficient": sdpa(
        SDPBackend.EFFICIENT_ATTENTION, "memory-efficient", "can_use_efficient_attention", ON_GPU,
        "what torch says its memory-efficient kernel cannot do: grouped heads, unaligned head sizes", known_inaccurate=TF32,
    ),
    "sdpa_cudnn": sdpa(
        SDPBackend.CUDNN_ATTENTION, "cuDNN", "can_use_cudnn_attention", ON_GPU,
        "what torch says cuDNN cannot do: fp32, wide heads", caveat=PLANS,
    ),
    "flex": Impl(
        run_flex, flex_refuses, rank=Rank.COMPILED, words="compiled FlexAttention",
        limits=(FP8_LIMIT, ON_GPU, "float64", "head sizes under 16", "empty inputs", "under 128 queries", BIG_MASK),
    ),
}
