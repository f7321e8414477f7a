"""Tests of the interactive charts: valid for Vega-Lite, with the numbers of the tables, and the same each time."""

import html
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import vl_convert

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


@pytest.mark.long
def test_a_dose_response_has_the_numbers_of_its_table(folder: Path) -> None:
    table = tables.make_dose_response(read_study(folder))
    runs = tables.make_run_outcomes(read_study(folder))
    content = charts.chart_dose_response(table, runs, COLORS, "actor.kl_loss_coef").to_dict()
    _, _, ticks, dots, points, failed, partly_stopped = (find_rows(content, layer) for layer in content["layer"])
    sampled = points[points["measure"] == "validation, sampled"].set_index("arm")["value"]
    scored = table.dropna(subset="success").set_index("arm")["success"]
    pd.testing.assert_series_equal(sampled, scored, check_names=False)
    # Intervals are those of sampled success alone.
    assert points.loc[points["measure"] != "validation, sampled", ["low", "high"]].isna().all(axis=None)
    assert list(ticks["tick"]) == ["0", "0.1", "0.3"]
    assert list(failed["arm"]) == ["0.3"]
    assert partly_stopped.empty
    assert dots.empty  # there are not more scored runs than arms
    # The three measures of an arm stand side by side.
    assert points.groupby("arm")["x"].nunique().eq(3).all()


def test_curves_have_a_mean_of_several_runs_and_marks_where_runs_ended(folder: Path) -> None:
    table = series.make_curves(read_study(folder), "val_success")
    means = series.compute_mean_curves(table)
    content = charts.chart_curves(table, means, COLORS, "success").to_dict()
    thin, thick, single, stops, rings, values = (find_rows(content, layer) for layer in content["layer"])
    assert single.empty
    assert set(thin["arm"]) == {"0"}
    assert len(thick) == len(means) + (table["arm"] != "0").sum()
    assert list(stops["arm"]) == ["0.3"]
    assert list(rings["arm"]) == ["0.1"]
    assert list(values["value"]) == pytest.approx(list(table["value"]), rel=1e-12)


def test_curves_of_one_point_have_a_mark(folder: Path) -> None:
    table = series.make_curves(read_study(folder), "val_success").drop_duplicates("run_id")
    means = series.compute_mean_curves(table)
    content = charts.chart_curves(table, means, COLORS, "success").to_dict()
    points = find_rows(content, content["layer"][2])
    assert content["layer"][2]["mark"]["type"] == "point"
    assert len(points) == len(means) + len(table)
    figure = plots.draw_curves(table, means, COLORS, "success")
    lines = [line for panel in figure.axes for line in panel.lines if len(line.get_xdata()) == 1]
    assert lines
    assert {line.get_marker() for line in lines} == {"o"}


def test_many_words_have_colors_of_their_own() -> None:
    names = ["root-and-children", "one-per-tree", "root-only", "no-children"]
    assert len(set(plots.make_arm_colors(names, names).values())) == 4
    colors = plots.make_arm_colors(["nofilter", "0.9", "0.5"], ["nofilter"])
    assert colors["nofilter"] == plots.WORD_COLORS[0]


def test_a_survival_has_the_steps_of_its_table(folder: Path) -> None:
    table = compute_survival(read_study(folder))
    content = charts.chart_survival(table, COLORS).to_dict()
    assert list(find_rows(content, content["layer"][0])["surviving_fraction"]) == list(table["surviving_fraction"])


def test_a_chart_of_many_arms_is_left_to_the_picture() -> None:
    table = pd.DataFrame({"arm": [str(number) for number in range(charts.MAX_ARMS + 1)]})
    assert charts.fits(table[:-1])
    assert not charts.fits(table)
    assert not charts.fits(pd.DataFrame({"arm": ["a"] * (charts.MAX_ROWS + 1)}))


@pytest.mark.long
def test_every_chart_can_be_drawn(folder: Path) -> None:
    """Vega draws them without a browser, with all arms, what was stopped, and texts that look like code."""
    frames = read_study(folder)
    hostile = 'a\\" + datum + "\\'
    table = series.make_curves(frames, "val_success").replace("0.1", hostile)
    colors = {hostile if arm == "0.1" else arm: color for arm, color in COLORS.items()}
    curves = charts.chart_curves(table, series.compute_mean_curves(table), colors, hostile)
    doses = tables.make_dose_response(frames).replace("0.1", hostile)
    dose_response = charts.chart_dose_response(doses, tables.make_run_outcomes(frames), colors, hostile)
    survival = charts.chart_survival(compute_survival(frames).replace("0.1", hostile), colors)
    for chart in (curves, dose_response, survival):
        svg = vl_convert.vegalite_to_svg(chart.properties(width=600).to_dict())
        assert hostile in html.unescape(svg)
        shown_colors = set(colors) - ({hostile} if chart is dose_response else set())
        assert all(colors[arm] in svg for arm in shown_colors)  # an interrupted run has no success at the end
        assert (plots.STOPPED_COLOR in svg) == (chart is not survival)


def test_a_chart_is_the_same_each_time_and_cannot_end_its_element(folder: Path) -> None:
    table = compute_survival(read_study(folder)).replace("0", "</script><!--")
    first, second = (format_chart(charts.chart_survival(table, {"</script><!--": "#000000"})) for _ in range(2))
    assert first == second
    assert "<" not in first
    assert "\\u003c/script\\u003e" in first


@pytest.mark.long
def test_the_script_is_put_together_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNE_STUDY_CACHE", str(tmp_path))
    make_script.cache_clear()
    try:
        script = make_script()
        (path,) = tmp_path.iterdir()
        assert "[data-chart]" in script.text
        assert "</script" not in script.text
        monkeypatch.setattr(vl_convert, "javascript_bundle", lambda code: "// made again")
        make_script.cache_clear()
        assert make_script() == script
        # What is damaged, or may be somebody else's, is not used.
        content = path.read_bytes()
        for damaged_content, mode in ((content[:-9], 0o600), (content, 0o666), (b"\xff" + content, 0o600)):
            path.write_bytes(damaged_content)
            path.chmod(mode)
            make_script.cache_clear()
            assert make_script().text == "// made again"
    finally:
        make_script.cache_clear()


@pytest.mark.long
def test_who_has_no_home_folder_has_reports_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr("analysis.html.charts.find_cache_folder", refuse)
    make_script.cache_clear()
    try:
        assert "[data-chart]" in make_script().text
    finally:
        make_script.cache_clear()
