"""The tables of a race: the figures that decided, how it ended, a busy machine, a ceiling that is beaten."""

import io

import pytest
from rich.console import Console

from whet.race import FASTEST, NOISY, TIED, Timing
from whet.report import page, tables
from whet.report.table import Table

CALL = {"op": "rms_norm", "case": {"M": 64, "N": 128, "layout": "contiguous"}, "dtype": "float32", "grad": True}


def candidate(ms: float, over: float, low: float, high: float) -> dict:
    ratio = {"vs_best": over, "vs_best_low": low, "vs_best_high": high}
    return {"ok": True, "share": 0.5, "why": ""} | Timing(ms, ms, ms, 20).as_dict() | ratio


def entry(why: str = FASTEST, floor: float = 0.5, **more) -> dict:
    candidates = {"torch": candidate(1.1, 1.1, 1.08, 1.13), "triton": candidate(1.0, 1.0, 1.0, 1.0)}
    made = {"call": CALL, "mode": "eager", "count": 1, "candidates": candidates, "chosen": "triton", "why": why, "ms": 1.0}
    return made | {"floor_ms": floor, "bound": "compute", "flops": 10**9} | more


def plans(why: str, **more) -> dict:
    timed = {"before": candidate(2.0, 2.0, 1.9, 2.2), "eager": candidate(1.0, 1.0, 1.0, 1.0)}
    found = [c | {"name": name, "samples_per_s": 1.0, "speedup": 2.0} for name, c in timed.items()]
    return {"target": "x", "plans": found, "chosen": "eager", "tied": why == TIED, "why": why} | more


def printed(table) -> str:
    screen = io.StringIO()
    Console(file=screen, width=240).print(table)
    return screen.getvalue()


def test_ratios_with_their_intervals_stand_in_every_table():
    for written in (printed, Table.to_markdown, Table.to_html):
        assert "1.10x (1.08-1.13)" in written(tables.calls_table([entry()]))
        assert "2.00x (1.90-2.20)" in written(tables.plans_table(plans(FASTEST)))


@pytest.mark.parametrize("why", [TIED, f"{NOISY}: kept eager"])
def test_how_it_ended_is_said_where_it_is_not_the_fastest(why):
    assert why in printed(tables.calls_table([entry(why)]))
    assert why.replace("eager", "stock") in printed(tables.plans_table(plans(why))), "the plan of stock calls, not the impl"
    assert FASTEST not in printed(tables.calls_table([entry()]))


def test_a_record_from_before_has_no_ratios_and_still_says_a_tie():
    old = plans(TIED)
    del old["why"]
    for p in old["plans"]:
        del p["vs_best"]
    assert TIED in printed(tables.plans_table(old))


def test_a_busy_machine_is_one_line():
    assert tables.busy([entry()]) == [] and tables.busy([entry()], plans(FASTEST)) == []
    (line,) = tables.busy([entry(busy="A"), entry(busy="B")], plans(FASTEST, busy="other work took 1.8 of 2 cores"))
    assert "other work took 1.8 of 2 cores" in line and "the plans" in line and "2 more" in line
    assert tables.busy([entry(busy="times vary by 90%")])[0] in page.notes({}, [entry(busy="times vary by 90%")])


def test_a_time_that_beats_the_ceiling_shows_the_ceiling_to_be_stale_and_no_share():
    shown = printed(tables.calls_table([entry(floor=2.06)]))
    assert "206%" not in shown and "over 100% compute" in shown
    assert "stale" in tables.stale([entry(floor=2.06)])[0] and tables.stale([entry()]) == []
    assert "over 100%" in page.choices([entry(floor=2.06)]).to_html()
    assert tables.roofline(entry(floor=1.03), 1.0).startswith("103%"), "a mix of reads and writes may beat a copy by a little"
    assert tables.of_roof(1.2, spread=0.3) == "120%", "within the spread it may be chance"
