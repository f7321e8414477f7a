"""The figures in the report of an update-rule study, each declared once."""

from dataclasses import dataclass
from functools import cached_property

import pandas as pd
from matplotlib.figure import Figure

from analysis.data.compare import list_arms
from analysis.data.frames import StudyFrames
from analysis.html.figures import Gallery, ReportFigure
from analysis.report.pages import Page
from analysis.search.page import FIGURES, SearchResults, find_search
from analysis.sweep import contrasts, findings, series
from analysis.sweep.plots import draw_curves
from sandboxes.toys.report import page, plots, tables
from sandboxes.toys.report.descriptions import Panel


@dataclass(frozen=True)
class ToyView:
    """A study of a toy task, with the tables that several of its figures need."""

    frames: StudyFrames

    @cached_property
    def colors(self) -> dict[str, str]:
        """The color of each arm."""
        return plots.make_rule_colors(list_arms(self.frames))

    @cached_property
    def search(self) -> SearchResults | None:
        """The search whose points are the arms, if it is one."""
        return find_search(self.frames)

    @cached_property
    def curves(self) -> dict[Panel, tuple[pd.DataFrame, pd.DataFrame]]:
        """For each panel of the study, the curves of single runs and the mean curves of its column."""
        return {
            panel: (
                series.make_curves(self.frames, panel.column),
                tables.compute_mean_curves(self.frames, panel.column),
            )
            for panel in tables.select_panels(self.frames)
        }


def make_gallery(frames: StudyFrames) -> Gallery[ToyView]:
    """The figures of a study: one with the mean curves, one per column with every run, and one of the contrasts."""
    view = ToyView(frames)
    if not view.curves:
        return Gallery(figures=(), view=view)
    return Gallery(
        (
            *FIGURES,
            _make_mean_curves_figure(page.compute_chance_error(frames)),
            *map(_make_runs_figure, view.curves),
            CONTRASTS_FIGURE,
        ),
        view,
    )


def _make_runs_figure(panel: Panel) -> ReportFigure[ToyView]:
    """A figure of one column, with a panel per arm that shows the arm's runs."""

    def draw(curve_tables: tuple[pd.DataFrame, pd.DataFrame], view: ToyView) -> Figure:
        runs, means = curve_tables
        return draw_curves(runs, means[means["runs"] > 1], view.colors, panel.label)

    return ReportFigure(
        f"runs_{panel.column}",
        "every-run",
        f"The column {panel.column} of every run. Thin lines are single runs, and the thick line is their mean. Runs "
        "of other arms are gray. A cross marks the end of a run that a rule stopped, and a ring marks the end of a run "
        "that did not complete for another reason.",
        lambda view: view.curves[panel],
        draw,
        describe=lambda curve_tables, view: findings.describe_run_spread(curve_tables[0]),
    )


def _make_mean_curves_figure(chance_error: float | None) -> ReportFigure[ToyView]:
    """The figure of the mean curves. chance_error: of random content tokens, drawn as a line; None: no line."""
    line = "" if chance_error is None else " A dashed line is the error of random content tokens."
    return ReportFigure(
        "curves",
        "curves",
        "Thick lines are means over the runs of an arm, and thin lines are single runs. Bands are one standard error "
        "of the mean to each side (not the standard deviation of runs). A run that a rule stopped keeps its last value "
        "in the mean, and a cross marks its end. Runs that failed or were interrupted are drawn thin and excluded from "
        f"the mean. Step 0 is before the first update.{line}",
        lambda view: [(panel, runs, means) for panel, (runs, means) in view.curves.items()],
        lambda panel_curves, view: plots.draw_mean_curves(panel_curves, view.colors, chance_error),
        describe=lambda panel_curves, view: " ".join(
            findings.describe_curves(runs, panel.label) for panel, runs, _ in panel_curves
        ),
    )


def _make_contrast_tables(view: ToyView) -> tuple[pd.DataFrame, pd.DataFrame] | None:
    table = contrasts.compute_contrasts(view.frames)
    return (table, contrasts.compute_pair_differences(view.frames)) if table["difference"].notna().any() else None


CONTRASTS_FIGURE: ReportFigure[ToyView] = ReportFigure(
    "contrasts",
    "contrasts",
    "Each point is the mean over the pairs of a contrast, with its 95 % interval over seeds. "
    "The rings below a point are its single pairs, each the mean over the pair's seeds. Left of the dashed line, the "
    "first arm of the pair is lower.",
    _make_contrast_tables,
    lambda table, view: plots.draw_contrasts(*table),
)


PAGE = Page(
    lambda frames: frames,
    "sandbox.html.j2",
    page.make_context,
    make_gallery,
    page.make_tables,
    page.make_index_entry,
    page.make_published_context,
)
"""The report of a study of toy tasks."""
