"""Runs of one process that start from the same policy share its validation, and no others do."""

from pathlib import Path

import pytest
import torch

from sandboxes.trees.recipe import PAPERS_TINY
from tests.fakes.scripted import make_random_model, make_small_config
from tests.fakes.trainers import drop_times
from trainable.config.run_config import RunConfig
from trainable.ppo import trainer as trainer_module
from trainable.ppo.evaluation import Evaluation, make_evaluation_key
from trainable.ppo.trainer import PPOTrainer, StepOutput
from trainable.tiny.policies import SOKOBAN_TINY
from trainable.tiny.recipe import write_model


def train_one_step(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> tuple[StepOutput, list[tuple[str, str]]]:
    """The output of the first step, and the evaluations that were played in it."""
    trainer, played = PPOTrainer(config), []
    evaluate = trainer.evaluate

    def record_evaluation(split: str, mode: str) -> Evaluation:
        played.append((split, mode))
        return evaluate(split, mode)

    monkeypatch.setattr(trainer, "evaluate", record_evaluation)
    return trainer.step(), played


BASE = [("val", "sampled"), ("val", "greedy")]


def test_runs_of_a_seed_validate_their_common_policy_once(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"trainer__test_freq": 0, "trainer__log_val_generations": 2}
    config = make_small_config(actor__kl_loss_coef=0.3, actor__use_kl_loss=True, actor__lr=1e-2, **settings)
    alone, played = train_one_step(config, monkeypatch)
    assert played == BASE
    monkeypatch.setattr(trainer_module, "BASE_EVALUATIONS", {})
    assert train_one_step(make_small_config(**settings), monkeypatch)[1] == BASE
    # Losses, learning rates and estimators have no influence on it.
    shared, played = train_one_step(config, monkeypatch)
    assert played == []
    assert drop_times(shared.row) == drop_times(alone.row)
    assert shared.evaluations == alone.evaluations
    assert shared.evaluations[0].episodes


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1},
        {"env__seed_val": 900_000},
        {"rollout__val_temperature": 0.5},
        {"rollout__name": "torch", "model__compiled_passes": False},
        {"trainer__log_val_generations": 1},
        {"rollout__response_length": 12},
    ],
    ids=str,
)
def test_another_policy_or_validation_has_another_key(change: dict[str, object]) -> None:
    weights = {"embedding": torch.arange(4.0)}
    keys = {
        make_evaluation_key(make_small_config(**settings), weights, None)
        for settings in ({}, change, {"actor__lr": 1.0})
    }
    assert len(keys) == 2


@pytest.mark.parametrize(
    "change", [{"algorithm__tree_weighting": "one-per-tree"}, {"algorithm__train_children": False}]
)
def test_recorded_trees_have_weights_so_their_settings_are_in_the_key(change: dict[str, object]) -> None:
    weights = {"embedding": torch.arange(4.0)}
    for name, policy, num_keys in (("papers", PAPERS_TINY, 2), ("sokoban", SOKOBAN_TINY, 1)):
        settings = {setting.replace(".", "__"): value for setting, value in policy.settings.items()}
        game = {"env__name": name, "model__path": f"{name}-tiny", **settings}
        configs = [make_small_config(**game), make_small_config(**game, **change)]
        assert len({make_evaluation_key(config, weights, None) for config in configs}) == num_keys


def test_the_key_is_one_of_the_weights_and_of_a_reference_to_which_a_kl_is_measured() -> None:
    config, weights = make_small_config(trainer__measure_val_kl=True), {"a": torch.arange(4.0), "b": torch.zeros(2, 2)}
    key = make_evaluation_key(config, weights, None)
    assert key == make_evaluation_key(config, dict(reversed(weights.items())), None)
    for name, tensor in (("a", torch.arange(4.0) + 1e-7), ("b", torch.zeros(4)), ("b", torch.zeros(2, 2).bfloat16())):
        assert make_evaluation_key(config, {**weights, name: tensor}, None) != key
    with_teacher = make_evaluation_key(config, weights, "1f" * 32)
    assert len({key, with_teacher, make_evaluation_key(config, weights, "2f" * 32)}) == 3
    unmeasured = make_small_config(trainer__measure_val_kl=False)
    assert make_evaluation_key(unmeasured, weights, None) == key  # the policy is its own reference
    assert make_evaluation_key(unmeasured, weights, "1f" * 32) != with_teacher


@pytest.mark.long
def test_a_model_that_was_replaced_is_validated_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, successes = make_small_config(model__path=str(tmp_path), trainer__test_freq=0), []
    for std in (0.1, 0.2):
        write_model(make_random_model(SOKOBAN_TINY.make_shape(), std=std), tmp_path, SOKOBAN_TINY.pieces)
        output, played = train_one_step(config, monkeypatch)
        assert played == BASE
        successes.append(output.evaluations)
    assert successes[0] != successes[1]


def test_only_the_newest_evaluations_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    cached = {str(number): [] for number in range(trainer_module.MAX_BASE_EVALUATIONS)}
    monkeypatch.setattr(trainer_module, "BASE_EVALUATIONS", cached)
    config = make_small_config(trainer__test_freq=0)
    assert [train_one_step(config, monkeypatch)[1] for _ in range(2)] == [BASE, []]
    assert list(cached)[:-1] == [str(number) for number in range(1, trainer_module.MAX_BASE_EVALUATIONS)]
