"""How figures are written in findings, tables and pages."""

import pytest

from whet.figures import figure, ms, percent
from whet.report import cells


@pytest.mark.parametrize("value, written", [
    (1020.4, "1,020"), (1.02e3, "1,020"), (123456.0, "123,000"), (99.96, "100"), (12.34, "12.3"), (0.4561, "0.456"), (2.0, "2"),
    (0.000123, "0.000123"), (0.0, "0"), (float("nan"), "nan"), (-1020.0, "-1,020"),
])
def test_a_figure_has_three_digits_that_count_and_no_exponent(value, written):
    assert figure(value) == written and "e" not in figure(value)


@pytest.mark.parametrize("share, written", [(0.004, "under 1%"), (0.0, "0%"), (0.01, "1%"), (0.486, "49%"), (12.0, "1,200%")])
def test_a_share_under_one_percent_is_not_nothing(share, written):
    assert percent(share) == written


@pytest.mark.parametrize("value, written", [(0.0, "0"), (1e-13, "0"), (None, "-"), (0.0123, "0.0123"), (1234.5, "1234.5")])
def test_a_time_of_nothing_is_a_plain_zero_in_the_terminal_and_on_the_page(value, written):
    assert ms(value) == written
    if value is not None and value < 1e-4:
        assert cells.text(value) == "0"


def test_no_finding_and_no_page_writes_an_exponent(source_of_findings):
    """Every `:.3g` of a finding would write 1.02e+03 for a thousand: whet.figures writes 1,020."""
    assert not source_of_findings


@pytest.fixture
def source_of_findings():
    import re
    from pathlib import Path

    root = Path(__file__).parent.parent / "whet"
    files = [*(root / "diagnose").rglob("*.py"), root / "report" / "findings.py", root / "report" / "page.py"]
    return [f"{p.name}: {line.strip()}" for p in files for line in p.read_text().splitlines() if re.search(r":\.\dg\}", line)]
