"""The order of symptoms: what changed in a run that collapsed, from which step on, and what changed first.

A symptom is a column of the rows with the direction in which it changes when training breaks. Its onset is the change
point of `analysis.stats.change_points`, fitted to the rows up to the collapse; what changed in the rows that a fork
copies is not its own. Success of the training episodes is one
of the symptoms: like the spread of rewards it is measured at every step, so both have the same resolution.
"""

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from analysis.data.compare import make_estimate_columns
from analysis.data.frames import StudyFrames, to_records
from analysis.data.schemas import Row
from analysis.stats.change_points import MIN_POINTS, Change, find_change
from analysis.stats.estimates import Estimate
from analysis.sweep.collapse import find_run_ends
from analysis.sweep.verdicts import count_nouns

UP, DOWN, EITHER = 1, -1, 0
PERMUTATION_SEED = 0
"""Seed of the permutation tests: fixed, so that the same rows give the same p-values in every report."""
MAX_P = 0.05
"""A series has changed if its p, corrected for all symptoms and runs that are examined, is at most this."""
MAX_WELL_RUNS = 12
"""Maximum number of runs without collapse that are examined: 60 steps take a tenth of a second each."""
_ONSET_COLUMNS = ("run_id", "arm", "seed", "end_step", "is_collapse", "symptom", "label", "is_first")
_CHANGE_COLUMNS = ("onset", "low", "high", "end", "before", "after", "p", "p_adjusted")
_ORDER_COLUMNS = (
    *("symptom", "label", "runs", "changed", "well_runs", "well_changed", "first", "median_onset"),
    *("earlier", "later", "undecided", "lead", "lead_low", "lead_high", "p", "p_adjusted"),
)


class Symptom(NamedTuple):
    """A measure that may show that training breaks."""

    column: str
    """A step column."""
    label: str
    """Name in a report."""
    direction: int
    """Direction of change when training breaks: `UP`, `DOWN`, or `EITHER` if both occur."""
    is_relative: bool
    """Whether an alarm's threshold is a multiple of the mean of the first steps. Columns that may begin at 0, or that
    have the same range in every run, use absolute thresholds."""
    lows: tuple[float, ...] = ()
    highs: tuple[float, ...] = ()
    """`lows` and `highs`: thresholds below and above which `analysis.sweep.alarms` tests an alarm."""


FRACTIONS, LOW_FRACTIONS = (0.1, 0.2, 0.3, 0.5, 0.7, 0.8), (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
MULTIPLES = (1.25, 1.5, 2.0, 3.0, 5.0)
SUCCESS = Symptom("train_success", "success of the training episodes", DOWN, True, lows=FRACTIONS)
"""The symptom with which the others are compared: do they come before it?"""

SYMPTOMS: tuple[Symptom, ...] = (
    Symptom("reward_std", "spread of the rewards in a group", DOWN, True, lows=FRACTIONS),
    Symptom("zero_std_groups", "groups without spread", UP, False, highs=(0.5, 1.5, 2.5, 3.5, 4.5, 5.5)),
    Symptom("entropy", "entropy", EITHER, True, lows=FRACTIONS, highs=MULTIPLES),
    Symptom("val_kl_to_reference", "KL to the reference", UP, False, highs=(0.1, 0.2, 0.3, 0.5, 1.0, 2.0)),
    Symptom("pg_clipfrac", "tokens with a clipped ratio", UP, True, highs=MULTIPLES),
    Symptom("actor_grad_norm", "gradient norm of the policy", EITHER, True, lows=FRACTIONS, highs=MULTIPLES),
    Symptom("critic_grad_norm", "gradient norm of the critic", EITHER, True, lows=FRACTIONS, highs=MULTIPLES),
    Symptom("explained_variance", "variance of the returns that the critic explains", DOWN, False, lows=LOW_FRACTIONS),
    Symptom("train_invalid_turns", "turns without a valid action", UP, False, highs=(0.05, 0.1, 0.2, 0.3, 0.5)),
    Symptom("train_response_tokens", "length of the replies", EITHER, True, lows=FRACTIONS, highs=MULTIPLES),
    Symptom(
        "collapse_trajectory_retrieval_accuracy", "retrieval of the prompt from a thought", DOWN, True, lows=FRACTIONS
    ),
    Symptom("collapse_trajectory_mi_estimate", "mutual information of prompt and thought", DOWN, True, lows=FRACTIONS),
    SUCCESS,
)
"""All symptoms. A run without the column (a critic's in GRPO, for example) does not have the symptom."""


def select_steps(frames: StudyFrames, run: Row) -> pd.DataFrame:
    """Select the rows in which a run may have changed: those up to its end_step, without those that a fork copies.

    run: a row of `collapse.find_run_ends`.
    """
    steps, fork_step = frames.get_run_steps(run["run_id"]), frames.studies[0].get_fork_step(run["arm"])
    return steps[(steps["step"] > fork_step) & (steps["step"] <= run["end_step"])]


def find_onsets(frames: StudyFrames, ends: pd.DataFrame, generator: np.random.Generator) -> pd.DataFrame:
    """Find the change of every symptom in every run of `ends`: one row per run and symptom measured in it.

    ends: rows of `collapse.find_run_ends`. Of each run, `select_steps` is used.

    Columns: run_id, arm, seed, end_step, is_collapse, symptom (a step column), label, is_first, and the fields of
    `Change`: onset with its interval low to high, end (the step at which the change is complete), the levels before and
    after, p. p_adjusted is corrected over all rows (Benjamini and Hochberg 1995); a change with p_adjusted above
    `MAX_P` has no onset. is_first: the interval of the onset ends before the intervals of all other symptoms that
    changed in the run begin.
    """
    rows, changes = [], []
    for run in to_records(ends):
        steps = select_steps(frames, run)
        for symptom in SYMPTOMS:
            if symptom.column in steps and (num_values := int(steps[symptom.column].notna().sum())):
                rows.append({**run, "symptom": symptom.column, "label": symptom.label})
                values = steps[symptom.column].astype(float)
                change = find_change(steps["step"], values, generator, symptom.direction)
                # A series in which no ramp explains anything was tested, too.
                is_flat = math.isnan(change.p) and num_values >= MIN_POINTS
                changes.append(change._replace(p=1.0) if is_flat else change)
    adjusted = adjust_discoveries([change.p for change in changes])
    # Without a change, neither onset nor levels are meaningful.
    resolved = [change if p <= MAX_P else Change(p=change.p) for change, p in zip(changes, adjusted, strict=True)]
    table = pd.DataFrame(rows, columns=list(_ONSET_COLUMNS[:-1])).assign(
        **{name: [getattr(change, name) for change in resolved] for name in _CHANGE_COLUMNS[:-1]}, p_adjusted=adjusted
    )
    is_first = []
    for run_id, symptom, high in table[["run_id", "symptom", "high"]].itertuples(index=False):
        others = table.loc[(table["run_id"] == run_id) & (table["symptom"] != symptom), "low"]
        is_first.append(bool(high < others.min()))  # False where no other symptom has an onset
    return table.assign(is_first=is_first)


def adjust_discoveries(p_values: Sequence[float]) -> np.ndarray:
    """Correct p-values for the false discovery rate; NaN, which is no test, stays NaN.

    Source: Benjamini & Hochberg 1995.

    >>> adjust_discoveries([0.01, float("nan"), 0.04, 0.03]).tolist()
    [0.03, nan, 0.04, 0.04]
    """
    from scipy import stats

    p = np.asarray(p_values, dtype=float)
    is_test = ~np.isnan(p)
    if is_test.any():
        p[is_test] = stats.false_discovery_control(p[is_test])
    return p


def find_collapse_onsets(
    frames: StudyFrames, generator: np.random.Generator, run_ids: Collection[str] | None = None
) -> pd.DataFrame:
    """Apply `find_onsets` to the runs that collapsed, and up to `MAX_WELL_RUNS` others; empty if none collapsed.

    Runs that stayed well show how often the same changes occur without a collapse. They are read up to the median step
    of the collapses, and all tests are corrected together. run_ids: use only these of the collapsed runs.
    """
    ends = find_run_ends(frames)
    ends = ends[ends["signal_problem"] == ""]
    collapsed, well = ends[ends["is_collapse"]], ends[~ends["is_collapse"]]
    if run_ids is not None:
        collapsed = collapsed[collapsed["run_id"].isin(run_ids)]
    if collapsed.empty:
        return find_onsets(frames, collapsed, generator)
    places = np.unique(np.linspace(0, len(well) - 1, min(len(well), MAX_WELL_RUNS)).round().astype(int))
    well = well.iloc[places].assign(end_step=well["end_step"].clip(upper=collapsed["end_step"].median()))
    return find_onsets(frames, pd.concat([collapsed, well]), generator)


def summarize_order(onsets: pd.DataFrame) -> pd.DataFrame:
    """Summarize what came first over the runs that collapsed: one row per symptom, earliest median onset first.

    runs: in which it was measured. changed: in which it changed. well_runs, well_changed: the same for the runs that
    stayed well. first: in which its interval ends before all others begin. median_onset: step, over the runs in which
    it changed. The other columns compare its onset with the onset of `SUCCESS` in the runs in which both changed.
    earlier and later count runs in which the intervals of both onsets are apart, undecided the other ones. lead is the
    median of the steps by which the estimated onset was earlier, with its 95 % interval from order statistics (none
    below 6 runs), as if all runs were independent. p is from the sign test, in which equal onsets do not count;
    p_adjusted is corrected over the symptoms (Benjamini and Hochberg).
    """
    is_collapse = onsets["is_collapse"].astype(bool)
    success = onsets[is_collapse & (onsets["symptom"] == SUCCESS.column)].set_index("run_id").dropna(subset="onset")
    rows = []
    for symptom in SYMPTOMS:
        is_own = onsets["symptom"] == symptom.column
        if not is_own.any():
            continue
        changed_rows = onsets[is_own & is_collapse].dropna(subset="onset").set_index("run_id")
        run_ids = changed_rows.index.intersection(success.index) if symptom != SUCCESS else []
        own, other = changed_rows.loc[run_ids], success.loc[run_ids]
        lead = estimate_median_lead((other["onset"] - own["onset"]).to_numpy(dtype=float))
        earlier, later = int((own["high"] < other["low"]).sum()), int((own["low"] > other["high"]).sum())
        row: Row = {"symptom": symptom.column, "label": symptom.label}
        row |= {"runs": int((is_own & is_collapse).sum()), "changed": len(changed_rows)}
        row["well_runs"] = int((is_own & ~is_collapse).sum())
        row["well_changed"] = int(onsets.loc[is_own & ~is_collapse, "onset"].notna().sum())
        row["first"] = int(changed_rows["is_first"].sum())
        row["median_onset"] = float(changed_rows["onset"].median()) if len(changed_rows) else math.nan
        row |= {"earlier": earlier, "later": later, "undecided": len(own) - earlier - later}
        rows.append(row | {**make_estimate_columns("lead", lead), "p": lead.p})
    table = pd.DataFrame(rows, columns=list(_ORDER_COLUMNS[:-1]))
    table = table.assign(p_adjusted=adjust_discoveries(table["p"].to_list()))
    return table.sort_values("median_onset", kind="stable", na_position="last").reset_index(drop=True)


def estimate_median_lead(leads: Sequence[float] | np.ndarray) -> Estimate:
    """Estimate the median of differences (n,), with an interval from order statistics and the sign test's p.

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
    """Describe what came first in the runs that collapsed, as far as intervals show it; empty without such a run."""
    is_collapse = onsets["is_collapse"].astype(bool)
    num_runs = onsets.loc[is_collapse, "run_id"].nunique()
    if not num_runs:
        return []
    table = summarize_order(onsets)
    runs_text = f"{num_runs} runs that collapsed" if num_runs > 1 else "only run that collapsed"
    collapsed_rows = onsets[is_collapse]
    if not table["changed"].any():
        is_short = collapsed_rows["p"].isna().all()
        reason = f": a change needs at least {MIN_POINTS} measurements before the collapse" if is_short else ""
        return [f"In the {runs_text}, no change is resolved{reason}."]
    firsts = table[table["first"] > 0].sort_values("first", ascending=False, kind="stable")
    leaders = ", ".join(f"{row['label']} ({row['first']})" for row in to_records(firsts.head(3)))
    count_text = f"{table['first'].sum()} of the {runs_text}" if num_runs > 1 else f"the {runs_text}"
    if leaders:
        sentences = [f"In {count_text}, the interval of one onset ends before all others begin: {leaders}."]
    elif collapsed_rows.dropna(subset="onset")["run_id"].duplicated().any():
        sentences = [f"In the {runs_text}, no symptom is known to be the first: the intervals of the onsets overlap."]
    else:
        sentences = [f"In the {runs_text}, at most one change per run is resolved, so there is no order."]
    if num_well := onsets.loc[~is_collapse, "run_id"].nunique():
        sums = table[["changed", "runs", "well_changed", "well_runs"]].sum()
        sentences.append(
            f"{100 * sums['changed'] / sums['runs']:.0f} % of the symptoms changed in these runs before the collapse. "
            f"In {count_nouns(num_well, 'run')} that stayed well, "
            f"{100 * sums['well_changed'] / sums['well_runs']:.0f} % changed up to the same step. A symptom that "
            "changes as often in both groups predicts nothing."
        )
    return sentences
