"""The figures in the reports of PPO studies, each declared once.

To show another column over training, add a `Curve` to `CURVES`: it appears in reports of one-axis and grid studies.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from analysis.data.frames import StudyFrames
from analysis.gradients import plots as gradient_plots
from analysis.gradients import tables as gradients
from analysis.grid import layout
from analysis.grid import page as grid_page
from analysis.grid import plots as grid_plots
from analysis.grid.layout import MEASURES, Measure
from analysis.html.figures import Gallery, ReportFigure
from analysis.report import charts
from analysis.report.results import SweepResults
from analysis.search import page as search_page
from analysis.search.page import SearchResults
from analysis.sweep import findings, plots, series, tables
from analysis.sweep.collapse import compute_survival
from trainable.config.aliases import shorten_setting


@dataclass(frozen=True)
class AxisView:
    """A study with one axis, and the tables that several figures share. results: of a study with at least one run."""

    results: SweepResults

    @property
    def frames(self) -> StudyFrames:
        """The study."""
        return self.results.frames

    @property
    def search(self) -> SearchResults | None:
        """The search whose points are the arms, if it is one."""
        return self.results.search

    @property
    def axis_name(self) -> str:
        """The setting that the arms differ in."""
        return self.frames.studies[0].axis.setting

    @cached_property
    def dose_response(self) -> pd.DataFrame:
        """From `tables.make_dose_response`: one row per arm."""
        return tables.make_dose_response(self.frames)

    @cached_property
    def arm_colors(self) -> dict[str, str]:
        """The color of each arm, in the order of the axis; words such as nofilter have separate colors."""
        return plots.make_arm_colors(
            self.dose_response["arm"].to_list(), self.dose_response.loc[self.dose_response["is_word"], "arm"].to_list()
        )

    @property
    def line_frames(self) -> StudyFrames:
        """The frames whose arms are the lines of figures with one line for several runs."""
        return self.frames

    @property
    def line_colors(self) -> dict[str, str]:
        """The color of each line."""
        return self.arm_colors


@dataclass(frozen=True)
class GridView:
    """A study whose arms are the points of a grid, and the tables that several figures share."""

    results: SweepResults
    grid: layout.Grid

    @property
    def frames(self) -> StudyFrames:
        """The study."""
        return self.results.frames

    @cached_property
    def members(self) -> pd.DataFrame:
        """From `layout.make_member_table`: one row per run and panel."""
        return layout.make_member_table(self.frames, self.grid)

    @cached_property
    def cells(self) -> pd.DataFrame:
        """From `layout.make_cell_table`: one row per panel and point."""
        return layout.make_cell_table(self.grid, self.members)

    @cached_property
    def arm_colors(self) -> dict[str, str]:
        """The color of each arm."""
        return _make_arm_colors(self.frames)

    @cached_property
    def line_frames(self) -> StudyFrames:
        """The frames with panels as arms, for one line per panel: one line per point would be hundreds of lines."""
        return grid_page.group_arms_by_panel(self.frames, self.grid)

    @cached_property
    def line_colors(self) -> dict[str, str]:
        """The color of each panel."""
        return _make_arm_colors(self.line_frames)


View = AxisView | GridView


def _make_arm_colors(frames: StudyFrames) -> dict[str, str]:
    return plots.make_arm_colors(list(dict.fromkeys(frames.trials["arm"])))


def make_gallery(results: SweepResults) -> Gallery[Any]:
    """The figures of a one-axis or grid study; none if it has no run."""
    if results.search:
        return Gallery((*search_page.FIGURES, *POINT_FIGURES), AxisView(results))
    if results.grid:
        return Gallery(GRID_FIGURES, GridView(results, results.grid))
    return Gallery(() if results.frames.trials.empty else AXIS_FIGURES, AxisView(results))


@dataclass(frozen=True)
class Curve:
    """A figure of one step column over training, with a line per run."""

    name: str
    section: str
    column: str
    """A step column."""
    label: str
    """Of the y axis, with a unit."""
    caption: str
    """`name`, `section`, `caption`: as in `ReportFigure`."""
    explains_marks: bool = False
    """Whether the caption explains lines and marks. Only the first figure of a page does."""
    carry_forward: bool = False
    """Whether a stopped run keeps its last value in a mean over runs."""
    is_uninformative: Callable[[StudyFrames], bool] = lambda frames: False
    """Returns True if the column has nothing to show in these frames, so that the figure is left out."""
    only_in_grids: bool = False
    """Leave the figure out of one-axis reports."""


def _has_no_trees(frames: StudyFrames) -> bool:
    return bool(frames.steps["val_children"].isna().all())


CURVES: tuple[Curve, ...] = (
    Curve(
        "validation_curves",
        "curves",
        "val_success",
        "validation success (fraction)",
        "Sampled validation success of every run.",
        explains_marks=True,
        carry_forward=True,
    ),
    Curve(
        "val_reward",
        "curves",
        "val_reward",
        "mean reward of a validation (reward)",
        "Mean reward of the trees of each sampled validation. A tree succeeds from a reward of .9 on.",
        is_uninformative=_has_no_trees,
    ),
    Curve(
        "val_children",
        "curves",
        "val_children",
        "children per tree (children)",
        "Mean number of children that the code of a root asked in each sampled validation.",
        is_uninformative=_has_no_trees,
    ),
    Curve(
        "reward_std",
        "stops",
        "reward_std",
        "reward std in the group (reward)",
        "Standard deviation of the rewards in a group, averaged over groups. Near zero, all rollouts of a group get "
        "the same reward, so rewards carry no signal.",
    ),
    Curve(
        "entropy",
        "stops",
        "entropy",
        "entropy (nats per token)",
        "Entropy of the sampling policy, averaged over tokens.",
    ),
    Curve(
        "val_kl",
        "stops",
        "val_kl_to_reference",
        "KL to the reference (nats per token)",
        "KL to the reference over the sampled tokens of each validation, also in arms without a KL term. The reference "
        "is the policy before training, or the model at model.reference_path. It is the k3 estimate, at most 10 per "
        "token.",
    ),
    Curve(
        "reference_kl",
        "stops",
        "kl_to_reference",
        "KL to the reference (nats)",
        "KL to the reference at the trained tokens, before each update. It is the k3 estimate, whatever the form of "
        "the loss. Runs without a reference pass have no curve.",
        only_in_grids=True,
    ),
    Curve(
        "kept_groups",
        "stops",
        "groups_kept",
        "groups trained on (groups)",
        "Number of collected groups that the filter kept.",
        is_uninformative=lambda frames: bool((frames.steps["kept_ratio"].dropna() == 1).all()),
    ),
)


def _make_arm_figure(curve: Curve) -> ReportFigure[AxisView]:
    """Declare the figure of `curve` with one panel per arm and the mean over its runs."""

    def make_tables(view: AxisView) -> tuple[pd.DataFrame, pd.DataFrame] | None:
        if curve.is_uninformative(view.frames):
            return None
        runs = series.make_curves(view.frames, curve.column)
        means = series.compute_mean_curves(runs, carry_forward=curve.carry_forward)
        return (runs, means) if len(runs) else None

    marks_caption = (
        " Step 0 is the policy before training. Thin lines are single runs, and a thick line is their mean, in which "
        "a stopped run keeps its last value. A cross marks the end of a run that a rule stopped, and a ring the end "
        "of any other incomplete run."
    )
    return ReportFigure(
        curve.name,
        curve.section,
        curve.caption + marks_caption * curve.explains_marks,
        make_tables,
        lambda curves, view: plots.draw_curves(curves[0], curves[1], view.arm_colors, curve.label),
        lambda curves, view: (
            charts.chart_curves(curves[0], curves[1], view.arm_colors, curve.label) if charts.fits(curves[0]) else None
        ),
        describe=lambda curves, view: findings.describe_curves(curves[0], curve.label),
        picture_note="One panel per arm; runs of other arms are gray." * curve.explains_marks,
    )


def _make_panel_figure(curve: Curve) -> ReportFigure[GridView]:
    """Declare the figure of `curve` with the panels of the grid and a thin line per run."""

    def make_caption(view: GridView) -> str:
        marks_caption = (
            f" One thin line per run, colored by {shorten_setting(view.grid.x)}. Step 0 is the policy before "
            "training. A cross marks the end of a run that a rule stopped, and a ring marks the end of any other "
            "incomplete run."
        )
        return curve.caption + marks_caption * curve.explains_marks

    return ReportFigure(
        curve.name,
        curve.section,
        make_caption,
        lambda view: (
            None
            if curve.is_uninformative(view.frames)
            else _none_if_empty(layout.make_panel_curves(view.frames, view.grid, view.members, curve.column))
        ),
        lambda table, view: grid_plots.draw_curves(view.grid, table, curve.label),
        describe=lambda table, view: grid_page.describe_curves(view.grid, table, curve.label),
    )


def _make_heat_map(measure: Measure) -> ReportFigure[GridView]:
    return ReportFigure(
        f"grid_{measure.name}",
        "grid",
        measure.caption,
        lambda view: view.cells if view.cells[measure.name].notna().any() else None,
        lambda table, view: grid_plots.draw_heat_maps(view.grid, table, measure.name, measure.label, log=measure.log),
        describe=lambda table, view: grid_page.describe_cells(view.grid, table, measure),
    )


def _none_if_empty(table: pd.DataFrame) -> pd.DataFrame | None:
    return table if len(table) else None


def _make_dose_caption(view: AxisView) -> str:
    basis = findings.describe_interval_basis(view.dose_response)
    intervals = f"with 95 % intervals ({basis})" if basis else "without intervals"
    stops = (
        "A vermilion cross means that a rule stopped all scored runs of the arm as failures, and a vermilion edge that "
        "it stopped some of them. "
        if view.dose_response["early_stopped"].any()
        else ""
    )
    measured = view.dose_response.notna().any()
    marks = [
        f"Circles show sampled validation success at the end of training, {intervals}",
        *["triangles greedy validation success"] * bool(measured["greedy"]),
        *["squares sampled success on the test levels"] * bool(measured["test"]),
    ]
    lines = [*["dashed sampled"] * bool(measured["base"]), *["dotted greedy"] * bool(measured["base_greedy"])]
    lines_text = f"Horizontal lines show the policy before training: {', '.join(lines)}." if lines else ""
    return f"{', '.join(marks[:-1])}{', and ' if len(marks) > 1 else ''}{marks[-1]}. {stops}{lines_text}".strip()


def _select_collapse_onsets(view: View) -> pd.DataFrame | None:
    onsets = view.results.onsets
    onsets = onsets[onsets["is_collapse"].astype(bool)]
    return onsets if onsets["onset"].notna().any() else None


def _make_survival_table(view: View) -> pd.DataFrame | None:
    table = compute_survival(view.line_frames)
    return table if (table["collapsed"] > 0).any() else None


def _draw_gradients(table: pd.DataFrame, view: View, label: str) -> Figure:
    """Draw the lines of gradient analyses. With one arm, each line has its own color.

    With several, a line has the color of its arm. The probes of an arm are lighter shades of it.
    """
    lines = list(dict.fromkeys(zip(table["line"], table["arm"], strict=True)))
    if view.frames.gradients["arm"].nunique() <= 1:
        return gradient_plots.draw_lines(table, plots.make_arm_colors([line for line, _ in lines]), label)
    # The line of an arm has the arm's name; every other line of the arm is a probe.
    probes = {arm: [line for line, line_arm in lines if line_arm == arm != line] for _, arm in lines}
    # n probes get the white fractions 1/(n+2) to n/(n+2): lighter than the arm's own line, and never quite white.
    colors = {
        line: plots.lighten_color(
            view.arm_colors[arm], 0 if line == arm else (1 + probes[arm].index(line)) / (2 + len(probes[arm]))
        )
        for line, arm in lines
    }
    return gradient_plots.draw_lines(table, colors, label)


def _make_share_label(frames: StudyFrames) -> str:
    column = gradients.choose_share_column(gradients.select_report_lines(frames.gradients))
    return f"KL + entropy:\n{gradient_plots.SHARE_LABELS[column]}"


EDGES: ReportFigure[View] = ReportFigure(
    "edge",
    "edge",
    "Upper panel: fraction of runs that collapsed at each dose, with Wilson's 95 % intervals. Middle panel: the edge "
    "of each line (circle), at which half of its runs collapse, with its 95 % interval; an arrow means that the runs "
    "do not bound it on that side. The pale bar is the safe band. Lower panel: mean success at the end.",
    lambda view: view.results.edge_tables or None,
    lambda edge_tables, view: grid_plots.draw_edges(
        edge_tables["edge_doses"], edge_tables["edge"], shorten_setting(view.frames.studies[0].axis.dose)
    ),
)
DOSE_RESPONSE: ReportFigure[AxisView] = ReportFigure(
    "dose_response",
    "dose-response",
    _make_dose_caption,
    lambda view: view.dose_response if view.dose_response["success"].notna().any() else None,
    lambda table, view: plots.draw_dose_response(table, tables.make_run_outcomes(view.frames), view.axis_name),
    lambda table, view: (
        charts.chart_dose_response(table, tables.make_run_outcomes(view.frames), view.arm_colors, view.axis_name)
        if charts.fits(table)
        else None
    ),
)
SURVIVAL: ReportFigure[View] = ReportFigure(
    "survival",
    "collapse",
    "Fraction of runs that have not collapsed yet, by training step (Kaplan-Meier estimate). A run that failed or was "
    "interrupted counts up to its last step.",
    _make_survival_table,
    lambda table, view: plots.draw_survival(table, view.line_colors),
    lambda table, view: charts.chart_survival(table, view.line_colors) if charts.fits(table) else None,
    describe=lambda table, view: findings.describe_survivors(table),
)
ONSETS: ReportFigure[View] = ReportFigure(
    "onsets",
    "order",
    "When each symptom began, in every run that collapsed: a point is the onset of the change, a thin line its 95 % "
    "interval, and a bar the median over runs. Symptoms without a change are left out.",
    _select_collapse_onsets,
    lambda table, view: plots.draw_onsets(table, view.arm_colors),
)
RETRIEVAL: ReportFigure[View] = ReportFigure(
    "retrieval",
    "retrieval",
    "Given a thought, can one tell which level it was written for? Retrieval is the fraction of sampled thoughts that "
    "the policy finds more likely after their own prompt than after every other prompt. The dashed line shows the "
    "fraction that guessing would reach. Each arm is one line, the mean of its runs. If entropy stays high while "
    "retrieval falls to guessing, thoughts vary but no longer depend on the level.",
    lambda view: _none_if_empty(series.make_arm_lines(view.line_frames)),
    lambda table, view: plots.draw_arm_lines(table, view.line_colors),
    describe=lambda table, view: findings.describe_retrieval(table),
)
GRADIENTS: Sequence[ReportFigure[View]] = (
    ReportFigure(
        "gradient_signal",
        "gradients",
        "Signal-to-noise ratio of the task gradient in each bucket. The 95 % interval is over folds of prompts; with "
        "fewer than 3 folds there is none. At 0, the whole gradient of the bucket may be noise. With one arm, each "
        "color is a step. With several arms, each color is an arm, at the last analysis of its runs. Each run has its "
        "own curve. Curves of probes (analyses of checkpoints) are dashed.",
        lambda view: _none_if_empty(gradients.make_signal_lines(view.frames.gradients)),
        lambda table, view: _draw_gradients(table, view, "signal / noise of the task gradient (1)"),
        describe=lambda table, view: gradient_plots.describe_buckets(table, "the ratio"),
    ),
    ReportFigure(
        "regularizer_share",
        "gradients",
        "Signed share of the KL and entropy terms together in the gradient step of the bucket, with its 95 % interval "
        "if there is one. The label of the axis says which step is meant. The expected step excludes noise: if its "
        "share is near 1 with a narrow interval, the bucket trains the policy almost only on the regularizers. Buckets "
        "whose gradient is not distinguishable from noise are left out. The sampled step includes the noise of the "
        "task, which is large, so its share is near 0 whatever the bucket teaches.",
        lambda view: _none_if_empty(gradients.make_share_lines(view.frames.gradients)),
        lambda table, view: _draw_gradients(table, view, _make_share_label(view.frames)),
        describe=lambda table, view: gradient_plots.describe_buckets(table, "the share"),
    ),
)

AXIS_FIGURES: Sequence[ReportFigure[AxisView]] = (
    EDGES,
    DOSE_RESPONSE,
    SURVIVAL,
    ONSETS,
    *(_make_arm_figure(curve) for curve in CURVES if not curve.only_in_grids),
    RETRIEVAL,
    *GRADIENTS,
)
POINT_FIGURES: Sequence[ReportFigure[AxisView]] = (ONSETS, _make_arm_figure(CURVES[0]))
"""The figures that are drawn for each point of a search: the others would have a panel or a line for each of many."""

GRID_FIGURES: Sequence[ReportFigure[GridView]] = (
    EDGES,
    *map(_make_heat_map, MEASURES),
    SURVIVAL,
    ONSETS,
    *map(_make_panel_figure, CURVES),
    RETRIEVAL,
    *GRADIENTS,
)
