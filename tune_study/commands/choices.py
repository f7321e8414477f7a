"""What the options of `run` mean for a study: settings, values of its axis, and its plan in the folder it goes to."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from search_spaces import STUDIES, SUITES
from search_spaces.declaration.study import Study
from trainable.config.run_config import field_names
from trainable.config.setting_types import shown
from tune_study.commands.axis_options import VALUES
from tune_study.folder import locate
from tune_study.placement.models import absolute
from tune_study.plan.study_plan import (
    PlanError,
    StudyPlan,
    collect_overrides,
    expand,
    find_study,
    make_plan,
    parse_bool,
    parse_values,
)

FIELDS: Mapping[str, tuple[str, ...]] = {
    "--steps": ("trainer.total_training_steps",),
    "--model": ("model.path",),
    "--gpus-per-exp": ("trainer.n_gpus_per_node",),
    "--ray-num-cpus": ("trainer.ray_num_cpus",),
    "--gpu-memory-utilization": ("rollout.gpu_memory_utilization",),
    "--save-freq": ("trainer.save_freq",),
    "--ppo-micro-batch-size-per-gpu": (
        "actor.ppo_micro_batch_size_per_gpu",
        "critic.ppo_micro_batch_size_per_gpu",
    ),
    "--log-prob-micro-batch-size-per-gpu": (
        "rollout.log_prob_micro_batch_size_per_gpu",
        "rollout.ref_log_prob_micro_batch_size_per_gpu",
    ),
}
"""Option -> the settings that it sets."""


class Choices(NamedTuple):
    """What was typed of what to run; None: it was not.

    numbers: option of FIELDS -> value. axes: option of an axis -> text. include_zero, strategy: the texts of
    --rollout_filter_include_zero and --rollout_filter_strategy. assignments: of --set.
    """

    preset: str
    preset_reason: str
    numbers: Mapping[str, object]
    axes: Mapping[str, str | None]
    include_zero: str | None
    strategy: str | None
    assignments: Iterable[str]
    seeds: int | None
    smoke: bool


def chosen_studies(name: str, kl_type: str | None) -> tuple[Study, ...]:
    """The study of that name, or those of the suite of that name."""
    suite = SUITES.get(name.replace("_", "-"))
    if suite is None:
        return (find_study(name, kl_type),)
    if kl_type is not None:
        raise PlanError(f"--kl-type does not belong to the studies of {name}: leave it out.")
    return tuple(STUDIES[study] for study in suite)


def planned(study: Study, choices: Choices, output: Path, storage: str | None, extend: bool, real: bool) -> StudyPlan:
    """The plan of what was typed, in the folder that it goes to; PlanError or ConfigError for what cannot be run."""
    values = axis_values(study, choices.axes)
    own = {**_settings(study, choices.numbers), **_filter_settings(study, choices)}
    overrides = collect_overrides(study, own, choices.assignments)
    for setting in overrides.keys() & {*study.family.models, *study.family.files}:
        overrides[setting] = absolute(str(overrides[setting]))
    if choices.smoke:
        overrides = {**_smoke(study), **overrides}
    seeds = choices.seeds if choices.seeds is not None or not choices.smoke else 1
    plan = make_plan(study, choices.preset, choices.preset_reason, overrides, values, seeds, output)
    if storage is not None and study.family.seeds_together:
        raise PlanError(
            f"--storage keeps studies whose trials are one run each, and a trial of {study.name} carries all seeds of "
            f"an arm: leave --storage out, and copy {plan.folder} when it has ended."
        )
    plan = replace(plan, storage=None if storage is None else locate.storage_uri(storage))
    return locate.joined(plan, extend, real=real)


def _smoke(study: Study) -> dict[str, object]:
    if not study.smoke:
        raise PlanError(f"--smoke does not belong to study {study.name}: type --steps N for a short one.")
    return dict(study.smoke)


def _settings(study: Study, numbers: Mapping[str, object]) -> dict[str, object]:
    """The settings of the options that were typed; PlanError for one whose setting the study has not."""
    fields = field_names(study.family.config)
    found: dict[str, object] = {}
    for option, value in numbers.items():
        if value is None:
            continue
        if not set(FIELDS[option]) <= set(fields):
            raise PlanError(
                f"{option} does not belong to study {study.name}, which has no setting {FIELDS[option][0]}: leave it "
                f"out. `python -m tune_study settings {study.name} --all` lists what it has."
            )
        found |= dict.fromkeys(FIELDS[option], value)
    return found


def _filter_settings(study: Study, choices: Choices) -> dict[str, object]:
    found = {
        "filter.rollout_filter_include_zero": _include_zero(study, choices.include_zero),
        "filter.rollout_filter_strategy": _strategy(study, choices.strategy),
    }
    return {name: value for name, value in found.items() if value is not None}


def axis_values(study: Study, options: Mapping[str, str | None]) -> tuple[str, ...] | None:
    """The values typed for the study's axis, with its own option or with --values; PlanError for another's option."""
    typed = {option: text for option, text in options.items() if text is not None}
    for option in typed:
        if option not in (study.axis.option, VALUES):
            raise PlanError(
                f"{option} does not belong to study {study.name}, whose axis is {study.axis.setting}: "
                f"type {study.axis.option}."
            )
    if len(typed) > 1:
        raise PlanError(f"{' and '.join(typed)} are two names of one option of study {study.name}: type one of them.")
    return next((expand(study, parse_values(text, option)) for option, text in typed.items()), None)


def _include_zero(study: Study, text: str | None) -> bool | None:
    """The truth value of --rollout_filter_include_zero; PlanError in a study whose axis sets it."""
    option = "--rollout_filter_include_zero"
    if text is None:
        return None
    if "filter.rollout_filter_include_zero" not in field_names(study.family.config):
        raise PlanError(f"{option} does not belong to study {study.name}, which filters no groups: leave it out.")
    if not study.include_zero_option:
        raise PlanError(
            f"{option} does not belong to study {study.name}, whose axis sets it: type {study.axis.option} "
            f"(the value nofilter is the arm with include_zero True)."
        )
    return parse_bool(text, option)


def _strategy(study: Study, text: str | None) -> str | None:
    """The filter strategy that --rollout_filter_strategy means; PlanError in a study whose documents have none."""
    option = "--rollout_filter_strategy"
    if text is None:
        return None
    if not study.strategies:
        setting = "filter.rollout_filter_strategy"
        instead = f"type --set {setting}=NAME" if setting in field_names(study.family.config) else "leave it out"
        raise PlanError(f"{option} does not belong to study {study.name}: {instead}.")
    if text not in study.strategies:
        raise PlanError(f"{option} {shown(text)} is no strategy: type one of {', '.join(study.strategies)}.")
    return study.strategies[text]
