"""docs/results.md, wholly made from records: the ops, whole training steps, decoding, and the tests that need a GPU."""

from collections.abc import Callable
from pathlib import Path

from whet.report import bench_tables, decode, run_tables

HEAD = """\
<!-- made by `python -m whet.report.readme` from records/; edits here are overwritten -->
# Results

Every figure on this page comes from a file in `records/`, named under its table with the commit and the versions. The figures
hold for the machine that is named there, and for no other. To measure them again on your GPU: `make records`.
"""
SECTIONS: tuple[tuple[str, str, Callable[[Path], str]], ...] = (
    ("The machine", """\
What the figures were measured on. The copy rate and the matrix-product rates are measured too: they are the ceilings that "of
roofline" refers to.""", bench_tables.machine),
    ("Ops", """\
Each op against the best that can be had without whet. The ratio is the time of the fastest implementation that is not whet's
own kernel, divided by the time of the chosen one. Above 1 the choice is faster. It is 1 where that fastest one is itself the
choice, and slightly below 1 where a tie kept the simpler one. "mean" is the geometric mean over shapes, "worst" the lowest
ratio. "graph" is GPU work alone, replayed from a CUDA graph; "eager" includes the time that the host takes to launch it.
Calls in FP8 have no rival that computes the same, so they are only in the table of all figures.""", bench_tables.summary),
    ("Whole training steps", """\
One step is forward, backward and optimizer. The baseline is the plain model with PyTorch's default AdamW; all other plans use
its fused AdamW. "eager" and "torch.compile" without choices are stock PyTorch with SDPA, so the table shows what is owed to
whet's choices and what is not. A plan is timed in turns with the baseline, and the speed-up is the ratio of the two.""",
     run_tables.plans),
    ("Decoding", """\
Tokens a second of whet, Transformers and a compiled module in the style of gpt-fast, measured in the same run, each verified
before it was timed. "of floor" is the time that reading the weights and the cache takes at the measured copy rate, as a share
of the time a token took. [Decoding](decode.md) has every system at every batch and context, quality and prefill.""",
     decode.summary),
    ("Tests on a GPU", """\
How the tests that need a GPU ended when `make gpu-test` last ran. The number after a commit is how many tests ran there.""",
     run_tables.gpu_tests),
    ("Every op, shape and mode", """\
Times of every implementation. The chosen one is bold. What was left out is listed under each table, with the reason.""",
     bench_tables.bench),
)


def page(root: Path) -> str:
    return "\n".join((HEAD, *(f"## {title}\n\n{text}\n\n{table(root)}\n" for title, text, table in SECTIONS)))
