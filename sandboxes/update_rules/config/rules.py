"""Records of the update rules: where each formula is, and the properties that the rest of the sandbox depends on.

Sampler, trainer, diagnostics and the checks of settings depend on properties, never on names. So a new rule needs only
a function in a module of `sandboxes.update_rules.rules` and a line in `RULES`.
"""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class Rule:
    """One update rule, described by properties that are True, or have a value, if they apply."""

    formula: str
    """`<module>.<function>` in `sandboxes.update_rules.rules`: a name, so that settings are checked without torch."""
    _: KW_ONLY

    # Sampling.
    has_groups: bool = False
    """Samples `group_size` rollouts per prompt and compares them."""
    has_candidates: bool = False
    """Draws `group_size` next tokens at every prefix, each with a separate reward."""

    # Training.
    is_teacher_forced: bool = False
    """Learns from log-probabilities after the correct tokens, not after the sampled ones."""
    screens_batch: bool = False
    """Each batch is screened by delight once, before its inner epochs."""
    needs_replay: bool = False
    """Differs from `on_policy_rule` only in the batches that the replay buffer draws."""
    discounts_age: bool = False
    """Weights a batch by exp(-`replay_age_decay` age)."""
    on_policy_rule: str | None = None
    """The rule that it is identical to on batches of age 0."""

    # Settings that it reads.
    temperature: Literal["gate", "target", "regression"] | None = None
    """gate: delight over `eta`. target: standardized rewards over `tpo_eta`. regression: log-ratios times `eta`."""
    clip: Literal["clip_low", "clip_high"] | None = None
    """Setting of the upper clip bound; the lower one is `clip_low`. None: ratios are not clipped on both sides."""
    settings: tuple[str, ...] = ()
    """Further settings, which not every rule reads."""

    # Requirements on the task and its rewards.
    needs_token_labels: bool = False
    """Needs the correct token of every position of a sequence."""
    needs_token_rewards: bool = False
    """Needs a reward for every token."""
    needs_one_action: bool = False
    """Needs the probability of a single action, so it cannot train on sequences."""
    needs_all_actions: bool = False
    """Needs all actions of one choice among few, and a batch from the current policy."""
    needs_success_rate: bool = False
    """Needs rewards of 0 and 1, whose mean is a rate."""
    needs_noise_free_rewards: bool = False
    """Needs rewards without noise."""
    needs_kl_free_rewards: bool = False
    """Needs rewards without a KL term."""


_DAPO = Rule(
    "grouped.dapo", has_groups=True, clip="clip_high", needs_kl_free_rewards=True, settings=("std_normalization",)
)
_DISTILLATION = Rule(
    "token_credit.self_distill_dg", temperature="gate", needs_token_labels=True, settings=("distill_alpha",)
)
RULES: Mapping[str, Rule] = {
    "CE": Rule("token_credit.cross_entropy", is_teacher_forced=True),
    "REINFORCE": Rule("policy_gradient.reinforce"),
    "PG": Rule("policy_gradient.pg", settings=("iw_cap",)),
    "TrajPG": Rule("policy_gradient.traj_pg", settings=("iw_cap",)),
    "ASPO": Rule("policy_gradient.aspo", clip="clip_high"),
    "R2VPO": Rule("policy_gradient.r2vpo", settings=("eta",)),
    "LogGrowth": Rule(
        "policy_gradient.log_growth", needs_one_action=True, needs_noise_free_rewards=True, needs_kl_free_rewards=True
    ),
    "PMDMean": Rule("policy_gradient.pmd_mean", temperature="regression"),
    "DG": Rule("delight.dg", temperature="gate"),
    "ReplayDG": Rule("delight.dg", temperature="gate", needs_replay=True, on_policy_rule="DG"),
    "FreshDG": Rule("delight.fresh_dg", temperature="gate", discounts_age=True, on_policy_rule="DG"),
    "DGEntropyGuard": Rule("delight.dg_entropy_guard", temperature="gate", settings=("guard_strength",)),
    "UncertaintyDG": Rule("delight.uncertainty_dg", temperature="gate", settings=("uncertainty_scale",)),
    "FilteredDG": Rule("delight.filtered_dg", temperature="gate", settings=("uncertainty_threshold",)),
    "RewardVarianceDG": Rule("delight.reward_variance_dg", temperature="gate", settings=("uncertainty_scale",)),
    "Kondo": Rule("delight.dg", temperature="gate", screens_batch=True, settings=("kondo_keep",)),
    "DGToken": Rule("token_credit.dg_token", temperature="gate", needs_token_labels=True, needs_token_rewards=True),
    "SelfDistillDG": _DISTILLATION,
    "SCOPELite": replace(_DISTILLATION, formula="token_credit.scope_lite"),
    "GRPO": Rule("grouped.grpo", has_groups=True, clip="clip_low", settings=("std_normalization", "grpo_beta")),
    "DrGRPO": Rule("grouped.dr_grpo", has_groups=True, clip="clip_low", settings=("grpo_beta",)),
    "DAPO": _DAPO,
    "DAPOLite": _DAPO,
    "TPO": Rule("target_policy.tpo", has_groups=True, temperature="target"),
    "TPONoAnchor": Rule("target_policy.tpo_no_anchor", has_groups=True, temperature="target"),
    "GroupPG": Rule("grouped.group_pg", has_groups=True, temperature="target"),
    "TEMPO": Rule("grouped.tempo", has_groups=True, settings=("iw_cap",)),
    "MaxRL": Rule(
        "grouped.max_rl", has_groups=True, needs_success_rate=True, needs_noise_free_rewards=True, settings=("iw_cap",)
    ),
    "TPOFullAction": Rule(
        "target_policy.tpo_full_action", temperature="target", needs_all_actions=True, needs_noise_free_rewards=True
    ),
    "TPOToken": Rule("target_policy.tpo_token", has_candidates=True, temperature="target", needs_token_rewards=True),
    "GRPOToken": Rule(
        "token_credit.grpo_token",
        has_candidates=True,
        clip="clip_low",
        needs_token_rewards=True,
        settings=("grpo_beta",),
    ),
}
"""Every update rule by name, in the order of lists."""

METHODS = tuple(RULES)
"""The allowed values of the setting `method`."""
DEFAULT_METHOD = "DG"


def get_rule(method: str, group_size: int) -> Rule:
    """Return the record of an update rule. A plug-in rule samples groups if the setting group_size is above 1."""
    return RULES[method] if method in RULES else Rule("", has_groups=group_size > 1)
