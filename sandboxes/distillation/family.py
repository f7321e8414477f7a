"""The families of on-policy distillation, and the conditions that their studies share."""

from dataclasses import replace
from functools import partial
from types import MappingProxyType

from sandboxes.distillation.settings import DistillationConfig
from sandboxes.toys.study import (
    Description,
    count_transformer_parameters,
    estimate_toy_bytes,
    make_log_columns,
    make_summary_columns,
    make_toy_family,
    make_toy_study,
    set_length,
)
from trainable.families import DisplayColumn, OutcomeColumn, Settings
from trainable.runs.records import TOY_TIME_COLUMNS, Column, read_columns

_TABLES = read_columns(__file__)
STEP_COLUMNS: tuple[Column, ...] = (*_TABLES["step"], *TOY_TIME_COLUMNS)
"""A row is one evaluation, of the weights before the step. Columns of a batch describe it before the step's update; the
last row has none. Source: the published diagnostics, which have the prefix `diag_`."""
TRIAL_COLUMNS: tuple[Column, ...] = (
    *make_summary_columns(
        STEP_COLUMNS,
        "late_test_error final_test_error final_entropy final_greedy_separator_rate last_reverse_kl "
        "last_top1_agreement last_overlap_at_k last_reward last_student_topk_mass last_teacher_topk_mass",
    ),
    *_TABLES["trial"],
)

STEPS = 300
"""Number of steps of the published studies."""
REVERSAL_SETTINGS: Settings = MappingProxyType(
    {"task": "reversal", "vocab_size": 8, "seq_len": 8, "batch_size": 64, "overlap_k": 4, **set_length(STEPS, 20, 100)}
)
"""The shared conditions of the published studies."""
EXACT: Settings = MappingProxyType({"method": "OPDReverseKL"})
NORMALIZED: Settings = MappingProxyType({"normalize_top_k": True})


DISTILLATION = make_toy_family(
    name="distillation",
    trainable="sandboxes.distillation.trial:Distillation",
    config_class=DistillationConfig,
    step_columns=STEP_COLUMNS,
    trial_columns=TRIAL_COLUMNS,
    outcomes=(
        OutcomeColumn("late_test_error", 0.05, "it is the outcome that a student should improve", is_common=True),
        OutcomeColumn("final_test_error", 0.05),
        OutcomeColumn("final_entropy", 0.1, "it shows whether the student has committed itself", is_common=True),
        OutcomeColumn("last_reverse_kl", 0.1, "it is the divergence that every loss stands for", is_common=True),
        OutcomeColumn("error_since_switch", 0.05, "it is positive if a run loses what its warm-up taught"),
    ),
    is_higher_better=False,
    summarize="sandboxes.distillation.read:summarize_run",
    description=Description(
        label="on-policy distillation",
        outcome="test error at the end",
        panels={"test_error": "test error (fraction)", "reverse_kl": "KL(student || teacher) (nats)"},
    ),
    estimate_bytes=lambda config, n_parameters: estimate_toy_bytes(count_transformer_parameters(config)),
    estimate_step_seconds=lambda config: 22e-3 * config.batch_size / 64,
    progress_columns={"test_error": "test error", "entropy": "entropy", "reverse_kl": "reverse KL"},
    log_columns=("test_error", "entropy", "reverse_kl", "top1_agreement", "reward", "loss"),
)
"""Studies that train a student."""

GRADIENT_VARIANCE = replace(
    DISTILLATION,
    name="gradient_variance",
    estimate_step_seconds=lambda config: 10e-3 * config.batch_size / 16,
    outcomes=(
        OutcomeColumn("log10_gradient_variance", 0.1, "it is the noise of an estimator's gradient", is_common=True),
        OutcomeColumn("mean_gradient_norm", contrast="it shows the scale of the gradient", is_common=True),
    ),
    description=Description(
        label="on-policy distillation",
        outcome="the logarithm of the gradient's variance",
        panels={"gradient_projection": "projection of the gradient", "gradient_norm": "gradient norm"},
    ),
    progress_columns=(
        DisplayColumn("gradient_norm", "gradient norm", ".3g"),
        DisplayColumn("gradient_projection", "projection", ".3g"),
    ),
    log_columns=make_log_columns({"gradient_norm": ".5g", "gradient_projection": ".5g", "loss": ".5f"}),
)
"""Studies without training, which measure how much an untrained student's gradient varies between batches."""


make_distillation_study = partial(make_toy_study, family=DISTILLATION, fixed_settings=REVERSAL_SETTINGS)
"""Make a distillation study whose arms are named conditions; see `make_toy_study`."""


def make_top_k_settings(
    k: int, warmup: int = 0, *, steps_after: int | None = None, others: Settings = MappingProxyType({})
) -> Settings:
    """Make the settings of an arm with the top-k loss after `warmup` steps of the exact one, and `others`.

    steps_after: number of steps with the top-k loss; by default the arm has `STEPS` steps in total, as published.
    """
    length: Settings = {} if steps_after is None else {"trainer.total_training_steps": warmup + steps_after}
    warmup_settings: Settings = {"warmup_steps": warmup} if warmup else {}
    return {"method": "OPDTopKReverseKL", "top_k": k, **warmup_settings, **length, **others}


def scale_steps(settings: Settings, base: DistillationConfig) -> Settings:
    """Scale an arm's warm-up and length, declared for studies of `STEPS` steps, to the study's length.

    Otherwise `--steps` would shorten only the arms that declare no length, or end a run during its warm-up. Both are
    rounded down to multiples of the evaluation interval, so that the switch is evaluated, unless they would become 0.
    """
    length, interval = base.trainer.total_training_steps, base.trainer.test_freq
    scaled_settings = dict(settings)
    for key in ("warmup_steps", "trainer.total_training_steps"):
        value = settings.get(key)
        if isinstance(value, int) and length != STEPS:
            steps = max(1, value * length // STEPS)
            scaled_settings[key] = steps // interval * interval or steps
    return scaled_settings
