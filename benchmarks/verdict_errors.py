"""Count the wrong verdicts of simulated studies, with the functions that the report uses. Prints a JSON object.

Each study has a baseline and five arms. The outcome of a run is normal around the mean of its arm, with a deviation
from run to run and the noise of an evaluation on 512 levels, averaged over four validations. Five of the numbers of a
cell are from studies in which all arms are equal: `family_error` (a report calls at least one arm better or worse),
`arm_error` (the share of arms so called) and `coverage` (the 95 % interval contains 0; `coverage_last_arm` is that of
the last arm, which is the noisiest or one of the least noisy of unequal ones). `power` is the share of reports
that call an arm worse that is .05 (or .10) lower; `power_paired_t` is that of the paired t test with Holm's method,
which uses each arm's own variance. `equal_at_margin` is the share of reports that call an arm equal that is lower by
exactly the margin, .05; `equal` is the share of equal arms so called. With one seed, the noise is that of 20 recorded
runs with a deviation of .015.

`looks` has the share of studies without a difference in which a test rejects at any look, with a look after every seed
from 2 to 30: the sequential test, and a plain t test.
Run: python benchmarks/verdict_errors.py; python benchmarks/verdict_errors.py --reports 400
"""

import json
import math
from typing import NamedTuple

import numpy as np
import pandas as pd
from machine import describe
from options import make_parser, parse_count
from scipy import stats

from analysis.data.compare import Outcomes, estimate_difference
from analysis.stats.estimates import Estimate, Floats, holm_adjust, mean_over_seeds
from analysis.stats.noise import RunVariances, compute_equivalence_p_value, fit_noise
from analysis.stats.sequential import compute_e_value

NUM_ARMS, MARGIN, SIGNIFICANCE_LEVEL = 6, 0.05, 0.05
EVALUATION_VARIANCE = 0.0127**2 / 4
"""Of the mean of four validations of 512 levels; the deviation of one validation is that of the recorded KL sweep."""
RECORDED_RUNS, RECORDED_DEVIATION = 20, 0.015
DEVIATIONS = {
    **{f"{deviation:g}": (deviation,) * NUM_ARMS for deviation in (0.005, 0.01, 0.015, 0.02, 0.03, 0.05)},
    "unequal, quiet baseline": (0.01, 0.01, 0.01, 0.03, 0.03, 0.06),
    "unequal, noisy baseline": (0.06, 0.03, 0.03, 0.01, 0.01, 0.01),
}
"""Deviations from run to run by arm; the first is the baseline."""
LOOKS = range(2, 31)
NUM_GRID_ARMS = 68


class Verdicts(NamedTuple):
    """Of the arms of one study other than the baseline: whether they differ by Holm's p, and are equal by Holm's p."""

    differ: Floats
    equal: Floats
    cover: Floats


def draw_outcomes(
    generator: np.random.Generator, deviations: tuple[float, ...], num_seeds: int, last_difference: float
) -> Outcomes:
    """Draw the runs of a study. last_difference: mean of the last arm minus that of all others."""
    scale = np.sqrt(np.square(deviations) + EVALUATION_VARIANCE)
    values = generator.normal(0.8, scale[:, None], (len(deviations), num_seeds))
    values[-1] += last_difference
    replicates = _draw_recorded_variance(generator) if num_seeds == 1 else None
    names = [str(index) for index in range(len(deviations))]
    return Outcomes(
        column="late_val_success",
        values=pd.DataFrame(values, index=names),
        min_variances=dict.fromkeys(names, EVALUATION_VARIANCE),
        noise=fit_noise(values, replicates),
    )


def judge(outcomes: Outcomes) -> Verdicts:
    """The verdicts of the report."""
    baseline, *arms = outcomes.values.index
    return decide([estimate_difference(outcomes, arm, baseline) for arm in arms])


def judge_by_paired_t(outcomes: Outcomes) -> Verdicts:
    """The verdicts of paired t tests with each arm's own variance."""
    values = outcomes.values.to_numpy()
    return decide([mean_over_seeds(row - values[0]) for row in values[1:]])


def decide(estimates: list[Estimate]) -> Verdicts:
    """Holm's decisions over the arms, and which intervals contain 0."""
    equality = [compute_equivalence_p_value(estimate, MARGIN) for estimate in estimates]
    return Verdicts(
        holm_adjust([estimate.p for estimate in estimates]) < SIGNIFICANCE_LEVEL,
        holm_adjust(equality) < SIGNIFICANCE_LEVEL,
        np.array([estimate.low <= 0 <= estimate.high for estimate in estimates]),
    )


def simulate_cell(
    generator: np.random.Generator, deviations: tuple[float, ...], num_seeds: int, num_reports: int
) -> dict[str, float]:
    """The error rates and powers of one cell."""
    null = [judge(draw_outcomes(generator, deviations, num_seeds, 0.0)) for _ in range(num_reports)]
    cell = {
        "family_error": float(np.mean([verdicts.differ.any() for verdicts in null])),
        "arm_error": float(np.mean([verdicts.differ for verdicts in null])),
        "coverage": float(np.mean([verdicts.cover for verdicts in null])),
        "coverage_last_arm": float(np.mean([verdicts.cover[-1] for verdicts in null])),
        "equal": float(np.mean([verdicts.equal for verdicts in null])),
    }
    for difference in (0.05, 0.1):
        studies = [draw_outcomes(generator, deviations, num_seeds, -difference) for _ in range(num_reports)]
        verdicts = [judge(outcomes) for outcomes in studies]
        cell[f"power_{difference:.2f}"] = float(np.mean([entry.differ[-1] for entry in verdicts]))
        if difference == MARGIN:
            cell["equal_at_margin"] = float(np.mean([entry.equal[-1] for entry in verdicts]))
        if num_seeds > 1:
            paired = [judge_by_paired_t(outcomes).differ[-1] for outcomes in studies]
            cell[f"power_paired_t_{difference:.2f}"] = float(np.mean(paired))
    return {name: round(value, 4) for name, value in cell.items()}


def simulate_grid(
    generator: np.random.Generator, deviation: float, num_baseline_seeds: int, num_reports: int
) -> dict[str, float]:
    """The errors of a grid whose arms have one seed each and no difference.

    With one run of the baseline the noise is that of recorded runs, with several it is theirs.
    """
    scale = math.sqrt(deviation**2 + EVALUATION_VARIANCE)
    names = [str(index) for index in range(NUM_GRID_ARMS)]
    num_worse, num_false = [], []
    for _ in range(num_reports):
        values = np.full((NUM_GRID_ARMS, num_baseline_seeds), math.nan)
        values[:, 0] = generator.normal(0.8, scale, NUM_GRID_ARMS)
        values[0] = generator.normal(0.8, scale, num_baseline_seeds)
        replicates = _draw_recorded_variance(generator) if num_baseline_seeds == 1 else None
        outcomes = Outcomes(
            "late_val_success",
            pd.DataFrame(values, index=names),
            dict.fromkeys(names, EVALUATION_VARIANCE),
            fit_noise(values, replicates),
        )
        estimates = [estimate_difference(outcomes, arm, names[0]) for arm in names[1:]]
        is_false = holm_adjust([estimate.p for estimate in estimates]) < SIGNIFICANCE_LEVEL
        num_false.append(int(is_false.sum()))
        num_worse.append(int((is_false & (np.array([estimate.value for estimate in estimates]) < 0)).sum()))
    return {
        "family_error": round(float(np.mean(np.array(num_false) > 0)), 4),
        "false_worse": round(float(np.mean(num_worse)), 4),
        "false_worse_95": float(np.quantile(num_worse, 0.95)),
    }


def _draw_recorded_variance(generator: np.random.Generator) -> RunVariances:
    """The variance of recorded runs of another study."""
    recorded_scale = math.sqrt(RECORDED_DEVIATION**2 + EVALUATION_VARIANCE)
    recorded_variance = generator.normal(0, recorded_scale, RECORDED_RUNS).var(ddof=1)
    return RunVariances(np.array([recorded_variance]), np.array([RECORDED_RUNS - 1.0]))


def simulate_looks(generator: np.random.Generator, num_studies: int) -> dict[str, float]:
    """The share of studies without a difference in which a test rejects at any look."""
    differences = generator.normal(size=(num_studies, LOOKS[-1]))
    counts = np.arange(1, LOOKS[-1] + 1)
    sums, squares = differences.cumsum(1), (differences**2).cumsum(1)
    with np.errstate(divide="ignore", invalid="ignore"):
        t = sums / np.sqrt(counts * (squares - sums**2 / counts) / (counts - 1))
    t, counts = t[:, LOOKS[0] - 1 :], counts[LOOKS[0] - 1 :]
    plain = np.abs(t) > stats.t.ppf(1 - SIGNIFICANCE_LEVEL / 2, counts - 1)
    sequential = compute_e_value(t, counts) >= 1 / SIGNIFICANCE_LEVEL
    return {"sequential": float(sequential.any(1).mean()), "plain_t": float(plain.any(1).mean())}


def main() -> None:
    """Simulate all cells and print them."""
    parser = make_parser(__doc__)
    parser.add_argument("--reports", type=parse_count, default=4000, help="studies per number")
    parser.add_argument("--grids", type=int, default=1000, help="grids of 68 arms per number; 0: none")
    parser.add_argument("--seeds", type=parse_count, nargs="+", default=[1, 2, 3, 5, 10], help="seeds per arm")
    parser.add_argument("--seed", type=int, default=0, help="of the random numbers")
    options = parser.parse_args()
    cells = [
        {
            "deviation": name,
            "seeds": num_seeds,
            **simulate_cell(
                np.random.default_rng([options.seed, index, num_seeds]), deviations, num_seeds, options.reports
            ),
        }
        for index, (name, deviations) in enumerate(DEVIATIONS.items())
        for num_seeds in options.seeds
    ]
    grids = [
        {
            "deviation": deviation,
            "baseline_seeds": num_baseline_seeds,
            **simulate_grid(
                np.random.default_rng([options.seed, num_baseline_seeds, round(1000 * deviation)]),
                deviation,
                num_baseline_seeds,
                options.grids,
            ),
        }
        for deviation in (0.015, 0.03, 0.05)
        for num_baseline_seeds in (1, 5)
        if options.grids
    ]
    looks = simulate_looks(np.random.default_rng(options.seed), options.reports)
    print(
        json.dumps(
            {
                "benchmark": "verdict_errors",
                **describe(),
                "reports": options.reports,
                "cells": cells,
                "grids": grids,
                "looks": looks,
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
