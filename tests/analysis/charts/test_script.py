"""Tests of the script that draws charts."""

from collections.abc import Iterator

import pytest
import vl_convert

from analysis.charts.script import make_script


@pytest.fixture(autouse=True)
def no_script_of_this_process() -> Iterator[None]:
    make_script.cache_clear()
    yield
    make_script.cache_clear()


@pytest.mark.long
def test_the_script_draws_charts_and_cannot_end_early() -> None:
    script = make_script()
    assert "[data-chart]" in script.text
    assert "</script" not in script.text


def test_an_end_tag_in_the_library_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vl_convert, "javascript_bundle", lambda code: f"{code}</script>")
    assert "[data-chart]" in make_script().text
    assert make_script().text.endswith("<\\/script>")
