"""A registry of the named choices (estimators, losses, filters) and what each needs; `trainable.algo` has the formulas.

Code that asks what a choice needs reads a field of its record and never compares its name. Free of torch, since plans
and memory estimates read it too.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class AdvantageEstimator:
    """What an advantage estimator needs and is.

    needs_critic: whether it reads values. has_turn_level: whether it has a form over turns (bi_level_gae). is_skill:
    whether it gives skills, which a target policy fits.
    """

    needs_critic: bool = False
    has_turn_level: bool = False
    is_skill: bool = False


ADVANTAGE_ESTIMATORS: Mapping[str, AdvantageEstimator] = MappingProxyType(
    {
        "gae": AdvantageEstimator(needs_critic=True, has_turn_level=True),
        "grpo": AdvantageEstimator(),
        "rloo": AdvantageEstimator(),
        "reinforce_plus_plus": AdvantageEstimator(),
        "reinforce_plus_plus_baseline": AdvantageEstimator(),
        "group_skill": AdvantageEstimator(is_skill=True),
    }
)
"""algorithm.adv_estimator -> its record; `trainable.ppo.targets` calls the formula in `trainable.algo.advantages`."""


@dataclass(frozen=True)
class PolicyLossKind:
    """What a policy loss needs.

    needs_whole_groups: whether it is a loss of whole groups, which mini-batches then must not split and whose rollouts
    must not be copied. needs_pass_before_step: whether a forward pass without gradients precedes each optimizer step.
    settings: settings of `actor` that only this loss reads.
    """

    needs_whole_groups: bool = False
    needs_pass_before_step: bool = False
    settings: tuple[str, ...] = ()


POLICY_LOSSES: Mapping[str, PolicyLossKind] = MappingProxyType(
    {
        "ppo_clip": PolicyLossKind(settings=("clip_ratio_low", "clip_ratio_high", "clip_ratio_c")),
        "tpo": PolicyLossKind(needs_whole_groups=True, needs_pass_before_step=True, settings=("tpo_eta",)),
    }
)
"""actor.policy_loss -> its record."""


@dataclass(frozen=True)
class FilterStrategy:
    """What a filter strategy reads.

    counts_groups: whether rollout_filter_value is a whole number of groups instead of a number in (0, 1]. settings:
    settings of `filter` that only this strategy reads.
    """

    counts_groups: bool = False
    settings: tuple[str, ...] = ()


FILTER_STRATEGIES: Mapping[str, FilterStrategy] = MappingProxyType(
    {
        "top_p": FilterStrategy(settings=("rollout_filter_top_p_prob_mode", "rollout_filter_selection_eps")),
        "top_k": FilterStrategy(),
        "top_k_abs": FilterStrategy(counts_groups=True),
        "top_f": FilterStrategy(),
        "min_p": FilterStrategy(),
    }
)
"""filter.rollout_filter_strategy -> its record; `trainable.algo.filters.parse_rule` makes its rule."""


KL_KINDS = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
"""Estimators of a KL from sampled tokens: the keys of `trainable.algo.losses.KL_ESTIMATORS`."""

EXACT_KL = "full"
"""The exact KL, over the whole vocabulary."""


def find_unused_settings(
    choices: Mapping[str, PolicyLossKind] | Mapping[str, FilterStrategy], choice_name: str
) -> frozenset[str]:
    """The settings that nothing reads when `choice_name` is chosen: those that only other `choices` read."""
    all_settings = frozenset(setting for choice in choices.values() for setting in choice.settings)
    return all_settings - {*choices[choice_name].settings}
