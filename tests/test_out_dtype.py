"""Norms that round at the store: out_dtype is the cast behind the norm, in values, gradients, bytes and the call's key."""

import pytest
import torch
from conftest import assert_same_bits
from test_registered import Watch
from torch.utils._python_dispatch import TorchDispatchMode

import whet.ops
from whet.choices import Choices, Recorder
from whet.models import find, recipe_of
from whet.models.gpt2 import GPT2, GPT2Config
from whet.op import as_tuple, discover
from whet.verify import evaluate, widen
from whet.workload import Workload

NORMS = ["rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm"]
norms = pytest.mark.parametrize("name", NORMS)
impls = pytest.mark.parametrize("impl", ["eager", "torch", "triton"])
CASES = {"float32": {}, "as under autocast": dict(w_dtype="float32", res_dtype="float32")}  # of add_*: a product, the stream


def inputs(name: str, device: str, how: str = "float32", N: int = 100, **case) -> dict:
    sums = name.startswith("add")
    case |= CASES[how] if sums else {}
    dtype = torch.bfloat16 if sums and CASES[how] else torch.float32
    return discover()[name].inputs(dtype=dtype, device=device, M=7, N=N, **case)


def run_of(name: str, impl: str):
    return lambda **args: getattr(whet.ops, name)(**args, impl=impl)


def cast(function):
    """The norm without an out_dtype, and the cast behind it."""
    def run(out_dtype=None, **args):
        y, *h = as_tuple(function(**args))
        return y.to(out_dtype), *h

    return run


@pytest.mark.parametrize("how", CASES)
@impls
@norms
def test_it_has_the_bits_of_the_norm_and_the_cast_behind_it_in_values_and_gradients(name, impl, how, device):
    op, args = discover()[name], inputs(name, device, how, out_dtype="bfloat16")
    assert args["out_dtype"] == torch.bfloat16
    found = evaluate(op, run_of(name, impl), args, grad=True)
    assert found["output 0"].dtype == torch.bfloat16
    assert all(found[k].dtype == torch.float32 for k in ("output 1", "grad w") if k in found)
    assert_same_bits(found, evaluate(op, cast(run_of(name, impl)), args, grad=True))


@norms
def test_a_finer_result_is_rounded_once_and_stock_calls_refuse_it(name, device):
    op = discover()[name]
    args = op.inputs(dtype=torch.bfloat16, device=device, M=7, N=100, w_dtype="bfloat16", out_dtype="float32")
    found = [as_tuple(run_of(name, impl)(**args))[0] for impl in ("eager", "triton")]
    torch.testing.assert_close(*found)
    assert all(y.dtype == torch.float32 and (y != y.bfloat16()).any() for y in found)
    held = r"out_dtype must be None or a dtype that torch.bfloat16 holds, .* got torch.float32"
    with pytest.raises(ValueError, match=rf"{name}\[torch\]: {held}"):
        run_of(name, "torch")(**args)
    if "liger" in op.impls:
        assert op.impls["liger"].refuses(**args) == op.impls["torch"].refuses(**args)
    assert torch.equal(as_tuple(getattr(Choices(), name)(**args))[0], found[0]), "the formula serves it"


@impls
@norms
def test_a_wrong_out_dtype_is_refused_in_one_line(name, impl, device):
    args = inputs(name, device)
    for value, said in (("bfloat16", "a torch.dtype or None, got 'bfloat16'"), (torch.int8, "one of .*, got int8")):
        with pytest.raises(ValueError, match=rf"{name}\[{impl}\]: out_dtype must be .*{said}"):
            run_of(name, impl)(**args | dict(out_dtype=value))
    if impl == "triton":
        with pytest.raises(ValueError, match="out_dtype must be float32, float16 or bfloat16, got torch.float64"):
            run_of(name, impl)(**args | dict(out_dtype=torch.float64))


@norms
def test_the_oracle_rounds_to_no_dtype_that_is_asked_for(name, device):
    op = discover()[name]
    exact = {k: widen(v) for k, v in inputs(name, device, out_dtype="bfloat16").items()}
    assert exact["out_dtype"] == torch.float64
    plain = evaluate(op, op.reference, exact | dict(out_dtype=None), grad=True)
    assert_same_bits(evaluate(op, op.reference, exact, grad=True), plain)


@norms
def test_the_key_of_a_call_has_it_where_it_changes_the_result(name, device):
    op, args = discover()[name], inputs(name, device, "as under autocast")
    own = op.call(args | dict(out_dtype=torch.float32)).key
    assert own == op.call(args).key and "out_dtype" not in own
    assert "out_dtype=bfloat16" in op.call(args | dict(out_dtype=torch.bfloat16)).key


@pytest.mark.parametrize("how", CASES)
@norms
def test_two_bytes_an_element_less_are_moved_each_way(name, how, device):
    op, args = discover()[name], inputs(name, device, how)
    wide, narrow = op.cost(**args), op.cost(**args | dict(out_dtype=torch.bfloat16))
    saved = 2 * args["x"].numel()
    assert (wide.bytes - narrow.bytes, wide.bwd_bytes - narrow.bwd_bytes) == (saved, saved)


@pytest.mark.parametrize("bias", [True, False])
@norms
def test_library_ops_pass_opcheck_and_compile_to_the_same_bits(name, bias, device):
    op, args = discover()[name], inputs(name, device, "as under autocast", out_dtype="bfloat16")
    args |= {} if bias or "b" not in args else dict(b=None)
    direct = evaluate(op, run_of(name, "triton"), args, grad=True)
    with Watch() as watch:
        assert_same_bits(evaluate(op, run_of(name, "triton"), args, grad=True), direct)
    assert len({func for func, _ in watch.calls}) == 2
    for func, call in watch.calls:
        call = [a.detach().clone() if isinstance(a, torch.Tensor) else a for a in call]
        if not func._schema.name.endswith("_bwd"):
            for a in call:
                if isinstance(a, torch.Tensor):
                    a.requires_grad_()
        torch.library.opcheck(func, tuple(call))
    torch._dynamo.reset()
    backend = "inductor" if device == "cuda" else "aot_eager"
    compiled = torch.compile(run_of(name, "triton"), backend=backend, fullgraph=True, dynamic=False)
    assert_same_bits(evaluate(op, compiled, args, grad=True), direct)


class CastsOf(TorchDispatchMode):
    """Counts casts of tensors of one shape between float32 and bfloat16."""

    def __init__(self, *shape: int):
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and tuple(out.shape) == self.shape:
            self.count += {args[0].dtype, out.dtype} == {torch.float32, torch.bfloat16}
        return out


def under_autocast(model, data, ops: Recorder, shape: tuple[int, ...]) -> tuple[dict, int]:
    """{call key: out_dtype} of a step's norms, and the casts of the forward."""
    work = Workload(model, kwargs=data, precision="bfloat16")
    ops.calls.clear()
    with CastsOf(*shape) as casts:
        work.forward()
    calls = [call for call, _ in ops.calls.values() if call.op in NORMS]
    return {call.key: call.case.get("out_dtype") for call in calls}, casts.count


@pytest.mark.parametrize("target", ["transformer-np:tiny", "gpt2:tiny@2x16", "tiny-llama:tiny@2x16"])
def test_tuned_models_ask_norms_for_the_dtype_of_the_products_and_cast_none_of_their_results(target, device):
    model, size = find(target)
    data = model.batch(model.sizes[size], recipe_of(target), device)
    found = {}
    for variant in (model.stock, model.tuned):
        made = Recorder(default="triton" if variant == model.tuned else None)
        module = model.build(model.sizes[size], variant, made, seed=0).to(device)
        width = next(p.shape[0] for n, p in module.named_parameters() if "norm1" in n)
        found[variant] = under_autocast(module, data, made, (*next(iter(data.values())).shape[:2], width))
    asked, casts = found[model.tuned]
    assert asked and set(asked.values()) == {"bfloat16"} and casts == 0
    asked, casts = found[model.stock]
    assert asked and set(asked.values()) == {None} and casts > 0


def test_the_norm_that_further_tokens_are_predicted_from_stays_wide(device):
    """It is added to a projection of itself, not only read by products."""
    tokens = torch.randint(97, (2, 16), device=device)
    for mtp in (0, 1):
        ops = Recorder()
        model = GPT2(GPT2Config(vocab=97, width=64, layers=1, heads=2, kv_heads=2, mtp=mtp), "tuned", ops).to(device)
        asked, _ = under_autocast(model, dict(tokens=tokens, labels=tokens), ops, (2, 16, 64))
        assert list(asked.values()).count(None) == (1 if mtp else 0) and "bfloat16" in asked.values()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outside_autocast_nothing_is_asked(dtype, device):
    tokens, ops = torch.randint(97, (2, 16), device=device), Recorder()
    model = GPT2(GPT2Config(vocab=97, width=64, layers=1, heads=2, kv_heads=2), "tuned", ops).to(device, dtype)
    model.hidden(tokens)
    assert {call.case.get("out_dtype") for call, _ in ops.calls.values() if call.op in NORMS} == {None}
