"""Count how often intervals of edges and shifts contain the truth in simulated studies. Prints a JSON object.

Each study has three seeds at the five learning rates of `learning-rate`. A run collapses with a probability that is
logistic in log10 of the rate, with a slope per decade, around an edge that is normal over seeds with a deviation. Runs
of one seed have the same edge. `coverage` is the share of 95 % intervals that contain the edge (or the shift, whose
lines have common seeds), `bounded` that of intervals with two bounds, and `width` their median width in decades. A
missing bound excludes nothing.
Run: python benchmarks/edge_coverage.py; python benchmarks/edge_coverage.py --studies 100 --shift-studies 20
"""

import json
from functools import cache
from itertools import product

import numpy as np
from machine import describe
from options import make_parser, parse_count
from scipy import special

from analysis.stats.dose_response import DoseCounts, estimate_edge, estimate_shift
from analysis.stats.estimates import Estimate, Floats

DOSES = np.log10([1e-4, 3e-4, 1e-3, 1.7e-3, 3e-3])
NUM_SEEDS = 3
EDGES, SLOPES, DEVIATIONS = (6e-4, 1e-3, 1.3e-3, 2e-3), (6, 15), (0.0, 0.1, 0.2)
SHIFTS = ((6e-4, 0.3), (1e-3, 0.0), (1e-3, 0.3), (1.3e-3, 0.0), (1.3e-3, 0.5))
"""Edge of the reference, and how far in decades that of the line is above it."""

Outcome = tuple[int, ...]


def make_counts(outcome: Outcome) -> DoseCounts:
    """The runs of a line, from the number of collapses at each dose."""
    return DoseCounts(DOSES, np.array(outcome, dtype=float), np.full(len(DOSES), float(NUM_SEEDS)))


def draw_outcome(generator: np.random.Generator, edge: float, slope: float, seed_effects: Floats) -> Outcome:
    """Draw the number of collapses at each dose. edge: log10. seed_effects (seeds,): added to the edge of each seed."""
    probabilities = special.expit(slope * (DOSES - edge - seed_effects[:, None]))
    return tuple((generator.random(probabilities.shape) < probabilities).sum(axis=0).tolist())


# Few outcomes are likely, and each estimate takes a tenth of a second.
@cache
def find_edge(outcome: Outcome) -> Estimate:
    """The edge of an outcome."""
    return estimate_edge(make_counts(outcome)).edge


@cache
def find_shift(outcome: Outcome, reference: Outcome) -> Estimate:
    """The shift between two outcomes."""
    return estimate_shift(make_counts(outcome), make_counts(reference))


def summarize(estimates: list[Estimate], truth: float) -> dict[str, float]:
    """Coverage, share of bounded intervals and their median width."""
    low, high = (np.array([getattr(estimate, name) for estimate in estimates]) for name in ("low", "high"))
    is_bounded = np.isfinite(high - low)
    return {
        "coverage": float(np.mean(~((low > truth) | (high < truth)))),
        "bounded": float(is_bounded.mean()),
        "width": float(np.median((high - low)[is_bounded])) if is_bounded.any() else float("nan"),
    }


def main() -> None:
    """Simulate all cells and print them."""
    parser = make_parser(__doc__)
    parser.add_argument("--studies", type=parse_count, default=1000, help="studies per edge")
    parser.add_argument("--shift-studies", type=parse_count, default=250, help="studies per shift")
    parser.add_argument("--seed", type=int, default=0, help="of the random numbers")
    options = parser.parse_args()
    generator = np.random.default_rng(options.seed)
    edges = []
    for edge, slope, deviation in product(EDGES, SLOPES, DEVIATIONS):
        effects = generator.normal(0, deviation, (options.studies, NUM_SEEDS))
        estimates = [find_edge(draw_outcome(generator, np.log10(edge), slope, effect)) for effect in effects]
        cell = {"edge": edge, "slope": slope, "deviation": deviation}
        edges.append({**cell, **summarize(estimates, float(np.log10(edge)))})
    shifts = []
    for (edge, shift), slope, deviation in product(SHIFTS, SLOPES, DEVIATIONS):
        effects = generator.normal(0, deviation, (options.shift_studies, NUM_SEEDS))
        estimates = [
            find_shift(
                draw_outcome(generator, np.log10(edge) + shift, slope, effect),
                draw_outcome(generator, np.log10(edge), slope, effect),
            )
            for effect in effects
        ]
        cell = {"edge": edge, "shift": shift, "slope": slope, "deviation": deviation}
        shifts.append({**cell, **summarize(estimates, shift)})
    sizes = {"studies": options.studies, "shift_studies": options.shift_studies}
    print(json.dumps({"benchmark": "edge_coverage", **describe(), **sizes, "edges": edges, "shifts": shifts}, indent=2))


if __name__ == "__main__":
    main()
