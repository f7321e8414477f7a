"""What the two bandits share: from the policy's probabilities at a batch of observations to rollouts of one action."""

import torch
from torch import Tensor

from trainable.sandbox.batch.members import Streams
from trainable.sandbox.batch.reward_noise import bandit_feature, corrupted
from trainable.sandbox.batch.rollouts import Rollouts
from trainable.sandbox.config.settings import UpdateRuleConfig
from trainable.sandbox.models.decoding import drawn, taken
from trainable.sandbox.tasks.groups import all_kept, kept_rollouts, split_groups


def prompts_a_step(config: UpdateRuleConfig) -> int:
    """Observations of a batch: batch_size, or batch_size / group_size for grouped rules."""
    return config.batch_size // (config.group_size if config.rule.has_groups else 1)


def bandit_rollouts(
    config: UpdateRuleConfig, streams: Streams, step: int, observations: Tensor, labels: Tensor, log_probs: Tensor,
    price: Tensor | None = None,
) -> Rollouts:  # fmt: skip
    """batch_size actions after observations [E, P, ...], by their log_probs [E, P, A]; labels [E, P] are worth 1.

    price: [E, P, A], what an action costs, noise or not; None: nothing. As published, a bandit with prices filters its
    groups by right actions without noise and knows its expected reward in groups too; one without filters by rewards
    and knows it in ungrouped batches only.
    """
    grouped = config.rule.has_groups
    each = config.group_size if grouped else 1
    known = config.reward_noise == 0 and (price is not None or not grouped)
    cost = torch.zeros_like(log_probs) if price is None else price
    expected = taken(log_probs, labels).exp() - (log_probs.exp() * cost).sum(-1)
    observations, labels, log_probs, cost, expected = (
        part.repeat_interleave(each, dim=1) for part in (observations, labels, log_probs, cost, expected)
    )
    actions = drawn(log_probs, streams.uniform("sandbox_samples", step, shape=(config.batch_size,)))
    solved = actions == labels
    rewards = _noisy(config, streams, step, actions, solved) - taken(cost, actions)
    counted = rewards if price is None else solved
    keep, scalars = kept_rollouts(split_groups(counted, each), each) if grouped else all_kept(rewards)
    return Rollouts(
        observations=observations, actions=actions[..., None], labels=labels[..., None], rewards=rewards,
        actor_log_probs=taken(log_probs, actions)[..., None],
        actor_baseline=log_probs.exp().square().sum(-1, keepdim=True), keep=keep,
        age=torch.zeros(len(rewards), dtype=torch.int64), group_size=each if grouped else None,
        expected_reward=expected if known else None, scalars=scalars,
    )  # fmt: skip


def _noisy(config: UpdateRuleConfig, streams: Streams, step: int, actions: Tensor, solved: Tensor) -> Tensor:
    mode = config.reward_noise_mode
    if mode == "none":
        return solved.float()
    uniforms = streams.uniform("sandbox_noise", step, shape=(config.batch_size, 2))
    return corrupted(solved.float(), uniforms, mode, config.reward_noise, solved, bandit_feature(mode, actions))
