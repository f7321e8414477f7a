"""The studies of update rules."""

from sandboxes.update_rules.studies import (
    age_not_capacity,
    delays,
    dense_correction,
    entropy_mechanism,
    grpo_entropy,
    influence,
    matched_updates,
    off_policy,
    partial_credit,
    replay,
    reward_noise,
    single,
)

STUDIES = (
    single.STUDY,
    delays.STUDY,
    influence.STUDY,
    reward_noise.STUDY,
    replay.STUDY,
    partial_credit.STUDY,
    dense_correction.STUDY,
    grpo_entropy.STUDY,
    entropy_mechanism.STUDY,
    matched_updates.STUDY,
    age_not_capacity.STUDY,
    off_policy.STUDY,
)

# Studies whose numbers are compared with published tables, and studies without a published counterpart.
_EVIDENCE = ("influence", "reward-noise", "replay", "partial-credit", "dense-correction", "grpo-entropy")
_PREDICTIONS = ("entropy-mechanism", "matched-updates", "age-not-capacity", "off-policy", "grpo-entropy-sokoban")
SUITES = {
    "sandbox-evidence": _EVIDENCE,
    "sandbox-all": ("sandbox", "sandbox-delays", *_EVIDENCE, *_PREDICTIONS),
}
