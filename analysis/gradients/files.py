"""The pictures and numbers of one run's gradient analyses as files, under the names of the published system."""

import json
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from analysis.gradients import plots, tables
from analysis.gradients.keys import TABLE_COLUMNS, published_metrics, published_tables
from trainable.runs.links import whole_file

DPI = 150
COMPARED = 3


def write_analyses(gradients: pd.DataFrame, groups: pd.DataFrame, steps: Sequence[int], folder: Path) -> list[Path]:
    """Write the files of each of `steps`, and gradient_analysis_steps.png of at most three of them; return their paths.

    gradients, groups: the rows of `StudyFrames.gradients` and `.gradient_groups` of one run and source. folder: made
    where it is not there; files of these names in it are replaced. OSError where it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = [
        path
        for step in steps
        for path in _write_step(gradients[gradients["step"] == step], groups[groups["step"] == step], folder)
    ]
    compared = tables.steps_table(gradients, tables.some_of(list(steps), COMPARED))
    last = folder / "gradient_analysis_steps.png"
    first = gradients.iloc[0]
    _save(plots.draw_steps(compared, f"{first['run_id']}{', probes' * (first['source'] == 'probe')}"), last)
    return [*written, last]


def _write_step(rows: pd.DataFrame, groups: pd.DataFrame, folder: Path) -> list[Path]:
    """The files of one step: six pictures, the published numbers, and the reward spread of every group."""
    step = rows["step"].iloc[0]
    written = []
    for what, figure in draw_step(rows, groups).items():
        written.append(folder / f"gradient_analysis_{what}_step_{step}.png")
        _save(figure, written[-1])
    metrics = folder / f"gradient_analysis_metrics_step_{step}.json"
    table = folder / f"gradient_analysis_bucket_rv_table_step_{step}.csv"
    with whole_file(metrics) as beside:
        beside.write_text(_metrics(rows, groups), encoding="utf-8")
    with whole_file(table) as beside:
        tables.as_trained(groups)[["bucket", "reward_std"]].to_csv(beside, index=False)
    return [*written, metrics, table]


def _metrics(rows: pd.DataFrame, groups: pd.DataFrame) -> str:
    """Every published key of one step as JSON, tables as W&B writes them: columns, and rows of data."""
    listed = {key: {"columns": TABLE_COLUMNS, "data": data} for key, data in published_tables(groups).items()}
    return json.dumps({**published_metrics(rows), **listed}, indent=2, sort_keys=True) + "\n"


def draw_step(rows: pd.DataFrame, groups: pd.DataFrame) -> dict[str, Figure]:
    """The six pictures of one run, source and step by the middle of their names; the first five as trained on."""
    shown = tables.as_trained(rows)
    buckets, summary = tables.bucket_table(shown), tables.summary_table(shown)
    first, column = rows.iloc[0], tables.share_column(rows)
    name = f"{first['run_id']}, {'probe of ' * (first['source'] == 'probe')}step {first['step']}"
    title = f"{name}, {plots.WHEN[bool(shown['prefilter'].iloc[0])]}"
    return {
        "plots": plots.draw_norms(buckets, title),
        "loss_plots": plots.draw_losses(buckets, title),
        "reward_std": plots.draw_reward_std(summary, title),
        "normed_grads": plots.draw_normed(buckets, title),
        "summary": plots.draw_summary(summary, tables.as_trained(groups), title),
        "signal": plots.draw_signal(tables.trusted(rows), tables.shares(rows, column), name, plots.SHARES[column]),
    }


def _save(figure: Figure, path: Path) -> None:
    with whole_file(path) as beside:
        figure.savefig(beside, dpi=DPI, format="png")
