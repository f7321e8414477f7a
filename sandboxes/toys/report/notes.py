"""What the report of a study of toy tasks says: its headline, and what a reader of its numbers must know."""

import pandas as pd

from analysis.data.compare import SCORED_STATUSES, has_added_seeds, list_arms, select_runs
from analysis.data.frames import StudyFrames
from analysis.sweep import findings
from analysis.sweep.verdicts import count_nouns, describe_stops, describe_unfinished
from sandboxes.toys.report import tables

CHANCE_TOLERANCE = 0.02  # a mean error that is less than this below chance is noted too
_SEPARATORS = "final_greedy_separator_rate"
COLLAPSE_THRESHOLD = 0.5  # fraction of separators above which a run counts as collapsed; a correct reply has none
_TOKEN_TASKS = {"token_reversal", "masked_reversal"}


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
            f"Compared with it over {findings.format_range(compared['n'])} "
            f"seed{'s' if compared['n'].max() > 1 else ''}, {tables.get_description(frames).outcome} is {groups}."
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
    """List what a reader must know of the numbers: few seeds, stops, collapse, errors at chance, equal arms."""
    lines = [*_make_seed_notes(frames), *findings.describe_looks(frames.studies[0]), *_make_ending_notes(frames)]
    chance_error = compute_chance_error(frames)
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
            lines.append(
                f"{arm}: the mean test error of {error:.3f} is no better than that of random content tokens "
                f"({chance_error:.2f}): at most, the policy has learned to avoid separators."
            )
        steps = frames.steps[frames.steps["run_id"].isin(runs["run_id"])]
        # Only update rules have a filter.
        if "kept_frac" in steps and steps["kept_frac"].max() == 0:
            lines.append(
                f"{arm}: its filter kept nothing of any logged batch, so the policy may still have its initial weights."
            )
    lines += [
        f"{a} and {b} end with equal numbers in every seed: in this study they are the same algorithm."
        for a, b in tables.find_equal_arms(frames)
    ]
    return lines


def _make_seed_notes(frames: StudyFrames) -> list[str]:
    seed_count = frames.trials.loc[frames.trials["status"].isin(SCORED_STATUSES), "seed"].nunique()
    if seed_count == 0:
        return ["No run was completed or stopped by a rule, so nothing is compared."]
    if seed_count == 1:
        return ["1 seed: there is no standard error. Another seed may give another result."]
    advice = " For a claim, five are the usual minimum, and ten are better." if seed_count < 5 else ""
    noise_text = "" if has_added_seeds(frames.studies[0]) else ", with the noise of all arms as far as none stands out"
    return [
        f"{seed_count} seeds: intervals are over seeds{noise_text}, and the band of a curve is one standard "
        f"error.{advice}"
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
