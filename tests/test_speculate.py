"""Speculation: the same tokens as without, drafts that come true, and an end to it where it loses."""

from dataclasses import replace

import pytest
import torch
from conftest import DEVICE
from small_decoder import CONFIG, small_llm, small_model

from whet.choices import Choices
from whet.decode import speculate
from whet.decode.runner import Burst
from whet.decode.speculate import DRAFT, Contest, agreed, batch_invariant_in_one_pass, draft
from whet.models.qwen3 import Qwen3

AHEAD = pytest.mark.parametrize(
    "ahead", [False, True] if DEVICE == "cpu" else [True], ids=lambda ahead: "as-on-a-gpu" if ahead else "cpu"
)
REPETITIVE = "one two three, one two three, one two three, one"


@pytest.fixture(scope="module")
def looping() -> Qwen3:
    """Weights so small that the text soon repeats itself."""
    return small_model(scale=3.0)


def drafted(text: str, count: int = 4, behind: str = "") -> tuple[str, bool]:
    history = torch.tensor([ord(c) for c in text + behind + "\0" * 8])
    guess, found = draft(history, torch.tensor([len(text) - 1]), count, len(text + behind) + 2)
    return "".join(chr(t) for t in guess.tolist()), bool(found)


@pytest.mark.parametrize("text, guess", [
    ("abcdefgh..abc", "defg"),
    ("abcX abcY.. abc", "Y.. "),  # the latest place
    ("abcdef..xbcYYYY..abc", "def."),  # three tokens before two
    (".bcdef..xbc", "def."),  # two, where three are nowhere
    ("abababab", "abab"),  # a loop goes on
    ("aaaa", "aaaa"),
    ("xyzabcabc", "abca"),
])
def test_a_draft_is_what_followed_the_latest_place(text, guess):
    assert drafted(text) == (guess, True)


@pytest.mark.parametrize("text", ["abcdefgh", "a", "ab", "abc"])
def test_without_a_place_nothing_is_found_and_any_token_serves(text):
    guess, found = drafted(text)
    assert not found and guess == text[-1] * 4


def test_what_lies_behind_the_last_token_is_not_looked_at():
    assert drafted("abcdefgh..abc", behind="abcZZZZ") == ("defg", True)


@pytest.mark.parametrize("guess, n", [([1, 2, 3], 3), ([1, 9, 3], 1), ([9, 2, 3], 0)])
def test_agreement_ends_at_the_first_difference(guess, n):
    assert agreed(torch.tensor(guess), torch.tensor([1, 2, 3, 4])).tolist() == [n]


def a_second_a_step(burst: Burst) -> float:
    return burst.tokens.shape[1] / (1 if burst.tally is None else DRAFT + 1)


@AHEAD
@pytest.mark.parametrize("n", [1, 10, 100])
def test_the_tokens_are_those_of_plain_decoding(looping, ahead, n, monkeypatch):
    monkeypatch.setattr(Burst, "seconds", property(a_second_a_step))
    plain = small_llm(looping).generate(REPETITIVE, max_new_tokens=n)
    llm = small_llm(looping, ahead, speculate="ngram")
    done = llm.generate(REPETITIVE, max_new_tokens=n)
    assert (done.tokens, done.text, done.reason) == (plain.tokens, plain.text, plain.reason)
    known = [ord(c) - 32 for c in REPETITIVE] + plain.tokens
    assert llm.server.speculator.history[: len(known)].tolist() == known
    if n == 100:
        assert done.accepted > 0.5 and done.speculation == "on"
    again = llm.generate(REPETITIVE + plain.text[:5], max_new_tokens=n)
    assert again.tokens == small_llm(looping).generate(REPETITIVE + plain.text[:5], max_new_tokens=n).tokens


@AHEAD
def test_drafts_that_are_wrong_change_no_token(ahead, monkeypatch):
    monkeypatch.setattr(Contest, "saw_plain", lambda *_: None)  # nothing to lose against
    model = small_model()
    for prompt in ("a", REPETITIVE):
        done = small_llm(model, ahead, speculate="ngram").generate(prompt, max_new_tokens=40)
        assert done.tokens == small_llm(model).generate(prompt, max_new_tokens=40).tokens
        assert 0 <= done.accepted < 1


def test_each_token_by_its_own_step_gives_the_same(looping):
    llm = small_llm(looping, ahead=True, speculate="ngram")
    llm.runner.one_pass = False
    plain = small_llm(looping).generate(REPETITIVE, max_new_tokens=40)
    assert llm.generate(REPETITIVE, max_new_tokens=40).tokens == plain.tokens


@AHEAD
def test_it_goes_on_to_the_end_of_the_context(looping, ahead, monkeypatch):
    """Where no draft has room any more, plain steps do the rest, and the cache grows on the way."""
    monkeypatch.setattr("whet.decode.scheduler.RESERVE", 1)
    monkeypatch.setattr(Contest, "saw_plain", lambda *_: None)
    prompt = (6 * REPETITIVE)[:256]  # the first new token needs more room
    plain = small_llm(looping, max_context=301).generate(prompt, max_new_tokens=999)
    done = small_llm(looping, ahead, speculate="ngram", max_context=301).generate(prompt, max_new_tokens=999)
    assert done.tokens == plain.tokens and done.reason == "length" and len(done.tokens) == 45


@AHEAD
def test_it_switches_itself_off_when_it_loses(looping, ahead, monkeypatch):
    def wrong(history, position, count, context):
        return torch.full_like(history[:count], 95), position >= 0

    monkeypatch.setattr(speculate, "draft", wrong)
    monkeypatch.setattr(Burst, "seconds", property(lambda b: 1.0 if b.tally is None else 10.0))
    llm = small_llm(looping, ahead, speculate="ngram")
    done = llm.generate(REPETITIVE, max_new_tokens=80)
    assert done.tokens == small_llm(looping).generate(REPETITIVE, max_new_tokens=80).tokens
    assert done.accepted == 0
    n = 9 + speculate.WINDOW
    assert done.speculation == f"off after {n} tokens: 0 tokens/s with it, 8 without"
    assert llm.generate(REPETITIVE, max_new_tokens=12).speculation == "on"  # the next generation tries again


def test_a_contest_looks_at_the_last_steps_alone():
    contest = Contest()
    contest.saw_plain(8, 1.0)
    for _ in range(40):
        contest.saw(4, 16, 1.0, 28, 12, 0)
    assert contest.off is None and contest.accepted == 12 / 28
    for _ in range(2):
        contest.saw(4, 4, 1.0, 28, 0, 0)
    assert contest.off is None  # 40 tokens in 4 s
    contest.saw(4, 4, 1.0, 28, 0, 123)
    assert contest.off == "off after 123 tokens: 7 tokens/s with it, 8 without"


def test_a_stop_inside_a_burst_ends_the_text_there(looping):
    plain = small_llm(looping).generate(REPETITIVE, max_new_tokens=100)
    stop = plain.text[37:40]
    done = small_llm(looping, ahead=True, speculate="ngram").generate(REPETITIVE, max_new_tokens=100, stop=stop)
    assert done.text == plain.text.split(stop)[0] and done.reason == "stop"


def test_what_it_cannot_do_is_refused(looping):
    llm = small_llm(looping, speculate="ngram")
    with pytest.raises(ValueError, match="one prompt at a time, got 2"):
        llm.generate(["a", "b"])
    with pytest.raises(ValueError, match="temperature 0, got 0.5"):
        llm.generate("a", temperature=0.5)


def test_broken_logits_end_it(looping):
    model = small_model(scale=3.0)
    tokens = small_llm(looping).generate(REPETITIVE, max_new_tokens=40).tokens
    at = max(i for i, t in enumerate(tokens) if t not in tokens[:i] and chr(32 + t) not in REPETITIVE)
    model.embed[tokens[at]] = float("nan")
    with pytest.raises(ValueError, match=f"^the logits after {at + 1} new tokens are not finite"):
        small_llm(model, ahead=True, speculate="ngram").generate(REPETITIVE, max_new_tokens=100)


def test_a_step_takes_no_more_tokens_than_the_kernels_do():
    assert DRAFT + 1 == 8


def test_one_pass_is_for_kernels_that_take_rows_one_by_one():
    """A product that falls to another library may sum otherwise for eight rows than for one."""
    model = small_model()
    model.ops = Choices(default="triton")
    assert batch_invariant_in_one_pass(model)
    model.ops = Choices(default="torch")
    assert not batch_invariant_in_one_pass(model)
    wide = Qwen3(replace(CONFIG, ffn=17000), device="meta", ops=Choices(default="triton"))
    assert not batch_invariant_in_one_pass(wide)
