"""Tests of what a plan says of the power of its seeds."""

import math
from typing import Any

import numpy as np
import pytest

from analysis.data import replicates
from analysis.data.replicates import ReplicateKey, Replicates
from analysis.stats.power import compute_power
from analysis.sweep.planned_power import describe_power, find_resolved_difference

ENTRY = Replicates(
    ReplicateKey("sokoban", "laptop", "late_val_success", 60), "kl", "0", tuple(np.linspace(0.75, 0.8, 20).tolist())
)


def make_study(num_seeds: int = 1, **changes: Any) -> dict[str, Any]:
    return {
        "family": "ppo",
        "preset": "laptop",
        "settings": {"trainer": {"total_training_steps": 60}},
        "axis": {"values": ["0", "0.1", "1"]},
        "baseline": "0",
        "seeds": list(range(num_seeds)),
        **changes,
    }


@pytest.fixture(autouse=True)
def recorded_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicates, "read_replicates", lambda: (ENTRY,))


@pytest.mark.parametrize("num_seeds", [1, 3, 10])
def test_the_difference_has_a_power_of_80_percent_under_the_noise_of_recorded_runs(num_seeds: int) -> None:
    difference = find_resolved_difference(make_study(), num_seeds)
    se = math.sqrt(2 * np.var(ENTRY.values, ddof=1) / num_seeds)
    assert compute_power(difference, se, 19 + 2 * (num_seeds - 1), 2) == pytest.approx(0.8, abs=1e-6)


def test_the_line_names_the_seeds_that_resolve_the_margin() -> None:
    line = describe_power(make_study(num_seeds=1))
    assert line.startswith("Power: with 1 seed per arm, a difference of 0.0")
    assert line.endswith("; for 0.05, type --seeds 3")
    assert "(2 comparisons, noise of recorded runs)" in line
    assert find_resolved_difference(make_study(), 3) <= 0.05 < find_resolved_difference(make_study(), 2)
    assert describe_power(make_study(num_seeds=3)).endswith("noise of recorded runs)")
    assert describe_power(make_study(margins={"late_val_success": 0.03})).endswith("; for 0.03, type --seeds 6")
    assert find_resolved_difference(make_study(), 6) <= 0.03 < find_resolved_difference(make_study(), 5)


def test_nothing_is_known_of_studies_whose_like_was_never_recorded() -> None:
    settings = {"trainer": {"total_training_steps": 61}}
    assert describe_power(make_study(settings=settings)).endswith("; one seed gives numbers without intervals")
    assert describe_power(make_study(3, settings=settings)).endswith("; it is estimated from the runs themselves")


def test_a_study_without_a_comparison_has_no_line() -> None:
    assert describe_power(make_study(axis={"values": ["0"]})) == ""
    assert describe_power(make_study(baseline=None)) == ""
