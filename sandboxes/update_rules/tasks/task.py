"""Protocols that a task and its models must follow. All tensors have a leading axis of E members."""

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from sandboxes.toys.rngs import MemberRngs
from sandboxes.update_rules.rollouts import Rollouts


class ModelEnsemble(Protocol):
    """E models of one shape, whose weights are stacked along the first axis."""

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """Trained tensors by name, [E, ...] each, which require gradients; slice e belongs to member e."""
        ...


class Task(Protocol):
    """One task. `models` is always the result of `make_models`.

    `sample` draws random numbers for the purposes sandbox_prompts, sandbox_samples and sandbox_noise at index `step`,
    so two update rules with the same seed see the same prompts. `evaluate` uses the purpose sandbox_evaluation.
    """

    def make_models(self, rngs: MemberRngs) -> ModelEnsemble:
        """Initialize the model of each member, with the separate random stream sandbox_weights."""
        ...

    def sample(self, models: Any, rngs: MemberRngs, step: int) -> Rollouts:
        """Sample a batch per member, without gradients; the method decides whether it has groups or candidates."""
        ...

    def compute_logits(self, models: Any, rollouts: Rollouts) -> Tensor:
        """Compute logits [E, B, T, A] at each position given the sampled tokens, with gradients."""
        ...

    def compute_oracle_log_probs(self, models: Any, rollouts: Rollouts) -> Tensor:
        """Compute log-probabilities [E, B, T, A] given the correct tokens; for a bandit, from the logits."""
        ...

    def evaluate(self, models: Any, rngs: MemberRngs, step: int) -> dict[str, Tensor]:
        """Compute columns of `sandboxes.update_rules.records.EVALUATION_COLUMNS`, [E] each: test_error, entropy, ..."""
        ...
