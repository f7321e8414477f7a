"""Select the groups of episodes that a step trains on, and compute the targets of their losses."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trainable.algo.advantages import (
    AdvantagesReturns,
    bi_level_gae,
    gae,
    group_skill,
    grpo,
    prefix_tree_grpo,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    rloo,
)
from trainable.algo.filters import ZERO_SCORE, Rule, compute_group_scores, parse_rule, select_groups
from trainable.algo.losses import apply_kl_penalty
from trainable.algo.reductions import compute_tree_weights, masked_whiten
from trainable.config.choices import FILTER_STRATEGIES
from trainable.config.own_parts import get_part, has_parameter
from trainable.config.sections import AlgorithmConfig, FilterConfig
from trainable.ppo.update import Targets
from trainable.rollout.episode import Batch, Episode, place_episode_scores, reshape_by_group
from trainable.runs.failures import NonFiniteError


class Selection(NamedTuple):
    """The result of the filter.

    episodes: of the selected groups, in order. stds: (P,) reward std of each group before the filter. is_kept: (P,)
    bool, whether the filter kept the group.
    """

    episodes: list[Episode]
    stds: Tensor
    is_kept: Tensor

    @property
    def is_empty(self) -> bool:
        """Whether no episode is left to train on, because the filter kept no group or the losses leave out all."""
        return all(episode.is_masked for episode in self.episodes)

    @property
    def groups_kept(self) -> int:
        """Number of groups that the filter kept."""
        return int(self.is_kept.sum())

    @property
    def columns(self) -> dict[str, float]:
        """The columns of the row, about the spread of rewards before the filter, and what it kept."""
        return {
            "reward_std": float(self.stds.mean()),
            "reward_std_max": float(self.stds.max()),
            "zero_std_groups": int((self.stds <= ZERO_SCORE).sum()),
            "groups": len(self.is_kept),
            "groups_kept": self.groups_kept,
            "kept_ratio": self.groups_kept / len(self.is_kept),
            # The mean over no groups would be NaN. The column is documented as 0 in this case, which `groups_kept`
            # distinguishes from a measured 0. Stop rules and comparisons of arms do not read it.
            "reward_std_kept": float(self.stds[self.is_kept].mean()) if self.groups_kept else 0.0,
        }

    def extend(self, other: "Selection", max_groups: int) -> "Selection":
        """Append the result for another batch of groups, and drop the last ones of more than `max_groups` kept groups.

        Groups of `other` are numbered from 0, and here after the groups of `self`.
        """
        first = len(self.is_kept)
        is_kept = torch.cat([self.is_kept, other.is_kept])
        is_kept &= is_kept.cumsum(0) <= max_groups
        episodes = [*self.episodes, *(e._replace(group=e.group + first) for e in other.episodes)]
        return Selection(
            [episode for episode in episodes if is_kept[episode.group]], torch.cat([self.stds, other.stds]), is_kept
        )


def filter_episodes(episodes: Sequence[Episode], settings: FilterConfig, group_size: int) -> Selection:
    """Select the groups to train on by their scores (see `FilterConfig`). The selection may be empty.

    Raises NonFiniteError if scores or reward stds are not finite in float32, which huge penalties can cause.

    episodes: complete groups of `group_size` consecutive episodes; `Episode.group` numbers the groups from 0.
    """
    rewards = reshape_by_group([episode.score for episode in episodes], group_size)
    entropies = reshape_by_group([float(episode.entropies[episode.mask].mean()) for episode in episodes], group_size)
    lengths = reshape_by_group([float(episode.response_tokens) for episode in episodes], group_size)
    scores = compute_group_scores(settings.rollout_filter_metric, rewards, entropies, lengths)
    # The std columns always describe the rewards, whatever the filter's metric, so that runs with different filters can
    # be compared.
    stds = compute_group_scores("reward_std", rewards)
    for name, values in (("rewards", rewards), ("filter scores", scores), ("reward stds", stds)):
        if not bool(torch.isfinite(values).all()):
            raise NonFiniteError(f"{name} of groups were not finite")
    is_largest, has_zero = settings.rollout_filter_type == "largest", settings.rollout_filter_include_zero
    is_candidate = select_groups(scores, lambda scores, *_: torch.ones_like(scores, dtype=torch.bool), True, has_zero)
    groups = [episodes[number * group_size :][:group_size] for number in is_candidate.nonzero().flatten().tolist()]
    is_kept = select_groups(scores, _make_rule(settings, groups), is_largest, has_zero)
    kept_episodes = [_mask_episode(episode, settings) for episode in episodes if is_kept[episode.group]]
    return Selection(kept_episodes, stds, is_kept)


def _mask_episode(episode: Episode, settings: FilterConfig) -> Episode:
    """Mark the turns that the losses leave out according to `settings`. The group's advantages still count them."""
    turns = range(len(episode.turn_validity))
    void_turns = [turn for turn in turns if settings.mask_void_turns and not episode.turn_validity[turn]]
    is_cut = settings.mask_truncated_completions and episode.is_truncated
    masks_all = is_cut or (void_turns and not settings.mask_only_void_turns)
    return episode._replace(masked_turns=tuple(turns if masks_all else void_turns))


def _make_rule(settings: FilterConfig, groups: Sequence[Sequence[Episode]]) -> Rule:
    """Make the rule of the strategy that `settings` selects. groups: the candidates, for a plug-in with `groups`."""
    if settings.rollout_filter_strategy not in FILTER_STRATEGIES:
        own_rule = get_part(settings.rollout_filter_strategy)
        arguments = {"groups": groups} if has_parameter(own_rule, "groups") else {}
        return lambda scores, largest, num_groups: own_rule(scores, settings.rollout_filter_value, largest, **arguments)
    return parse_rule(
        settings.rollout_filter_strategy,
        settings.rollout_filter_value,
        settings.rollout_filter_top_p_prob_mode,
        settings.rollout_filter_selection_eps,
    )


class PreparedBatch(NamedTuple):
    """A batch with its targets, and the order (B,) in which it is split into mini-batches."""

    batch: Batch
    targets: Targets
    order: Tensor


def make_targets(
    batch: Batch,
    values: Tensor | None,
    ref_logprobs: Tensor | None,
    settings: AlgorithmConfig,
    kl_coef: float,
    filter_scale: float,
    has_trees: bool = False,
) -> Targets:
    """Compute advantages and returns of a batch: KL penalty, estimator, whitening, then scaling (published order).

    values: (B, T) of the critic, which gae needs; None without a critic. ref_logprobs: (B, T) of the reference; None
    without one. settings: zero_task_advantage sets the advantages to 0, but not the returns. kl_coef: coefficient of
    the KL penalty in the reward, read only with use_kl_in_reward. filter_scale: factor of actor.filter_loss_scaling,
    applied after whitening, which would cancel it. has_trees: whether the episodes are trees, in which every rollout
    gets the advantage of its root, and weights by settings.tree_weighting.
    """
    # As published: GAE over turns needs the reward of each turn, all others the score at the last sampled token.
    rewards = batch.rewards if settings.bi_level_gae else place_episode_scores(batch)
    if settings.use_kl_in_reward:
        assert ref_logprobs is not None  # a run with a KL in the reward has a reference
        rewards = apply_kl_penalty(rewards, batch.logprobs, ref_logprobs, batch.mask, settings.kl_penalty, kl_coef)
    loss_weights = None
    if not has_trees:
        advantages, returns = _compute_advantages(batch, rewards, values, settings)
    else:
        scores = _compute_scores(batch, rewards)
        advantages = compute_tree_advantages(
            batch, scores, settings.norm_adv_by_std_in_grpo, settings.scale_rewards == "batch"
        )
        returns = torch.zeros_like(rewards)
        loss_weights = compute_tree_weights(
            batch.mask, batch.turns, batch.tree_ids, batch.is_root, settings.tree_weighting, settings.train_children
        ).to(advantages.dtype)
    # Only the advantages become 0: just KL and entropy move the policy, and the critic still learns from the returns.
    advantages = torch.zeros_like(advantages) if settings.zero_task_advantage else advantages * filter_scale
    values = torch.zeros_like(returns) if values is None else values
    return Targets(advantages, returns, values, ref_logprobs, loss_weights=loss_weights)


def _compute_advantages(
    batch: Batch, rewards: Tensor, values: Tensor | None, settings: AlgorithmConfig
) -> tuple[Tensor, Tensor]:
    """Compute advantages and returns (B, T) with the estimator. Without a critic, returns are 0 and unused."""
    if settings.estimator.needs_critic:
        assert values is not None
        trajectories = (rewards, values, batch.mask)

        def estimate(lam: float) -> AdvantagesReturns:
            if settings.bi_level_gae:
                return bi_level_gae(*trajectories, batch.turns, settings.gamma, lam, settings.high_level_gamma)
            return gae(*trajectories, settings.gamma, lam)

        advantages, returns = estimate(settings.lam)
        if settings.critic_lam is not None:
            returns = estimate(settings.critic_lam).returns
        # As published. Critic-free estimators center or whiten themselves.
        return masked_whiten(advantages, batch.mask), returns
    scores, group_ids, mask = groups = (_compute_scores(batch, rewards), batch.group_ids, batch.mask)
    norm_by_std, has_batch_std = settings.norm_adv_by_std_in_grpo, settings.scale_rewards == "batch"
    estimators: dict[str, Callable[[], Tensor]] = {
        "grpo": lambda: grpo(*groups, norm_by_std, has_batch_std=has_batch_std),
        "tree": lambda: prefix_tree_grpo(
            scores, group_ids, batch.prefix_trees, mask, norm_by_std, has_batch_std=has_batch_std
        ),
        "rloo": lambda: rloo(*groups),
        "reinforce_plus_plus": lambda: reinforce_plus_plus(rewards, batch.mask, settings.gamma),
        "reinforce_plus_plus_baseline": lambda: reinforce_plus_plus_baseline(*groups),
        "group_skill": lambda: group_skill(*groups),
    }
    if settings.adv_estimator in estimators:
        advantages = estimators[settings.adv_estimator]()
    else:
        # A plug-in must not train tokens that were not sampled.
        advantages = torch.where(batch.mask, get_part(settings.adv_estimator)(*groups).to(rewards.dtype), 0).detach()
    return advantages, torch.zeros_like(rewards)


def _compute_scores(batch: Batch, rewards: Tensor) -> Tensor:
    """Compute the score (B,) of each episode: the sum of its rewards, including any KL penalty."""
    return (rewards * batch.mask).sum(1)


def compute_tree_advantages(batch: Batch, scores: Tensor, norm_by_std: bool, has_batch_std: bool = False) -> Tensor:
    """Compute the advantage of each root among the roots of its group, and give it to all tokens of its tree, (B, T).

    scores: (B,) of each rollout, not read for children. norm_by_std, has_batch_std: see `grpo`. The constants are from
    rlm_grpo: the variance divides by G, and a std up to 1e-8 gives advantage 0.
    """
    roots = batch.is_root
    one_token = torch.ones(int(roots.sum()), 1, dtype=torch.bool, device=scores.device)
    root_advantages = grpo(
        scores[roots],
        batch.group_ids[roots],
        one_token,
        norm_by_std,
        has_batch_std=has_batch_std,
        correction=0,
        std_floor=1e-8,
        min_std=1e-8,
    )
    of_tree = torch.zeros(int(batch.tree_ids.max()) + 1, dtype=scores.dtype, device=scores.device)
    of_tree = of_tree.index_put((batch.tree_ids[roots],), root_advantages[:, 0])
    return torch.where(batch.mask, of_tree[batch.tree_ids][:, None], 0)
