"""mlp: every tile is right at ragged sizes, what is kept for the backward, what is refused, and what a frozen part gets."""

import pytest
import torch

from whet.aot import pretended
from whet.op import discover
from whet.ops import mlp
from whet.ops.mlp import kernel
from whet.verify import verify

OP = discover()["mlp"]
OURS = ("hybrid", "hybrid_recompute", "triton")
TILES = ("128x256x32x512w8s2", "64x512x16x512w8s2", "128x256x64x64w8s3", "32x32x16x16w4s2")


def given(device, dtype=torch.float32, **case):
    sizes = dict(M=9, D=32, H=40, O=24) | case
    args = OP.inputs(dtype=dtype, device=device, **sizes)
    return {k: v.requires_grad_() if isinstance(v, torch.Tensor) else v for k, v in args.items()}


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("tile", TILES)
def test_a_tile_is_right_at_ragged_sizes_with_several_blocks_of_each(tile, gated, device):
    case = dict(M=150, D=72, H=85, O=70, gated=gated)
    for dtype in (torch.bfloat16, torch.float16):  # in float32 some take more memory than an SM has
        verdict = verify(OP, OP.candidate(f"triton@{tile}"), OP.inputs(dtype=dtype, device=device, **case))
        assert verdict.ok, verdict


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("activation", ["gelu", "silu"])
def test_computed_again_the_pre_activations_give_the_bits_of_those_that_were_kept(activation, gated, device):
    """A second backward through the same graph too: what is written over was made for it alone."""
    torch.manual_seed(0)
    args = given(device, dtype=torch.bfloat16, gated=gated, activation=activation)
    every = [t for t in args.values() if isinstance(t, torch.Tensor)]
    kept, again = (mlp(**args, impl=impl) for impl in ("hybrid", "hybrid_recompute"))
    assert torch.equal(kept, again)
    dy = torch.randn_like(kept)
    expected = torch.autograd.grad(kept, every, dy)
    for _ in range(2):
        assert all(map(torch.equal, torch.autograd.grad(again, every, dy, retain_graph=True), expected))


@pytest.mark.parametrize("wrong", ["64x64", "64x256x64x64w8", "x64x256x64x64w8s3"])
def test_a_tile_that_is_none_says_how_one_is_written(wrong):
    with pytest.raises(ValueError, match="mlp: a tile is written like 64x256x64x64w8s3"):
        kernel.MlpTile.read(wrong)


def kept(run) -> int:
    """Elements that autograd keeps between a forward and its backward, each memory once."""
    seen: dict[int, int] = {}

    def note(t):
        seen[t.data_ptr()] = t.numel()
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        run()
    return sum(seen.values())


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_hybrid_keeps_no_hidden_value_and_what_computes_again_x_alone(gated, device):
    args = given(device, gated=gated)
    own = sum(args[k].numel() for k in ("x", "up", "down")) + (args["gate"].numel() if gated else 0)
    hidden = args["x"].shape[0] * args["up"].shape[0]
    count = {impl: kept(lambda impl=impl: mlp(**args, impl=impl)) - own for impl in ("torch", *OURS)}
    assert count["triton"] == count["hybrid_recompute"] == 0
    assert count["hybrid"] == hidden * (2 if gated else 1)
    assert count["torch"] >= hidden * (4 if gated else 2)


@pytest.mark.parametrize("impl", OURS)
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("trained", [("x",), ("up",), ("down",), ("gate",), ("up", "down"), ("x", "gate")], ids="+".join)
def test_what_is_frozen_gets_no_gradient_and_the_rest_its_own(impl, gated, trained, device):
    if "gate" in trained and not gated:
        pytest.skip("there is no gate to train")
    torch.manual_seed(0)
    args = given(device, gated=gated)
    every = [k for k in ("x", "up", "down", "gate") if args[k] is not None]
    whole = dict(zip(every, torch.autograd.grad(mlp(**args, impl=impl).square().sum(), [args[k] for k in every])))
    args |= {k: args[k].detach() for k in every if k not in trained}
    some = torch.autograd.grad(mlp(**args, impl=impl).square().sum(), [args[k] for k in trained])
    for k, grad in zip(trained, some):
        assert torch.equal(grad, whole[k]), k


@pytest.mark.parametrize("impl", ["eager", *OURS])
def test_a_gate_has_no_relu2(impl, device):
    with pytest.raises(ValueError, match=rf"^mlp\[{impl}\]: activation must be one of \['silu', .*\] .* got 'relu2'; leave"):
        mlp(**given(device, gated=True, activation="relu2"), impl=impl)


def test_a_gate_of_another_shape_is_refused(device):
    args = given(device, gated=True)
    args["gate"] = args["gate"][:-1]
    with pytest.raises(ValueError, match=r"^mlp\[auto\]: gate must have shape \(40, 32\) to match up, got \(39, 32\)"):
        mlp(**args)


def test_a_wide_result_is_refused_by_the_fused_kernel_and_by_no_other():
    args = OP.inputs(dtype=torch.bfloat16, device="meta", M=16, D=32, H=32, O=1025)
    assert OP.impls["triton"].refuses(**args) == (
        "down must have at most 1024 rows, got 1025: the hidden values would be made over and over"
    )
    assert OP.impls["hybrid"].refuses(**args) is None


@pytest.mark.parametrize("impl", ["torch", *OURS])
def test_a_row_that_is_infinite_is_the_references_where_hidden_values_are_ragged(impl, device):
    """Beyond the last hidden value the kernel multiplies by zero, and infinite times zero must not reach y."""
    x, up = torch.full((3, 1), torch.inf, device=device), torch.ones(5, 1, device=device)
    down = torch.ones(2, 5, device=device)
    assert torch.equal(mlp(x, up, down, activation="relu2", impl=impl), torch.full((3, 2), torch.inf, device=device))


@pytest.mark.parametrize("target, D, gated, tile", [
    ("sm_90", 512, False, (128, 256, 32, 512, 8, 2)), ("sm_90", 512, True, (128, 256, 16, 512, 8, 2)),
    ("sm_90", 768, False, (64, 256, 64, 64, 8, 3)), ("sm_90", 500, True, (64, 256, 32, 64, 8, 3)),
    ("sm_80", 512, False, (64, 256, 64, 64, 8, 3)), ("gfx942", 512, True, (64, 256, 32, 64, 8, 1)),
])
def test_the_default_tile_holds_x_whole_where_shared_memory_is_large_and_rows_are_aligned(target, D, gated, tile):
    with pretended(target):
        assert kernel.default(torch.empty(1, D, dtype=torch.bfloat16, device="meta"), gated) == tile
