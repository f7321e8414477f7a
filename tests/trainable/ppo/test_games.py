"""The trainer in games other than Sokoban: rows, evaluations, and random numbers of the environment."""

from itertools import chain

import pytest

from tests.fakes.trainers import is_finite
from trainable.config.run_config import apply_overrides
from trainable.diagnostics.gradient_analysis import DIAGNOSTICS
from trainable.envs.games.mastermind import compute_consistent_share
from trainable.ppo.evaluation import measure_episodes
from trainable.ppo.trainer import PPOTrainer
from trainable.runs.records import STEP_COLUMNS
from trainable.tiny.__main__ import make_config
from trainable.tiny.policies import FROZENLAKE_TINY, MASTERMIND_TINY

POLICIES = {"frozenlake": FROZENLAKE_TINY, "mastermind": MASTERMIND_TINY}


def make_trainer(game: str, **overrides: object) -> PPOTrainer:
    """Make a trainer of the shipped policy of a game."""
    settings = {
        "env.env_groups": 2,
        "env.group_size": 4,
        "env.val_env_groups": 6,
        "env.test_env_groups": 4,
        "trainer.total_training_steps": 2,
        "trainer.test_freq": 1,
        "actor.ppo_mini_batch_size": 4,
        "filter.rollout_filter_include_zero": True,
        **{key.replace("__", "."): value for key, value in overrides.items()},
    }
    config = make_config(f"{game}-tiny", POLICIES[game])
    return PPOTrainer(apply_overrides(config, settings), diagnostics=DIAGNOSTICS)


@pytest.mark.long
@pytest.mark.parametrize("game", POLICIES)
def test_rows_have_the_columns_of_any_game_and_those_of_its_measures(game: str) -> None:
    trainer = make_trainer(game, env__val_env_groups=32 if game == "mastermind" else 6)
    row = trainer.step().row
    assert {"val_success", "train_success", "base_val_greedy_success"} <= set(row)
    assert set(row) <= {column.name for column in STEP_COLUMNS}
    assert is_finite(row)
    columns = {name for name in row if name.endswith("consistent_guesses")}
    expected = {"train_consistent_guesses", "val_consistent_guesses", "base_val_consistent_guesses"}
    assert columns == (expected if game == "mastermind" else set())
    if game == "mastermind":
        assert all(0 < row[name] < 1 for name in expected)
        levels = trainer.levels[1]
        episodes = trainer.roll_out(levels, 8, "sampling")
        guesses = [(episode.group, [*chain(*episode.turn_actions)]) for episode in episodes]
        shares = [compute_consistent_share(levels[group], names) for group, names in guesses if len(names) > 1]
        measured = measure_episodes(trainer.level_source, levels, episodes)
        assert measured == {"consistent_guesses": pytest.approx(sum(shares) / len(shares))}


@pytest.mark.long
def test_slips_do_not_depend_on_what_is_sampled_nor_samples_on_slips() -> None:
    """Arms of other success rates see the same first replies, and equal actions meet equal random numbers."""
    trainers = [make_trainer("frozenlake", env__success_rate=rate) for rate in (1.0, 0.3)]
    steady, slippery = (trainer.roll_out(trainer.levels[0][:1], 24, "sampling") for trainer in trainers)
    assert [episode.texts[0] for episode in steady] == [episode.texts[0] for episode in slippery]
    assert [episode.texts for episode in steady] != [episode.texts for episode in slippery]
    # Within a group, levels are equal and slips are not: equal first turns lead to different states. Without slips
    # they do not.
    for episodes, has_slips in ((steady, False), (slippery, True)):
        second_prompts: dict[tuple[str, ...], set[tuple[int, ...]]] = {}
        for episode in episodes:
            if len(episode.texts) > 1 and episode.turn_actions[0]:
                prompt = episode.tokens[(episode.turns == 1) & ~episode.mask]
                second_prompts.setdefault(episode.turn_actions[0], set()).add(tuple(prompt.tolist()))
        assert (max(map(len, second_prompts.values())) > 1) == has_slips
    again = trainers[1].roll_out(trainers[1].levels[0][:1], 24, "sampling")
    assert [episode.texts for episode in again] == [episode.texts for episode in slippery]
