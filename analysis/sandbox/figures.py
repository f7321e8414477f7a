"""Every figure in the report of a study of the update-rule sandbox, each declared once."""

from dataclasses import dataclass
from functools import cached_property

import pandas as pd
from matplotlib.figure import Figure

from analysis.data.compare import arms
from analysis.data.frames import StudyFrames
from analysis.html.figures import Gallery, ReportFigure
from analysis.sandbox import contrasts, plots, tables
from analysis.sandbox.page import chance
from analysis.sandbox.tables import Panel
from analysis.sweep import series
from analysis.sweep.plots import draw_curves


@dataclass(frozen=True)
class RuleView:
    """A study of update rules, and what several of its figures draw from."""

    frames: StudyFrames

    @cached_property
    def colors(self) -> dict[str, str]:
        """Arm -> colour."""
        return plots.rule_colors(arms(self.frames))

    @cached_property
    def curves(self) -> dict[Panel, tuple[pd.DataFrame, pd.DataFrame]]:
        """`series.curves` and `tables.means` of the column of each panel of the study."""
        return {
            panel: (series.curves(self.frames, panel.column), tables.means(self.frames, panel.column))
            for panel in tables.panels(self.frames)
        }


def gallery(frames: StudyFrames) -> Gallery[RuleView]:
    """The figures of a study: the mean curves of its columns together, every run of each column, its contrasts."""
    view = RuleView(frames)
    if not view.curves:
        return Gallery((), view)
    return Gallery((MEANS, *map(_every_run, view.curves), CONTRASTS), view)


def _every_run(panel: Panel) -> ReportFigure[RuleView]:
    """A panel for each arm with its runs' curves of one column."""

    def draw(table: tuple[pd.DataFrame, pd.DataFrame], view: RuleView) -> Figure:
        runs, means = table
        return draw_curves(runs, means[means["runs"] > 1], view.colors, panel.label)

    return ReportFigure(
        f"runs_{panel.column}",
        "every-run",
        f"{panel.column}: thin lines are single runs, a thick one over them their mean; other arms are grey. A cross: "
        "a rule stopped the run; a ring: it ended otherwise.",
        lambda view: view.curves[panel],
        draw,
    )


def _contrasts(view: RuleView) -> tuple[pd.DataFrame, pd.DataFrame] | None:
    table = contrasts.contrasts(view.frames)
    return (table, contrasts.pairs(view.frames)) if table["difference"].notna().any() else None


MEANS: ReportFigure[RuleView] = ReportFigure(
    "curves",
    "curves",
    "Thick: the mean over an arm's runs; band: plus and minus one standard error of that mean (not a deviation of "
    "runs); thin: single runs. A run that a rule stopped keeps its last value in the mean, and a cross marks its end. "
    "Runs that failed or were interrupted are drawn thin and are in no mean. Step 0 is before the first update. "
    "Dashed: the error of random content tokens.",
    lambda view: [(panel, runs, means) for panel, (runs, means) in view.curves.items()],
    lambda drawn, view: plots.draw_means(drawn, view.colors, chance(view.frames)),
)
CONTRASTS: ReportFigure[RuleView] = ReportFigure(
    "contrasts",
    "contrasts",
    "Point: mean over the pairs, with its interval over seeds where there are three. Rings below it: single pairs, "
    "means over their seeds. Left of the dashed line the first arm is lower.",
    _contrasts,
    lambda table, view: plots.draw_contrasts(*table),
)
