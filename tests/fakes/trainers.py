"""Helpers to make small trainers, to step them and to compare two of them."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.fakes.scripted import clone_tensors, make_small_config
from trainable.diagnostics.gradient_analysis import DIAGNOSTICS
from trainable.ppo.trainer import PPOTrainer
from trainable.rollout.episode import Episode
from trainable.runs.checkpoint import read_checkpoint, write_checkpoint
from trainable.runs.records import TIME_COLUMNS

Row = dict[str, Any]
QUIET_SETTINGS = {
    "trainer__val_before_train": False,
    "trainer__test_freq": 0,
    "trainer__measure_val_kl": False,
    "env__val_env_groups": 1,
    "env__test_env_groups": 0,
}


def make_quiet_trainer(**overrides: object) -> PPOTrainer:
    """Make a small trainer that evaluates nothing."""
    return PPOTrainer(make_small_config(**{**QUIET_SETTINGS, **overrides}), diagnostics=DIAGNOSTICS)


def drop_times(row: Row) -> Row:
    return {name: value for name, value in row.items() if name not in TIME_COLUMNS}


def run_steps(trainer: PPOTrainer, count: int) -> list[Row]:
    return [drop_times(trainer.step().row) for _ in range(count)]


def check_resumption(make_trainer: Callable[[], PPOTrainer], folder: Path, stops: Sequence[int] = (1,)) -> None:
    """Check that trainers which continue from states of a run write its further rows and end with its state."""
    uninterrupted, rows = make_trainer(), list[Row]()
    total_steps = uninterrupted.config.trainer.total_training_steps
    for step in range(1, total_steps + 1):
        rows += run_steps(uninterrupted, 1)
        if step in stops:
            write_checkpoint(folder / f"state_{step}", *uninterrupted.get_state())
    for stop in stops:
        resumed = make_trainer()
        tensors, values = read_checkpoint(folder / f"state_{stop}")
        resumed.load_state(tensors, values)
        assert (resumed.step_index, resumed.seconds_total) == (stop, values["seconds_total"])
        assert run_steps(resumed, total_steps - stop) == rows[stop:]
        assert has_same_weights(resumed, uninterrupted)
        end, other_end = (trainer.get_state()[1] | {"seconds_total": 0} for trainer in (resumed, uninterrupted))
        assert end == other_end


def copy_weights(trainer: PPOTrainer) -> dict[str, torch.Tensor]:
    return clone_tensors(trainer.get_state()[0])


def has_same_weights(trainer: PPOTrainer, other_trainer: PPOTrainer) -> bool:
    weights, other_weights = copy_weights(trainer), copy_weights(other_trainer)
    return weights.keys() == other_weights.keys() and all(
        torch.equal(weights[name], other_weights[name]) for name in weights
    )


def has_changed(trainer: PPOTrainer, old_weights: dict[str, torch.Tensor], prefix: str) -> bool:
    new_weights = copy_weights(trainer)
    names = [name for name in old_weights if name.startswith(prefix)]
    assert names
    return any(not torch.equal(old_weights[name], new_weights[name]) for name in names)


def record_results(trainer: PPOTrainer, method_name: str) -> list[Any]:
    """Make a list that gets the result of each later call of a method of the trainer."""
    method, results = getattr(trainer, method_name), list[Any]()

    def call(*args: Any, **kwargs: Any) -> Any:
        results.append(method(*args, **kwargs))
        return results[-1]

    setattr(trainer, method_name, call)
    return results


def is_finite(row: Row) -> bool:
    return all(np.isfinite(value) for value in row.values() if isinstance(value, float))


def replay_step(trainer: PPOTrainer, step: int) -> list[Episode]:
    """Play the episodes of a step again, with the current weights of the trainer."""
    current_step, trainer.step_index = trainer.step_index, step
    episodes = trainer.roll_out(trainer.levels[step - 1], trainer.config.env.group_size, "sampling")
    trainer.step_index = current_step
    return episodes
