"""Candidates: an impl that implies an argument, tile variants of an impl, and what "auto" does where even eager refuses."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import every_op, exact, first_case, has_triton

import whet.ops
from whet import choices as choices_module
from whet.choices import Choices, Recorder, public, use
from whet.op import DTYPES, Call, Impl, Rank, base, discover
from whet.prove import Proof, TrialInputs
from whet.report import bench_tables, readme
from whet.verify import verify_case

OP = discover()["rms_norm"]
TILES = ("2x2", "4x4")
X, W = torch.randn(4, 16), torch.ones(16)


def tiled(x, w, eps=1e-6, out_dtype=None, tile="default"):
    """Tells which tile ran, and with which eps."""
    return torch.full_like(x, {"default": 1.0, "2x2": 2.0, "4x4": 4.0}[tile]) + eps


def few_rows(x, w, eps=1e-6, out_dtype=None):
    """Not traceable, as a look at the machine is not."""
    assert x.device.type == "meta"
    torch._dynamo.graph_break()
    return TILES if x.shape[0] <= 8 else TILES[:1]


@pytest.fixture
def planted(monkeypatch):
    """The stock impl with tiles, implying an eps."""
    torch._dynamo.reset()
    monkeypatch.setitem(OP.impls, "torch", Impl(tiled, tiles=few_rows, implies={"eps": 3.0}))


def call(rows: int = 4) -> Call:
    return Call("rms_norm", {"M": rows, "N": 16, "layout": "contiguous"}, "float32", False)


def compiled(function):
    return torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=False)


BOTH = pytest.mark.parametrize("way", [pytest.param(lambda f: f, id="eager"), pytest.param(compiled, id="compile")])


def test_a_candidate_is_an_impl_or_one_with_its_tile(planted):
    meta = OP.inputs(dtype=torch.float32, device="meta", M=4, N=16)
    names = OP.candidates(meta)
    assert names[:4] == ["eager", "torch", "torch@2x2", "torch@4x4"] and [base(n) for n in names[1:4]] == ["torch"] * 3
    more = OP.inputs(dtype=torch.float32, device="meta", M=9, N=16)
    assert OP.candidates(more)[:4] == ["eager", "torch", "torch@2x2", "compile"]
    assert OP.candidate("torch@4x4").run(X, W, 0.0)[0, 0] == 4 and OP.candidate("torch").run(X, W, 0.0)[0, 0] == 1
    assert replace(OP.candidate("torch@4x4"), run=tiled) == OP.impls["torch"]


def test_what_is_refused_or_only_interpreted_has_no_variants(monkeypatch):
    meta = OP.inputs(dtype=torch.float32, device="meta", M=4, N=16)
    monkeypatch.setitem(OP.impls, "torch", Impl(tiled, lambda **_: "no", tiles=few_rows))
    monkeypatch.setitem(OP.impls, "triton", Impl(tiled, needs="triton", tiles=few_rows))
    monkeypatch.setitem(OP.impls, "eager", Impl(tiled, lambda **_: pytest.fail("asked about arguments on the meta device")))
    monkeypatch.setattr("whet.machine.triton_mode", lambda: "interpret")
    assert OP.candidates(meta) == list(OP.impls)
    monkeypatch.setattr("whet.machine.triton_mode", lambda: "gpu")
    assert "triton@2x2" in OP.candidates(meta) and "torch@2x2" not in OP.candidates(meta)


@BOTH
def test_a_named_tile_runs_and_an_unknown_one_names_the_choices(way, planted):
    run = way(lambda x, w, impl: whet.ops.rms_norm(x, w, 0.0, impl=impl))
    assert run(X, W, "torch@4x4")[0, 0] == 4 and run(X, W, "torch@2x2")[0, 0] == 2 and run(X, W, "torch")[0, 0] == 1
    with pytest.raises(Exception, match=r"rms_norm\[torch@9x9\]: the tile must be one of \['2x2', '4x4'\].* got '9x9'"):
        run(X, W, "torch@9x9")
    with pytest.raises(Exception, match=r"has no tiles to choose among .* got '2x2'; impl='eager' takes its own"):
        run(X, W, "eager@2x2")


def test_an_unknown_impl_with_a_tile_names_the_impls():
    with pytest.raises(ValueError, match="impl must be 'auto' or one of .*, got 'cuda@2x2'"):
        whet.ops.rms_norm(X, W, impl="cuda@2x2")


@BOTH
def test_auto_runs_the_chosen_tile_and_an_unknown_one_gives_way_to_the_default(way, planted):
    gone = ((4, "torch@9x9", 1), (16, "torch@4x4", 1), (4, "gone@2x2", 1))
    for rows, chosen, value in ((4, "torch@4x4", 4), (4, "torch@2x2", 2), *gone):
        torch._dynamo.reset()
        made = Choices({call(rows).key: chosen})
        assert made.pick(OP, call(rows)) == (chosen if base(chosen) in OP.impls else "torch")
        with use(made):
            assert way(lambda x, w: whet.ops.rms_norm(x, w, 0.0))(torch.randn(rows, 16), W)[0, 0] == value, chosen


def test_a_length_that_varies_under_compile_keeps_its_tile(planted):
    def both(x, w):
        return whet.ops.rms_norm(x, w, 0.0), whet.ops.rms_norm(x, w, 0.0, impl="torch@2x2")

    run = torch.compile(both, backend="aot_eager", fullgraph=True)
    with use(Choices(default="torch@4x4")):
        for rows in (4, 5, 6, 16):
            auto, named = run(torch.randn(rows, 16), W)
            assert (auto[0, 0], named[0, 0]) == (4 if rows <= 8 else 1, 2)


def test_a_compiled_model_given_other_choices_is_traced_anew_and_a_recorder_counts_what_is_traced(planted):
    model, recorder = SimpleNamespace(), Recorder(default="torch")
    run = compiled(lambda x, w: model.ops.rms_norm(x, w, 0.0))
    made = {1: recorder, 2: Choices(default="torch@2x2"), 4: Choices({call().key: "torch@4x4"})}
    for value, model.ops in (made | made).items():
        assert run(X, W)[0, 0] == value
    assert recorder.calls == {call().key: (call(), 1)}


def test_choices_take_a_tile_as_the_default(planted):
    assert Choices(default="torch@4x4").rms_norm(X, W, 0.0)[0, 0] == 4
    with pytest.raises(ValueError, match="default must be None or an impl of some op, one of"):
        Choices(default="cuda@4x4")


@BOTH
def test_naming_an_impl_sets_what_it_implies_unless_it_is_given(way, planted):
    named = public(OP)
    assert way(lambda x, w: named(x, w, impl="torch"))(X, W)[0, 0] == 4.0
    assert way(lambda x, w: named(x, w, impl="torch@2x2"))(X, W)[0, 0] == 5.0
    assert way(lambda x, w: named(x, w, eps=1.0, impl="torch"))(X, W)[0, 0] == 2.0
    assert way(lambda x, w: named(x, w, 1.0, impl="torch"))(X, W)[0, 0] == 2.0
    assert "Naming torch sets eps=3.0 unless given." in named.__doc__


@BOTH
def test_auto_implies_nothing(way, planted):
    with use(Choices(default="torch")):
        assert way(lambda x, w: whet.ops.rms_norm(x, w))(X, W)[0, 0] < 1.1


@BOTH
def test_where_stock_and_eager_refuse_auto_takes_the_simplest_that_does_not(way, monkeypatch):
    torch._dynamo.reset()
    for name in ("eager", "torch"):
        monkeypatch.setitem(OP.impls, name, Impl(tiled, lambda x, w, eps, out_dtype: "the scores do not fit"))
    monkeypatch.setitem(OP.impls, "compile", Impl(lambda x, w, eps, out_dtype: x * 0 + 7))
    run = way(lambda x, w: whet.ops.rms_norm(x, w))
    monkeypatch.setattr(choices_module, "_active", [Choices()])
    assert run(X, W)[0, 0] == 7


def test_where_every_impl_refuses_auto_says_what_each_said(monkeypatch):
    for name in OP.impls:
        monkeypatch.setitem(OP.impls, name, Impl(tiled, lambda x, w, eps, out_dtype: "the scores do not fit"))
    reasons = r"rms_norm\[auto\]: no impl takes these arguments \(eager: the scores do not fit; torch: "
    with pytest.raises(ValueError, match=reasons):
        Choices().rms_norm(X, W)


def test_a_call_in_another_layout_is_looked_up_anew(monkeypatch):
    def contiguous_only(x, w, eps, out_dtype):
        return None if x.is_contiguous() else "x must be contiguous"

    monkeypatch.setitem(OP.impls, "torch", Impl(tiled, contiguous_only))
    made = Choices()
    assert made.rms_norm(X, W, 0.0)[0, 0] == 1, "the planted impl"
    assert made.rms_norm(X.T.contiguous().T, W, 0.0)[0, 0] != 1, "another that takes the layout"


def test_options_that_are_equal_but_of_another_type_are_checked_anew():
    q = torch.randn(1, 1, 4, 16)
    made = Choices()
    made.attention(q, q, q, causal=True, window=1)
    windows = (dict(causal=True, window=True), dict(causal=True, window=1.0))
    for wrong in (dict(causal=1), dict(causal=1.0), dict(causal=[1]), *windows):
        with pytest.raises(ValueError, match=r"attention\[auto\]: (causal|window) must be"):
            made.attention(q, q, q, **wrong)


@pytest.mark.parametrize("impl", [None, [], print])
def test_an_impl_that_is_no_name_names_the_choices(impl):
    with pytest.raises(ValueError, match="rms_norm: impl must be 'auto' or one of "):
        whet.ops.rms_norm(X, W, impl=impl)


def test_whets_own_kernels_are_those_that_say_so_or_need_triton():
    op = discover()["attention"]
    ours = ["triton", "triton_fused_bwd", "triton_cudnn_bwd", "triton_float32", "triton_fp8"]
    assert [n for n in op.impls if op.ours(n)] == ours
    assert op.ours("triton@64x64w4s2") and not op.ours("torch") and not op.ours("gone")


def test_an_op_file_brings_impls_of_new_names_without_a_list_to_edit(monkeypatch):
    op = replace(OP, impls=OP.impls | {
        "quack": Impl(tiled, needs="quack"), "cuda": Impl(tiled, ours=True, rank=Rank.KERNEL, words="whet's own in CUDA C++"),
        "handwritten": Impl(tiled),
    })
    assert list(op.impls) == ["eager", "torch", "handwritten", "compile", "triton", "cuda", "liger", "quack"], "as ties go"
    assert op.ours("cuda") and not op.ours("quack") and "needs the package quack" in op.unavailable("quack")
    page = readme.op_section(op)
    assert "| cuda | whet's own in CUDA C++ |" in page and "| quack | the kernel of the package `quack` |" in page
    monkeypatch.setitem(discover(), "rms_norm", op)
    assert Choices(default="cuda").rms_norm(X, W, 0.0)[0, 0] == 1 and public(op)(X, W, 0.0, impl="cuda")[0, 0] == 1
    entry = {"call": vars(call()), "candidates": {n: dict(ok=True, ms=1.0) for n in ("quack", "cuda", "eager")}}
    assert bench_tables.split([entry]) == [(["eager", "quack", "cuda"], [entry])], "whet's own last"
    for name in ("auto", "cuda@2"):
        with pytest.raises(ValueError, match="rms_norm: an impl's name must be an identifier other than 'auto', got"):
            replace(OP, impls={name: Impl(tiled)})


@pytest.mark.parametrize("op", every_op(has_triton))
def test_what_a_kernel_refuses_is_asked_once_for_a_call(op, device, monkeypatch):
    impl, asked = op.impls["triton"], []

    def counted(*args, **options):
        asked.append(op.name)
        return impl.refuses(*args, **options)

    def count(run) -> int:
        asked.clear()
        run()
        return len(asked)

    monkeypatch.setitem(op.impls, "triton", replace(impl, refuses=counted))
    monkeypatch.setattr(sys.modules[impl.run.__module__], "refuses", counted, raising=False)  # where a launcher might ask too
    case, dtype = first_case(op), exact(op, "triton")
    args = op.inputs(dtype=DTYPES[dtype], device=device, **case)
    asking, named = Choices(default="triton"), public(op)
    times = [count(lambda: named(**args, impl="triton")), *(count(lambda: getattr(asking, op.name)(**args)) for _ in range(2))]
    assert times == [1, 1, 0], "named; auto; auto again"
    assert count(lambda: verify_case(op, "triton", case, dtype, device, grad=False)) == 1
    proof = Proof(op, "triton", Call(op.name, case, dtype, False), device)
    assert count(lambda: proof.verify(TrialInputs(proof.small, dtype))) == 1


def test_where_choices_give_way_no_impl_is_asked_twice(monkeypatch):
    asked = []
    for name in OP.impls:
        refuses = lambda x, w, eps, out_dtype, name=name: asked.append(name) or "no"  # noqa: E731
        monkeypatch.setitem(OP.impls, name, Impl(tiled, refuses, tiles=few_rows))
    with pytest.raises(ValueError, match="no impl takes these arguments"):
        Choices({call().key: "torch@2x2"}).rms_norm(X, W)
    assert sorted(asked) == sorted(OP.impls)
