"""Prompts in chunks: filled up to a few lengths, captured where they come again, the same bits however they are fed."""

import pytest
import torch
from conftest import DEVICE
from small_decoder import Tape, small_model

from whet.decode import chunks
from whet.decode.cache import Cache
from whet.decode.chunks import Chunks, length
from whet.decode.runner import DecodeRunner
from whet.decode.sampling import Sampling

TOKENS = [(7 * i * i + i) % 96 for i in range(200)]


@pytest.fixture(scope="module")
def model():
    return small_model()


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    for name, value in dict(CHUNK=64, LEAST=8, COARSE=16).items():
        monkeypatch.setattr(chunks, name, value)


def runner_of(model, rows: int = 2, tokens: int = 256, graphs: bool = True) -> DecodeRunner:
    runner = DecodeRunner(model, Cache(model.c, model.embed.dtype, model.embed.device, max_tokens=model.c.max_positions), rows)
    runner.capture = (Tape if DEVICE == "cpu" else graphs.Graph) if graphs else None
    runner.hold(rows, tokens)
    return runner


def fed(runner: DecodeRunner, n: int, row: int = 0, start: int = 0) -> tuple:
    """The token chosen, its logit, and what the cache holds of the prompt."""
    burst = runner.prefill(row, TOKENS[:n], start, Sampling())
    return burst.read(), burst.logits.tolist(), *(t[:, row, :, :n].clone() for t in runner.cache.kv)


def alike(a: tuple, b: tuple) -> bool:
    return a[:2] == b[:2] and all(torch.equal(x, y) for x, y in zip(a[2:], b[2:]))


def test_lengths_are_powers_of_two_then_four_to_an_octave(monkeypatch):
    monkeypatch.undo()
    assert [length(n) for n in (1, 20, 33, 129, 256, 257, 321, 1024, 1025)] == [32, 32, 64, 256, 256, 320, 384, 1024, 1280]
    assert all(n <= length(n) <= max(32, 2 * n) for n in range(1, 2049)) and len({length(n) for n in range(1, 2049)}) == 16


@pytest.mark.parametrize("n", [1, 5, 8, 40, 64, 65, 150])
def test_a_prompt_that_comes_again_is_captured_and_gives_the_same_bits(model, n):
    runner = runner_of(model)
    first = fed(runner, n)
    assert not runner.chunks.graphs
    second = fed(runner, n)
    assert len(runner.chunks.graphs) == -(-n // 64)
    assert alike(first, second) and alike(first, fed(runner, n))


def test_a_graph_serves_other_tokens_of_its_length_and_no_other_row(model):
    runner, other = runner_of(model), runner_of(model)
    for n in (30, 29):
        fed(runner, n)
    assert list(runner.chunks.graphs) == [(0, 0, 32)]
    assert alike(fed(runner, 27), fed(other, 27))
    expected = fed(other, 31, row=1)
    before = [t[:, 0].clone() for t in runner.cache.kv]
    assert alike(fed(runner, 31, row=1), expected) and list(runner.chunks.graphs) == [(0, 0, 32)]
    assert all(torch.equal(t[:, 0], b) for t, b in zip(runner.cache.kv, before))


def test_plain_calls_choose_what_graphs_choose(model):
    plain, runner = runner_of(model, graphs=False), runner_of(model)
    for n in (1, 20, 100, 100):
        assert fed(plain, n)[0] == fed(runner, n)[0]
    assert not plain.chunks.graphs and plain.chunks.size(5, 0) == 5


def test_what_follows_a_prefix_is_fed_from_there(model):
    runner, whole = runner_of(model), runner_of(model)
    expected = fed(whole, 90)
    fed(runner, 50)
    for _ in range(3):
        assert fed(runner, 90, start=50)[0] == expected[0]
    assert list(runner.chunks.graphs) == [(0, 50, 40)]


def test_a_chunk_is_filled_up_no_further_than_the_cache(model):
    runner = runner_of(model, rows=1)
    assert runner.cache.capacity == 256
    assert Chunks.size(runner.chunks, 10, 200) == 16 and Chunks.size(runner.chunks, 10, 244) == 12


def test_graphs_go_with_the_memory_and_the_oldest_where_there_are_many(model, monkeypatch):
    monkeypatch.setattr(chunks, "MAX_GRAPHS", 2)
    runner = runner_of(model)
    for n in (8, 16, 8, 16, 32, 32):
        fed(runner, n)
    assert [key[2] for key in runner.chunks.graphs] == [16, 32]
    fed(runner, 16)
    assert [key[2] for key in runner.chunks.graphs] == [32, 16]
    first = fed(runner, 32)
    runner.hold(2, 500)
    assert not runner.chunks.graphs
    assert alike(first, fed(runner, 32)) and [key[2] for key in runner.chunks.graphs] == [32]
