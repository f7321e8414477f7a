"""The studies of on-policy distillation."""

from sandboxes.distillation.studies import (
    opd,
    opd_cold_start,
    opd_exact_sampled,
    opd_soft_teacher,
    opd_topk_stability,
    opd_variance,
    opd_warmup,
)

STUDIES = (
    opd.STUDY,
    opd_variance.STUDY,
    opd_topk_stability.STUDY,
    opd_cold_start.STUDY,
    opd_warmup.STUDY,
    opd_soft_teacher.STUDY,
    opd_exact_sampled.STUDY,
)
SUITES = {"sandbox-companions": tuple(study.name for study in STUDIES[1:])}
