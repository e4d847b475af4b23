"""Products padded where rows are no whole loads, and gate and up in one: values, gradients, weights, wrappers, few rows."""

import copy

import pytest
import torch
import torch.nn.functional as F
from odd_sizes import APART, FORMS, INNER, ONE, PADDED, WORDS, Watched, odd_gpt, odd_mixed, stepped, tokens
from swapping import DECODER, OwnMLP, batch
from test_swap_families import held
from torch import nn

from whet.alignment import aligned, padded_size, pads
from whet.choices import Choices
from whet.swap import aligned_linear, aligned_mlp, gated_mlp
from whet.swap._padded import multiply
from whet.swap._replace import as_call, recognise


def kinds(found) -> list[str]:
    return [s.kind for s, _ in found.sites]


def in_form(found, kind: str, form: str) -> None:
    """The model with one kind of site replaced, in one form."""
    found.ask(Choices(), [(s.with_forms([form]), v) for s, v in found.sites if s.kind == kind])


def same(got: tuple, want: tuple) -> None:
    torch.testing.assert_close(got[0], want[0])
    assert got[1].keys() == want[1].keys()
    for name, grad in got[1].items():
        torch.testing.assert_close(grad, want[1][name], msg=lambda text, name=name: f"{name}: {text}")


def test_the_rule_is_by_bytes_and_pads_to_whole_tiles():
    assert not aligned(1365, torch.bfloat16) and aligned(1368, torch.bfloat16) and padded_size(1365) == 1408
    assert aligned(1364, torch.float32) and not aligned(1364, torch.float16)
    assert pads(50257, torch.bfloat16) == 50304 - 50257 and pads(50264, torch.bfloat16) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("made", "data", "counts", "left"), [
    (odd_gpt, tokens, dict(norms=3, residual_norm=2, activations=2, sdpa_calls=2, aligned_mlp=2, aligned_linear=1),
     dict(plain_loss="the model's logits are kept")),
    (odd_mixed, lambda: torch.randn(2, 24, 64), dict(norms=1, residual_norm=1, gated_mlp=1, sdpa_calls=1),
     dict(gated_mlp="computes no SwiGLU")),
], ids=["GPT", "hand-written"])
def test_odd_sizes_are_replaced_right_as_a_whole_and_put_back(made, data, counts, left, dtype):
    given = data()
    held(made().to(dtype), given.to(dtype) if isinstance(given, torch.Tensor) else given, counts, left)


@pytest.mark.parametrize(("name", "options", "counts"), [
    ("GPT2", dict(n_embd=64, n_layer=2, n_head=4, n_positions=64, n_inner=INNER, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0),
     dict(causal_mask=1, norms=3, residual_norm=2, activations=2, attention=2, lm_head=1, aligned_mlp=2, aligned_linear=1)),
    ("Llama", dict(hidden_size=64, intermediate_size=INNER, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2),
     DECODER | dict(aligned_linear=1)),
])
def test_hugging_face_models_of_odd_sizes(name, options, counts):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(vocab_size=WORDS, tie_word_embeddings=True, **options)
    model = transformers.AutoModelForCausalLM.from_config(config).bfloat16().train()
    held(model, batch(), counts, {})
    found = recognise(model, as_call(batch()), Choices())
    found.ask(Choices(), [(s.in_each_form()[-1], v) for s, v in found.sites])
    assert model(**batch()).logits is None, "the loss takes the head over, padded or not"
    with torch.no_grad(), Watched() as seen:
        logits = model.eval()(**batch()).logits
    assert logits.is_contiguous() and logits.shape[-1] == WORDS and not seen.misaligned(torch.bfloat16)


def test_a_padded_models_step_has_no_misaligned_product_and_its_weights_stay():
    model, data = odd_gpt().bfloat16(), tokens()
    state, pointers = copy.deepcopy(model.state_dict()), {n: p.data_ptr() for n, p in model.named_parameters()}
    plain = stepped(model, *data)
    assert len(plain[2].misaligned(torch.bfloat16)) == 2 * 3 * 2 + 3, "two MLPs' products and the head's, forward and backward"
    found = recognise(model, as_call(data), Choices(), only=("aligned_linear", "aligned_mlp"))
    assert kinds(found) == ["aligned_linear", "aligned_mlp", "aligned_mlp"] and not found.left
    assert [s.form for s, _ in found.sites] == ["out padded to 128", "padded to 128", "padded to 128"]
    found.ask(Choices())
    got = stepped(model, *data)
    assert not got[2].misaligned(torch.bfloat16) and len(got[2].rows) == len(plain[2].rows)
    assert model.lm_head.weight is model.wte.weight and model(*data)[0].is_contiguous()
    assert {n: p.data_ptr() for n, p in model.named_parameters()} == pointers
    now = model.state_dict()
    assert list(now) == list(state) and all(torch.equal(now[k], v) for k, v in state.items())
    for n, grad in got[1].items():
        assert grad.shape == plain[1][n].shape
    found.restore()
    again = stepped(model, *data)
    assert torch.equal(again[0], plain[0]) and all(torch.equal(g, plain[1][n]) for n, g in again[1].items())


def test_values_and_gradients_of_a_padded_model_tied_weights_included():
    model, data = odd_gpt(), tokens()
    want = stepped(model, *data)
    found = recognise(model, as_call(data), Choices(), only=("aligned_linear", "aligned_mlp"))
    found.ask(Choices())
    same(stepped(model, *data), want)
    same(stepped(copy.deepcopy(model), *data), want)


@pytest.mark.parametrize("form", FORMS)
def test_each_form_of_a_gated_mlp_and_its_products(form):
    model, x = odd_mixed(), torch.randn(2, 24, 64, generator=torch.Generator().manual_seed(3))
    want = stepped(model, x)
    found = recognise(model, as_call(x), Choices(), only=("gated_mlp",))
    (site, _), = found.sites
    assert tuple(s.form for s in site.in_each_form()) == FORMS
    in_form(found, "gated_mlp", form)
    got = stepped(model, x)
    same(got, want)
    fewer = 3 if ONE in form else 0  # forward: one less of 3; backward: dx and dw, one less each
    assert len(got[2].rows) == len(want[2].rows) - fewer
    assert bool(got[2].misaligned(torch.float32)) == ("padded" not in form)
    found.restore()
    assert not any("_whet_forward" in vars(m) for m in model.modules())


class Packed(nn.Module):
    """gate and up in one linear, with biases."""

    def __init__(self):
        super().__init__()
        self.both, self.down = nn.Linear(64, 2 * INNER), nn.Linear(INNER, 64)

    def forward(self, x):
        gate, up = self.both(x).chunk(2, -1)
        return self.down(F.gelu(gate) * up)


class Biased(nn.Module):
    def __init__(self, up_bias: bool = True):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(64, INNER), nn.Linear(64, INNER, bias=up_bias), nn.Linear(INNER, 64)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


@pytest.mark.parametrize(("made", "forms"), [
    (Packed, ("", f"padded to {PADDED}")), (Biased, FORMS), (lambda: Biased(False), (APART,)),
])
def test_biases_and_a_packed_product_are_padded_too(made, forms):
    torch.manual_seed(0)
    model, x = nn.Sequential(made()), torch.randn(2, 40, 64)
    want = stepped(model, x)
    found = recognise(model, as_call(x), Choices(), only=("gated_mlp",))
    assert tuple(s.form for s in found.sites[0][0].in_each_form()) == forms
    for form in forms:
        in_form(found, "gated_mlp", form)
        same(stepped(model, x), want)


class Between(nn.Module):
    """A linear, something, and a linear that takes as many."""

    def __init__(self, between: nn.Module):
        super().__init__()
        self.one, self.between, self.two = nn.Linear(64, INNER), between, nn.Linear(INNER, 64)

    def forward(self, x):
        return self.two(self.between(self.one(x)))


class Square(nn.Module):
    def forward(self, x):
        return F.relu(x) ** 2 + 1


class Reshaped(nn.Module):
    def forward(self, x):
        return x.view(*x.shape[:-1], 3, 31).transpose(-1, -2).flatten(-2)


@pytest.mark.parametrize(("between", "whole"), [
    (nn.ReLU(), True), (nn.SiLU(), True), (Square(), True), (nn.LayerNorm(INNER), False), (nn.Softmax(-1), False),
    (Reshaped(), False), (nn.Identity(), True),
])
def test_an_mlp_is_padded_as_a_whole_where_what_lies_between_allows_and_else_its_linears_are(between, whole):
    torch.manual_seed(0)
    model, x = nn.Sequential(Between(between)), torch.randn(2, 40, 64)
    want = stepped(model, x)
    found = recognise(model, as_call(x), Choices(), only=("aligned_linear", "aligned_mlp"))
    assert kinds(found) == (["aligned_mlp"] if whole else ["aligned_linear"] * 2) and not found.left
    found.ask(Choices())
    got = stepped(model, x)
    same(got, want)
    assert not got[2].misaligned(torch.float32)


def test_dropout_behind_an_mlp_stays_and_inside_it_nothing_is_padded_as_a_whole():
    torch.manual_seed(0)
    behind = nn.Sequential(nn.Sequential(nn.Linear(64, INNER), nn.GELU(), nn.Linear(INNER, 64), nn.Dropout(0.5))).train()
    x = torch.randn(2, 40, 64)
    found = recognise(behind, as_call(x), Choices(), only=("aligned_linear", "aligned_mlp"))
    assert kinds(found) == ["aligned_mlp"]
    inside = nn.Sequential(Between(nn.Dropout(0.5))).train()
    found = recognise(inside, as_call(x), Choices(), only=("aligned_mlp",))
    assert not found.sites and len(found.left) == 1, "other random numbers are drawn for rows of another size"


class Twice(nn.Module):
    """A linear layer with its own addition, as LoRA wraps one."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base_layer, self.in_features, self.out_features = base, base.in_features, base.out_features
        self.more = nn.Linear(base.in_features, base.out_features, bias=False)

    @property
    def weight(self):
        return self.base_layer.weight

    def forward(self, x):
        return self.base_layer(x) + self.more(x)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("made", "name", "only"), [
    (lambda: Between(nn.ReLU()), "one", "aligned_mlp"), (lambda: OwnMLP(64, INNER), "w1", "gated_mlp"),
])
def test_a_wrapped_linear_is_called_and_so_is_its_hook(made, name, only, when):
    torch.manual_seed(0)
    model, x, shapes = nn.Sequential(made()), torch.randn(2, 40, 64), []
    wrapped = Twice(getattr(model[0], name))
    plain = copy.deepcopy(model)
    setattr(plain[0], name, copy.deepcopy(wrapped))
    want = stepped(plain, x)
    if when == "before":
        setattr(model[0], name, wrapped)
        found = recognise(model, as_call(x), Choices(), only=(only,))
        assert all(not s.forms for s, _ in found.sites)
    else:
        found = recognise(model, as_call(x), Choices(), only=(only,))
        assert found.sites
    found.ask(Choices(), [(s.in_each_form()[-1], v) for s, v in found.sites])
    setattr(model[0], name, wrapped)
    same(stepped(model, x), want)
    wrapped.base_layer.register_forward_hook(lambda module, args, out: shapes.append(tuple(out.shape)))
    same(stepped(model, x), want)
    assert shapes == [(2, 40, INNER)]


def test_few_rows_run_as_they_did(monkeypatch):
    model, data = odd_gpt(), tokens()
    mixed, x = odd_mixed(), torch.randn(2, 24, 64)
    for m, given, only in ((model, data, ("aligned_linear", "aligned_mlp")), (mixed, x, ("gated_mlp",))):
        found = recognise(m, as_call(given), Choices(), only=only)
        found.ask(Choices(), [(s.in_each_form()[-1], v) for s, v in found.sites])
    padded = []
    for module in (aligned_linear, aligned_mlp, gated_mlp):
        monkeypatch.setattr(module, "multiply", lambda *a, **o: padded.append(a) or multiply(*a, **o))
    model(data[0][:1, :5]), mixed(x[:1, :5])
    assert not padded
    model(*data), mixed(x)
    assert len(padded) == 2 * 2 + 1 + 1


@pytest.mark.parametrize("form", FORMS)
def test_autocast_over_float32_weights(form):
    def loss_and_grads(dtype, autocast):
        model = nn.ModuleList([odd_gpt(), odd_mixed()]).to(dtype)
        found = [recognise(model[0], as_call(tokens()), Choices()), recognise(model[1], as_call(x.to(dtype)), Choices())]
        if autocast == "replaced":
            for one in found:
                one.ask(Choices(), [(s.with_forms([form]) if s.forms else s, v) for s, v in one.sites])
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast is not None):
            loss = model[0](*tokens())[1] + model[1](x.to(dtype)).square().mean()
        loss.backward()
        return loss.detach(), {n: p.grad for n, p in model.named_parameters()}

    x = torch.randn(2, 24, 64, generator=torch.Generator().manual_seed(3))
    truth, plain, got = (loss_and_grads(*how) for how in (
        (torch.float64, None), (torch.float32, "plain"), (torch.float32, "replaced")))
    step = torch.finfo(torch.bfloat16).eps
    assert abs(got[0] - truth[0]) <= 2 * (abs(plain[0] - truth[0]) + step * abs(truth[0]))
    for n, grad in got[1].items():
        worst = (plain[1][n] - truth[1][n]).norm() + step * truth[1][n].norm()
        assert (grad - truth[1][n]).norm() <= 3 * worst, n


def test_the_attention_of_an_odd_width_has_its_linears_padded_and_is_no_mlp():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v, self.o = (nn.Linear(68, 68) for _ in range(4))

        def forward(self, x):
            q, k, v = (m(x).view(*x.shape[:2], 4, 17).transpose(1, 2) for m in (self.q, self.k, self.v))
            return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape))

    torch.manual_seed(0)
    model, x = nn.Sequential(Attention()).bfloat16(), torch.randn(2, 24, 68).bfloat16()
    found = recognise(model, as_call(x), Choices(), only=("aligned_linear", "aligned_mlp"))
    assert kinds(found) == ["aligned_linear"] * 4 and not found.left
    assert found.sites[0][0].form == "in padded to 128 and out padded to 128"


def test_compiled_afterwards():
    for model, args in ((odd_gpt(), tokens()), (odd_mixed(), (torch.randn(2, 24, 64),))):
        want = stepped(model, *args)
        found = recognise(model, as_call(args), Choices())
        found.ask(Choices(), [(s.in_each_form()[-1], v) for s, v in found.sites])
        torch._dynamo.reset()
        got = torch.compile(model, backend="aot_eager", fullgraph=True)(*args)
        torch.testing.assert_close(got[0] if isinstance(got, tuple) else got, want[0])
