"""Count the wrong verdicts of simulated studies, with the functions that the report uses. Prints a JSON object.

Each study has a baseline and five arms. The outcome of a run is drawn around the mean of its arm: normal, or Student's
t with three degrees of freedom (t3), with a deviation from run to run, an effect of its seed with a deviation of .01,
and the noise of an evaluation on 512 levels, averaged over four validations. Five of the numbers of a cell are from
studies in which all arms are equal: `family_error` (a report calls at least one arm better or worse), `arm_error` (the
share of arms so called), `coverage` (the 95 % interval contains 0), `coverage_worst` (that of the arm with the least)
and `equal` (the share of arms called equal). `power` is the share of reports that call an arm worse that is .05 or .10
lower; `power_paired_t` is that of the paired t test with Holm's method, which uses each arm's own variance.
`equal_at_margin` is the share of reports that call an arm equal that is lower by exactly the margin, .05. With one seed
the noise is that of 20 recorded runs with a deviation of .015, and no verdict has a word.

`promises` has, for designs of the shipped studies, the difference that plan and report promise to resolve with a
probability of .8 under the recorded noise, and the share of simulated reports that call it worse. `looks` has the share
of studies without a difference in which a test rejects at any look, with a look after every seed from 2 to 30: the
sequential test, and a plain t test.
Run: python benchmarks/verdict_errors.py; python benchmarks/verdict_errors.py --reports 400; with --tables it writes the
tables of benchmarks/verdict_errors.md.
"""

import json
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from machine import describe
from options import make_parser, parse_count
from scipy import stats

from analysis.data.compare import Outcomes, estimate_difference, make_test_columns
from analysis.data.replicates import read_replicates
from analysis.stats.estimates import MIN_SEEDS, Estimate, Floats, holm_adjust, mean_over_seeds
from analysis.stats.noise import compute_equivalence_p_value, fit_noise
from analysis.stats.sequential import compute_e_value
from analysis.sweep.planned_power import compute_resolved_ratio

NUM_ARMS, MARGIN, SIGNIFICANCE_LEVEL = 6, 0.05, 0.05
EVALUATION_VARIANCE = 0.0127**2 / 4
"""Of the mean of four validations of 512 levels; the deviation of one validation is that of the recorded KL sweep."""
RECORDED_RUNS, RECORDED_DEVIATION = 20, 0.015
SEED_DEVIATION = 0.01


class Cell(NamedTuple):
    """Deviations from run to run by arm, the baseline first. tail: degrees of freedom of Student's t, or None."""

    deviations: tuple[float, ...]
    tail: int | None = None


CELLS = {
    **{f"{deviation:g}": Cell((deviation,) * NUM_ARMS) for deviation in (0.005, 0.01, 0.015, 0.02, 0.03, 0.05)},
    "0.015, t3": Cell((0.015,) * NUM_ARMS, 3),
    "0.03, t3": Cell((0.03,) * NUM_ARMS, 3),
    "one arm 5 times as noisy": Cell((0.015,) * 5 + (0.075,)),
    "baseline 5 times as noisy": Cell((0.075,) + (0.015,) * 5),
    "baseline 5 times as noisy, t3": Cell((0.075,) + (0.015,) * 5, 3),
    "baseline 2.5 times as noisy": Cell((0.0375,) + (0.015,) * 5),
    "as in the demo": Cell((0.096, 0.029, 0.114, 0.019, 0.008, 0.008)),
    "unequal, quiet baseline": Cell((0.01, 0.01, 0.01, 0.03, 0.03, 0.06)),
    "unequal, noisy baseline": Cell((0.06, 0.03, 0.03, 0.01, 0.01, 0.01)),
}
PROMISES = (
    ("kl", 6, 3),
    ("kl", 6, 5),
    ("top-p", 6, 3),
    ("grpo-entropy-sokoban", 6, 5),
    ("entropy-mechanism", 4, 4),
    ("reward-noise", 3, 10),
)
"""Recorded study, arms and seeds per arm."""
LOOKS = range(2, 31)


class Verdicts(NamedTuple):
    """Of the arms of one study other than the baseline: whether they differ by Holm's p, and are equal by Holm's p."""

    differ: Floats
    equal: Floats
    cover: Floats


def draw_outcomes(generator: np.random.Generator, cell: Cell, num_seeds: int, last_difference: float) -> Outcomes:
    """Draw the runs of a study. last_difference: mean of the last arm minus that of all others."""
    deviations, size = cell.deviations, (len(cell.deviations), num_seeds)
    unit = generator.normal(size=size)
    if cell.tail is not None:
        unit = generator.standard_t(cell.tail, size) / math.sqrt(cell.tail / (cell.tail - 2))
    values = 0.8 + unit * np.array(deviations)[:, None] + generator.normal(0, SEED_DEVIATION, num_seeds)
    values += generator.normal(0, math.sqrt(EVALUATION_VARIANCE), size)
    values[-1] += last_difference
    recorded = _draw_recorded_runs(generator) if num_seeds == 1 else ()
    names = [str(index) for index in range(len(deviations))]
    return Outcomes(
        column="late_val_success",
        values=pd.DataFrame(values, index=names),
        min_variances=dict.fromkeys(names, EVALUATION_VARIANCE),
        noise=fit_noise(values, recorded),
    )


def judge(outcomes: Outcomes) -> Verdicts:
    """The verdicts of the report."""
    baseline, *arms = outcomes.values.index
    estimates = [estimate_difference(outcomes, arm, baseline) for arm in arms]
    rows = [make_test_columns(outcomes, estimate, MARGIN, equal_rows=False) for estimate in estimates]
    return decide(estimates, [row["p"] for row in rows], [row["p_equal"] for row in rows])


def judge_by_paired_t(outcomes: Outcomes) -> Verdicts:
    """The verdicts of paired t tests with each arm's own variance."""
    values = outcomes.values.to_numpy()
    estimates = [mean_over_seeds(row - values[0]) for row in values[1:]]
    equality = [compute_equivalence_p_value(estimate, MARGIN) for estimate in estimates]
    return decide(estimates, [estimate.p for estimate in estimates], equality)


def decide(estimates: list[Estimate], p: list[float], p_equal: list[float]) -> Verdicts:
    """Holm's decisions over the arms, and which intervals contain 0."""
    return Verdicts(
        holm_adjust(p) < SIGNIFICANCE_LEVEL,
        holm_adjust(p_equal) < SIGNIFICANCE_LEVEL,
        np.array([estimate.low <= 0 <= estimate.high for estimate in estimates]),
    )


def simulate_cell(generator: np.random.Generator, noise: Cell, num_seeds: int, num_reports: int) -> dict[str, float]:
    """The error rates and powers of one cell."""
    null = [judge(draw_outcomes(generator, noise, num_seeds, 0.0)) for _ in range(num_reports)]
    cell = {
        "family_error": float(np.mean([verdicts.differ.any() for verdicts in null])),
        "arm_error": float(np.mean([verdicts.differ for verdicts in null])),
        "coverage": float(np.mean([verdicts.cover for verdicts in null])),
        "coverage_worst": float(np.mean([verdicts.cover for verdicts in null], axis=0).min()),
        "equal": float(np.mean([verdicts.equal for verdicts in null])),
    }
    for difference in (0.05, 0.1):
        studies = [draw_outcomes(generator, noise, num_seeds, -difference) for _ in range(num_reports)]
        verdicts = [judge(outcomes) for outcomes in studies]
        cell[f"power_{difference:.2f}"] = float(np.mean([entry.differ[-1] for entry in verdicts]))
        if difference == MARGIN:
            cell["equal_at_margin"] = float(np.mean([entry.equal[-1] for entry in verdicts]))
        if num_seeds > 1:
            paired = [judge_by_paired_t(outcomes).differ[-1] for outcomes in studies]
            cell[f"power_paired_t_{difference:.2f}"] = float(np.mean(paired))
    return {name: round(value, 4) for name, value in cell.items()}


def simulate_promise(
    generator: np.random.Generator, deviation: float, num_arms: int, num_seeds: int, num_reports: int
) -> dict[str, float]:
    """What plan and report promise of runs with a deviation, and how often a report keeps it."""
    difference = deviation * compute_resolved_ratio(num_arms, num_seeds)
    num_kept = 0
    names = [str(index) for index in range(num_arms)]
    for _ in range(num_reports):
        values = generator.normal(0.5, deviation, (num_arms, num_seeds))
        values[-1] -= difference
        outcomes = Outcomes("late_val_success", pd.DataFrame(values, index=names), {}, fit_noise(values))
        num_kept += bool(judge(outcomes).differ[-1])
    return {"promised": round(difference, 4), "power": round(num_kept / num_reports, 4)}


def _draw_recorded_runs(generator: np.random.Generator) -> Floats:
    """Recorded runs of another study."""
    return generator.normal(0, math.sqrt(RECORDED_DEVIATION**2 + EVALUATION_VARIANCE), RECORDED_RUNS)


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


TABLES = Path(__file__).with_suffix(".md")


def format_tables(cells: list[dict[str, Any]]) -> tuple[str, str]:
    """The tables of errors and of powers, in Markdown."""
    seeds = sorted({cell["seeds"] for cell in cells})
    head = f"| deviation between runs | {' | '.join(map(str, seeds))} |\n{'|---' * (1 + len(seeds))}|"
    errors, powers = [head], [head]
    for name in dict.fromkeys(cell["deviation"] for cell in cells):
        row = {cell["seeds"]: cell for cell in cells if cell["deviation"] == name}
        errors.append(
            f"| {name} | "
            + " | ".join(_cut(row[count]["family_error"]) + " / " + _cut(row[count]["coverage"]) for count in seeds)
            + " |"
        )
        powers.append(f"| {name} | " + " | ".join(_format_power(row[count], count) for count in seeds) + " |")
    return "\n".join(errors), "\n".join(powers)


def _format_power(cell: dict[str, float], num_seeds: int) -> str:
    if num_seeds < MIN_SEEDS:
        return "no words"
    power, paired = ([cell[f"{name}_{size}"] for size in ("0.05", "0.10")] for name in ("power", "power_paired_t"))
    texts = [", ".join(f"{value:.2f}".removeprefix("0") for value in values) for values in (power, paired)]
    return f"{texts[0]} ({texts[1]})"


def _cut(value: float) -> str:
    return f"{value:.3f}".removeprefix("0")


def write_tables(cells: list[dict[str, Any]], num_reports: int, path: Path = TABLES) -> None:
    """Replace the tables between their marks in the document."""
    text = path.read_text(encoding="utf-8")
    for mark, table in zip(("errors", "powers"), format_tables(cells), strict=True):
        content = (
            f"<!-- {mark}: verdict_errors.py --reports {num_reports} --tables -->\n{table}\n<!-- end of {mark} -->"
        )
        text = re.sub(rf"<!-- {mark}:.*?<!-- end of {mark} -->", lambda _, content=content: content, text, flags=re.S)
    path.write_text(text, encoding="utf-8")


def main() -> None:
    """Simulate all cells and print them."""
    parser = make_parser(__doc__)
    parser.add_argument("--reports", type=parse_count, default=4000, help="studies per number")
    parser.add_argument("--tables", action="store_true", help="write the tables of verdict_errors.md")
    parser.add_argument("--seeds", type=parse_count, nargs="+", default=[1, 2, 3, 5, 10], help="seeds per arm")
    parser.add_argument("--seed", type=int, default=0, help="of the random numbers")
    options = parser.parse_args()
    cells = [
        {
            "deviation": name,
            "seeds": num_seeds,
            **simulate_cell(np.random.default_rng([options.seed, index, num_seeds]), cell, num_seeds, options.reports),
        }
        for index, (name, cell) in enumerate(CELLS.items())
        for num_seeds in options.seeds
    ]
    recorded = {entry.study: float(np.std(entry.values, ddof=1)) for entry in read_replicates()}
    promises = [
        {
            "study": name,
            "arms": num_arms,
            "seeds": num_seeds,
            **simulate_promise(
                np.random.default_rng([options.seed, index]), recorded[name], num_arms, num_seeds, options.reports
            ),
        }
        for index, (name, num_arms, num_seeds) in enumerate(PROMISES)
    ]
    if options.tables:
        write_tables(cells, options.reports)
    looks = simulate_looks(np.random.default_rng(options.seed), options.reports)
    print(
        json.dumps(
            {
                "benchmark": "verdict_errors",
                **describe(),
                "reports": options.reports,
                "cells": cells,
                "promises": promises,
                "looks": looks,
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
