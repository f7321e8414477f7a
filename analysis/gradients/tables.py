"""Tables of gradient analyses: the numbers behind each picture, signal told from noise, and trends.

One analysis is what a run measured on one batch: at one step, while training or as a probe of a checkpoint, before the
filter or after it. Its rows of `StudyFrames.gradients` are one component of the loss in one bucket of groups each.
Buckets are ordered by reward spread; the bucket `all` is the whole batch. A batch of which the filter kept nothing is
one row without a gradient, which the tables leave out.
"""

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import pandas as pd

from analysis.data.compare import SEEDS_FOR_SEEDS
from analysis.data.frames import records
from analysis.stats.estimates import Estimate, mean_over_seeds, spearman_trend

T = TypeVar("T")

ANALYSIS = ["study", "run_id", "arm", "seed", "source", "step", "prefilter"]
WHOLE = "all"
REGULARIZERS = ("kl", "entropy")
COMPONENTS = ("task", *REGULARIZERS)
MEASURES = ("norm", "mean_norm", "signal")
TRUSTED = (
    "reward_std_mean", "group_count", "fold_count", "norm", "mean_norm", "signal", "noise", "snr", "snr_low",
    "snr_high", "share", "signal_share", "signal_share_low", "signal_share_high", "weight", "cosine_task",
    "cosine_entropy", "cosine_kl",
)  # fmt: skip
DRAWS = 1999


def some_of(values: Sequence[T], at_most: int) -> list[T]:
    """`values`, or where there are more than `at_most` so many of them, evenly spaced, the first and last included."""
    if len(values) <= at_most:
        return list(values)
    return [values[index] for index in np.linspace(0, len(values) - 1, at_most).round().astype(int)]


def analyses(gradients: pd.DataFrame) -> pd.DataFrame:
    """One row an analysis with at least one bucket, those of a run by step.

    Columns: the analysis's names, groups, sequences, buckets (how many), and components, a text such as task, entropy.
    """
    rows = []
    for names, found in gradients.groupby(ANALYSIS, sort=False):
        whole, buckets = found[found["bucket"] == WHOLE], of_buckets(found)
        components = [name for name in dict.fromkeys(found["component"]) if name != "total"]
        if len(buckets):
            rows.append({
                **dict(zip(ANALYSIS, names, strict=True)), "groups": whole["group_count"].max(),
                "sequences": whole["sample_count"].max(), "buckets": buckets["bucket"].nunique(),
                "components": ", ".join(components),
            })  # fmt: skip
    return pd.DataFrame(rows, columns=[*ANALYSIS, "groups", "sequences", "buckets", "components"])


def of_step(frame: pd.DataFrame, run_id: str, source: str, step: int) -> pd.DataFrame:
    """Rows of `gradients` or of `gradient_groups` of one run, source and step, before and after the filter."""
    return frame[(frame["run_id"] == run_id) & (frame["source"] == source) & (frame["step"] == step)]


def measured(gradients: pd.DataFrame) -> pd.DataFrame:
    """The rows of `gradients` with a gradient: without those that say that the filter kept nothing."""
    return gradients[~(gradients["empty_after_filter"] > 0)]


def as_trained(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows after the filter, which the update sees; those before it where the filter kept nothing."""
    rows = measured(frame) if "empty_after_filter" in frame else frame
    after = rows[~rows["prefilter"]]
    return after if len(after) else rows


def check_one(frame: pd.DataFrame, names: list[str]) -> None:
    """ValueError unless the rows of `frame` agree in `names`."""
    found = frame[names].drop_duplicates()
    if len(found) != 1:
        listed = "; ".join(", ".join(f"{name} {value}" for name, value in row.items()) for row in records(found))
        raise ValueError(f"These rows are of {len(found)} analyses ({listed}): take those of one.")


def of_buckets(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of single buckets, by the bucket's number within an analysis; the bucket `all` is left out."""
    rows = frame[frame["bucket"] != WHOLE]
    place = rows.assign(
        _analysis=rows.groupby(ANALYSIS, sort=False).ngroup(),
        _number=rows["bucket"].str.extract(r"(\d+)$", expand=False).astype("float64"),
    )
    return place.sort_values(["_analysis", "_number"], kind="stable")[list(frame)]


def bucket_table(frame: pd.DataFrame) -> pd.DataFrame:
    """One row a bucket and component (task, kl, entropy, total) of one analysis; what is off has `on` False, no number.

    Columns: bucket, component, on, norm, norm_per_sample, norm_per_token, loss, bucket_mode, reward_std_mean,
    reward_std_min, reward_std_max, sample_count, group_count. frame: rows of `gradients`; ValueError where several
    analyses have them.
    """
    check_one(frame, ANALYSIS)
    own = ["norm", "norm_per_sample", "norm_per_token", "loss"]
    shared = [
        "bucket",
        "bucket_mode",
        "reward_std_mean",
        "reward_std_min",
        "reward_std_max",
        "sample_count",
        "group_count",
    ]
    rows = of_buckets(measured(frame))
    grid = (
        rows[shared].drop_duplicates("bucket").merge(pd.DataFrame({"component": [*COMPONENTS, "total"]}), how="cross")
    )
    table = grid.merge(rows[["bucket", "component", *own]].assign(on=True), how="left", on=["bucket", "component"])
    table["on"] = table["on"].notna()
    return table[["bucket", "component", "on", *own, *shared[1:]]]


def summary_table(frame: pd.DataFrame) -> pd.DataFrame:
    """One row a bucket of one analysis, with its reward spread and two norms: behind the summary.

    Columns: bucket, reward_std_mean, reward_std_min, reward_std_max, label (the bucket's number, Q1, Q2, ... of
    quantiles), task, regularizer, terms. The norms are the published ones: that of task, and the sum of those of
    `terms`, "KL + entropy" where both are on.
    """
    table = bucket_table(frame)
    single = table.drop_duplicates("bucket")
    spread = single[["bucket", "reward_std_mean", "reward_std_min", "reward_std_max"]]
    letter = np.where(single["bucket_mode"] == "quantile", "Q", "")
    norms = table.pivot_table(index="bucket", columns="component", values="norm", dropna=False)
    norms = norms.reindex(index=spread["bucket"], columns=list(COMPONENTS))
    terms = [name for name in REGULARIZERS if norms[name].notna().any()]
    return spread.assign(
        label=letter + spread["bucket"].str.removeprefix("bucket_"), task=norms["task"].to_numpy(),
        regularizer=norms[list(REGULARIZERS)].sum(axis=1, min_count=1).to_numpy(),
        terms=" + ".join("KL" if name == "kl" else name for name in terms),
    ).reset_index(drop=True)  # fmt: skip


def steps_table(gradients: pd.DataFrame, steps: Sequence[int]) -> pd.DataFrame:
    """`summary_table` of each of the `steps` of one run and source, as trained on, with columns step and prefilter."""
    shown = {step: as_trained(gradients[gradients["step"] == step]) for step in steps}
    parts = [
        summary_table(rows).assign(step=step, prefilter=bool(rows["prefilter"].iloc[0])) for step, rows in shown.items()
    ]
    return pd.concat(parts, ignore_index=True)


def trusted(gradients: pd.DataFrame) -> pd.DataFrame:
    """One row a bucket and component of every analysis, the bucket `all` last: signal told from noise.

    The analysis's names, bucket, component, the columns TRUSTED (docs/metrics.md), and `above_noise`: whether the whole
    interval of the signal-to-noise ratio is above 0. Noise does not bias `signal`, and raises the published norm and
    mean_norm, which stand beside it to compare.
    """
    rows = measured(pd.concat([of_buckets(gradients), gradients[gradients["bucket"] == WHOLE]]))
    table = rows[[*ANALYSIS, "bucket", "component", *TRUSTED]].reset_index(drop=True)
    return table.assign(above_noise=table["snr_low"] > 0)


def share_column(gradients: pd.DataFrame) -> str:
    """Which shares to show: `signal_share`, those in the expected step, or `share` where no row has one."""
    return "signal_share" if gradients["signal_share"].notna().any() else "share"


def shares(gradients: pd.DataFrame, column: str = "share") -> pd.DataFrame:
    """One row a bucket of every analysis: its names, bucket, reward_std_mean, and the share of each part.

    column: `share`, those in the step as it was sampled, or `signal_share`, those in the expected step. task, kl,
    entropy, value (missing where off) and regularizer = kl + entropy are signed shares; task, regularizer and value sum
    to 1. regularizer_low and regularizer_high are the interval of a signal_share; missing on a shared trunk with both
    terms on.
    """
    rows = measured(of_buckets(gradients))
    wide = _by_component(rows, column)
    on, alone = wide[list(REGULARIZERS)].notna(), wide["value"].isna()
    wide["regularizer"] = wide[list(REGULARIZERS)].sum(axis=1, min_count=1).where(wide["task"].notna())
    for end, other in (("low", "high"), ("high", "low")):
        if column == "share":
            wide[f"regularizer_{end}"] = np.nan
            continue
        own = _by_component(rows, f"{column}_{end}")[list(REGULARIZERS)].where(on)
        rest = 1 - _by_component(rows, f"{column}_{other}")["task"].where(alone)  # all that the task does not have
        wide[f"regularizer_{end}"] = own.max(axis=1).where(on.sum(axis=1) == 1, rest.where(on.all(axis=1)))
    return wide.reset_index().rename_axis(columns=None)


def _by_component(rows: pd.DataFrame, column: str) -> pd.DataFrame:
    """A column of `gradients` with a row a bucket and a column a component."""
    parts, keys = [*COMPONENTS, "value"], [*ANALYSIS, "bucket", "reward_std_mean"]
    wide = rows[rows["component"].isin(parts)].set_index([*keys, "component"])[column].unstack("component")
    return wide.reindex(index=pd.MultiIndex.from_frame(rows[keys].drop_duplicates()), columns=parts)


def report_lines(gradients: pd.DataFrame, at_most: int = 6) -> pd.DataFrame:
    """The rows of `gradients` that a report draws, with `line`, the name of the line that they belong to.

    While training: of one arm a line a step, of at most so many steps, evenly spaced; of several arms a line an arm,
    the last analysis of each of its runs. Every probe is on a line of its own.
    """
    rows, several = measured(gradients), gradients["arm"].nunique() > 1
    training, probes = rows[rows["source"] == "train"], rows[rows["source"] == "probe"]
    last = training.groupby(["study", "run_id"])["step"].transform("max")
    steps = some_of(sorted(set(training["step"])), at_most)
    training = training[training["step"] == last] if several else training[training["step"].isin(steps)]
    probed = probes.groupby("arm")["step"].nunique().to_dict()

    def name(arm: str, step: int, source: str) -> str:
        if not several:
            return f"step {step}{', probe' * (source == 'probe')}"
        return f"{arm}, probe{f' of step {step}' * (probed[arm] > 1)}" if source == "probe" else arm

    parts = [part if several else part.sort_values("step", kind="stable") for part in (training, probes)]
    found = pd.concat(parts)
    names = [name(*row) for row in found[["arm", "step", "source"]].itertuples(index=False, name=None)]
    return found.assign(line=pd.Series(names, index=found.index, dtype=object))


def signal_lines(gradients: pd.DataFrame) -> pd.DataFrame:
    """The task gradient's signal-to-noise ratio on the lines of `report_lines`, one row a bucket.

    Columns: the analysis's names, line, bucket, spread (reward_std_mean), value, low, high.
    """
    rows = of_buckets(report_lines(gradients))
    rows = rows[rows["component"] == "task"].rename(
        columns={"reward_std_mean": "spread", "snr": "value", "snr_low": "low", "snr_high": "high"}
    )
    return rows.dropna(subset="value")[[*ANALYSIS, "line", "bucket", "spread", "value", "low", "high"]]


def share_lines(gradients: pd.DataFrame) -> pd.DataFrame:
    """The regularizer's signed share on the lines of `report_lines`, as `signal_lines`: that of `share_column`."""
    lines = report_lines(gradients)
    names = lines[[*ANALYSIS, "line"]].drop_duplicates()
    found = shares(lines, share_column(lines)).merge(names, on=ANALYSIS).drop(columns="value")
    found = found.rename(columns={
        "reward_std_mean": "spread", "regularizer": "value", "regularizer_low": "low", "regularizer_high": "high",
    })  # fmt: skip
    return found.dropna(subset="value")[[*ANALYSIS, "line", "bucket", "spread", "value", "low", "high"]]


def trends(gradients: pd.DataFrame, generator: np.random.Generator, measures: Sequence[str] = MEASURES) -> pd.DataFrame:
    """How each measure of each component goes with the reward spread over the buckets of each analysis.

    Columns: the analysis's names, component, measure, buckets (with a number), rho (Spearman, of the measure with
    reward_std_mean), p (two-sided, by permuting the buckets), and ratio: mean of the measure over the upper half of the
    buckets / over the lower half, the middle one left out; none for `signal`, which may be negative. With six buckets
    the smallest p is 2/720. Fewer than 3 buckets: no rho.
    """
    rows = []
    for names, points in _points(gradients, measures).groupby([*ANALYSIS, "component", "measure"], sort=False):
        found = spearman_trend(points["spread"], points["value"], np.zeros(len(points)), generator, DRAWS)
        rows.append({
            **dict(zip([*ANALYSIS, "component", "measure"], names, strict=True)),
            "buckets": found.n, "rho": found.rho, "p": found.p, "ratio": _ratio(points),
        })  # fmt: skip
    return pd.DataFrame(rows, columns=[*ANALYSIS, "component", "measure", "buckets", "rho", "p", "ratio"])


def _points(gradients: pd.DataFrame, measures: Sequence[str]) -> pd.DataFrame:
    """One row a bucket, component and measure that has a number: the analysis's names, component, spread, value."""
    rows = of_buckets(gradients[gradients["component"].isin(COMPONENTS)])
    parts = [rows[[*ANALYSIS, "component"]].assign(measure=name, spread=rows["reward_std_mean"], value=rows[name])
             for name in measures]  # fmt: skip
    return pd.concat(parts, ignore_index=True).dropna(subset=["spread", "value"])


def _ratio(points: pd.DataFrame) -> float:
    values = points.sort_values("spread", kind="stable")["value"].to_numpy()
    half = len(values) // 2
    if half == 0 or (points["measure"] == "signal").any():
        return math.nan
    lower, upper = float(values[:half].mean()), float(values[-half:].mean())
    return upper / lower if lower > 0 else math.nan


def trend_summary(
    gradients: pd.DataFrame, generator: np.random.Generator, measures: Sequence[str] = MEASURES
) -> pd.DataFrame:
    """`trends` over all analyses of an arm: one row an arm, source, prefilter, component and measure.

    runs, analyses, buckets: how many there are. rho is the mean over runs of the mean over a run's steps; rho_low and
    rho_high are its t interval over runs, from three on. ratio is the geometric mean, its interval likewise on the log.
    p permutes the buckets within every analysis: it asks whether these measurements go with the spread, and says
    nothing about other runs; steps of one run are no independent runs.
    """
    single = trends(gradients, generator, measures)
    points = _points(gradients, measures)
    group = ["study", "arm", "source", "prefilter", "component", "measure"]
    ranked = points.assign(block=points.groupby(ANALYSIS, sort=False).ngroup())
    ranked[["spread", "value"]] = points.groupby([*ANALYSIS, "component", "measure"])[["spread", "value"]].rank()
    together: Any = ranked.groupby(group, sort=False)
    pooled = {names: spearman_trend(rows["spread"], rows["value"], rows["block"], generator, DRAWS)
              for names, rows in together}  # fmt: skip
    rows = [{
        **dict(zip(group, names, strict=True)), "runs": found["run_id"].nunique(), "analyses": len(found),
        "buckets": int(found["buckets"].sum()), **_over_runs(found), "p": pooled[names].p,
    } for names, found in single.groupby(group, sort=False)]  # fmt: skip
    more = ["runs", "analyses", "buckets", "rho", "rho_low", "rho_high", "ratio", "ratio_low", "ratio_high", "p"]
    return pd.DataFrame(rows, columns=[*group, *more])


def _over_runs(found: pd.DataFrame) -> dict[str, float]:
    """Mean and interval over runs of rho and of ratio. found: rows of `trends`."""
    logs = found.assign(ratio=np.log(found["ratio"].where(found["ratio"] > 0)))
    rho, ratio = (_interval(logs.groupby("run_id")[name].mean().dropna()) for name in ("rho", "ratio"))
    low, high = (float(end) for end in np.clip((rho.low, rho.high), -1, 1))
    return {
        "rho": rho.value, "rho_low": low, "rho_high": high,
        "ratio": math.exp(ratio.value), "ratio_low": math.exp(ratio.low), "ratio_high": math.exp(ratio.high),
    }  # fmt: skip


def _interval(per_run: "pd.Series[float]") -> Estimate:
    found = mean_over_seeds(per_run)
    few = len(per_run) < SEEDS_FOR_SEEDS
    return Estimate(found.value, n=found.n) if few else found
