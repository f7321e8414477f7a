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
from trainable.runs.records import TOY_TIME_COLUMNS, Column

STEP_COLUMNS: tuple[Column, ...] = (
    Column("test_error", "fraction", "wrong tokens among the greedily decoded ones, on new prompts"),
    Column("entropy", "nats", "mean entropy of the student along the greedy sequences"),
    Column("greedy_separator_rate", "fraction", "separators (which are never correct) among the greedy tokens"),
    Column("loss", "1", "the loss of the step"),
    Column("reward", "fraction", "mean reward of the sampled sequences; nothing trains on it"),
    Column("reverse_kl", "nats", "exact KL(student || teacher), mean over the sampled positions"),
    Column("forward_kl", "nats", "exact KL(teacher || student) at the same positions"),
    Column("sampled_reverse_kl", "nats", "mean of log student - log teacher of the sampled tokens"),
    Column("student_entropy", "nats", "mean entropy of the student at the sampled positions"),
    Column("teacher_entropy", "nats", "mean entropy of the teacher at the sampled positions"),
    Column("entropy_gap", "nats", "student_entropy - teacher_entropy"),
    Column("top1_agreement", "fraction", "positions at which both have the same most likely token"),
    Column("overlap_at_k", "fraction", "the student's overlap_k most likely tokens that are among the teacher's too"),
    Column("student_topk_mass", "1", "OPDTopKReverseKL: probability that the student gives to the support"),
    Column("teacher_topk_mass", "1", "OPDTopKReverseKL: probability that the teacher gives to the support"),
    Column("topk_support_size", "tokens", "OPDTopKReverseKL: mean size of the support"),
    Column("is_warmup", "1", "1 in the steps before the switch to the top-k loss, otherwise 0"),
    Column("gradient_projection", "1", "measures_variance: projection of the gradient on a fixed random unit vector"),
    Column("gradient_norm", "1", "measures_variance: norm of the gradient"),
    *TOY_TIME_COLUMNS,
)
"""A row is one evaluation, of the weights before the step. Columns of a batch describe it before the step's update; the
last row has none. Source: the published diagnostics, which have the prefix `diag_`."""
TRIAL_COLUMNS: tuple[Column, ...] = (
    *make_summary_columns(
        STEP_COLUMNS,
        "late_test_error final_test_error final_entropy final_greedy_separator_rate last_reverse_kl "
        "last_top1_agreement last_overlap_at_k last_reward last_student_topk_mass last_teacher_topk_mass",
    ),
    Column("switch_test_error", "fraction", "test_error at the switch from the warm-up to the top-k loss"),
    Column("error_since_switch", "fraction", "final_test_error - switch_test_error"),
    Column("gradient_variance", "1", "measures_variance: variance (divisor n - 1) of gradient_projection"),
    Column("log10_gradient_variance", "decades", "measures_variance: decimal logarithm of gradient_variance"),
    Column("mean_gradient_norm", "1", "measures_variance: mean of gradient_norm over the batches"),
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
