"""Head and loss in one where labels are not shifted: what the loss is asked with counts, and logits are there when wanted."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from swapping import FAMILIES, built
from test_swap_use import agree, trained

from whet.choices import Choices
from whet.swap._handed import Handed, HandedOn
from whet.swap._replace import as_call, recognise

pytest.importorskip("transformers")


def replaced(name: str, **options):
    """(model, its head and loss in one, batch, loss and gradients before)"""
    model, data = built(name, torch.float32), FAMILIES[name].batch()
    before = trained(model, data | options)
    found = recognise(model, as_call(data), Choices(), only=("own_loss",))
    assert [s.kind for s, _ in found.sites] == ["own_loss"], found.left
    found.ask(Choices())
    return model, found, data, before


@pytest.mark.parametrize("options", [{}, dict(num_items_in_batch=31), dict(num_items_in_batch=torch.tensor(31))], ids=str)
def test_a_masked_loss_is_divided_as_the_trainer_asks(options):
    model, _, data, before = replaced("ModernBert", **options)
    agree(trained(model, data | options), before)


@pytest.mark.parametrize("name", ["Bert", "ModernBert", "T5", "Whisper"])
def test_logits_are_there_wherever_no_loss_is_trained(name):
    model, found, data, _ = replaced(name)
    assert model(**data).logits is None
    assert isinstance(model(**data, return_dict=False)[1], torch.Tensor)
    asked = [model(**data).logits for model in (model.eval(), found.restore() or model)]
    torch.testing.assert_close(*asked)


def test_logits_that_are_kept_leave_the_head_as_it_was():
    model, data = built("Bert", torch.float32), FAMILIES["Bert"].batch()
    found = recognise(model, as_call(data), Choices(), keep_logits=True, only=("own_loss",))
    assert not found.sites and "logits are kept" in found.left[0].why


def handed(state=None):
    return Handed(torch.randn(2, 3, 4), nn.Linear(4, 5), state or HandedOn(lambda *args: args))


@pytest.mark.parametrize("use", [
    lambda x: torch.softmax(x, -1), lambda x: x * 2, lambda x: F.cross_entropy(x, torch.zeros(2, 3, dtype=torch.long)),
    lambda x: F.cross_entropy(x.view(-1, 5), torch.rand(6, 5)), lambda x: x[..., 0], lambda x: x.view(-1), lambda x: x.sum(),
    lambda x: F.cross_entropy(x.view(-1, 5), torch.zeros(6, dtype=torch.long), weight=torch.ones(5)),
    lambda x: F.cross_entropy(x.view(-1, 5), torch.zeros(6, dtype=torch.long), reduction="none"),
    lambda x: F.cross_entropy(x.view(-1, 5), torch.zeros(7, dtype=torch.long)), lambda x: F.nll_loss(x, torch.zeros(2)),
])  # fmt: skip
def test_what_needs_logits_is_refused_before_a_loss_takes_them(use):
    state = HandedOn(lambda *args: args)
    with pytest.raises((TypeError, AttributeError, RuntimeError)):
        use(handed(state))
    assert not state.used


def test_a_loss_takes_them_with_its_options():
    seen = []
    state = HandedOn(lambda *args: seen.append(args[3:]) or torch.zeros(()))
    x, target = handed(state), torch.zeros(6, dtype=torch.long)
    assert x.shape == (2, 3, 5) and x.size(-1) == 5
    loss = nn.CrossEntropyLoss(ignore_index=7, label_smoothing=0.1, reduction="sum")(x.float().view(-1, 5), target)
    assert state.used and loss.dtype == torch.float32 and seen == [(7, "sum", 0.1, None, None, x.head.bias)]
