"""Curves as geometry: texts clear of one another, round ticks, no dip lost, a high start cut off where it crosses the top."""

import re

import pytest

from whet.report.curves import SIZES, Curve, below, chart, smoothed, thinned, ticks
from whet.report.roofline import box, overlap


@pytest.mark.parametrize("size", SIZES, ids=lambda s: s[0])
@pytest.mark.parametrize("top", [1e-5, 3.7, 1.7e6])
def test_a_charts_texts_stay_inside_and_off_one_another(size, top):
    made = chart([Curve("x", [(i, top * (1 - i / 2400)) for i in range(2345)])], size, "steps", "loss", zero=True)
    texts = [(t, box(at, made["bottom"] + 10, t, "middle")) for _, t, at in made["x_ticks"]]
    texts += [(t, box(made["left"] - 5, y, t, "end")) for y, t in made["y_ticks"]]
    texts += [("steps", box((made["left"] + made["right"]) / 2, made["height"] - 10, "steps", "middle"))]
    for i, (text, place) in enumerate(texts):
        assert place[0] >= 0 and place[2] <= made["width"] and place[3] <= made["height"], text
        assert not [other for other, there in texts[i + 1:] if overlap(place, there)], text
    assert len(made["x_ticks"]) >= 3 and len(made["y_ticks"]) >= 3
    assert max(map(float, re.findall(r"[ML]([\d.]+) ", made["lines"][0]["path"]))) <= made["right"]


def test_ticks_are_round_and_few():
    assert [text for _, text in ticks(0, 16.4, 5)] == ["0", "5", "10", "15"]
    assert [text for _, text in ticks(2.98, 3.31, 5)] == ["3.0", "3.1", "3.2", "3.3"]
    assert [text for _, text in ticks(0, 6e-4, 4)] == ["0.0000", "0.0002", "0.0004", "0.0006"]
    assert all(len(ticks(0, 10**k * n, most)) <= most for k in (-3, 0, 4) for n in (1, 1.9, 3.3, 7) for most in (4, 5, 7, 10))


def test_a_high_start_is_cut_off_where_the_line_crosses_the_top():
    assert below([(0, 10.0), (10, 0.0), (20, 10.0)], 5.0) == [[(5, 5.0), (10, 0.0), (15, 5.0)]]
    assert below([(0, 1.0), (1, 9.0), (2, 1.0)], 5.0) == [[(0, 1.0), (0.5, 5.0)], [(1.5, 5.0), (2, 1.0)]]
    assert below([(0, 9.0)], 5.0) == []


def test_thinning_keeps_every_dip_and_smoothing_has_no_bias_at_its_start():
    line = [(float(i), 1.0) for i in range(10_000)]
    line[7777] = (7777.0, 0.2)
    kept = thinned(line, 400)
    assert len(kept) <= 400 and (7777.0, 0.2) in kept and kept[0] == line[0] and kept[-1] == line[-1]
    average, span = smoothed([(float(i), 5.0) for i in range(4000)])
    assert span == 100 and all(y == pytest.approx(5.0) for _, y in average)
    assert smoothed([(0.0, 1.0), (1.0, 2.0)]) == ([(0.0, 1.0), (1.0, 2.0)], 1)
