"""Calls of few rows, as when text is generated token by token: replaced modules run as they were, and give the same."""

import pytest
import torch
from swapping import batch, built

from whet.choices import Choices, Recorder
from whet.swap import Met
from whet.swap._few import few, fewest_rows
from whet.swap._replace import as_call, recognise

pytest.importorskip("transformers")
PER_ROW = {"rms_norm", "layer_norm", "gelu"}  # one op in the place of several: faster for a single row, too


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma3", "GPT2", "Phi3"])
def test_generation_asks_for_no_op_at_a_single_token_but_row_wise_ones(family):
    model = built(family, torch.float32)
    ids = torch.randint(3, 60, (2, 48))
    found = recognise(model, as_call(dict(input_ids=ids, labels=ids)), Choices())
    assert found.sites
    found.restore()
    model.eval()
    options = dict(max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0)
    want = model.generate(ids[:1, :4], **options)
    recorder = Recorder()
    found.ask(recorder)
    assert torch.equal(model.generate(ids[:1, :4], **options), want)
    assert {call.op for call, _ in recorder.calls.values()} <= PER_ROW
    with torch.no_grad():
        model(ids)
    assert {call.op for call, _ in recorder.calls.values()} - PER_ROW, "many rows are served"
    found.restore()


def test_where_the_proof_itself_has_few_rows_so_few_are_served():
    x = torch.zeros(3, 5, 8)
    assert fewest_rows(Met((x,), {})) == fewest_rows(Met((), {"hidden_states": x})) == 15
    assert fewest_rows(Met((torch.zeros(9, 99, 8),), {})) == 64
    assert fewest_rows(Met(("a",), {})) == fewest_rows(Met((), {})) == 0
    assert few((x[:1],), {}, 15) and few((), {"x": x[:1]}, 15) and not few((x,), {}, 15) and not few((), {}, 15)
    assert not few(("a",), {}, 15) and not few((torch.tensor(1.0),), {}, 15)


def test_a_model_optimised_at_a_small_batch_is_served_at_it():
    model, data = built("Llama", torch.float32), batch()
    found = recognise(model, as_call(data), Choices())
    recorder = Recorder()
    found.ask(recorder)
    model(**data)
    assert {"add_rms_norm", "swiglu", "attention"} <= {call.op for call, _ in recorder.calls.values()}
    found.restore()
