"""Tests that the figures of gradient analyses draw exactly their tables. They compare the data of the artists."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from analysis.data.frames import StudyFrames
from analysis.data.load import read_study
from analysis.gradients import plots as gradient_plots
from analysis.gradients import tables as gradients
from analysis.gradients.files import draw_step, write_analyses
from analysis.gradients.published_metrics import make_published_metrics
from analysis.sweep import plots
from tests.fakes.run_folders import FakeAnalysis, FakeRun, FakeStudy
from tests.fakes.run_folders import write_analyses as write_fake_analyses
from tests.fakes.run_folders import write_study as write_study_folder
from tests.strategies.examples import thin_out

RUN = FakeRun("0", steps=3)
AFTER = FakeAnalysis(51)
BEFORE = replace(AFTER, prefilter=True)
WITH_KL = replace(AFTER, components=("task", "entropy", "kl"))
PICTURES = ("plots", "loss_plots", "reward_std", "normed_grads", "summary", "signal")


def make_frames(output: Path, *analyses: FakeAnalysis) -> StudyFrames:
    folder = write_study_folder(output, [RUN], FakeStudy(total_steps=3, test_freq=2, levels=10))
    write_fake_analyses(folder, RUN, analyses)
    return read_study(folder)


def get_panels(figure: Figure) -> dict[str, Axes]:
    return {axes.get_title("left"): axes for axes in figure.axes}


def get_heights(axes: Axes) -> list[float]:
    return [patch.get_height() for patch in axes.patches]


def get_curves(axes: Axes) -> list[tuple[list[float], list[float]]]:
    """Return the lines with a point for each bucket. Lines across a panel have two points and are left out."""
    return [(list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines() if len(line.get_xdata()) > 2]


def get_text(axes: Axes) -> str:
    return " ".join(text.get_text() for text in axes.texts)


def get_column(fake_analysis: FakeAnalysis, component: str, column: str) -> list[float]:
    return [
        row[column]
        for row in fake_analysis.make_line()["rows"]
        if row["component"] == component and row["bucket"] != "all"
    ]


def test_norms_are_bars_by_bucket_and_a_term_that_is_off_says_so(tmp_path: Path) -> None:
    table = gradients.make_bucket_table(make_frames(tmp_path, AFTER).gradients)
    figure = gradient_plots.draw_norms(table, "run, step 51")
    panels = get_panels(figure)
    assert list(panels) == ["KL gradient", "entropy gradient", "task (policy) gradient"]
    assert get_heights(panels["task (policy) gradient"]) == get_column(AFTER, "task", "norm")
    assert get_heights(panels["entropy gradient"]) == get_column(AFTER, "entropy", "norm")
    assert get_heights(panels["KL gradient"]) == []
    assert get_text(panels["KL gradient"]) == "KL is off:\nthe loss has no such term"
    assert "run, step 51" in figure.get_suptitle()
    smallest, largest = (get_column(AFTER, "task", f"reward_std_{end}")[5] for end in ("min", "max"))
    assert f"{smallest:.3f} to {largest:.3f}" in figure.get_supxlabel()


def test_losses_are_bars_also_below_zero(tmp_path: Path) -> None:
    table = gradients.make_bucket_table(make_frames(tmp_path, WITH_KL).gradients)
    panels = get_panels(gradient_plots.draw_losses(table, "title"))
    names = {"task (policy) loss": "task", "entropy loss": "entropy", "KL loss": "kl", "total loss": "total"}
    assert list(panels) == list(names)
    for title, component in names.items():
        assert get_heights(panels[title]) == get_column(WITH_KL, component, "loss")
        assert max(get_heights(panels[title])) < 0


def test_reward_std_has_one_bar_per_bucket(tmp_path: Path) -> None:
    table = gradients.make_summary_table(make_frames(tmp_path, AFTER).gradients)
    (axes,) = gradient_plots.draw_reward_std(table, "title").axes
    assert get_heights(axes) == get_column(AFTER, "task", "reward_std_mean")
    assert [label.get_text() for label in axes.get_xticklabels()] == list("123456")


def test_norms_per_sequence_and_per_token_have_their_own_scales(tmp_path: Path) -> None:
    table = gradients.make_bucket_table(make_frames(tmp_path, AFTER).gradients)
    axes = gradient_plots.draw_normalized_norms(table, "title").axes
    assert get_heights(axes[2]) == get_column(AFTER, "task", "norm_per_sample")
    assert get_heights(axes[5]) == get_column(AFTER, "task", "norm_per_token")
    assert axes[2].get_ylim()[1] > 10 * axes[5].get_ylim()[1]
    assert "KL is off" in get_text(axes[0])
    assert "KL is off" in get_text(axes[3])


def test_the_summary_draws_spread_task_and_regularizer(tmp_path: Path) -> None:
    frames = make_frames(tmp_path, WITH_KL)
    table = gradients.make_summary_table(frames.gradients)
    spread, task, regularizer = gradient_plots.draw_summary(table, frames.gradient_groups, "title").axes
    medians = [line.get_ydata()[0] for line in spread.get_lines() if to_hex(line.get_color()) == plots.TEXT_COLOR]
    assert medians == frames.gradient_groups.groupby("bucket")["reward_std"].median().to_list()
    x = get_column(WITH_KL, "task", "reward_std_mean")
    assert get_curves(task) == [(x, get_column(WITH_KL, "task", "norm"))]
    assert get_curves(regularizer) == [(x, table["regularizer"].to_list())]
    assert regularizer.get_title("left") == "regularizer (KL + entropy) norm"
    assert regularizer.get_ylim()[1] > table["regularizer"].max()  # the published figure is cut at 1
    assert get_text(task) == "Q1 Q2 Q3 Q4 Q5 Q6"


def test_a_summary_without_groups_or_regularizer_says_what_it_has(tmp_path: Path) -> None:
    frames = make_frames(tmp_path, replace(AFTER, components=("task",)))
    table = gradients.make_summary_table(frames.gradients)
    spread, _, regularizer = gradient_plots.draw_summary(table, frames.gradient_groups.iloc[:0], "title").axes
    ((bars,),) = (container.lines[2] for container in spread.containers)
    ends = [(float(low), float(high)) for (_, low), (_, high) in bars.get_segments()]
    assert np.allclose(ends, table[["reward_std_min", "reward_std_max"]].to_numpy(), rtol=1e-9)
    assert get_text(regularizer) == "regularizer is off:\nthe loss has no such term"


def test_groups_of_one_reward_std_are_no_error(tmp_path: Path) -> None:
    table = gradients.make_summary_table(make_frames(tmp_path, AFTER).gradients)
    rounded = table.assign(reward_std_min=table["reward_std_mean"] * (1 + 1e-9))
    assert len(gradient_plots.draw_steps(rounded.assign(step=1, prefilter=True), "title").axes) == 3


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_comparison_has_a_row_per_step_and_a_scale_per_column(tmp_path: Path, count: int) -> None:
    steps = [1, 51, 101][:count]
    rows = make_frames(tmp_path, *(replace(WITH_KL, step=step) for step in steps)).gradients
    axes = gradient_plots.draw_steps(gradients.make_steps_table(rows, steps), "title").axes
    assert len(axes) == 3 * count
    for number, step in enumerate(steps):
        fake_analysis = replace(WITH_KL, step=step)
        spread, task, regularizer = axes[3 * number : 3 * number + 3]
        assert spread.get_title("left") == f"step {step}, after the filter: reward std"
        assert get_curves(task) == [
            (get_column(fake_analysis, "task", "reward_std_mean"), get_column(fake_analysis, "task", "norm"))
        ]
        assert (spread.get_yscale(), task.get_xscale(), regularizer.get_xscale()) == ("symlog",) * 3
    for column in range(3):
        assert len({panel.get_ylim() for panel in axes[column::3]}) == 1


def test_signal_has_its_interval_before_and_after_the_filter(tmp_path: Path) -> None:
    rows = make_frames(tmp_path, BEFORE, AFTER).gradients
    figure = gradient_plots.draw_signal(
        gradients.make_signal_table(rows), gradients.make_share_table(rows, "signal_share"), "title", "share"
    )
    ratio_axes, share_axes = figure.axes[:2], figure.axes[2:]
    assert [axes.get_title("left") for axes in ratio_axes] == ["before the filter", "after the filter"]
    for axes, fake_analysis in zip(ratio_axes, (BEFORE, AFTER), strict=True):
        spread = get_column(fake_analysis, "task", "reward_std_mean")
        expected = [(spread, get_column(fake_analysis, name, "snr")) for name in ("total", "task", "entropy")]
        assert get_curves(axes) == expected
        bars = axes.collections[1].get_segments()
        drawn = [(x, low, high) for (x, low), (_, high) in bars]
        ends = [spread, *(get_column(fake_analysis, "task", f"snr_{end}") for end in ("low", "high"))]
        assert drawn == list(zip(*ends, strict=True))
    for axes, fake_analysis in zip(share_axes, (BEFORE, AFTER), strict=True):
        regularizer, task, entropy = (values for _, values in get_curves(axes))
        assert task == get_column(fake_analysis, "task", "signal_share")
        assert regularizer == entropy == get_column(fake_analysis, "entropy", "signal_share")
        (bars,) = axes.collections
        drawn = [(low, high) for (_, low), (_, high) in bars.get_segments()]
        ends = [get_column(fake_analysis, "entropy", f"signal_share_{end}") for end in ("low", "high")]
        assert drawn == list(zip(*ends, strict=True))
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["task (policy)", "entropy", "total", "regularizer: KL + entropy"]


def test_a_signal_without_an_interval_is_drawn_without_bars(tmp_path: Path) -> None:
    rows = make_frames(tmp_path, replace(AFTER, folds=2)).gradients
    axes = gradient_plots.draw_signal(
        gradients.make_signal_table(rows), gradients.make_share_table(rows, "signal_share"), "title", "share"
    ).axes[0]
    assert get_curves(axes)[1][1] == get_column(AFTER, "task", "snr")
    assert [len(segment) for segment in axes.collections[0].get_segments()] == [0] * 6


def test_a_batch_without_any_ratio_says_so(tmp_path: Path) -> None:
    rows = make_frames(tmp_path, AFTER).gradients.assign(snr=np.nan, snr_low=np.nan, snr_high=np.nan)
    axes = gradient_plots.draw_signal(
        gradients.make_signal_table(rows), gradients.make_share_table(rows, "signal_share"), "title", "share"
    ).axes[0]
    assert "no ratio" in get_text(axes)
    assert "no ratio" not in get_text(
        gradient_plots.draw_signal(
            gradients.make_signal_table(make_frames(tmp_path / "b", AFTER).gradients),
            gradients.make_share_table(rows),
            "title",
            "share",
        ).axes[0]
    )


def test_report_lines_are_colored_by_name(tmp_path: Path) -> None:
    table = gradients.make_signal_lines(make_frames(tmp_path, FakeAnalysis(1), BEFORE, AFTER).gradients)
    colors = plots.make_arm_colors(["step 1", "step 51"])
    figure = gradient_plots.draw_lines(table, colors, "signal / noise")
    axes_before, axes_after = figure.axes
    drawn = {
        to_hex(line.get_color()): list(line.get_ydata()) for line in axes_after.get_lines() if len(line.get_xdata()) > 2
    }
    assert drawn == {
        colors["step 1"]: get_column(FakeAnalysis(1), "task", "snr"),
        colors["step 51"]: get_column(AFTER, "task", "snr"),
    }
    assert len(get_curves(axes_before)) == 1
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["step 1", "step 51"]
    assert axes_before.get_yscale() == "symlog"


def test_a_hundred_lines_have_a_short_legend() -> None:
    colors = plots.make_arm_colors([str(number) for number in range(100)])
    figure = Figure(layout="constrained")
    plots.add_line_legend(figure, colors)
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert (len(names), names[0], names[-1]) == (12, "0", "99")
    assert figure.legends[0].get_title().get_text() == "12 of 100"


def check_file_names(folder: Path, *steps: int) -> set[str]:
    names = {f"gradient_analysis_{name}_step_{step}.png" for name in PICTURES for step in steps}
    names |= {f"gradient_analysis_metrics_step_{step}.json" for step in steps}
    names |= {f"gradient_analysis_bucket_rv_table_step_{step}.csv" for step in steps}
    assert {path.name for path in folder.iterdir()} == names | {"gradient_analysis_steps.png"}
    return names


@pytest.mark.long
def test_files_have_the_published_names_and_numbers(tmp_path: Path) -> None:
    frames = make_frames(tmp_path, FakeAnalysis(1), BEFORE, AFTER)
    folder = tmp_path / "made" / "here"
    paths = write_analyses(frames.gradients, frames.gradient_groups, [1, 51], folder)
    names = check_file_names(folder, 1, 51)
    assert [path.name for path in paths][-1] == "gradient_analysis_steps.png"
    assert {path.name for path in paths[:-1]} == names
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
def test_a_step_whose_filter_kept_nothing_is_drawn_before_it(tmp_path: Path) -> None:
    frames = make_frames(tmp_path, BEFORE)
    figures = draw_step(frames.gradients, frames.gradient_groups)
    assert list(figures) == list(PICTURES)
    assert figures["plots"].get_suptitle() == "Gradient norms\narm0-seed0, step 51, before the filter"
    assert get_heights(figures["plots"].axes[2]) == get_column(BEFORE, "task", "norm")


@pytest.mark.long
def test_the_title_of_a_probe_says_so(tmp_path: Path) -> None:
    frames = make_frames(tmp_path, replace(WITH_KL, source="probe"))
    figures = draw_step(frames.gradients, frames.gradient_groups)
    assert figures["summary"].get_suptitle() == "Summary\narm0-seed0, probe of step 51, after the filter"
    assert figures["signal"].get_suptitle() == "Signal and shares\narm0-seed0, probe of step 51"


@pytest.mark.slow
def test_the_title_of_a_comparison_of_probes_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    titles = []
    monkeypatch.setattr(gradient_plots, "draw_steps", lambda _, title: titles.append(title) or Figure())
    for name, source in (("a", "probe"), ("b", "train")):
        frames = make_frames(tmp_path / name, replace(AFTER, source=source))
        write_analyses(frames.gradients, frames.gradient_groups, [51], tmp_path / name / "made")
    assert titles == ["arm0-seed0, probes", "arm0-seed0"]


@pytest.mark.parametrize("values", [(0.2, 0.9), (-0.4, 30.0), (0.0, 400.0), (-2e4, 3.0), (0.91, 0.94)])
def test_ticks_are_plain_numbers(tmp_path: Path, values: tuple[float, float]) -> None:
    table = gradients.make_signal_lines(make_frames(tmp_path, AFTER).gradients)
    table = table.assign(value=np.resize(values, len(table)), low=np.nan, high=np.nan)
    figure = gradient_plots.draw_lines(table, {"step 51": "#000000"}, "signal / noise")
    figure.canvas.draw()
    for which in ("major", "minor"):
        labels = [label.get_text() for label in figure.axes[0].yaxis.get_ticklabels(which=which)]
        assert all("$" not in label for label in labels)
    low, high = figure.axes[0].get_ylim()
    ticks = [tick for tick in figure.axes[0].get_yticks() if low <= tick <= high]
    assert 2 <= len(ticks) <= 14


@pytest.mark.long
@pytest.mark.parametrize("change", thin_out(["nan", "one bucket", "task only", "total only", "odd names"], 2))
def test_poor_analyses_can_be_drawn(tmp_path: Path, change: str) -> None:
    frames = make_frames(tmp_path, BEFORE, AFTER)
    number_columns = [name for name, dtype in frames.gradients.dtypes.items() if str(dtype) == "float64"]
    rows: pd.DataFrame = {
        "nan": frames.gradients.assign(**dict.fromkeys(number_columns, np.nan)),
        "one bucket": frames.gradients[frames.gradients["bucket"].isin(["all", "bucket_1"])],
        "task only": frames.gradients[frames.gradients["component"] == "task"],
        "total only": frames.gradients[frames.gradients["component"] == "total"],
        "odd names": frames.gradients.assign(bucket=frames.gradients["bucket"].str.replace("bucket_1", "first")),
    }[change]
    for figure in draw_step(rows, frames.gradient_groups).values():
        figure.canvas.draw()
