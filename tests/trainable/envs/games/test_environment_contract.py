"""What every environment promises, for every game: pure functions, any subset of episodes, canonical actions."""

from pathlib import Path

import numpy as np
import pytest

from tests.fakes.data_files import write_sums
from trainable.config.games import GAMES
from trainable.config.sections import EnvConfig
from trainable.envs.environment import FIRST_TEST_SEED, Environment
from trainable.envs.games.make import describe_success_range, get_turn_limits, make_environment
from trainable.envs.level_sets import make_validation_levels

WORDS = {
    "sokoban": ("Up", "Down", "Left", "Right"),
    "frozenlake": ("Up", "Down", "Left", "Right"),
    "mastermind": ("AAA", "ABC", "DDB", "ACC"),
    "countdown": ("1+2", "(3-4)*5", "7"),
    "dataset": ("7", "12", "305"),
}
EPISODES, TURN_ACTIONS = 24, 2


@pytest.fixture(params=list(WORDS))
def environment(request: pytest.FixtureRequest, tmp_path: Path) -> Environment:
    return make_environment(make_env_config(request.param, tmp_path))


def make_env_config(name: str, folder: Path) -> EnvConfig:
    file = write_sums(folder / "sums.jsonl")
    dataset = {"file": str(file), "pattern": "[0-9]+", "instructions": "Example: <answer>7</answer>"}
    return EnvConfig.model_validate({"name": name, "dataset": dataset})


def test_every_game_can_be_made_and_has_its_section(tmp_path: Path) -> None:
    assert {name for name, game in GAMES.items() if not game.has_trees} == set(WORDS)
    for name in WORDS:
        assert make_environment(make_env_config(name, tmp_path)).name == name
    sections = {name: type(getattr(EnvConfig(), name)) for name, game in GAMES.items() if game.section}
    assert sections == {name: game.section for name, game in GAMES.items() if game.section}
    assert next(iter(GAMES)) == EnvConfig().name


def draw_turn(environment: Environment, rng: np.random.Generator, count: int) -> list[tuple[str, ...]]:
    words = WORDS[environment.name]
    return [tuple(words[number] for number in rng.integers(len(words), size=rng.integers(3))) for _ in range(count)]


def test_a_subset_of_episodes_is_stepped_as_in_the_whole_batch(environment: Environment) -> None:
    rng = np.random.default_rng(0)
    states = environment.start(make_validation_levels(environment, EPISODES))
    for _ in range(2):
        turns, luck = draw_turn(environment, rng, len(states)), rng.random((len(states), TURN_ACTIONS))
        texts = [environment.format_state(state, "full") for state in states]
        outcome = environment.step(states, turns, luck)
        # The given states are unchanged.
        assert [environment.format_state(state, "full") for state in states] == texts
        subset = rng.permutation(len(states))[: len(states) // 3]
        partial = environment.step([states[row] for row in subset], [turns[row] for row in subset], luck[subset])
        for field in ("rewards", "action_counts", "done", "success"):
            assert np.array_equal(getattr(partial, field), getattr(outcome, field)[subset])
        partial_texts = [environment.format_state(state, "full") for state in partial.states]
        assert partial_texts == [environment.format_state(outcome.states[row], "full") for row in subset]
        assert not (outcome.success & ~outcome.done).any()
        assert (outcome.action_counts <= [len(names) for names in turns]).all()
        states = [state for state, done in zip(outcome.states, outcome.done, strict=True) if not done]


def test_a_turn_without_actions_changes_nothing(environment: Environment) -> None:
    states = environment.start(make_validation_levels(environment, 4))
    outcome = environment.step(states, [()] * 4, np.full((4, TURN_ACTIONS), 0.99))
    assert not any(numbers.any() for numbers in (outcome.rewards, outcome.action_counts, outcome.done))
    for state, old_state in zip(outcome.states, states, strict=True):
        assert environment.format_state(state, "full") == environment.format_state(old_state, "full")


def test_actions_have_one_spelling_and_texts_are_plain_lines(environment: Environment) -> None:
    for word in WORDS[environment.name]:
        action = environment.read_action(word)
        assert action == word == environment.read_action(word.lower())
    assert environment.read_action("no action at all") is None
    (state,) = environment.start(make_validation_levels(environment, 1))
    for style in ("full", "compact"):
        text = environment.format_state(state, style)
        assert text
        assert text == text.strip("\n")
    assert environment.format_instructions(7)
    assert "<answer>" in environment.format_instructions(7)


@pytest.mark.long
def test_levels_depend_on_their_seed_only(environment: Environment) -> None:
    levels = environment.make_levels([5, 6, 7])
    assert [level.seed for level in levels] == [5, 6, 7]
    assert [level.key for level in environment.make_levels([7, 5])] == [levels[2].key, levels[0].key]
    test_levels = environment.make_test_levels(8)
    assert min(level.seed for level in test_levels) >= FIRST_TEST_SEED
    assert [level.key for level in environment.make_test_levels(3)] == [level.key for level in test_levels[:3]]


def test_chance_is_at_most_the_best(environment: Environment) -> None:
    env = EnvConfig(name=environment.name, max_actions_per_turn=1)
    levels, limits = make_validation_levels(environment, 16), get_turn_limits(env)
    chance, best = environment.compute_chance(levels, limits), environment.compute_best(levels, limits)
    assert best is not None
    assert best.shape == (16,)
    assert ((best >= 0) & (best <= 1)).all()
    if chance is not None:
        assert ((chance >= 0) & (chance <= best + 1e-12)).all()


def test_the_range_of_success_is_recorded_and_what_takes_long_to_compute_left_out() -> None:
    assert describe_success_range(EnvConfig()) == describe_success_range(EnvConfig(env_groups=7))
    many_levels = EnvConfig(name="mastermind", val_env_groups=100_000)
    assert "of the first 512 validation levels" in describe_success_range(many_levels)
    assert "not known" in describe_success_range(EnvConfig(max_turn=10_000, max_actions_per_traj=10_000))
    long_turns = EnvConfig(name="frozenlake", max_actions_per_turn=6)
    assert "the best policy" not in describe_success_range(long_turns)
    assert "uniformly random actions succeed in 0.246" in describe_success_range(long_turns)
