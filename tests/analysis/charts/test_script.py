"""Tests of the script that draws charts, which is put together once and kept in the cache of the machine."""

from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
import vl_convert

from analysis.charts import script
from analysis.charts.script import make_script


@pytest.fixture(autouse=True)
def no_script_of_this_process() -> Iterator[None]:
    make_script.cache_clear()
    yield
    make_script.cache_clear()


@pytest.mark.long
def test_the_script_is_put_together_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNE_STUDY_CACHE", str(tmp_path))
    first = make_script()
    (path,) = tmp_path.iterdir()
    assert "[data-chart]" in first.text
    assert "</script" not in first.text
    monkeypatch.setattr(vl_convert, "javascript_bundle", lambda code: "// made again")
    make_script.cache_clear()
    assert make_script() == first
    # What is damaged, or may be somebody else's, is not used.
    content = path.read_bytes()
    for damaged_content, mode in ((content[:-9], 0o600), (content, 0o666), (b"\xff" + content, 0o600)):
        path.write_bytes(damaged_content)
        path.chmod(mode)
        make_script.cache_clear()
        assert make_script().text == "// made again"


def test_who_has_no_home_folder_has_reports_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        script, "find_cache_folder", Mock(side_effect=RuntimeError("Could not determine home directory."))
    )
    monkeypatch.setattr(vl_convert, "javascript_bundle", lambda code: f"{code}</script>")
    assert "[data-chart]" in make_script().text
    assert make_script().text.endswith("<\\/script>")
