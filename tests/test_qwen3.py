"""The Qwen3 family: as Transformers computes it in every variety, in chunks as at once, and wrong configs refused by name."""

import copy
import math
from dataclasses import replace

import pytest
import torch

from whet import models
from whet.choices import Choices
from whet.decode.load import open_model
from whet.models import Recipe
from whet.models._rotary import frequencies
from whet.models.qwen3 import FAMILIES, MODEL, SIZES, VARIANTS, Qwen3, Qwen3Config, random_weights
from whet.subjects import oracle
from whet.verify import judge

RECIPE = Recipe(batch=2, seq_len=12)
SMALL = replace(
    SIZES["tiny"], vocab=99, hidden=64, heads=4, kv_heads=2, head_dim=32, ffn=96, max_positions=128
)
SHAPE = dict(
    vocab_size=99, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    intermediate_size=96, max_position_embeddings=128, tie_word_embeddings=False, attn_implementation="sdpa",
)
LLAMA3 = dict(
    rope_type="llama3", rope_theta=500.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
YARN = dict(rope_type="yarn", rope_theta=500.0, factor=4.0, original_max_position_embeddings=32)
VARIETIES = {
    "qwen3": ("Qwen3", dict(tie_word_embeddings=True)),
    "qwen3-untied-biased": ("Qwen3", dict(attention_bias=True)),
    "qwen2-qkv-bias": ("Qwen2", dict(head_dim=None)),
    "llama": ("Llama", dict()),
    "llama-llama3": ("Llama", dict(rope_parameters=LLAMA3, tie_word_embeddings=True)),
    "llama-yarn": ("Llama", dict(rope_parameters=YARN, attention_bias=True)),
    "llama-linear": ("Llama", dict(rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=2.0))),
    "mistral-window": ("Mistral", dict(sliding_window=5)),
    "mistral": ("Mistral", dict(sliding_window=None, num_key_value_heads=4)),
}
varieties = pytest.mark.parametrize("variety", VARIETIES)


pytestmark = pytest.mark.usefixtures("one_thread")


@torch.no_grad()
def transformers_model(variety: str):
    """A small random model, every parameter away from its start, and exact in bfloat16."""
    transformers = pytest.importorskip("transformers")
    family, options = VARIETIES[variety]
    given = SHAPE | options
    if given["head_dim"] is None:
        del given["head_dim"]
    config = getattr(transformers, f"{family}Config")(**given)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for p in model.parameters():
        new = torch.randn(p.shape) * p.shape[-1] ** -0.5 if p.dim() == 2 else torch.rand(p.shape) + 0.5
        p.copy_(new.bfloat16())
    return model


@torch.no_grad()
def exact(model, tokens):
    """Its logits in float64 throughout: Transformers computes norms and angles in float32 whatever the dtype."""
    model = copy.deepcopy(model).double()

    def norm(self, x):
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)

    def angles(self, x, position_ids):
        angle = position_ids[..., None].double() * self.inv_freq.double()
        both = torch.cat([angle, angle], -1)
        return both.cos() * self.attention_scaling, both.sin() * self.attention_scaling

    for m in model.modules():
        if type(m).__name__.endswith(("RMSNorm", "RotaryEmbedding")):
            m.forward = (norm if type(m).__name__.endswith("RMSNorm") else angles).__get__(m)
    return model(tokens).logits


@torch.no_grad()
def extended(model: Qwen3, tokens, chunks, known: bool, device="cpu"):
    """Logits through the cache, which starts out as NaN. known: the host knows where the rows begin."""
    c, (B, T) = model.c, tokens.shape
    cache = torch.full((2, c.layers, B, c.kv_heads, T + 3, c.head_dim), math.nan, dtype=model.embed.dtype, device=device)
    at, found = 0, []
    for n in chunks:
        positions = torch.full((B,), at, device=device)
        found.append(model.extend(tokens[:, at : at + n], *cache, positions, at if known else None))
        at += n
    assert at == T
    return model.logits(torch.cat(found, dim=1))


@varieties
def test_logits_are_as_near_to_the_truth_as_transformers(variety, tmp_path, device):
    theirs = transformers_model(variety)
    theirs.save_pretrained(tmp_path)
    tokens = torch.randint(99, (2, 24))
    truth = exact(theirs, tokens)
    for dtype in (torch.float32, torch.bfloat16):
        ours, text = open_model(tmp_path, device=device, dtype=dtype)
        assert text is None and ours.embed.dtype == dtype
        eager = theirs.to(dtype)(tokens).logits.detach()
        with torch.no_grad():
            got = {"forward": ours(tokens.to(device)), "extend": extended(ours, tokens.to(device), (9, 1, 14), True, device)}
        got["masked"] = extended(ours, tokens.to(device), (23, 1), False, device)
        for name, logits in got.items():
            verdict = judge({"logits": logits.cpu().to(dtype)}, {"logits": eager}, {"logits": truth})
            assert verdict.ok, f"{name} in {dtype}: {verdict.why}"


@pytest.mark.parametrize("broken", ["qkv", "norm", "rope", "window"])
def test_the_comparison_sees_what_is_wrong(broken, tmp_path):
    theirs = transformers_model("mistral-window")
    theirs.save_pretrained(tmp_path)
    tokens = torch.randint(99, (2, 24))
    ours, _ = open_model(tmp_path, device="cpu")
    with torch.no_grad():
        if broken == "qkv":  # two rows of a key
            ours.layers[1].qkv.data[[130, 131]] = ours.layers[1].qkv.data[[131, 130]]
        elif broken == "norm":
            ours.layers[0].norm2 *= 1.001
        elif broken == "rope":
            ours.cos, ours.sin = ours.cos.roll(1, 0), ours.sin.roll(-1, 0)
        else:
            ours.c = replace(ours.c, window=6)
        got, eager = ours(tokens), theirs(tokens).logits
    assert not judge({"logits": got}, {"logits": eager}, {"logits": exact(theirs, tokens)}).ok


@torch.no_grad()
def test_rows_at_their_own_positions_are_each_as_if_alone(device):
    for c in (SMALL, replace(SMALL, window=4, kv_heads=4, qk_norm=False, qkv_bias=True)):
        model = random_weights(c, device=device)
        tokens, begin = torch.randint(c.vocab, (2, 12), device=device), (5, 8)
        cache = torch.full((2, c.layers, 2, c.kv_heads, 16, c.head_dim), math.nan, device=device)
        for row, n in enumerate(begin):
            own = cache[:, :, row : row + 1]
            model.extend(tokens[row : row + 1, :n], *own, torch.zeros(1, dtype=torch.int64, device=device), 0)
        new = torch.stack([tokens[row, n : n + 4] for row, n in enumerate(begin)])
        got = model.logits(model.extend(new, *cache, torch.tensor(begin, device=device)))
        both = (model(tokens), model.double()(tokens))
        eager, truth = (torch.stack([logits[row, n : n + 4] for row, n in enumerate(begin)]) for logits in both)
        verdict = judge({"logits": got}, {"logits": eager}, {"logits": truth})
        assert verdict.ok, verdict.why


def test_extend_never_reads_positions_on_the_host():
    """A fake tensor has no value to read."""
    model = random_weights(SMALL)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        cache = torch.empty(2, SMALL.layers, 3, SMALL.kv_heads, 16, SMALL.head_dim)
        positions = torch.empty(3, dtype=torch.int64)
        tokens = torch.empty(3, 1, dtype=torch.int64)
        hidden = model.extend(tokens, *cache, positions)
        assert hidden.shape == (3, 1, SMALL.hidden) and model.logits(hidden).shape == (3, 1, SMALL.vocab)
        with pytest.raises(torch._subclasses.fake_tensor.DataDependentOutputException):
            positions[0].item()


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_are_one_function_with_one_set_of_gradients(variant, device):
    c = replace(SMALL, window=7, qkv_bias=True, tied=variant != "stock")

    def evidence(model):
        loss = model(**MODEL.batch(c, RECIPE, device))
        loss.backward()
        return {"output loss": loss.detach()} | {f"grad {n}": p.grad for n, p in model.named_parameters()}

    start = random_weights(c, device=device)
    truth = oracle(MODEL, c, RECIPE, dict(start.named_parameters()), device)
    actual, eager = (evidence(random_weights(c, v, device=device)) for v in (variant, "plain"))
    verdict = judge(actual, eager, truth)
    assert verdict.ok, verdict.why
    assert abs(actual["output loss"].item() - math.log(c.vocab)) < 0.3
    assert all(g.any() for g in actual.values())


def test_a_tied_head_is_the_embedding_until_it_is_replaced():
    model = random_weights(SMALL)
    assert model.head.data is model.embed and not any("head" in n for n, _ in model.named_parameters())
    assert model.double().head.data is model.embed
    model.head.replace(torch.full((99, 64), 3, dtype=torch.int8), torch.full((99,), 0.5))
    assert model.embed.dtype == torch.float64 and torch.equal(model.head.dense(torch.float32), torch.full((99, 64), 1.5))
    assert torch.equal(model.head(torch.ones(1, 64)), torch.full((1, 99), 96.0))


def test_random_weights_are_the_same_each_time_and_fit_the_size():
    first, again = (random_weights(SMALL, dtype=torch.bfloat16) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters()))
    with torch.device("meta"):
        sizes = {name: sum(p.numel() for p in Qwen3(replace(c, max_positions=1)).parameters()) for name, c in SIZES.items()}
    assert next(iter(sizes)) == "tiny" and sizes["0.6b"] == 596_049_920 and sizes["8b"] == 8_190_735_360
    assert models.find("qwen3") == (MODEL, "tiny")


def hf(**changes) -> dict:
    plain = {k: v for k, v in SHAPE.items() if k != "attn_implementation"} | dict(architectures=["Qwen3ForCausalLM"])
    return {k: v for k, v in (plain | changes).items() if v is not ...}


def test_older_configs_say_the_same_in_other_words():
    old = dict(rope_theta=500.0, rope_scaling={k: v for k, v in LLAMA3.items() if k not in ("rope_theta", "rope_type")})
    old["rope_scaling"]["type"] = "llama3"
    new = Qwen3Config.from_hf(hf(rope_parameters=LLAMA3))
    older = Qwen3Config.from_hf(hf(**old))
    assert new.theta == older.theta == 500.0 and Qwen3Config.from_hf(hf()).theta == 1e4
    ours, theirs = (frequencies(32, c.theta, c.rope_scaling) for c in (new, older))
    assert torch.equal(ours[0], theirs[0]) and not torch.equal(ours[0], frequencies(32, 500.0, None)[0])


@pytest.mark.parametrize("changes, window", [
    (dict(sliding_window=8), None),
    (dict(sliding_window=8, use_sliding_window=True, max_window_layers=0), 8),
    (dict(sliding_window=8, use_sliding_window=True, max_window_layers=2), None),
    (dict(sliding_window=8, architectures=["MistralForCausalLM"]), 8),
    (dict(sliding_window=8, architectures=["LlamaForCausalLM"]), None),
])
def test_a_window_counts_where_the_family_says_so(changes, window):
    assert Qwen3Config.from_hf(hf(**changes)).window == window


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda: Qwen3Config.from_hf(hf(architectures=["GPT2"])), f"GPT2 is not supported; there are {', '.join(FAMILIES)}"),
        (lambda: Qwen3Config.from_hf(hf(hidden_size=...)), "hidden_size is missing"),
        (lambda: Qwen3Config.from_hf(hf(hidden_act="gelu")), "hidden_act must be 'silu' or absent, got 'gelu'"),
        (lambda: Qwen3Config.from_hf(hf(quantization_config={"bits": 4})), "quantization_config must be None or absent, got {"),
        (
            lambda: Qwen3Config.from_hf(hf(rope_scaling=dict(rope_type="dynamic", factor=2.0))),
            "rope_type must be one of default, linear, llama3, yarn.*, got 'dynamic'",
        ),
        (
            lambda: Qwen3(Qwen3Config.from_hf(hf(rope_scaling=dict(rope_type="llama3", factor=2.0)))),
            "rope_scaling: type llama3 needs low_freq_factor, got factor, original_max_position_embeddings, rope_type",
        ),
        (
            lambda: Qwen3Config.from_hf(hf(sliding_window=8, use_sliding_window=True, max_window_layers=1)),
            "layer_types must be one kind for all layers, got full_attention, sliding_attention",
        ),
        (lambda: Qwen3Config(heads=5, kv_heads=2), "heads must be a multiple of kv_heads and head_dim even, got 5, 2 and 128"),
        (lambda: Qwen3Config(layers=0), "layers must be at least 1, got 0"),
        (lambda: Qwen3(SMALL, "fast"), r"variant must be one of \('plain', 'stock', 'tuned'\), got 'fast'"),
        (
            lambda: random_weights(SMALL).extend(
                torch.zeros(1, 4, dtype=torch.int64), *torch.empty(2, 2, 1, 2, 8, 32), torch.tensor([5]), 5
            ),
            "start [+] 4 tokens must fit the cache of 8, got start 5",
        ),
    ],
    ids=["family", "missing", "activation", "quantised", "scaling", "llama3", "layers", "heads", "none", "variant", "cache"],
)
def test_errors_say_what_was_expected(make, said):
    with pytest.raises(ValueError, match=said):
        make()


def test_ops_that_are_given_are_asked():
    assert random_weights(SMALL, ops=(ops := Choices(default="eager"))).ops is ops
