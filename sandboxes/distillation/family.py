"""The families of on-policy distillation, and the conditions that their studies share."""

from dataclasses import replace
from functools import partial
from types import MappingProxyType

from sandboxes.distillation.records import STEP_COLUMNS, TRIAL_COLUMNS
from sandboxes.distillation.settings import DistillationConfig
from sandboxes.toys.study import (
    count_transformer_parameters,
    estimate_toy_bytes,
    make_log_columns,
    make_toy_family,
    make_toy_study,
)
from trainable.families import DisplayColumn, OutcomeColumn, Settings

STEPS = 300
"""Number of steps of the published studies."""
REVERSAL_SETTINGS: Settings = MappingProxyType(
    {
        "task": "reversal",
        "vocab_size": 8,
        "seq_len": 8,
        "batch_size": 64,
        "overlap_k": 4,
        "trainer.total_training_steps": STEPS,
        "trainer.test_freq": 20,
        "trainer.resume_every": 100,
    }
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
        OutcomeColumn(
            "final_entropy",
            0.1,
            "it shows whether the student has committed itself; a uniform student has the logarithm of the number of "
            "tokens",
            is_common=True,
        ),
        OutcomeColumn(
            "last_reverse_kl", 0.1, "it is the exact divergence that every loss here stands for", is_common=True
        ),
        OutcomeColumn(
            "error_since_switch",
            0.05,
            "it shows whether a run keeps what its warm-up taught; negative if it goes on learning",
        ),
    ),
    is_higher_better=False,
    remarks="sandboxes.distillation.settings:REMARKS",
    estimate_bytes=lambda config, n_parameters: estimate_toy_bytes(count_transformer_parameters(config)),
    estimate_step_seconds=lambda config: 22e-3 * config.batch_size / 64,
    progress_columns=(
        DisplayColumn("test_error", "test error", ".3f"),
        DisplayColumn("entropy", "entropy", ".3f"),
        DisplayColumn("reverse_kl", "reverse KL", ".3f"),
    ),
    log_formats={
        "test_error": ".4f",
        "entropy": ".4f",
        "reverse_kl": ".4f",
        "top1_agreement": ".4f",
        "reward": ".4f",
        "loss": ".5f",
    },
)
"""Studies that train a student."""

GRADIENT_VARIANCE = replace(
    DISTILLATION,
    name="gradient_variance",
    estimate_step_seconds=lambda config: 10e-3 * config.batch_size / 16,
    outcomes=(
        OutcomeColumn(
            "log10_gradient_variance", 0.1, "it is what an estimator adds to the gradient as noise", is_common=True
        ),
        OutcomeColumn(
            "mean_gradient_norm",
            contrast="it shows the scale of the gradient, which a normalization changes too",
            is_common=True,
        ),
    ),
    description="sandboxes.distillation.read:GRADIENT_VARIANCE_DESCRIPTION",
    progress_columns=(
        DisplayColumn("gradient_norm", "gradient norm", ".3g"),
        DisplayColumn("gradient_projection", "projection", ".3g"),
    ),
    log_columns=make_log_columns(
        {
            "gradient_norm": ".5g",
            "gradient_projection": ".5g",
            "loss": ".5f",
            "seconds": ".2f",
        }
    ),
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
    if length == STEPS:
        return settings
    scaled_settings = {}
    for key in ("warmup_steps", "trainer.total_training_steps"):
        value = settings.get(key)
        if isinstance(value, int):
            steps = max(1, value * length // STEPS)
            scaled_settings[key] = steps // interval * interval or steps
    return {**settings, **scaled_settings}
