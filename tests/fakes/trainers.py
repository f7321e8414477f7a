"""Small trainers: making one, stepping it, comparing two."""

from typing import Any

import numpy as np
import torch

from tests.fakes.scripted import cloned, small
from trainable.config.seeds import stream
from trainable.diagnostics.standard import DIAGNOSTICS
from trainable.ppo.trainer import PPOTrainer
from trainable.rollout.episode import Episode
from trainable.rollout.play import play
from trainable.runs.records import TIME_COLUMNS

Row = dict[str, Any]
QUIET = {
    "trainer__val_before_train": False, "trainer__test_freq": 0, "env__val_env_groups": 1, "env__test_env_groups": 0,
}  # fmt: skip


def quiet(**overrides: object) -> PPOTrainer:
    """A small trainer that evaluates nothing."""
    return PPOTrainer(small(**{**QUIET, **overrides}), diagnostics=DIAGNOSTICS)


def timeless(row: Row) -> Row:
    return {name: value for name, value in row.items() if name not in TIME_COLUMNS}


def steps(trainer: PPOTrainer, count: int) -> list[Row]:
    return [timeless(trainer.step().row) for _ in range(count)]


def weights(trainer: PPOTrainer) -> dict[str, torch.Tensor]:
    return cloned(trainer.state()[0])


def same_weights(one: PPOTrainer, other: PPOTrainer) -> bool:
    a, b = weights(one), weights(other)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def moved(trainer: PPOTrainer, before: dict[str, torch.Tensor], part: str) -> bool:
    after = weights(trainer)
    names = [name for name in before if name.startswith(part)]
    assert names
    return any(not torch.equal(before[name], after[name]) for name in names)


def finite(row: Row) -> bool:
    return all(np.isfinite(value) for value in row.values() if isinstance(value, float))


def replay(trainer: PPOTrainer, step: int) -> list[Episode]:
    """The step's episodes, played again with the weights that the trainer has now."""
    env = trainer.config.env
    return play(
        trainer.levels[step - 1], env.group_size, trainer.engine.sampler, trainer.protocol, trainer.codec,
        trainer.rules,
        trainer._sampling(trainer.config.rollout.temperature), stream(trainer.config.seed, "sampling", step),
    )  # fmt: skip
