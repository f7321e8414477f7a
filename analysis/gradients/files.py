"""Write the figures and numbers of a run's gradient analyses, under the file names of the published system."""

import json
from collections.abc import Sequence
from pathlib import Path

import altair as alt
import pandas as pd

from analysis.charts import chart as charts
from analysis.charts import gradients as plots
from analysis.gradients import tables
from analysis.gradients.published_metrics import TABLE_COLUMNS, make_published_metrics, make_published_tables
from trainable.files.paths import atomic_write

MAX_COMPARED_STEPS = 3  # each is a row of panels, so the comparison stays one screen high


def write_analyses(gradients: pd.DataFrame, groups: pd.DataFrame, steps: Sequence[int], folder: Path) -> list[Path]:
    """Write the files of each step, and gradient_analysis_steps.png, which compares up to three; return all paths.

    A step has five figures, the published metrics, and the reward std of every group. With more than three steps, the
    comparison shows the first, the last and one in the middle.

    gradients, groups: rows of the frames of `StudyFrames` of one run and source. steps: with an analysis. folder:
    created if missing; files with the same names are replaced. Raises OSError if it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for step in steps:
        rows, step_groups = (frame[frame["step"] == step] for frame in (gradients, groups))
        for figure_name, chart in draw_step(rows, step_groups).items():
            paths.append(folder / f"gradient_analysis_{figure_name}_step_{step}.png")
            _save_chart(chart, paths[-1])
        # Tables have the W&B format: columns and data.
        group_tables = {
            key: {"columns": TABLE_COLUMNS, "data": table} for key, table in make_published_tables(step_groups).items()
        }
        metrics = {**make_published_metrics(rows), **group_tables}
        paths += [
            folder / f"gradient_analysis_metrics_step_{step}.json",
            folder / f"gradient_analysis_bucket_rv_table_step_{step}.csv",
        ]
        with atomic_write(paths[-2]) as temp_path:
            temp_path.write_text(json.dumps(metrics, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        with atomic_write(paths[-1]) as temp_path:
            tables.select_trained(step_groups)[["bucket", "reward_std"]].to_csv(temp_path, index=False)
    step_summaries = tables.make_steps_table(gradients, tables.subsample_evenly(list(steps), MAX_COMPARED_STEPS))
    steps_path = folder / "gradient_analysis_steps.png"
    first_row = gradients.iloc[0]
    title = f"{first_row['run_id']}{', probes' * (first_row['source'] == 'probe')}"
    _save_chart(plots.draw_steps(step_summaries, title), steps_path)
    return [*paths, steps_path]


def draw_step(rows: pd.DataFrame, groups: pd.DataFrame) -> dict[str, alt.TopLevelMixin]:
    """Draw the figures of one run, source and step: {middle of the published file name: figure}.

    They show the batch that the update sees.
    """
    trained_rows = tables.select_trained(rows)
    buckets, summary = tables.make_bucket_table(trained_rows), tables.make_summary_table(trained_rows)
    first_row = rows.iloc[0]
    name = f"{first_row['run_id']}, {'probe of ' * (first_row['source'] == 'probe')}step {first_row['step']}"
    title = f"{name}, {plots.FILTER_LABELS[bool(trained_rows['prefilter'].iloc[0])]}"
    return {
        **plots.draw_buckets(buckets, summary, title),
        "summary": plots.draw_summary(summary, tables.select_trained(groups), title),
    }


def _save_chart(chart: alt.TopLevelMixin, path: Path) -> None:
    with atomic_write(path) as temp_path:
        temp_path.write_bytes(charts.draw_png(charts.draw_svg(charts.make_spec(chart))))
