"""Weights stored padded: the function, its gradients and training are the logical ones, what was added stays exactly zero."""

import copy

import pytest
import torch
import torch.nn.functional as F
from odd_sizes import INNER, PADDED, WORDS, odd_gpt, odd_mixed, stepped, tokens
from swapping import batch
from torch import nn

import whet
from whet.choices import Choices
from whet.padding import cut, cut_state, logical_shapes, pad_inner, pad_linear, pad_state, unpad
from whet.swap._replace import as_call, recognise
from whet.train import checkpoint
from whet.train.optim import Ema, hidden_matrices, make

ACTIVATIONS = {
    "silu": F.silu, "gelu": F.gelu, "relu": F.relu, "relu squared": lambda x: F.relu(x).square(), "sigmoid": F.sigmoid,
    "softplus": F.softplus,
}
ZERO_TO_ZERO = ("silu", "gelu", "relu", "relu squared")
OPTIMIZERS = {
    "AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, weight_decay=0.1),
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=1e-2, momentum=0.9, weight_decay=0.1),
    "adamw": lambda m: make(m, lr=1e-2),
    "muon": lambda m: make(m, kind="muon", lr=1e-2),
}


class OddMLP(nn.Module):
    """An MLP of an odd inner size, gated or not, with biases."""

    def __init__(self, activation: str = "gelu", gated: bool = False, integers: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.activation = activation
        self.up, self.down = nn.Linear(64, INNER), nn.Linear(INNER, 64)
        self.gate = nn.Linear(64, INNER) if gated else None
        self.double()
        for p in self.parameters() if integers else ():
            p.data = torch.randint(-3, 4, p.shape).double()

    def forward(self, x):
        h = ACTIVATIONS[self.activation](self.up(x))
        return self.down(h if self.gate is None else h * self.gate(x))

    def padded(self) -> "OddMLP":
        twin = copy.deepcopy(self)
        pad_inner([m for m in (twin.up, twin.gate) if m is not None], twin.down, PADDED)
        return twin


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    shapes = logical_shapes(model)
    return {n: cut(p.grad, shapes.get(id(p), p.shape)) for n, p in model.named_parameters()}


def added(model: nn.Module, of) -> list[torch.Tensor]:
    """What lies outside the logical shape of a tensor of each padded parameter."""
    found = []
    for p in model.parameters():
        shape = logical_shapes(model).get(id(p))
        if shape is not None:
            t = of(p).detach().clone()
            cut(t, shape).zero_()
            found.append(t)
    return found


def zero(model: nn.Module, of=lambda p: p) -> bool:
    tensors = added(model, of)
    assert tensors
    return not any(t.any() for t in tensors)


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: t.clone() for n, t in model.state_dict().items()}


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("activation", ZERO_TO_ZERO)
def test_an_mlp_of_padded_width_has_the_values_and_gradients_of_its_own(activation, gated):
    model = OddMLP(activation, gated)
    twin, x = model.padded(), torch.randn(40, 64, dtype=torch.float64)
    assert twin.up.weight.shape == (PADDED, 64) and twin.down.weight.shape == (64, PADDED)
    y, z = model(x), twin(x)
    torch.testing.assert_close(z, y)
    y.square().sum().backward(), z.square().sum().backward()
    torch.testing.assert_close(gradients(twin), gradients(model))
    assert zero(twin, lambda p: p.grad)


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("activation", ["relu", "relu squared"])
def test_where_sums_are_exact_the_bits_are_the_same(activation, gated):
    model = OddMLP(activation, gated, integers=True)
    twin, x = model.padded(), torch.randint(-3, 4, (40, 64)).double()
    y, z = model(x), twin(x)
    assert torch.equal(y, z)
    y.sum().backward(), z.sum().backward()
    assert all(torch.equal(g, gradients(model)[n]) for n, g in gradients(twin).items())


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_steps_of_an_optimizer_leave_zeros_zero_and_train_as_without(kind):
    model = nn.Sequential(OddMLP("silu", gated=True), nn.Linear(64, WORDS).double())
    twin = copy.deepcopy(model)
    pad_inner([twin[0].up, twin[0].gate], twin[0].down, PADDED)
    pad_linear(twin[1], outputs=PADDED)
    both = [(m, OPTIMIZERS[kind](m)) for m in (model, twin)]
    torch.manual_seed(1)
    for _ in range(6):
        x, labels = torch.randn(40, 64, dtype=torch.float64), torch.randint(0, WORDS, (40,))
        for m, optimizer in both:
            optimizer.zero_grad()
            F.cross_entropy(m(x), labels).backward()
            optimizer.step()
    torch.testing.assert_close(weights(twin), weights(model))
    assert zero(twin) and zero(twin, lambda p: p.grad)
    for name in ("exp_avg", "exp_avg_sq", "momentum_buffer", "momentum"):
        held = [s for s in both[1][1].state.values() if isinstance(s.get(name), torch.Tensor)]
        assert not held or zero(twin, lambda p, name=name: both[1][1].state[p].get(name, torch.zeros_like(p)))


def test_muon_scales_by_the_logical_shape_and_knows_a_padded_head():
    model = nn.ModuleDict({"table": nn.Embedding(WORDS, 64), "last": nn.Linear(64, WORDS), "up": nn.Linear(64, INNER)})
    pad_linear(model["last"], outputs=PADDED)
    assert hidden_matrices(model) == ["up.weight"]
    pad_linear(model["up"], outputs=PADDED)
    optimizer = make(model, kind="muon")
    assert optimizer.param_groups[0]["shapes"] == [[INNER, 64]]
    assert copy.deepcopy(optimizer).param_groups[0]["shapes"] == [[INNER, 64]]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_an_activation_that_gives_zero_something_is_found_and_left(activation):
    """Its linears are then stored padded each for itself: one cuts its result, the other fills its input."""
    model, x = OddMLP(activation), torch.randn(8, 64, dtype=torch.float64)
    want = model(x)
    report = whet.pad_weights(model, x, torch.bfloat16)
    assert [pad.path for pad in report.made] == ([""] if activation in ZERO_TO_ZERO else ["up", "down"])
    assert activation in ZERO_TO_ZERO or "does not map 0 to 0" in str(report)
    y = model(x)
    torch.testing.assert_close(y, want)
    y.sum().backward()
    assert zero(model, lambda p: p.grad)


def test_a_model_keeps_its_function_its_ties_its_state_dict_and_goes_back():
    model, data = odd_gpt(), tokens()
    want, state, held = stepped(model, *data), weights(model), [id(p) for p in model.parameters()]
    report = whet.pad_weights(model, data)
    assert [pad.path for pad in report.made] == ["h.0.mlp", "h.1.mlp", "lm_head"] and not report.left
    assert "h.0.mlp: inner size 93 between 0, 2 as 128" in str(report) and "lm_head: outputs of 101 as 128" in str(report)
    assert model.lm_head.weight is model.wte.weight and [id(p) for p in model.parameters()] == held
    got = stepped(model, *data)
    torch.testing.assert_close(got[0], want[0])
    assert not got[2].misaligned(torch.float32) and got[0].shape[-1] == WORDS
    assert {n: tuple(t.shape) for n, t in model.state_dict().items()} == {n: tuple(t.shape) for n, t in state.items()}
    assert all(torch.equal(t, state[n]) for n, t in model.state_dict().items())
    model.load_state_dict({n: t + 1 for n, t in state.items()})
    assert zero(model) and torch.equal(model.state_dict()["lm_head.weight"], state["lm_head.weight"] + 1)
    model.load_state_dict(state)
    twin = copy.deepcopy(model)
    torch.testing.assert_close(stepped(twin, *data)[0], want[0])
    assert twin.wte.weight is twin.lm_head.weight and twin.state_dict()["wte.weight"].shape == (WORDS, 64)
    whet.unpad_weights(model)
    again = stepped(model, *data)
    assert torch.equal(again[0], want[0]) and all(torch.equal(g, want[1][n]) for n, g in again[1].items())
    assert not logical_shapes(model) and not any("forward" in vars(m) for m in model.modules())
    assert not any(m._state_dict_hooks or m._load_state_dict_pre_hooks for m in model.modules())


def test_a_state_of_another_shape_is_refused_with_both_shapes():
    model, data = odd_gpt(), tokens()
    whet.pad_weights(model, data)
    bad = model.state_dict() | {"lm_head.weight": torch.zeros(PADDED, 64)}
    with pytest.raises(RuntimeError, match=r"lm_head.weight must have shape \(101, 64\), .* padded to \(128, 64\)"):
        model.load_state_dict(bad)


def test_inputs_of_an_odd_size_are_filled_too():
    torch.manual_seed(0)
    linear, x = nn.Linear(INNER, WORDS).double(), torch.randn(3, 40, INNER, dtype=torch.float64)
    twin = copy.deepcopy(linear)
    pad_linear(twin, inputs=PADDED, outputs=PADDED)
    assert twin.weight.shape == (PADDED, PADDED) and twin.bias.shape == (PADDED,) and twin.out_features == WORDS
    y = twin(x)
    torch.testing.assert_close(y, linear(x))
    assert y._base is not None and y.stride(-2) == PADDED, "a view of the wider result"
    y.sum().backward()
    assert zero(twin, lambda p: p.grad)
    assert torch.equal(unpad(twin)(x), linear(x)) and torch.equal(twin.weight, linear.weight)


def trained(model, optimizer, data, steps: int = 2, ema=None) -> list[float]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        logits = model(*data)[0]
        loss = F.cross_entropy(logits.flatten(0, 1), data[1].flatten())
        loss.backward()
        optimizer.step()
        if ema is not None:
            ema.update()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("first", [True, False], ids=["from padded", "from plain"])
def test_checkpoints_of_a_padded_model_are_those_of_a_plain_one(kind, first, tmp_path):
    """Either is loaded into the other, weights, optimizer and averages, and training goes on as it would have."""
    data, models = tokens(), [odd_gpt().double(), odd_gpt().double()]
    whet.pad_weights(models[0], data, torch.bfloat16)
    made, other = models if first else models[::-1]
    optimizers = [OPTIMIZERS[kind](m) for m in (made, other)]
    averages = [Ema(m, 0.9) for m in (made, other)]
    trained(made, optimizers[0], data, ema=averages[0])
    trained(other, optimizers[1], data, 1)  # which loading takes back
    path = checkpoint.save(tmp_path, 2, made, optimizers[0], {}, averages[0])
    checkpoint.load(path, other, optimizers[1], averages[1])
    assert all(torch.equal(t, made.state_dict()[n]) for n, t in other.state_dict().items())
    assert zero(models[0]) and zero(models[0], lambda p: averages[not first].tensors[
        next(n for n, q in models[0].named_parameters() if q is p)])
    got, want = trained(other, optimizers[1], data, 3), trained(made, optimizers[0], data, 3)
    torch.testing.assert_close(got, want)
    assert zero(models[0])


def test_a_torch_optimizers_state_is_cut_and_filled():
    data, models = tokens(), [odd_gpt().double(), odd_gpt().double()]
    whet.pad_weights(models[0], data, torch.bfloat16)
    optimizers = [OPTIMIZERS["AdamW"](m) for m in models]
    trained(models[0], optimizers[0], data)
    state = cut_state(models[0], optimizers[0])
    stored, logical = optimizers[0].state_dict()["state"][0]["exp_avg"], state["state"][0]["exp_avg"]
    assert stored.shape == (PADDED, 64) and logical.shape == (WORDS, 64), "torch's own state_dict has the stored shape"
    models[1].load_state_dict(models[0].state_dict())
    optimizers[1].load_state_dict(copy.deepcopy(state))
    fresh = OPTIMIZERS["AdamW"](models[0])
    fresh.load_state_dict(pad_state(models[0], fresh, copy.deepcopy(optimizers[1].state_dict())))
    torch.testing.assert_close(trained(models[0], fresh, data, 3), trained(models[1], optimizers[1], data, 3))


def test_an_optimizer_that_was_made_before_goes_on_when_it_is_given():
    data, models = tokens(), [odd_gpt().double(), odd_gpt().double()]
    optimizers = [OPTIMIZERS["AdamW"](m) for m in models]
    for m, o in zip(models, optimizers):
        trained(m, o, data)
    whet.pad_weights(models[0], data, torch.bfloat16, optimizer=optimizers[0])
    got, want = (trained(m, o, data, 2) for m, o in zip(models, optimizers))
    whet.unpad_weights(models[0], optimizers[0])
    got += trained(models[0], optimizers[0], data, 2)
    torch.testing.assert_close(got, want + trained(models[1], optimizers[1], data, 2))


class PackedOdd(nn.Module):
    def __init__(self):
        super().__init__()
        self.both, self.down = nn.Linear(64, 2 * INNER), nn.Linear(INNER, 64)

    def forward(self, x):
        gate, up = self.both(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class SharedOdd(nn.Module):
    """Two MLPs that share a layer, and a normed one: neither is the same where it is wider."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Sequential(nn.Linear(64, INNER), nn.ReLU(), nn.Linear(INNER, 64)) for _ in "ab")
        self.b[0].weight = self.a[0].weight
        self.c = nn.Sequential(nn.Linear(64, INNER), nn.LayerNorm(INNER, elementwise_affine=False), nn.Linear(INNER, 64))

    def forward(self, x):
        return self.c(self.b(self.a(x)))


@pytest.mark.parametrize(("made", "why"), [(PackedOdd, "packed in one layer"), (SharedOdd, "shared with another module")])
def test_what_cannot_be_stored_padded_is_left_with_a_reason(made, why):
    torch.manual_seed(0)
    model, x = made(), torch.randn(2, 40, 64)
    want = model(x)
    report = whet.pad_weights(model, x)
    assert why in str(report)
    torch.testing.assert_close(model(x), want)


@pytest.mark.parametrize("name", ["GPT2", "Llama"])
def test_an_optimised_padded_model_has_its_head_and_loss_in_one_and_no_misaligned_product(name):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    options = {
        "GPT2": dict(n_embd=64, n_layer=1, n_head=4, n_positions=64, n_inner=INNER, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0),
        "Llama": dict(hidden_size=64, intermediate_size=INNER, num_hidden_layers=1, num_attention_heads=4),
    }[name]
    config = getattr(transformers, f"{name}Config")(vocab_size=WORDS, tie_word_embeddings=True, **options)
    model = transformers.AutoModelForCausalLM.from_config(config).float().train()
    want = model(**batch()).loss  # its graph stays alive, and knows the shapes of before
    report = whet.pad_weights(model, batch(), torch.bfloat16)
    assert len(report.made) == 2, report
    torch.testing.assert_close(model(**batch()).loss, want)
    found = recognise(model, as_call(batch()), Choices())
    assert "lm_head" in {s.kind for s, _ in found.sites} and not {"aligned_linear", "aligned_mlp"} & {
        s.kind for s, _ in found.sites
    }
    found.ask(Choices())
    out = model(**batch())
    assert out.logits is None
    torch.testing.assert_close(out.loss, want)
    out.loss.backward()
    assert zero(model, lambda p: p.grad)
    found.restore()


def test_what_is_no_model_or_no_dtype_is_one_line():
    with pytest.raises(ValueError, match="pad_weights: model must be a torch.nn.Module, got int"):
        whet.pad_weights(3, torch.randn(2, 24, 64))
    with pytest.raises(ValueError, match="pad_weights: dtype must be a torch.dtype, such as torch.bfloat16, .* got .bf16."):
        whet.pad_weights(odd_mixed(), torch.randn(2, 24, 64), dtype="bf16")


def test_padding_comes_before_optimize_and_is_said_so():
    model = odd_mixed()
    model.whet = object()
    with pytest.raises(ValueError, match="call whet.pad_weights first"):
        whet.pad_weights(model, torch.randn(2, 24, 64))
    with pytest.raises(ValueError, match="call whet.restore"):
        whet.unpad_weights(model)


def test_a_padded_model_is_traced_in_one_graph():
    model, data = odd_gpt(), tokens()
    whet.pad_weights(model, data)
    want = stepped(model, *data)
    same = torch.compile(model, backend="aot_eager", fullgraph=True)
    model.zero_grad()
    got = same(*data)[0]
    torch.testing.assert_close(got, want[0])
    (got.float() * torch.linspace(-1, 1, got.shape[-1])).sum().backward()
    assert zero(model, lambda p: p.grad)
