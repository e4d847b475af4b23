"""What serves many prompts at once, where something gives way beneath it."""

import pytest
import torch
from conftest import DEVICE
from small_decoder import Letters, small_llm

from whet.decode.request import Request, Writer
from whet.decode.runner import RING
from whet.decode.sampling import Sampling

AHEAD = pytest.mark.parametrize(
    "ahead", [False, True] if DEVICE == "cpu" else [True], ids=lambda ahead: "as-on-a-gpu" if ahead else "cpu"
)
PROMPTS = ["hello there", "a"]


@AHEAD
def test_a_cache_that_cannot_grow_ends_the_others_with_an_error_not_with_wrong_text(ahead, monkeypatch):
    """Its memory is given up before it is taken anew; whoever went on would read zeros."""
    expected = [c.tokens for c in small_llm(max_batch=2).generate(PROMPTS, max_new_tokens=24)]
    llm = small_llm(ahead=ahead, max_batch=2)
    cache, zeros = llm.runner.cache, llm.runner.cache._zeros

    def full(rows, tokens):
        if rows == 2:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate much.")
        return zeros(rows, tokens)

    monkeypatch.setattr(cache, "_zeros", full)
    first, second = llm.generate(PROMPTS, max_new_tokens=24)
    assert first.reason == second.reason == "error"
    assert first.error.startswith("the cache lost its memory")
    assert second.error.startswith("cache: there is no memory for 2 rows")
    assert first.tokens == expected[0][: len(first.tokens)]
    monkeypatch.undo()
    assert [c.tokens for c in llm.generate(PROMPTS, max_new_tokens=24)] == expected


def test_a_full_burst_leaves_room_for_the_capture_of_the_next():
    """The warm-up of a graph writes to the column that comes next."""
    llm = small_llm(ahead=True)
    llm.runner.hold(1, 600)
    llm.runner.prefill(0, [1, 2, 3], 0, Sampling())
    assert len(llm.runner.steps(RING, 1, 256, "greedy").read()[0]) == RING
    assert len(llm.runner.steps(8, 1, 512, "greedy").read()[0]) == 8


def test_the_rate_of_tokens_that_were_read_at_once_is_that_at_which_they_were_made():
    """A burst is read at one moment, perhaps together with the first token: the time between the two readings says nothing."""
    request = Request([1], Sampling(), 4, Writer(Letters().stream(), ()), frozenset(), False, began=0.0)
    for token in (5, 6, 7, 8):
        request.busy += 0.5 if request.new else 0.0
        request.take(token, now=2.0)
    assert request.completion().tokens_per_s == 2.0


@pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU the next burst runs while a token is read")
def test_without_a_gpu_the_first_token_is_given_before_another_is_made(monkeypatch):
    llm, calls = small_llm(), []
    steps = llm.runner.steps
    monkeypatch.setattr(llm.runner, "steps", lambda *a: calls.append(a) or steps(*a))
    pieces = iter(llm.stream("hello", max_new_tokens=3))
    next(pieces)
    assert not calls
    assert len(list(pieces)) == 2 and len(calls) == 2


def test_where_nothing_repeats_no_share_of_drafts_is_told():
    done = small_llm(speculate="ngram").generate("abc", max_new_tokens=2)
    assert done.accepted is None and done.speculation == "on"


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU's steps are captured and read no position")
def test_on_a_cpu_one_row_is_extended_and_gives_what_steps_give(monkeypatch):
    fast, plain = small_llm(), small_llm()
    plain.runner.extends = False
    asked = []
    real = fast.model.extend
    monkeypatch.setattr(fast.model, "extend", lambda *given, start=None: asked.append(start) or real(*given, start=start))
    wanted = plain.generate("hello", max_new_tokens=12)
    assert fast.generate("hello", max_new_tokens=12).tokens == wanted.tokens
    assert asked[-11:] == list(range(5, 16)), "each step at its own position"
    assert not small_llm(speculate="ngram").runner.extends, "drafts are checked by step"
