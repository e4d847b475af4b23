"""attention with whet's forward and cuDNN's backward: what it refuses, and on a GPU that what is handed over is right."""

import pytest
import torch
from test_registered import Watch, fresh, kernel_of
from torch.utils.checkpoint import checkpoint

import whet.ops
from whet.graphs import Graph
from whet.op import discover
from whet.ops.attention import hybrid, launch
from whet.verify import evaluate, judge, upstream, verify, widen

OP = discover()["attention"]
NAME = "triton_cudnn_bwd"
run = kernel_of(OP, NAME)
CASES = [
    dict(B=2, H=4, KV=4, Lq=257, Lk=129, D=64), dict(B=2, H=8, KV=2, Lq=130, Lk=333, D=128),
    dict(B=1, H=4, KV=1, Lq=300, Lk=300, D=40, causal="bottom-right"),
    dict(B=2, H=2, KV=2, Lq=65, Lk=190, D=96, causal="top-left"),
    dict(B=3, H=2, KV=2, Lq=500, Lk=64, D=64, layout="bshd"), dict(B=2, H=4, KV=2, Lq=128, Lk=128, D=64, layout="sliced"),
]


def named(case):
    return "-".join(str(v) for v in case.values())


LAYOUTS = ["contiguous", "transposed", "sliced", "expanded"]
CASE = pytest.mark.parametrize("case", CASES, ids=named)


@pytest.mark.parametrize("change, words", [
    (dict(dtype=torch.float32), "float16 or bfloat16"), (dict(D=20), "multiple of 8"), (dict(D=136), "multiple of 8 up to 128"),
    (dict(Lq=1), "a single row"), (dict(Lk=0), "must not be empty"), (dict(window=16), "window=16"),
    (dict(causal="bottom-right"), "only full or top-left causal, got causal='bottom-right',"),
    (dict(precision="fp8"), "precision='fp8' is served by"),
])
def test_refuses_what_cudnns_backward_does_not_do(change, words):
    case = dict(B=1, H=2, KV=1, Lq=48, Lk=64, D=32) | change
    dtype = case.pop("dtype", torch.bfloat16)
    assert words in OP.impls[NAME].refuses(**OP.inputs(dtype, "meta", **case))


@pytest.mark.parametrize("deterministic", [True, False])
def test_the_backward_is_ours_where_algorithms_must_be_deterministic(deterministic, monkeypatch):
    """torch's own selection keeps cuDNN away then; the op that is called here does not."""
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    monkeypatch.setattr(launch, "launch_backward", lambda *_: "ours")
    monkeypatch.setattr(hybrid, "backward", lambda *_, **__: "cuDNN's")
    x = torch.empty(1, 1, 64, 16)
    given = (x, None, x, x, x, x, x[..., 0], 1.0, 0, -1, -1, "")
    assert launch.launch_hybrid(*given) == ("ours" if deterministic else "cuDNN's")


@CASE
def test_takes_plain_and_causal_calls_from_the_first_key_on(case):
    assert OP.impls[NAME].refuses(**OP.inputs(torch.bfloat16, "meta", **case)) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_needs_a_gpu_and_says_so():
    q = torch.randn(1, 2, 64, 32, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"attention\[triton_cudnn_bwd\]: needs a GPU with cuDNN"):
        whet.ops.attention(q, q, q, impl=NAME)


@pytest.mark.parametrize("cut", ["misaligned", "expanded", "transposed"])
@pytest.mark.parametrize("kept", ["as the forward made it", "contiguous"])
@pytest.mark.parametrize("layout", ["contiguous", "bshd", "sliced"])
def test_cudnn_gets_o_and_do_as_q_lies_and_aligned(layout, kept, cut, monkeypatch):
    """Its plan is kept for the strides of q, k and v alone, and it takes tensors to start at multiples of 16 bytes."""
    seen = []

    def cudnn(do, q, k, v, o, lse, *_, scale):
        seen.append((do, q, o, lse))
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)

    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention_backward", cudnn)
    args = OP.inputs(torch.bfloat16, "cpu", B=2, H=4, KV=2, Lq=6, Lk=10, D=16, layout=layout)
    q, k, v = (args[n] for n in "qkv")
    o = torch.randn_like(q)
    o = o.contiguous() if kept == "contiguous" else o
    if cut == "misaligned":
        do = torch.empty(o.numel() + 1, dtype=o.dtype)[1:].as_strided(o.shape, o.stride(), 1).normal_()
    else:
        do = torch.randn(1).to(o).expand(o.shape) if cut == "expanded" else torch.randn_like(o.mT.contiguous()).mT
    grads = hybrid.backward(do, q, k, v, o, torch.zeros(o.shape[:3]), 1.0, causal=False)
    [(got_do, got_q, got_o, lse)] = seen
    assert got_q is q and lse.shape == (*o.shape[:3], 1)
    for got, given in ((got_do, do), (got_o, o)):
        assert got.stride() == torch.empty_like(q).stride() and got.data_ptr() % 16 == 0 and torch.equal(got, given)
    assert [g.stride() for g in grads] == [torch.empty_like(x).stride() for x in (q, k, v)]


def judged(actual, args):
    """A verdict on outputs and gradients, against the reference on these arguments."""
    oracle = evaluate(OP, OP.reference, {k: widen(v) for k, v in args.items()}, True)
    return judge(actual, evaluate(OP, OP.reference, args, True), oracle)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("dout", LAYOUTS)
@CASE
def test_gradients_are_right_under_any_upstream_layout(case, dout, dtype, device):
    verdict = verify(OP, OP.impls[NAME], OP.inputs(dtype, device, **case), dout_layout=dout)
    assert verdict.ok, verdict.why


@pytest.mark.gpu
@pytest.mark.parametrize("first", LAYOUTS)
@CASE
def test_plans_that_torch_made_for_other_calls_do_not_matter(case, first, device):
    """torch's own backward keeps the plan of the first upstream layout it meets, and misreads later ones with it."""
    case = case | dict(B=case["B"] + 1 + LAYOUTS.index(first))  # a size that no other test has made a plan for
    args = OP.inputs(torch.bfloat16, device, **case)
    if OP.impls["sdpa_cudnn"].refuses(**args) is None:
        evaluate(OP, OP.impls["sdpa_cudnn"].run, args, True, first)
    for dout in LAYOUTS:
        verdict = verify(OP, OP.impls[NAME], args, dout_layout=dout)
        assert verdict.ok, f"{dout}: {verdict.why}"


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["sdpa_cudnn", "torch"])
def test_torchs_own_plans_are_as_wrong_as_beware_says(impl, device):
    case = dict(B=7, H=4, KV=4, Lq=257 + 8 * (impl == "torch"), Lk=129, D=64)
    args = OP.inputs(torch.bfloat16, device, **case)
    if reason := OP.why_not("sdpa_cudnn", args):
        pytest.skip(reason)
    assert verify(OP, OP.impls[impl], args).ok
    verdict = verify(OP, OP.impls[impl], args, dout_layout="sliced")
    assert not verdict.ok, f"torch {torch.__version__} reads other upstream layouts: what `caveat` says is over"


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [0.02, 0.5])
def test_scale_and_log_sum_exp_are_handed_over(scale, device):
    args = OP.inputs(torch.bfloat16, device, B=2, H=4, KV=2, Lq=200, Lk=310, D=64) | dict(scale=scale)
    for options in ({}, dict(return_lse=True)):
        verdict = verify(OP, OP.impls[NAME], args | options)
        assert verdict.ok, verdict.why


@pytest.mark.gpu
def test_the_log_sum_exp_alone_has_its_gradient(device):
    def lse_of(function):
        return lambda **a: function(**a)[1]

    args = OP.inputs(torch.bfloat16, device, B=2, H=4, KV=2, Lq=200, Lk=310, D=64) | dict(return_lse=True)
    oracle = evaluate(OP, lse_of(OP.reference), {k: widen(v) for k, v in args.items()}, True)
    eager, actual = (evaluate(OP, lse_of(f), args, True) for f in (OP.reference, run))
    assert oracle.pop("grad v") is None and (actual["grad v"] is None or not actual["grad v"].any())
    verdict = judge(actual, eager, oracle)
    assert verdict.ok, verdict.why


@pytest.mark.gpu
@CASE
def test_compiled_checkpointed_and_watched_calls_are_right(case, device):
    torch._dynamo.reset()
    args = OP.inputs(torch.bfloat16, device, **case)
    ways = {
        "compiled": torch.compile(run, fullgraph=True, dynamic=False),
        "checkpointed": lambda **a: checkpoint(run, use_reentrant=False, **a),
    }
    for way, function in ways.items():
        verdict = judged(evaluate(OP, function, args, True), args)
        assert verdict.ok, f"{way}: {verdict.why}"
    with Watch() as watch:
        evaluate(OP, run, args, True)
    for func, call in watch.calls:
        call = [a.detach().clone() if isinstance(a, torch.Tensor) else a for a in call]
        torch.library.opcheck(func, tuple(call), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.gpu
@CASE
def test_a_graph_replays_with_new_values(case, device):
    args = fresh(OP, case, device, "bfloat16")
    leaves = [args[n] for n in "qkv"]
    dout = upstream(run(**args), 0, "contiguous")

    def step():
        o = run(**args)
        return {"output 0": o.detach()} | {f"grad {n}": g for n, g in zip("qkv", torch.autograd.grad(o, leaves, dout))}

    graph = Graph(step, warm_up=1)
    captured = graph.out
    with torch.no_grad():
        for t in captured.values():
            t.fill_(float("nan"))
        for leaf in leaves:
            leaf.copy_(torch.randn_like(leaf))
    graph()
    verdict = judged(captured, args)
    assert verdict.ok, verdict.why
