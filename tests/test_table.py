"""Tables as wide as there is room: what is left out is the least, it is named, and nothing is cut to `rm...`."""

import io
import os
import subprocess
import sys

import pytest
from rich.console import Console
from test_race_tables import candidate, entry, plans

from whet.figures import ms
from whet.op import discover
from whet.race import FASTEST, NOISY, TIED
from whet.report import tables
from whet.report.table import Column, Table


def printed(table, width: int) -> str:
    screen = io.StringIO()
    Console(file=screen, width=width).print(table)
    return screen.getvalue()


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
@pytest.mark.parametrize("made", [tables.calls_table([entry()]), tables.plans_table(plans(FASTEST))], ids=["calls", "plans"])
def test_a_table_fits_its_width_with_every_name_and_time_whole(made, width):
    text = printed(made, width)
    assert all(len(line.rstrip()) <= width for line in text.splitlines()) and "…" not in text and "..." not in text
    for word in ("1.000", "chosen", *(("torch", "triton", "1.100") if "candidates" in text else ("before", "stock", "2.000"))):
        assert word in text, (word, text)


def test_columns_go_by_their_order_and_are_named_when_they_are_left_out():
    table = Table("", [Column("name"), Column("a", rank=2), Column("b", rank=3), Column("c", rank=1), Column("d", rank=None)])
    table.add("first", "1" * 8, "2" * 8, "3" * 8, "4" * 8)
    assert "left out" not in printed(table, 60) and "4" * 8 not in printed(table, 60), "a column that is not for a terminal"
    narrow = printed(table, 33)
    assert "3" * 8 in narrow and "1" * 8 in narrow and "2" * 8 not in narrow
    assert "left out of 33 columns, and in --json: b" in " ".join(narrow.split())
    facts = [line.rstrip() for line in printed(table, 6).splitlines()]
    assert facts[:3] == ["first", "  a:", "  1111"], "one fact a line, where not even the first column fits"


def sample() -> Table:
    table = Table("times", [Column("op", code=True), Column("ms", ms), Column("ratio", "{:.2f}x"), Column("note")], merge=1)
    table.add("a|b<c>", 12.3456, 1.5, "", marked=True)
    table.add("a|b<c>", 0.5, None, "")
    return table


def test_one_description_gives_markdown_html_and_a_terminal_table():
    rows = sample().to_markdown().splitlines()
    assert rows[:2] == ["| op | ms | ratio | note |", "| --- | ---: | ---: | --- |"]
    assert rows[2:] == ["| **a\\|b<c>** | **12.346** | **1.50x** |  |", "| a\\|b<c> | 0.5000 | - |  |"]
    html = sample().to_html()
    assert html.count("a|b&lt;c&gt;") == 2 and html.count('class="marked"') == 1 and "note" not in html
    assert ">12.346<" in html and ">0.500<" in html, "times of one column share their decimals"
    text = printed(sample(), 80)
    assert text.count("a|b<c>") == 1 and "12.346" in text and "1.50x" in text and "note" not in text


def test_a_long_name_is_cut_on_a_terminal_and_whole_in_html():
    table = Table("kernels", [Column("kernel", code=True, cut=8), Column("ms", ms)])
    table.add("0123456789", 1.0)
    assert "01234567…" in printed(table, 80) and "<details><summary>01234567…</summary>0123456789</details>" in table.to_html()


def test_a_row_has_a_value_for_every_column():
    with pytest.raises(AssertionError, match="1 values for 4 columns"):
        sample().add("alone")


def test_a_column_that_says_nothing_is_left_out_and_not_mentioned():
    text = printed(tables.calls_table([entry()]), 240)
    assert "vs fastest" in text and "host us" not in text and "extra MiB" not in text
    on_gpu = entry(candidates={"torch": candidate(1.0, 1.0, 1.0, 1.0) | {"host_us": 9.0, "peak_mib": 3.0}}, chosen="torch")
    assert "host us" in printed(tables.calls_table([on_gpu]), 240) and "extra MiB" in printed(tables.calls_table([on_gpu]), 240)


@pytest.mark.parametrize("asked, wide", [("60", 60), ("100", 100), ("none", 160), (None, 160), ("0", 160)])
def test_columns_of_the_environment_is_the_width_where_there_is_no_terminal(asked, wide):
    script = "from whet.commands._console import console; print(console.width)"
    env = {k: v for k, v in os.environ.items() if k != "COLUMNS"} | ({} if asked is None else {"COLUMNS": asked})
    assert subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True).stdout == f"{wide}\n"


def test_a_mode_and_a_plan_are_not_called_by_the_name_of_an_impl():
    assert "with launches" in printed(tables.calls_table([entry()]), 200)
    assert [tables.mode_label({"mode": m}) for m in ("eager", "graph", "new")] == ["with launches", "graph", "new"]
    names = ("eager", "eager + choices", "eager + CUDA graph", "eager + choices + CUDA graph", "torch.compile + choices")
    assert [tables.plan_label(n) for n in names] == [
        "stock", "choices", "stock + CUDA graph", "choices + CUDA graph", "torch.compile + choices",
    ]
    assert tables.plan_label("before: plain eager") == "before: plain eager"


def rivalled(why: str, over: float, low: float) -> str:
    made = entry(why, rival="torch", vs_rival=over)
    made["candidates"]["torch"] |= {"vs_best_low": low}
    return tables.note(made, "triton")


def test_a_choice_beside_its_rival_says_a_tie_where_it_is_one_and_never_a_bare_loss():
    assert rivalled(FASTEST, 1.5, 1.4) == "chosen, 1.50x torch"
    assert rivalled(FASTEST, 1.005, 1.0) == "chosen, a tie with torch"
    assert rivalled(TIED, 0.99, 1.0) == f"chosen, {TIED}, tied with torch"
    assert rivalled(f"{NOISY}: kept triton", 0.24, 0.2) == f"chosen, {NOISY}: kept triton, torch took 0.24x its time, undecided"


def test_ops_say_a_refusal_that_several_impls_share_once():
    text = " ".join(printed(tables.ops_table({"attention": discover()["attention"]}), 2000).split())
    assert text.count("precision='fp8'") == 1 and "torch, sdpa_flash, sdpa_efficient, sdpa_cudnn: return_lse" in text
