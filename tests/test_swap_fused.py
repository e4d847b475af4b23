"""Parts that are one op where they were two: what is called, what is left alone, and what a value that waits stands for."""

import pytest
import torch
import torch.nn.functional as F
from swapping import OwnMLP, OwnRMSNorm, batch, built
from test_swap_use import agree, replaced, trained
from torch import nn

from whet.choices import Choices, Recorder
from whet.swap import Site, _optimize
from whet.swap._deferred import Deferred
from whet.swap._groups import grouped, joined
from whet.swap._proof import prove
from whet.swap._replace import as_call, prove_covered, recognise
from whet.swap._ways import Way
from whet.swap.residual_norm import Addend, PendingSum
from whet.tune import Tuned

FUSED = ("residual_norm", "qk_norm_rotary")


def asked(found, model, data) -> dict[str, int]:
    """How often each op is asked in a forward."""
    recorder = Recorder()
    found.ask(recorder)
    model(**data) if isinstance(data, dict) else model(data)
    return {name: sum(n for call, n in recorder.calls.values() if call.op == name) for name, _ in
            ((call.op, 0) for call, _ in recorder.calls.values())}


def test_a_layers_second_norm_and_the_norms_of_heads_are_asked_of_one_op_each():
    model, data = built("Qwen3", torch.float32), batch()
    found = recognise(model, as_call(data), Choices())
    assert {s.kind for s in found.covered} == {"norms", "rotary"} and len(found.covered) == 8
    counts = asked(found, model, data)
    assert counts["add_rms_norm"] == counts["qk_norm_rope"] == 2 and counts["rms_norm"] == 3 and "rope" not in counts


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["Qwen3", "Phi3"])
def test_gradient_checkpointing_of_fused_layers(name, reentrant):
    model, data = built(name, torch.float32), batch()
    expected = trained(model, data)
    found = replaced(model, only=FUSED)
    model.gradient_checkpointing_enable(dict(use_reentrant=reentrant))
    model.enable_input_require_grads()
    agree(trained(model, data), expected)
    found.restore()
    agree(trained(model, data), expected, exactly=not reentrant)


def test_a_norm_with_hooks_is_left_and_one_that_gets_them_later_is_called():
    model, data, seen = built("Llama", torch.float32), batch(), []
    first, second = (layer.post_attention_layernorm for layer in model.model.layers)
    first.register_forward_hook(lambda module, args, out: seen.append((module, type(args[0]), type(out))))
    expected = trained(model, data)
    found = replaced(model, only=FUSED)
    assert [s.path for s, _ in found.sites] == ["model.layers.1"] and "has hooks" in found.left[0].why
    second.register_forward_hook(lambda module, args, out: seen.append((module, type(args[0]), type(out))))
    seen.clear()
    agree(trained(model, data), expected)
    assert seen == [(first, torch.Tensor, torch.Tensor), (second, torch.Tensor, torch.Tensor)]


def test_hooks_of_the_other_children_and_of_the_layer_are_given_tensors():
    model, data, seen = built("Gemma3", torch.float32), batch(), []
    layer = model.model.layers[0]
    names = {m: n for n, m in layer.named_modules() if n and m is not layer.pre_feedforward_layernorm}

    def note(module, args, kwargs, out):
        given = (*args, *kwargs.values(), *(out if isinstance(out, tuple) else (out,)))
        seen.append((names.get(module, "layer"), any(isinstance(v, Deferred) for v in given)))

    for module in (layer, *names):
        module.register_forward_hook(note, with_kwargs=True)
    model(**data)
    plain = list(seen)
    found = replaced(model, only=("residual_norm",))
    assert len(found.sites) == 2
    seen.clear()
    model(**data)
    assert seen == plain and not any(waits for _, waits in seen)


@pytest.mark.parametrize("name", ["Qwen3", "Gemma3"])
def test_generation_with_a_cache_gives_the_same_words(name):
    model, ids = built(name, torch.float32), batch()["input_ids"]  # its rows are served, single tokens are not
    plain = model.eval().generate(ids, max_new_tokens=4, do_sample=False)
    found = replaced(model, only=FUSED)
    recorder = Recorder()
    found.ask(recorder)
    assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), plain)
    assert {call.op for call, _ in recorder.calls.values()} == {"add_rms_norm", "qk_norm_rope"}


class Block(nn.Module):
    """A pre-norm block; its subclass does something more with what its children give."""

    def __init__(self, dim: int = 32):
        super().__init__()
        self.one, self.two, self.mix, self.mlp = OwnRMSNorm(dim), OwnRMSNorm(dim), nn.Linear(dim, dim), OwnMLP(dim, 48)
        self.drop = nn.Dropout(0.0)

    def forward(self, x):
        h = x + self.drop(self.mix(self.one(x)))
        return h + self.mlp(self.two(h))


class Looks(Block):
    def forward(self, x):
        a = self.mix(self.one(x))
        assert a.shape == x.shape and a.dtype == x.dtype and bool((a == a).all()) and len(a) == len(x)
        a = torch.cat([a[..., :5], a[..., 5:].float().to(x.dtype)], -1)
        return 2 * (self.mlp(a) * 1.0 - a) / 2 + F.relu(self.two(x))


class Scales(Block):
    def forward(self, x):
        h = x + 0.5 * self.mix(self.one(x))
        return h + self.mlp(self.two(h))


class InPlace(Block):
    def forward(self, x):
        h = x.clone()
        h += self.mix(self.one(x))
        return h + self.mlp(self.two(h))


class Detached(Block):
    def forward(self, x):
        h = x + self.mix(self.one(x))
        return h.detach() + self.mlp(self.two(h))


class SumsTwice(Block):
    def forward(self, x):
        a = self.mix(self.one(x))
        return (x + a) + self.mlp(self.two(x + a)), self.mix


@pytest.mark.parametrize(("block", "sums"), [(Block, 1), (Looks, 0), (Scales, 0), (InPlace, 0), (Detached, 0), (SumsTwice, 1)])
def test_a_block_is_known_by_what_it_sums_and_computes_what_it_did(block, sums):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(32, 32), block()), torch.randn(3, 7, 32)
    found = recognise(model, as_call(x), Choices(), only=("residual_norm",))
    assert [s.path for s, _ in found.sites] == ["1"] * sums and not found.left
    assert asked(found, model, x) == ({"add_rms_norm": 1} if sums else {})


class Switched(Block):
    """Takes another way later."""

    other = False

    def forward(self, x):
        h = x + self.mix(self.one(x))
        if self.other:
            h = h.clamp(-1, 1) if isinstance(self, Block) and h.numel() else h
        return h + self.mlp(self.two(h)), h


def test_a_way_that_was_not_proved_is_computed_as_it_was_written():
    torch.manual_seed(0)
    model, x = nn.Sequential(Switched()), torch.randn(3, 7, 32)
    found = recognise(model, as_call(x), Choices(), only=("residual_norm",))
    model[0].other = True
    plain = model(x)
    found.ask(Choices())
    served = model(x)
    assert all(type(s) is torch.Tensor and torch.equal(s, p) for s, p in zip(served, plain))


def test_dropout_between_attention_and_sum_draws_as_before():
    torch.manual_seed(0)
    model, x = nn.Sequential(Block()).train(), torch.randn(3, 7, 32)
    found = recognise(model, as_call(x), Choices(), only=("residual_norm",))
    model[0].drop.p = 0.5
    torch.manual_seed(1)
    plain = model(x)
    found.ask(Choices())
    torch.manual_seed(1)
    torch.testing.assert_close(model(x), plain)


def test_another_module_put_in_the_place_of_the_norm_is_called():
    torch.manual_seed(0)
    model, x = nn.Sequential(Block()), torch.randn(3, 7, 32)
    found = recognise(model, as_call(x), Choices(), only=("residual_norm",))
    model[0].two = nn.LayerNorm(32)
    plain = model(x)
    found.ask(Choices())
    assert torch.equal(model(x), plain)


class LengthOne(OwnRMSNorm):
    """Neither an RMSNorm nor a LayerNorm: each row is scaled to a length of one."""

    def forward(self, x):
        return x / (x.norm(dim=-1, keepdim=True) + self.eps) * self.weight


def test_a_norm_of_another_formula_is_not_taken_for_part_of_the_sum():
    torch.manual_seed(0)
    model, x = nn.Sequential(Block()), torch.randn(3, 7, 32)
    model[0].two = LengthOne(32)
    found = recognise(model, as_call(x), Choices(), only=("residual_norm",))
    assert not found.sites and not found.left


def test_a_sum_that_is_made_wrongly_is_not_proved(monkeypatch):
    torch.manual_seed(0)
    model, x = nn.Sequential(Block()), torch.randn(3, 7, 32)
    site = recognise(model, as_call(x), Choices(), only=("residual_norm",)).sites[0][0]
    right = PendingSum.__init__
    monkeypatch.setattr(PendingSum, "__init__", lambda self, x, res: right(self, 0.99 * x, res))
    assert not prove(site, as_call(x), Choices()).ok


def test_a_value_that_waits_is_its_tensor_to_all_else():
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    waits = x + Addend(y)
    assert isinstance(waits, PendingSum) and waits.sum is None
    assert torch.equal(waits * 2, 2 * (x + y)) and torch.equal(torch.relu(waits), torch.relu(x + y)) and waits.shape == x.shape
    assert torch.equal((Addend(y) + x).tensor(), y + x) and torch.equal(Addend(y) + 1, y + 1)
    assert torch.equal(torch.add(x, Addend(y), alpha=2), x + 2 * y) and torch.equal(Addend(y)[0], y[0])
    assert torch.equal(y.sum(0) + Addend(y), y.sum(0) + y), "of other shapes, at once"


def test_the_report_counts_what_is_replaced_once(monkeypatch):
    monkeypatch.setattr(_optimize, "tune", lambda *args, **options: Tuned({"eager": Choices()}, {}))
    monkeypatch.setattr(_optimize, "_time_group", lambda group, *rest: None)
    monkeypatch.setattr(_optimize, "_whole", lambda report, *rest: report.choose("eager") or True)
    model = built("Qwen3", torch.float32)
    _optimize.optimize(model, batch(), seconds=0.001)
    record = model.whet.to_record()
    modules = {kind: sum(g["modules"] for g in record["groups"] if g["kind"] == kind) for kind in (*FUSED, "norms", "rotary")}
    assert modules == dict(residual_norm=2, qk_norm_rotary=2, norms=3, rotary=0) and record["left"] == []
    assert len({path for g in record["groups"] for path in g["paths"] if g["kind"] == "norms"}) == 3
    _optimize.restore(model)


def test_what_a_site_covers_comes_back_where_it_is_not_kept():
    model, data = built("Qwen3", torch.float32), batch()
    found = recognise(model, as_call(data), Choices())
    more = prove_covered(found, Choices(), {(s.kind, s.path) for s in found.covered})
    assert len(more) == len(found.covered) == 8
    for kept, norms, rotary in ((FUSED, 3, 0), (FUSED[:1], 7, 2), (FUSED[1:], 5, 0), ((), 9, 2)):
        way = Way("eager", Choices(), grouped(found.sites))
        for group in way.groups:
            group.replaced = group.kind in kept or group.kind not in FUSED
        rest = joined(way.groups, [s for s in more if (s[0].kind, s[0].path) in way.uncovered])
        assert {s.kind for s, _ in rest} <= {"norms", "rotary"}, "of other words than a group has that is there"
        sites: list[Site] = [s for g in [*way.groups, *grouped(rest)] for s, _ in g.sites]
        assert sum(s.kind == "norms" for s in sites) == norms and sum(s.kind == "rotary" for s in sites) == rotary
