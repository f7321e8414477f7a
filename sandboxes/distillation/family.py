"""The families of on-policy distillation, and the conditions that its studies share."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from sandboxes.distillation.records import STEP_COLUMNS, TRIAL_COLUMNS
from sandboxes.distillation.settings import DistillationConfig
from sandboxes.toys.study import (
    BYTES_PER_ROW,
    PRESETS,
    SMOKE_SETTINGS,
    count_transformer_parameters,
    estimate_state_bytes,
    make_template_values,
    make_toy_study,
)
from search_spaces.declaration.study import Contrasts, Study, keep_settings
from trainable.families import DisplayColumn, Family, OutcomeColumn, Settings
from trainable.runs.records import COMMON_TRIAL_COLUMNS, STOP_COLUMNS

STEPS = 300
"""Steps of the published studies."""
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


def estimate_bytes(config: DistillationConfig, n_parameters: int) -> tuple[int, int]:
    """Maximum bytes of one run's checkpoint, and bytes of a row with everything derived from it."""
    return estimate_state_bytes(count_transformer_parameters(config)), BYTES_PER_ROW


DISTILLATION = Family(
    name="distillation",
    trainable="sandboxes.distillation.trial:Distillation",
    config_class=DistillationConfig,
    presets=PRESETS,
    step_columns=STEP_COLUMNS,
    trial_columns=(*COMMON_TRIAL_COLUMNS, *STOP_COLUMNS, *TRIAL_COLUMNS),
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
    summarize="sandboxes.distillation.read:summarize_run",
    report="sandboxes.toys.report.figures:PAGE",
    description="sandboxes.distillation.read:DESCRIPTION",
    get_environment=lambda settings: str(settings.get("task", "")),
    remarks="sandboxes.distillation.settings:REMARKS",
    make_template_values=make_template_values,
    has_batched_seeds=True,
    estimate_bytes=estimate_bytes,
    estimate_step_seconds=lambda config: 22e-3 * config.batch_size / 64,
    progress_columns=(
        DisplayColumn("test_error", "test error", ".3f"),
        DisplayColumn("entropy", "entropy", ".3f"),
        DisplayColumn("reverse_kl", "reverse KL", ".3f"),
    ),
    log_columns=(
        DisplayColumn("test_error", "test_error", ".4f"),
        DisplayColumn("entropy", "entropy", ".4f"),
        DisplayColumn("reverse_kl", "reverse_kl", ".4f"),
        DisplayColumn("top1_agreement", "top1_agreement", ".4f"),
        DisplayColumn("reward", "reward", ".4f"),
        DisplayColumn("loss", "loss", ".5f"),
        DisplayColumn("seconds", "seconds", ".2f"),
    ),
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
    log_columns=(
        DisplayColumn("gradient_norm", "gradient_norm", ".5g"),
        DisplayColumn("gradient_projection", "gradient_projection", ".5g"),
        DisplayColumn("loss", "loss", ".5f"),
        DisplayColumn("seconds", "seconds", ".2f"),
    ),
)
"""Studies that train nothing, and measure how much the gradient of an untrained student varies between batches."""


def make_distillation_study(
    name: str,
    question: str,
    arms: Mapping[str, Settings],
    baseline: str,
    setting: str,
    family: Family = DISTILLATION,
    fixed_settings: Settings = REVERSAL_SETTINGS,
    smoke_settings: Settings = SMOKE_SETTINGS,
    run_template: str | None = None,
    contrasts: Contrasts = MappingProxyType({}),
    adapt: Callable[[Settings, Any], Settings] = keep_settings,
) -> Study:
    """A study of distillation whose arms are named conditions; see `make_toy_study`."""
    return make_toy_study(
        family=family,
        name=name,
        question=question,
        arms=arms,
        baseline=baseline,
        fixed_settings=fixed_settings,
        smoke_settings=smoke_settings,
        setting=setting,
        run_template=run_template,
        contrasts=contrasts,
        adapt=adapt,
    )


def make_top_k_settings(
    k: int, warmup: int = 0, *, steps_after: int | None = None, others: Settings = MappingProxyType({})
) -> Settings:
    """The settings of an arm with the top-k loss after `warmup` steps of the exact one, and `others`.

    steps_after: number of steps with the top-k loss; by default the arm has `STEPS` steps in total, as published.
    """
    length: Settings = {} if steps_after is None else {"trainer.total_training_steps": warmup + steps_after}
    warmup_settings: Settings = {"warmup_steps": warmup} if warmup else {}
    return {"method": "OPDTopKReverseKL", "top_k": k, **warmup_settings, **length, **others}


def scale_steps(settings: Settings, base: DistillationConfig) -> Settings:
    """Scale an arm's warm-up and length, declared for studies of `STEPS` steps, to the study's length.

    Without this, `--steps` would shorten only the arms that declare no length, or end a run in its warm-up. Both are
    rounded down to multiples of the evaluation interval, so that the switch is evaluated, unless nothing would be left.
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
