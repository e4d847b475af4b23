"""Drawing a token: the distribution, what top-k and top-p keep, whose seed matters, and the rows that have no answer."""

import math

import pytest
import torch

from whet.decode import sampling
from whet.decode.sampling import Sampling, sample

LEVEL = 1e-4  # one fair sampler in ten thousand would be refused; the seeds are fixed, so the answer does not change
DRAWS = 50000
WORDS = [[1007535995, 1571630433, -1831055910], [2037491896, -1509471430, -1867637634], [1521698461, -2039580283, -394590103]]
PEAKED = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -1.5, 0.3, 0.3, 1.2, -3.0])


def rows(logits, B, temperature=1.0, top_k=0, top_p=1.0, seed=0, position=None):
    """Arguments of sample for B rows of the same logits at positions 0, 1, ..."""
    def fill(value, dtype):
        return torch.full((B,), value, dtype=dtype) if not isinstance(value, torch.Tensor) else value

    return dict(
        logits=logits.expand(B, -1), temperature=fill(temperature, torch.float32), top_k=fill(top_k, torch.int64),
        top_p=fill(top_p, torch.float32), seed=fill(seed, torch.int64),
        position=torch.arange(B) if position is None else fill(position, torch.int64),
    )


def critical(df: int) -> float:
    """The value that chi-square with df degrees of freedom exceeds with probability LEVEL, by halving."""
    low, high = torch.zeros((), dtype=torch.float64), torch.tensor(100.0 * (df + 10), dtype=torch.float64)
    for _ in range(200):
        mid = (low + high) / 2
        above = torch.special.gammaincc(torch.tensor(df / 2, dtype=torch.float64), mid / 2) > LEVEL
        low, high = (mid, high) if above else (low, mid)
    return high.item()


def excess(counts: torch.Tensor, p: torch.Tensor) -> float:
    """Chi-square of the counts against probabilities p, over its critical value: above 1 they do not agree."""
    expected = p.double() * counts.sum()
    assert expected.min() > 5, "too few draws for the check to mean anything"
    return (((counts - expected) ** 2 / expected).sum() / critical(len(p) - 1)).item()


def drawn(**how) -> torch.Tensor:
    logits, filtered = how.pop("logits", PEAKED), how.pop("filtered", True)
    return sample(**rows(logits, DRAWS, **how), filtered=filtered)


def shares(temperature=1.0, logits=PEAKED):
    return (logits.double() / temperature).softmax(-1)


def misfit(**how) -> float:
    tokens = drawn(**how)
    return excess(tokens.bincount(minlength=len(PEAKED)), shares(how.get("temperature", 1.0)))


def test_critical_values_are_those_of_the_tables():
    assert round(critical(1), 2) == 15.14 and round(critical(10), 2) == 35.56


@pytest.mark.parametrize("filtered", [True, False])
@pytest.mark.parametrize("temperature", [0.8, 1.0, 1.7])
def test_tokens_are_drawn_as_softmax_says(temperature, filtered):
    assert misfit(temperature=temperature, seed=5, filtered=filtered) < 1


def test_no_part_of_a_large_vocabulary_is_favoured():
    V, parts = 16384, 16
    tokens = torch.cat([sample(**rows(torch.zeros(V), 500, seed=s), filtered=False) for s in range(3)])
    assert excess((tokens * parts // V).bincount(minlength=parts), torch.full((parts,), 1 / parts)) < 1


def test_seeds_and_positions_each_give_fresh_draws():
    across_seeds = dict(seed=torch.arange(DRAWS), position=3)
    far_seeds = dict(seed=torch.arange(DRAWS) << 40, position=3)
    assert misfit() < 1 and misfit(**across_seeds) < 1 and misfit(**far_seeds) < 1


MUTANTS = {
    "uniform noise instead of Gumbel": lambda key, token: gumbel(key, token).neg().exp().neg().exp(),
    "exponential noise": lambda key, token: -gumbel(key, token).neg().exp(),
    "noise a little too strong": lambda key, token: 1.1 * gumbel(key, token),
    "noise biased to early tokens": lambda key, token: gumbel(key, token) - 0.02 * token,
    "the position forgotten": lambda key, token: gumbel(key[:1].expand_as(key), token),
    "the token forgotten": lambda key, token: gumbel(key, torch.zeros_like(token)),
    "no mixing": lambda key, token: -(-(((key[:, :1] ^ token.int()) & 0xFFFF) / 65536 + 1e-6).log()).log(),
}
gumbel = sampling.gumbel


@pytest.mark.parametrize("mutant", MUTANTS)
def test_check_of_the_distribution_rejects(mutant, monkeypatch):
    monkeypatch.setattr(sampling, "gumbel", MUTANTS[mutant])
    assert misfit(seed=5) > 1


def joint(first: torch.Tensor, second: torch.Tensor, V: int) -> float:
    """Chi-square over its critical value of the pairs, which should be all alike."""
    return excess((first * V + second).bincount(minlength=V * V), torch.full((V * V,), 1 / V**2))


def test_neighbours_are_independent():
    """Successive positions, successive seeds, and the bits of neighbouring tokens of a large vocabulary."""
    V, flat = 8, torch.zeros(8)
    tokens = drawn(logits=flat, seed=11)
    assert joint(tokens[:-1:2], tokens[1::2], V) < 1
    assert joint(drawn(logits=flat, seed=12), tokens, V) < 1
    at_positions = sampling.row_key(torch.tensor([3, 3, 4]), torch.tensor([7, 8, 7]))
    bins = (sampling.hashed(at_positions, torch.arange(151936)) >> 29) + 4
    for a, b in ((bins[0, :-1], bins[0, 1:]), (bins[0], bins[1]), (bins[0], bins[2]), (bins[1, :-256], bins[1, 256:])):
        assert joint(a.long(), b.long(), V) < 1


def test_noise_has_as_many_values_as_a_vocabulary_needs():
    """Two tokens with the same noise would favour the first: of 151,936 the largest thousand all differ."""
    noise = gumbel(sampling.row_key(torch.tensor([1]), torch.tensor([1])), torch.arange(151936)[None])
    assert noise.isfinite().all() and len(noise[0].topk(1000).values.unique()) == 1000


def test_noise_is_finite_at_both_ends(monkeypatch):
    ends = torch.tensor([[0, 0x7FFFFFFF, -1, -(2**31)]], dtype=torch.int32)
    monkeypatch.setattr(sampling, "hashed", lambda key, token: ends.clone())
    noise = gumbel(torch.zeros(1, 2, dtype=torch.int32), ends)
    assert noise.isfinite().all() and noise[0, 0] > 21 and noise[0, 1] < -2.7


def test_hash_does_not_change():
    """A seed's text is part of what a user keeps. The words are of exact integer arithmetic: the same on every machine."""
    key = sampling.row_key(torch.tensor([0, 1, 2**62]), torch.tensor([0, 5, 40959]))
    words = sampling.hashed(key, torch.tensor([[0, 1, 151935]]).expand(3, -1))
    assert words.tolist() == WORDS


def by_hand(key: int, token: int) -> int:
    """The hash in Python's own integers."""
    low, high, m = key & 0xFFFFFFFF, key >> 32 & 0xFFFFFFFF, 0xFFFFFFFF
    x = token ^ low
    x = ((x ^ x >> 16) * 0x21F0AAAD & m) ^ high
    x = (x ^ x >> 15) * 0x735A2D97 & m
    x ^= x >> 15
    return x - 2**32 if x >> 31 else x


def test_hash_is_that_of_unbounded_integers():
    key = sampling.row_key(torch.arange(50), torch.arange(50) * 977)
    tokens = torch.arange(0, 151936, 7919)
    whole = [(k[1] << 32 | k[0] & 0xFFFFFFFF) for k in key.tolist()]
    expected = [[by_hand(k, t) for t in tokens.tolist()] for k in whole]
    assert sampling.hashed(key, tokens[None].expand(50, -1)).tolist() == expected


def support(**how) -> set[int]:
    return set(drawn(**how).tolist())


def by_definition(logits, temperature=1.0, top_k=0, top_p=1.0) -> set[int]:
    """Likeliest first, the first of equals first: at most k, and no more than it takes to reach p of what k left."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i].item(), i))[: top_k or None]
    p = (logits[order].double() / temperature).softmax(-1)
    before = torch.cat([torch.zeros(1), p.cumsum(0)[:-1]])
    return {i for i, b in zip(order, before.tolist()) if b < top_p or top_p == 1}


@pytest.mark.parametrize("how", [
    dict(top_k=1), dict(top_k=3), dict(top_k=6), dict(top_k=100), dict(top_p=0.05), dict(top_p=0.5), dict(top_p=0.9),
    dict(top_k=5, top_p=0.7), dict(top_k=2, top_p=0.01), dict(temperature=2.0, top_p=0.6),
    dict(temperature=0.3, top_p=0.9, top_k=4),
], ids=str)
def test_support_is_as_defined(how):
    assert support(**how) == by_definition(PEAKED, **how)


def test_top_k_keeps_k_also_among_equals():
    ties = torch.tensor([1.0, 3.0, 2.0, 2.0, 2.0, 3.0])
    assert support(logits=ties, top_k=3) == {1, 5, 2}
    assert support(logits=torch.tensor([-0.0, 0.0, -1.0]), top_k=1) == {0}


def test_top_p_is_exact_where_a_sum_of_floats_is_not():
    """Half of a flat 4096 is 2048 tokens, to the token."""
    below = torch.zeros(1, 4096)
    kept = sampling.kept(below, torch.ones(1, 1), torch.zeros(1, dtype=torch.int64), torch.tensor([0.5]))
    assert kept.sum() == 2048


def test_draws_among_the_kept_are_as_likely_as_before():
    tokens = drawn(top_k=4, seed=2)
    kept = PEAKED.topk(4)
    p = kept.values.double().softmax(-1)
    assert excess((tokens[:, None] == kept.indices).sum(0), p) < 1


def test_temperature_zero_is_argmax_first_of_equals():
    logits = torch.randn(64, 500).mul(4).round()  # many ties
    args = rows(logits, 64, temperature=0.0, top_k=5, top_p=0.3) | {"logits": logits}
    for filtered in (True, False):
        assert torch.equal(sample(**args, filtered=filtered), logits.argmax(1))
    first = [(row == row.max()).nonzero()[0].item() for row in logits]
    assert sample(**args).tolist() == first


def test_cold_rows_come_near_argmax_and_hot_rows_stay_finite():
    assert support(temperature=1e-30) == {0}
    assert support(temperature=sampling.HOTTEST) == set(range(len(PEAKED)))


def test_row_does_not_depend_on_its_companions():
    B, V = 12, 300
    logits = torch.randn(B, V)
    args = dict(
        logits=logits, temperature=torch.tensor([0.0, 0.7, 1.0, 1.5] * 3), top_k=torch.tensor([0, 3, 50] * 4),
        top_p=torch.tensor([1.0, 0.9, 0.5] * 4), seed=torch.arange(B) * 13, position=torch.arange(B) + 4,
    )
    together = sample(**args)
    alone = torch.cat([sample(**{k: v[i : i + 1] for k, v in args.items()}) for i in range(B)])
    order = torch.randperm(B)
    assert torch.equal(together, alone)
    assert torch.equal(sample(**{k: v[order] for k, v in args.items()}), together[order])
    off = args | dict(top_k=torch.zeros(B, dtype=torch.int64), top_p=torch.ones(B))
    assert torch.equal(sample(**off), sample(**off, filtered=False))


def test_rows_without_an_answer_give_minus_one_and_spare_the_rest():
    logits = torch.zeros(5, 8)
    logits[:, 2] = 9.0
    logits[1, 3] = math.nan
    logits[2] = -math.inf
    logits[3, :2] = -math.inf
    logits[4, 5] = math.inf
    for temperature in (0.0, 0.01):
        for filtered in (True, False):
            args = rows(logits, 5, temperature=temperature) | {"logits": logits}
            assert sample(**args, filtered=filtered).tolist() == [2, -1, -1, 2, -1]


def test_masked_tokens_are_never_drawn():
    logits = torch.where(torch.arange(12) % 3 == 0, PEAKED, -math.inf)
    assert support(logits=logits) == {0, 3, 6, 9}


@pytest.mark.parametrize("wrong, message", [
    (dict(temperature=-0.1), "temperature must be from 0 (greedy) to 1.26765e+30, got -0.1"),
    (dict(temperature=math.nan), "temperature must be from 0 (greedy) to 1.26765e+30, got nan"),
    (dict(temperature="hot"), "temperature must be a number, got 'hot'"),
    (dict(top_k=-1), "top_k must be from 0 (off) to 2**31 - 1, got -1"),
    (dict(top_k=2.5), "top_k must be a whole number, got 2.5"),
    (dict(top_p=0.0), "top_p must be above 0 and at most 1 (off), got 0.0"),
    (dict(top_p=1.1), "top_p must be above 0 and at most 1 (off), got 1.1"),
    (dict(seed=-1), "seed must be from 0 to 2**63 - 1, got -1"),
    (dict(seed=True), "seed must be a whole number, got True"),
], ids=str)
def test_refusal_names_the_parameter_and_its_range(wrong, message):
    with pytest.raises(ValueError) as e:
        Sampling(**wrong)
    assert str(e.value) == f"sampling: {message}"


def test_sampling_says_which_path_it_needs():
    assert Sampling().greedy and not Sampling(top_k=5).filtered
    assert Sampling(temperature=1.0, top_k=5).filtered and not Sampling(temperature=1.0).filtered


def test_refusal_names_the_tensor_and_both_shapes():
    with pytest.raises(ValueError, match=r"^sample: seed must have shape \(3,\) on cpu to match logits, got \(2,\) on cpu$"):
        sample(**rows(PEAKED, 3) | {"seed": torch.zeros(2, dtype=torch.int64)})
    with pytest.raises(ValueError, match="^sample: top_k must hold integers, got torch.float32$"):
        sample(**rows(PEAKED, 3) | {"top_k": torch.zeros(3)})
    with pytest.raises(ValueError, match=r"^sample: logits must be floats of shape \(rows, vocabulary\), got \(12,\)"):
        sample(**rows(PEAKED, 3) | {"logits": PEAKED})


@pytest.mark.gpu
def test_gpu_draws_what_the_cpu_draws_and_a_graph_replays_it():
    """The words of the hash are the same bits; only logarithms and exponentials differ, in their last place."""
    key = sampling.row_key(torch.arange(100), torch.arange(100))
    tokens = torch.arange(5000).expand(100, -1)
    assert torch.equal(sampling.hashed(key.cuda(), tokens.cuda()).cpu(), sampling.hashed(key, tokens))
    here = rows(torch.randn(4096), 256, top_k=50, top_p=0.9)
    there = {k: v.cuda() for k, v in here.items()}
    assert torch.equal(sample(**there).cpu(), sample(**here))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = sample(**there)
    there["position"] += 1
    graph.replay()
    assert torch.equal(captured, sample(**there))
