"""Tests of what a report is made of: columns of tables and the formats of their numbers."""

import pytest

from analysis.report.section import TableColumn, format_count, format_duration, name, number, text
from analysis.sweep.verdicts import format_fraction, format_interval, format_signed

NAN = float("nan")
ROW = {"arm": "KL 0", "value": -0.25, "low": -0.5, "high": NAN, "none": None, "nan": NAN, "word": "x"}
BOUNDS = ("low", "high")


@pytest.mark.parametrize(
    ("column", "kind", "cell"),
    [
        (name("arm"), "name", "KL 0"),
        (text("heading", "word"), "text", "x"),
        (text("heading", "none"), "text", "–"),
        (text("heading", "nan"), "text", "–"),
        (number("heading", "value"), "number", "-0.25"),
        (number("heading", "none"), "number", "–"),
        (number("heading", "value", format_signed, BOUNDS), "number", "−0.250\n[−0.500, –]"),
        (number("heading", "nan", format_signed, BOUNDS), "number", "–\n[−0.500, –]"),
        (number("heading", "value", format_signed, ("none", "nan")), "number", "−0.250"),
    ],
)
def test_cells_have_a_dash_where_a_value_is_missing(column: TableColumn, kind: str, cell: str) -> None:
    assert (column.kind, column.cell(ROW)) == (kind, cell)


def test_counts_and_durations_have_few_digits_and_intervals_a_dash() -> None:
    intervals = {(0.1, 0.25): "[0.100, 0.250]", (NAN, 0.25): "[–, 0.250]", (0.1, None): "[0.100, –]", (NAN, None): ""}
    assert {ends: format_interval(*ends, format_fraction) for ends in intervals} == intervals
    values = (240, 5400, 9_996, 12_345, 999_499, 999_500, -999_999, 1_230_000, 999_700_000, 1.2e12)
    words = "240|5 400|9 996|12.3 k|999 k|1 M|-1 M|1.23 M|1 G|1.2 T"
    assert "|".join(map(format_count, values)) == words
    assert "|".join(map(format_duration, (12.4, 185, 3720, 59.7))) == "12 s|3 min 05 s|1 h 02 min|1 min 00 s"
