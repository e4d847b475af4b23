"""optimize(max_memory=): the fewest blocks are checkpointed, proved and undone; and optimize(optimizer=)."""

import copy

import pytest
import torch
from swapping import GPT, built, state
from swapping import batch as tokens
from torch import nn
from torch.utils._pytree import tree_leaves

from whet.choices import Choices
from whet.lock import Lock
from whet.swap import _begin, _memory, _optimize
from whet.swap._memory import KIND, blocks_of, bytes_of, fewest
from whet.swap._optimize import optimize, restore
from whet.swap._replace import as_call
from whet.tune import Tuned

GIB = 2**30


class Stack(nn.Module):
    """Six blocks that draw random numbers, and a seventh in a list of its own."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.GELU()) for _ in range(6))
        self.more = nn.ModuleList([nn.Linear(8, 8)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.more[0](x).square().mean()


def data():
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def metered(monkeypatch):
    """A step takes 10 GiB, and 1 less for each block that is checkpointed."""
    seen = {"measured": []}

    def peak(run):
        run()
        count = sum("_whet_unsaved" in vars(m) for m in run.__self__.model.modules())
        seen["measured"].append(count)
        return (10 - count) * GIB

    monkeypatch.setattr(_memory, "peak_bytes", peak)
    monkeypatch.setattr(_begin, "measurable", lambda device: True)
    monkeypatch.setattr(_optimize, "tune", lambda *args, **options: Tuned({"eager": Choices()}, {}))
    return seen


@pytest.mark.parametrize("count", [1, 2, 7, 28])
def test_bisection_finds_the_fewest_that_fit_in_few_tries(count):
    for right in range(1, count + 1):
        tried: list[int] = []
        assert fewest(count, lambda k, right=right, tried=tried: tried.append(k) or k >= right) == right
        assert len(tried) <= count.bit_length() + 1 and len(set(tried)) == len(tried)
    assert fewest(count, lambda k: False) is None


@pytest.mark.parametrize(("said", "size"), [("40GiB", 40 * GIB), (" 1.5 gib ", 3 * GIB // 2), ("512MB", 512 * 10**6), (7, 7)])
def test_sizes_are_read(said, size):
    assert bytes_of(said) == size


@pytest.mark.parametrize("said", ["40", "GiB", "40 GB/s", "40XiB", -1, 0, True, 1.5, "0GiB"])
def test_other_sizes_are_refused_in_one_line(said):
    with pytest.raises(ValueError, match="max_memory must be bytes above 0 or a size such as '40GiB'"):
        optimize(Stack(), data(), max_memory=said)


def test_the_fewest_blocks_are_checkpointed_and_compute_the_same_and_are_put_back(metered):
    model = Stack().train()
    before = state(model)
    torch.manual_seed(3)
    model(data()).backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters()}
    optimize(model, data(), max_memory="7.5GiB", lock=Lock(), seconds=0.001)
    assert sum(s.kind == KIND for s, _ in model.whet.replaced.sites) == 3 and model.whet.memory["blocks"] == 3
    said = "3 of 6 blocks are checkpointed: a step takes 7.00 GiB where it took 10.00 GiB, within 7.50 GiB, for"
    assert said in " ".join(str(model.whet).split())
    model.zero_grad()
    torch.manual_seed(3)
    model(data()).backward()
    for n, p in model.named_parameters():
        torch.testing.assert_close(p.grad, grads[n])
    restore(model)
    assert state(model) == before


def test_where_it_fits_no_block_is_checkpointed(metered):
    model = optimize(Stack(), data(), max_memory=11 * GIB, lock=Lock(), seconds=0.001)
    assert metered["measured"] == [0] and "no block is checkpointed" in str(model.whet)


def test_where_all_blocks_are_not_enough_both_figures_are_named_and_the_model_is_as_it_was(metered):
    model = Stack()
    before = state(model)
    with pytest.raises(ValueError, match="takes 4.00 GiB with all 6 .*10.00 GiB with none., more than max_mem.* 3"):
        optimize(model, data(), max_memory="3GiB", lock=Lock(), seconds=0.001)
    assert state(model) == before and not hasattr(model, "whet")
    with pytest.raises(ValueError, match="the model has no repeated blocks to checkpoint"):
        optimize(nn.Sequential(nn.Linear(8, 8)), data(), loss=torch.sum, max_memory=1, lock=Lock(), mode="train", seconds=0.001)


@pytest.mark.parametrize("name", ["Qwen3", "GPT2"])
def test_blocks_of_a_hugging_face_model_are_checkpointed_beside_what_is_replaced(metered, name):
    model = built(name, torch.float32)
    torch.manual_seed(0)
    plain = model(**tokens()).loss
    optimize(model, tokens(), max_memory="8GiB", lock=Lock(), seconds=0.001)
    kinds = {s.kind for s, _ in model.whet.replaced.sites}
    assert KIND in kinds and model.whet.memory["blocks"] == 2 and not model.is_gradient_checkpointing
    loss = model(**tokens()).loss  # with a cache, which its config asks for
    loss.backward()
    torch.testing.assert_close(loss, plain)
    assert all(p.grad is not None for p in model.parameters())
    model.eval()
    assert model.generate(tokens()["input_ids"][:1, :4], max_new_tokens=3, do_sample=False).shape == (1, 7)


def test_blocks_that_are_checkpointed_already_or_shared_are_left():
    model = built("Llama")
    assert [path for path, _ in blocks_of(model, as_call(tokens()))] == ["model.layers.0", "model.layers.1"]
    model.gradient_checkpointing_enable()
    assert blocks_of(model, as_call(tokens())) == []
    shared = Stack()
    shared.blocks = nn.ModuleList([shared.blocks[0]] * 3)
    assert blocks_of(shared, as_call(data())) == []


@pytest.mark.parametrize(("options", "why"), [
    ({"max_memory": "1GiB"}, "max_memory needs a GPU: of a cpu the peak memory of a step is not known"),
    ({"max_memory": "1GiB", "mode": "infer"}, "max_memory is for a training step"),
    ({"allow": "tf64"}, "allow must be of tf32, got 'tf64'"),
    ({"allow": ["tf32", "fp8"]}, "allow='fp8' is not offered"),
    ({"optimizer": 3}, "optimizer must be a torch.optim.Optimizer, got int"),
    ({"optimizer": torch.optim.SGD(nn.Linear(1, 1).parameters())}, "steps none of the model's parameters"),
])
def test_options_that_do_not_fit_are_refused(options, why):
    with pytest.raises(ValueError, match=why):
        optimize(Stack(), data(), **options)


def test_the_optimizers_step_is_timed_and_leaves_weights_and_state_as_they_were(monkeypatch):
    monkeypatch.setattr(_optimize, "tune", lambda *args, **options: Tuned({"eager": Choices()}, {}))
    ids = torch.randint(0, 96, (2, 16))
    model, steps = GPT(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(ids, ids)[1].backward()
    optimizer.step()
    weights, kept = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    optimizer.register_step_pre_hook(lambda *_: steps.append(1))
    monkeypatch.setattr(_optimize, "_time_group", lambda *args: None)
    optimize(model, dict(idx=ids, targets=ids), optimizer=optimizer, lock=Lock(), seconds=0.001)
    assert all(torch.equal(v, weights[k]) for k, v in model.state_dict().items())
    now, before = tree_leaves(optimizer.state_dict()), tree_leaves(kept)
    assert all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(now, before, strict=True))
    assert steps and "training step with AdamW" in str(model.whet)


def test_memory_is_measured_with_the_optimizers_step_and_proved_on_the_weights_that_are_there(metered):
    model = Stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e3, momentum=0.9)
    weights = copy.deepcopy(model.state_dict())
    optimize(model, data(), max_memory="8GiB", optimizer=optimizer, lock=Lock(), seconds=0.001)
    assert model.whet.memory["blocks"] == 2 and all(torch.equal(v, weights[k]) for k, v in model.state_dict().items())
    assert not optimizer.state


def test_an_optimizer_without_state_has_none_afterwards():
    model = Stack()
    optimizer = torch.optim.AdamW(model.parameters())
    with _begin.as_before(model, optimizer, "cpu") as seen:
        model(data()).backward()
        optimizer.step()
    assert not optimizer.state and seen.made


def test_tf32_stays_on_until_the_model_is_restored_and_not_where_something_is_raised(monkeypatch):
    monkeypatch.setattr(_optimize, "allowed", lambda allow: ("tf32",))
    monkeypatch.setattr(_optimize, "tune", lambda *args, **options: Tuned({"eager": Choices()}, {}))
    try:
        model = optimize(GPT(), torch.randint(0, 96, (2, 16)), lock=Lock(), allow="tf32", seconds=0.001)
        assert torch.get_float32_matmul_precision() == "high" and "allowed: float32 products as TF32" in str(model.whet)
        restore(model)
        assert torch.get_float32_matmul_precision() == "highest"
        monkeypatch.setattr(_optimize, "recognise", lambda *args, **options: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            optimize(GPT(), torch.randint(0, 96, (2, 16)), lock=Lock(), allow="tf32")
        assert torch.get_float32_matmul_precision() == "highest"
    finally:
        torch.set_float32_matmul_precision("highest")
