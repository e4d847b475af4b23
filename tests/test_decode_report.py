"""The decoder's tables in README and docs: from records alone, and nothing claimed without one."""

import pytest
from test_readme import record, root, table, write  # noqa: F401  (root is a fixture)

from whet.report import decode


def row(system: str, ms: float, batch: int = 1, context: int = 128, quant: str = "", **more) -> dict:
    named = dict(system=system, quant=quant, batch=batch, context=context, ok=True, why="", bytes=10**9, floor_ms=0.277)
    timed = dict(ms=ms, low=ms, high=ms, samples=9, share=0.5, tokens_per_s=batch / ms * 1e3, tb_s=4.0, of_floor=0.277 / ms)
    return named | timed | more


LOST = dict(system="gpt-fast", quant="", batch=8, context=128, ok=False, why="out of | memory")
STARTED = dict(imported_s=2.0, loaded_s=1.0, first_token_s=0.5, since_start_s=3.5)
SCORED = dict(
    name="int8", tokens=99, perplexity=20.125, reference_perplexity=20.0, kl=0.001, kl_error=0.0001, top1=0.99, decided=90,
)
MEASURED = dict(
    model="qwen3:0.6b", weights="random", dtype="bfloat16", parameters=596_000_000, layers=28, tokens=32, note="",
    rows=[
        row("whet graph", 0.4), row("transformers", 30.0), row("gpt-fast", 1.5), row("whet graph", 0.3, quant="int8"),
        row("whet graph", 0.5, batch=8), LOST,
    ],
    prefill=[row("whet", 5.0, context=2048, tflops=480.0, of_ceiling=0.6)],
    start=dict(first=STARTED, cold=STARTED | dict(since_start_s=4.5), warm=STARTED, cold_is="read from disk", bytes=10**9),
    quality=dict(
        model="SmolLM2", weights="real", text="docstrings", path="token by token", base="bfloat16", rows=[SCORED],
        verdict=dict(ok=True, why=""),
    ),
)
PROFILED = dict(
    target="qwen3:0.6b", kind="decode", step=dict(ms=30.0), launches=1852, busy_ms=4.0, device="cuda",
    after=dict(
        step=dict(ms=0.4), launches=145.5, busy_ms=0.39, bytes=1_192_000_000, floor_ms=0.277, of_floor=0.69,
        layers=[dict(part="norm, qkv", ms=0.1, share=0.25, launches=28)],
    ),
)


@pytest.fixture
def recorded(root):  # noqa: F811
    write(root, "decode-a.json", record(MEASURED))
    write(root, "profile-a.json", record(PROFILED))
    write(root, "profile-b.json", record({"target": "tiny-llama:tiny"}))
    return root


@pytest.mark.parametrize("name", decode.TABLES)
def test_every_table_names_its_record_and_without_one_claims_nothing(name, root, recorded):  # noqa: F811
    file = "profile-a" if name == "decode-profile" else "decode-a"
    assert f"Source: `records/{file}.json` (commit `{'a' * 12}`" in table(recorded, name)
    for path in (recorded / "records").iterdir():
        path.unlink()
    assert table(recorded, name).startswith("Not measured yet")


def test_the_full_table_has_every_system_and_says_what_was_not_timed(recorded):
    text = table(recorded, "decode")
    assert "| 1 | 128 | whet, one graph a token | bfloat16 | 0.4000 | 0.0040 | 2,500 | 4.00 | 69% | 0.50 |" in text
    assert "| **whet, one graph a token** | **int8** | **0.3000** |" in text, "the fastest of its batch and context"
    assert "596M parameters, random weights" in text
    assert text.index("| Transformers, eager |") < text.index("| gpt-fast style, compiled |") < text.index("| 2,500 |")
    assert "- not timed: gpt-fast style, compiled (batch 8 context 128): out of | memory" in text
    assert "- prefill of 2048 tokens, whet: 5.000 ms, 480 TFLOP/s, 60% of the bfloat16 matmul ceiling" in text
    assert "weights read from disk: 4.50 s (imports 2.00, weights 1.00, prompt 0.50)" in text


def test_the_summary_sets_the_systems_side_by_side(recorded):
    text = table(recorded, "decode-summary")
    systems = "Transformers, eager | gpt-fast style, compiled | whet, one graph a token"
    assert f"| batch | context | {systems} | whet, of floor | whet, int8 |" in text
    assert "| 1 | 128 | 33 | 667 | 2,500 | 69% | 3,333 |" in text and "| 8 | 128 | - | - | 16,000 | 55% | - |" in text


def test_quality_and_profile_have_their_tables(recorded):
    assert "| int8 | 20.12 | 20 | 0.001 | 0.0001 | 99.00% | 90 of 99 |" in table(recorded, "decode-quality")
    assert "not worse than Transformers" in table(recorded, "decode-quality")
    text = table(recorded, "decode-profile")
    assert "| before: plain formulas, launched one by one | 30.000 | 33 | 1852 | 4.000 | under 1% |" in text
    assert "| after: decode ops, one graph | 0.4000 | 2,500 | 145.5 | 0.3900 | 69% |" in text
    assert "| norm, qkv | 0.1000 | 25% | 28 |" in text
