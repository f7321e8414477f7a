"""The section on gradient analyses: what the gradients of a bucket of groups tell, by its reward std."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pandas as pd

from analysis.charts.chart import make_arm_colors
from analysis.charts.gradients import FILTER_LABELS, draw_lines
from analysis.data.frames import to_records
from analysis.data.schemas import Row
from analysis.gradients import tables
from analysis.report.common import format_p
from analysis.report.results import SweepResults
from analysis.report.section import Figure, Section, Table, TableColumn, name, number
from analysis.sweep.symptoms import PERMUTATION_SEED
from analysis.sweep.verdicts import format_fraction, format_signed_2


def _make_figure(
    name: str, caption: str, make_lines: Callable[[pd.DataFrame], pd.DataFrame], label: str
) -> Figure[SweepResults]:
    """Declare a figure with a line per arm or step."""

    def make_table(results: SweepResults) -> pd.DataFrame | None:
        # The figure of a search would have a line for each of many points.
        return None if results.search else make_lines(results.frames.gradients)

    def draw(table: pd.DataFrame, results: SweepResults) -> Any:
        arms = dict(zip(table["line"], table["arm"], strict=True))
        colors = make_arm_colors(list(arms))
        if results.frames.gradients["arm"].nunique() > 1:
            colors = {line: results.arm_colors[arm] for line, arm in arms.items()}
        return draw_lines(table, colors, label)

    return Figure(name, caption, make_table, draw)


def _list_sentences(results: SweepResults) -> Iterator[str]:
    gradients = results.frames.gradients
    yield (
        "Groups are sorted into buckets by the standard deviation of their rewards. Task gradients are expected to "
        "grow with it; the gradients of the regularizers (KL and entropy) are not. With a critic, groups with a reward "
        "std of 0 may also have a task gradient."
    )
    if tables.make_signal_lines(gradients).empty:
        yield (
            "No bucket has a signal-to-noise ratio: a bucket needs at least two groups with a gradient. To analyze "
            "more groups, add `--set trainer.gradient_analysis_env_groups=128` and `_group_size=16`."
        )
    empty = [
        f"{row['run_id']}, {'probe of ' * (row['source'] == 'probe')}step {row['step']}"
        for row in to_records(gradients[gradients["empty_after_filter"] > 0])
    ]
    if empty:
        yield f"The filter dropped all groups of {', '.join(empty)}."


def _make_tables(results: SweepResults) -> Iterator[Table]:
    # Trends of the analyses that the figures show, of the norm and, in the columns signal_..., of the signal.
    generator = np.random.default_rng(PERMUTATION_SEED)
    names = ["study", "arm", "source", "prefilter", "component"]
    rows: list[Row] = []
    for step, analyses in tables.select_report_lines(results.frames.gradients).groupby("step"):
        trends = tables.summarize_trends(analyses, generator, ("mean_norm", "signal")).assign(step=step)
        signal = trends.loc[trends["measure"] == "signal", [*names, "rho", "rho_low", "rho_high", "p"]]
        norm, signal = trends[trends["measure"] == "mean_norm"], signal.set_index(names).add_prefix("signal_")
        rows += to_records(norm.merge(signal, on=names, how="left"))
    batch = TableColumn(
        "analyzed", lambda row: f"{'probe, ' * (row['source'] == 'probe')}{FILTER_LABELS[row['prefilter']]}"
    )
    yield Table(
        [
            name("arm"),
            number("step", "step", str),
            batch,
            name("component", "component"),
            number("runs", "runs", str),
            number("buckets", "buckets", str),
            number("signal: rho with\nreward std", "signal_rho", format_signed_2),
            number("permutation p", "signal_p", format_p),
            number("mean norm: rho with\nreward std", "rho", format_signed_2),
            number("upper / lower\nhalf of buckets", "ratio", format_fraction),
            number("permutation p", "p", format_p),
        ],
        rows,
        title="Trends with the reward std",
        note="rho is Spearman's rank correlation with the reward std over the buckets. The signal is an unbiased "
        "estimate of the squared norm of a bucket's expected gradient. The mean norm is the norm of the bucket's mean "
        "gradient; its square is signal plus noise. Values are means over runs, with intervals if there are at least "
        "three. p comes from permuting the buckets of each analysis, so it holds for these measurements, not for other "
        "runs. "
        "`python -m tune_study plot-gradients` draws each analysis, and gradients.parquet has every number.",
    )


GRADIENTS: Section[SweepResults] = Section(
    "gradients",
    "Gradients by reward std",
    sentences=_list_sentences,
    figures=(
        _make_figure(
            "gradient_signal",
            "Signal-to-noise ratio of the task gradient in each bucket, with its 95 % interval over folds of prompts. "
            "At 0, the whole gradient of the bucket may be noise.",
            tables.make_signal_lines,
            "signal / noise of the task gradient (1)",
        ),
        _make_figure(
            "regularizer_share",
            "How much of the gradient step of each bucket comes from the KL and entropy terms. At 1 the bucket trains "
            "on these regularizers alone, and below 0 they oppose the step. The step is the expected one, without "
            "noise. Intervals are 95 %, over folds of prompts. Buckets whose step may be noise alone are left out.",
            tables.make_share_lines,
            "KL + entropy:\nsigned share of the expected step (fraction)",
        ),
    ),
    tables=_make_tables,
    explanation="In a study of one arm, each color is a training step. With several arms, each color is an arm, at the "
    "last analysis of its runs. Each run has its own curve. Curves of probes (analyses of checkpoints) are dashed. "
    "With fewer than 3 folds there is no interval.",
    when=lambda results: not tables.drop_empty_batches(results.frames.gradients).empty,
)
