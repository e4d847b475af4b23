"""attention_spans beyond its cases: as attention where that says the same, ends of 64 bits, queries without keys."""

import pytest
import torch

import whet.ops
from whet.op import discover
from whet.ops.attention_spans.meaning import spans_of

OP = discover()["attention_spans"]


def ran(args: dict, dout: torch.Tensor, impl: str = "triton") -> list[torch.Tensor]:
    leaves = {k: args[k].detach().requires_grad_() for k in "qkv"}
    o = whet.ops.attention_spans(**args | leaves, impl=impl)
    return [o.detach(), *torch.autograd.grad(o, list(leaves.values()), dout)]


def test_spans_of_a_causal_window_are_those_of_attention(device):
    q, k, v = (torch.randn(2, h, 100, 32, device=device) for h in (4, 2, 2))
    i = torch.arange(100, device=device, dtype=torch.int32).expand(2, -1)
    spans, causal = (f(q, k, v, *given) for f, given in (
        (OP.reference, (i - 16, i + 1)), (discover()["attention"].reference, ("top-left", 17))))
    assert torch.equal(spans, causal)


def test_ends_of_64_bits_give_the_bits_of_32(device):
    args = OP.inputs(torch.float32, device, B=2, H=2, KV=1, Lq=70, Lk=70, D=16, spans="random")
    wide = args | {k: args[k].long() * (1 if k == "first" else 2**33) for k in ("first", "last")}
    narrow = args | dict(last=wide["last"].clamp(-1, 70).int())
    dout = torch.randn_like(args["q"])
    assert all(torch.equal(a, b) for a, b in zip(ran(wide, dout), ran(narrow, dout)))


def test_what_comes_back_to_a_query_without_keys_goes_nowhere(device):
    args = OP.inputs(torch.float32, device, B=2, H=2, KV=1, Lq=70, Lk=70, D=16)
    first, last = spans_of("padded", 2, 70, 70, device)
    blind = (last <= first)[:, None, :, None].expand_as(args["q"])
    assert blind.any()
    dout = torch.randn_like(args["q"])
    clean, poisoned = ran(args, dout), ran(args, dout.masked_fill(blind, float("nan")))
    assert all(torch.equal(a, b) for a, b in zip(clean, poisoned))
    assert not clean[0][blind].any() and not clean[1][blind].any()


@pytest.mark.parametrize("name", ["first", "last"])
def test_ends_that_are_no_integers_or_unlike_are_refused(name, device):
    args = OP.inputs(torch.float32, device, B=1, H=1, KV=1, Lq=8, Lk=8, D=16)
    for dtype in (torch.float32, torch.int16, torch.int64):
        with pytest.raises(ValueError, match="first and last must both be int32 or both int64, got"):
            whet.ops.attention_spans(**args | {name: args[name].to(dtype)})
