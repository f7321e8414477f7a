"""Sokoban as an environment: chance and best against simulated and solved levels."""

import numpy as np
import pytest

from tests.oracles.sokoban import solve
from trainable.envs.environment import TurnLimits
from trainable.envs.level_sets import make_validation_levels
from trainable.envs.sokoban.board import step
from trainable.envs.sokoban.game import ACTION_NAMES, Sokoban

SOKOBAN, LIMITS = Sokoban(), TurnLimits(5, 2, 10)


def test_the_best_is_a_solution_within_the_limits() -> None:
    levels, shares = make_validation_levels(SOKOBAN, 48), []
    for limits in (LIMITS, TurnLimits(2, 2, 10), TurnLimits(5, 2, 3)):
        expected = [float(solve(level.cells, limits.reachable_actions) is not None) for level in levels]
        assert SOKOBAN.compute_best(levels, limits).tolist() == expected
        shares.append(np.mean(expected))
    assert 0 < shares[2] < shares[1] < shares[0]


def test_chance_is_the_success_of_random_play() -> None:
    levels = make_validation_levels(SOKOBAN, 6)
    rng = np.random.default_rng(0)
    episodes = 4000
    for level, expected in zip(levels, SOKOBAN.compute_chance(levels, LIMITS), strict=True):
        cells = np.repeat(level.cells[None], episodes, axis=0)
        solved = np.zeros(episodes, dtype=bool)
        for _ in range(LIMITS.reachable_actions):
            outcome = step(cells, np.where(solved, 0, rng.integers(1, 5, episodes)))
            cells, solved = outcome.cells, solved | outcome.solved
        standard_error = max(np.sqrt(expected * (1 - expected) / episodes), 1e-3)
        assert solved.mean() == pytest.approx(expected, abs=4 * standard_error)


def test_chance_of_one_action_counts_the_solving_ones() -> None:
    # Level 124 is solved by Up alone.
    (level,) = SOKOBAN.make_levels([124])
    assert SOKOBAN.compute_chance([level], TurnLimits(1, 1, 1)).tolist() == [0.25]
    outcome = SOKOBAN.step(SOKOBAN.start([level] * 4), [(name,) for name in ACTION_NAMES.values()], np.zeros((4, 1)))
    assert outcome.success.tolist() == [name == "Up" for name in ACTION_NAMES.values()]
