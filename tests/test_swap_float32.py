"""Linear layers in float32: where they are looked for, that the op serves them, and what is left as it was."""

from importlib import import_module
from importlib.util import find_spec

import pytest
import torch
from swapping import FAMILIES, GPT, built
from test_swap_biases import TRITON, stepped
from test_swap_families import tokens
from test_verify import CoarseUpstream
from torch import nn

import whet
from whet import machine
from whet.choices import Choices, Recorder
from whet.op import Impl, discover
from whet.ops import _products
from whet.swap import Journal, float32_linear, gated_mlp
from whet.swap._optimize import together
from whet.swap._proof import cast, prove
from whet.swap._replace import as_call, recognise
from whet.workload import matmul_precision

KIND = "float32_linear"


@pytest.fixture
def slow_here(monkeypatch):
    """As on a GPU made for it: float32 alone is slow."""
    monkeypatch.setattr(float32_linear, "by_halves", lambda w: w.dtype == torch.float32)


def made(name: str) -> tuple:
    if name == "plain":
        torch.manual_seed(0)
        return GPT().train(), as_call(tokens())
    pytest.importorskip("transformers")
    return built(name, torch.float32), as_call(cast(FAMILIES[name].batch(), torch.float32))


@pytest.mark.parametrize("name, count", [("GPT2", 9), ("Llama", 11), ("ViT", 12), ("plain", 9)])
def test_every_linear_layer_asks_the_op_with_the_models_loss_and_gradients(slow_here, name, count):
    model, call = made(name)
    want = stepped(model, call)
    found = recognise(model, call, Choices(), only=(KIND,))
    assert len(found.sites) == count and not found.left
    recorder = Recorder()
    found.ask(recorder)
    model(*call.args, **call.kwargs)
    assert sum(n for c, n in recorder.calls.values() if c.op == "linear") == count
    for choices in (Choices(), TRITON):
        found.restore()
        verdict = prove(together(found, call), call, choices)
        assert verdict.ok and verdict.share > 0, verdict.why
        found.ask(choices)
        loss, grads = stepped(model, call)
        torch.testing.assert_close(loss, want[0])
        assert grads.keys() == want[1].keys()
        for n in grads:
            torch.testing.assert_close(grads[n], want[1][n], msg=lambda text, n=n: f"{n}: {text}")


def test_a_layer_whose_gradient_is_rounded_to_bfloat16_is_not_replaced(slow_here, monkeypatch):
    model, call = made("plain")
    rounding = Impl(lambda x, w: CoarseUpstream.apply(nn.functional.linear(x, w)))
    monkeypatch.setitem(discover()["linear"].impls, "torch", rounding)
    found = recognise(model, call, Choices(default="torch"), only=(KIND,))
    assert not found.sites and len(found.left) == 9


def test_biases_of_these_layers_are_not_replaced_beside_them(slow_here):
    model, call = made("plain")
    found = recognise(model, call, Choices(), only=(KIND, "biased_linear"))
    assert {s.kind for s, _ in found.sites} == {KIND}


def test_a_wide_gated_mlp_keeps_no_activation_for_a_last_layer_that_is_replaced_too(slow_here, monkeypatch):
    monkeypatch.setattr(gated_mlp, "WIDE", 1)
    model, call = made("Llama")
    want = stepped(model, call)
    found = recognise(model, call, Choices(), only=(KIND, "gated_mlp"))

    def asked() -> dict[str, int]:
        recorder = Recorder()
        found.ask(recorder)
        model(*call.args, **call.kwargs)
        return {op: sum(n for c, n in recorder.calls.values() if c.op == op) for op in ("linear", "gated_linear", "swiglu")}

    assert asked() == dict(linear=9, gated_linear=2, swiglu=0)
    found.ask(TRITON)
    loss, grads = stepped(model, call)
    torch.testing.assert_close(loss, want[0])
    for n in grads:
        torch.testing.assert_close(grads[n], want[1][n], msg=lambda text, n=n: f"{n}: {text}")
    hook = model.model.layers[0].mlp.down_proj.register_forward_hook(lambda *_: None)
    assert asked() == dict(linear=10, gated_linear=1, swiglu=1), "it would not be met"
    hook.remove()
    found.restore()


def test_few_rows_and_other_dtypes_run_as_they_were():
    layer, recorder = nn.Linear(64, 64), Recorder()
    Journal().make(float32_linear.edits_with(256)(layer, recorder))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(torch.randn(300, 64)).dtype == torch.bfloat16
    layer(torch.randn(255, 64))
    assert not recorder.calls
    layer(torch.randn(4, 64, 64))
    assert [(c.op, c.case["M"]) for c, _ in recorder.calls.values()] == [("linear", 256)]


def test_nothing_is_looked_for_without_a_gpu_in_16_bits_or_where_tf32_is_allowed(monkeypatch):
    model, call = made("plain")
    if not torch.cuda.is_available():
        assert not recognise(model, call, Choices(), only=(KIND,)).sites
    weight = type("Weight", (), dict(dtype=torch.float32, is_cuda=True))()
    here = type("Here", (), dict(capability=(9, 0)))
    monkeypatch.setattr(_products.machine, "this_machine", here)
    monkeypatch.setattr(_products.machine, "triton_mode", lambda: "gpu")
    assert _products.by_halves(weight)
    for precision in ("high", "chosen"):
        monkeypatch.setattr(_products, "float32_precision", lambda precision=precision: precision)
        assert not _products.by_halves(weight)
    monkeypatch.undo()
    monkeypatch.setattr(_products.machine, "triton_mode", lambda: "gpu")
    monkeypatch.setattr(here, "capability", (8, 9))
    monkeypatch.setattr(_products.machine, "this_machine", here)
    assert not _products.by_halves(weight), "a consumer's GPU"
    weight.dtype, here.capability = torch.bfloat16, (9, 0)
    assert not _products.by_halves(weight)


def test_where_tf32_is_allowed_later_a_layer_runs_as_it_was_also_compiled():
    layer, recorder = nn.Linear(64, 64), Recorder()
    Journal().make(float32_linear.edits_with(4)(layer, recorder))
    torch.set_float32_matmul_precision("high")
    try:
        layer(torch.randn(8, 64))
        assert not recorder.calls
    finally:
        torch.set_float32_matmul_precision("highest")
    layer(torch.randn(8, 64))
    assert len(recorder.calls) == 1

    compiled = torch.compile(lambda x: x if machine.float32_precision() == "highest" else -x, backend="eager", fullgraph=True)
    one = torch.ones(1)
    try:
        for precision, sign in (("highest", 1), ("high", -1), ("highest", 1)):
            torch.set_float32_matmul_precision(precision)
            assert compiled(one) == sign
    finally:
        torch.set_float32_matmul_precision("highest")


def test_a_layer_may_be_called_by_keyword():
    x, made = torch.randn(8, 64), [(nn.Linear(64, 64), "input")]
    if find_spec("transformers"):
        made.append((import_module("transformers.pytorch_utils").Conv1D(64, 64), "x"))
    for layer, name in made:
        want, recorder = layer(x), Recorder()
        Journal().make(float32_linear.edits_with(4)(layer, recorder))
        torch.testing.assert_close(layer(**{name: x}), want)
        assert len(recorder.calls) == 1


@pytest.mark.parametrize("name, value", [("cuda", "tf32"), ("mkldnn", "bf16")])
def test_a_precision_set_by_torchs_newer_names_is_read_kept_and_put_back(name, value):
    matmul = getattr(torch.backends, name).matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = value
    try:
        with pytest.raises(RuntimeError, match="mix of the legacy and new"):
            torch.get_float32_matmul_precision()
        set_here = machine.float32_precision()
        assert f"{name}={value}" in set_here
        whet.optimize(nn.Sequential(nn.Linear(8, 8)), torch.randn(4, 8))
        with matmul_precision("highest"):
            assert machine.float32_precision() == "highest" and matmul.fp32_precision != value
        assert machine.float32_precision() == set_here and matmul.fp32_precision == value
    finally:
        matmul.fp32_precision = before
        torch.set_float32_matmul_precision("highest")
