"""Test that docs/metrics.md has exactly one line for every column, with its unit, meaning and published key."""

import re

from tests.metrics_page import PAGE, format_table, render_page
from trainable.runs.records import TRIAL_LAST_VALUES, Column

TEXT = PAGE.read_text(encoding="utf-8")


def test_the_page_has_the_columns_of_the_records_and_the_last_values_of_a_run() -> None:
    assert render_page(TEXT).splitlines() == TEXT.splitlines(), "type python -m tests.metrics_page"
    assert TEXT.count("| `val_success` | fraction |") == 1
    line = next(line for line in TEXT.splitlines() if line.startswith("| `val_success` |"))
    assert render_page(TEXT.replace(f"{line}\n", "")) == TEXT
    (sentence,) = re.findall(r"The run's last value of these step columns: ([^.]*)\.", TEXT)
    assert re.findall(r"`([^`]*)`", sentence) == list(TRIAL_LAST_VALUES)


def test_a_bar_in_a_cell_does_not_end_it() -> None:
    assert format_table([Column("a", "nats", "KL(p || q)", "a/b")]).endswith(
        "| `a` | nats | KL(p \\|\\| q) | `a/b` |\n"
    )
