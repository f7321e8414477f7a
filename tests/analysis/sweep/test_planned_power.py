"""Tests of what a number of seeds resolves: the plan's promise against simulated studies, judged as a report does."""

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest

from analysis.data import replicates
from analysis.data.compare import Outcomes, estimate_difference
from analysis.data.replicates import Replicates
from analysis.stats.estimates import Floats, holm_adjust
from analysis.stats.noise import fit_noise
from analysis.sweep.planned_power import compute_resolved_ratio, describe_power, find_resolved_difference
from tests.fakes.run_folders import make_study_record
from trainable.runs.study_record import StudyRecord

ENTRY = Replicates("a hash", "late_val_success", "kl", "0", tuple(np.linspace(0.75, 0.8, 20).tolist()))


def make_study(num_seeds: int = 1, config_hash: str = "a hash", **changes: Any) -> StudyRecord:
    keys: dict[str, Any] = {
        "axis": {"values": ["0", "0.1", "1"]},
        "baseline": "0",
        "runs": [{"run_id": "a", "arm": "0", "config_hash": config_hash}],
        "seeds": list(range(num_seeds)),
    }
    return make_study_record(**{**keys, **changes})


@pytest.fixture(autouse=True)
def recorded_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicates, "read_replicates", lambda: (ENTRY,))


def simulate_power(ratio: float, num_arms: int, num_seeds: int, num_studies: int = 600) -> float:
    """The share of studies in which the only arm that differs, by so many deviations, is called worse."""
    generator, names = np.random.default_rng(1), [str(arm) for arm in range(num_arms)]
    num_resolved = 0
    for _ in range(num_studies):
        y: Floats = generator.normal(size=(num_arms, num_seeds))
        y[1] -= ratio
        outcomes = Outcomes("late_val_success", pd.DataFrame(y, index=names), {}, fit_noise(y))
        p = [estimate_difference(outcomes, name, "0").p for name in names[1:]]
        num_resolved += bool(holm_adjust(p)[0] < 0.05 and y[1].mean() < y[0].mean())
    return num_resolved / num_studies


@pytest.mark.long
@pytest.mark.parametrize(("num_arms", "num_seeds"), [(6, 3), (3, 4), (2, 3)])
def test_the_promised_power_is_that_of_the_report(num_arms: int, num_seeds: int) -> None:
    power = simulate_power(compute_resolved_ratio(num_arms, num_seeds), num_arms, num_seeds)
    assert 0.75 <= power <= 0.85


def test_more_seeds_resolve_less_and_more_arms_need_more() -> None:
    ratios = [compute_resolved_ratio(6, count) for count in range(1, 12)]
    assert ratios[:2] == [math.inf, math.inf]
    assert ratios[2:] == sorted(ratios[2:], reverse=True)
    assert compute_resolved_ratio(40, 5) > compute_resolved_ratio(20, 5) > compute_resolved_ratio(6, 5)
    assert math.isnan(compute_resolved_ratio(1, 5))
    # With a hundred seeds it is nearly the normal approximation, 2.80 sqrt(2 / 100).
    assert 0.39 < compute_resolved_ratio(2, 100) < 0.41


def test_the_line_names_the_seeds_that_resolve_the_margin_in_units_of_the_noise() -> None:
    assert describe_power(make_study(num_seeds=1)) == (
        "Power: one seed is too few to call an arm better, worse or equal; to detect 0.05, type --seeds 5"
    )
    assert find_resolved_difference(make_study(), 5) <= 0.05 < find_resolved_difference(make_study(), 4)
    assert describe_power(make_study(num_seeds=2)).startswith("Power: two seeds are too few to call an arm")
    line = describe_power(make_study(num_seeds=3))
    assert line.startswith("Power: 3 seeds per arm detect a difference of 0.07")
    assert line.endswith(
        "in late_val_success with a probability of 80 % (2 comparisons, noise of recorded runs); to detect "
        "0.05, type --seeds 5"
    )
    assert describe_power(make_study(num_seeds=5)).endswith("noise of recorded runs)")
    assert "; to detect 0.03, type --seeds" in describe_power(make_study(4, margins={"late_val_success": 0.03}))
    recorded = float(np.std(ENTRY.values, ddof=1))
    assert find_resolved_difference(make_study(), 5) == pytest.approx(recorded * compute_resolved_ratio(3, 5))
    assert find_resolved_difference(make_study(), 5, 0.03) == pytest.approx(0.03 * compute_resolved_ratio(3, 5))


@pytest.mark.parametrize("num_seeds", [3, 5])
def test_nothing_is_known_of_studies_whose_like_was_never_recorded_or_without_a_comparison(num_seeds: int) -> None:
    line = describe_power(make_study(num_seeds, config_hash="another"))
    assert line == (
        "Power: not known before the runs, because no similar runs are recorded; it is estimated from the runs"
    )
    assert describe_power(make_study(axis={"values": ["0"]})) == ""
    assert describe_power(make_study(baseline=None)) == ""
