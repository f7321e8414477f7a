"""What a configuration, a plan and a trainer have to know of each named choice; the formulas are in `trainable.algo`.

Whoever asks what a choice needs reads a field of its record and never compares its name. Free of torch, since plans and
memory estimates read it too.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class AdvantageEstimator:
    """needs_critic: whether it reads values. has_turn_level: whether it has a form that goes over turns first
    (bi_level_gae). is_skill: whether its numbers are skills, which a target policy aims at."""

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
"""algorithm.adv_estimator -> what it needs; its formula, of `trainable.algo.advantages`, is called in
`trainable.ppo.targets`."""


@dataclass(frozen=True)
class PolicyLossKind:
    """keeps_groups: whether it is a loss of whole groups, which mini-batches then must not split and whose rollouts
    must not be copied. reads_before_each_step: whether a pass without gradients precedes each optimizer step. knobs:
    settings of `actor` that it alone reads."""

    needs_whole_groups: bool = False
    needs_pass_before_step: bool = False
    settings: tuple[str, ...] = ()


POLICY_LOSSES: Mapping[str, PolicyLossKind] = MappingProxyType(
    {
        "ppo_clip": PolicyLossKind(settings=("clip_ratio_low", "clip_ratio_high", "clip_ratio_c")),
        "tpo": PolicyLossKind(needs_whole_groups=True, needs_pass_before_step=True, settings=("tpo_eta",)),
    }
)
"""actor.policy_loss -> what it needs."""


@dataclass(frozen=True)
class FilterStrategy:
    """counts_groups: whether rollout_filter_value is a whole number of groups instead of a share in (0, 1]. knobs:
    settings of `filter` that it alone reads."""

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
"""filter.rollout_filter_strategy -> what its number is; its rule is the one of `trainable.algo.filters.parse_rule`."""


KL_KINDS = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
"""Estimators of a KL from sampled tokens, those of `trainable.algo.losses.KL_ESTIMATORS`."""

EXACT_KL = "full"
"""The exact KL, over the whole vocabulary."""


def find_unused_settings(
    choices: Mapping[str, PolicyLossKind] | Mapping[str, FilterStrategy], choice_name: str
) -> frozenset[str]:
    """The settings that no one reads where `chosen` of `choices` is: those of the others."""
    return frozenset(knob for choice in choices.values() for knob in choice.settings) - {*choices[choice_name].settings}
