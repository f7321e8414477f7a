"""Charts of a study for a notebook, which shows what a function returns."""

from typing import Any

import altair as alt
import pandas as pd

from analysis.data.compare import require_single_study
from analysis.data.frames import StudyFrames
from analysis.grid.layout import name_arms
from analysis.report import charts
from analysis.report.figures import CURVES, AxisView
from analysis.report.results import SweepResults
from analysis.sweep import series, tables
from analysis.sweep.collapse import compute_survival

_WIDTH = 640
"""Width of a chart in pixels: a notebook has no page whose width it could take."""


class OfflineChart(alt.LayerChart):
    """A chart that a notebook shows without network: its 0.9 MB hold the library that draws it, too.

    The default of altair loads the library from a CDN, which the nodes of many clusters cannot reach.
    """

    def _repr_mimebundle_(self, *arguments: Any, **options: Any) -> Any:
        with alt.renderers.enable("html", template="inline"):
            return super()._repr_mimebundle_(*arguments, **options)


class StudyPlots:
    """Interactive charts of one study of language models, as the report has them.

    Args:
        frames: of the study.

    Example:
        >>> frames = analysis.load("out/results/kl_sweep_sokoban-tiny")  # doctest: +SKIP
        >>> frames.plot.dose_response()  # doctest: +SKIP
        >>> frames.plot.curves("entropy").save("entropy.html", inline=True)  # doctest: +SKIP
    """

    def __init__(self, frames: StudyFrames) -> None:
        self._frames = frames

    def dose_response(self) -> OfflineChart:
        """Success at the end of training against the axis, with intervals. ValueError if the arms form a grid."""
        view = self._make_view()
        if view.results.grid:
            raise ValueError(
                "The arms of this study form a grid: analysis.report.pages.draw_figures(frames) draws its heat maps."
            )
        runs = tables.make_run_outcomes(view.frames)
        return self._finish(charts.chart_dose_response(view.dose_response, runs, view.arm_colors, view.axis_name))

    def curves(self, column: str = "val_success") -> OfflineChart:
        """A column of `steps` over training: one line per run, and the mean of each arm.

        ValueError if there is no such column, or if it has too many rows for a chart.
        """
        view = self._make_view()
        table = _check_size(series.make_curves(view.frames, column))
        # As the report draws it, where it does.
        curve = next((curve for curve in CURVES if curve.column == column), None)
        means = series.compute_mean_curves(table, carry_forward=curve is not None and curve.carry_forward)
        return self._finish(charts.chart_curves(table, means, view.arm_colors, curve.label if curve else column))

    def survival(self) -> OfflineChart:
        """Fraction of the runs of each arm that have not collapsed, by step."""
        view = self._make_view()
        return self._finish(charts.chart_survival(_check_size(compute_survival(view.frames)), view.arm_colors))

    def _make_view(self) -> AxisView:
        frames = require_single_study(self._frames)
        if not frames.is_fine_tuning:
            raise ValueError("Only studies of language models have charts: draw_figures(frames) draws other studies.")
        if frames.trials.empty:
            raise ValueError("This study has no run yet, so there is nothing to draw.")
        return AxisView(SweepResults(name_arms(frames)))

    def _finish(self, chart: alt.LayerChart) -> OfflineChart:
        return OfflineChart.from_dict(chart.properties(width=_WIDTH).to_dict())


def _check_size(table: pd.DataFrame) -> pd.DataFrame:
    if table.empty:
        raise ValueError("No run of this study has a row of this kind yet, so there is nothing to draw.")
    if len(table) > charts.MAX_ROWS:
        raise ValueError(f"{len(table)} rows are too many for a chart ({charts.MAX_ROWS}).")
    return table
