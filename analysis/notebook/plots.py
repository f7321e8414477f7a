"""Charts of a study for a notebook, which shows what a function returns."""

import altair as alt
import pandas as pd

from analysis.charts.chart import make_file_chart
from analysis.charts.curves import draw_curves, draw_survival
from analysis.charts.dose import draw_dose_response
from analysis.data.compare import require_single_study
from analysis.data.frames import StudyFrames
from analysis.grid.layout import name_arms
from analysis.report.results import SweepResults
from analysis.report.sweep import CURVES, Curve
from analysis.sweep import series, tables
from analysis.sweep.collapse import compute_survival


class StudyPlots:
    """Interactive charts of one study of language models, as the report has them.

    >>> frames = analysis.load("out/results/kl_sweep_sokoban-tiny")  # doctest: +SKIP
    >>> frames.plot.dose_response()  # doctest: +SKIP
    >>> frames.plot.curves("entropy").save("entropy.html", inline=True)  # doctest: +SKIP
    """

    def __init__(self, frames: StudyFrames) -> None:
        self._frames = frames

    def dose_response(self) -> alt.TopLevelMixin:
        """Draw success at the end of training against the axis, with intervals. ValueError if the arms form a grid."""
        results = self._make_results()
        if results.grid:
            raise ValueError(
                "The arms of this study form a grid: analysis.report.pages.draw_figures(frames) draws its heat maps."
            )
        runs, setting = tables.make_run_outcomes(results.frames), results.study.axis.setting
        return make_file_chart(draw_dose_response(results.dose_response, runs, results.arm_colors, setting))

    def curves(self, column: str = "val_success") -> alt.TopLevelMixin:
        """Draw a column of `steps` over training: one line per run, and the mean of each arm.

        ValueError if there is no such column.
        """
        results = self._make_results()
        table = _require_rows(series.make_curves(results.frames, column))
        # As the report draws it, where it does.
        curve = next((curve for curve in CURVES if curve.column == column), Curve("", column, column, ""))
        means = series.compute_mean_curves(table, carry_forward=curve.carry_forward)
        return make_file_chart(draw_curves(table, means, results.arm_colors, curve.label))

    def survival(self) -> alt.TopLevelMixin:
        """Draw the fraction of the runs of each arm that have not collapsed, by step."""
        results = self._make_results()
        return make_file_chart(draw_survival(_require_rows(compute_survival(results.frames)), results.arm_colors))

    def _make_results(self) -> SweepResults:
        frames = require_single_study(self._frames)
        if not frames.has_symptoms:
            raise ValueError("Only studies of language models have charts: draw_figures(frames) draws other studies.")
        if frames.trials.empty:
            raise ValueError("This study has no run yet, so there is nothing to draw.")
        return SweepResults(name_arms(frames))


def _require_rows(table: pd.DataFrame) -> pd.DataFrame:
    if table.empty:
        raise ValueError("No run of this study has a row of this kind yet, so there is nothing to draw.")
    return table
