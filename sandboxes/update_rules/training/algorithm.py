"""The algorithm of the update-rule sandbox: replay, screening, a rule's inner epochs, and diagnostics."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sandboxes.toys.ensemble import Algorithm, UpdateResult, add_prefix, select_prefix
from sandboxes.toys.optimizer import MemberAdam, descend, merge_names
from sandboxes.toys.rngs import MemberRngs
from sandboxes.update_rules.config.settings import UpdateRuleConfig
from sandboxes.update_rules.rollouts import Rollouts, Task, flatten_rollouts, unflatten_rollouts
from sandboxes.update_rules.rules.delight import screen_rollouts
from sandboxes.update_rules.rules.rule import RuleLoss, UpdateRule
from sandboxes.update_rules.rules.token_credit import cross_entropy
from sandboxes.update_rules.training.diagnostics import (
    compute_entropy_statistics,
    compute_fit_statistics,
    compute_ratio_statistics,
    cosine,
)
from sandboxes.update_rules.training.replay import AgeStatistics, ReplayBuffer, ReplayDraw
from trainable.runs.run_files import Row

UNIFORM_GROUPS = "uniform_groups"
"""Stop rule for too many consecutive batches without a mixed group."""
COSINE_EVERY = 5
"""Evaluations between measurements of the gradient's direction, which cost two more backward passes."""

_SAMPLER_COLUMNS = {"informative_group_rate": "mixed_group_rate", "used_group_fallback": "group_fallback"}
"""Columns of `Rollouts.scalars` with a name of their own."""


class UpdateRuleAlgorithm(Algorithm[ReplayDraw]):
    """Members that learn a task by one update rule. objective: the function of the rule that `config` names."""

    def __init__(self, config: UpdateRuleConfig, seeds: Sequence[int], task: Task, objective: UpdateRule) -> None:
        self.config, self.task, self.objective, self.seeds = config, task, objective, tuple(seeds)
        self.rngs = MemberRngs(seeds)
        self.models = task.make_models(self.rngs)
        self.optimizer = MemberAdam(self.models.weights, config.lr)
        self.optimizers = {"adam": self.optimizer}
        self.buffer = ReplayBuffer(config)
        self.age_statistics = AgeStatistics(torch.zeros(len(seeds), 5, dtype=torch.float64))
        self.consecutive_uniform_batches = torch.zeros(len(seeds), dtype=torch.int64)

    def evaluate(self, step: int) -> dict[str, Tensor]:
        """Compute the columns of the task's evaluation, [E] each."""
        return self.task.evaluate(self.models, self.rngs, step)

    def sample(self, step: int) -> ReplayDraw:
        """Choose the batch to train on: the newly sampled one, a delayed one, or one from the replay buffer."""
        new_rollouts = self.task.sample(self.models, self.rngs, step)
        return self.buffer.draw(new_rollouts, self.rngs.uniform("sandbox_replay", step, shape=()))

    def find_stops(self, batch: ReplayDraw, step: int) -> dict[int, Row]:
        """Make the stop columns of members with too many consecutive batches without a mixed group."""
        patience = self.config.fallback_patience
        stop = {"stop_rule": UNIFORM_GROUPS, "stop_value": 0.0, "stop_threshold": float(patience), "stop_step": step}
        counts = zip(self.seeds, self._count_uniform_batches(batch).tolist(), strict=True)
        return {seed: {**stop, "stop_value": float(count)} for seed, count in counts if count >= patience}

    def train(self, batch: ReplayDraw, step: int, is_row: bool) -> UpdateResult:
        """Screen the batch and take the optimizer steps of the rule."""
        self.buffer, self.consecutive_uniform_batches = batch.buffer, self._count_uniform_batches(batch)
        rollouts, config = batch.rollouts, self.config
        # Age-dependent weight of the batch in the loss. discounts_age is a bool: for rules that do not discount age,
        # the exponent is 0.
        freshness = torch.exp(-config.replay_age_decay * rollouts.age.double() * config.rule.discounts_age)
        self.age_statistics.add(rollouts.age, freshness)
        screen_metrics: dict[str, Tensor] = {}
        if config.rule.screens_batch:
            uniforms = self.rngs.uniform("sandbox_screen", step, shape=(rollouts.rewards.shape[1],))
            rollouts, screen_metrics = screen_rollouts(rollouts, uniforms, config)
        has_cosine = config.diagnostics and (step - config.delay) // config.trainer.test_freq % COSINE_EVERY == 0
        result = self._update(rollouts, is_row, is_row and has_cosine)
        if not is_row:
            return result
        columns = {**result.metrics, **screen_metrics, **self._make_sampler_columns(batch)}
        columns |= self.measure_open_interval()
        self.age_statistics.reset()
        return UpdateResult(columns, result.nonfinite_names)

    def measure_open_interval(self) -> dict[str, Tensor]:
        """Compute statistics of the batches' ages since the last row; empty if batches cannot have an age."""
        return self.age_statistics.compute() if self.config.delay or self.config.replay_capacity else {}

    def _count_uniform_batches(self, batch: ReplayDraw) -> Tensor:
        """Count consecutive batches without a mixed group [E], up to and including `batch`."""
        # Only grouped samplers report the flag; comparing rewards of different prompts would be meaningless.
        zeros = torch.zeros(len(batch.rollouts.rewards))
        is_uniform = batch.rollouts.scalars.get("used_group_fallback", zeros) > 0
        return torch.where(is_uniform, self.consecutive_uniform_batches + 1, 0)

    def _make_sampler_columns(self, replay_draw: ReplayDraw) -> dict[str, Tensor]:
        """Make the columns of the sampler and the replay buffer for the batch that was trained on."""
        columns = {_SAMPLER_COLUMNS.get(name, name): value for name, value in replay_draw.rollouts.scalars.items()}
        if self.config.replay_capacity:
            age, size = replay_draw.rollouts.age, len(self.buffer.batches)
            columns |= {"replay_age": age, "replay_size": torch.full_like(age, size)}
            columns["replay_priority"] = replay_draw.priority
        return columns

    def _update(self, rollouts: Rollouts, is_measured: bool, has_cosine: bool) -> UpdateResult:
        """Take one optimizer step per inner epoch. has_cosine: whether to measure the gradient's direction, too."""
        # Measuring costs forward passes, so only steps that write a row do it.
        collect_metrics = self._start_measuring(rollouts, has_cosine) if is_measured else None
        nonfinite_names: list[list[str]] = [[] for _ in rollouts.rewards]
        for _ in range(self.config.inner_epochs):
            log_probs, result = self._compute_loss(rollouts)
            nonfinite_names = merge_names(nonfinite_names, descend(self.optimizer, result.loss))
        return UpdateResult(collect_metrics(log_probs, result) if collect_metrics else {}, nonfinite_names)

    def _compute_loss(self, rollouts: Rollouts) -> tuple[Tensor, RuleLoss]:
        """Compute the log-probabilities [E, B, T, A] that the rule learns from, and its loss."""
        log_probs = (
            self.task.compute_oracle_log_probs(self.models, rollouts)
            if self.config.rule.is_teacher_forced
            else self.task.compute_logits(self.models, rollouts).log_softmax(-1)
        )
        return log_probs, self.objective(rollouts, log_probs, self.config)

    def _start_measuring(self, rollouts: Rollouts, has_cosine: bool) -> Callable[[Tensor, RuleLoss], dict[str, Tensor]]:
        """Measure the state before the updates; returns a function to call after them, which computes all columns."""
        logits_before = self._compute_logits(rollouts) if self.config.entropy_diagnostics else None
        fit_metrics: dict[str, Tensor] = {}
        if self.config.oracle_fit:
            directions = self.optimizer.split_by_parameter(self._compute_oracle_gradient(rollouts))
            fit_metrics = compute_fit_statistics(self.task, self.models, rollouts, directions, self.config)

        def collect_metrics(log_probs: Tensor, last_loss: RuleLoss) -> dict[str, Tensor]:
            metrics = {"loss": last_loss.loss.detach(), **last_loss.metrics, **fit_metrics}
            # Teacher-forced log-probabilities are conditioned on other prefixes, so ratios would be meaningless.
            if not self.config.rule.is_teacher_forced:
                # Distances below and above 1 at which a ratio counts as clipped, even for rules that do not clip.
                high = self.config.clip_high if self.config.rule.clip == "clip_high" else self.config.clip_low
                metrics |= compute_ratio_statistics(log_probs, rollouts, self.config.clip_low, high)
            if logits_before is not None:
                metrics |= compute_entropy_statistics(logits_before, self._compute_logits(rollouts), rollouts)
            if has_cosine:
                # Between the gradients of rule and oracle, after the step's updates.
                gradient = self.optimizer.compute_gradient(self._compute_loss(rollouts)[1].loss)
                oracle_gradient = self._compute_oracle_gradient(rollouts)
                metrics |= {"cos_method_ce": cosine(gradient, oracle_gradient), "grad_norm": gradient.norm(dim=1)}
            return metrics

        return collect_metrics

    @torch.no_grad()
    def _compute_logits(self, rollouts: Rollouts) -> Tensor:
        return self.task.compute_logits(self.models, rollouts)

    def _compute_oracle_gradient(self, rollouts: Rollouts) -> Tensor:
        """Compute the gradient [E, P] of the cross-entropy of correct actions after correct prefixes, on this batch."""
        oracle_log_probs = self.task.compute_oracle_log_probs(self.models, rollouts)
        return self.optimizer.compute_gradient(cross_entropy(rollouts, oracle_log_probs, self.config).loss)

    def get_tensors(self) -> dict[str, Tensor]:
        """Return weights and moments, the sums of ages, and the batches that may still be drawn."""
        tensors = super().get_tensors() | {"ages": self.age_statistics.sums}
        for index, stored_batch in enumerate(self.buffer.drawable_batches):
            tensors |= add_prefix(flatten_rollouts(stored_batch.rollouts), f"batches/{index}")
        return tensors

    def get_values(self, member: int) -> dict[str, Any]:
        """Return the count of the stop rule, and what is needed to unpack the batches."""
        batches = self.buffer.drawable_batches
        return {
            "uniform_batches": int(self.consecutive_uniform_batches[member]),
            "batches": len(batches),
            "group_size": batches[0].rollouts.group_size if batches else None,
        }

    def load(self, tensors: Mapping[str, Tensor], values: Sequence[Mapping[str, Any]]) -> None:
        """Continue from these tensors and values."""
        super().load(tensors, values)
        self.age_statistics.sums = tensors["ages"]
        for index in range(values[0]["batches"]):
            # `with_batch` recomputes the priority, which a state does not contain.
            self.buffer = self.buffer.with_batch(
                unflatten_rollouts(select_prefix(tensors, f"batches/{index}"), values[0]["group_size"])
            )
        self.consecutive_uniform_batches = torch.tensor([value["uniform_batches"] for value in values])
