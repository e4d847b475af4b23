"""Models that recognisers are tried on: families of Hugging Face with their batches, and plain ones as a user writes them."""

import importlib
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn as nn
from torch.nn import functional as F

SMALL = dict(vocab_size=96, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=64)
PLAIN = {k: v for k, v in SMALL.items() if k != "num_key_value_heads"}
NO_DROPOUT = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
T5 = dict(vocab_size=96, d_model=64, d_kv=16, d_ff=160, num_layers=2, num_heads=4, dropout_rate=0.0, decoder_start_token_id=0)
VIT = dict(hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4, image_size=32, patch_size=8,
           num_labels=5, **NO_DROPOUT)
WHISPER = dict(
    vocab_size=96, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
    encoder_ffn_dim=160, decoder_ffn_dim=160, num_mel_bins=8, max_source_positions=20, max_target_positions=32, dropout=0.0,
    pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1)
DECODER = dict(causal_mask=1, norms=3, residual_norm=2, gated_mlp=2, rotary=2, attention=2, lm_head=1)
QK_NORMED = {k: v for k, v in DECODER.items() if k != "rotary"} | dict(qk_norm_rotary=2)



def unmasked(counts: dict) -> dict:
    """The same for a batch that comes with a mask or with positions."""
    return {k: v for k, v in counts.items() if k != "causal_mask"}


GIVEN_MASK = unmasked(DECODER)
NOT_SEEN = {k: v for k, v in GIVEN_MASK.items() if k != "attention"}
GAPS = "a mask in which a query sees more than one run of keys"
NO_SWIGLU = ("computes no SwiGLU", "called with more than one tensor")  # attention's linears have the sizes of an MLP's


def batch(rows: int = 2, length: int = 24) -> dict:
    ids = torch.randint(3, 96, (rows, length), generator=torch.Generator().manual_seed(1))
    return dict(input_ids=ids, labels=ids)


def padded() -> dict:
    """The second row ends after 18 tokens."""
    data, mask = batch(), torch.ones(2, 24, dtype=torch.long)
    mask[1, 18:] = 0
    return dict(input_ids=data["input_ids"], labels=data["labels"].masked_fill(mask == 0, -100), attention_mask=mask)


def left_padded() -> dict:
    """The second row begins after 7 tokens, which see nothing."""
    data, mask = batch(), torch.ones(2, 24, dtype=torch.long)
    mask[1, :7] = 0
    return dict(input_ids=data["input_ids"], labels=data["labels"].masked_fill(mask == 0, -100), attention_mask=mask)


def all_ones() -> dict:
    return batch() | dict(attention_mask=torch.ones(2, 24, dtype=torch.long))


def with_gaps() -> dict:
    """A token in the middle of the second row is masked: later ones see keys on both sides of it."""
    data, mask = batch(), torch.ones(2, 24, dtype=torch.long)
    mask[1, 9] = 0
    return data | dict(attention_mask=mask)


def packed() -> dict:
    """Two documents in each row, told apart by positions that start again."""
    return batch() | dict(position_ids=torch.cat([torch.arange(14), torch.arange(10)]).expand(2, -1).contiguous())


def shorter_labels() -> dict:
    data = batch()
    return dict(input_ids=data["input_ids"], labels=data["labels"][:, :12].contiguous())


def images() -> dict:
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(2))
    return dict(pixel_values=pixels, labels=torch.tensor([1, 3]))


def sound() -> dict:
    features = torch.randn(2, 8, 40, generator=torch.Generator().manual_seed(2))
    return dict(input_features=features, labels=batch()["labels"][:, :12])


class Family(NamedTuple):
    """A class of Transformers, its config, what is replaced of each kind, the reasons of what is left, and its batch."""

    model: str
    config: str
    options: dict
    counts: dict[str, int]
    left: dict[str, str | tuple[str, ...]] = {}
    batch: Callable[[], dict] = batch


FAMILIES = {
    "Llama": Family("LlamaForCausalLM", "LlamaConfig", SMALL, DECODER),
    "Llama, padded": Family("LlamaForCausalLM", "LlamaConfig", SMALL, GIVEN_MASK, {}, padded),
    "Llama, padded left": Family("LlamaForCausalLM", "LlamaConfig", SMALL, GIVEN_MASK, {}, left_padded),
    "Llama, packed": Family("LlamaForCausalLM", "LlamaConfig", SMALL, GIVEN_MASK, {}, packed),
    "Llama, masked in the middle": Family("LlamaForCausalLM", "LlamaConfig", SMALL, NOT_SEEN, dict(attention=GAPS), with_gaps),
    "Qwen2": Family("Qwen2ForCausalLM", "Qwen2Config", SMALL, DECODER),
    "Qwen2, padded": Family("Qwen2ForCausalLM", "Qwen2Config", SMALL, GIVEN_MASK, {}, padded),
    "Qwen3": Family("Qwen3ForCausalLM", "Qwen3Config", SMALL | {"head_dim": 16}, QK_NORMED),
    "Qwen3, padded left": Family(
        "Qwen3ForCausalLM", "Qwen3Config", SMALL | {"head_dim": 16}, unmasked(QK_NORMED), {}, left_padded),
    "Qwen3, packed": Family("Qwen3ForCausalLM", "Qwen3Config", SMALL | {"head_dim": 16}, unmasked(QK_NORMED), {}, packed),
    "Mistral, a window": Family("MistralForCausalLM", "MistralConfig", SMALL | {"sliding_window": 8}, GIVEN_MASK, {}, padded),
    "Mistral": Family("MistralForCausalLM", "MistralConfig", SMALL | {"sliding_window": None}, DECODER),
    "Gemma2": Family(
        "Gemma2ForCausalLM", "Gemma2Config", SMALL | {"head_dim": 16, "attn_implementation": "eager"},
        dict(norms=7, residual_norm=2, gated_mlp=2, rotary=2),
        dict(attention="its attention is set to 'eager'", lm_head="does more with the logits")),
    "Gemma3": Family(
        "Gemma3ForCausalLM", "Gemma3TextConfig", SMALL | {"head_dim": 16},
        QK_NORMED | dict(norms=7)),
    "Phi3": Family("Phi3ForCausalLM", "Phi3Config", SMALL | {"pad_token_id": 0}, DECODER, dict(gated_mlp=NO_SWIGLU)),
    "GPT2": Family(
        "GPT2LMHeadModel", "GPT2Config",
        dict(vocab_size=96, n_embd=64, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0),
        dict(causal_mask=1, norms=3, residual_norm=2, activations=2, attention=2, lm_head=1)),
    "GPTNeoX": Family(
        "GPTNeoXForCausalLM", "GPTNeoXConfig", PLAIN,
        dict(causal_mask=1, norms=5, activations=2, rotary=2, attention=2, lm_head=1)),
    "GPTNeoX, MLP after attention": Family(
        "GPTNeoXForCausalLM", "GPTNeoXConfig", PLAIN | {"use_parallel_residual": False},
        dict(causal_mask=1, norms=3, residual_norm=2, activations=2, rotary=2, attention=2, lm_head=1)),
    "Phi": Family(
        "PhiForCausalLM", "PhiConfig", PLAIN | {"partial_rotary_factor": 0.5},
        dict(causal_mask=1, norms=3, activations=2, rotary=2, attention=2, lm_head=1)),
    "GPTJ": Family(
        "GPTJForCausalLM", "GPTJConfig",
        dict(vocab_size=96, n_embd=64, n_layer=2, n_head=4, n_positions=64, rotary_dim=8, resid_pdrop=0, embd_pdrop=0,
             attn_pdrop=0),
        dict(norms=3, activations=2, lm_head=1), dict(rotary="takes (tensor, sin, cos)")),
    "Olmo2": Family("Olmo2ForCausalLM", "Olmo2Config", SMALL,
        dict(causal_mask=1, norms=9, gated_mlp=2, rotary=2, attention=2, lm_head=1)),
    "Bert": Family(
        "BertForMaskedLM", "BertConfig", PLAIN | NO_DROPOUT,
        dict(full_mask=1, norms=2, residual_norm=4, activations=3, attention=2, own_loss=1),
        dict(gated_mlp=NO_SWIGLU)),
    "ModernBert": Family(
        "ModernBertForMaskedLM", "ModernBertConfig", PLAIN | {"pad_token_id": 0},
        dict(full_mask=1, norms=4, residual_norm=2, activations=1, gated_mlp=2, rotary=2, attention=2, own_loss=1)),
    "T5": Family(
        "T5ForConditionalGeneration", "T5Config", T5, dict(full_mask=2, norms=12, own_loss=1),
        dict(attention="a position bias"), shorter_labels),
    "T5, gated": Family(
        "T5ForConditionalGeneration", "T5Config", T5 | {"feed_forward_proj": "gated-gelu"},
        dict(full_mask=2, norms=12, gated_mlp=4, own_loss=1),
        dict(attention="a position bias"), shorter_labels),
    "ViT": Family(
        "ViTForImageClassification", "ViTConfig", VIT,
        dict(full_mask=1, norms=3, residual_norm=2, activations=2, attention=2), {}, images),
    "Whisper": Family(
        "WhisperForConditionalGeneration", "WhisperConfig", WHISPER,
        dict(norms=6, residual_norm=4, activations=4, attention=6, own_loss=1), {}, sound),
}


def built(name: str, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    transformers, family = importlib.import_module("transformers"), FAMILIES[name]
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    model = getattr(transformers, family.model)(getattr(transformers, family.config)(**family.options))
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        nn.init.normal_(model.get_output_embeddings().bias)  # made as zeros
    return model.to(dtype).train()


def biased(model: nn.Module) -> list[str]:
    """Paths of the linear layers that biased_linear is for, in training: each is a site of its own, or covered by another."""
    linears = [(path, m) for path, m in model.named_modules() if type(m) is nn.Linear or type(m).__name__ == "Conv1D"]
    return [path for path, m in linears if m.bias is not None and min(m.weight.shape) >= 64]


def masks_seen(monkeypatch) -> list:
    """From now on, the masks that SDPA is called with."""
    masks, real = [], F.scaled_dot_product_attention

    def noting(*args, attn_mask=None, **options):
        masks.append(attn_mask)
        return real(*args, attn_mask=attn_mask, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", noting)
    return masks


def state(model: nn.Module) -> dict:
    """All that could be left changed: attributes of every module and config, modes, hooks."""
    kept = ("_parameters", "_buffers", "_modules")
    found = {
        path: {k: id(v) if callable(v) else repr(v) for k, v in vars(m).items() if k not in kept}
        for path, m in model.named_modules()
    }
    configs = {path: m.config for path, m in model.named_modules() if hasattr(m, "config")}
    return found | {f"attention of {path}": vars(c).get("_attn_implementation_internal") for path, c in configs.items()}


class CausalSelfAttention(nn.Module):
    def __init__(self, n_embd: int = 64, n_head: int = 4, dropout: float = 0.0):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.n_head, self.n_embd, self.dropout = n_head, n_embd, dropout

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        y = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=None, dropout_p=self.dropout if self.training else 0, is_causal=True
        )
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class SlowAttention(nn.Module):
    """nanoGPT's slow path: the scores are a tensor. window: of the mask alone, as in a local attention."""

    def __init__(self, n_embd: int = 64, n_head: int = 4, block: int = 160, dropout: float = 0.0, window: int = 1000):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.attn_dropout, self.resid_dropout = nn.Dropout(dropout), nn.Dropout(dropout)
        self.n_head, self.n_embd = n_head, n_embd
        mask = torch.tril(torch.ones(block, block)).triu(1 - window)
        self.register_buffer("bias", mask.view(1, 1, block, block))

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        att = self.attn_dropout(F.softmax(att, dim=-1))
        return self.resid_dropout(self.c_proj((att @ v).transpose(1, 2).contiguous().view(B, T, C)))


class GPTBlock(nn.Module):
    def __init__(self, n_embd: int = 64, attention: type = CausalSelfAttention):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.attn = attention(n_embd)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """As nanoGPT: tied weights, learned positions, (logits, loss)."""

    def __init__(self, vocab: int = 96, block: int = 64, n_embd: int = 64, attention: type = CausalSelfAttention):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, n_embd), nn.Embedding(block, n_embd)
        self.h = nn.ModuleList(GPTBlock(n_embd, attention) for _ in range(2))
        self.ln_f, self.lm_head = nn.LayerNorm(n_embd), nn.Linear(n_embd, vocab, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, targets=None):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), dtype=torch.long, device=idx.device))
        for block in self.h:
            x = block(x)
        x = self.ln_f(x)
        if targets is not None:
            logits = self.lm_head(x)
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        else:
            logits = self.lm_head(x[:, [-1], :])
            loss = None
        return logits, loss


class OwnRMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float = 1e-6):
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)).type_as(x) * self.weight


class OwnMLP(nn.Module):
    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.w1, self.w2, self.w3 = (nn.Linear(*s, bias=False) for s in ((dim, hidden), (hidden, dim), (dim, hidden)))

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Grouped(nn.Module):
    """Grouped-query attention whose call of SDPA is in a method beside forward."""

    def __init__(self, dim: int = 64):
        super().__init__()
        self.q, self.kv, self.o = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim)

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True)

    def forward(self, x):
        q = self.q(x).unflatten(-1, (4, 16)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (4, 16)).transpose(1, 2).chunk(2, 1)
        return self.o(self.attend(q, k, v).transpose(1, 2).flatten(2))


class Mixed(nn.Module):
    """Hand-written parts, and a tensor as the result."""

    def __init__(self, dim: int = 64):
        super().__init__()
        self.one, self.two, self.last = OwnRMSNorm(dim), OwnRMSNorm(dim), nn.RMSNorm(dim)
        self.attn, self.mlp = Grouped(dim), OwnMLP(dim, 160)

    def forward(self, x):
        x = x + self.attn(self.one(x))
        return self.last(x + self.mlp(self.two(x)))


class Encoder(nn.Module):
    """torch's own layers, and a classifier."""

    def __init__(self, norm_first: bool):
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 160, dropout=0.0, activation="gelu", batch_first=True, norm_first=norm_first)
        self.layers, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(64, 5)

    def forward(self, x):
        return self.head(self.layers(x).mean(1))
