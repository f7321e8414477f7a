"""Estimate the contrasts of a study: the effect of one change, over pairs of arms declared before any run.

study.json has them as "contrasts": [{"name": ..., "pairs": [[first, second], ...]}, ...]. A difference is the first arm
minus the second, for two runs with the same seed. The estimand is the mean over the pairs of a contrast. Pairs of one
seed share streams of random numbers and often an arm, so they are not independent: each seed counts as one number, the
mean over its pairs, which is a weighted sum of the outcomes of its arms. The interval is over these numbers, with the
noise of all arms of the study (`analysis.stats.noise`). It generalizes to other seeds of the declared pairs, not to
other pairs.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter

import numpy as np
import pandas as pd

from analysis.data import compare
from analysis.data.frames import StudyFrames, to_records
from analysis.data.schemas import Row
from analysis.stats.estimates import Estimate
from analysis.sweep.verdicts import format_status, name_verdict
from trainable.families import Family
from trainable.runs.study_record import DeclaredContrast, StudyRecord

_DECIMALS = 12
"""Differences are rounded to this many decimals, so that equal runs have a difference and a std of exactly 0."""

_SEED_COLUMNS = ("column", "contrast", "first", "second", "seed", "first_value", "second_value", "difference")
_PAIR_COLUMNS = (
    *("column", "contrast", "first", "second", "first_mean", "second_mean", "difference", "seeds"),
    *("first_steps", "second_steps"),
)
_CONTRAST_COLUMNS = (
    *("column", "contrast", *compare.TEST_COLUMNS, "seeds", "p_holm", "p_equal_holm", "verdict"),
    *("pairs", "pairs_used", "excluded_runs", "early_stopped_runs"),
)


def read_contrasts(study: StudyRecord) -> list[DeclaredContrast]:
    """Read and check the contrasts of study.json; an empty list if it declares none.

    A contrast that needs all of its pairs is left out if the study lacks one of their arms.

    Raises ValueError if a name or a pair occurs twice (the pair would have double weight), if an arm is compared with
    itself, or if the pairs cancel each other.
    """
    names = [contrast.name for contrast in study.contrasts]
    for contrast in study.contrasts:
        name, pairs = contrast.name, contrast.pairs
        if names.count(name) > 1:
            raise ValueError(f"study.json of `{study.name}` has two contrasts named {name!r}: give each its own name.")
        # A pair in reverse order is the same pair; a pair of one arm with itself has a set of size 1.
        invalid_pairs = [
            pair for pair in pairs if sum(set(pair) == set(other) for other in pairs) > 1 or len(set(pair)) < 2
        ]
        if invalid_pairs:
            first, second = invalid_pairs[0]
            problem = f"{first} with itself" if first == second else f"{first} with {second} twice"
            raise ValueError(
                f"The contrast {name!r} of `{study.name}` pairs {problem}: list each pair of different arms once."
            )
        # Pairs may form a circle, such as A with B, B with C, and C with A: their mean is 0 whatever the outcomes.
        if not any(compute_arm_weights(pairs).values()):
            raise ValueError(
                f"The contrast {name!r} of `{study.name}` compares nothing: in its {len(pairs)} pairs every arm is "
                "as often first as second. Give pairs that differ in the same way."
            )
    arms = set(study.axis.values)
    return [
        contrast
        for contrast in study.contrasts
        if not contrast.needs_all_pairs or arms.issuperset(arm for pair in contrast.pairs for arm in pair)
    ]


def compute_arm_weights(pairs: Sequence[tuple[str, str]]) -> dict[str, float]:
    """Compute the weight of each arm in the mean over `pairs` of the first arm minus the second.

    >>> compute_arm_weights([("a", "c"), ("b", "c")])
    {'a': 0.5, 'b': 0.5, 'c': -1.0}
    """
    counts = Counter(first for first, _ in pairs)
    counts.subtract(second for _, second in pairs)
    return {arm: count / len(pairs) for arm, count in counts.items()}


def compute_seed_differences(frames: StudyFrames) -> pd.DataFrame:
    """Compute, per column, contrast, pair and seed, the values of both runs and their difference, first minus second.

    A value is missing if the run is not scored (see `compare.SCORED_STATUSES`), was not run, or has no value. The
    difference is then missing too, as it is for a seed that lacks a pair of an interaction. Columns for which
    `_is_contrasted` is False have no rows.
    """
    runs, (family,) = _index_runs(frames), frames.families
    seeds = sorted({seed for _, seed in runs})
    rows = []
    for column in family.contrasted_columns:
        for contrast in read_contrasts(compare.require_single_study(frames).studies[0]):
            if not _is_contrasted(column, contrast.pairs, runs, family):
                continue
            values = {
                (pair, seed): [_read_value(runs.get((arm, seed)), column) for arm in pair]
                for pair in contrast.pairs
                for seed in seeds
            }
            # An interaction over only some of its pairs would be the effect of one factor.
            lacks_pairs = {
                seed: contrast.needs_all_pairs and any(math.isnan(sum(values[pair, seed])) for pair in contrast.pairs)
                for seed in seeds
            }
            for (pair, seed), (first, second) in values.items():
                difference = math.nan if lacks_pairs[seed] else round(first - second, _DECIMALS)
                rows.append((column, contrast.name, *pair, seed, first, second, difference))
    return pd.DataFrame(rows, columns=list(_SEED_COLUMNS))


def _index_runs(frames: StudyFrames) -> dict[tuple[str, int], Row]:
    """Map arm and seed to each run of the study."""
    return {(run["arm"], run["seed"]): run for run in to_records(frames.runs)}


def _read_value(run: Row | None, column: str) -> float:
    return float(run[column]) if run is not None and run["status"] in compare.SCORED_STATUSES else math.nan


def _is_contrasted(
    column: str, pairs: Sequence[tuple[str, str]], runs: Mapping[tuple[str, int], Row], family: Family
) -> bool:
    """Check whether a contrast is made for a column.

    * A common column of the family: if any scored run of the study has a value. A run without one is then named as
      excluded.
    * Any other column: if every scored run of the contrast's arms has a value, since such columns exist only for some
      tasks and rules.
    """
    if column in family.common_columns:
        return any(not math.isnan(_read_value(run, column)) for run in runs.values())
    arms = {arm for pair in pairs for arm in pair}
    values = [run[column] for (arm, _), run in runs.items() if arm in arms and run["status"] in compare.SCORED_STATUSES]
    return bool(values) and not any(map(math.isnan, values))


def compute_pair_differences(frames: StudyFrames) -> pd.DataFrame:
    """Summarize each column, contrast and pair in a row: the numbers behind `compute_contrasts`, but no tests.

    Means and difference are over the seeds for which both runs have a value (`seeds`). first_steps, second_steps:
    planned steps of the runs of each arm.
    """
    runs = _index_runs(frames)
    rows = []
    # itertools.groupby needs equal keys to be adjacent, as `compute_seed_differences` returns them. A groupby of pandas
    # is slow for frames of three rows.
    differences = to_records(compute_seed_differences(frames))
    for key, group in groupby(differences, key=itemgetter(*_SEED_COLUMNS[:4])):
        counted_rows = [row for row in group if not math.isnan(row["difference"])]
        row = dict(zip(_SEED_COLUMNS[:4], key, strict=True))
        for side in ("first", "second"):
            row[f"{side}_mean"] = _mean_or_nan([seed_row[f"{side}_value"] for seed_row in counted_rows])
            # Seeds may have been given different lengths.
            planned = {run["steps_total"] for (arm, _), run in runs.items() if arm == row[side]}
            row[f"{side}_steps"] = ", ".join(str(steps) for steps in sorted(planned) if not pd.isna(steps))
        mean = _mean_or_nan([seed_row["difference"] for seed_row in counted_rows])
        rows.append(row | {"difference": round(mean, _DECIMALS), "seeds": len(counted_rows)})
    return pd.DataFrame(rows, columns=list(_PAIR_COLUMNS))


def _mean_or_nan(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else math.nan


def compute_contrasts(frames: StudyFrames) -> pd.DataFrame:
    """Estimate each contrast in each column, one row each; the contrasts of a column are adjacent.

    * difference: mean over seeds of the mean over a seed's pairs; difference_low, difference_high: its 95 % interval
      over the `seeds` that have at least one pair, with the noise of all arms; p_equal: that it lies within the margin.
    * p_holm, p_equal_holm: corrected with Holm's method over the contrasts of the primary outcome, and over the
      contrasts of all other columns together.
    * verdict: see `verdicts.name_verdict`. `better` and `worse` refer to the first arm of a pair.
    * pairs: number of declared pairs; pairs_used: pairs with at least one seed.
    * excluded_runs: runs that exclude a pair for a seed, and why; early_stopped_runs: counted runs that a rule stopped,
      with their steps.
    """
    (study,), (family,) = compare.require_single_study(frames).studies, frames.families
    runs, differences = _index_runs(frames), to_records(compute_seed_differences(frames))
    outcomes = {
        column: compare.collect_outcomes(frames, column)
        for column in dict.fromkeys(row["column"] for row in differences)
    }
    contrasts = read_contrasts(study)
    interactions = {contrast.name for contrast in contrasts if contrast.needs_all_pairs}
    rows = []
    for (column, name), group in groupby(differences, key=itemgetter("column", "contrast")):
        seed_rows = list(group)
        counted_rows = [row for row in seed_rows if not math.isnan(row["difference"])]
        num_comparisons = len(contrasts) * (1 if column == family.primary_column else len(outcomes) - 1)
        margin = compare.get_margin(study, column)
        rows.append(
            {
                "column": column,
                "contrast": name,
                **_estimate_contrast(counted_rows, outcomes[column], margin, num_comparisons),
                "pairs": len({(row["first"], row["second"]) for row in seed_rows}),
                "pairs_used": len({(row["first"], row["second"]) for row in counted_rows}),
                **_collect_run_notes(seed_rows, runs),
            }
        )
    table = pd.DataFrame(rows, columns=list(_CONTRAST_COLUMNS))
    table = compare.add_adjusted_p_values(table, family.primary_column)
    return table.assign(
        verdict=[name_verdict(row, family, has_sides=row["contrast"] not in interactions) for row in to_records(table)]
    )


def _estimate_contrast(
    seed_rows: Sequence[Row], outcomes: compare.Outcomes, margin: float, num_comparisons: int
) -> Row:
    """Estimate the difference of a contrast in one column, with its interval over seeds.

    seed_rows: the rows of `compute_seed_differences` for this contrast and column that have a difference. outcomes: of
    the column. num_comparisons: size of this test's family.
    """
    by_seed: dict[int, dict[tuple[str, str], float]] = {}
    for row in seed_rows:
        by_seed.setdefault(row["seed"], {})[row["first"], row["second"]] = row["difference"]
    seed_means = [round(_mean_or_nan(list(by_seed[seed].values())), _DECIMALS) for seed in sorted(by_seed)]
    # Seeds may miss different pairs. Their mean has the variance of one run times the mean of their norms.
    weights = [compute_arm_weights(list(differences)) for differences in by_seed.values()]
    weight_norm = _mean_or_nan([sum(weight**2 for weight in arms.values()) for arms in weights])
    # The evaluation noise bounds the variance from below; each arm contributes with the square of its weight.
    evaluation_variance = _mean_or_nan(
        [sum(weight**2 * outcomes.get_min_variance(arm) for arm, weight in arms.items()) for arms in weights]
    )
    min_variance = evaluation_variance / weight_norm if weight_norm > 0 else 0.0
    pairs = sorted({pair for differences in by_seed.values() for pair in differences})
    doubt = outcomes.get_doubt(outcomes.noise.paired, *(arm for pair in pairs for arm in pair))
    estimate = (
        compare.estimate_contrast(outcomes, seed_means, num_comparisons, weight_norm, min_variance, doubt)
        if weight_norm > 0 or outcomes.num_comparisons
        else Estimate(_mean_or_nan(seed_means), n=len(seed_means))
    )
    equal_rows = bool(pairs) and all(outcomes.has_equal_rows(*pair) for pair in pairs)
    columns = compare.make_test_columns(outcomes, estimate, margin, equal_rows=equal_rows)
    return {**columns, "seeds": len(seed_means)}


def _collect_run_notes(seed_rows: Sequence[Row], runs: Mapping[tuple[str, int], Row]) -> Row:
    """Collect the runs that exclude a pair for a seed, by arm and reason, and the stopped runs that count, by arm."""
    excluded_seeds: dict[str, dict[int, str]] = {}
    stopped_seeds: dict[str, dict[int, str]] = {}
    for row in seed_rows:
        for arm, value in ((row["first"], row["first_value"]), (row["second"], row["second_value"])):
            run = runs.get((arm, row["seed"]))
            if math.isnan(value):
                is_scored = run is not None and run["status"] in compare.SCORED_STATUSES
                reason = "not run" if run is None else "without a value" if is_scored else format_status(run["status"])
                excluded_seeds.setdefault(f"{arm} {reason}", {})[row["seed"]] = str(row["seed"])
            # A stopped run whose partner is missing is not counted.
            elif run is not None and run["status"] == "early_stopped" and not math.isnan(row["difference"]):
                stopped_seeds.setdefault(arm, {})[row["seed"]] = f"{row['seed']} at step {run['steps_done']}"
    return {
        "excluded_runs": _format_seed_lists(excluded_seeds),
        "early_stopped_runs": _format_seed_lists(stopped_seeds),
    }


def _format_seed_lists(seeds_by_name: Mapping[str, Mapping[int, str]]) -> str:
    return "; ".join(
        f"{name}: seed{'s' if len(seeds) > 1 else ''} {', '.join(seeds[seed] for seed in sorted(seeds))}"
        for name, seeds in seeds_by_name.items()
    )
