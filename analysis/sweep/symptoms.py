"""The order of symptoms: what changed in a run that collapsed, from which step on, and what changed first.

A symptom is a column of the rows with the direction in which it changes when training breaks. Its onset is the change
point of `analysis.stats.change_points`, fitted to the rows up to the collapse. Success of the training episodes is one
of the symptoms: it is measured in every step, like the spread of the rewards, and so both have the same resolution.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from analysis.data.frames import StudyFrames, to_records
from analysis.stats.change_points import Change, find_change
from analysis.stats.estimates import Estimate, wilson_interval
from analysis.sweep.collapse import find_run_ends

UP, DOWN, EITHER = 1, -1, 0
PERMUTATION_SEED = 0
"""Of the permutations behind p-values: fixed, so that the same rows give the same p-values in every report."""

MAX_P = 0.05
"""A series has changed if its p is at most this."""
_ONSET_COLUMNS = ("run_id", "arm", "seed", "end_step", "symptom", "label", "rank")
_CHANGE_COLUMNS = ("onset", "low", "high", "end", "before", "after", "p")
_ORDER_COLUMNS = (
    "symptom",
    "label",
    "runs",
    "changed",
    "first",
    "median_onset",
    "earlier",
    "later",
    "equal",
    "lead",
    "lead_low",
    "lead_high",
    "p",
)


class Symptom(NamedTuple):
    """What may show that training breaks.

    Attributes:
        column: a step column.
        label: its name in a report.
        direction: in which it changes when training breaks: `UP`, `DOWN`, or `EITHER` if both happen.
        is_relative: whether a threshold of an alarm is a multiple of the mean of the first steps. A column that may
            begin at 0, or that has the same range in every run, has thresholds in its own unit.
        lows, highs: thresholds below and above which `analysis.sweep.alarms` tries an alarm.
    """

    column: str
    label: str
    direction: int
    is_relative: bool
    lows: tuple[float, ...] = ()
    highs: tuple[float, ...] = ()


FRACTIONS = (0.1, 0.2, 0.3, 0.5, 0.7, 0.8)
MULTIPLES = (1.25, 1.5, 2.0, 3.0, 5.0)
SUCCESS = Symptom("train_success", "success of the training episodes", DOWN, True, lows=FRACTIONS)
"""What the other symptoms are compared with: whether they come before it."""

SYMPTOMS: tuple[Symptom, ...] = (
    Symptom("reward_std", "spread of the rewards in a group", DOWN, True, lows=FRACTIONS),
    Symptom("zero_std_groups", "groups without spread", UP, False, highs=(0.5, 1.5, 2.5, 3.5, 4.5, 5.5)),
    Symptom("entropy", "entropy", EITHER, True, lows=FRACTIONS, highs=MULTIPLES),
    Symptom("val_kl_to_reference", "KL to the reference", UP, False, highs=(0.1, 0.2, 0.3, 0.5, 1.0, 2.0)),
    Symptom("pg_clipfrac", "tokens with a clipped ratio", UP, True, highs=MULTIPLES),
    Symptom("actor_grad_norm", "gradient norm of the policy", EITHER, True, lows=FRACTIONS, highs=MULTIPLES),
    Symptom("critic_grad_norm", "gradient norm of the critic", EITHER, True, lows=FRACTIONS, highs=MULTIPLES),
    Symptom(
        "explained_variance",
        "variance of the returns that the critic explains",
        DOWN,
        False,
        lows=(0.0, 0.1, 0.2, 0.3, 0.4, 0.5),
    ),
    Symptom("train_invalid_turns", "turns without a valid action", UP, False, highs=(0.05, 0.1, 0.2, 0.3, 0.5)),
    Symptom("train_response_tokens", "length of the replies", EITHER, True, lows=FRACTIONS, highs=MULTIPLES),
    Symptom(
        "collapse_trajectory_retrieval_accuracy",
        "retrieval of the prompt from a thought",
        DOWN,
        True,
        lows=FRACTIONS,
    ),
    Symptom("collapse_trajectory_mi_estimate", "mutual information of prompt and thought", DOWN, True, lows=FRACTIONS),
    SUCCESS,
)
"""All symptoms. A run without a column, such as a critic's in GRPO, does not have the symptom."""


def find_onsets(frames: StudyFrames, ends: pd.DataFrame, generator: np.random.Generator) -> pd.DataFrame:
    """The change of every symptom in every run of `ends`: one row per run and symptom that was measured in it.

    Args:
        frames: of one study.
        ends: rows of `collapse.find_run_ends`. Only rows of a run up to its end_step count.
        generator: draws the permutations of the tests.

    Columns: run_id, arm, seed, end_step, symptom (a step column), label, rank, and those of `Change`: onset with its
    interval low to high, end (the step at which the change is complete), the levels before and after, p. A change with
    p above `MAX_P` has no onset. rank is the place of the onset among those of the run, from 1; equal onsets share the
    smallest place.
    """
    rows = []
    for run in to_records(ends):
        steps = frames.get_run_steps(run["run_id"])
        steps = steps[steps["step"] <= run["end_step"]]
        for symptom in SYMPTOMS:
            if symptom.column not in steps or not steps[symptom.column].notna().any():
                continue
            change = find_change(steps["step"], steps[symptom.column].astype(float), generator, symptom.direction)
            if not change.p <= MAX_P:
                # Without a change, neither onset nor levels mean anything.
                change = Change(p=change.p)
            rows.append({**run, "symptom": symptom.column, "label": symptom.label, **change._asdict()})
    table = pd.DataFrame(rows, columns=[*_ONSET_COLUMNS, *_CHANGE_COLUMNS])
    return table.assign(rank=table.groupby("run_id")["onset"].rank(method="min"))


def find_collapse_onsets(frames: StudyFrames, generator: np.random.Generator) -> pd.DataFrame:
    """`find_onsets` of the runs that collapsed."""
    ends = find_run_ends(frames)
    return find_onsets(frames, ends[ends["is_collapse"]], generator)


def summarize_order(onsets: pd.DataFrame) -> pd.DataFrame:
    """What came first over runs: one row per symptom, the earliest median onset first.

    runs: in which it was measured. changed: in which it changed. first: in which no symptom changed earlier; several
    may be first together. median_onset: step, over the runs in which it changed. The other columns compare its onset
    with that of `SUCCESS` in the runs in which both changed: earlier, later, equal (numbers of runs), and lead, the
    median of the steps by which it was earlier, with its 95 % interval from order statistics (none below 6 runs); p is
    that of the sign test, in which equal onsets do not count. The interval is over runs, as if all were independent.
    """
    success_onsets = onsets[onsets["symptom"] == SUCCESS.column].set_index("run_id")["onset"].dropna()
    rows = [
        _summarize_symptom(symptom, symptom_rows, success_onsets)
        for symptom in SYMPTOMS
        if len(symptom_rows := onsets[onsets["symptom"] == symptom.column])
    ]
    table = pd.DataFrame(rows, columns=list(_ORDER_COLUMNS))
    return table.sort_values("median_onset", kind="stable", na_position="last").reset_index(drop=True)


def _summarize_symptom(
    symptom: Symptom, rows: pd.DataFrame, success_onsets: "pd.Series[float]"
) -> Mapping[str, object]:
    changed_rows = rows.dropna(subset="onset").set_index("run_id")
    is_compared = changed_rows.index.intersection(success_onsets.index) if symptom != SUCCESS else []
    leads = (success_onsets.loc[is_compared] - changed_rows.loc[is_compared, "onset"]).to_numpy(dtype=float)
    lead = estimate_median_lead(leads)
    return {
        "symptom": symptom.column,
        "label": symptom.label,
        "runs": len(rows),
        "changed": len(changed_rows),
        "first": int((changed_rows["rank"] == 1).sum()),
        "median_onset": float(changed_rows["onset"].median()) if len(changed_rows) else math.nan,
        "earlier": int((leads > 0).sum()),
        "later": int((leads < 0).sum()),
        "equal": int((leads == 0).sum()),
        "lead": lead.value,
        "lead_low": lead.low,
        "lead_high": lead.high,
        "p": lead.p,
    }


def estimate_median_lead(leads: Sequence[float] | np.ndarray) -> Estimate:
    """The median of differences (n,) with an interval from order statistics, and p of the two-sided sign test.

    The interval needs 6 differences to exclude anything at 95 %. Source: Conover 1999, sections 3.2 and 3.4.
    """
    values = np.asarray(leads, dtype=float)
    if not values.size:
        return Estimate()
    from scipy import stats

    num_earlier, num_different = int((values > 0).sum()), int((values != 0).sum())
    p = float(stats.binomtest(num_earlier, num_different).pvalue) if num_different else math.nan
    interval = stats.quantile_test(values, q=0, p=0.5).confidence_interval(confidence_level=0.95)
    return Estimate(float(np.median(values)), float(interval.low), float(interval.high), n=values.size, p=p)


def describe_order(onsets: pd.DataFrame) -> list[str]:
    """Sentences on what came first in the runs of `onsets`; none without a run."""
    num_runs = onsets["run_id"].nunique()
    if not num_runs:
        return []
    table = summarize_order(onsets)
    runs_text = f"{num_runs} runs that collapsed" if num_runs > 1 else "only run that collapsed"
    candidates = table[table["first"] > 0].sort_values("first", ascending=False, kind="stable")
    if candidates.empty:
        return [f"In the {runs_text}, no change is resolved: {_explain_missing_changes()}"]
    leaders = ", ".join(f"{row['label']} ({row['first']})" for row in to_records(candidates.head(3)))
    often = "most often" if num_runs > 1 else "one of these"
    sentences = [f"In the {runs_text}, the first to change was {often}: {leaders}; several may be first together."]
    spread = table[table["symptom"] == "reward_std"]
    if len(spread) and (counts := spread.iloc[0])[["earlier", "later", "equal"]].sum():
        compared = int(counts["earlier"] + counts["later"] + counts["equal"])
        fraction = wilson_interval(float(counts["earlier"]), compared)
        sentences.append(
            f"The spread of the rewards fell before success in {counts['earlier']} of {compared} runs in which both "
            f"fell ({fraction.value:.0%}, 95 % interval {fraction.low:.0%} to {fraction.high:.0%} over runs)."
        )
    return sentences


def _explain_missing_changes() -> str:
    return "a change needs at least 8 measurements before the collapse."
