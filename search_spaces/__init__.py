"""Declare: a question, its axis, its contrasts; every study by name."""

from search_spaces.companions import (
    opd,
    opd_cold_start,
    opd_exact_sampled,
    opd_soft_teacher,
    opd_topk_stability,
    opd_variance,
    opd_warmup,
    pedagogy,
    vpo,
)
from search_spaces.companions.distillation import DISTILLATION, GRADIENT_VARIANCE
from search_spaces.declaration.family import Family
from search_spaces.declaration.study import Study
from search_spaces.language_model import (
    collapse_gradients,
    distill,
    entropy,
    filter_under_noise,
    gradient_analysis,
    grpo_entropy_sokoban,
    kl,
    learning_rate,
    mismatch,
    smoke,
    top_p,
)
from search_spaces.language_model.family import PPO
from search_spaces.sandbox import (
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
from search_spaces.sandbox.family import UPDATE_RULES
from search_spaces.trees import tree_grpo

STUDIES: dict[str, Study] = {
    study.name: study
    for study in (
        kl.STUDY,
        entropy.STUDY,
        top_p.STUDY,
        gradient_analysis.STUDY,
        learning_rate.STUDY,
        collapse_gradients.STUDY,
        filter_under_noise.STUDY,
        mismatch.STUDY,
        distill.STUDY,
        smoke.SMOKE_STUDY,
        smoke.SMOKE_ALL_STUDY,
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
        grpo_entropy_sokoban.STUDY,
        opd.STUDY,
        opd_variance.STUDY,
        opd_topk_stability.STUDY,
        opd_cold_start.STUDY,
        opd_warmup.STUDY,
        opd_soft_teacher.STUDY,
        opd_exact_sampled.STUDY,
        vpo.STUDY,
        vpo.LARGE_STUDY,
        pedagogy.STUDY,
        pedagogy.COLD_STUDY,
        tree_grpo.STUDY,
    )
}

# Studies whose numbers are compared with published tables, and studies without a published counterpart.
_EVIDENCE_STUDIES = ("influence", "reward-noise", "replay", "partial-credit", "dense-correction", "grpo-entropy")
_PREDICTION_STUDIES = ("entropy-mechanism", "matched-updates", "age-not-capacity", "off-policy", "grpo-entropy-sokoban")
_COMPANION_STUDIES = (
    "opd-variance",
    "opd-topk-stability",
    "opd-cold-start",
    "opd-warmup",
    "opd-soft-teacher",
    "opd-exact-sampled",
    "vpo",
    "vpo-large",
    "pedagogy",
    "pedagogy-cold",
)

SUITES: dict[str, tuple[str, ...]] = {
    "sandbox-evidence": _EVIDENCE_STUDIES,
    "sandbox-all": ("sandbox", "sandbox-delays", *_EVIDENCE_STUDIES, *_PREDICTION_STUDIES),
    "sandbox-companions": _COMPANION_STUDIES,
}
"""The studies of each suite, which `run` trains one after another, by the name of the suite."""

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (PPO, UPDATE_RULES, DISTILLATION, GRADIENT_VARIANCE, vpo.VECTOR_REWARDS, pedagogy.PEDAGOGY)
}
"""The families, by the name that study.json stores."""
