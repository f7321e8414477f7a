"""The tables of a study of the update-rule sandbox: numbers of arms, differences to the baseline, mean curves.

Every number of an arm is over its scored runs: completed, or stopped by a rule, which keep their last row. The standard
error is the standard deviation (ddof 1) over the root of n, and both are shown under their names.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from analysis.data.compare import SCORED, SEEDS_FOR_SEEDS, arms, runs_of, single
from analysis.data.families import Row
from analysis.data.frames import StudyFrames, records
from analysis.published.reproduction import spread_of
from analysis.stats.estimates import Estimate, Sample, holm, mean_over_seeds, welch
from analysis.sweep.series import curves
from trainable.runs.records import STATUSES
from trainable.sandbox.measure.records import TRIAL_COLUMNS

FINALS = tuple(column.name for column in TRIAL_COLUMNS if column.name.startswith("final_"))
FIRST_STEPS = tuple(column.name for column in TRIAL_COLUMNS if column.name.startswith("first_step_"))
MEANS = tuple(column.name for column in TRIAL_COLUMNS if column.name.startswith("mean_"))
SEPARATORS = "final_greedy_separator_rate"
COMPARED = (*(name for name in FINALS if name != SEPARATORS), "mean_entropy")


@dataclass(frozen=True)
class Panel:
    """One panel of the learning curves: a step column, and how its axis is called."""

    column: str
    label: str


ERROR = Panel("test_error", "test error (share)")
ENTROPY = Panel("entropy", "entropy (nats)")
PANELS: Mapping[str, tuple[Panel, ...]] = {
    "replay": (ERROR, Panel("replay_age", "age of the batch (updates)")),
    "partial-credit": (
        Panel("test_error", "test error, scored (share)"),
        Panel("test_error_unscored", "test error, not scored (share)"),
    ),
    "dense-correction": (ERROR, Panel("chain_reward", "chain reward (reward)")),
}
"""Which columns the figure of a study draws; of another study those of `STANDARD`."""
STANDARD = (ERROR, ENTROPY)


def panels(frames: StudyFrames) -> tuple[Panel, ...]:
    """The panels of the study that some run has a value for."""
    wanted = PANELS.get(single(frames).studies[0]["name"], STANDARD)
    return tuple(panel for panel in wanted if frames.steps[panel.column].notna().any())


def arm_numbers(frames: StudyFrames) -> pd.DataFrame:
    """One row an arm and measured trial column, in their order: the number over the arm's scored runs.

    Columns: arm, column, mean, standard_error, standard_deviation, n, scored, without: the seeds of scored runs that
    have no value, such as those that never reach a step. One value has neither error nor deviation.
    """
    measured = [name for name in (*FINALS, *FIRST_STEPS, *MEANS) if frames.trials[name].notna().any()]
    scored = {arm: runs_of(frames, arm, scored=True) for arm in arms(frames)}
    rows = [_number(runs, arm, name) for name in measured for arm, runs in scored.items()]
    names = ["arm", "column", "mean", "standard_error", "standard_deviation", "n", "scored", "without"]
    return pd.DataFrame(rows, columns=names)


def _number(runs: pd.DataFrame, arm: str, name: str) -> Row:
    values = runs[name].dropna().to_numpy(dtype=float)
    spread = spread_of(values)
    missing = ", ".join(str(seed) for seed in runs.loc[runs[name].isna(), "seed"])
    return {
        "arm": arm,
        "column": name,
        "mean": float(values.mean()) if len(values) else math.nan,
        "standard_error": spread / math.sqrt(len(values)) if len(values) else math.nan,
        "standard_deviation": spread,
        "n": len(values),
        "scored": len(runs),
        "without": missing,
    }


def differences(frames: StudyFrames) -> pd.DataFrame:
    """One row a column of `COMPARED` and arm other than the baseline: arm minus baseline, with interval and Holm's p.

    Paired by seed where `SEEDS_FOR_SEEDS` seeds have both, else Welch's where both arms have that many runs, else
    without an interval; `basis` says which. p_holm is Holm's over the arms of one column: the test error is the
    outcome, and the other columns describe it. First steps are not compared, as runs that never reach one have no
    number.
    """
    baseline = str(single(frames).studies[0].get("baseline", ""))
    measured = [name for name in COMPARED if frames.trials[name].notna().any()]
    others = [arm for arm in arms(frames) if arm != baseline] if baseline in arms(frames) else []
    scored = {arm: runs_of(frames, arm, scored=True).set_index("seed") for arm in arms(frames)}
    rows = [
        {"arm": arm, "column": name, "baseline": baseline, **_difference(scored[arm][name], scored[baseline][name])}
        for name in measured
        for arm in others
    ]
    table = pd.DataFrame(rows, columns=["arm", "column", "baseline", "difference", "low", "high", "n", "p", "basis"])
    adjusted = [holm(own["p"].to_numpy(dtype=float)) for _, own in table.groupby("column", sort=False)]
    return table.assign(p_holm=np.concatenate(adjusted) if adjusted else np.empty(0))


def _difference(ours: "pd.Series[float]", theirs: "pd.Series[float]") -> Row:
    """Numbers of an arm and of the baseline by seed: their difference, with its interval and what that is over."""
    ours, theirs = ours.dropna(), theirs.dropna()
    seeds = [seed for seed in ours.index if seed in theirs.index]
    paired = ours.loc[seeds] - theirs.loc[seeds]
    found, basis = Estimate(float(ours.mean() - theirs.mean())), "no interval: fewer than 3 seeds"
    if len(seeds) >= SEEDS_FOR_SEEDS:
        found, basis = mean_over_seeds(paired), f"paired, {len(seeds)} seeds"
    elif min(len(ours), len(theirs)) >= SEEDS_FOR_SEEDS:
        found, basis = welch(_sample(ours), _sample(theirs)), f"not paired, {len(ours)} against {len(theirs)} runs"
    elif len(seeds):
        found = Estimate(float(paired.mean()))
    names = {"difference": found.value, "low": found.low, "high": found.high, "n": found.n, "p": found.p}
    return {**names, "basis": basis}


def _sample(values: ArrayLike) -> Sample:
    numbers = np.asarray(values, dtype=float)
    return Sample(float(numbers.mean()), spread_of(numbers), len(numbers))


def means(frames: StudyFrames, column: str) -> pd.DataFrame:
    """Mean curve of each arm with its standard error: arm, step, value, error (NaN for one run), runs.

    Over scored runs, at the steps at which all of them have a value; a run that a rule stopped keeps its last one to
    the end, as it is scored.
    """
    table = curves(frames, column)
    order = pd.CategoricalDtype(arms(frames))
    scored = table[table["status"].isin(SCORED)].astype({"arm": order})
    wide = scored.pivot_table(index=["arm", "step"], columns="seed", values="value", observed=True)
    stopped = scored.loc[scored["status"] == "early_stopped", ["arm", "seed"]].drop_duplicates()
    for arm, seed in stopped.itertuples(index=False):
        wide.loc[arm, seed] = wide.loc[arm, seed].ffill().to_numpy()
    runs = wide.notna().groupby(level="arm", observed=True).transform("any").sum(axis=1)
    error = wide.std(axis=1, ddof=1) / np.sqrt(runs)
    numbers = pd.DataFrame({"value": wide.mean(axis=1), "error": error, "runs": runs})
    return numbers[wide.count(axis=1) == runs].reset_index().astype({"arm": table["arm"].dtype})


def statuses(frames: StudyFrames) -> list[Row]:
    """One row an arm: how many of its runs ended how, and its last steps."""
    rows = []
    for arm in arms(frames):
        runs = runs_of(frames, arm)
        counts = {status: int((runs["status"] == status).sum()) for status in (*STATUSES, "running")}
        steps = sorted(set(runs["steps_done"]))
        rows.append({"arm": arm, "runs": len(runs), **counts, "steps": ", ".join(map(str, steps))})
    return rows


def equal_arms(frames: StudyFrames) -> list[tuple[str, str]]:
    """Pairs of arms whose scored runs have the same numbers at the end in every seed, of two seeds or more."""
    measured = [name for name in FINALS if frames.trials[name].notna().any()]
    held: dict[str, Any] = {}
    for arm in arms(frames):
        runs = runs_of(frames, arm, scored=True).set_index("seed")[measured].sort_index()
        if len(runs) > 1 and len(measured):
            held[arm] = runs
    return [(a, b) for a, b in combinations(held, 2) if held[a].equals(held[b])]


def beside(table: pd.DataFrame, cells: Iterable[Row]) -> list[Row]:
    """Rows of `arm_numbers` with the published number of the same arm and column, where there is one.

    cells: rows of `reproduction`. Keys added: published_mean, published_spread, published_n (None without one).
    """
    held = {(cell["arm"], cell["column"]): cell for cell in cells if cell["kind"] == "per seed"}
    names = ("published_mean", "published_spread", "published_n")
    return [
        {**row, **{name: held.get((row["arm"], row["column"]), {}).get(name) for name in names}}
        for row in records(table)
    ]
