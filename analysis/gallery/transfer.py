"""Whether the answers of a study hold elsewhere: do its arms rank alike, and do its differences have the same sign?"""

from collections.abc import Mapping

import numpy as np
import pandas as pd
from scipy import stats

from analysis.data import compare
from analysis.data.frames import StudyFrames, to_records
from analysis.data.schemas import Row
from analysis.stats.estimates import wilson_interval
from analysis.sweep.contrasts import compute_contrasts

DRAWS = 2_000
"""Number of draws of all arm means behind an interval of a rank correlation."""
_RESOLVED = ("better", "worse")


def compare_places(base: StudyFrames, others: Mapping[str, StudyFrames], seed: int = 0) -> pd.DataFrame:
    """Compare a study with the same study elsewhere: one row per place, over the arms and contrasts that both have.

    Columns: place, arms, rho (Spearman's correlation of the arms' success at the end), rho_low, rho_high (95 %, from
    draws of every arm's mean out of its t distribution in both places; noise pulls all draws towards 0, so that the
    interval may lie below rho), contrasts (resolved in the base), same (of these, with the same sign in the other
    place), same_fraction, same_low, same_high (Wilson's interval, as if contrasts were independent), opposite (resolved
    in both places, with different signs).

    others: the study in each other place, by its name. seed: of the draws.
    """
    generator = np.random.default_rng(seed)
    base_means, base_contrasts = _estimate_arms(base), _read_contrasts(base)
    rows = []
    for place, frames in others.items():
        means, contrasts = _estimate_arms(frames), _read_contrasts(frames)
        arms = [arm for arm in base_means if arm in means]
        rho = _correlate([base_means[arm][0] for arm in arms], [means[arm][0] for arm in arms])
        draws = [_correlate(_draw(base_means, arms, generator), _draw(means, arms, generator)) for _ in range(DRAWS)]
        low, high = np.nanpercentile(draws, [2.5, 97.5])
        resolved = [name for name, row in base_contrasts.items() if row["verdict"] in _RESOLVED and name in contrasts]
        pairs = [(base_contrasts[name], contrasts[name]) for name in resolved]
        same = sum(first["difference"] * second["difference"] > 0 for first, second in pairs)
        share = wilson_interval(same, len(pairs))
        opposite = sum(
            first["difference"] * second["difference"] < 0 and second["verdict"] in _RESOLVED for first, second in pairs
        )
        row = {"place": place, "arms": len(arms), "rho": rho, "rho_low": low, "rho_high": high}
        row |= {"contrasts": len(pairs), "same": same, "same_fraction": share.value, "same_low": share.low}
        rows.append(row | {"same_high": share.high, "opposite": opposite})
    return pd.DataFrame(rows)


def _estimate_arms(frames: StudyFrames) -> dict[str, tuple[float, float, float]]:
    """Estimate each arm's success at the end: mean, standard error and degrees of freedom (0 without an interval)."""
    (family,) = frames.families
    outcomes = compare.collect_outcomes(frames, family.primary_column)
    estimates = {arm: compare.estimate_mean(outcomes, arm) for arm in compare.list_arms(frames)}
    return {
        arm: (estimate.value, np.nan_to_num(estimate.se), np.nan_to_num(estimate.df))
        for arm, estimate in estimates.items()
        if not np.isnan(estimate.value)
    }


def _read_contrasts(frames: StudyFrames) -> dict[str, Row]:
    (family,) = frames.families
    table = compute_contrasts(frames)
    rows = to_records(table[(table["column"] == family.primary_column) & table["difference"].notna()])
    return {row["contrast"]: row for row in rows}


def _draw(
    means: Mapping[str, tuple[float, float, float]], arms: list[str], generator: np.random.Generator
) -> list[float]:
    return [mean + se * generator.standard_t(df) if se > 0 else mean for mean, se, df in (means[arm] for arm in arms)]


def _correlate(first: list[float], second: list[float]) -> float:
    return float(stats.spearmanr(first, second).statistic)
