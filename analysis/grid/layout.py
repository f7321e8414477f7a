"""Arrange a study whose arms are grid points: its factors and cells, derived from the configurations of its runs.

Two numeric factors, x and y, span the plane of the heat maps. All other factors, such as the filter or the loss, form
the panels, which a reader compares side by side. Each measure is a column of `make_cell_table` and a heat map.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from analysis.data.compare import SCORED_STATUSES, find_failed_stops, require_single_study
from analysis.data.frames import FRAME_NAMES, StudyFrames, list_differing_settings, to_records
from analysis.sweep import series
from trainable.config.aliases import shorten_setting
from trainable.runs.study_record import OPEN_STATUSES

PLANE_SETTINGS = {"actor.kl_loss_coef", "actor.entropy_coeff"}
"""The settings that span the plane whenever a study varies both."""

SWITCH_SETTINGS = {"actor.use_kl_loss": "actor.kl_loss_coef"}
"""Settings that only say whether another setting is above 0; they are not factors."""

IDLE_SETTINGS = {"actor.kl_loss_type": "actor.kl_loss_coef"}
"""Settings without effect while another setting is 0: such a run appears under every value."""

_PART_DIGEST = re.compile(r"(?<=\w)#[0-9a-f]{16}$")

# Runs are averaged over their last quarter of steps, which starts here (see `LATE_MEANS`).
LATE_START = 0.75
# Ordered from the most serious, which is the status that a cell without a scored run shows.
_UNSCORED_STATUSES = ("censored", "failed", "interrupted", *OPEN_STATUSES, "never_ran")


class Measure(NamedTuple):
    """A column of `make_cell_table`, which is shown as a heat map."""

    name: str
    label: str
    """With its unit."""
    caption: str
    """What a cell is."""
    is_log: bool = False
    """Whether the color scale is logarithmic."""
    domain: tuple[float, float] | None = None
    """Of the color scale; None: between the smallest and the largest cell."""


SUCCESS = Measure(
    "success",
    "success at the end (fraction of episodes)",
    "Sampled success on the validation levels: {late}.",
    domain=(0.0, 1.0),
)
"""In the caption, `{late}` stands for the validations that are averaged."""
LATE_MEANS: tuple[Measure, ...] = (
    Measure(
        "entropy",
        "entropy (nats per token)",
        "Entropy of the sampling policy: mean over the last quarter of each run's steps.",
    ),
    Measure(
        "reward_std",
        "reward std in the group (reward)",
        "Standard deviation of the rewards in a group: mean over the last quarter of each run's steps. Near 0, rewards "
        "carry no signal.",
    ),
    Measure(
        "kl_to_reference",
        "KL to the reference (nats)",
        "KL to the reference, as the k3 estimate whatever the form of the loss: mean over the last quarter of each "
        "run's steps. Colors have a log scale. Without a KL loss there is no reference pass, and thus no number.",
        is_log=True,  # it spans orders of magnitude over the coefficients of a grid
    ),
)
"""Step columns that are averaged over the last quarter of each run's steps."""
MEASURES: tuple[Measure, ...] = (SUCCESS, *LATE_MEANS)


@dataclass(frozen=True)
class Grid:
    """The factors of a grid, as dotted settings."""

    x: str
    """Horizontal axis of the plane."""
    y: str
    """Vertical axis of the plane."""
    panels: tuple[str, ...]
    """All other factors."""
    factor_values: dict[str, tuple[Any, ...]]
    """The values of each factor: ascending for x and y, False before True for a switch, else in the order of arms."""

    def format_factor(self, setting: str, value: Any) -> str:
        """Format a label such as `filter 0.8`. A switch is labeled by its name if on, and not labeled if off."""
        if isinstance(value, bool | np.bool_):
            return shorten_setting(setting) if value else ""
        return f"{shorten_setting(setting)} {label_value(value)}"


def label_value(value: Any) -> str:
    """Format a factor's value as a label: 0.001, 0, 6, mse, on, off. A plug-in is shown without its file's hash."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, int | float) else _PART_DIGEST.sub("", str(value))


def find_grid(frames: StudyFrames) -> Grid | None:
    """Find the grid that the arms of a study form, if any.

    A study is a grid if its arms are named by words and differ in at least two numeric settings. An arm named by a
    number means that the study has a single axis. x and y are the coefficients of KL and entropy if both differ;
    otherwise the two numeric settings with the most combinations of values, and among ties the first pair in the
    configuration, with its first setting as y. A dose that the study declares is always x.
    """
    trials = require_single_study(frames).trials
    # In a fork, arms with the same settings differ in the step from which they continue.
    if trials.empty or trials["axis_value"].notna().any() or frames.studies[0].forks is not None:
        return None
    values = select_settings(trials)
    factor_values: dict[str, tuple[Any, ...]] = {}
    numeric_settings = []
    for setting in map(str, values):
        distinct_values = values[setting].dropna().drop_duplicates().to_list()
        is_switch = pd.api.types.is_bool_dtype(values[setting])  # False before True
        factor_values[setting] = tuple(sorted(distinct_values) if is_switch else distinct_values)
        numeric_settings += [setting] * (pd.api.types.is_numeric_dtype(values[setting]) and not is_switch)
    pairs = list(combinations(numeric_settings, 2))
    # Arms that differ in text or switches only, such as PPO and GRPO, do not span a plane.
    if not pairs:
        return None
    dose = frames.studies[0].axis.dose
    y, x = max(
        pairs, key=lambda pair: (dose in pair, set(pair) == PLANE_SETTINGS, len(values[list(pair)].drop_duplicates()))
    )
    y, x = (x, y) if y == dose else (y, x)
    factor_values |= {axis: tuple(sorted(factor_values[axis])) for axis in (x, y)}
    return Grid(x, y, tuple(setting for setting in factor_values if setting not in (x, y)), factor_values)


def select_settings(trials: pd.DataFrame) -> pd.DataFrame:
    """Select the settings in which arms differ, a column each, without the seed and `SWITCH_SETTINGS`."""
    differing = list_differing_settings(trials)
    names = [name for name in differing if SWITCH_SETTINGS.get(name) not in differing]
    return trials[[f"config/{name}" for name in names]].set_axis(names, axis="columns")


def make_member_table(frames: StudyFrames, grid: Grid) -> pd.DataFrame:
    """Make a table with a row per run and panel: run_id, arm, seed, status, each factor, panel, shared, home, measures.

    A run with KL coefficient 0 appears in the panels of all loss types (shared); home marks the panel of its
    configuration. is_failed_stop: see `compare.find_failed_stops`. Measures: `success` at the end (as scored);
    `entropy` (nats), `reward_std` (reward) and `kl_to_reference` (nats) as means over the last quarter of the run's
    steps. They are missing if the run is not scored.
    """
    trials = frames.trials
    table = trials[["run_id", "arm", "seed", "status"]].assign(
        is_failed_stop=find_failed_stops(trials),
        **{setting: trials[f"config/{setting}"] for setting in grid.factor_values},
        success=trials["late_val_success"],
    )
    last_steps = frames.steps.groupby("run_id")["step"].transform("max")
    late_steps = frames.steps[frames.steps["step"] > LATE_START * last_steps].groupby("run_id")
    for measure in LATE_MEANS:
        table[measure.name] = table["run_id"].map(late_steps[measure.name].mean())
    # An unscored run may have logged steps, but its late means would describe an unfinished training.
    table.loc[~table["status"].isin(SCORED_STATUSES), [measure.name for measure in MEASURES]] = float("nan")
    table = table.assign(shared=False, home=True).dropna(subset=list(grid.factor_values))
    for setting, governing_setting in IDLE_SETTINGS.items():
        if setting in grid.panels and governing_setting in grid.factor_values:
            is_idle = table[governing_setting] == 0
            copies = [
                table[is_idle].assign(**{setting: value, "shared": True, "home": table[is_idle][setting] == value})
                for value in grid.factor_values[setting]
            ]
            table = pd.concat([table[~is_idle], *copies])
    # Such as `filter 0.8, loss mse`. No label: all switches are off. A grid without panel factors has one panel.
    labels = ([grid.format_factor(setting, row[setting]) for setting in grid.panels] for row in to_records(table))
    table["panel"] = [", ".join(filter(None, names)) or ("others" if names else "all arms") for names in labels]
    return table.reset_index(drop=True)


def make_panel_curves(frames: StudyFrames, grid: Grid, member_table: pd.DataFrame, column: str) -> pd.DataFrame:
    """Make the curves of a step column in each panel: panel, arm, dash, run_id, seed, status, step, value.

    arm and dash name the x and the y of the run. Rows are in the order of panels, x and y. member_table: from
    `make_member_table`. Step 0 is the policy before training, for columns that have this value.
    """
    rows = _sort_by_panel(
        member_table.sort_values([grid.x, grid.y], kind="stable"), arrange_panels(grid, member_table)[0]
    )
    names = rows[["run_id", "panel"]].assign(
        arm=[grid.format_factor(grid.x, value) for value in rows[grid.x]],
        dash=[grid.format_factor(grid.y, value) for value in rows[grid.y]],
    )
    return names.merge(series.make_curves(frames, column).drop(columns="arm"), on="run_id", sort=False)


def _sort_by_panel(rows: pd.DataFrame, panels: Iterable[str]) -> pd.DataFrame:
    order = {panel: place for place, panel in enumerate(panels)}
    return rows.sort_values("panel", key=lambda names: names.map(order), kind="stable")


def list_panels(grid: Grid, member_table: pd.DataFrame) -> pd.DataFrame:
    """List the panels with at least one run, in the order of the factor values: a row each with name and factors.

    member_table: from `make_member_table`.
    """
    panel_rows = member_table[["panel", *grid.panels]].drop_duplicates()
    ranks = {name: {value: place for place, value in enumerate(grid.factor_values[name])} for name in grid.panels}
    if ranks:  # a grid of two factors has a single panel and no key to sort by
        panel_rows = panel_rows.sort_values(list(ranks), key=lambda column: column.map(ranks[str(column.name)]))
    return panel_rows.reset_index(drop=True)


def arrange_panels(grid: Grid, member_table: pd.DataFrame) -> tuple[list[str], int]:
    """Return the panels in the order in which they fill the rows of a figure, and how many a row has.

    The values of the first text factor, such as the type of loss, stand side by side. Without one, or if it is the only
    factor, a row has three.
    """
    rows = list_panels(grid, member_table)
    words = [name for name in grid.panels if any(isinstance(value, str) for value in grid.factor_values[name])]
    if not words or len(grid.panels) < 2:
        return rows["panel"].to_list(), 3
    others = [name for name in grid.panels if name != words[0]]
    rows = rows.assign(place=rows.groupby(others, sort=False).ngroup()).sort_values("place", kind="stable")
    return rows["panel"].to_list(), len(grid.factor_values[words[0]])


def make_cell_table(grid: Grid, member_table: pd.DataFrame) -> pd.DataFrame:
    """Summarize each panel and grid point that has a run in a row. member_table: from `make_member_table`.

    Columns: panel, its factors, x and y (values), arms (names), runs, scored, early_stopped, shared, state, and for
    each measure its mean over scored runs, std (ddof 1; missing below two runs), minimum and maximum. state is
    "stopped" if a rule stopped a scored run as a failure, otherwise "scored"; without a scored run it is the most
    serious status.
    """
    # concern: position of an unscored status (NaN for a scored run), so that the minimum over a cell is its most
    # serious one.
    ranked_rows = member_table.assign(
        scored=member_table["status"].isin(SCORED_STATUSES),
        concern=member_table["status"].map({status: place for place, status in enumerate(_UNSCORED_STATUSES)}),
    )
    points = ranked_rows.groupby(["panel", grid.y, grid.x], sort=True)
    scored, early_stopped = points["scored"].sum(), points["is_failed_stop"].sum()
    unscored_states = points["concern"].min().map(dict(enumerate(_UNSCORED_STATUSES)))
    cells = points[[*grid.panels, "shared"]].first()
    cells = cells.assign(
        arms=points["arm"].agg(lambda arms: ", ".join(dict.fromkeys(arms))),
        runs=points.size(),
        scored=scored,
        early_stopped=early_stopped,
        state=unscored_states.mask(scored > 0, "scored").mask(early_stopped > 0, "stopped"),
    )
    for name in (measure.name for measure in MEASURES):
        numbers = points[name].agg(["mean", "std", "min", "max"])
        cells[[name, f"{name}_std", f"{name}_low", f"{name}_high"]] = numbers
    cells = cells.reset_index().rename(columns={grid.x: "x", grid.y: "y"}).astype({"x": float, "y": float})
    return _sort_by_panel(cells, list_panels(grid, member_table)["panel"]).reset_index(drop=True)


def make_arm_labels(frames: StudyFrames, grid: Grid) -> dict[str, str]:
    """Name each arm by its point in the grid: `filter 0.8 · KL 0.01 · entropy 0`.

    If several arms share a point, their original names are added in parentheses.
    """
    trials = frames.trials.drop_duplicates("arm")
    columns = {f"config/{setting}": setting for setting in grid.factor_values}
    labels = {}
    for row in to_records(trials[["arm", *columns]].rename(columns=columns)):
        # With a KL coefficient of 0 the form of the loss has no effect, so the name leaves it out.
        idle_settings = {setting for setting, other in IDLE_SETTINGS.items() if other in row and row[other] == 0}
        settings = [setting for setting in (*grid.panels, grid.x, grid.y) if setting not in idle_settings]
        labels[row["arm"]] = " · ".join(filter(None, (grid.format_factor(name, row[name]) for name in settings)))
    all_labels = list(labels.values())
    return {arm: text if all_labels.count(text) == 1 else f"{text} ({arm})" for arm, text in labels.items()}


def name_arms(frames: StudyFrames) -> StudyFrames:
    """Rename arms that are numbers so that they include the name of their setting: `KL 0.1`.

    Arms that are words, such as nofilter, keep their names.
    """
    return rename_arms(frames, make_axis_labels(frames))


def make_axis_labels(frames: StudyFrames) -> dict[str, str]:
    """Name each arm that is a number with the short name of the axis setting."""
    setting = shorten_setting(require_single_study(frames).studies[0].axis.setting)
    numeric_arms = frames.trials.loc[frames.trials["axis_value"].notna(), "arm"].unique()
    return {str(arm): f"{setting} {arm}" for arm in numeric_arms} if setting else {}


def rename_arms(frames: StudyFrames, labels: Mapping[str, str]) -> StudyFrames:
    """Rename arms by `labels`, in all frames and in study.json."""
    if not labels:
        return frames

    def rename(arm: str) -> str:
        return labels.get(arm, arm)

    renamed_frames = {
        name: frame.assign(arm=frame["arm"].map(labels).fillna(frame["arm"]))
        for name in FRAME_NAMES
        for frame in [getattr(frames, name)]
    }
    study = frames.studies[0]
    renamed_study = replace(
        study,
        baseline=rename(study.baseline),
        axis=replace(study.axis, values=tuple(map(rename, study.axis.values))),
        extra_seeds={rename(arm): seeds for arm, seeds in study.extra_seeds.items()},
        contrasts=tuple(
            replace(contrast, pairs=tuple((rename(first), rename(second)) for first, second in contrast.pairs))
            for contrast in study.contrasts
        ),
    )
    return replace(frames, **renamed_frames, study=renamed_study)
