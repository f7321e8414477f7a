"""The studies of on-policy distillation."""

from sandboxes.distillation.studies import estimators, soft_teacher, top_k

STUDIES = (
    estimators.SINGLE,
    estimators.VARIANCE,
    top_k.STABILITY,
    top_k.COLD_START,
    top_k.WARMUP,
    soft_teacher.STUDY,
    estimators.EXACT_SAMPLED,
)
SUITES = {"sandbox-companions": tuple(study.name for study in STUDIES[1:])}
