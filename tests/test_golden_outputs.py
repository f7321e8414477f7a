"""Tests that commands print, and reports hold, what was recorded."""

from pathlib import Path

import pytest

from tests.golden_outputs import GOLDEN, RECORDS, make_record


@pytest.mark.long
@pytest.mark.parametrize("name", RECORDS)
def test_outputs_are_as_recorded(name: str, tmp_path: Path) -> None:
    recorded = (GOLDEN / name).read_text(encoding="utf-8")
    assert make_record(name, tmp_path).splitlines() == recorded.splitlines(), (
        "if the change was meant: python -m tests.golden_outputs"
    )
