"""Scoring: collect the outcomes of each arm's runs, and estimate the differences between arms."""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from analysis.data.frames import StudyFrames
from analysis.data.replicates import find_recorded_values
from analysis.data.schemas import Row, get_family
from analysis.data.summaries import LATE_EVALUATIONS, count_missed_evaluations
from analysis.stats.estimates import MIN_SEEDS, Estimate, holm_adjust
from analysis.stats.noise import (
    ARM_DOUBT,
    REFERENCE_DOUBT,
    Noise,
    Pool,
    compute_doubt,
    compute_equivalence_p_value,
    compute_level_variance,
    estimate_pooled_mean,
    estimate_unpaired_difference,
    fit_noise,
)
from analysis.stats.sequential import (
    compute_sequential_equivalence_p_value,
    estimate_mean_sequentially,
    find_fewest_seeds,
)
from trainable.runs.history import MASTERED_SUCCESS
from trainable.runs.study_record import StudyRecord

SCORED_STATUSES = ("completed", "early_stopped")
SIGNIFICANCE_LEVEL = 0.05


def find_failed_stops(runs: pd.DataFrame) -> "pd.Series[bool]":
    """Mark the runs that a rule stopped as failures: those that had not mastered their game by then.

    runs: rows of `trials` of a study that fine-tunes language models.
    """
    successes = runs[["final_val_success", "final_train_success"]]
    return (runs["status"] == "early_stopped") & ~(successes >= MASTERED_SUCCESS).all(axis="columns")


def require_single_study(frames: StudyFrames) -> StudyFrames:
    """Return `frames` if they contain exactly one study; otherwise raise a ValueError that lists the studies."""
    study_names = [study.name for study in frames.studies]
    if len(study_names) != 1:
        raise ValueError(
            f"These frames contain {len(study_names)} studies ({', '.join(study_names)}). Select one: "
            "frames.select_study(NAME)."
        )
    return frames


def list_arms(frames: StudyFrames) -> list[str]:
    """List the arms of the study, in the order of study.json."""
    return list(dict.fromkeys(frames.trials["arm"]))


def select_runs(frames: StudyFrames, arm: str, *, scored_only: bool = False) -> pd.DataFrame:
    """Select the rows of `trials` of one arm, without settings.

    scored_only: leave out runs that neither completed nor were stopped by a rule.
    """
    runs = frames.runs_by_arm.get(arm, frames.runs.iloc[:0])
    return runs[runs["status"].isin(SCORED_STATUSES)] if scored_only else runs


DEFAULT_MARGINS = {"fraction": 0.05, "nats": 0.1}
"""By unit, the difference below which two arms count as equal, unless study.json declares another."""

Digests = Mapping[str, Mapping[int, Mapping[str, int]]]


@dataclass(frozen=True)
class Outcomes:
    """One outcome of all scored runs of a study, and what is known about its noise."""

    column: str
    """The column of `trials`."""
    values: pd.DataFrame
    """One row per arm and one column per seed; NaN where there is no scored run or no value."""
    min_variances: Mapping[str, float]
    """For each arm, the variance that evaluation alone adds to the outcome of one run; 0 if unknown."""
    noise: Noise
    """Noise of the runs, estimated from all arms, or from recorded runs if no arm has two."""
    num_replicates: int = 0
    """Number of recorded runs that the noise is estimated from; 0 if it comes from the study itself."""
    num_comparisons: int = 0
    """Number of comparisons (arms times outcomes) tested at several looks; 0 if the number of seeds was fixed in
    advance."""
    digests: Digests = field(default_factory=dict)
    """For each arm and seed, `StudyFrames.run_digests`."""
    is_fraction: bool = False
    """Whether the outcome is a fraction, so that no difference exceeds 1."""

    @functools.cached_property
    def _values_by_arm(self) -> dict[str, "pd.Series[float]"]:
        return {str(arm): values.dropna() for arm, values in self.values.iterrows()}

    def get_values(self, arm: str) -> "pd.Series[float]":
        """Return the outcomes of an arm by seed, without missing ones."""
        return self._values_by_arm[arm] if arm in self._values_by_arm else pd.Series(dtype=float)

    def get_doubt(self, pool: Pool | None, *arms: str, limits: tuple[float, float] = REFERENCE_DOUBT) -> float:
        """Return the largest doubt, over several arms, that they are as noisy as the others; see `compute_doubt`."""
        if pool is None:
            return 0.0
        rows = [row for row, arm in enumerate(self.values.index) if arm in arms]
        return float(compute_doubt(pool.prominence[rows], limits).max(initial=0.0))

    def get_doubts(self, arm: str, baseline: str) -> tuple[float, float]:
        """Return the doubts of an arm and of its baseline."""
        pool = self.noise.paired if is_paired(self, arm, baseline) else self.noise.unpaired
        return self.get_doubt(pool, arm, limits=ARM_DOUBT), self.get_doubt(pool, baseline)

    def has_equal_rows(self, arm: str, baseline: str) -> bool:
        """Check whether all rows of an arm equal the baseline's bit for bit, seed by seed: the setting has no effect.

        A measure that only one of the two has, such as the age of replayed samples, does not count.
        """
        return arm != baseline and _has_equal_rows(self.digests, arm, baseline)

    def get_min_variance(self, *arms: str) -> float:
        """Return the mean of `min_variances` over several arms."""
        return float(np.mean([self.min_variances.get(arm, 0.0) for arm in arms]))


StopScoring = Literal["kept", "scored 0", "left out"]
"""How a run that a rule stopped as a failure is scored: with its value (the protocol), with 0, or not at all."""


def collect_outcomes(frames: StudyFrames, column: str, stopped: StopScoring = "kept") -> Outcomes:
    """Collect a column of `trials` for all scored runs of a study, and estimate its noise."""
    trials = require_single_study(frames).runs
    (family,) = frames.families
    runs = trials[trials["status"].isin(SCORED_STATUSES)]
    if stopped == "scored 0":
        runs = runs.assign(**{column: runs[column].mask(find_failed_stops(runs), 0.0)})
    elif stopped == "left out":
        runs = runs[~find_failed_stops(runs)]
    values = runs.pivot_table(index="arm", columns="seed", values=column, sort=False).sort_index(axis=1)
    values = values.reindex(index=[arm for arm in list_arms(frames) if arm in values.index])
    digests: dict[str, dict[int, Mapping[str, int]]] = {}
    for arm, seed, run_id in runs[["arm", "seed", "run_id"]].itertuples(index=False):
        if run_id in frames.run_digests:
            digests.setdefault(arm, {})[seed] = frames.run_digests[run_id]
    study, is_primary = frames.studies[0], column == family.primary_column
    noise, num_replicates = _fit_noise(study, column, values, digests)
    # Size of the family of tests that the column belongs to.
    num_comparisons = max(len(study.axis.values) - 1, 1) * (1 if is_primary else len(family.secondary_columns))
    return Outcomes(
        column,
        values,
        estimate_evaluation_variances(frames) if is_primary else {},
        noise,
        num_replicates,
        num_comparisons if has_added_seeds(study) else 0,
        digests,
        any(known.name == column and known.unit == "fraction" for known in family.trial_columns),
    )


def collect_joint_outcomes(studies: Mapping[str, StudyFrames], column: str, num_comparisons: int) -> Outcomes:
    """Collect a column of `trials` for all scored runs of several studies of one family, with their noise pooled.

    Arm A of the study labeled L is called `L A` (see `label_arm`). A seed gives the same levels and random numbers in
    all studies, so runs of one seed are paired across studies.

    num_comparisons: number of differences that will be estimated, used only if seeds were added to one of the studies
    after a look.
    """
    parts = {label: collect_outcomes(frames, column) for label, frames in studies.items()}
    tables, digests, min_variances = [], dict[str, Any](), dict[str, float]()
    for label, outcomes in parts.items():
        tables.append(outcomes.values.rename(index=functools.partial(label_arm, label)))
        digests |= {label_arm(label, arm): seeds for arm, seeds in outcomes.digests.items()}
        min_variances |= {label_arm(label, arm): variance for arm, variance in outcomes.min_variances.items()}
    values = pd.concat(tables).sort_index(axis=1)
    noise, num_replicates = _fit_noise(next(iter(studies.values())).studies[0], column, values, digests)
    num_comparisons = num_comparisons if any(part.num_comparisons for part in parts.values()) else 0
    is_fraction = all(part.is_fraction for part in parts.values())
    return Outcomes(column, values, min_variances, noise, num_replicates, num_comparisons, digests, is_fraction)


def label_arm(label: str, arm: str) -> str:
    """Name an arm among the arms of several studies: `B 0.1` for the arm 0.1 of the study labeled B."""
    return f"{label} {arm}"


def _has_equal_rows(digests: Digests, one: str, other: str) -> bool:
    ones, others = digests.get(one, {}), digests.get(other, {})
    return bool(ones) and all(
        seed in others and all(columns[name] == others[seed][name] for name in columns.keys() & others[seed].keys())
        for seed, columns in ones.items()
    )


def _fit_noise(study: StudyRecord, column: str, values: pd.DataFrame, digests: Digests) -> tuple[Noise, int]:
    """Fit the noise of outcomes (arms, seeds). Also return the number of recorded runs used for it.

    Arms with equal rows are copies of the same runs, and count only once.
    """
    if not values.size:
        return Noise(None, None), 0
    has_noise = bool((values.notna().sum(axis=1) > 1).any())
    recorded = () if has_noise else find_recorded_values(study, column)
    arms = [str(arm) for arm in values.index]
    firsts = [next(i for i, one in enumerate(arms) if one == arm or _has_equal_rows(digests, arm, one)) for arm in arms]
    is_copy = np.array(firsts) != np.arange(len(arms))
    noise = fit_noise(np.where(is_copy[:, None], math.nan, values.to_numpy(dtype=float)), recorded)
    pools = (pool and pool._replace(prominence=pool.prominence[firsts]) for pool in noise)
    return Noise(*pools), len(recorded)


def has_added_seeds(study: StudyRecord) -> bool:
    """Check whether seeds were, or may be, added after a look at results, which invalidates an ordinary t test.

    study: content of study.json. Additional baseline seeds that were planned do not count.
    """
    num_seeds = len(study.seeds)
    num_baseline_seeds = num_seeds + len(study.extra_seeds.get(study.baseline, ()))
    # Older versions did not record the planned numbers of seeds.
    planned_seeds = study.planned_seeds or num_seeds
    planned_baseline_seeds = study.planned_baseline_seeds or num_baseline_seeds
    return (
        study.max_seeds is not None
        or num_seeds > planned_seeds
        or num_baseline_seeds > max(planned_baseline_seeds, planned_seeds)
    )


def estimate_evaluation_variances(frames: StudyFrames, *, before_training: bool = False) -> dict[str, float]:
    """Estimate, for each arm, how much variance evaluation alone adds to a run's late mean, averaged over its runs.

    before_training: use the validation before training instead.

    A level is played once per validation, so its outcomes over the last K validations have the variance s_l^2 (ddof 1),
    and a mean over validations of L levels with weights w_k has the variance sum_k w_k^2 sum_l s_l^2 / L^2. The weights
    are 1 / K, except that the last validation of a stopped run also stands for those that it missed. The policy changes
    a little between validations, which makes the estimate slightly too large. With K = 1 the estimate is p (1 - p) / L,
    the variance over new levels, which is larger as well. Arms without outcomes of single levels have no entry.
    """
    scored_runs = frames.runs[frames.runs["status"].isin(SCORED_STATUSES)]
    levels, missed = _select_late_levels(frames, scored_runs, before_training=before_training)
    if levels.empty:
        return {}
    by_level = levels.groupby(["run_id", "level"])["success"].agg(["mean", "var", "size"]).reset_index("level")
    by_run = by_level.groupby(level="run_id")
    p = by_run["mean"].mean()
    single = p * (1 - p)
    counts, last_counts = by_run["size"].mean(), 1 + missed
    squared_weights = (counts - 1 + last_counts**2) / (counts - 1 + last_counts) ** 2
    variance = by_run["var"].mean().fillna(single) * squared_weights / by_run.size()
    return variance.groupby(scored_runs.set_index("run_id")["arm"]).mean().to_dict()


def _select_late_levels(
    frames: StudyFrames, scored_runs: pd.DataFrame, *, before_training: bool = False
) -> tuple[pd.DataFrame, "pd.Series[int]"]:
    """Select single levels' outcomes in the last sampled validations. Also count each run's missed validations."""
    levels = frames.levels
    is_used = (levels["split"] == "val") & (levels["mode"] == "sampled") & ((levels["step"] == 0) == before_training)
    columns = ["run_id", "step", "level", "cluster", "success"]
    levels = levels.loc[is_used & levels["run_id"].isin(scored_runs["run_id"]), columns].astype({"success": float})
    missed = _count_missed_validations(levels, scored_runs)
    late_rank = levels.groupby("run_id")["step"].rank("dense", ascending=False)
    return levels[late_rank <= LATE_EVALUATIONS - levels["run_id"].map(missed).astype(int)], missed


def estimate_level_variances(frames: StudyFrames, baseline: str) -> dict[str, float]:
    """Estimate, for each arm, the variance of its difference from the baseline due to the sampling of levels.

    Uses the common seeds; see `compute_level_variance`. Empty unless all runs have the same levels, of two classes.
    """
    scored_runs = frames.runs[frames.runs["status"].isin(SCORED_STATUSES)]
    levels, _ = _select_late_levels(frames, scored_runs)
    # Each run numbers the classes of its levels itself.
    classes = levels[levels["run_id"] == levels["run_id"].iloc[0]] if len(levels) else levels
    clusters = classes.drop_duplicates("level").set_index("level")["cluster"].sort_index()
    rates = levels.groupby(["run_id", "level"], observed=True)["success"].mean().unstack()
    rates = rates.reindex(scored_runs["run_id"])  # a run stopped before its first validation has no rates
    if clusters.nunique() < 2 or rates.isna().any(axis=None):
        return {}
    run_ids = {str(arm): runs.set_index("seed")["run_id"] for arm, runs in scored_runs.groupby("arm", sort=False)}
    baseline_ids = run_ids.pop(baseline, pd.Series(dtype=object))
    variances = {}
    for arm, ids in run_ids.items():
        seeds = ids.index.intersection(baseline_ids.index)
        if len(seeds):
            differences = rates.loc[ids[seeds]].to_numpy() - rates.loc[baseline_ids[seeds]].to_numpy()
            variances[arm] = compute_level_variance(differences, clusters.to_numpy())
    return variances


def _count_missed_validations(levels: pd.DataFrame, scored_runs: pd.DataFrame) -> "pd.Series[int]":
    """Count, for each run, how many missed validations its last one stands for: at most `LATE_EVALUATIONS` - 1.

    levels: rows of sampled validations. Only runs stopped by a rule have missed any, see `compute_late_mean`.
    """
    steps = levels.groupby("run_id", observed=True)["step"].agg(["min", "max"])
    rows = steps.join(scored_runs.set_index("run_id")[["status", "steps_total"]])
    counts = [
        min(count_missed_evaluations(first, last, int(end)), LATE_EVALUATIONS - 1)
        if status == "early_stopped" and first > 0 and not pd.isna(end)
        else 0
        for first, last, status, end in rows.itertuples(index=False)
    ]
    return pd.Series(counts, index=steps.index)


def estimate_mean(outcomes: Outcomes, arm: str) -> Estimate:
    """Estimate the mean outcome of an arm over its seeds."""
    pool = outcomes.noise.unpaired
    min_variance, doubt = outcomes.get_min_variance(arm), outcomes.get_doubt(pool, arm)
    return estimate_pooled_mean(outcomes.get_values(arm), pool, min_variance=min_variance, doubt=doubt)


def estimate_difference(outcomes: Outcomes, arm: str, baseline: str) -> Estimate:
    """Estimate the outcome of an arm minus the baseline's.

    Runs are paired by seed if the two have at least two seeds in common, or the same single seed. Otherwise all runs of
    both are compared. The estimate is empty if either has no scored run.
    """
    sample, reference = outcomes.get_values(arm), outcomes.get_values(baseline)
    min_variance, doubts = outcomes.get_min_variance(arm, baseline), outcomes.get_doubts(arm, baseline)
    if outcomes.num_comparisons or is_paired(outcomes, arm, baseline):
        differences = (sample - reference).dropna()
        return estimate_contrast(
            outcomes, differences, outcomes.num_comparisons, min_variance=min_variance, doubt=max(doubts)
        )
    return estimate_unpaired_difference(sample, reference, outcomes.noise, min_variance, doubts)


def is_paired(outcomes: Outcomes, arm: str, baseline: str) -> bool:
    """Check whether runs are paired by seed: with two or more common seeds, or the same single seed."""
    seeds, reference_seeds = (outcomes.get_values(name).index for name in (arm, baseline))
    num_common = len(seeds.intersection(reference_seeds))
    return num_common > 1 or num_common == len(seeds) == len(reference_seeds)


def estimate_contrast(
    outcomes: Outcomes,
    per_seed: ArrayLike,
    num_comparisons: int,
    weight_norm: float = 2.0,
    min_variance: float = 0.0,
    doubt: float = 0.0,
) -> Estimate:
    """Estimate the mean over seeds of a contrast between runs, with pooled noise; see `estimate_pooled_mean`.

    If seeds were added after a look, the test is valid at all looks, for `num_comparisons` contrasts, and uses no
    pooled noise. With too few seeds for any verdict there is no interval.
    """
    if not outcomes.num_comparisons:
        return estimate_pooled_mean(per_seed, outcomes.noise.paired, weight_norm, min_variance, doubt)
    estimate = estimate_mean_sequentially(per_seed, num_comparisons=num_comparisons)
    return estimate if math.isfinite(estimate.low) else estimate._replace(low=math.nan, high=math.nan)


def estimate_gain(outcomes: Outcomes, base_values: Outcomes, arm: str) -> Estimate:
    """Estimate how much the outcome of an arm improved over training, run by run.

    base_values: the outcome before training. All arms start from the same policy, so its only noise is evaluation
    noise: the larger of its variance over seeds and `min_variances`. It is added to the noise of the runs.
    """
    differences = (outcomes.get_values(arm) - base_values.get_values(arm)).dropna().to_numpy()
    pool, base_pool = outcomes.noise.unpaired, base_values.noise.unpaired
    base_variance = max(base_pool.variance if base_pool else 0.0, base_values.get_min_variance(arm))
    min_variance, doubt = outcomes.get_min_variance(arm) + base_variance, outcomes.get_doubt(pool, arm)
    pool = pool and pool._replace(variance=pool.variance + base_variance)
    return estimate_pooled_mean(differences, pool, min_variance=min_variance, doubt=doubt)


def describe_difference_basis(outcomes: Outcomes, estimate: Estimate, arm: str, baseline: str) -> str:
    """Describe the basis of an `estimate_difference`, which may be unpaired or valid at every look."""
    if not outcomes.num_comparisons or not estimate.n:
        basis = describe_basis(outcomes, estimate, max(outcomes.get_doubts(arm, baseline)))
        if not basis or is_paired(outcomes, arm, baseline):
            return basis
        counts = [_count_seeds(len(outcomes.get_values(name))) for name in (arm, baseline)]
        return f"{counts[0]} against {counts[1]} of the baseline, {basis.partition(', ')[2]}"
    seeds_text = _count_seeds(estimate.n)
    fewest = find_fewest_seeds(outcomes.num_comparisons)
    if estimate.n < fewest:
        return f"over {seeds_text}, of which a test that is valid at every look needs {fewest}"
    return f"over {seeds_text}, with a test that is valid at every look"


def describe_basis(outcomes: Outcomes, estimate: Estimate, doubt: float) -> str:
    """Describe in words which seeds and noise an interval is based on; empty without an interval."""
    if not estimate.se > 0:
        return ""
    # An arm with a single seed shows no noise.
    num_noisy_arms = int((outcomes.values.notna().sum(axis=1) > 1).sum())
    source = "all arms" if num_noisy_arms > 1 else "the only arm with several runs"
    if outcomes.num_replicates:
        source = f"{outcomes.num_replicates} recorded runs"
    elif estimate.n == 2 or doubt == 1:
        source = "these runs alone"
    elif doubt > 0:
        source = "these runs and of all arms"
    return f"over {_count_seeds(estimate.n)}, with the noise of {source}"


def _count_seeds(count: int) -> str:
    return "one seed" if count == 1 else f"{count} seeds"


def get_margin(study: StudyRecord, column: str) -> float:
    """Return the difference within which arms count as equal in a column of `trials`; NaN if it has no margin.

    study: content of study.json, which declares margins by column before the first run.
    """
    units = {trial_column.name: trial_column.unit for trial_column in get_family(study).trial_columns}
    return float(study.margins.get(column, DEFAULT_MARGINS.get(units[column], math.nan)))


def make_estimate_columns(name: str, estimate: Estimate) -> Row:
    """Make the columns `name`, `name_low` and `name_high` of a table."""
    return {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}


def cut_interval(estimate: Estimate, low: float, high: float) -> Estimate:
    """Clip an interval to the range of possible values, which a t interval can exceed. NaN stays NaN."""
    return estimate._replace(low=float(np.maximum(estimate.low, low)), high=float(np.minimum(estimate.high, high)))


TEST_COLUMNS = ("difference", "difference_low", "difference_high", "se", "df", "p", "p_equal", "margin", "equal_rows")


def make_test_columns(outcomes: Outcomes, estimate: Estimate, margin: float, *, equal_rows: bool) -> Row:
    """Make the columns of a difference: its interval, se, df, p, and p_equal (for equality within the margin).

    There is no test with fewer than `MIN_SEEDS` runs, too few to judge a setting, nor for runs with equal rows
    (equal_rows), whose difference is exactly 0.
    """
    if equal_rows:
        estimate = Estimate(0.0, n=estimate.n)
    has_looks, is_tested = bool(outcomes.num_comparisons), estimate.n >= MIN_SEEDS
    compute_p_equal = compute_sequential_equivalence_p_value if has_looks else compute_equivalence_p_value
    limit = 1.0 if outcomes.is_fraction else math.inf
    return {
        **make_estimate_columns("difference", cut_interval(estimate, -limit, limit)),
        "se": estimate.se,
        "df": estimate.df,
        "p": estimate.p if is_tested else math.nan,
        "p_equal": compute_p_equal(estimate, margin) if is_tested else math.nan,
        "margin": margin,
        "equal_rows": equal_rows,
    }


def compare_with_baseline(outcomes: Outcomes, arm: str, baseline: str, margin: float) -> Row:
    """Make the columns of a test, the number of seeds and the basis of the interval; empty for the baseline itself."""
    estimate = Estimate() if arm == baseline else estimate_difference(outcomes, arm, baseline)
    return {
        **make_test_columns(outcomes, estimate, margin, equal_rows=outcomes.has_equal_rows(arm, baseline)),
        "seeds": estimate.n,
        "basis": describe_difference_basis(outcomes, estimate, arm, baseline),
    }


def add_adjusted_p_values(table: pd.DataFrame, primary_column: str) -> pd.DataFrame:
    """Add p_holm and p_equal_holm to a table of differences in several outcomes (`column`).

    The primary outcome's rows form one family of tests, the rows of all other outcomes another.
    """
    is_primary = table["column"] == primary_column
    adjusted = {}
    for name in ("p", "p_equal"):
        values = np.full(len(table), math.nan)
        for rows in (is_primary, ~is_primary):
            values[rows] = holm_adjust(table.loc[rows, name])
        adjusted[f"{name}_holm"] = values
    return table.assign(**adjusted)


def classify_difference(row: Mapping[str, Any], below: str, above: str) -> str:
    """Classify a difference: `below` or `above` 0, `equal` (within the margin), or `open`.

    row: has the columns of `make_test_columns` and `add_adjusted_p_values`. below, above: the words for a significant
    difference, even one smaller than the margin. Also returns `no effect` if all rows are equal to the last bit, seed
    by seed, and `no comparison` without a difference. Everything else is `open`.
    """
    if math.isnan(row["difference"]):
        return "no comparison"
    if row["equal_rows"]:
        return "no effect"
    if row["p_holm"] < SIGNIFICANCE_LEVEL:
        return above if row["difference"] > 0 else below
    return "equal" if row["p_equal_holm"] < SIGNIFICANCE_LEVEL else "open"
