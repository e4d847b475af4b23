"""Head and loss in one where labels are not shifted: what the loss is asked with counts, and logits are there when wanted."""

import threading

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


def test_no_output_that_was_not_computed_is_left():
    """BERT's pre-training head names its logits otherwise, and has a second loss."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.BertForPreTraining(transformers.BertConfig(**FAMILIES["Bert"].options)).train()
    data = FAMILIES["Bert"].batch() | dict(next_sentence_label=torch.tensor([0, 1]))
    before = trained(model, data)
    found = recognise(model, as_call(data), Choices(), only=("own_loss",))
    found.ask(Choices())
    agree(trained(model, data), before)
    out = model(**data)
    assert out.prediction_logits is None and out.seq_relationship_logits.shape == (2, 2) and len(found.sites) == 1


def test_under_autocast_the_loss_has_the_dtype_that_it_had():
    model, found, data, _ = replaced("Bert")
    with torch.autocast("cpu", torch.bfloat16):
        ours = model(**data).loss
        found.restore()
        theirs = model(**data).loss
    assert ours.dtype == theirs.dtype == torch.float32
    torch.testing.assert_close(ours.bfloat16(), theirs.bfloat16())


class Classifier(nn.Module):
    """Its loss outside autocast; logits read where it logs; a head that another may share."""

    def __init__(self, head=None):
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(8, 8)), head or nn.Linear(8, 96, bias=False)
        self.log, self.runs = False, 0

    def forward(self, x, y):
        self.runs += 1
        logits = self.head(self.body(x))
        with torch.autocast("cpu", enabled=False):
            loss = F.cross_entropy(logits.float(), y)
        if self.log:
            self.right = (logits.argmax(-1) == y).sum()
        return loss


def classified(model: nn.Module):
    data = torch.randn(70, 8), torch.randint(0, 96, (70,))
    found = recognise(model, as_call(data), Choices(), keep_logits=False, only=("plain_loss",))
    return found, data


def test_the_product_is_made_as_the_head_would_have_made_it():
    model = Classifier()
    found, data = classified(model)
    with torch.autocast("cpu", torch.bfloat16):
        theirs = model(*data)
        found.ask(Choices())
        ours = model(*data)
    assert model._whet_handed.used and ours.dtype == theirs.dtype
    torch.testing.assert_close(ours.bfloat16(), theirs.bfloat16())


def test_a_forward_that_reads_its_logits_later_runs_as_it_was_from_then_on():
    model = Classifier()
    found, data = classified(model)
    found.ask(Choices())
    model(*data)
    model.log, model.runs = True, 0
    with pytest.warns(UserWarning, match="needs its logits"):
        loss = model(*data)
    assert model.runs == 2 and model.right >= 0
    for _ in range(2):
        assert torch.equal(model(*data), loss)
    assert model.runs == 4, "not twice at every step"


def test_another_thread_gets_logits_meanwhile():
    model, _, data, _ = replaced("Bert")
    inner, seen = model.bert.forward, []

    def meanwhile(*args, **kwargs):
        if not seen:
            seen.append(None)
            thread = threading.Thread(target=lambda: seen.append(model(input_ids=data["input_ids"]).logits))
            thread.start()
            thread.join()
        return inner(*args, **kwargs)

    model.bert.forward = meanwhile
    assert model(**data).logits is None and isinstance(seen[1], torch.Tensor)


def test_of_modules_that_share_a_head_one_is_replaced():
    first = Classifier()
    both = nn.ModuleList([first, Classifier(first.head)])

    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.both = both

        def forward(self, x, y):
            return self.both[0](x, y) + self.both[1](x, y)

    model = Pair()
    found, data = classified(model)
    before = model(*data)
    found.ask(Choices())
    torch.testing.assert_close(model(*data), before)
    assert len(found.sites) == 1 and "another module's, too" in found.left[0].why


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
