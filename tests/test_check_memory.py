"""The doctor's checks of memory: who holds it, and cuDNN's plans that read a gradient by another's strides."""

import pytest
import torch
from torch import nn

from whet.diagnose.checks import peak_memory, stale_cudnn_plan
from whet.diagnose.run import Run
from whet.diagnose.target import target_of
from whet.diagnose.watch import Event, Seen

GIB = 2**30


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))
        self.head = nn.Linear(8, 50, bias=False)

    def forward(self, x, labels):
        for layer in self.layers:
            x = torch.sigmoid(layer(x))
        return nn.functional.cross_entropy(self.head(x), labels)


def blocks(optimizer=None):
    model = Blocks()
    batch = dict(x=torch.randn(16, 8), labels=torch.randint(50, (16,)))
    return target_of("blocks", (model, batch) + ((optimizer(model.parameters()),) if optimizer else ()))


def test_owners_add_up_to_what_the_sizes_say():
    target = blocks(torch.optim.AdamW)
    held, weights = peak_memory.owners(Run(target)), 4 * (3 * 64 + 8 * 50)
    assert held["parameters"] == held["gradients"] == weights
    assert held["optimizer state"] == 2 * weights + 4 * 4  # two moments, and a step count for each of four parameters
    assert held["logits"] == 16 * 50 * 4 and held["inputs"] == 16 * 8 * 4 + 16 * 8
    assert held["kept by the model"] + held.get("kept by layers.*", 0) >= 3 * 16 * 8 * 4
    assert "workspace" not in held and list(held.values()) == sorted(held.values(), reverse=True)
    assert not target.optimizer.state, "counting must not step the user's optimizer"


def test_a_forward_has_neither_gradients_nor_kept_activations():
    target = blocks()
    target.kind = "forward"
    held = peak_memory.owners(Run(target))
    assert {"gradients", "optimizer state", "logits"}.isdisjoint(held) and not peak_memory.kept_bytes(held)


@pytest.mark.parametrize("path, name", [
    ("layers.3.mlp.up", "layers.*"), ("layers.3", "layers.*"), ("model.layers.11.attn", "model.layers.*"),
    ("lm_head", "lm_head"), ("", "the model"), ("conv1x1", "conv1x1"),
])
def test_modules_are_grouped_by_their_block(path, name):
    assert peak_memory.group(path) == name


@pytest.mark.parametrize("kept, peak, verdict", [(70, 85, "kept"), (50, 85, None), (50, 95, "full"), (10, 20, None)])
def test_memory_is_reported_only_where_the_device_is_nearly_full(kept, peak, verdict):
    held = {"kept by layers.*": kept * GIB, "parameters": 5 * GIB, "optimizer state": 10 * GIB}
    assert peak_memory.verdict(held, peak * GIB, 100 * GIB) == verdict


def test_large_weights_beside_large_activations_are_no_fault():
    held = {"kept by layers.*": 62 * GIB, "parameters": 16 * GIB, "optimizer state": 16 * GIB}
    assert peak_memory.verdict(held, 85 * GIB, 100 * GIB) is None


@pytest.mark.parametrize("largest, words", [
    ("kept by layers.*", "torch.utils.checkpoint"), ("logits", "linear_cross_entropy"),
    ("optimizer state", "Shard"), ("parameters", "bfloat16"),
])
def test_advice_goes_to_the_largest_owner(largest, words):
    (finding,) = peak_memory.judged({largest: 60 * GIB, "buffers": GIB}, 95 * GIB, 100 * GIB)
    assert words in finding.fix and largest in finding.cause and any(largest in line for line in finding.evidence)


def seen(strides, shape=(2, 4, 16, 64)):
    return Seen(shape, torch.bfloat16, strides, "cuda", 0)


CONTIGUOUS, TRANSPOSED, SLICED = (4096, 1024, 64, 1), (4096, 64, 256, 1), (8192, 2048, 128, 1)
EXPANDED, BATCH_SUM = (0, 0, 0, 0), (0, 1024, 64, 1)


def call(index, grad, module, out=CONTIGUOUS, q=CONTIGUOUS, causal=True):
    inputs = (seen(grad), seen(q), seen(q), seen(q), seen(out))
    return Event(index, stale_cudnn_plan.BACKWARD, "backward", module, "", inputs, (), 0, False, (16, 16, 0.0, causal))


@pytest.mark.parametrize("second", [SLICED, TRANSPOSED, BATCH_SUM])
def test_two_layouts_under_one_plan_are_wrong(second):
    events = [call(0, CONTIGUOUS, "layers.1"), call(1, CONTIGUOUS, "layers.2"), call(2, second, "layers.0")]
    (finding,) = stale_cudnn_plan.judged(events)
    assert finding.wrong and "layers.0" in finding.cause and "layers.1" in finding.cause
    assert finding.module == "layers.0"
    assert any(str(list(second)) in line for line in finding.evidence)


@pytest.mark.parametrize("events", [
    [call(0, CONTIGUOUS, "a"), call(1, CONTIGUOUS, "b")],
    [call(0, TRANSPOSED, "a", q=TRANSPOSED), call(1, CONTIGUOUS, "b")],
    [call(0, CONTIGUOUS, "a"), call(1, EXPANDED, "b")],
    [call(0, TRANSPOSED, "a"), call(1, CONTIGUOUS, "b", causal=False)],
    [],
], ids=["one-layout", "another-q", "copied-by-torch", "another-mask", "none"])
def test_one_layout_to_a_plan_is_right(events):
    assert not list(stale_cudnn_plan.judged(events))


@pytest.mark.parametrize("grad", [SLICED, BATCH_SUM])
def test_a_lone_slice_is_a_risk_and_not_wrong(grad):
    (finding,) = stale_cudnn_plan.judged([call(0, grad, "a")])
    assert not finding.wrong and "slice" in finding.cause


def test_strides_of_single_elements_make_no_layout():
    one = Seen((1, 4, 1, 64), torch.bfloat16, (256, 64, 64, 1), "cuda", 0)
    other = Seen((1, 4, 1, 64), torch.bfloat16, (999, 64, 7, 1), "cuda", 0)
    assert stale_cudnn_plan.layout(one) == stale_cudnn_plan.layout(other) and stale_cudnn_plan.dense(other)


def test_a_torch_that_reads_gradients_rightly_is_not_accused(monkeypatch):
    run = Run(blocks())
    run.watched.events.extend([call(0, CONTIGUOUS, "a"), call(1, SLICED, "b")])
    for wrong in (True, False):
        monkeypatch.setattr(stale_cudnn_plan, "torch_is_wrong", lambda wrong=wrong: wrong)
        assert bool(list(stale_cudnn_plan.CHECK.find(run))) == wrong


def test_the_fix_turns_cudnns_attention_off():
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        stale_cudnn_plan.without_cudnn(blocks())
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


@pytest.mark.gpu
def test_on_a_gpu_the_attention_with_the_other_layout_is_named():
    (finding,) = stale_cudnn_plan.CHECK.find(Run(stale_cudnn_plan.CHECK.planted()))
    assert finding.wrong and finding.module in ("first", "second")
