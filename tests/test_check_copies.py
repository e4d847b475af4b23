"""The checks for work that torch would do better: copies for layout alone, products in custom ops."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from whet.diagnose.checks import copies, custom_matmul
from whet.diagnose.profile import Kernel, Profile
from whet.diagnose.run import Run
from whet.diagnose.target import target_of
from whet.measure import Timing


class Around(nn.Module):
    def __init__(self, through):
        super().__init__()
        self.w, self.through = nn.Linear(32, 32), through

    def forward(self, x):
        return self.through(self.w, x).square().mean()


def split(t):
    return t.unflatten(-1, (4, 8)).transpose(1, 2)


def contiguous_heads(w, x):
    q = split(w(x)).contiguous()
    k = split(w(x)).contiguous()
    return F.scaled_dot_product_attention(q, k, q)


def plain_heads(w, x):
    q, k = split(w(x)), split(w(x))
    return w(F.scaled_dot_product_attention(q, k, q).transpose(1, 2).flatten(2))


def by_softmax(w, x):
    q, k = split(w(x)), split(w(x))
    return w(((q @ k.transpose(-1, -2)).softmax(-1) @ q).transpose(1, 2).flatten(2))


def spelled_out(w, x):
    """Attention with grouped heads that torch takes apart: the copies in it are torch's."""
    q, k = split(w(x)), split(w(x))[:, :2]
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, k, enable_gqa=True)


def repeated(w, x):
    h = w(x)
    mean = h.mean(0, keepdim=True).expand_as(h).contiguous()
    return h + mean


def twice(w, x):
    h = w(x).relu()
    a = h.transpose(1, 2).contiguous()
    b = h.transpose(1, 2).contiguous()
    return a.sin() + b.cos()


def two_halves(w, x):
    a, b = torch.cat([w(x)] * 8, -1).chunk(2, -1)
    h = (a * b).sin().cos().exp().tanh().sigmoid().sin().cos()
    return h + a.clone() * b.clone()


def again(w, x):
    h = w(x).relu().transpose(1, 2).contiguous()
    return h.transpose(1, 2).contiguous().sin()


def transposed(w, x):
    k = w(x).transpose(1, 2).contiguous()
    return x @ k


def written_into(w, x):
    h = w(x).mean(0, keepdim=True).expand_as(x).clone()
    h[:, 0] = 0
    return h


def found(through):
    target = target_of("around", (Around(through), torch.randn(16, 32, 32)))
    return list(copies.find(Run(target, seconds=0.01)))


@pytest.mark.parametrize(
    "through, word",
    [(contiguous_heads, "strides"), (repeated, "16 times"), (twice, "more than once"), (again, "again"),
     (transposed, "transposed")],
)
def test_a_copy_that_can_be_left_out_is_reported_with_its_line(through, word):
    (finding,) = found(through)
    first = through.__code__.co_firstlineno
    assert word in finding.cause and finding.line.startswith("test_check_copies.py:")
    assert first < int(finding.line.split(":")[1]) <= first + 4
    assert "strides" in finding.evidence[0] and "MB" in finding.evidence[1]


@pytest.mark.parametrize("through", [plain_heads, by_softmax, spelled_out, two_halves, written_into])
def test_a_copy_with_a_purpose_is_left_alone(through):
    assert not found(through)


def test_layers_of_one_kind_are_listed_as_one_and_the_backward_is_counted():
    (finding,) = copies.find(Run(copies.example(True), seconds=0.01))
    assert "layers.*" in finding.cause and "4 copies" in finding.cause and "enable_gqa" in finding.fix
    assert any("backward" in line for line in finding.evidence)


@torch.library.custom_op("planted::wraps_stock", mutates_args=())
def wraps_stock(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.linear(x, w)


@torch.library.custom_op("planted::angles", mutates_args=())
def angles(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return x * table


class Custom(nn.Module):
    def __init__(self, op, made):
        super().__init__()
        self.weight, self.op, self.made = nn.Parameter(torch.randn(32, 32)), op, made

    def forward(self, x):
        return self.op(x, self.made(self, x))


def custom(op, made, device):
    target = target_of("custom", (Custom(op, made).to(device), torch.randn(2, 32, 32, device=device)), kind="forward")
    return list(custom_matmul.find(Run(target, seconds=0.01)))


def test_a_product_by_hand_is_reported_with_its_shapes(device):
    (finding,) = custom_matmul.find(Run(custom_matmul.example(True), seconds=0.01))
    assert "planted::linear_by_hand" in finding.cause and "gate.weight" in finding.evidence[0] and "F.linear" in finding.fix
    assert finding.measured == (device == "cuda") and (finding.cost_ms is None) == (device == "cpu")


def test_a_custom_op_around_the_stock_product_is_left_alone(device):
    assert not custom(wraps_stock, lambda m, x: m.weight, device)


def test_a_square_table_that_is_no_parameter_is_not_taken_for_a_weight(device):
    assert not custom(angles, lambda m, x: m.weight.detach() + 1, device)


def test_arguments_are_made_again_in_the_order_of_the_schema():
    op = custom_matmul.planted_ops()[0]
    target = target_of("again", (Custom(op, lambda m, x: m.weight), torch.randn(2, 4, 32)), kind="forward")
    event = next(e for e in Run(target).watched.events if e.custom)
    x, w = custom_matmul.arguments(event, "cpu")
    assert (x.shape, w.shape) == ((2, 4, 32), (32, 32))


def test_copies_inside_other_ops_do_not_hide_what_the_users_copies_take():
    """As on a GPU where an op copies again what it is handed: six copy kernels for three copies of the user's."""
    run = Run(copies.CHECK.planted(), seconds=0.01)
    asked = [e for e in run.watched.events if e.phase == "forward" and e.op == "aten::clone" and e.module == "layers.0"]
    kernels = [Kernel("copy", 4.0, "forward", "layers.0", "aten::copy_")] * (2 * len(asked))
    run.__dict__["profile"] = Profile(Timing(1.0, 1.0, 1.0, 9), kernels, {}, 0, "cuda")
    assert asked and set(copies.measured_us(run, "layers.0").values()) == {4.0}
    assert copies.all_copies_ms(run, "layers.*") == 8.0 * len(asked) / 1e3
