"""Every figure in the report of a study of language models, each declared once.

To show one more column over training, add one `Curve` to `CURVES`: the reports along an axis and of a grid follow.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from analysis.data.frames import StudyFrames
from analysis.gradients import plots as gradient_plots
from analysis.gradients import tables as gradients
from analysis.grid import layout
from analysis.grid import plots as grid_plots
from analysis.grid.measures import MEASURES, Measure
from analysis.grid.page import group_arms_by_panel
from analysis.html.figures import Gallery, ReportFigure
from analysis.sweep import findings, plots, series, tables


@dataclass(frozen=True)
class AxisView:
    """A study with one axis, and what several of its figures draw from. frames: with a run at least."""

    frames: StudyFrames

    @cached_property
    def dose_response(self) -> pd.DataFrame:
        """`tables.dose_response`: a row for each arm."""
        return tables.make_dose_response(self.frames)

    @cached_property
    def arm_colors(self) -> dict[str, str]:
        """Arm -> colour, along the axis; words such as nofilter apart."""
        return plots.make_arm_colors(
            self.dose_response["arm"].to_list(), self.dose_response.loc[self.dose_response["is_word"], "arm"].to_list()
        )

    @property
    def line_frames(self) -> StudyFrames:
        """The frames whose arms are lines where a figure has a line for many runs."""
        return self.frames

    @property
    def line_colors(self) -> dict[str, str]:
        """A colour for each of those lines."""
        return self.arm_colors


@dataclass(frozen=True)
class GridView:
    """A study whose arms are the points of a grid, and what several of its figures draw from."""

    frames: StudyFrames
    grid: layout.Grid

    @cached_property
    def members(self) -> pd.DataFrame:
        """`layout.members`: a row for each run and panel."""
        return layout.make_member_table(self.frames, self.grid)

    @cached_property
    def cells(self) -> pd.DataFrame:
        """`layout.cells`: a row for each panel and point."""
        return layout.make_cell_table(self.grid, self.members)

    @cached_property
    def arm_colors(self) -> dict[str, str]:
        """Arm -> colour."""
        return _make_arm_colors(self.frames)

    @cached_property
    def line_frames(self) -> StudyFrames:
        """The frames with a panel for an arm, so that a line is a panel's: a line for each point would be hundreds."""
        return group_arms_by_panel(self.frames, self.grid)

    @cached_property
    def line_colors(self) -> dict[str, str]:
        """Panel -> colour."""
        return _make_arm_colors(self.line_frames)


View = AxisView | GridView


def _make_arm_colors(frames: StudyFrames) -> dict[str, str]:
    return plots.make_arm_colors(list(dict.fromkeys(frames.trials["arm"])))


def make_gallery(frames: StudyFrames) -> Gallery[Any]:
    """The figures of a study along an axis or of a grid; none where it has no run."""
    grid = layout.find_grid(frames)
    if grid:
        return Gallery(GRID_FIGURES, GridView(frames, grid))
    return Gallery(() if frames.trials.empty else AXIS_FIGURES, AxisView(frames))


@dataclass(frozen=True)
class Curve:
    """A step column over training, for every run, in each of the reports.

    name, section, caption: as in `ReportFigure`. column: of the rows. label: of the vertical axis, with a unit.
    explains_marks: the caption goes on with what lines and marks mean, which is said once on a page. carries: in a mean
    over runs a stopped one keeps its last value. says_nothing: whether these frames have nothing to see in the column.
    only_in_grids: the report along an axis leaves it out.
    """

    name: str
    section: str
    column: str
    label: str
    caption: str
    explains_marks: bool = False
    carry_forward: bool = False
    is_uninformative: Callable[[StudyFrames], bool] = lambda frames: False
    only_in_grids: bool = False


def _keeps_every_group(frames: StudyFrames) -> bool:
    return bool((frames.steps["kept_ratio"].dropna() == 1).all())


CURVES: tuple[Curve, ...] = (
    Curve(
        "validation_curves",
        "curves",
        "val_success",
        "validation success (share)",
        "Every run's validation success, sampled.",
        explains_marks=True,
        carry_forward=True,
    ),
    Curve(
        "reward_std",
        "stops",
        "reward_std",
        "reward std in the group (reward)",
        "Mean over groups of the reward's spread. Where it nears zero, the groups' rewards carry no signal.",
    ),
    Curve(
        "entropy",
        "stops",
        "entropy",
        "entropy (nats a token)",
        "Token mean of the sampling policy's entropy.",
    ),
    Curve(
        "reference_kl",
        "stops",
        "kl_to_reference",
        "KL to the reference (nats)",
        "KL to the reference (k3 estimate, whatever the form of the loss) at the trained tokens, before each update; "
        "runs without a reference pass do not have it.",
        only_in_grids=True,
    ),
    Curve(
        "kept_groups",
        "stops",
        "groups_kept",
        "groups trained on (groups)",
        "Groups that the filter kept, of those collected.",
        is_uninformative=_keeps_every_group,
    ),
)


def _make_arm_figure(curve: Curve) -> ReportFigure[AxisView]:
    """A panel for each arm, with the mean over its runs."""

    def make_table(view: AxisView) -> pd.DataFrame | None:
        return (
            None
            if curve.is_uninformative(view.frames)
            else _none_if_empty(series.make_curves(view.frames, curve.column))
        )

    def draw(table: pd.DataFrame, view: AxisView) -> Figure:
        means = series.compute_mean_curves(table, carry_forward=curve.carry_forward)
        return plots.draw_curves(table, means, view.arm_colors, curve.label)

    marks_caption = (
        " A panel an arm; the other arms' runs are grey. Step 0 is the policy before training. Thin lines are single "
        "runs; a thick line over thin ones is their mean, in which a stopped run keeps its last value. A cross ends a "
        "run that a rule stopped, a ring one that ended otherwise."
    )
    return ReportFigure(
        curve.name, curve.section, curve.caption + marks_caption * curve.explains_marks, make_table, draw
    )


def _make_panel_figure(curve: Curve) -> ReportFigure[GridView]:
    """A panel for each panel of the grid, with a thin line for each run."""

    def make_table(view: GridView) -> pd.DataFrame | None:
        if curve.is_uninformative(view.frames):
            return None
        return _none_if_empty(layout.make_panel_curves(view.frames, view.grid, view.members, curve.column))

    def draw(table: pd.DataFrame, view: GridView) -> Figure:
        return grid_plots.draw_curves(view.grid, table, curve.label)

    def make_caption(view: GridView) -> str:
        marks_caption = (
            f" A thin line a run, coloured by {layout.shorten_setting(view.grid.x)}. Step 0 is the policy before training. A "
            "cross ends a run that a rule stopped, a ring one that ended otherwise."
        )
        return curve.caption + marks_caption * curve.explains_marks

    return ReportFigure(curve.name, curve.section, make_caption, make_table, draw)


def _make_heat_map(measure: Measure) -> ReportFigure[GridView]:
    def make_table(view: GridView) -> pd.DataFrame | None:
        return view.cells if view.cells[measure.name].notna().any() else None

    def draw(table: pd.DataFrame, view: GridView) -> Figure:
        return grid_plots.draw_heat_maps(view.grid, table, measure.name, measure.label, log=measure.log)

    return ReportFigure(f"grid_{measure.name}", "grid", measure.caption, make_table, draw)


def _none_if_empty(table: pd.DataFrame) -> pd.DataFrame | None:
    return table if len(table) else None


def _make_success_table(view: AxisView) -> pd.DataFrame | None:
    return view.dose_response if view.dose_response["success"].notna().any() else None


def _draw_successes(table: pd.DataFrame, view: AxisView) -> Figure:
    setting = str(view.frames.studies[0].get("axis", {}).get("setting", ""))
    return plots.draw_dose_response(table, tables.make_run_outcomes(view.frames), setting)


def _make_dose_caption(view: AxisView) -> str:
    basis = findings.describe_interval_basis(view.dose_response) or "no scored run"
    return (
        f"Filled: sampled validation success at the end, with its 95 % interval ({basis}). Open triangle: greedy. "
        "Open square: test levels, sampled. A vermilion cross: a rule stopped every scored run of the arm; a vermilion "
        "edge: some of them. Lines: the policy before training."
    )


def _make_stop_table(view: View) -> pd.DataFrame | None:
    table = series.compute_stop_survival(view.line_frames)
    return table if (table["stopped"] > 0).any() else None


def _draw_gradients(make_label: Callable[[StudyFrames], str], table: pd.DataFrame, view: View) -> Figure:
    has_several_arms = view.frames.gradients["arm"].nunique() > 1
    colors = _make_gradient_colors(table, view.arm_colors, has_several_arms)
    return gradient_plots.draw_lines(table, colors, make_label(view.frames))


def _make_gradient_colors(table: pd.DataFrame, arm_colors: Mapping[str, str], has_several_arms: bool) -> dict[str, str]:
    """A colour for each line: of several arms the arm's own, for its probes lighter ones; of one arm one per line."""
    lines = list(dict.fromkeys(zip(table["line"], table["arm"], strict=True)))
    if not has_several_arms:
        return plots.make_arm_colors([line for line, _ in lines])
    probes = {arm: [line for line, line_arm in lines if line_arm == arm != line] for _, arm in lines}
    return {
        line: plots.lighten_color(
            arm_colors[arm], 0 if line == arm else (1 + probes[arm].index(line)) / (2 + len(probes[arm]))
        )
        for line, arm in lines
    }


def _make_share_label(frames: StudyFrames) -> str:
    column = gradients.choose_share_column(gradients.select_report_lines(frames.gradients))
    return f"KL + entropy:\n{gradient_plots.SHARE_LABELS[column]}"


DOSE_RESPONSE: ReportFigure[AxisView] = ReportFigure(
    "dose_response", "dose-response", _make_dose_caption, _make_success_table, _draw_successes
)
STOPS: ReportFigure[View] = ReportFigure(
    "stop_survival",
    "stops",
    "Share of runs that no rule has stopped, by step (Kaplan-Meier; a run that failed or was interrupted counts up to "
    "its last step).",
    _make_stop_table,
    lambda table, view: plots.draw_survival(table, view.line_colors),
)
RETRIEVAL: ReportFigure[View] = ReportFigure(
    "retrieval",
    "retrieval",
    "Retrieval: the share of sampled thoughts that the policy finds likelier after their own prompt than after every "
    "other one; every arm is a line, the mean of its runs. Dashed: what thoughts that depend on no prompt would reach. "
    "Entropy may stay high while retrieval falls to chance: then the thoughts vary without saying anything about the "
    "level.",
    lambda view: _none_if_empty(series.make_arm_lines(view.line_frames)),
    lambda table, view: plots.draw_arm_lines(table, view.line_colors),
)
GRADIENTS: Sequence[ReportFigure[View]] = (
    ReportFigure(
        "gradient_signal",
        "gradients",
        "Signal-to-noise ratio of the task gradient in each bucket, with its 95 % interval over folds of prompts (none "
        "with fewer than 3 folds). 0: all of the bucket's gradient may be noise. A line a step, or an arm where there "
        "are several, then at its runs' last analysis; probes are dashed; a curve a run.",
        lambda view: _none_if_empty(gradients.make_signal_lines(view.frames.gradients)),
        partial(_draw_gradients, lambda frames: "signal / noise of the task gradient (1)"),
    ),
    ReportFigure(
        "regularizer_share",
        "gradients",
        "Signed share of KL and entropy together in the bucket's step, with its 95 % interval where it has one. In the "
        "expected step noise has no part: near 1, with a narrow interval, such a bucket moves the policy next to "
        "nowhere but towards the regularizers. A bucket is left out where its gradient is no more than noise. In the "
        "sampled step the noise of the task counts as task, so that the share is near 0 whatever the bucket teaches.",
        lambda view: _none_if_empty(gradients.make_share_lines(view.frames.gradients)),
        partial(_draw_gradients, _make_share_label),
    ),
)

AXIS_FIGURES: Sequence[ReportFigure[AxisView]] = (
    DOSE_RESPONSE,
    STOPS,
    *(_make_arm_figure(curve) for curve in CURVES if not curve.only_in_grids),
    RETRIEVAL,
    *GRADIENTS,
)
GRID_FIGURES: Sequence[ReportFigure[GridView]] = (
    *map(_make_heat_map, MEASURES),
    STOPS,
    *map(_make_panel_figure, CURVES),
    RETRIEVAL,
    *GRADIENTS,
)
