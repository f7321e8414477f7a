"""The inner epochs of a step: losses, gradients, optimizer steps, and what is measured around them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from trainable.sandbox.batch.rollouts import Rollouts
from trainable.sandbox.config.settings import UpdateRuleConfig
from trainable.sandbox.measure.diagnostics import cosine, entropy_statistics, ratio_statistics
from trainable.sandbox.measure.oracle_fit import fit_statistics, sample_influence
from trainable.sandbox.rules.oracle_labels import cross_entropy
from trainable.sandbox.rules.rule import RuleLoss, UpdateRule
from trainable.sandbox.tasks.task import Models, Task
from trainable.sandbox.training.optimizer import MemberAdam, clipped

LARGEST_NORM = 1.0
"""A member's gradient is scaled down to this norm."""


class Updated(NamedTuple):
    """metrics: columns of a row, [E] each; none where none was asked for. is_finite: [E], losses and gradients were."""

    metrics: dict[str, Tensor]
    is_finite: Tensor


@dataclass(frozen=True)
class Learner:
    """The models of all members, and how they learn from a batch."""

    config: UpdateRuleConfig
    task: Task
    objective: UpdateRule
    models: Models
    optimizer: MemberAdam

    def train(self, rollouts: Rollouts, is_measured: bool, has_cosine: bool) -> Updated:
        """Take an optimizer step an inner epoch; a member's gradient is clipped by its own norm.

        is_measured: whether metrics are wanted. has_cosine: whether the gradient's direction is among them.
        """
        close = self._measuring(rollouts, has_cosine) if is_measured else None
        is_finite = torch.ones(len(rollouts.rewards), dtype=torch.bool)
        for _ in range(self.config.inner_epochs):
            log_probs, result = self._loss(rollouts)
            gradient = self.optimizer.gradient(result.loss)
            norm = gradient.norm(dim=1)
            is_finite = is_finite & result.loss.detach().isfinite() & norm.isfinite()
            self.optimizer.step(clipped(gradient, norm, LARGEST_NORM))
        return Updated(close(log_probs, result) if close else {}, is_finite)

    def _loss(self, rollouts: Rollouts) -> tuple[Tensor, RuleLoss]:
        """Log-probabilities [E, B, T, A] that the rule learns from, and its loss."""
        positions = self.task.oracle_log_probs if self.config.rule.follows_labels else self.task.log_probs
        log_probs = positions(self.models, rollouts)
        return log_probs, self.objective(rollouts, log_probs, self.config)

    def _measuring(self, rollouts: Rollouts, has_cosine: bool) -> Callable[[Tensor, RuleLoss], dict[str, Tensor]]:
        """Measure what has to be measured before the updates; the result, called after them, gives all columns."""
        before = self._raw_logits(rollouts) if self.config.entropy_diagnostics else None
        fit = self._oracle_fit(rollouts) if self.config.oracle_fit else {}

        def close(log_probs: Tensor, last: RuleLoss) -> dict[str, Tensor]:
            found = {"loss": last.loss.detach(), **last.metrics, **fit}
            if not self.config.rule.follows_labels:  # there, log-probabilities are of other positions than the actor's
                found |= ratio_statistics(log_probs, rollouts, *self._clip())
            if before is not None:
                found |= entropy_statistics(before, self._raw_logits(rollouts), rollouts)
            return found | (self._direction(rollouts) if has_cosine else {})

        return close

    def _clip(self) -> tuple[float, float]:
        """How far below and above 1 a ratio lies before it counts as outside, also where the rule clips none."""
        low, high = self.config.clip_low, self.config.clip_high
        return low, high if self.config.rule.clip == "clip_high" else low

    @torch.no_grad()
    def _raw_logits(self, rollouts: Rollouts) -> Tensor:
        return self.task.raw_logits(self.models, rollouts)

    def _oracle_gradient(self, rollouts: Rollouts) -> Tensor:
        """[E, P], gradient of the cross-entropy of the right actions after right ones, on the same batch."""
        oracle = self.task.oracle_log_probs(self.models, rollouts)
        return self.optimizer.gradient(cross_entropy(rollouts, oracle, self.config).loss)

    def _oracle_fit(self, rollouts: Rollouts) -> dict[str, Tensor]:
        directions = self.optimizer.by_parameter(self._oracle_gradient(rollouts))
        return fit_statistics(sample_influence(self.task, self.models, rollouts, directions, self.config))

    def _direction(self, rollouts: Rollouts) -> dict[str, Tensor]:
        """Cosine of the rule's gradient and the oracle's, and the rule's norm, with the weights as they are now."""
        gradient = self.optimizer.gradient(self._loss(rollouts)[1].loss)
        oracle = self._oracle_gradient(rollouts)
        return {"cos_method_ce": cosine(gradient, oracle), "grad_norm": gradient.norm(dim=1)}
