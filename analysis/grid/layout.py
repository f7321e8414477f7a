"""A study whose arms are the points of a grid: its factors, as the runs' configurations have them, and its cells.

A run belongs to a point: two numbers that span the plane of a heat map (x and y), and a panel, which is what else the
arms differ in. Panels say what a reader compares: a filter beside another, a loss beside another.
"""

from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd

from analysis.data.compare import SCORED, outcomes, single
from analysis.data.frames import FRAMES, StudyFrames, records
from analysis.grid.measures import LATE_MEANS, MEASURES
from analysis.sweep import series

NAMES = {
    "actor.kl_loss_coef": "KL",
    "actor.entropy_coeff": "entropy",
    "actor.kl_loss_type": "loss",
    "filter.rollout_filter_value": "filter",
    "algorithm.zero_task_advantage": "zero task advantage",
}
"""Short names of settings in labels; another setting is called by the last part of its name."""

PLANE = {"actor.kl_loss_coef", "actor.entropy_coeff"}
"""The numbers of a plane that is drawn wherever a study has it."""

SWITCHES = {"actor.use_kl_loss": "actor.kl_loss_coef"}
"""A setting that only says whether another is above 0, and is thus no factor of its own."""

IDLE = {"actor.kl_loss_type": "actor.kl_loss_coef"}
"""A setting without effect where another is 0: such a run belongs to every value of it."""

LATE = 0.75
_UNSCORED = ("failed", "interrupted", "running", "never_ran")


@dataclass(frozen=True)
class Grid:
    """The factors of a grid: dotted settings. x, y: the plane. panels: what else differs. levels: values in order."""

    x: str
    y: str
    panels: tuple[str, ...]
    levels: dict[str, tuple[Any, ...]]

    def label(self, setting: str, value: Any) -> str:
        """A value of a factor in words: `filter 0.8`; a switch has its name where it is on, and nothing where off."""
        if isinstance(value, bool | np.bool_):
            return name(setting) if value else ""
        return f"{name(setting)} {level(value)}"

    def panel(self, row: dict[str, Any]) -> str:
        """The panel of a run in words, `filter 0.8, loss mse`; row: its settings."""
        parts = [self.label(setting, row[setting]) for setting in self.panels]
        return ", ".join(part for part in parts if part) or "others"


def name(setting: str) -> str:
    """A setting's short name."""
    return NAMES.get(setting, setting.rpartition(".")[2])


def level(value: Any) -> str:
    """A factor's value as a label: 0.001, 0, 6, mse, on, off."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, int | float) else str(value)


def find(frames: StudyFrames) -> Grid | None:
    """The grid that the study's arms form, or None: arms with words for names that differ in two numbers or more.

    Where an arm's name is a number the study has one axis. x and y are the coefficients of KL and entropy where both
    differ, else the two numbers with the most combinations; of equals the first in the configuration, where y comes
    before x.
    """
    trials = single(frames).trials
    if trials.empty or trials["axis_value"].notna().any():
        return None
    values = _settings(trials)
    found = {str(setting): _levels(values[setting]) for setting in values}
    numbers = [setting for setting in found if _is_number(values[setting])]
    pairs = list(combinations(numbers, 2))
    if not pairs:
        return None
    y, x = max(pairs, key=lambda pair: (set(pair) == PLANE, len(values[list(pair)].drop_duplicates())))
    found |= {axis: tuple(sorted(found[axis])) for axis in (x, y)}
    return Grid(x, y, tuple(setting for setting in found if setting not in (x, y)), found)


def _settings(trials: pd.DataFrame) -> pd.DataFrame:
    """The settings in which arms differ, a column each, without seeds and switches."""
    columns = {name: name.removeprefix("config/") for name in map(str, trials.columns) if name.startswith("config/")}
    known = trials[list(columns)].rename(columns=columns)
    differing = [name for name in columns.values() if name != "seed" and known[name].astype(str).nunique() > 1]
    return known[[setting for setting in differing if SWITCHES.get(setting) not in differing]]


def _is_number(values: Any) -> bool:
    return pd.api.types.is_numeric_dtype(values) and not pd.api.types.is_bool_dtype(values)


def _levels(values: Any) -> tuple[Any, ...]:
    """Values of a factor: truths off first, all else in the order of the study's arms."""
    found = values.dropna().drop_duplicates().to_list()
    return tuple(sorted(found) if pd.api.types.is_bool_dtype(values) else found)


def members(frames: StudyFrames, grid: Grid) -> pd.DataFrame:
    """One row a run and panel of its own: run_id, arm, seed, status, each factor, panel, shared, home, and measures.

    shared: the run is shown in several panels, as it has no KL loss whose type could matter; home: in the one that its
    configuration names. Measures: `success` at the
    end (as scored), and `entropy` (nats), `reward_std` (reward), `kl_to_reference` (nats) as means over the last
    quarter of the run's own steps; missing where the run is not scored.
    """
    trials = frames.trials
    table = trials[["run_id", "arm", "seed", "status"]].copy()
    for setting in grid.levels:
        table[setting] = trials[f"config/{setting}"]
    table["success"] = outcomes(trials)
    for measure in LATE_MEANS:
        table[measure.name] = table["run_id"].map(_late_means(frames, measure.name))
    table.loc[~table["status"].isin(SCORED), [measure.name for measure in MEASURES]] = float("nan")
    table = table.assign(shared=False, home=True).dropna(subset=list(grid.levels))
    for setting, other in IDLE.items():
        if setting in grid.panels and other in grid.levels:
            table = _in_every_panel(table, setting, other, grid)
    table["panel"] = [grid.panel(row) for row in records(table)]
    return table.reset_index(drop=True)


def _late_means(frames: StudyFrames, column: str) -> "pd.Series[float]":
    """Mean of a step column over the last quarter of each run's steps (index run_id)."""
    steps = frames.steps[["run_id", "step", column]]
    last = steps.groupby("run_id")["step"].transform("max")
    means: pd.Series[float] = steps[steps["step"] > LATE * last].groupby("run_id")[column].mean()
    return means


def _in_every_panel(table: pd.DataFrame, setting: str, other: str, grid: Grid) -> pd.DataFrame:
    """Rows whose `setting` is idle, as `other` is 0, once for each of its values."""
    idle = table[other] == 0
    own = table.loc[idle, setting]
    copies = [table[idle].assign(**{setting: value, "shared": True, "home": own == value})
              for value in grid.levels[setting]]  # fmt: skip
    return pd.concat([table[~idle], *copies])


def curves(frames: StudyFrames, grid: Grid, table: pd.DataFrame, column: str) -> pd.DataFrame:
    """A step column of every run in each of its panels: panel, its factors, x, run_id, status, step, value.

    table: `members`. Step 0 is the policy before training, where the column has it.
    """
    places = table[["run_id", "panel", *grid.panels, grid.x]].rename(columns={grid.x: "x"})
    return places.merge(series.curves(frames, column), on="run_id", sort=False)


def panels(grid: Grid, table: pd.DataFrame) -> pd.DataFrame:
    """The panels that have a run, in the order of the factors' values: panel, and its factors. table: `members`."""
    found = table[["panel", *grid.panels]].drop_duplicates()
    rank = {setting: {value: place for place, value in enumerate(grid.levels[setting])} for setting in grid.panels}
    keys = pd.DataFrame({setting: found[setting].map(rank[setting]) for setting in grid.panels}, index=found.index)
    order = keys.sort_values(list(grid.panels)).index if grid.panels else found.index
    return found.loc[order].reset_index(drop=True)


def cells(grid: Grid, table: pd.DataFrame) -> pd.DataFrame:
    """One row a panel and point that has a run. table: `members`.

    Columns: panel, its factors, x and y (values), arms (names), runs, scored, early_stopped, shared, state, and of each
    measure the mean over scored runs, the std (ddof 1; missing below two), the least and the largest. state: "scored",
    "stopped" where a rule stopped a scored run, or without a scored run the status of most concern.
    """
    ranked = table.assign(
        scored=table["status"].isin(SCORED),
        early_stopped=table["status"] == "early_stopped",
        concern=table["status"].map({status: place for place, status in enumerate(_UNSCORED)}),
    )
    points = ranked.groupby(["panel", grid.y, grid.x], sort=True)
    found = points[[*grid.panels, "shared"]].first()
    found["arms"] = points["arm"].agg(lambda arms: ", ".join(dict.fromkeys(arms)))
    found = found.assign(runs=points.size(), **{name: points[name].sum() for name in ("scored", "early_stopped")})
    words = points["concern"].min().map(dict(enumerate(_UNSCORED)))
    found["state"] = words.mask(found["scored"] > 0, "scored").mask(found["early_stopped"] > 0, "stopped")
    for name in (measure.name for measure in MEASURES):
        found[[name, f"{name}_std", f"{name}_low", f"{name}_high"]] = points[name].agg(["mean", "std", "min", "max"])
    order = {panel: place for place, panel in enumerate(panels(grid, table)["panel"])}
    found = found.reset_index().rename(columns={grid.x: "x", grid.y: "y"}).astype({"x": float, "y": float})
    return found.sort_values("panel", key=lambda names: names.map(order), kind="stable").reset_index(drop=True)


def arm_labels(frames: StudyFrames, grid: Grid) -> dict[str, str]:
    """A short name for each arm, from its place in the grid: `filter 0.8 · KL 0.01 · entropy 0`.

    Arms of one point, which differ in nothing, keep their own names beside it.
    """
    trials = frames.trials.drop_duplicates("arm")
    columns = {f"config/{setting}": setting for setting in grid.levels}
    rows = records(trials[["arm", *columns]].rename(columns=columns))
    found = {row["arm"]: _arm_label(grid, row) for row in rows}
    taken = list(found.values())
    return {arm: text if taken.count(text) == 1 else f"{text} ({arm})" for arm, text in found.items()}


def _arm_label(grid: Grid, row: dict[str, Any]) -> str:
    idle = {setting for setting, other in IDLE.items() if other in row and row[other] == 0}
    parts = [grid.label(setting, row[setting]) for setting in grid.levels if setting not in idle]
    order = [grid.label(setting, row[setting]) for setting in (*grid.panels, grid.x, grid.y)]
    return " · ".join(part for part in order if part and part in parts)


def renamed(frames: StudyFrames, labels: dict[str, str]) -> StudyFrames:
    """The frames with each arm called by its label, also where study.json names arms."""
    parts = {part: getattr(frames, part) for part in FRAMES}
    named = {part: frame.assign(arm=frame["arm"].map(labels).fillna(frame["arm"])) for part, frame in parts.items()}
    study = dict(frames.studies[0])
    study["baseline"] = labels.get(study.get("baseline", ""), study.get("baseline", ""))
    return replace(frames, **named, study=study)
