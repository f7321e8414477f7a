"""Tables of gradient analyses: the numbers behind the figures, signal-to-noise ratios, and trends.

An analysis measures one batch of a run at one step: during training or as a probe of a checkpoint, and before or after
the filter. Each of its rows in `StudyFrames.gradients` is one loss component in one bucket of groups. Buckets are
ordered by reward std (the standard deviation of the rewards in a group); the bucket `all` is the whole batch. A batch
that the filter emptied has a single row without a gradient, which the tables leave out.
"""

import math
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import pandas as pd

from analysis.data.compare import cut_interval, make_estimate_columns
from analysis.stats.estimates import MIN_SEEDS, mean_over_seeds, spearman_trend

T = TypeVar("T")

ANALYSIS_KEYS = ["study", "run_id", "arm", "seed", "source", "step", "prefilter"]
WHOLE_BATCH = "all"
REGULARIZERS = ("kl", "entropy")
COMPONENTS = ("task", *REGULARIZERS)
_REWARD_STDS = ("reward_std_mean", "reward_std_min", "reward_std_max")
TREND_MEASURES = ("norm", "mean_norm", "signal")
# The smallest p is 1/2000. A sweep draws 9999 per test, but here a test is made per step, component and measure.
NUM_PERMUTATIONS = 1999
_MAX_LINES = 6


def subsample_evenly(values: Sequence[T], max_count: int) -> list[T]:
    """Choose at most `max_count` of the values, evenly spaced, including the first and the last."""
    if len(values) <= max_count:
        return list(values)
    return [values[index] for index in np.linspace(0, len(values) - 1, max_count).round().astype(int)]


def make_analysis_table(gradients: pd.DataFrame) -> pd.DataFrame:
    """Make a table with a row per analysis that has at least one bucket, in the order of steps within a run.

    Columns: `ANALYSIS_KEYS`; groups, sequences and buckets (their numbers); components (text, such as "task, kl").
    """
    rows = []
    for names, analysis in gradients.groupby(ANALYSIS_KEYS, sort=False):
        is_whole = analysis["bucket"] == WHOLE_BATCH
        sizes = [analysis.loc[is_whole, name].max() for name in ("group_count", "sample_count")]
        components = ", ".join(name for name in dict.fromkeys(analysis["component"]) if name != "total")
        if not is_whole.all():
            rows.append((*names, *sizes, analysis.loc[~is_whole, "bucket"].nunique(), components))
    return pd.DataFrame(rows, columns=[*ANALYSIS_KEYS, "groups", "sequences", "buckets", "components"])


def drop_empty_batches(gradients: pd.DataFrame) -> pd.DataFrame:
    """Drop the rows of batches that the filter emptied completely. A row without the flag stays."""
    return gradients[~(gradients["empty_after_filter"] > 0)]


def select_trained(frame: pd.DataFrame) -> pd.DataFrame:
    """Select the rows after the filter, which the update sees; the rows before it if the filter kept nothing."""
    rows = drop_empty_batches(frame) if "empty_after_filter" in frame else frame
    filtered_rows = rows[~rows["prefilter"]]
    return filtered_rows if len(filtered_rows) else rows


def select_buckets(frame: pd.DataFrame) -> pd.DataFrame:
    """Select the rows of single buckets (not `all`), sorted by bucket number within each analysis."""
    rows = frame[frame["bucket"] != WHOLE_BATCH]
    # As text, bucket_10 would come before bucket_2.
    numbered_rows = rows.assign(
        _analysis=rows.groupby(ANALYSIS_KEYS, sort=False).ngroup(),
        _number=rows["bucket"].str.extract(r"(\d+)$", expand=False).astype("float64"),
    )
    return numbered_rows.sort_values(["_analysis", "_number"], kind="stable")[list(frame)]


def make_bucket_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Make a table with a row per bucket and component (task, kl, entropy, total) of one analysis.

    A component that is off has `on` False and no numbers.

    Columns: bucket, component, on, norm, norm_per_sample, norm_per_token, loss, bucket_mode, reward_std_mean,
    reward_std_min, reward_std_max, sample_count, group_count. frame: rows of one analysis in `StudyFrames.gradients`.
    """
    value_columns = ["norm", "norm_per_sample", "norm_per_token", "loss"]
    bucket_columns = ["bucket_mode", *_REWARD_STDS, "sample_count", "group_count"]
    rows = select_buckets(drop_empty_batches(frame))
    # Every bucket with every component: a component that is off has no rows, but figures show that it is off.
    buckets = rows[["bucket", *bucket_columns]].drop_duplicates("bucket")
    grid = buckets.merge(pd.DataFrame({"component": [*COMPONENTS, "total"]}), how="cross")
    values = rows[["bucket", "component", *value_columns]].assign(on=True)
    table = grid.merge(values, how="left", on=["bucket", "component"])
    table["on"] = table["on"].notna()
    return table[["bucket", "component", "on", *value_columns, *bucket_columns]]


def make_summary_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Make the table of the summary figure: reward std and two norms per bucket of one analysis.

    Columns: bucket, reward_std_mean, reward_std_min, reward_std_max, label (the bucket's number; Q1, Q2, ... for
    quantiles), task, regularizer, terms. The norms are the published ones: the norm of task, and the sum of the norms
    of `terms`, which is "KL + entropy" if both are on.
    """
    table = make_bucket_table(frame)
    bucket_rows = table.drop_duplicates("bucket")
    reward_stds = bucket_rows[["bucket", *_REWARD_STDS]]
    prefixes = np.where(bucket_rows["bucket_mode"] == "quantile", "Q", "")
    norms = table.pivot_table(index="bucket", columns="component", values="norm", dropna=False)
    # pivot_table sorts buckets as text and leaves out components that are off.
    norms = norms.reindex(index=reward_stds["bucket"], columns=list(COMPONENTS))
    terms = [name for name in REGULARIZERS if norms[name].notna().any()]
    return reward_stds.assign(
        label=prefixes + reward_stds["bucket"].str.removeprefix("bucket_"),
        task=norms["task"].to_numpy(),
        regularizer=norms[list(REGULARIZERS)].sum(axis=1, min_count=1).to_numpy(),
        terms=" + ".join("KL" if name == "kl" else name for name in terms),
    ).reset_index(drop=True)


def make_steps_table(gradients: pd.DataFrame, steps: Sequence[int]) -> pd.DataFrame:
    """Stack `make_summary_table` of each step's trained batch, for one run and source, adding step and prefilter."""
    rows_by_step = {step: select_trained(gradients[gradients["step"] == step]) for step in steps}
    summaries = [
        make_summary_table(rows).assign(step=step, prefilter=bool(rows["prefilter"].iloc[0]))
        for step, rows in rows_by_step.items()
    ]
    return pd.concat(summaries, ignore_index=True)


def make_share_table(gradients: pd.DataFrame) -> pd.DataFrame:
    """Make a table of shares of the expected step: a row per bucket of every analysis, with that of each component.

    Columns: `ANALYSIS_KEYS`, bucket, reward_std_mean, and signed shares: task, kl, entropy, value (missing if off) and
    regularizer = kl + entropy. task, regularizer and value sum to 1. regularizer_low and regularizer_high are the
    interval of the regularizer, missing on a shared trunk with both terms on.
    """
    rows = drop_empty_batches(select_buckets(gradients))
    wide = _pivot_by_component(rows, "signal_share")
    is_on, has_no_value_term = wide[list(REGULARIZERS)].notna(), wide["value"].isna()
    # min_count=1: without any regularizer the sum is missing instead of 0. Without a task there is no share to compare.
    wide["regularizer"] = wide[list(REGULARIZERS)].sum(axis=1, min_count=1).where(wide["task"].notna())
    for end, other in (("low", "high"), ("high", "low")):
        term_bounds = _pivot_by_component(rows, f"signal_share_{end}")[list(REGULARIZERS)].where(is_on).max(axis=1)
        # With one regularizer on, its interval is used. With both, their sum is 1 minus the share of the task, so its
        # low end follows from the high end of the task. This does not hold with a value term (a shared trunk).
        complement = 1 - _pivot_by_component(rows, f"signal_share_{other}")["task"].where(has_no_value_term)
        both_bounds = complement.where(is_on.all(axis=1))
        wide[f"regularizer_{end}"] = term_bounds.where(is_on.sum(axis=1) == 1, both_bounds)
    return wide.reset_index().rename_axis(columns=None)


def _pivot_by_component(rows: pd.DataFrame, column: str) -> pd.DataFrame:
    """Pivot a column of `gradients` into a table with one row per bucket and one column per component."""
    components, keys = [*COMPONENTS, "value"], [*ANALYSIS_KEYS, "bucket", "reward_std_mean"]
    wide = rows[rows["component"].isin(components)].set_index([*keys, "component"])[column].unstack("component")
    return wide.reindex(index=pd.MultiIndex.from_frame(rows[keys].drop_duplicates()), columns=components)


def select_report_lines(gradients: pd.DataFrame) -> pd.DataFrame:
    """Select the rows of `gradients` that a report draws. The new column `line` names their line in the figure.

    Analyses during training: with a single arm, one line per step, for at most `_MAX_LINES` evenly spaced steps; with
    several arms, one line per arm, from the last analysis of each run. Each probe is a separate line.
    """
    rows, has_several_arms = drop_empty_batches(gradients), gradients["arm"].nunique() > 1
    training_rows, probe_rows = rows[rows["source"] == "train"], rows[rows["source"] == "probe"]
    last_steps = training_rows.groupby(["study", "run_id"])["step"].transform("max")
    steps = subsample_evenly(sorted(set(training_rows["step"])), _MAX_LINES)
    is_shown = training_rows["step"] == last_steps if has_several_arms else training_rows["step"].isin(steps)
    training_rows = training_rows[is_shown]
    probe_counts = probe_rows.groupby("arm")["step"].nunique().to_dict()

    def format_line_name(arm: str, step: int, source: str) -> str:
        if not has_several_arms:
            return f"step {step}{', probe' * (source == 'probe')}"
        return f"{arm}, probe{f' of step {step}' * (probe_counts[arm] > 1)}" if source == "probe" else arm

    # Legend order follows row order: training first, by step for one arm, by the order of the study for several.
    line_rows = pd.concat([training_rows, probe_rows])
    if not has_several_arms:
        line_rows = line_rows.sort_values(["source", "step"], ascending=[False, True], kind="stable")
    names = [format_line_name(*row) for row in line_rows[["arm", "step", "source"]].itertuples(index=False, name=None)]
    return line_rows.assign(line=pd.Series(names, index=line_rows.index, dtype=object))


def make_signal_lines(gradients: pd.DataFrame) -> pd.DataFrame:
    """Make lines of the task gradient's signal-to-noise ratio: a row per bucket of each `select_report_lines` line.

    Columns: `ANALYSIS_KEYS`, line, bucket, reward_std (mean of the bucket), value, low, high.
    """
    rows = select_buckets(select_report_lines(gradients))
    return _make_lines(rows[rows["component"] == "task"], "snr")


def _make_lines(rows: pd.DataFrame, measure: str) -> pd.DataFrame:
    """Select the columns of lines of a measure with an interval, and name them alike for all measures."""
    names = {"reward_std_mean": "reward_std", measure: "value", f"{measure}_low": "low", f"{measure}_high": "high"}
    return rows[[*ANALYSIS_KEYS, "line", "bucket", *names]].rename(columns=names).dropna(subset="value")


def make_share_lines(gradients: pd.DataFrame) -> pd.DataFrame:
    """Make lines of the regularizer's signed share, like `make_signal_lines`."""
    lines = select_report_lines(gradients)
    names = lines[[*ANALYSIS_KEYS, "line"]].drop_duplicates()
    return _make_lines(make_share_table(lines).merge(names, on=ANALYSIS_KEYS), "regularizer")


def compute_trends(
    gradients: pd.DataFrame, generator: np.random.Generator, measures: Sequence[str] = TREND_MEASURES
) -> pd.DataFrame:
    """Compute the trend of each measure with the reward std, over the buckets of each analysis and component.

    Columns: `ANALYSIS_KEYS`, component, measure, buckets (number of buckets with a value), rho (Spearman, of the
    measure with reward_std_mean), p (two-sided, by permuting the buckets), and ratio: mean of the measure over the
    upper half of the buckets / mean over the lower half, without the middle bucket. `signal` has no ratio because it
    may be negative. With six buckets the smallest p is 2/720. With fewer than 3 buckets there is no rho.
    """
    rows, keys = [], [*ANALYSIS_KEYS, "component", "measure"]
    for names, points in _make_points(gradients, measures).groupby(keys, sort=False):
        x, y = points["reward_std"], points["value"]
        trend = spearman_trend(x, y, np.zeros(len(points)), generator, NUM_PERMUTATIONS)
        values = points.sort_values("reward_std", kind="stable")["value"].to_numpy()
        half, ratio = len(values) // 2, math.nan  # with an odd number the middle bucket is in neither half
        # A ratio of values that may be negative is meaningless.
        if half and names[-1] != "signal" and (lower := values[:half].mean()) > 0:
            ratio = float(values[-half:].mean() / lower)
        rows.append((*names, trend.n, trend.value, trend.p, ratio))
    return pd.DataFrame(rows, columns=[*keys, "buckets", "rho", "p", "ratio"])


def _make_points(gradients: pd.DataFrame, measures: Sequence[str]) -> pd.DataFrame:
    """Make a table with a row per bucket, component and measure that has a value.

    Columns: `ANALYSIS_KEYS`, component, measure, reward_std, value.
    """
    rows = select_buckets(gradients[gradients["component"].isin(COMPONENTS)])
    measure_points = [
        rows[[*ANALYSIS_KEYS, "component"]].assign(measure=name, reward_std=rows["reward_std_mean"], value=rows[name])
        for name in measures
    ]
    return pd.concat(measure_points, ignore_index=True).dropna(subset=["reward_std", "value"])


def summarize_trends(
    gradients: pd.DataFrame, generator: np.random.Generator, measures: Sequence[str] = TREND_MEASURES
) -> pd.DataFrame:
    """Combine `compute_trends` over all analyses of an arm: one row per arm, source, prefilter, component and measure.

    runs, analyses and buckets are counts. rho is the mean over runs of the mean over the steps of a run; rho_low and
    rho_high are its t interval over runs, with three or more runs. ratio is the geometric mean, with the same interval
    on the log scale. p permutes the buckets within every analysis: it refers to these measurements and not to other
    runs, because the steps of one run are not independent runs.
    """
    analysis_trends = compute_trends(gradients, generator, measures)
    points, axes = _make_points(gradients, measures), ["reward_std", "value"]
    keys = ["study", "arm", "source", "prefilter", "component", "measure"]
    # Ranks within an analysis: analyses differ in scale, and only the order within each one is permuted.
    ranked = points.assign(block=points.groupby(ANALYSIS_KEYS, sort=False).ngroup())
    ranked[axes] = points.groupby([*ANALYSIS_KEYS, "component", "measure"])[axes].rank()
    pooled_trends = {
        names: spearman_trend(rows["reward_std"], rows["value"], rows["block"], generator, NUM_PERMUTATIONS)
        for names, rows in ranked.groupby(keys, sort=False)
    }
    rows = []
    for names, trends in analysis_trends.groupby(keys, sort=False):
        log_rows = trends.assign(ratio=np.log(trends["ratio"].where(trends["ratio"] > 0)))
        # Average over the steps of a run first, then over runs: steps of one run are not independent.
        means = (log_rows.groupby("run_id")[name].mean().dropna() for name in ("rho", "ratio"))
        rho, ratio = (mean_over_seeds(values, min_seeds=MIN_SEEDS) for values in means)
        ratio = ratio._replace(value=math.exp(ratio.value), low=math.exp(ratio.low), high=math.exp(ratio.high))
        row = dict(zip(keys, names, strict=True))
        row |= {"runs": trends["run_id"].nunique(), "analyses": len(trends), "buckets": int(trends["buckets"].sum())}
        row |= make_estimate_columns("rho", cut_interval(rho, -1.0, 1.0)) | make_estimate_columns("ratio", ratio)
        rows.append(row | {"p": pooled_trends[names].p})
    estimates = ("rho", "rho_low", "rho_high", "ratio", "ratio_low", "ratio_high")
    return pd.DataFrame(rows, columns=[*keys, "runs", "analyses", "buckets", *estimates, "p"])
