"""The engine: batches, streams, stops, prefixes, limits and errors, on a small random model where argmax stands clear."""

import pytest
import torch
from conftest import DEVICE
from small_decoder import CONFIG, Letters, Tape, small_llm, small_model

from whet import LLM, graphs, measure
from whet.decode.engine import Piece
from whet.decode.request import Completion, Writer
from whet.models.qwen3 import Qwen3

AHEAD = pytest.mark.parametrize(
    "ahead", [False, True] if DEVICE == "cpu" else [True], ids=lambda ahead: "as-on-a-gpu" if ahead else "cpu"
)
PROMPTS = ["hello there", "a", "The quick brown fox", "x" * 40, "0123456789", "so it goes", "??", "one more"]


@pytest.fixture(scope="module")
def model() -> Qwen3:
    return small_model()


def plain(model: Qwen3, prompt: str, n: int) -> list[int]:
    """Greedy tokens by the model's own forward, the whole sequence each time."""
    tokens = Letters().encode(prompt)
    for _ in range(n):
        tokens.append(int(model(torch.tensor([tokens], device=DEVICE))[0, -1].argmax()))
    return tokens[len(prompt):]


@pytest.fixture(scope="module")
def expected(model) -> dict[str, list[int]]:
    return {p: plain(model, p, 24) for p in PROMPTS}


@AHEAD
@pytest.mark.parametrize("max_batch", [1, 3, 8])
def test_prompts_of_different_lengths_give_what_each_gives_alone(model, expected, max_batch, ahead):
    llm = small_llm(model, ahead, max_batch=max_batch)
    done = llm.generate(PROMPTS, max_new_tokens=24)
    assert [c.tokens for c in done] == [expected[p] for p in PROMPTS]
    assert all(c.reason == "length" and c.text == "".join(chr(32 + t) for t in c.tokens) for c in done)
    assert [c.prompt_tokens for c in done] == [len(p) for p in PROMPTS]


@AHEAD
def test_a_finished_row_makes_room_for_the_next_whenever_it_ends(model, expected, ahead):
    """Each prompt stops at its own token, so that rows end at different times, inside bursts."""
    llm = small_llm(model, ahead, max_batch=3)
    for stop in "{0":
        for c, p in zip(llm.generate(PROMPTS, max_new_tokens=24, stop=stop), PROMPTS):
            text = "".join(chr(32 + t) for t in expected[p])
            assert c.text == text.split(stop)[0]
            assert c.reason == ("stop" if stop in text else "length")


def test_tape_repeats_operators_and_refuses_to_wait():
    x = torch.zeros(2)
    tape = Tape(lambda: x.add_(1), warm_up=2)
    assert x.tolist() == [2, 2]
    tape()
    assert x.tolist() == [3, 3]
    with pytest.raises(RuntimeError, match="waits for the device"):
        Tape(lambda: x.sum().item(), warm_up=0)


@pytest.fixture
def short_blocks(monkeypatch):
    """Contexts and caches in powers of two from 16 tokens on, and no room ahead."""
    monkeypatch.setattr("whet.decode.cache.BLOCK", 16)
    monkeypatch.setattr("whet.decode.runner.BLOCK", 16)
    monkeypatch.setattr("whet.decode.scheduler.RESERVE", 1)


@AHEAD
def test_growth_of_the_cache_changes_nothing(model, expected, short_blocks, ahead, monkeypatch):
    """Room is taken token by token, so that it moves in the middle of a generation."""
    llm, seen = small_llm(model, ahead), set()
    monkeypatch.setattr(llm.runner, "drop_graphs", lambda drop=llm.runner.drop_graphs: (seen.add(llm.cache.capacity), drop()))
    assert [c.tokens for c in llm.generate(PROMPTS[:3], max_new_tokens=24)] == [expected[p] for p in PROMPTS[:3]]
    assert seen == {0, 16, 32} and llm.cache.capacity == 64


def test_one_graph_serves_many_steps_and_goes_with_the_memory(model, short_blocks):
    llm = small_llm(model, ahead=True)
    llm.generate("x" * 40, max_new_tokens=9)
    assert list(llm.runner.graphs) == [("step", 1, 64, "greedy")]
    llm.generate("a", max_new_tokens=20)
    assert list(llm.runner.graphs) == [("step", 1, n, "greedy") for n in (64, 16, 32)]
    llm.generate(PROMPTS[:3], max_new_tokens=9, temperature=1)
    assert list(llm.runner.graphs) == [("step", 4, 32, "sampled")]


def test_no_row_ever_stands_beyond_its_context(model, expected, short_blocks, monkeypatch):
    """Idle rows are fed too: they must stay where they are."""
    llm, asked = small_llm(model, ahead=True, max_batch=4, max_context=64), dict(max_new_tokens=24)
    llm.runner.capture = None
    step = type(model).step

    def guarded(self, tokens, cache_k, cache_v, positions, context):
        assert int(positions.min()) >= 0 and int(positions.max()) + tokens.shape[1] <= context <= cache_k.shape[3]
        return step(self, tokens, cache_k, cache_v, positions, context)

    monkeypatch.setattr(type(model), "step", guarded)
    for stop in ("\\", "0"):  # the first ends the third prompt at once, while the first prompt, which is shorter, goes on
        for prompts in (PROMPTS[::-1], PROMPTS[:3], PROMPTS[2::-2]):
            done = llm.generate(prompts, stop=stop, reuse=stop == "0", **asked)
            assert [c.tokens for c in done] == [expected[p][: len(c.tokens)] for c, p in zip(done, prompts)]


def test_an_idle_row_keeps_of_its_prefix_what_lies_within_the_others_context(model, expected, short_blocks):
    llm = small_llm(model, ahead=True, max_batch=4)
    llm.generate(PROMPTS[:4], max_new_tokens=24)
    llm.generate(["a", "b", "c"], max_new_tokens=5)  # rows are taken by fours: the fourth idles within 16 tokens
    done = llm.generate(PROMPTS[:4], max_new_tokens=24, reuse=True)
    assert [c.reused_tokens for c in done] == [0, 0, 0, 15]
    assert [c.tokens for c in done] == [expected[p] for p in PROMPTS[:4]]


def test_generation_ends_where_the_context_is_full(model, expected):
    llm = small_llm(model, ahead=True, max_context=31)
    c = llm.generate("hello there", max_new_tokens=500)
    assert (c.reason, c.tokens) == ("length", expected["hello there"][:20])
    assert llm.cache.capacity == 31


def test_a_prompt_that_cannot_fit_is_refused_with_the_number_that_would(model):
    with pytest.raises(ValueError, match="40 tokens and 30 would fit.* context is 31"):
        small_llm(model, max_context=31).generate("x" * 40)
    with pytest.raises(ValueError, match="40 tokens and 19 would fit.* memory is 20"):
        small_llm(model, memory=20 * 512).generate("x" * 40)


def test_prompts_that_do_not_fit_together_wait_for_each_other(model, expected):
    """Memory for 100 tokens: two short ones at once, the long one alone."""
    llm = small_llm(model, ahead=True, memory=100 * 512)
    done = llm.generate(PROMPTS[:4], max_new_tokens=24)
    assert [c.tokens for c in done] == [expected[p] for p in PROMPTS[:4]]
    assert llm.cache.rows * llm.cache.capacity <= 100


def test_a_stream_joins_to_the_same_text(model):
    llm = small_llm(model, ahead=True)
    whole = llm.generate("hello there", max_new_tokens=30, stop="`{")
    stream = llm.stream("hello there", max_new_tokens=30, stop="`{")
    pieces = list(stream)
    assert all(isinstance(p, Piece) for p in pieces)
    assert "".join(p.text for p in pieces) == whole.text == stream.completion.text
    assert [p.token for p in pieces] == whole.tokens == stream.completion.tokens
    assert stream.completion.reason == whole.reason


class Halves:
    """Each token shows the character of the one before: what is certain comes late."""

    def __init__(self):
        self.waiting = ""

    def push(self, token):
        out, self.waiting = self.waiting, chr(32 + token)
        return out

    def end(self):
        return self.waiting

    def stream(self):
        return Halves()


@pytest.mark.parametrize("text", [Letters(), Halves()], ids=["at-once", "late"])
@pytest.mark.parametrize("stops, shown", [
    (("cd",), "ab"), (("de", "bcd"), "a"), (("xx",), "abcdef"), (("fg", "f"), "abcde"), ((), "abcdef"),
])
def test_a_stop_is_found_across_tokens_and_never_shown(text, stops, shown):
    writer, pieces = Writer(text, stops), []
    for c in "abcdef":
        if not writer.stopped:
            pieces.append(writer.push(ord(c) - 32))
    pieces.append(writer.end())
    assert "".join(pieces) == writer.shown == shown


def test_what_may_be_a_stop_is_held_back_until_it_is_not():
    writer = Writer(Letters(), ("abc",))
    assert [writer.push(ord(c) - 32) for c in "xababd"] == ["x", "", "", "ab", "", "abd"]


def test_end_tokens_stop_and_can_be_ignored(model, expected):
    tokens = expected["hello there"]
    end = tokens[5]
    first = tokens.index(end)
    ends = type(CONFIG)(**{**CONFIG.__dict__, "eos": (end,)})
    model.c, kept = ends, model.c
    try:
        llm = small_llm(model)
        c = llm.generate("hello there", max_new_tokens=24)
        assert (c.reason, c.tokens) == ("stop", tokens[: first + 1])
        assert c.text == "".join(chr(32 + t) for t in tokens[:first])
        assert llm.generate("hello there", max_new_tokens=24, ignore_eos=True).tokens == tokens
    finally:
        model.c = kept


@AHEAD
def test_a_prefix_is_reused_and_the_answer_is_the_same(model, ahead):
    llm, fresh = small_llm(model, ahead), small_llm(model, ahead)
    first = llm.generate("hello there", max_new_tokens=20)
    longer = Letters().encode("hello there") + first.tokens + Letters().encode(" and then?")
    again = llm.generate(longer, max_new_tokens=20, reuse=True)
    assert again.reused_tokens == len("hello there") + 19  # the last token was chosen and not fed
    assert again.tokens == fresh.generate(longer, max_new_tokens=20).tokens
    branch = llm.generate("hello world", max_new_tokens=20, reuse=True)
    assert branch.reused_tokens == len("hello ")
    assert branch.tokens == fresh.generate("hello world", max_new_tokens=20).tokens
    same = llm.generate("hello world", max_new_tokens=20, reuse=True)
    assert same.reused_tokens == len("hello worl")
    assert same.tokens == branch.tokens
    assert llm.generate("hello world", max_new_tokens=20).reused_tokens == 0


def test_a_chat_reuses_its_earlier_turns(model):
    llm, fresh = small_llm(model, ahead=True), small_llm(model)
    messages = [{"role": "user", "content": "hi"}]
    for question in ("why?", "how?"):
        answer = llm.chat(messages, max_new_tokens=12)
        messages += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": question}]
    last = llm.chat(messages, max_new_tokens=12)
    assert last.reused_tokens > answer.prompt_tokens
    stream = fresh.stream(messages, max_new_tokens=12)
    assert "".join(p.text for p in stream) == last.text
    assert stream.completion.reused_tokens == 0


def test_rows_of_a_batch_find_their_own_prefixes(model, expected):
    llm = small_llm(model, ahead=True, max_batch=4)
    llm.generate(PROMPTS[:4], max_new_tokens=24)
    done = llm.generate(PROMPTS[:4], max_new_tokens=24, reuse=True)
    assert [c.reused_tokens for c in done] == [len(p) - 1 for p in PROMPTS[:4]]
    assert [c.tokens for c in done] == [expected[p] for p in PROMPTS[:4]]
    alone = llm.generate(PROMPTS[3], max_new_tokens=24, reuse=True)  # moved down to row 0
    assert (alone.reused_tokens, alone.tokens) == (39, expected[PROMPTS[3]])


@AHEAD
def test_a_bad_prompt_among_others_is_answered_by_an_error(model, expected, ahead):
    llm = small_llm(model, ahead, max_batch=2, max_context=64)
    done = llm.generate(["hello there", "", [3, 96], "y" * 64, [5, "a"], "a"], max_new_tokens=20)
    assert [c.reason for c in done] == ["length", "error", "error", "error", "error", "length"]
    assert done[0].tokens == expected["hello there"][:20] and done[5].tokens == expected["a"][:20]
    assert [c.error for c in done[1:5]] == [
        "the prompt is empty; give it at least one token",
        "tokens must be whole numbers from 0 to 95, the vocabulary, got 96",
        "the prompt has 64 tokens and 63 would fit: the context is 64 tokens",
        "tokens must be whole numbers from 0 to 95, the vocabulary, got 'a'",
    ]
    with pytest.raises(ValueError, match="^the prompt is empty"):
        llm.generate("")


@AHEAD
@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
def test_logits_that_are_not_finite_end_their_row_alone(model, ahead, temperature):
    """A token whose embedding is NaN spoils the row that holds it; the place it had is clean for the next."""
    broken = small_model()
    broken.embed[Letters().encode("~")[0]] = float("nan")
    llm = small_llm(broken, ahead, max_batch=2)
    asked = dict(max_new_tokens=12, temperature=temperature, seed=4)
    wanted = small_llm(model, max_batch=1).generate(["hello there", "a", "so it goes"], **asked)
    assert all("~" not in c.text for c in wanted)
    done = llm.generate(["hello there", "a~", "a", "~", "so it goes"], **asked)
    assert [c.reason for c in done] == ["length", "error", "length", "error", "length"]
    assert [done[i].tokens for i in (0, 2, 4)] == [c.tokens for c in wanted]
    assert "logits of the prompt are not finite" in done[1].error
    with pytest.raises(ValueError, match="not finite"):
        llm.generate("a~", **asked)
    assert llm.cache.k.isfinite().all() and llm.cache.v.isfinite().all()


def test_a_row_that_breaks_on_the_way_keeps_what_came_before(model, expected):
    broken = small_model()
    tokens = expected["hello there"]
    at = next(i for i, t in enumerate(tokens) if i > 3 and t not in tokens[:i])
    broken.embed[tokens[at]] = float("nan")
    c = small_llm(broken, ahead=True).generate([Letters().encode("hello there")], max_new_tokens=24)[0]
    assert (c.reason, c.tokens) == ("error", tokens[: at + 1])
    assert f"after {at + 1} new tokens" in c.error and "not finite" in c.error


def test_a_seed_gives_the_same_text_whatever_else_is_in_the_batch(model):
    asked = dict(max_new_tokens=12, temperature=0.9, top_k=20, top_p=0.9)
    llm = small_llm(model, ahead=True, max_batch=2)
    together = [c.text for c in llm.generate(PROMPTS[:4], seed=7, **asked)]
    assert together == [small_llm(model).generate(p, seed=7, **asked).text for p in PROMPTS[:4]]
    assert together == [c.text for c in llm.generate(PROMPTS[:4], seed=7, **asked)]
    assert together != [c.text for c in llm.generate(PROMPTS[:4], seed=8, **asked)]
    drawn = llm.generate(["hello there"] * 2, seed=[1, 2], **asked)
    assert drawn[0].text != drawn[1].text


def test_an_interrupt_leaves_the_engine_usable(model, expected, monkeypatch):
    llm = small_llm(model, ahead=True, max_batch=2)
    for name, calls in (("steps", 2), ("prefill", 2), ("hold", 1)):
        run, left = getattr(llm.runner, name), [calls]

        def interrupted(*args, run=run, left=left):
            out, left[0] = run(*args), left[0] - 1
            if not left[0]:
                raise KeyboardInterrupt
            return out

        monkeypatch.setattr(llm.runner, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS[:4], max_new_tokens=24)
        monkeypatch.undo()
        assert not llm.runner.advance[:2].any()
        done = llm.generate(PROMPTS[:4], max_new_tokens=24, reuse=True)
        assert [c.tokens for c in done] == [expected[p] for p in PROMPTS[:4]]


def test_a_new_call_ends_a_stream_that_is_still_open(model, expected):
    llm = small_llm(model, ahead=True)
    stream = llm.stream("hello there", max_new_tokens=24)
    assert [next(stream).token for _ in range(3)] == expected["hello there"][:3]
    assert llm.generate("a", max_new_tokens=24).tokens == expected["a"]
    assert (stream.completion.reason, stream.completion.tokens) == ("error", expected["hello there"][:3])
    assert list(stream) == []


def test_a_stream_that_was_never_read_can_be_closed(model):
    stream = small_llm(model).stream("hello there")
    stream.close()
    assert (stream.completion.reason, stream.completion.error) == ("error", "closed before its end")


def test_times_add_up_and_a_cpu_has_no_floor(model):
    c = small_llm(model).generate("hello there", max_new_tokens=10)
    assert c.first_token_s > 0 and c.decode_s > 0
    assert c.tokens_per_s == 9 / c.decode_s
    assert c.accepted is None and c.speculation is None
    assert (c.bytes_per_token is None) == (DEVICE == "cpu")


def test_the_first_token_does_not_wait_for_a_graph(model):
    llm = small_llm(model, ahead=True)
    stream = llm.stream("hello there", max_new_tokens=24)
    next(stream)
    assert not llm.runner.graphs
    assert len(list(stream)) == 23 and llm.runner.graphs


def test_the_floor_is_the_bytes_at_the_measured_copy_rate(monkeypatch):
    monkeypatch.setattr(measure, "known_ceilings", lambda: measure.Ceilings(copy_gbs=4000.0, tflops={}))
    c = Completion(tokens=[0] * 101, decode_s=0.1, bytes_per_token=10**9)
    assert c.floor_share == 10**9 / 4e12 / (0.1 / 100)


@pytest.mark.parametrize("options, said", [
    (dict(max_new_tokens=0), "max_new_tokens must be a whole number from 1 on, got 0"),
    (dict(stop=("a", "")), "stop must be strings that are not empty"),
    (dict(temperature=-1), "temperature must be from 0"),
    (dict(seed=[1, 2]), "seed must be one number or one for each of the 1 prompts, got 2"),
])
def test_options_that_make_no_sense_are_refused(model, options, said):
    with pytest.raises(ValueError, match=said):
        small_llm(model).generate("a", **options)


@pytest.mark.parametrize("options, said", [
    (dict(max_batch=0), "max_batch must be a whole number from 1 to 64, got 0"),
    (dict(max_context=1), "max_context must be a whole number of tokens from 2 on, got 1"),
    (dict(max_context=2000), "max_context must be at most 1024, the model's positions, got 2000"),
    (dict(speculate="magic"), "speculate must be None or one of ngram, got 'magic'"),
    (dict(memory="lots"), "memory must be bytes or a size such as '8GiB', got 'lots'"),
])
def test_limits_that_make_no_sense_are_refused(model, options, said):
    with pytest.raises(ValueError, match=said):
        LLM.of(model, **options)


def test_random_weights_take_text_as_bytes_and_write_numbers():
    llm = LLM(random_weights="qwen3:tiny", device="cpu")
    c = llm.generate("hi", max_new_tokens=3)
    assert c.prompt_tokens == 2 and c.text == "".join(f"{t} " for t in c.tokens)
    with pytest.raises(ValueError, match="no chat template: give a plain prompt"):
        llm.chat([{"role": "user", "content": "hi"}])


def test_unknown_options_raise(model):
    with pytest.raises(TypeError, match="max_tokens"):
        small_llm(model).stream("a", max_tokens=3)


def test_marks_say_how_long_the_work_between_them_took():
    device = torch.device(DEVICE)
    begin = graphs.Mark(device)
    torch.ones(1000, device=device).cumsum(0)
    end = graphs.Mark(device)
    end.wait()
    assert end.since(begin) > 0
