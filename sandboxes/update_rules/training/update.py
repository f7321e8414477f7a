"""The inner epochs of a step: losses, gradients, optimizer steps, and the diagnostics of the update."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sandboxes.toys.descent import descend
from sandboxes.toys.ensemble import UpdateResult
from sandboxes.toys.optimizer import MemberAdam
from sandboxes.update_rules.batch.rollouts import Rollouts
from sandboxes.update_rules.config.settings import UpdateRuleConfig
from sandboxes.update_rules.measure.diagnostics import compute_entropy_statistics, compute_ratio_statistics, cosine
from sandboxes.update_rules.measure.oracle_fit import compute_fit_statistics, compute_sample_influence
from sandboxes.update_rules.rules.oracle_labels import cross_entropy
from sandboxes.update_rules.rules.rule import RuleLoss, UpdateRule
from sandboxes.update_rules.tasks.task import ModelEnsemble, Task


@dataclass(frozen=True)
class Learner:
    """The models of all members, and their update on a batch."""

    config: UpdateRuleConfig
    task: Task
    objective: UpdateRule
    models: ModelEnsemble
    optimizer: MemberAdam

    def update(self, rollouts: Rollouts, is_measured: bool, has_cosine: bool) -> UpdateResult:
        """Take one optimizer step per inner epoch; each member's gradient is clipped by its own norm.

        is_measured: whether to measure metrics. has_cosine: whether to include the gradient's direction.
        """
        # Measuring costs passes over the batch, so only the steps that write a row do it.
        collect_metrics = self._start_measuring(rollouts, has_cosine) if is_measured else None
        nonfinite_names: list[list[str]] = [[] for _ in rollouts.rewards]
        for _ in range(self.config.inner_epochs):
            log_probs, result = self._compute_loss(rollouts)
            # The names are of a member's first epoch that is not finite, because everything after it is spoiled.
            epoch_names = descend(self.optimizer, result.loss)
            nonfinite_names = [
                names or new_names for names, new_names in zip(nonfinite_names, epoch_names, strict=True)
            ]
        return UpdateResult(collect_metrics(log_probs, result) if collect_metrics else {}, nonfinite_names)

    def _compute_loss(self, rollouts: Rollouts) -> tuple[Tensor, RuleLoss]:
        """The log-probabilities [E, B, T, A] that the rule learns from, and its loss."""
        compute_log_probs = (
            self.task.compute_oracle_log_probs if self.config.rule.is_teacher_forced else self.task.compute_log_probs
        )
        log_probs = compute_log_probs(self.models, rollouts)
        return log_probs, self.objective(rollouts, log_probs, self.config)

    def _start_measuring(self, rollouts: Rollouts, has_cosine: bool) -> Callable[[Tensor, RuleLoss], dict[str, Tensor]]:
        """Measure the state before the updates. Returns a function that, called after them, computes all columns."""
        logits_before = self._compute_logits(rollouts) if self.config.entropy_diagnostics else None
        fit_metrics = self._measure_oracle_fit(rollouts) if self.config.oracle_fit else {}

        def collect_metrics(log_probs: Tensor, last_loss: RuleLoss) -> dict[str, Tensor]:
            metrics = {"loss": last_loss.loss.detach(), **last_loss.metrics, **fit_metrics}
            # Teacher-forced log-probabilities follow other prefixes than the sampled ones: ratios would be meaningless.
            if not self.config.rule.is_teacher_forced:
                metrics |= compute_ratio_statistics(log_probs, rollouts, *self._get_clip_range())
            if logits_before is not None:
                metrics |= compute_entropy_statistics(logits_before, self._compute_logits(rollouts), rollouts)
            return metrics | (self._measure_direction(rollouts) if has_cosine else {})

        return collect_metrics

    def _get_clip_range(self) -> tuple[float, float]:
        """Distances below and above 1 from which a ratio counts as clipped, also for rules that do not clip."""
        low, high = self.config.clip_low, self.config.clip_high
        return low, high if self.config.rule.clip == "clip_high" else low

    @torch.no_grad()
    def _compute_logits(self, rollouts: Rollouts) -> Tensor:
        return self.task.compute_logits(self.models, rollouts)

    def _compute_oracle_gradient(self, rollouts: Rollouts) -> Tensor:
        """[E, P], gradient of the cross-entropy of the correct actions after correct prefixes, on the same batch."""
        oracle_log_probs = self.task.compute_oracle_log_probs(self.models, rollouts)
        return self.optimizer.compute_gradient(cross_entropy(rollouts, oracle_log_probs, self.config).loss)

    def _measure_oracle_fit(self, rollouts: Rollouts) -> dict[str, Tensor]:
        directions = self.optimizer.split_by_parameter(self._compute_oracle_gradient(rollouts))
        return compute_fit_statistics(
            compute_sample_influence(self.task, self.models, rollouts, directions, self.config)
        )

    def _measure_direction(self, rollouts: Rollouts) -> dict[str, Tensor]:
        """Cosine between the gradients of rule and oracle, and the norm of the former, after the step's updates."""
        gradient = self.optimizer.compute_gradient(self._compute_loss(rollouts)[1].loss)
        oracle_gradient = self._compute_oracle_gradient(rollouts)
        return {"cos_method_ce": cosine(gradient, oracle_gradient), "grad_norm": gradient.norm(dim=1)}
