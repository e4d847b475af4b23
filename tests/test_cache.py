"""The cache of keys and values: it grows with what it holds, keeps it, and says what would fit."""

import pytest
import torch
from small_decoder import CONFIG

from whet.decode import cache as cache_module
from whet.decode.cache import BLOCK, Cache, bytes_of, free_bytes

CPU = torch.device("cpu")
TOKEN = 2 * CONFIG.layers * CONFIG.kv_heads * CONFIG.head_dim * 4  # bytes of a token in float32


def cache(tokens: int = 4096, longest: int = 2**20) -> Cache:
    return Cache(CONFIG, torch.float32, CPU, memory=tokens * TOKEN, max_tokens=longest)


@pytest.mark.parametrize("given, wanted", [(1000, 1000), ("8GiB", 8 * 2**30), ("1.5 MB", 1500000), ("2k", 2000), ("7", 7)])
def test_memory_is_bytes_or_a_size(given, wanted):
    assert bytes_of(given) == wanted


@pytest.mark.parametrize("given", ["", "8 bananas", "-1GB", 0, True, None, float("inf"), "1GiBB"])
def test_other_memory_is_refused_by_value(given):
    with pytest.raises(ValueError, match="memory must be .* got"):
        bytes_of(given)


def test_free_memory_is_the_default_less_headroom():
    assert 0 < Cache(CONFIG, torch.float32, CPU).memory < free_bytes(CPU) * 1.5


def test_it_holds_nothing_until_asked_and_grows_by_doubling():
    c = cache()
    assert (c.rows, c.capacity) == (0, 0)
    assert c.hold(1, 10)
    assert (c.rows, c.capacity) == (1, BLOCK) and c.k.shape == c.v.shape == (2, 1, 2, BLOCK, 16)
    assert not c.hold(1, BLOCK)
    assert c.hold(2, BLOCK + 1)
    assert (c.rows, c.capacity) == (2, 2 * BLOCK)


def test_growth_keeps_what_is_held():
    c = cache()
    c.hold(2, 100)
    for t in c.kv:
        t.normal_()
    before = [t.clone() for t in c.kv]
    c.hold(4, 600)
    for t, old in zip(c.kv, before):
        assert torch.equal(t[:, :2, :, :BLOCK], old)
        assert not t[:, 2:].any() and not t[:, :, :, BLOCK:].any()


def test_at_the_limit_it_gives_up_rows_and_tokens_that_were_not_asked_for():
    c = cache(tokens=1000)
    c.hold(3, 256)
    c.hold(1, 700)
    assert (c.rows, c.capacity) == (1, 768)
    c.hold(4, 200)
    assert (c.rows, c.capacity) == (4, 250)


def test_refusal_says_how_many_tokens_would_fit_and_why():
    c = cache(tokens=1000)
    assert c.longest == 1000 and c.fits(1000) and not c.fits(501, rows=2)
    with pytest.raises(ValueError, match="1001 tokens .* 1000 .* memory"):
        c.hold(1, 1001)
    with pytest.raises(ValueError, match="2 rows of 501 tokens .* 500 "):
        c.hold(2, 501)
    with pytest.raises(ValueError, match="65 tokens .* 64 .* context"):
        cache(longest=64).hold(1, 65)


def test_the_context_bounds_what_is_allocated():
    c = cache(longest=300)
    c.hold(1, 290)
    assert c.capacity == 300


def test_rows_are_copied_and_cleared():
    c = cache()
    c.hold(2, 8)
    c.k.normal_()
    c.copy(0, 1, 5)
    assert torch.equal(c.k[:, 0, :, :5], c.k[:, 1, :, :5]) and not torch.equal(c.k[:, 0, :, 5], c.k[:, 1, :, 5])
    c.clear(0)
    assert not c.k[:, 0].any() and c.k[:, 1].any()


def test_growth_that_fails_leaves_an_empty_cache_and_one_line(monkeypatch):
    c = cache()
    c.hold(1, 8)

    def full(rows, tokens, zeros=c._zeros):
        if tokens:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate much.")
        return zeros(rows, tokens)

    monkeypatch.setattr(c, "_zeros", full)
    with pytest.raises(ValueError, match=r"^cache: there is no memory for 1 rows of 512 tokens \(.* MiB\); lower memory"):
        c.hold(1, 300)
    assert (c.rows, c.capacity) == (0, 0)
    monkeypatch.undo()
    assert c.hold(1, 300)


def test_without_proc_meminfo_half_of_the_memory_is_assumed_free(monkeypatch, tmp_path):
    monkeypatch.setattr(cache_module, "Path", lambda _: tmp_path / "none")
    assert free_bytes(CPU) > 2**20
