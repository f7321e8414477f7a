"""Tests that the figures of gradient analyses draw exactly their tables, whose rows are the data of the charts."""

import csv
import json
import os
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd
import pytest

from analysis.charts import chart as charts
from analysis.charts import gradients as plots
from analysis.charts.chart import make_arm_colors
from analysis.data.frames import StudyFrames
from analysis.gradients import tables as gradients
from analysis.gradients.files import draw_step, write_analyses
from analysis.gradients.published_metrics import make_published_metrics
from tests.analysis.gradients.test_tables import AFTER, ALL, BEFORE
from tests.analysis.gradients.test_tables import make_frames as make_study_frames
from tests.conftest import TEMPORARY_ROOT_ENV
from tests.fakes.run_folders import FakeAnalysis, FakeRun
from tests.strategies.examples import thin_out

WITH_KL = replace(AFTER, components=ALL)
PICTURES = ("plots", "loss_plots", "reward_std", "normed_grads", "summary")


@cache
def make_frames(*analyses: FakeAnalysis) -> StudyFrames:
    with TemporaryDirectory(dir=os.environ.get(TEMPORARY_ROOT_ENV)) as folder:
        return make_study_frames(Path(folder), [(FakeRun("0", steps=3), list(analyses))])


Spec = dict[str, Any]


def get_column(fake_analysis: FakeAnalysis, component: str, column: str) -> list[float]:
    rows = fake_analysis.make_line()["rows"]
    return [row[column] for row in rows if row["component"] == component and row["bucket"] != "all"]


def get_rows(chart: Any, number: int = 0) -> list[Spec]:
    """Return the rows of the data of a facet, or of one of several charts side by side."""
    spec = charts.make_spec(chart)
    entry = [*spec.get("hconcat", []), *spec.get("vconcat", []), spec][number]
    rows: list[Spec] = spec["datasets"][entry["data"]["name"]]
    return rows


def get_panels(chart: Any) -> dict[str, list[Spec]]:
    """Return the rows of each panel of bars, by its title."""
    rows = get_rows(chart)
    spec = charts.make_spec(chart)
    assert spec["spec"]["layer"][0]["encoding"]["y"]["field"] == "value"
    return {name: [row for row in rows if row["panel"] == name] for name in spec["facet"]["sort"]}


def get_values(rows: list[Spec], *names: str) -> list[Any]:
    values = [tuple(row[name] for name in names) for row in rows]
    return [value for (value,) in values] if len(names) == 1 else values


def get_title(chart: Any) -> list[str]:
    title: list[str] = charts.make_spec(chart)["title"]["text"]
    return title


def get_texts(chart: Any) -> list[str]:
    """Return all texts of a chart as it is drawn."""
    return re.findall(r"<text[^>]*>([^<]*)<", charts.draw_svg(charts.make_spec(chart)))


def test_norms_and_reward_stds_are_bars_by_bucket_and_a_term_that_is_off_says_so() -> None:
    rows_of_study = make_frames(AFTER).gradients
    table, summary = gradients.make_bucket_table(rows_of_study), gradients.make_summary_table(rows_of_study)
    figures = plots.draw_buckets(table, summary, "run, step 51")
    chart = figures["plots"]
    kl, entropy, task = get_panels(chart).values()
    names = [name.partition(",")[0] for name in get_panels(chart)]
    assert names == ["KL gradient", "entropy gradient", "task (policy) gradient"]
    assert get_values(task, "value") == get_column(AFTER, "task", "norm")
    assert get_values(entropy, "value") == get_column(AFTER, "entropy", "norm")
    assert get_values(kl, "value") == [None] * 6
    assert get_texts(chart).count("KL is off: the loss has no such term") == 1
    assert get_title(chart) == ["Gradient norms", "run, step 51"]
    smallest, largest = (get_column(AFTER, "task", f"reward_std_{end}")[5] for end in ("min", "max"))
    assert f"{smallest:.3f} to {largest:.3f}" in charts.make_spec(chart)["title"]["subtitle"][-1]
    chart = figures["normed_grads"]
    panels = get_panels(chart)
    for unit, column in (("sequences", "norm_per_sample"), ("trained tokens", "norm_per_token")):
        rows = panels[f"task (policy) norm / {unit} (1)"]
        assert get_values(rows, "value") == get_column(AFTER, "task", column)
    assert charts.make_spec(chart)["resolve"] == {"scale": {"y": "independent"}}
    assert get_texts(chart).count("KL is off: the loss has no such term") == 2
    (rows,) = get_panels(figures["reward_std"]).values()
    assert get_values(rows, "value") == get_column(AFTER, "task", "reward_std_mean")
    assert get_values(rows, "bucket") == list("123456")


def test_losses_are_bars_also_below_zero() -> None:
    rows_of_study = make_frames(WITH_KL).gradients
    table, summary = gradients.make_bucket_table(rows_of_study), gradients.make_summary_table(rows_of_study)
    chart = plots.draw_buckets(table, summary, "title")["loss_plots"]
    panels = get_panels(chart)
    assert list(panels) == [f"{name} loss (1)" for name in ("task (policy)", "entropy", "KL", "total")]
    for rows, component in zip(panels.values(), ("task", "entropy", "kl", "total"), strict=True):
        assert get_values(rows, "value") == get_column(WITH_KL, component, "loss")
        assert max(get_values(rows, "value")) < 0
    assert f"−{abs(get_column(WITH_KL, 'task', 'loss')[0]):.3g}" in get_texts(chart)


def test_the_summary_draws_spread_task_and_regularizer() -> None:
    frames = make_frames(WITH_KL)
    table = gradients.make_summary_table(frames.gradients)
    chart = plots.draw_summary(table, frames.gradient_groups, "title")
    spec = charts.make_spec(chart)
    box = spec["hconcat"][0]["spec"]["layer"][0]
    assert box["mark"]["type"] == "boxplot"
    stds = pd.DataFrame(get_rows(chart))
    assert sorted(stds["reward_std"]) == sorted(frames.gradient_groups["reward_std"])
    assert stds["label"].drop_duplicates().to_list() == [f"Q{number}" for number in range(1, 7)]
    x = get_column(WITH_KL, "task", "reward_std_mean")
    task, regularizer = (get_rows(chart, number) for number in (1, 2))
    assert get_values(task, "reward_std_mean", "value") == list(
        zip(x, get_column(WITH_KL, "task", "norm"), strict=True)
    )
    assert get_values(regularizer, "reward_std_mean", "value") == list(zip(x, table["regularizer"], strict=True))
    titles = [column["title"] for column in spec["hconcat"]]
    assert titles == ["reward std by bucket", "task norm", "regularizer (KL + entropy) norm"]
    # The published figure is cut at 1.
    assert spec["hconcat"][2]["spec"]["layer"][0]["encoding"]["y"]["scale"] == {"zero": True}
    assert [get_texts(chart).count(f"Q{number}") for number in range(1, 7)] == [3] * 6


def test_a_summary_without_groups_or_regularizer_says_what_it_has() -> None:
    frames = make_frames(replace(AFTER, components=("task",)))
    table = gradients.make_summary_table(frames.gradients)
    chart = plots.draw_summary(table, frames.gradient_groups.iloc[:0], "title")
    rule = charts.make_spec(chart)["hconcat"][0]["spec"]["layer"][0]
    fields = [rule["encoding"][channel]["field"] for channel in ("y", "y2")]
    assert (rule["mark"]["type"], fields) == ("rule", ["reward_std_min", "reward_std_max"])
    ends = get_values(get_rows(chart), "reward_std_min", "reward_std_max")
    assert np.allclose(ends, table[["reward_std_min", "reward_std_max"]].to_numpy(), rtol=1e-9)
    assert "regularizer is off: the loss has no such term" in get_texts(chart)
    assert "task is off: the loss has no such term" not in get_texts(chart)


@pytest.mark.parametrize("count", [1, 3])
def test_the_comparison_has_a_row_per_step_and_a_scale_per_column(count: int) -> None:
    steps = [1, 51, 101][:count]
    rows = make_frames(*(replace(WITH_KL, step=step) for step in steps)).gradients
    chart = plots.draw_steps(gradients.make_steps_table(rows, steps), "title")
    spec = charts.make_spec(chart)
    names = [f"step {step}, after the filter" for step in steps]
    # A column of panels with one scale.
    assert all((column["facet"]["row"]["sort"], column.get("resolve")) == (names, None) for column in spec["hconcat"])
    for step, name in zip(steps, names, strict=True):
        fake_analysis = replace(WITH_KL, step=step)
        task = [row for row in get_rows(chart, 1) if row["step"] == name]
        columns = (get_column(fake_analysis, "task", column) for column in ("reward_std_mean", "norm"))
        expected = zip(*columns, strict=True)
        assert get_values(task, "reward_std_mean", "value") == list(expected)
    spread, task, regularizer = (column["spec"]["layer"][0]["encoding"] for column in spec["hconcat"])
    for axis in (spread["y"], task["x"], regularizer["x"]):
        assert (axis["scale"]["type"], axis["scale"]["constant"]) == ("symlog", 0.1)


def test_report_lines_are_colored_by_name() -> None:
    table = gradients.make_signal_lines(make_frames(FakeAnalysis(1), BEFORE, AFTER).gradients)
    colors = make_arm_colors(["step 1", "step 51"])
    chart = plots.draw_lines(table, colors, "signal / noise")
    spec, rows = charts.make_spec(chart), get_rows(chart)
    values = {
        key: get_values([row for row in rows if (row["state"], row["line"]) == key], "value")
        for key in dict.fromkeys((row["state"], row["line"]) for row in rows)
    }
    assert values == {
        ("after the filter", "step 1"): get_column(FakeAnalysis(1), "task", "snr"),
        ("before the filter", "step 51"): get_column(BEFORE, "task", "snr"),
        ("after the filter", "step 51"): get_column(AFTER, "task", "snr"),
    }
    line = next(layer for layer in spec["spec"]["layer"] if layer["mark"]["type"] == "line")["encoding"]
    assert line["color"]["scale"] == {"domain": list(colors), "range": list(colors.values())}
    assert line["strokeDash"]["scale"]["range"] == [[1, 0], [1, 0]]
    assert line["y"]["scale"]["type"] == "symlog"
    assert [choice["bind"] for choice in spec["params"]] == ["legend"]
    assert {entry["field"] for layer in spec["spec"]["layer"] for entry in layer["encoding"].get("tooltip", [])} == {
        *("line", "bucket", "reward_std", "value", "low", "high")
    }


@pytest.mark.long
def test_files_have_the_published_names_and_numbers(tmp_path: Path) -> None:
    frames = make_frames(BEFORE, AFTER)
    folder = tmp_path / "made" / "here"
    paths = write_analyses(frames.gradients, frames.gradient_groups, [51], folder)
    assert len(paths) == len(list(folder.iterdir())) == len(PICTURES) + 2 + 1
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths if path.suffix == ".png")
    metrics = json.loads((folder / "gradient_analysis_metrics_step_51.json").read_text())
    tables = {key: value for key, value in metrics.items() if key.endswith("group_rv_table")}
    numbers = {key: value for key, value in metrics.items() if key not in tables}
    assert numbers == make_published_metrics(frames.gradients[frames.gradients["step"] == 51])
    assert {tuple(table["columns"]) for table in tables.values()} == {("bucket", "group_id", "reward_std")}
    assert len(tables) == 2 * 7
    with (folder / "gradient_analysis_bucket_rv_table_step_51.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["bucket"], float(row["reward_std"])) for row in rows] == [
        (group["bucket"], group["reward_std"]) for group in AFTER.make_line()["groups"]
    ]


@pytest.mark.long
def test_titles_say_what_is_before_the_filter_and_what_is_a_probe() -> None:
    frames = make_frames(BEFORE)
    figures = draw_step(frames.gradients, frames.gradient_groups)
    assert list(figures) == list(PICTURES)
    assert get_title(figures["plots"]) == ["Gradient norms", "arm0-seed0, step 51, before the filter"]
    *_, task = get_panels(figures["plots"]).values()
    assert get_values(task, "value") == get_column(BEFORE, "task", "norm")
    frames = make_frames(replace(WITH_KL, source="probe"))
    figures = draw_step(frames.gradients, frames.gradient_groups)
    assert get_title(figures["summary"]) == ["Summary", "arm0-seed0, probe of step 51, after the filter"]


@pytest.mark.parametrize("values", [(0.2, 0.9), (-0.4, 30.0), (0.0, 400.0), (-2e4, 3.0), (0.91, 0.94)])
def test_ticks_are_plain_numbers(values: tuple[float, float]) -> None:
    table = gradients.make_signal_lines(make_frames(AFTER).gradients)
    table = table.assign(value=np.resize(values, len(table)), low=np.nan, high=np.nan)
    svg = charts.draw_svg(charts.make_spec(plots.draw_lines(table, {"step 51": "#000000"}, "signal")))
    axes = re.findall(r"Y-axis titled 'signal'.*?role-axis-domain", svg)
    ticks = [text for text in re.findall(r"<text[^>]*>([^<]*)<", axes[0]) if text != "signal"]
    assert 2 <= len(ticks) <= 14
    assert len({float(text.replace("−", "-").replace(",", "")) for text in ticks}) == len(ticks)
    assert all(re.fullmatch(r"[-−]?[0-9,]+(\.[0-9]+)?", text) for text in ticks)


@pytest.mark.long
@pytest.mark.parametrize("change", thin_out(["nan", "one bucket", "task only", "total only", "odd names"], 2))
def test_poor_analyses_can_be_drawn(change: str) -> None:
    frames = make_frames(BEFORE, AFTER)
    number_columns = [name for name, dtype in frames.gradients.dtypes.items() if str(dtype) == "float64"]
    rows: pd.DataFrame = {
        "nan": frames.gradients.assign(**dict.fromkeys(number_columns, np.nan)),
        "one bucket": frames.gradients[frames.gradients["bucket"].isin(["all", "bucket_1"])],
        "task only": frames.gradients[frames.gradients["component"] == "task"],
        "total only": frames.gradients[frames.gradients["component"] == "total"],
        "odd names": frames.gradients.assign(bucket=frames.gradients["bucket"].str.replace("bucket_1", "first")),
    }[change]
    for chart in draw_step(rows, frames.gradient_groups).values():
        assert "<svg" in charts.draw_svg(charts.make_spec(chart))
