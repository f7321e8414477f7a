"""Tables of a toy study (statistics of arms, differences from the baseline, mean curves), and notes about its numbers.

Every number of an arm is over its scored runs: those that completed, and those that a rule stopped, with their last
row. The standard error is the standard deviation (ddof 1) divided by the root of n.
"""

import math
from itertools import product

import pandas as pd

from analysis.data.compare import (
    SCORED_STATUSES,
    has_added_seeds,
    list_arms,
    require_single_study,
    select_runs,
)
from analysis.data.frames import StudyFrames
from analysis.sweep import findings
from analysis.sweep.series import make_curves
from analysis.sweep.verdicts import count_nouns, describe_stops, describe_unfinished
from sandboxes.toys.published.reproduction import sample_std
from sandboxes.toys.study import Description

COLUMN_ORDER = ("late_", "final_", "last_", "switch_", "error_", "first_step_", "mean_", "log10_")
"""How the names of the trial columns of a report begin, in the order in which it lists them."""
CHANCE_TOLERANCE = 0.02  # a mean error that is less than this below chance is noted too
_SEPARATORS = "final_greedy_separator_rate"
COLLAPSE_THRESHOLD = 0.5  # fraction of separators above which a run counts as collapsed; a correct reply has none
_TOKEN_TASKS = {"token_reversal", "masked_reversal"}


def get_description(frames: StudyFrames) -> Description:
    """What the report says of the family of the study in `frames`."""
    (family,) = frames.families
    description: Description = family.description
    return description


def list_measured_columns(frames: StudyFrames) -> list[str]:
    """The trial columns of the family that have a value in some run, in the order of `COLUMN_ORDER`."""
    (family,) = frames.families
    names = [
        column.name for prefix in COLUMN_ORDER for column in family.trial_columns if column.name.startswith(prefix)
    ]
    return [name for name in names if frames.trials[name].notna().any()]


def select_panels(frames: StudyFrames) -> dict[str, str]:
    """The panels of the family for which at least one run of the study has a value: column and label."""
    panels = get_description(require_single_study(frames)).panels
    return {column: label for column, label in panels.items() if frames.steps[column].notna().any()}


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


def list_outcomes(frames: StudyFrames) -> list[str]:
    """List the outcomes of the family that have a value in some run, the primary one first."""
    (family,) = frames.families
    columns = (family.primary_column, *family.secondary_columns)
    return [name for name in columns if frames.trials[name].notna().any()]


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


def select_primary(frames: StudyFrames, table: pd.DataFrame) -> pd.DataFrame:
    """Select the rows of a table with a `column` that are about the primary outcome."""
    (family,) = frames.families
    return table[table["column"] == family.primary_column]


def format_headline(frames: StudyFrames, differences: pd.DataFrame) -> str:
    """Group the arms in a line by how their primary outcome compares with the baseline's."""
    if frames.trials.empty:
        return "No run is recorded."
    error_rows = select_primary(frames, differences)
    baseline, arms = frames.studies[0].baseline, list_arms(frames)
    # `--arms` may select arms without the baseline.
    baseline_text = f"baseline {baseline}" if baseline in arms else "no baseline among them"
    sentences = [f"{count_nouns(len(arms), 'arm')}, {baseline_text}."]
    compared = error_rows[error_rows["n"] > 0]
    if len(compared):
        (family,) = frames.families
        turned = {} if family.is_higher_better else {"better": "lower for", "worse": "higher for"}
        groups = findings.group_arms(compared, compared["verdict"], {**findings.OUTCOME_LABELS, **turned})
        sentences.append(
            f"Compared with {baseline} over {findings.format_seed_range(compared['n'])}, "
            f"{get_description(frames).outcome} is {groups}."
        )
    missing = error_rows.loc[error_rows["n"] == 0, "arm"]
    sentences += [f"Not compared: {', '.join(missing)}."] if len(missing) else []
    return " ".join(sentences)


def compute_chance_error(frames: StudyFrames) -> float | None:
    """Compute the test error of random content tokens, 1 - 1/V for a vocabulary of V; None if no value fits all arms.

    A study has one if every task scores single tokens, all arms have the same vocabulary, and rewards are not binary
    (with a binary reward, the error is that of whole sequences).
    """
    columns = ("config/task", "config/vocab_size", "config/binary_reward")
    if frames.trials.empty or any(name not in frames.trials for name in columns):
        return None
    tasks, vocab_sizes, binary_settings = (set(frames.trials[name].dropna()) for name in columns)
    if not tasks <= _TOKEN_TASKS or len(vocab_sizes) != 1 or binary_settings != {False}:
        return None
    return 1 - 1 / int(vocab_sizes.pop())


def make_notes(frames: StudyFrames) -> list[str]:
    """List what a reader must know of the numbers: few seeds, stops, collapse, errors at chance."""
    lines = [*_make_seed_notes(frames), *findings.describe_looks(frames.studies[0]), *_make_ending_notes(frames)]
    chance_error, at_chance = compute_chance_error(frames), []
    for arm in list_arms(frames):
        # The last row of a failed run is no final number.
        runs = select_runs(frames, arm, scored_only=True)
        separator_rates = runs.reindex(columns=[_SEPARATORS])[_SEPARATORS]  # only tasks of sequences have them
        collapsed_runs = runs[separator_rates > COLLAPSE_THRESHOLD]
        if len(collapsed_runs):
            seeds = ", ".join(map(str, collapsed_runs["seed"]))
            lines.append(
                f"{arm}: in {len(collapsed_runs)} of {len(runs)} runs (seed {seeds}) more than half of the greedily "
                "decoded tokens are separators, which are never correct: a collapse onto one token."
            )
        if chance_error is not None and (error := runs["final_test_error"].mean()) >= chance_error - CHANCE_TOLERANCE:
            at_chance.append(f"{arm} {error:.3f}")
        steps = frames.steps[frames.steps["run_id"].isin(runs["run_id"])]
        # Only update rules have a filter.
        if "kept_frac" in steps and steps["kept_frac"].max() == 0:
            lines.append(
                f"{arm}: its filter dropped all logged samples, so the policy may still have its initial weights."
            )
    if at_chance:
        others = f" and {len(at_chance) - 5} more" if len(at_chance) > 5 else ""
        lines.append(
            f"Arms with a mean test error no better than random content tokens ({chance_error:.2f}): "
            f"{', '.join(at_chance[:5])}{others}. On average, such a policy has learned at most to avoid separators."
        )
    return lines


def _make_seed_notes(frames: StudyFrames) -> list[str]:
    seed_count = frames.trials.loc[frames.trials["status"].isin(SCORED_STATUSES), "seed"].nunique()
    if seed_count == 0:
        return ["No run was completed or stopped by a rule, so nothing is compared."]
    if seed_count == 1:
        return ["1 seed: there is no standard error. Another seed may give another result."]
    advice = " For a claim, five seeds are the usual minimum, and ten are better." if seed_count < 5 else ""
    noise_text = ", and their noise is estimated from all arms unless one stands out"
    return [
        f"{seed_count} seeds: intervals are over seeds{'' if has_added_seeds(frames.studies[0]) else noise_text}. The "
        f"band of a curve is one standard error.{advice}"
    ]


def _make_ending_notes(frames: StudyFrames) -> list[str]:
    """List runs that a rule stopped, and runs that failed, were interrupted or never ran."""
    lines = []
    for arm in list_arms(frames):
        stop_text = describe_stops(select_runs(frames, arm, scored_only=True))
        unfinished_text = describe_unfinished(select_runs(frames, arm))
        lines += [f"{arm}: {stop_text}; a stopped run counts with its last row."] if stop_text else []
        lines += [f"{arm}, not counted: {unfinished_text}."] if unfinished_text else []
    return lines
