"""What the trainer asks of a task and of the models that learn it. Everything has a leading axis of E members."""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from trainable.sandbox.batch.rngs import MemberRngs
from trainable.sandbox.batch.rollouts import Rollouts


class ModelEnsemble(Protocol):
    """E models of one shape, side by side: their weights are stacked along the first axis."""

    def get_parameters(self) -> Mapping[str, Tensor]:
        """Trained tensors, [E, ...] each, which require gradients; a member's gradient is its slice's."""
        ...


class Task(Protocol):
    """One task. `models` is what `make_models` gave.

    `sample` draws from the purposes sandbox_prompts, sandbox_samples and sandbox_noise at index `step`, so that two
    update rules with one seed see the same prompts; `evaluate` from sandbox_evaluation.
    """

    @property
    def num_actions(self) -> int:
        """A: how many actions there are at a position."""
        ...

    def make_models(self, rngs: MemberRngs) -> ModelEnsemble:
        """First weights of every member, from its own stream of purpose sandbox_weights."""
        ...

    def sample(self, models: ModelEnsemble, rngs: MemberRngs, step: int) -> Rollouts:
        """Roll out a batch of each member without gradients: grouped, with candidates, or neither, by the method."""
        ...

    def compute_log_probs(self, models: ModelEnsemble, rollouts: Rollouts) -> Tensor:
        """[E, B, T, A] log-probabilities at each position after the actor's own tokens; with gradients."""
        ...

    def compute_logits(self, models: ModelEnsemble, rollouts: Rollouts) -> Tensor:
        """[E, B, T, A] logits of the same positions, before they are normalised."""
        ...

    def compute_oracle_log_probs(self, models: ModelEnsemble, rollouts: Rollouts) -> Tensor:
        """[E, B, T, A] log-probabilities after the right tokens; with gradients. A bandit has no others."""
        ...

    def evaluate(self, models: ModelEnsemble, rngs: MemberRngs, step: int) -> dict[str, Tensor]:
        """Columns of `trainable.sandbox.measure.records.EVALUATION_COLUMNS`, [E] each: test_error, entropy, ..."""
        ...
