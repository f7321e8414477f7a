"""FrozenLake against Gymnasium's draws and dynamics, and its values against simulated episodes."""

import functools
import itertools

import numpy as np
import pytest
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv
from gymnasium.utils import seeding

from trainable.envs.environment import TurnLimits
from trainable.envs.games.frozen_lake import ACTION_NAMES, GOAL, HOLE, START, FrozenLake, Lake, LakeState
from trainable.envs.level_sets import collect_level_keys, make_validation_levels

LETTERS = {"F": 0, "H": HOLE, "S": START, "G": GOAL}
CORNERS = Lake(0, np.array([[START, 0], [HOLE, GOAL]], dtype=np.int8))


def draw_published_map(seed: int, size: int, p: float) -> list[str]:
    """Draw with Gymnasium's own seeding and `choice`, in the order that RAGEN draws in."""
    generator, _ = seeding.np_random(seed)
    while True:
        board = generator.choice(["F", "H"], (size, size), p=[p, 1 - p])
        start, goal = (tuple(generator.integers(size, size=2)) for _ in range(2))
        if start == goal:
            continue
        board[start], board[goal] = "S", "G"
        if can_reach_goal(board):
            return ["".join(row) for row in board]


def can_reach_goal(board: np.ndarray) -> bool:
    reached = board == "S"
    for _ in range(board.size):
        spread = reached.copy()
        spread[1:] |= reached[:-1]
        spread[:-1] |= reached[1:]
        spread[:, 1:] |= reached[:, :-1]
        spread[:, :-1] |= reached[:, 1:]
        reached = spread & (board != "H")
    return bool((reached & (board == "G")).any())


def to_tiles(rows: list[str]) -> np.ndarray:
    return np.array([[LETTERS[letter] for letter in row] for row in rows], dtype=np.int8)


@pytest.mark.parametrize(("size", "p", "count"), [(4, 0.9, 512), (5, 0.7, 64), (3, 0.8, 64)])
def test_maps_are_those_of_the_published_generator(size: int, p: float, count: int) -> None:
    levels = make_validation_levels(FrozenLake(size, p), count)
    for level in levels:
        assert np.array_equal(level.tiles, to_tiles(draw_published_map(level.seed, size, p)))


@pytest.mark.parametrize("success_rate", [0.8, 1.0, 0.4])
def test_a_step_has_the_outcomes_and_probabilities_of_gymnasium(success_rate: float) -> None:
    game = FrozenLake(success_rate=success_rate)
    grid = (np.arange(600) + 0.5) / 600  # the random numbers, evenly spread
    for level in make_validation_levels(game, 3):
        names = {value: letter for letter, value in LETTERS.items()}
        rows = ["".join(names[tile] for tile in row) for row in level.tiles.tolist()]
        env = FrozenLakeEnv(desc=rows, is_slippery=True, success_rate=success_rate)
        flat_tiles = level.tiles.reshape(-1)
        for cell, action in itertools.product(np.flatnonzero((flat_tiles != HOLE) & (flat_tiles != GOAL)), range(4)):
            states = [LakeState(level.tiles, int(cell))] * len(grid)
            outcome = game.step(states, [(ACTION_NAMES[action],)] * len(grid), grid[:, None])
            expected = np.zeros(flat_tiles.size)
            for probability, next_cell, reward, done in env.P[int(cell)][action]:
                expected[next_cell] += probability
                matching = np.array([state.player == next_cell for state in outcome.states])
                assert set(outcome.rewards[matching]) <= {float(reward)}
                assert set(outcome.done[matching]) <= {done}
            actual = np.bincount([state.player for state in outcome.states], minlength=flat_tiles.size) / len(grid)
            assert actual == pytest.approx(expected, abs=2 / len(grid))


def test_a_turn_ends_in_a_hole_or_at_the_goal_and_slips_go_to_both_sides() -> None:
    game = FrozenLake(size=2, success_rate=1.0)
    (state,) = game.start([CORNERS])
    luck = np.full((4, 3), 0.5)
    turns = [("Right", "Down", "Left"), ("Down", "Right", "Right"), ("Left", "Up"), ()]
    outcome = game.step([state] * 4, turns, luck)
    assert [state.player for state in outcome.states] == [3, 2, 0, 0]
    assert outcome.rewards.tolist() == [1.0, 0.0, 0.0, 0.0]
    assert outcome.action_counts.tolist() == [2, 1, 2, 0]
    assert outcome.done.tolist() == [True, True, False, False]
    assert outcome.success.tolist() == [True, False, False, False]
    game = FrozenLake(size=2, success_rate=0.5)
    (state,) = game.start([CORNERS])
    outcome = game.step([state] * 3, [("Right",)] * 3, np.array([[0.1], [0.5], [0.9]]))
    assert [state.player for state in outcome.states] == [2, 1, 0]  # down, as intended, and up, which is off the map


def test_texts() -> None:
    game = FrozenLake()
    state = LakeState(to_tiles(["SFFF", "FHFH", "FFFH", "HFFG"]), 0)
    assert game.format_state(state, "compact") == "P___\n_O_O\n___O\nO__G"
    assert game.format_state(state._replace(player=5), "compact") == "____\n_X_O\n___O\nO__G"
    assert game.format_state(state._replace(player=15), "compact") == "____\n_O_O\n___O\nO__√"
    coordinates = (
        "Board size: 4 rows x 4 cols (zero-indexed).\nStart: (0, 0)\nGoal: (3, 3)\nPlayer: (0, 1)\n"
        "Holes: (1, 1), (1, 3), (2, 3), (3, 0)"
    )
    moved = state._replace(player=1)
    assert FrozenLake(observation_format="coord").format_state(moved, "full") == coordinates
    assert game.format_state(moved, "full") == f"Coordinates: \n{coordinates}\nGrid Map: \n_P__\n_O_O\n___O\nO__G"
    assert "Player in hole: (1, 1)\nHoles" in game.format_state(state._replace(player=5), "full")
    assert "Player on goal: (3, 3)\nHoles" in game.format_state(state._replace(player=15), "full")
    assert "slippery" in game.format_instructions(10)
    assert "slippery" not in FrozenLake(success_rate=1.0).format_instructions(10)
    assert [game.read_action(word) for word in ("left", "DOWN", "Right", "uP")] == ["Left", "Down", "Right", "Up"]
    assert [game.read_action(word) for word in ("none", "")] == [None, None]


@pytest.mark.slow
def test_test_maps_are_in_no_other_set() -> None:
    game = FrozenLake()
    test_keys = collect_level_keys(game.make_test_levels(64))
    assert len(test_keys) == 64
    assert not test_keys & collect_level_keys(make_validation_levels(game))
    assert not test_keys & collect_level_keys(game.make_levels(range(10_000, 13_200)))
    crowded = FrozenLake(p=1.0)
    assert not crowded.has_held_out_levels
    assert [level.seed for level in crowded.make_test_levels(2)] == [900_000_000, 900_000_001]


def play(game: FrozenLake, level: Lake, limits: TurnLimits, choose, episodes: int) -> float:
    """Simulate episodes on one level; `choose` returns the actions of a turn of every episode."""
    rng = np.random.default_rng(0)
    states = game.start([level] * episodes)
    success = np.zeros(episodes, dtype=bool)
    live, actions_left = np.arange(episodes), limits.actions
    for _ in range(limits.turns):
        turns = choose(rng, [states[index] for index in live], min(limits.actions_per_turn, actions_left))
        outcome = game.step([states[index] for index in live], turns, rng.random((len(live), limits.actions_per_turn)))
        for index, state in zip(live, outcome.states, strict=True):
            states[index] = state
        success[live] |= outcome.success
        live = live[~outcome.done]
        actions_left -= limits.actions_per_turn
        if not len(live):
            break
    return float(success.mean())


@pytest.mark.long
@pytest.mark.parametrize("success_rate", [1.0, 0.7])
def test_chance_is_the_success_of_random_play(success_rate: float) -> None:
    game, limits = FrozenLake(success_rate=success_rate), TurnLimits(5, 2, 10)
    levels = game.make_levels(range(4))

    def choose(rng, states, count):
        return [tuple(ACTION_NAMES[number] for number in rng.integers(4, size=count)) for _ in states]

    for level, expected in zip(levels, game.compute_chance(levels, limits), strict=True):
        standard_error = max(np.sqrt(expected * (1 - expected) / 2000), 1e-3)
        assert play(game, level, limits, choose, 2000) == pytest.approx(expected, abs=4 * standard_error)


def make_best_policy(level: Lake, success_rate: float, actions_per_turn: int):
    """A function of cell and turns left: the largest probability of success, by recursion, and the turn that has it."""
    tiles, slip = level.tiles.reshape(-1), (1 - success_rate) / 2
    sequences = list(itertools.product(range(4), repeat=actions_per_turn))

    @functools.cache
    def find_best(player: int, turns: int) -> tuple[float, tuple[int, ...]]:
        if tiles[player] in (HOLE, GOAL) or turns == 0:
            return float(tiles[player] == GOAL), ()
        return max((expect(player, sequence, turns - 1), sequence) for sequence in sequences)

    def expect(player: int, sequence: tuple[int, ...], turns: int) -> float:
        if not sequence or tiles[player] in (HOLE, GOAL):
            return find_best(player, turns)[0]
        row, col = divmod(player, 4)
        value = 0.0
        for turn, probability in ((-1, slip), (0, success_rate), (1, slip)):
            down, right = ((0, -1), (1, 0), (0, 1), (-1, 0))[(sequence[0] + turn) % 4]
            next_cell = min(max(row + down, 0), 3) * 4 + min(max(col + right, 0), 3)
            value += probability * expect(next_cell, sequence[1:], turns)
        return value

    return find_best


@pytest.mark.parametrize(("success_rate", "limits"), [(0.7, TurnLimits(4, 1, 4)), (0.6, TurnLimits(2, 2, 4))])
@pytest.mark.parametrize("number", [0, 1])
def test_the_best_policy_succeeds_as_often_as_its_value_says(
    success_rate: float, limits: TurnLimits, number: int
) -> None:
    game = FrozenLake(success_rate=success_rate)
    levels = [level for level in game.make_levels(range(40)) if 0.2 < game.compute_best([level], limits)[0] < 0.9]
    level = levels[number]
    find_best = make_best_policy(level, success_rate, limits.actions_per_turn)
    turns_left = iter(range(limits.turns, 0, -1))

    def choose(rng, states, count):
        turns = next(turns_left)
        return [tuple(ACTION_NAMES[action] for action in find_best(state.player, turns)[1]) for state in states]

    (expected,) = game.compute_best([level], limits)
    (state,) = game.start([level])
    assert find_best(state.player, limits.turns)[0] == pytest.approx(expected)
    standard_error = np.sqrt(expected * (1 - expected) / 2000)
    assert play(game, level, limits, choose, 2000) == pytest.approx(expected, abs=4 * standard_error)


def test_the_best_is_unknown_for_very_long_turns() -> None:
    game = FrozenLake()
    assert game.compute_best(game.make_levels([0]), TurnLimits(1, 10, 10)) is None
