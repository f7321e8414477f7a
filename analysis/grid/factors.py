"""Which factor of a complete grid matters more, judged by how far apart the means over its values are.

For a factor with k values, let m_v be the mean outcome over all arms with value v. The spread of the factor is the
standard deviation of m_1, ..., m_k (divisor k). Noise alone makes the m_v differ, so the squared spread is estimated
without bias from products of different seeds. With d_vs the deviation of seed s from its mean over v,

    V = Σ_v Σ_{s≠t} d_vs d_vt / (k n (n − 1))

Two factors are compared by the difference of their V, with a jackknife over seeds and Student's t.
tests/analysis/grid/test_factors.py simulates studies: the 95 % interval covers in .93 or more of them.
"""

import math
from itertools import combinations, product
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from analysis.data.compare import SCORED_STATUSES, SIGNIFICANCE_LEVEL, require_single_study
from analysis.data.frames import StudyFrames
from analysis.data.schemas import Row
from analysis.grid.layout import label_value
from analysis.stats.estimates import MIN_SEEDS, Estimate, holm_adjust, make_estimate
from analysis.sweep.verdicts import format_holm
from trainable.config.aliases import shorten_setting


class FactorGrid(NamedTuple):
    """The outcomes of the arms of a complete grid.

    settings: the F factors, as dotted settings. values: the values of each factor. outcomes: (n, k_1, ..., k_F), by
    seed and by the index of each factor's value.
    """

    settings: tuple[str, ...]
    values: tuple[tuple[Any, ...], ...]
    outcomes: npt.NDArray[np.float64]


def make_factor_grid(frames: StudyFrames) -> FactorGrid | None:
    """Arrange the primary outcome by the declared factors of a study, for the seeds at which all arms are scored.

    None if the study declares fewer than two factors, if its arms are not all combinations of their values, or if no
    seed has a scored run of every arm.
    """
    (study,), (family,) = require_single_study(frames).studies, frames.families
    settings = study.axis.factors
    columns = [f"config/{setting}" for setting in settings]
    if len(settings) < 2 or not set(columns) <= set(frames.trials):
        return None
    # As text, since a missing value (null) is not equal to itself.
    points = frames.trials[columns].map(lambda value: "null" if pd.isna(value) else value)
    arm_by_point = dict(zip(points.itertuples(index=False, name=None), frames.trials["arm"], strict=True))
    values = tuple(tuple(points[column].drop_duplicates()) for column in columns)
    grid_points = list(product(*values))
    # With a missing arm, the remaining ones do not form a complete grid.
    if set(grid_points) != set(arm_by_point) or len({*arm_by_point.values()}) < len(grid_points):
        return None
    scored = frames.trials[frames.trials["status"].isin(SCORED_STATUSES)]
    table = scored.pivot_table(index="seed", columns="arm", values=family.primary_column, sort=False)
    complete = table.reindex(columns=[arm_by_point[point] for point in grid_points]).dropna()
    if complete.empty:
        return None
    shape = (len(complete), *map(len, values))
    return FactorGrid(tuple(settings), values, complete.to_numpy(dtype=np.float64).reshape(shape))


def _take_root(squared_spread: float) -> float:
    """Take the square root; 0 where the estimate is not positive, and NaN where there is none."""
    return squared_spread if math.isnan(squared_spread) else math.sqrt(max(squared_spread, 0.0))


def _compute_marginal_means(grid: FactorGrid, factor: int) -> npt.NDArray[np.float64]:
    """Compute the mean over the arms with each value of a factor, (n, k)."""
    other_axes = tuple(axis for axis in range(1, grid.outcomes.ndim) if axis != factor + 1)
    means: npt.NDArray[np.float64] = grid.outcomes.mean(axis=other_axes)
    return means


def estimate_squared_spread(marginal_means: npt.NDArray[np.float64]) -> float:
    """Estimate V of a factor from its means (n, k) by seed and value; NaN for one seed. It may be negative.

    >>> estimate_squared_spread(np.array([[0.0, 2.0], [0.0, 4.0]]))  # 1 · 2, the product of the two seeds
    2.0
    """
    n, k = marginal_means.shape
    if n < 2:
        return math.nan
    deviations = marginal_means - marginal_means.mean(axis=1, keepdims=True)
    # The square of a sum contains the products of all pairs of seeds, and each seed's square.
    products = deviations.sum(axis=0) ** 2 - (deviations**2).sum(axis=0)
    return float(products.sum() / (k * n * (n - 1)))


def list_factors(grid: FactorGrid) -> list[Row]:
    """List the factors, largest spread first: factor, spread, squared_spread, and the mean of each of its values.

    spread is 0 where the estimate of its square is not positive.
    """
    rows = []
    for factor, (setting, values) in enumerate(zip(grid.settings, grid.values, strict=True)):
        means = _compute_marginal_means(grid, factor)
        squared_spread = estimate_squared_spread(means)
        rows.append(
            {
                "factor": shorten_setting(setting),
                "setting": setting,
                "squared_spread": squared_spread,
                "spread": _take_root(squared_spread),
                "means": [
                    {"value": label_value(value), "mean": float(mean)}
                    for value, mean in zip(values, means.mean(axis=0), strict=True)
                ],
            }
        )
    return sorted(rows, key=lambda row: -np.nan_to_num(row["squared_spread"]))


def compare_factors(grid: FactorGrid) -> list[Row]:
    """Compare each pair of factors: first, second, difference of their V with its 95 % interval, p, p_holm, seeds.

    Interval and p are missing with fewer than `MIN_SEEDS` seeds.
    """
    num_seeds = len(grid.outcomes)
    rows: list[Row] = []
    for first, second in combinations(range(len(grid.settings)), 2):
        means = [_compute_marginal_means(grid, factor) for factor in (first, second)]
        squared_spreads = [estimate_squared_spread(factor_means) for factor_means in means]
        estimate = Estimate(squared_spreads[0] - squared_spreads[1])
        if num_seeds >= MIN_SEEDS:
            without_one = [
                estimate_squared_spread(np.delete(means[0], seed, axis=0))
                - estimate_squared_spread(np.delete(means[1], seed, axis=0))
                for seed in range(num_seeds)
            ]
            pseudo_values = num_seeds * estimate.value - (num_seeds - 1) * np.array(without_one)
            estimate = make_estimate(estimate.value, pseudo_values.var(ddof=1) / num_seeds, num_seeds - 1, num_seeds)
        rows.append(
            {
                "first": shorten_setting(grid.settings[first]),
                "second": shorten_setting(grid.settings[second]),
                "first_spread": _take_root(squared_spreads[0]),
                "second_spread": _take_root(squared_spreads[1]),
                "difference": estimate.value,
                "low": estimate.low,
                "high": estimate.high,
                "p": estimate.p,
                "seeds": num_seeds,
            }
        )
    for row, p_holm in zip(rows, holm_adjust([row["p"] for row in rows]), strict=True):
        row["p_holm"] = p_holm
    return rows


def describe_comparison(row: Row) -> str:
    """Say in a sentence which of two factors matters more. row: from `compare_factors`."""
    first, second = row["first"], row["second"]
    if row["seeds"] < MIN_SEEDS:
        return (
            f"{first} and {second} are not compared: that needs {MIN_SEEDS} seeds with a scored run of every "
            f"arm, and there are {row['seeds']}."
        )
    if math.isnan(row["p"]):
        return f"{first} and {second} are not compared: the runs of all seeds are equal."
    numbers = (
        f"spreads of {row['first_spread']:.3f} and {row['second_spread']:.3f}; difference of their squares: "
        f"{row['difference']:+.2g} [{row['low']:+.2g}, {row['high']:+.2g}], {format_holm(row['p_holm'])}, over "
        f"{row['seeds']} seeds"
    )
    if not row["p_holm"] < SIGNIFICANCE_LEVEL:
        return f"Whether {first} or {second} matters more is open: {numbers}."
    stronger, weaker = (first, second) if row["difference"] > 0 else (second, first)
    return f"{stronger} matters more than {weaker}: {numbers}."
