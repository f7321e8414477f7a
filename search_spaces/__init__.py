"""All studies by name, the suites of several, and the families they belong to."""

from search_spaces import (
    entropy,
    gradient_analysis,
    grpo_entropy_sokoban,
    kl,
    sandbox_age_not_capacity,
    sandbox_delays,
    sandbox_dense_correction,
    sandbox_entropy_mechanism,
    sandbox_grpo_entropy,
    sandbox_influence,
    sandbox_matched_updates,
    sandbox_off_policy,
    sandbox_partial_credit,
    sandbox_replay,
    sandbox_reward_noise,
    sandbox_single,
    smoke,
    top_p,
)
from search_spaces.family import Family
from search_spaces.language_model import PPO
from search_spaces.sandbox import UPDATE_RULES
from search_spaces.study import Study

STUDIES: dict[str, Study] = {
    study.name: study
    for study in (
        kl.STUDY,
        entropy.STUDY,
        top_p.STUDY,
        gradient_analysis.STUDY,
        smoke.smoke(),
        smoke.SMOKE_ALL,
        sandbox_single.STUDY,
        sandbox_delays.STUDY,
        sandbox_influence.STUDY,
        sandbox_reward_noise.STUDY,
        sandbox_replay.STUDY,
        sandbox_partial_credit.STUDY,
        sandbox_dense_correction.STUDY,
        sandbox_grpo_entropy.STUDY,
        sandbox_entropy_mechanism.STUDY,
        sandbox_matched_updates.STUDY,
        sandbox_age_not_capacity.STUDY,
        sandbox_off_policy.STUDY,
        grpo_entropy_sokoban.STUDY,
    )
}

_EVIDENCE = ("influence", "reward-noise", "replay", "partial-credit", "dense-correction", "grpo-entropy")
_PREDICTIONS = ("entropy-mechanism", "matched-updates", "age-not-capacity", "off-policy", "grpo-entropy-sokoban")

SUITES: dict[str, tuple[str, ...]] = {
    "sandbox-evidence": _EVIDENCE,
    "sandbox-all": ("sandbox", "sandbox-delays", *_EVIDENCE, *_PREDICTIONS),
}
"""Name -> the studies that `run` runs one after another."""

FAMILIES: dict[str, Family] = {family.name: family for family in (PPO, UPDATE_RULES)}
