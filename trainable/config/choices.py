"""The named choices of a run (estimators, losses, filters) and their requirements; `trainable.algo` has the formulas.

Code that depends on a choice reads a field of its record and never compares its name, so a new choice needs no new
branch. This module does not import torch, because plans and memory estimates read it too.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class AdvantageEstimator:
    """Properties of an advantage estimator.

    needs_critic: whether the estimator reads values. has_turn_level: whether it has a form over turns (bi_level_gae).
    is_skill: whether it computes skills, which the loss of target policy optimization fits. compares_group: whether a
    rollout's advantage is relative to the rest of its group, so that a group of one has advantage 0.
    credits_trees: whether it assigns credit in trees of rollouts (`trainable.ppo.targets.compute_tree_advantages`).
    compares_prefix_trees: whether it compares the episodes of a prefix tree, which rollout.ts_n makes.
    settings: settings of `algorithm` that this estimator reads and some others do not.
    """

    needs_critic: bool = False
    has_turn_level: bool = False
    is_skill: bool = False
    compares_group: bool = False
    credits_trees: bool = False
    compares_prefix_trees: bool = False
    settings: tuple[str, ...] = ()


ADVANTAGE_ESTIMATORS: Mapping[str, AdvantageEstimator] = MappingProxyType(
    {
        "gae": AdvantageEstimator(
            needs_critic=True, has_turn_level=True, settings=("gamma", "lam", "critic_lam", "bi_level_gae")
        ),
        "grpo": AdvantageEstimator(
            compares_group=True, credits_trees=True, settings=("norm_adv_by_std_in_grpo", "scale_rewards")
        ),
        "tree": AdvantageEstimator(
            compares_group=True, compares_prefix_trees=True, settings=("norm_adv_by_std_in_grpo", "scale_rewards")
        ),
        "rloo": AdvantageEstimator(compares_group=True),
        "reinforce_plus_plus": AdvantageEstimator(settings=("gamma",)),
        "reinforce_plus_plus_baseline": AdvantageEstimator(compares_group=True),
        "group_skill": AdvantageEstimator(is_skill=True, compares_group=True),
    }
)
"""The available advantage estimators, by their name in the setting algorithm.adv_estimator.

Their formulas are in `trainable.algo.advantages`, which `trainable.ppo.targets` calls.
"""

OWN_ESTIMATOR = AdvantageEstimator()
"""The assumed properties of a plug-in estimator."""


@dataclass(frozen=True)
class PolicyLossKind:
    """Requirements of a policy loss.

    needs_whole_groups: whether the loss is computed over whole groups. If so, mini-batches must not split a group, and
    rollouts must not be copied to fill mini-batches. needs_pass_before_step: whether a forward pass without gradients
    precedes each optimizer step. settings: settings of `actor` that this loss reads and some others do not.
    """

    needs_whole_groups: bool = False
    needs_pass_before_step: bool = False
    settings: tuple[str, ...] = ()


POLICY_LOSSES: Mapping[str, PolicyLossKind] = MappingProxyType(
    {
        "ppo_clip": PolicyLossKind(settings=("clip_ratio_low", "clip_ratio_high", "clip_ratio_c")),
        "gspo": PolicyLossKind(settings=("clip_ratio_low", "clip_ratio_high")),
        "cispo": PolicyLossKind(settings=("clip_ratio_low", "clip_ratio_high")),
        "cppo": PolicyLossKind(settings=("cppo_delta", "cppo_delta_b", "cppo_w_min")),
        "tpo": PolicyLossKind(needs_whole_groups=True, needs_pass_before_step=True, settings=("tpo_eta",)),
    }
)
"""The available policy losses, by their name in the setting actor.policy_loss.

`trainable.ppo.update` calls their formulas, which are in `trainable.algo.losses` and `trainable.algo.target_policy`.
"""

OWN_LOSS = PolicyLossKind()
"""The assumed requirements of a plug-in loss, which is computed per token or per episode."""


@dataclass(frozen=True)
class FilterStrategy:
    """The settings that a filter strategy reads.

    counts_groups: whether rollout_filter_value is a whole number of groups instead of a number in (0, 1].
    takes_any_value: whether it may be any positive number. can_keep_all: whether the largest value (1, or the number of
    groups) keeps every group. settings: settings of `filter` that only this strategy reads.
    """

    counts_groups: bool = False
    takes_any_value: bool = False
    can_keep_all: bool = True
    settings: tuple[str, ...] = ()


FILTER_STRATEGIES: Mapping[str, FilterStrategy] = MappingProxyType(
    {
        "top_p": FilterStrategy(settings=("rollout_filter_top_p_prob_mode", "rollout_filter_selection_eps")),
        "top_k": FilterStrategy(),
        "top_k_abs": FilterStrategy(counts_groups=True),
        "top_f": FilterStrategy(),
        "min_p": FilterStrategy(can_keep_all=False),
    }
)
"""The available filter strategies, by their name in the setting filter.rollout_filter_strategy.

`trainable.algo.filters.parse_rule` makes the rule of a strategy.
"""

OWN_FILTER = FilterStrategy(takes_any_value=True, can_keep_all=False)
"""The assumed properties of a plug-in filter."""


@dataclass(frozen=True)
class FilterMetric:
    """Properties of a score of groups.

    is_spread: whether it is a standard deviation, 0 in a group of one. reads_entropies: whether it is computed from the
    entropies at the sampled tokens.
    """

    is_spread: bool = False
    reads_entropies: bool = False


FILTER_METRICS: Mapping[str, FilterMetric] = MappingProxyType(
    {
        "reward_variance": FilterMetric(is_spread=True),
        "reward_std": FilterMetric(is_spread=True),
        "reward": FilterMetric(),
        "reward_sum": FilterMetric(),
        "entropy": FilterMetric(reads_entropies=True),
        "entropy_variance": FilterMetric(is_spread=True, reads_entropies=True),
        "entropy_std": FilterMetric(is_spread=True, reads_entropies=True),
        "length": FilterMetric(),
    }
)
"""The available scores of groups, by their name in the setting filter.rollout_filter_metric.

`trainable.algo.filters.compute_group_scores` computes them.
"""


EXACT_KL = "full"
"""Selects the exact KL over the whole vocabulary."""
