"""The update rules, each a record: where its formula is, and what the rest of the sandbox asks about it.

Sampler, trainer, diagnostics and the checks of settings ask for a property, never for a name. So a new rule is a
function in a module of `trainable.sandbox.rules` and a line of `RULES`.
"""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Literal


@dataclass(frozen=True)
class Rule:
    """One update rule. A property is True, or a value, where the rule has it."""

    formula: str
    """`<module>.<function>` in `trainable.sandbox.rules`: by name, since settings are checked without torch."""
    _: KW_ONLY

    # What it samples.
    has_groups: bool = False
    """Samples `group_size` rollouts per prompt and compares them."""
    has_candidates: bool = False
    """Draws `group_size` next tokens at every prefix, each with a reward of its own."""

    # How it is trained.
    is_teacher_forced: bool = False
    """Learns from log-probabilities after the right tokens, not after those that were sampled."""
    screens_batch: bool = False
    """Has each batch screened by delight once, before its inner epochs."""
    needs_replay: bool = False
    """Differs from `on_policy_rule` only by what the replay buffer draws."""
    discounts_age: bool = False
    """Weights a batch by exp(-`replay_age_decay` age)."""
    on_policy_rule: str | None = None
    """The rule that it is on batches of age 0."""

    # The numbers that it reads.
    temperature: Literal["gate", "target", "regression"] | None = None
    """gate: delight over `eta`. target: standardised rewards over `tpo_eta`. regression: log-ratios times `eta`."""
    clip: Literal["clip_low", "clip_high"] | None = None
    """The setting that bounds ratios above 1; below 1 it is `clip_low`. None: ratios are not clipped on both sides."""

    # What it needs of task and rewards.
    needs_token_labels: bool = False
    """The right token of every position of a sequence."""
    needs_token_rewards: bool = False
    """A reward for every token."""
    needs_one_action: bool = False
    """The probability of one action, so no sequences."""
    needs_all_actions: bool = False
    """All actions of one choice among few, and a batch of the policy that learns."""
    needs_success_rate: bool = False
    """Rewards of 0 and 1, whose mean is a rate."""
    needs_noise_free_rewards: bool = False
    """Rewards without noise."""
    needs_kl_free_rewards: bool = False
    """Rewards without a KL in them."""


RULES: Mapping[str, Rule] = {
    "CE": Rule("oracle_labels.cross_entropy", is_teacher_forced=True),
    "REINFORCE": Rule("policy_gradient.reinforce"),
    "PG": Rule("policy_gradient.pg"),
    "TrajPG": Rule("policy_gradient.traj_pg"),
    "ASPO": Rule("policy_gradient.aspo", clip="clip_high"),
    "R2VPO": Rule("policy_gradient.r2vpo"),
    "LogGrowth": Rule(
        "policy_gradient.log_growth", needs_one_action=True, needs_noise_free_rewards=True, needs_kl_free_rewards=True
    ),
    "PMDMean": Rule("policy_gradient.pmd_mean", temperature="regression"),
    "DG": Rule("delight.dg", temperature="gate"),
    "ReplayDG": Rule("delight.replay_dg", temperature="gate", needs_replay=True, on_policy_rule="DG"),
    "FreshDG": Rule("delight.fresh_dg", temperature="gate", discounts_age=True, on_policy_rule="DG"),
    "DGEntropyGuard": Rule("delight.dg_entropy_guard", temperature="gate"),
    "UncertaintyDG": Rule("delight.uncertainty_dg", temperature="gate"),
    "FilteredDG": Rule("delight.filtered_dg", temperature="gate"),
    "RewardVarianceDG": Rule("delight.reward_variance_dg", temperature="gate"),
    "Kondo": Rule("kondo.kondo", temperature="gate", screens_batch=True),
    "DGToken": Rule("token_credit.dg_token", temperature="gate", needs_token_labels=True, needs_token_rewards=True),
    "SelfDistillDG": Rule("oracle_labels.self_distill_dg", temperature="gate", needs_token_labels=True),
    "SCOPELite": Rule("oracle_labels.scope_lite", temperature="gate", needs_token_labels=True),
    "GRPO": Rule("grouped.grpo", has_groups=True, clip="clip_low"),
    "DrGRPO": Rule("grouped.dr_grpo", has_groups=True, clip="clip_low"),
    "DAPO": Rule("grouped.dapo", has_groups=True, clip="clip_high", needs_kl_free_rewards=True),
    "DAPOLite": Rule("grouped.dapo", has_groups=True, clip="clip_high", needs_kl_free_rewards=True),
    "TPO": Rule("target_policy.tpo", has_groups=True, temperature="target"),
    "TPONoAnchor": Rule("target_policy.tpo_no_anchor", has_groups=True, temperature="target"),
    "GroupPG": Rule("grouped.group_pg", has_groups=True, temperature="target"),
    "TEMPO": Rule("grouped.tempo", has_groups=True),
    "MaxRL": Rule("grouped.max_rl", has_groups=True, needs_success_rate=True, needs_noise_free_rewards=True),
    "TPOFullAction": Rule(
        "target_policy.tpo_full_action", temperature="target", needs_all_actions=True, needs_noise_free_rewards=True
    ),
    "TPOToken": Rule("target_policy.tpo_token", has_candidates=True, temperature="target", needs_token_rewards=True),
    "GRPOToken": Rule("token_credit.grpo_token", has_candidates=True, clip="clip_low", needs_token_rewards=True),
}
"""Every update rule by its name, in the order in which they are listed."""

METHODS = tuple(RULES)
"""The names that the setting `method` chooses from."""
DEFAULT_METHOD = "DG"
