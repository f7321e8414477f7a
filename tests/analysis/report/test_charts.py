"""Tests of the interactive charts: valid for Vega-Lite, with the numbers of the tables, and the same each time."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from analysis.data.load import read_study
from analysis.html.charts import format_chart, make_script
from analysis.report import charts
from analysis.sweep import plots, series, tables
from analysis.sweep.collapse import compute_survival
from tests.fakes.run_folders import FakeRun, FakeStudy, write_study

STOP = ("low_validation_success", 0.002, 0.01)
RUNS = [FakeRun("0", seed, steps=10) for seed in (0, 1)] + [
    FakeRun("0.1", 0, status="interrupted", steps=6),
    FakeRun("0.3", 0, status="early_stopped", steps=5, success=(0.35, 0.0), stop=STOP),
]
COLORS = plots.make_arm_colors(["0", "0.1", "0.3"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_study(tmp_path_factory.mktemp("study"), RUNS, FakeStudy(levels=40, total_steps=10))


def find_rows(content: dict[str, Any], layer: dict[str, Any]) -> pd.DataFrame:
    # Data that all layers share belong to the chart.
    return pd.DataFrame(content["datasets"][layer.get("data", content.get("data"))["name"]])


def test_a_dose_response_has_the_numbers_of_its_table(folder: Path) -> None:
    table = tables.make_dose_response(read_study(folder))
    content = charts.chart_dose_response(table, COLORS, "actor.kl_loss_coef").to_dict()
    points = find_rows(content, content["layer"][-1])
    sampled = points[points["measure"] == "validation, sampled"].set_index("arm")["value"]
    scored = table.dropna(subset="success").set_index("arm")["success"]
    pd.testing.assert_series_equal(sampled, scored, check_names=False)
    # Intervals are those of sampled success alone.
    assert points.loc[points["measure"] != "validation, sampled", ["low", "high"]].isna().all(axis=None)
    assert list(find_rows(content, content["layer"][2])["tick"]) == ["0", "0.1", "0.3"]


def test_curves_have_a_mean_of_several_runs_and_marks_where_runs_ended(folder: Path) -> None:
    table = series.make_curves(read_study(folder), "val_success")
    means = series.compute_mean_curves(table)
    content = charts.chart_curves(table, means, COLORS, "success").to_dict()
    thin, thick, stops, rings, values = (find_rows(content, layer) for layer in content["layer"])
    assert set(thin["arm"]) == {"0"}
    assert len(thick) == len(means) + (table["arm"] != "0").sum()
    assert list(stops["arm"]) == ["0.3"]
    assert list(rings["arm"]) == ["0.1"]
    assert list(values["value"]) == pytest.approx(list(table["value"]), rel=1e-12)


def test_a_survival_has_the_steps_of_its_table(folder: Path) -> None:
    table = compute_survival(read_study(folder))
    content = charts.chart_survival(table, COLORS).to_dict()
    assert list(find_rows(content, content["layer"][0])["surviving_fraction"]) == list(table["surviving_fraction"])


def test_a_chart_is_the_same_each_time_and_cannot_end_its_element(folder: Path) -> None:
    table = compute_survival(read_study(folder)).replace("0", "</script><!--")
    first, second = (format_chart(charts.chart_survival(table, {"</script><!--": "#000000"})) for _ in range(2))
    assert first == second
    assert "<" not in first
    assert "\\u003c/script\\u003e" in first


def test_the_script_is_put_together_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNE_STUDY_CACHE", str(tmp_path))
    make_script.cache_clear()
    try:
        script = make_script()
        (path,) = tmp_path.iterdir()
        assert "[data-chart]" in script.text
        assert "</script" not in script.text
        path.write_text("// the one of the cache")
        make_script.cache_clear()
        assert make_script().text == "// the one of the cache"
    finally:
        make_script.cache_clear()
