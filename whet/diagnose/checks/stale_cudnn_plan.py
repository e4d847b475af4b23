"""Gradients of cuDNN's attention that torch reads by the strides of an earlier call.

torch (2.11) keeps cuDNN's plan for a backward by the sizes and strides of q, k and v. The upstream gradient is not in that key:
in another layout than in the first such call of the process, it is read by the wrong strides, without an error.
"""

import functools
from collections import defaultdict

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from whet.diagnose.run import Check, Finding, Run
from whet.diagnose.target import Target, target_of
from whet.diagnose.watch import Event, Seen

BACKWARD = "aten::_scaled_dot_product_cudnn_attention_backward"  # inputs: upstream gradient, q, k, v, o, ...
FIX = (
    "Call torch.backends.cuda.enable_cudnn_sdp(False) before the first step, take whet.ops.attention, or give each attention's "
    "output the hook out.register_hook(lambda g: g.contiguous()), so that all gradients come in one layout"
)


def layout(t: Seen) -> tuple[int, ...]:
    """Strides, those of a single element left out: they lead nowhere."""
    return tuple(stride for size, stride in zip(t.shape, t.strides) if size > 1)


def read_as(e: Event) -> tuple[int, ...]:
    """The layout of the gradient that cuDNN gets: torch copies one whose last stride is not 1 into the output's."""
    grad, out = e.inputs[0], e.inputs[4]
    return layout(grad if grad.strides[-1] == 1 else out)


def dense(t: Seen) -> bool:
    """Whether it fills its memory without gaps and without reading any element twice, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(t.shape, t.strides) if size > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def plans(events: list[Event]) -> list[list[Event]]:
    """The backward calls of one step, those together that torch serves by one plan."""
    found: dict[tuple, list[Event]] = defaultdict(list)
    for e in events:
        if e.op == BACKWARD and len(e.inputs) >= 5:
            found[tuple((t.shape, t.strides, t.dtype) for t in e.inputs[1:4]), e.args].append(e)
    return list(found.values())


def mixed(calls: list[Event]) -> list[Event]:
    """The first call of each layout, where there is more than one."""
    firsts = list({read_as(e): e for e in reversed(calls)}.values())
    return sorted(firsts, key=lambda e: e.index) if len(firsts) > 1 else []


def gapped(calls: list[Event]) -> Event | None:
    """A call whose gradient is a slice, or is expanded, and is not copied first."""
    return next((e for e in calls if e.inputs[0].strides[-1] == 1 and not dense(e.inputs[0])), None)


def describe(e: Event) -> str:
    return f"{e.module or 'the model'}: gradient {list(e.inputs[0].shape)} with strides {list(e.inputs[0].strides)}, " \
        f"output with strides {list(e.inputs[4].strides)}"


def judged(events: list[Event]):
    """The findings, by layouts alone."""
    for calls in plans(events):
        if differing := mixed(calls):
            first, second = (e.module or "the model" for e in differing[:2])
            yield Finding(
                "stale_cudnn_plan", f"the gradients of q, k and v are wrong in {second}: torch reads its upstream gradient by "
                f"the strides of {first}'s, for which it made cuDNN's plan",
                [f"{len(calls)} backward calls of q {list(calls[0].inputs[1].shape)} share a plan, in {len(differing)} layouts",
                 *map(describe, differing[:4])],
                fix=FIX, wrong=True, module=differing[1].module, apply=without_cudnn,
            )
        elif e := gapped(calls):
            yield Finding(
                "stale_cudnn_plan", f"the upstream gradient of attention in {e.module or 'the model'} is a slice or expanded: "
                "q's, k's and v's are right only while no other call of these sizes in the process has another layout",
                [describe(e), f"torch {torch.__version__} keeps cuDNN's plan without the gradient's strides"],
                fix=FIX, module=e.module, apply=without_cudnn,
            )


def without_cudnn(target: Target) -> None:
    torch.backends.cuda.enable_cudnn_sdp(False)


@functools.cache
def torch_is_wrong() -> bool:
    """Whether this torch reads a gradient by an earlier one's strides: the second's gaps hold NaN, which then come through."""
    q, k, v = (torch.randn(1, 3, 72, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True) for _ in range(3))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = F.scaled_dot_product_attention(q, k, v)
    given = torch.randn_like(out)
    wide = torch.full((*out.shape[:3], 128), float("nan"), dtype=out.dtype, device=out.device)
    wide[..., :64] = given
    torch.autograd.grad(out, (q, k, v), given.contiguous(), retain_graph=True)
    return any(g.isnan().any().item() for g in torch.autograd.grad(out, (q, k, v), wide[..., :64]))


def find(run: Run):
    found = list(judged(run.watched.events))
    if found and torch_is_wrong():
        yield from found


class StalePlanExample(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(128, 3 * 128)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, 64)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v)


class TwoAttentions(nn.Module):
    """Two attentions of one size; `sliced` lets the second's output into a concatenation, so its gradient is a slice."""

    def __init__(self, sliced: bool):
        super().__init__()
        self.first, self.second, self.sliced = StalePlanExample(), StalePlanExample(), sliced

    def forward(self, x):
        a, b = self.first(x), self.second(x)
        b = torch.cat((b, b.detach()), -1) if self.sliced else b
        return a.float().square().mean() + b.float().square().mean()


def example(sliced: bool) -> Target:
    x = torch.randn(2, 136, 128, dtype=torch.bfloat16, device="cuda")
    return target_of("example", (TwoAttentions(sliced).to("cuda", torch.bfloat16), x))


CHECK = Check(
    "stale_cudnn_plan", "attention gradients read by another call's strides", find,
    lambda: example(True), lambda: example(False), gpu=True, kinds=("train",),
)
