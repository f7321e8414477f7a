"""The batch of rollouts that tasks sample, the replay buffer stores, and rules train on; and the protocol of a task."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from sandboxes.toys.rngs import MemberRngs


@dataclass(frozen=True)
class Candidates:
    """Next-token candidates at every prefix of the sampled sequences: E members, B prompts, T positions, K candidates.

    actions, log_probs (under the sampling policy), rewards: [E, B, T, K]. Candidate 0 is the next token of the sampled
    sequence. A token that was drawn twice is two candidates.
    """

    actions: Tensor
    log_probs: Tensor
    rewards: Tensor


@dataclass(frozen=True)
class Rollouts:
    """One batch for each of E members (seeds of one condition): B rollouts of T positions; T is 1 for a bandit."""

    observations: Tensor
    """[E, B, L] tokens (prompt, separator, sampled tokens). Bandits: pixels [E, B, 784] as floats, or contexts [E, B,
    context_len]."""
    actions: Tensor
    """[E, B, T] integers."""
    labels: Tensor
    """[E, B, T] integers, the correct actions."""
    rewards: Tensor
    """[E, B]."""
    behavior_log_probs: Tensor
    """[E, B, T] log-probabilities of the taken actions under the sampling policy."""
    behavior_baseline: Tensor
    """[E, B, T] the sampling policy's sum of squared probabilities."""
    keep_mask: Tensor
    """[E, B] False for rollouts that are not trained on: groups whose rewards do not differ, and rollouts that Kondo
    drops. At least one is True per member."""
    age: Tensor
    """[E] updates since the batch was sampled."""
    group_size: int | None = None
    """K; rollouts i K to (i + 1) K - 1 share a prompt. None: ungrouped."""
    score_mask: Tensor | None = None
    """[E, B, T] True where a position counts for the reward. None: all positions do."""
    expected_reward: Tensor | None = None
    """[E, B] exact mean reward of the sampling policy; None where unknown."""
    candidates: Candidates | None = None
    """For rules that compare tokens."""
    scalars: dict[str, Tensor] = field(default_factory=dict)
    """Statistics of the sampler, [E] each: informative_group_rate, retained_group_rate and used_group_fallback of
    grouped batches."""


def flatten_rollouts(rollouts: Rollouts) -> dict[str, Tensor]:
    """Flatten `rollouts` to named tensors, such as `actions` or `candidates/actions`; [E, ...] each."""
    tensors = {name: value for name, value in vars(rollouts).items() if isinstance(value, Tensor)}
    if rollouts.candidates is not None:
        tensors |= {f"candidates/{name}": value for name, value in vars(rollouts.candidates).items()}
    return tensors | {f"scalars/{name}": value for name, value in rollouts.scalars.items()}


def unflatten_rollouts(tensors: Mapping[str, Tensor], group_size: int | None) -> Rollouts:
    """Rebuild rollouts from tensors: the inverse of `flatten_rollouts`."""
    values: dict[str, dict[str, Tensor]] = {"": {}, "candidates": {}, "scalars": {}}
    for name, tensor in tensors.items():
        prefix, _, key = name.rpartition("/")
        values[prefix][key] = tensor
    candidates = Candidates(**values["candidates"]) if values["candidates"] else None
    return Rollouts(**values[""], group_size=group_size, candidates=candidates, scalars=values["scalars"])


class ModelEnsemble(Protocol):
    """E models of one shape, whose weights are stacked along the first axis."""

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """Trained tensors by name, [E, ...] each, which require gradients; slice e belongs to member e."""
        ...


class Task(Protocol):
    """One task. `models` is always the result of `make_models`. All tensors have a leading axis of E members.

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
        """Compute the columns of an evaluation, [E] each: test_error, entropy, ..."""
        ...
