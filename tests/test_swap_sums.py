"""A residual sum and the LayerNorm after it as one op: in which models, in blocks of which form, and what stays as it was."""

import functools

import pytest
import torch
import torch.nn.functional as F
from swapping import FAMILIES, GPTBlock, OwnRMSNorm, batch, built, state
from test_swap_fused import asked
from test_swap_use import agree, replaced, trained
from torch import nn
from torch.utils.checkpoint import checkpoint

from whet.choices import Choices, Recorder
from whet.swap import Journal, Met, residual_norm
from whet.swap._proof import prove
from whet.swap._replace import as_call, recognise
from whet.swap.residual_norm import PendingSum

ONLY = dict(only=("residual_norm",))
SUMS = {  # sites, and norms of sums in a forward
    "GPT2": (2, 2), "ViT": (2, 2), "Bert": (4, 4), "ModernBert": (2, 2), "GPTNeoX, MLP after attention": (2, 2),
    "Whisper": (4, 6),
}


@pytest.mark.parametrize("name", SUMS)
def test_families_ask_one_op_for_sum_and_norm_and_learn_the_same(name):
    pytest.importorskip("transformers")
    model, data = built(name, torch.float32), FAMILIES[name].batch()
    expected, before = trained(model, data), state(model)
    found = replaced(model, data, **ONLY)
    sites, norms = SUMS[name]
    assert len(found.sites) == sites and not found.left
    assert asked(found, model, data) == {"add_layer_norm": norms}
    agree(trained(model, data), expected)
    found.restore()
    assert state(model) == before
    agree(trained(model, data), expected, exactly=True)


class PostNorm(nn.Module):
    """As BERT's outputs: the sum has no other use than the norm."""

    def __init__(self, dim: int = 32, **options):
        super().__init__()
        self.dense, self.norm, self.drop = nn.Linear(dim, dim), nn.LayerNorm(dim, **options), nn.Dropout(0.1)

    def forward(self, x):
        return self.norm(self.drop(self.dense(x)) + x)


class Functional(nn.Module):
    """As Whisper's layers: dropout is a function; with a norm of either kind."""

    def __init__(self, dim: int = 32, p: float = 0.1):
        super().__init__()
        self.one, self.two, self.three = nn.LayerNorm(dim), nn.LayerNorm(dim), OwnRMSNorm(dim)
        self.a, self.b, self.c, self.p = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim), p

    def forward(self, x):
        h = x + F.dropout(self.a(self.one(x)), p=self.p, training=self.training)
        h = F.dropout(self.b(self.two(h)), self.p, self.training) + h
        return h + self.c(self.three(h))


class InMethods(nn.Module):
    """As nn.TransformerEncoderLayer: its halves are methods."""

    def __init__(self, dim: int = 32):
        super().__init__()
        self.one, self.two, self.a, self.b = nn.LayerNorm(dim), nn.LayerNorm(dim), nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x):
        x = x + self.first(self.one(x))
        return x + self.second(self.two(x))

    def first(self, x):
        return self.a(x)

    def second(self, x):
        return F.relu(self.b(x))


class Recomputed(InMethods):
    def first(self, x):
        return checkpoint(self.a, x, use_reentrant=False)


def biasless() -> nn.Module:
    return PostNorm(bias=False)


def weightless() -> nn.Module:
    return PostNorm(elementwise_affine=False)


BLOCKS = {
    "pre-norm": (lambda: GPTBlock(32), {"add_layer_norm": 1}), "post-norm": (PostNorm, {"add_layer_norm": 1}),
    "no bias": (biasless, {"add_layer_norm": 1}), "no weight": (weightless, {"add_layer_norm": 1}),
    "both norms": (Functional, {"add_layer_norm": 1, "add_rms_norm": 1}), "in methods": (InMethods, {"add_layer_norm": 1}),
    "recomputed": (Recomputed, {}),
}


@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_gives_what_it_gave_with_dropout_and_without(name, impl, dropout):
    make, ops = BLOCKS[name]
    torch.manual_seed(0)
    model, x = nn.Sequential(make()).train(dropout), torch.randn(3, 7, 32, requires_grad=True)
    found = recognise(model, as_call(x), Choices(), **ONLY)
    assert asked(found, model, x) == ops and not found.left

    def ran() -> tuple:
        torch.manual_seed(1)
        x.grad = None
        model.zero_grad()
        y = model(x)
        y.square().sum().backward()
        return y.detach(), {n: p.grad.clone() for n, p in (*model.named_parameters(), ("x", x))}

    found.ask(Choices(default=impl))
    got = ran()
    found.restore()
    agree(got, ran())


def test_a_sum_of_layer_norm_that_is_made_wrongly_is_not_proved(monkeypatch):
    torch.manual_seed(0)
    model, x = nn.Sequential(PostNorm()).eval(), torch.randn(3, 7, 32)
    site = recognise(model, as_call(x), Choices(), **ONLY).sites[0][0]
    right = PendingSum.__init__
    monkeypatch.setattr(PendingSum, "__init__", lambda self, x, res: right(self, 0.99 * x, res))
    assert not prove(site, as_call(x), Choices()).ok


def test_a_post_norm_with_hooks_is_left_and_one_that_gets_them_later_is_called():
    torch.manual_seed(0)
    model, x, seen = nn.Sequential(PostNorm(), PostNorm()).eval(), torch.randn(3, 7, 32), []
    model[0].norm.register_forward_hook(lambda module, args, out: seen.append((0, type(args[0]), type(out))))
    plain = model(x)
    found = recognise(model, as_call(x), Choices(), **ONLY)
    assert [s.path for s, _ in found.sites] == ["1"] and "has hooks" in found.left[0].why
    found.ask(Choices())
    model[1].norm.register_forward_hook(lambda module, args, out: seen.append((1, type(args[0]), type(out))))
    seen.clear()
    torch.testing.assert_close(model(x), plain)
    assert seen == [(0, torch.Tensor, torch.Tensor), (1, torch.Tensor, torch.Tensor)]


def test_hooks_of_children_called_in_methods_are_given_tensors():
    torch.manual_seed(0)
    model, x, seen = nn.Sequential(InMethods()), torch.randn(3, 7, 32), []
    for child in (model[0].one, model[0].a, model[0].b):
        child.register_forward_hook(lambda module, args, out: seen.append((type(args[0]), type(out))))
    found = recognise(model, as_call(x), Choices(), **ONLY)
    found.ask(Choices())
    seen.clear()
    model(x)
    assert len(found.sites) == 1 and seen == [(torch.Tensor, torch.Tensor)] * 3


class Keeps(PostNorm):
    """Leaves what it computed on the way."""

    def forward(self, x):
        self.dense_out = out = self.dense(x)
        self.sum = out + x
        return self.norm(out + x)


def test_what_a_block_keeps_on_itself_are_tensors():
    torch.manual_seed(0)
    model, x = nn.Sequential(Keeps()).eval(), torch.randn(3, 7, 32)
    found = recognise(model, as_call(x), Choices(), **ONLY)
    assert asked(found, model, x) == {"add_layer_norm": 1}
    assert type(model[0].dense_out) is type(model[0].sum) is torch.Tensor
    assert torch.equal(model[0].sum, model[0].dense_out + x)


def test_a_layer_norm_that_autocast_may_widen_is_the_modules_own():
    torch.manual_seed(0)
    model, x = nn.Sequential(PostNorm()).eval(), torch.randn(3, 7, 32)
    found = recognise(model, as_call(x), Choices(), **ONLY)
    with torch.autocast("cpu", torch.bfloat16):
        plain = [model(x), model(x.bfloat16())]
        assert [asked(found, model, given) for given in (x, x.bfloat16())] == [{"add_layer_norm": 1}, {}]
        served = [model(x), model(x.bfloat16())]
    assert [y.dtype for y in served] == [y.dtype for y in plain] and torch.equal(served[1], plain[1])


def test_compiled_blocks_run_as_they_were_written():
    torch.manual_seed(0)
    model, x = nn.Sequential(PostNorm(), InMethods()).eval(), torch.randn(3, 7, 32)
    plain, found, recorder = model(x), recognise(model, as_call(x), Choices(), **ONLY), Recorder()
    assert len(found.sites) == 2
    found.ask(recorder)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(model, backend="aot_eager", fullgraph=True)(x), plain)
    assert not recorder.calls


def test_gpt2_generates_the_same_words_with_a_cache():
    pytest.importorskip("transformers")
    model, ids = built("GPT2", torch.float32).eval(), batch()["input_ids"]  # its rows are served, single tokens are not
    plain = model.generate(ids, max_new_tokens=4, do_sample=False)
    found, recorder = replaced(model, **ONLY), Recorder()
    found.ask(recorder)
    assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), plain)
    assert {call.op for call, _ in recorder.calls.values()} == {"add_layer_norm"}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["GPT2", "Bert"])
def test_gradient_checkpointing_of_layers_with_layer_norms(name, reentrant):
    pytest.importorskip("transformers")
    model, data = built(name, torch.float32), batch()
    expected = trained(model, data)
    replaced(model, **ONLY)
    model.gradient_checkpointing_enable(dict(use_reentrant=reentrant))
    model.enable_input_require_grads()
    agree(trained(model, data), expected)


class Wrapped(nn.Module):
    """A layer whose class puts around its forward what checkpoints it, as Transformers does from 5.23 on."""

    gradient_checkpointing = False

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(32), nn.LayerNorm(32)
        self.attn, self.mlp = nn.Linear(32, 32), nn.Linear(32, 32)

    def own(self, x):
        h = x + self.attn(self.norm1(x))
        return h + self.mlp(self.norm2(h))

    @functools.wraps(own)
    def forward(self, *args):
        if self.gradient_checkpointing and self.training:
            self.was_checkpointed = True
            return checkpoint(functools.partial(Wrapped.own, self), *args, use_reentrant=False)
        return Wrapped.own(self, *args)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_layer_whose_forward_is_wrapped_for_checkpointing_is_replaced_inside_and_still_checkpointed(checkpointed):
    layer = Wrapped()
    x = torch.randn(2, 64, 32)
    expected = layer(x)
    (site,) = residual_norm.find(layer, {"": Met((x,), {}), **{n: Met((x,), {}) for n in ("norm1", "norm2", "attn", "mlp")}})
    recorder = Recorder()
    Journal().make(site.edits(layer, recorder))
    layer.gradient_checkpointing = checkpointed
    assert torch.equal(layer(x), expected)
    ops = [call.op for call, _ in recorder.calls.values()]
    assert ops == ([] if checkpointed else ["add_layer_norm"]) and hasattr(layer, "was_checkpointed") == checkpointed
