"""Tables of a toy study: statistics of arms, differences from the baseline, mean curves.

Every number of an arm is over its scored runs: those that completed, and those that a rule stopped, with their last
row. The standard error is the standard deviation (ddof 1) divided by the root of n.
"""

import math
from collections.abc import Iterable
from itertools import combinations, product
from pkgutil import resolve_name
from typing import Any

import pandas as pd

from analysis.data.compare import (
    SCORED_STATUSES,
    TEST_COLUMNS,
    add_adjusted_p_values,
    collect_outcomes,
    compare_with_baseline,
    get_margin,
    list_arms,
    require_single_study,
    select_runs,
)
from analysis.data.frames import StudyFrames, to_records
from analysis.data.schemas import Row
from analysis.sweep.series import make_curves
from analysis.sweep.verdicts import name_verdict
from sandboxes.toys.published.reproduction import sample_std
from sandboxes.toys.study import Description, Panel
from trainable.runs.records import STATUSES
from trainable.runs.study_record import OPEN_STATUSES

COLUMN_ORDER = ("late_", "final_", "last_", "switch_", "error_", "first_step_", "mean_", "log10_")
"""How the names of the trial columns of a report begin, in the order in which it lists them."""


def get_description(frames: StudyFrames) -> Description:
    """What the report says of the family of the study in `frames`."""
    (family,) = frames.families
    description: Description = resolve_name(family.description)
    return description


def list_measured_columns(frames: StudyFrames) -> list[str]:
    """The trial columns of the family that have a value in some run, in the order of `COLUMN_ORDER`."""
    (family,) = frames.families
    names = [
        column.name for prefix in COLUMN_ORDER for column in family.trial_columns if column.name.startswith(prefix)
    ]
    return [name for name in names if frames.trials[name].notna().any()]


def select_panels(frames: StudyFrames) -> tuple[Panel, ...]:
    """The panels of the study for which at least one run has a value."""
    description = get_description(require_single_study(frames))
    study_panels = description.study_panels.get(frames.studies[0].name, description.panels)
    return tuple(panel for panel in study_panels if frames.steps[panel.column].notna().any())


def compute_arm_statistics(frames: StudyFrames) -> pd.DataFrame:
    """One row per measured trial column and arm, in their order: statistics over the arm's scored runs.

    missing_seeds: the seeds of scored runs without a value, such as those that never reach a step.
    """
    rows = []
    for name, arm in product(list_measured_columns(frames), list_arms(frames)):
        runs = select_runs(frames, arm, scored_only=True)
        values = runs[name].dropna().to_numpy(dtype=float)
        mean, std = float(values.mean()) if len(values) else math.nan, sample_std(values)
        missing_seeds = ", ".join(map(str, runs.loc[runs[name].isna(), "seed"]))
        rows.append((arm, name, mean, std / math.sqrt(len(values) or 1), std, len(values), len(runs), missing_seeds))
    names = ["arm", "column", "mean", "standard_error", "standard_deviation", "n", "scored_runs", "missing_seeds"]
    return pd.DataFrame(rows, columns=names)


def compute_differences(frames: StudyFrames) -> pd.DataFrame:
    """One row per outcome and arm other than the baseline: arm minus baseline, with its interval.

    The noise is that of all arms of the study (`analysis.stats.noise`), and `basis` says what the interval is over.
    p_holm and p_equal_holm are corrected over the arms for the primary outcome, and over arms and columns together for
    the others. First steps are not compared, because runs that never reach one have no number.
    """
    (study,), (family,) = require_single_study(frames).studies, frames.families
    baseline, arms = str(study.baseline), list_arms(frames)
    rows = []
    columns = [name for name in (family.primary_column, *family.secondary_columns) if frames.trials[name].notna().any()]
    for name in columns if baseline in arms else []:
        outcomes, margin = collect_outcomes(frames, name), get_margin(study, name)
        for arm in [arm for arm in arms if arm != baseline]:
            row = compare_with_baseline(outcomes, arm, baseline, margin)
            rows.append({"arm": arm, "column": name, "baseline": baseline, **row, "n": row["seeds"]})
    table = pd.DataFrame(rows, columns=["arm", "column", "baseline", *TEST_COLUMNS, "n", "basis"])
    table = add_adjusted_p_values(table, family.primary_column)
    return table.assign(verdict=[name_verdict(row, family) for row in to_records(table)])


def compute_mean_curves(frames: StudyFrames, column: str) -> pd.DataFrame:
    """Mean curve of each arm with its standard error: arm, step, value, standard_error (NaN for one run), runs.

    The mean is over scored runs, at the steps at which all of them have a value. A run that a rule stopped keeps its
    last value to the end, because that is the value it is scored with.
    """
    points = make_curves(frames, column)
    tables = [pd.DataFrame(columns=["arm", "step", "value", "standard_error", "runs"])]
    for arm in list_arms(frames):
        rows = points[points["status"].isin(SCORED_STATUSES) & (points["arm"] == arm)]
        values = rows.pivot_table(index="step", columns="seed", values="value")
        stopped_seeds = rows.loc[rows["status"] == "early_stopped", "seed"].unique()
        values[stopped_seeds] = values[stopped_seeds].ffill()
        n_runs, values = values.shape[1], values.dropna()
        error = values.std(axis=1, ddof=1) / math.sqrt(n_runs or 1)
        columns = {"arm": arm, "value": values.mean(axis=1), "standard_error": error, "runs": n_runs}
        tables.append(pd.DataFrame(columns).reset_index()[tables[0].columns])
    return pd.concat([table for table in tables if len(table)] or tables, ignore_index=True)


def count_statuses(frames: StudyFrames) -> list[Row]:
    """One row per arm: its number of runs by status, and the last steps of its runs."""
    rows = []
    for arm in list_arms(frames):
        runs = select_runs(frames, arm)
        counts = {status: int((runs["status"] == status).sum()) for status in (*STATUSES, *OPEN_STATUSES)}
        steps = sorted(set(runs["steps_done"]))
        rows.append({"arm": arm, "runs": len(runs), **counts, "steps": ", ".join(map(str, steps))})
    return rows


def find_equal_arms(frames: StudyFrames) -> list[tuple[str, str]]:
    """Pairs of arms whose scored runs have equal final numbers in all of two seeds or more; one seed may coincide."""
    names = [name for name in list_measured_columns(frames) if name.startswith(("final_", "log10_"))]
    values: dict[str, Any] = {
        arm: select_runs(frames, arm, scored_only=True).set_index("seed")[names].sort_index()
        for arm in list_arms(frames)
    }
    arms = [arm for arm, runs in values.items() if len(runs) > 1 and names]
    # DataFrame.equals compares the index as well, so the seeds must be the same; two missing values are equal.
    return [(a, b) for a, b in combinations(arms, 2) if values[a].equals(values[b])]


def add_published(table: pd.DataFrame, cells: Iterable[Row]) -> list[Row]:
    """Add the published numbers of cells, from `compare_to_published`, to arm statistics; None without a cell."""
    published_cells = {(cell["arm"], cell["column"]): cell for cell in cells if cell["kind"] == "per seed"}
    columns = ("published_mean", "published_std", "published_n")
    return [
        {**row, **{name: published_cells.get((row["arm"], row["column"]), {}).get(name) for name in columns}}
        for row in to_records(table)
    ]
