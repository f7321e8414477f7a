"""Whether the answers of a study hold elsewhere: do its arms rank alike, and do its differences have the same sign?"""

from collections.abc import Mapping

import numpy as np
import pandas as pd

from analysis.data import compare
from analysis.data.frames import StudyFrames, to_records
from analysis.data.schemas import Row
from analysis.stats.estimates import estimate_rank_correlation, wilson_interval
from analysis.sweep.contrasts import compute_contrasts

_RESOLVED = ("better", "worse")


def compare_places(base: StudyFrames, others: Mapping[str, StudyFrames]) -> pd.DataFrame:
    """Compare a study with the same study elsewhere: one row per place, over the arms and contrasts that both have.

    Columns: place, arms, rho (Spearman's correlation of the arms' success at the end) with the interval of
    `estimate_rank_correlation`, contrasts (resolved in the base), same (of these, with the same sign in the other
    place), opposite (resolved in both, with different signs), same_fraction with Wilson's interval (as if contrasts
    were independent).

    others: the study in each other place, by its name.
    """
    base_means, base_contrasts = _average_arms(base), _read_contrasts(base)
    rows = []
    for place, frames in others.items():
        means, contrasts = _average_arms(frames), _read_contrasts(frames)
        arms = [arm for arm in base_means if arm in means]
        rho = estimate_rank_correlation([base_means[arm] for arm in arms], [means[arm] for arm in arms])
        resolved = [name for name, row in base_contrasts.items() if row["verdict"] in _RESOLVED and name in contrasts]
        pairs = [(base_contrasts[name], contrasts[name]) for name in resolved]
        same = sum(first["difference"] * second["difference"] > 0 for first, second in pairs)
        opposite = sum(
            first["difference"] * second["difference"] < 0 and second["verdict"] in _RESOLVED for first, second in pairs
        )
        row = {"place": place, "arms": len(arms), **compare.make_estimate_columns("rho", rho)}
        row |= {"contrasts": len(pairs), "same": same, "opposite": opposite}
        rows.append(row | compare.make_estimate_columns("same_fraction", wilson_interval(same, len(pairs))))
    return pd.DataFrame(rows)


def _average_arms(frames: StudyFrames) -> dict[str, float]:
    """Compute each arm's mean success at the end, without arms that have none."""
    (family,) = frames.families
    outcomes = compare.collect_outcomes(frames, family.primary_column)
    means = {arm: compare.estimate_mean(outcomes, arm).value for arm in compare.list_arms(frames)}
    return {arm: mean for arm, mean in means.items() if not np.isnan(mean)}


def _read_contrasts(frames: StudyFrames) -> dict[str, Row]:
    (family,) = frames.families
    table = compute_contrasts(frames)
    rows = to_records(table[(table["column"] == family.primary_column) & table["difference"].notna()])
    return {row["contrast"]: row for row in rows}
