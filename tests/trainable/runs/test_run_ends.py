"""Steps and runs in which nothing can be learned are told by their rows, and no other ones."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.fakes.trainers import Row, make_quiet_trainer, run_steps
from tests.trainable.test_part_checks import SAVED_TEXTS
from trainable.config.own_parts import PartFile, register_file
from trainable.runs.history import (
    EQUAL_SCORES,
    NO_VALID_ACTION,
    SIGNAL_COLUMNS,
    ZERO_GRADIENTS,
    describe_end,
    describe_missing_signal,
    find_collapse,
    find_signal_problem,
    format_signal_problems,
)

NO_FILTER = {"filter__rollout_filter_value": 1.0, "filter__rollout_filter_include_zero": True}
GRPO = {"algorithm__adv_estimator": "grpo"}
ONE_ACTION = {"env__max_turn": 1, "env__max_actions_per_turn": 1, "env__max_actions_per_traj": 1}
CONSTANT_REWARD = "def part(level, turns):\n    return [1.0, *(0.0 for _ in turns[1:])]\n"


def train(**overrides: object) -> Row:
    (row,) = run_steps(make_quiet_trainer(**overrides), 1)
    return row


def train_with(text: str, setting: str, name: str, **overrides: object) -> Row:
    file = PartFile("own.py", text)
    register_file(file)
    return train(**{setting: f"own.py:{name}#{file.digest}", **overrides})


@pytest.mark.long
def test_a_game_whose_words_are_never_written_has_no_valid_action() -> None:
    text = SAVED_TEXTS["bandit.py"]
    for word, digit in (("Up", "1"), ("Down", "2"), ("Left", "3"), ("Right", "4")):
        text = text.replace(f'"{word}"', f'"{digit}"')
    for settings in ({}, NO_FILTER):
        row = train_with(text, "env__name", "Bandit", **ONE_ACTION, **settings)
        assert find_signal_problem(row) == NO_VALID_ACTION
    row = train_with(SAVED_TEXTS["bandit.py"], "env__name", "Bandit", **ONE_ACTION, **NO_FILTER)
    assert find_signal_problem(row) == ""


@pytest.mark.parametrize("settings", [{}, NO_FILTER, {**NO_FILTER, **GRPO}], ids=["filter", "critic", "no critic"])
def test_a_constant_reward_is_equal_in_every_group(settings: dict[str, Any]) -> None:
    row = train_with(CONSTANT_REWARD, "env__reward", "part", env__format_penalty=0.0, **settings)
    assert row["reward_std_max"] == 0
    assert 0 < row["train_success"] < 1
    assert find_signal_problem(row) == EQUAL_SCORES


@pytest.mark.parametrize(
    "settings",
    [GRPO, {**NO_FILTER, "env__group_size": 1, "env__env_groups": 16}],
    ids=["no critic", "groups of one episode"],
)
def test_a_normal_step_has_no_problem(settings: dict[str, Any]) -> None:
    row = train(**settings)
    assert row["actor_grad_norm"] > 0
    assert find_signal_problem(row) == ""


UNIFORM = {"groups": 8, "zero_std_groups": 8, "groups_kept": 8, "sampled_tokens": 3200, "train_response_tokens": 25}


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ({"train_success": 0.0, "train_pass_at_group": 0.0}, EQUAL_SCORES),
        ({"train_success": 1.0, "train_pass_at_group": 1.0}, EQUAL_SCORES),
        ({"train_success": 0.25, "train_pass_at_group": 0.5}, EQUAL_SCORES),
        # Five groups solved in all rollouts, and three in none: a critic learns which.
        ({"train_success": 0.625, "train_pass_at_group": 0.625}, ""),
        ({"train_success": 0.0, "train_pass_at_group": 0.0, "sampled_tokens": 200}, ""),
        ({}, ""),
        # Rewards differ, and there is no gradient all the same.
        ({"zero_std_groups": 2, "actor_grad_norm": 0.0}, ZERO_GRADIENTS),
    ],
)
def test_groups_without_spread_may_differ_from_each_other(columns: Row, problem: str) -> None:
    assert find_signal_problem({**UNIFORM, **columns}) == problem


def test_only_a_run_that_never_could_learn_is_described() -> None:
    empty, normal = {"groups": 8, "zero_std_groups": 8, "groups_kept": 0}, {"groups": 8, "zero_std_groups": 1}
    assert describe_missing_signal([empty, empty]) == EQUAL_SCORES
    assert describe_missing_signal([{"train_invalid_turns": 1.0}, empty]) == EQUAL_SCORES
    assert describe_missing_signal([empty, normal]) == describe_missing_signal([normal, empty, normal]) == ""
    # Rows of other families and of damaged files, and none.
    assert describe_missing_signal([{"step": 1, "train_invalid_turns": "x"}]) == describe_missing_signal([]) == ""


def test_every_column_that_is_read_is_listed() -> None:
    class Reader(dict[str, Any]):
        def get(self, name: str, default: Any = None) -> Any:
            names.add(name)
            return super().get(name, default)

    names: set[str] = set()
    find_signal_problem(Reader({**UNIFORM, "train_success": 0.25, "train_pass_at_group": 0.25}))
    assert names == set(SIGNAL_COLUMNS)


def test_a_sentence_counts_runs_and_names_their_arms() -> None:
    (sentence,) = format_signal_problems([("0", NO_VALID_ACTION)])
    assert sentence == "No reply had a valid action: `transcripts` shows them."
    (sentence,) = format_signal_problems([("0", NO_VALID_ACTION), ("0.1", NO_VALID_ACTION)])
    assert sentence == "In all 2 runs, no reply had a valid action: `transcripts` shows them."
    (sentence,) = format_signal_problems([("0", EQUAL_SCORES), ("0.1", ""), ("1", EQUAL_SCORES), ("1", "")])
    assert sentence == "In 2 of 4 runs (arms 0, 1), every group had equal scores, so the rewards taught nothing."
    arms = [(f"{number}-{'x' * 20}", EQUAL_SCORES) for number in range(9)]
    (sentence,) = format_signal_problems([*arms, ("0", "")])
    assert sentence == "In 9 of 10 runs, every group had equal scores, so the rewards taught nothing."
    assert format_signal_problems([("0", "")]) == format_signal_problems([]) == []


@pytest.mark.parametrize(
    ("success", "words"), [(0.994, "; success was 0.994, so little was left to learn"), (0.85, "")]
)
def test_a_stop_at_high_success_says_so(success: float, words: str) -> None:
    stop = {"stop_rule": "reward_variance_collapse", "stop_value": 0.01, "stop_threshold": 0.05, "stop_step": 22}
    rows: list[dict[str, Any]] = [{"step": 5, "val_success": 0.3}, {"step": 20, "val_success": success}]
    end = describe_end([*rows, {"step": 22, "val_success": None, "train_success": 0.95, **stop}], 60)
    assert end.status == "early_stopped"
    assert end.reason == f"reward_variance_collapse at step 22: 0.01 is below the threshold 0.05{words}"
    # The episodes of the last step failed: the validation is old.
    end = describe_end([*rows, {"step": 22, "train_success": 0.2, **stop}], 60)
    assert end.reason.endswith("is below the threshold 0.05")


def find_collapse_of(
    success: Sequence[float], episodes: float = math.inf, stop_step: float = math.inf, fork_step: float = 0
) -> float:
    return find_collapse([(10 * n, value, episodes) for n, value in enumerate(success)], stop_step, fork_step)


def test_collapse_is_the_second_validation_in_a_row_below_half() -> None:
    assert find_collapse_of([0.3, 0.6, 0.2, 0.5, 0.29, 0.29, 0.1]) == 50
    assert find_collapse_of([0.3, 0.6, 0.2, 0.5, 0.29, 0.3, 0.1]) == math.inf
    assert find_collapse_of([0.3, 0.6, 0.2, math.nan, 0.29, 0.3, 0.1]) == 40
    assert find_collapse_of([]) == math.inf
    assert find_collapse_of([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.1]) == math.inf
    assert [find_collapse_of([0.3, 0.1, 0.1], stop_step=step) for step in (10, 30)] == [10, 20]
    assert find_collapse_of([0.3, 0.3], stop_step=10) == 10
    # 2 sqrt(2 * .04 * .96 / n) is .049 for 128 episodes, and .0245 for 512.
    assert find_collapse_of([0.04, 0.04, 0.01, 0.01], 128) == math.inf
    assert find_collapse_of([0.04, 0.04, 0.01, 0.01], 512) == 30


def test_only_a_collapse_after_the_step_of_a_fork_counts() -> None:
    success = [0.6, 0.6, 0.1, 0.1, 0.1]
    assert [find_collapse_of(success, fork_step=step) for step in (0, 10, 20, 30, 40)] == [
        30,
        30,
        30,
        math.inf,
        math.inf,
    ]
    # What recovers after the fork may collapse again, from the success that it reached after it.
    assert find_collapse_of([*success, 0.4, 0.1, 0.1], fork_step=30) == 70
    assert find_collapse_of([*success, 0.4, 0.25, 0.25], fork_step=30) == math.inf
    assert find_collapse_of([*success, 0.4, 0.25, 0.25], stop_step=70, fork_step=30) == 70


def test_noise_of_an_unknown_number_of_episodes_is_no_collapse_and_a_lasting_fall_is_one() -> None:
    noise = [0.4, 0.7, 0.3, 0.32, 0.6, 0.25, 0.3, 0.65, 0.5, 0.35, 0.3, 0.6]
    assert find_collapse_of(noise) == 30
    assert find_collapse_of(noise, math.nan) == math.inf
    steady = [0.5, 0.52, 0.55, 0.53, 0.54, 0.56, 0.55, 0.1, 0.08, 0.09, 0.08, 0.1]
    assert find_collapse_of(steady) == find_collapse_of(steady, math.nan) == 80


def test_the_success_of_small_batches_seldom_counts_as_a_collapse() -> None:
    generator = np.random.default_rng(0)
    for success in (0.3, 0.6):
        runs = generator.binomial(8, success, (50, 200)) / 8
        assert sum(find_collapse_of(run, math.nan) < math.inf for run in runs) <= 2
        fallen = np.concatenate([runs[:, :120], generator.binomial(8, 0.05, (50, 80)) / 8], axis=1)
        steps = [find_collapse_of(run, math.nan) for run in fallen]
        assert all(1200 <= step < 1500 for step in steps)
