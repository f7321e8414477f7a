"""The algorithm of the update-rule sandbox: replay, screening, and the update of a rule."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sandboxes.toys.ensemble import UpdateResult
from sandboxes.toys.optimizer import MemberAdam
from sandboxes.toys.prefixes import add_prefix, select_prefix
from sandboxes.toys.rngs import MemberRngs
from sandboxes.update_rules.batch.rollouts import Rollouts
from sandboxes.update_rules.batch.slices import flatten_rollouts, unflatten_rollouts
from sandboxes.update_rules.config.settings import UpdateRuleConfig
from sandboxes.update_rules.rules.kondo import screen_rollouts
from sandboxes.update_rules.rules.rule import UpdateRule
from sandboxes.update_rules.tasks.task import Task
from sandboxes.update_rules.training.replay import AgeStatistics, ReplayDraw, make_buffer
from sandboxes.update_rules.training.update import Learner
from trainable.runs.run import Row

UNIFORM_GROUPS = "uniform_groups"
"""Name of the stop rule for too many consecutive batches without a mixed group."""
COSINE_EVERY = 5
"""Evaluations per measurement of the gradient's direction, which costs two more backward passes."""

# Keys of `Rollouts.scalars`, and their columns.
_SAMPLER_COLUMNS = {
    "informative_group_rate": "mixed_group_rate",
    "retained_group_rate": "retained_group_rate",
    "used_group_fallback": "group_fallback",
}


class UpdateRuleAlgorithm:
    """Members that learn a task by one update rule (see `sandboxes.toys.ensemble.Algorithm`).

    Args:
        config: the configuration.
        seeds: one per member.
        task: the task to learn.
        objective: the function of the update rule that `config` names.
    """

    def __init__(self, config: UpdateRuleConfig, seeds: Sequence[int], task: Task, objective: UpdateRule) -> None:
        self.config, self.task, self.objective, self.seeds = config, task, objective, tuple(seeds)
        self.rngs = MemberRngs(seeds)
        models = task.make_models(self.rngs)
        self.learner = Learner(config, task, objective, models, MemberAdam(models.get_parameters(), config.lr))
        self.buffer = make_buffer(config)
        self.age_statistics = AgeStatistics(torch.zeros(len(seeds), 5, dtype=torch.float64))
        self.consecutive_uniform_batches = torch.zeros(len(seeds), dtype=torch.int64)

    def evaluate(self, step: int) -> dict[str, Tensor]:
        """Columns of the task's evaluation, [E] each."""
        return self.task.evaluate(self.learner.models, self.rngs, step)

    def sample(self, step: int) -> ReplayDraw:
        """The batch to train on: the one that is sampled, a delayed one, or one from the replay buffer."""
        new_rollouts = self.task.sample(self.learner.models, self.rngs, step)
        return self.buffer.draw(new_rollouts, self.rngs.uniform("sandbox_replay", step, shape=()))

    def find_stops(self, batch: ReplayDraw, step: int) -> dict[int, Row]:
        """The stop columns of each member with too many consecutive batches without a mixed group."""
        patience = self.config.fallback_patience
        return {
            seed: {
                "stop_rule": UNIFORM_GROUPS,
                "stop_value": float(count),
                "stop_threshold": float(patience),
                "stop_step": step,
            }
            for seed, count in zip(self.seeds, self._count_uniform_batches(batch).tolist(), strict=True)
            if count >= patience
        }

    def train(self, batch: ReplayDraw, step: int, is_row: bool) -> UpdateResult:
        """Screen the batch and take the optimizer steps of the rule."""
        self.buffer, self.consecutive_uniform_batches = batch.buffer, self._count_uniform_batches(batch)
        self.age_statistics.add(batch.rollouts.age, self._compute_freshness(batch.rollouts.age))
        rollouts, screen_metrics = self._screen_batch(batch.rollouts, step)
        result = self.learner.update(rollouts, is_row, is_row and self._is_cosine_step(step))
        if not is_row:
            return result
        columns = {**result.metrics, **screen_metrics, **self._make_sampler_columns(batch)}
        columns |= self.measure_open_interval()
        self.age_statistics.reset()
        return UpdateResult(columns, result.nonfinite_names)

    def measure_open_interval(self) -> dict[str, Tensor]:
        """Statistics of the ages of the batches since the last row, where batches can have an age."""
        return self.age_statistics.compute() if self.config.delay or self.config.replay_capacity else {}

    def _count_uniform_batches(self, batch: ReplayDraw) -> Tensor:
        """[E], the number of consecutive batches without a mixed group, the last of which is `batch`."""
        return torch.where(_is_uniform(batch.rollouts), self.consecutive_uniform_batches + 1, 0)

    def _is_cosine_step(self, step: int) -> bool:
        is_due = (step - self.config.delay) // self.config.trainer.test_freq % COSINE_EVERY == 0
        return self.config.diagnostics and is_due

    def _screen_batch(self, rollouts: Rollouts, step: int) -> tuple[Rollouts, dict[str, Tensor]]:
        if not self.config.rule.screens_batch:
            return rollouts, {}
        count = rollouts.rewards.shape[1]
        return screen_rollouts(rollouts, self.rngs.uniform("sandbox_screen", step, shape=(count,)), self.config)

    def _compute_freshness(self, age: Tensor) -> Tensor:
        """[E], the weight of a batch in the loss because of its age; 1 if the rule does not discount age."""
        # discounts_age is a bool: the exponent is 0 for all other rules.
        return torch.exp(-self.config.replay_age_decay * age.double() * self.config.rule.discounts_age)

    def _make_sampler_columns(self, replay_draw: ReplayDraw) -> dict[str, Tensor]:
        """Columns of the sampler and the replay buffer for the batch that was trained on."""
        scalars = replay_draw.rollouts.scalars
        columns = {column: scalars[name] for name, column in _SAMPLER_COLUMNS.items() if name in scalars}
        if self.config.replay_capacity:
            size = torch.full_like(replay_draw.rollouts.age, len(self.buffer.batches))
            columns |= {
                "replay_age": replay_draw.rollouts.age,
                "replay_size": size,
                "replay_priority": replay_draw.priority,
            }
        return columns

    def get_tensors(self) -> dict[str, Tensor]:
        """Weights and moments, the sums of ages, and the batches that may still be drawn."""
        tensors = add_prefix(self.learner.optimizer.state_dict(), "adam") | {"ages": self.age_statistics.sums}
        for index, stored_batch in enumerate(self.buffer.drawable_batches):
            tensors |= add_prefix(flatten_rollouts(stored_batch.rollouts), f"batches/{index}")
        return tensors

    def get_values(self, member: int) -> dict[str, Any]:
        """The count of the stop rule, and what the batches need to be unpacked."""
        batches = self.buffer.drawable_batches
        return {
            "uniform_batches": int(self.consecutive_uniform_batches[member]),
            "batches": len(batches),
            "group_size": batches[0].rollouts.group_size if batches else None,
        }

    def load(self, tensors: Mapping[str, Tensor], values: Sequence[Mapping[str, Any]]) -> None:
        """Continue from these tensors and values."""
        self.learner.optimizer.load_state_dict(select_prefix(tensors, "adam"))
        self.age_statistics.sums = tensors["ages"]
        for index in range(values[0]["batches"]):
            # `with_batch` computes the priority again, which a state does not contain.
            self.buffer = self.buffer.with_batch(
                unflatten_rollouts(select_prefix(tensors, f"batches/{index}"), values[0]["group_size"])
            )
        self.consecutive_uniform_batches = torch.tensor([value["uniform_batches"] for value in values])


def _is_uniform(rollouts: Rollouts) -> Tensor:
    """[E], whether the rewards differ in no group of the batch, so that all groups are kept; False without groups."""
    # Only grouped samplers report the flag; a comparison of rewards over different prompts would mean nothing.
    zeros = torch.zeros(len(rollouts.rewards))
    return rollouts.scalars.get("used_group_fallback", zeros) > 0
