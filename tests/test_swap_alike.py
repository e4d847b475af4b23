"""Like modules: how they are told from unlike ones, and that what a recogniser finds of one holds for those like it alone."""

import functools

import pytest
import torch
import torch.nn.functional as F
from swapping import OwnMLP, OwnRMSNorm
from torch import nn

from whet.choices import Choices
from whet.swap._alike import alike, form_of, found_once
from whet.swap._replace import as_call, recognise


class Gated(nn.Module):
    def __init__(self, act=F.silu, inner: int = 24, layer_idx: int = 0):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(16, inner), nn.Linear(16, inner), nn.Linear(inner, 16)
        self.act, self.layer_idx = act, layer_idx

    def forward(self, x):
        return self.down(self.act(self.gate(x)) * self.up(x))


def test_weights_and_place_make_no_difference_all_else_does():
    one = form_of(Gated())
    assert one == form_of(Gated()) == form_of(Gated(layer_idx=3))
    tanh = functools.partial(F.gelu, approximate="tanh")
    others = [Gated(F.gelu), Gated(inner=32), Gated(tanh), Gated(functools.partial(F.gelu, approximate="none")),
              Gated().double(), Gated().eval(), Gated(torch.tanh), Gated(nn.SiLU())]
    others[-1].gate.requires_grad_(False)
    assert len({one, *map(form_of, others)}) == len(others) + 1
    assert form_of(Gated(tanh)) == form_of(Gated(functools.partial(F.gelu, approximate="tanh")))


def test_a_look_at_one_serves_its_like_within_a_recognition_and_never_a_module_with_its_own_ways():
    looks = []

    def look(module):
        return alike(module, "what", lambda: looks.append(module) or len(looks))

    a, b, other, hooked, own = Gated(), Gated(layer_idx=1), Gated(F.gelu), Gated(), Gated()
    hooked.gate.register_forward_hook(lambda *_: None)
    own.forward = lambda x: x
    with found_once():
        assert [look(m) for m in (a, b, other, a, hooked, own, b)] == [1, 1, 2, 1, 3, 4, 1]
        assert alike(a, "else", lambda: "else") == "else"
    assert look(a) == 5 and look(a) == 6, "outside a recognition every look is one"


def test_layers_that_differ_by_a_function_alone_are_each_recognised_for_what_they_are():
    model = nn.Sequential(Gated(), Gated(F.gelu), Gated(), Gated(torch.tanh))
    found = recognise(model, as_call((torch.randn(4, 16),)), Choices(), only=("gated_mlp",))
    words = {s.path: s.words.split(" between")[0] for s, _ in found.sites}
    assert words == {"0": "SwiGLU", "1": "GEGLU", "2": "SwiGLU"} and [x.path for x in found.left] == ["3"]


@pytest.mark.parametrize("made", [lambda: OwnMLP(16, 24), lambda: OwnRMSNorm(16)])
def test_every_one_of_many_is_found_and_proved(made):
    model = nn.Sequential(*(made() for _ in range(5)))
    found = recognise(model, as_call((torch.randn(4, 16),)), Choices())
    assert sum(s.kind in ("norms", "gated_mlp") for s, _ in found.sites) == 5
