"""Turn the options of the command `run` into a study's plan: its settings, axis values and folder."""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from search_spaces.catalog import STUDIES, SUITES
from search_spaces.declaration.study import Study
from trainable.config.aliases import flatten_settings
from trainable.config.command_lines import format_command
from trainable.config.own_parts import PART_FORM, parse_part_name
from trainable.config.run_config import ConfigError, list_field_names
from trainable.config.setting_types import format_value
from trainable.runs.study_record import STUDY_FILE
from tune_study.commands.arguments.parser import VALUES_OPTION
from tune_study.commands.option_groups import RunOptions
from tune_study.folder import locate
from tune_study.folder.study_file import read_study
from tune_study.placement.model_files import make_absolute
from tune_study.placement.samplers import TORCH_SETTINGS, find_compiled_obstacle
from tune_study.plan.errors import PlanError
from tune_study.plan.own_parts import load_game_settings, load_named_files
from tune_study.plan.own_study import StudySource, is_study_file, load_own_study
from tune_study.plan.study_names import find_study, normalize_study_name
from tune_study.plan.study_plan import StudyPlan, make_plan, set_max_seeds
from tune_study.plan.typed_settings import collect_overrides, expand_groups, parse_bool, parse_values

OPTION_SETTINGS: Mapping[str, tuple[str, ...]] = {
    "steps": ("trainer.total_training_steps",),
    "model": ("model.path",),
    "gpus_per_exp": ("trainer.n_gpus_per_node",),
    "ray_num_cpus": ("trainer.ray_num_cpus",),
    "gpu_memory_utilization": ("rollout.gpu_memory_utilization",),
    "save_freq": ("trainer.save_freq",),
    "keep_best": ("trainer.keep_best",),
    "ppo_micro_batch_size_per_gpu": ("actor.ppo_micro_batch_size_per_gpu", "critic.ppo_micro_batch_size_per_gpu"),
    "log_prob_micro_batch_size_per_gpu": (
        "rollout.log_prob_micro_batch_size_per_gpu",
        "rollout.ref_log_prob_micro_batch_size_per_gpu",
    ),
}
"""Settings that each option assigns, by field of `StudyOptions`. As in the published scripts, some assign several."""

DEFAULT_MAX_SEEDS = 20


class ChosenPreset(NamedTuple):
    """The typed or default preset, why it was chosen, and further settings for it."""

    name: str
    reason: str
    settings: Mapping[str, object] = MappingProxyType({})


def find_studies(
    name: str, kl_type: str | None, accepts_change: bool = False
) -> tuple[tuple[Study, StudySource | None], ...]:
    """Find the study `name`, or the studies of the suite `name`, each with its source if a file declares it.

    name: of a study or a suite, or the path of a file. kl_type: see `find_study`. accepts_change: see `StudySource`.
    Raises PlanError if there is no such study.
    """
    if is_study_file(name):
        if kl_type is not None:
            raise PlanError(f"--kl-type does not belong to the study of {format_value(name, 1000)}: leave it out.")
        return (load_own_study(name, accepts_change),)
    if accepts_change:
        raise PlanError(f"--accept-changed-file does not belong to {name}, which no file declares: leave it out.")
    suite = SUITES.get(normalize_study_name(name))
    if suite is None:
        return ((find_study(name, kl_type), None),)
    if kl_type is not None:
        raise PlanError(f"--kl-type does not belong to the studies of {name}: leave it out.")
    return tuple((STUDIES[study], None) for study in suite)


def plan_from_options(
    study: Study,
    preset: ChosenPreset,
    options: RunOptions,
    source: StudySource | None = None,
    complete: Callable[[StudyPlan], StudyPlan] = lambda plan: plan,
) -> StudyPlan:
    """Plan a study from its options, merged with the study that its folder may already contain.

    A dry run does not access the storage.

    Args:
        study: the study.
        preset: the preset; the one in `options` is ignored.
        options: what to run.
        source: the file that declares the study; None for a study of this package.
        complete: changes the plan before it is merged with the study in the folder.

    Raises PlanError or ConfigError if the study cannot be run.
    """
    _check_preset(study, preset.name)
    values = parse_axis_values(study, options.axis_texts)
    typed_values = _list_typed_values(options)
    option_settings = {
        **_collect_option_settings(study, typed_values),
        **_collect_include_zero(study, options.rollout_filter_include_zero),
        **_collect_strategy(study, options.rollout_filter_strategy),
    }
    game_settings = _collect_game_settings(study, options.env, preset.name)
    # Typed settings take precedence over the game's.
    overrides = {
        **game_settings,
        **_select_preset_settings(study, preset),
        **collect_overrides(study, option_settings, options.list_assignments()),
    }
    if preset.name in study.family.presets:  # the plan refuses others
        load_named_files(study, source.path if source else "", values, preset.name, overrides.values())
    # The processes of runs have other working folders, where a relative path would not be found.
    for setting in overrides.keys() & {*study.family.model_settings, *study.family.path_settings}:
        if overrides[setting] is not None:
            overrides[setting] = make_absolute(str(overrides[setting]))
    # Typed settings and seeds take precedence over --smoke.
    if options.smoke:
        if not study.smoke_settings:
            raise PlanError(f"--smoke does not belong to study {study.name}: type --steps N for a short run.")
        overrides = {**study.smoke_settings, **overrides}
    n_seeds = options.seeds if options.seeds is not None or not options.smoke else 1
    try:
        plan = _plan_with_torch_if_needed(study, preset, options, overrides, values, n_seeds)
    except ConfigError as error:
        raise ConfigError(_name_typed_options(str(error), typed_values)) from None
    storage = None if options.storage is None else locate.parse_storage_uri(options.storage)
    plan = complete(replace(plan, storage=storage, source=source))
    plan = locate.merge_with_existing(plan, options.extend, is_real=not options.dry_run)
    if not options.until_resolved and options.max_seeds is not None:
        raise PlanError("--max-seeds belongs to --until-resolved: type both, or neither.")
    if not options.until_resolved and plan.max_seeds is None:
        return plan
    from analysis.stats.sequential import find_fewest_seeds  # imports SciPy

    # Without --max-seeds, a study keeps the maximum that it has.
    max_seeds = options.max_seeds or plan.max_seeds or DEFAULT_MAX_SEEDS
    return set_max_seeds(plan, max_seeds, find_fewest_seeds(max(len(plan.values) - 1, 1)))


def _list_typed_values(options: RunOptions) -> dict[str, object]:
    """Collect the typed values of the options of OPTION_SETTINGS, by field."""
    values = {field: getattr(options, field) for field in OPTION_SETTINGS}
    return {field: value for field, value in values.items() if value is not None and value is not False}


def _format_option(field: str) -> str:
    return f"--{field.replace('_', '-')}"


def _name_typed_options(problem: str, typed_values: Mapping[str, object]) -> str:
    """Rewrite a problem of settings with the typed options: `--steps 0` instead of the setting that it sets."""
    for field, value in typed_values.items():
        for name in OPTION_SETTINGS[field]:
            problem = problem.replace(f"{name}={value}:", f"{_format_option(field)} {value}:")
    return problem


def _plan_with_torch_if_needed(
    study: Study,
    preset: ChosenPreset,
    options: RunOptions,
    overrides: Mapping[str, object],
    values: tuple[str, ...] | None,
    n_seeds: int | None,
) -> StudyPlan:
    """Plan a new study; use torch if the preset's compiled code cannot run an arm.

    A study that is already in the folder keeps the code with which it began, unless another was typed.
    """
    name, reason, baseline_seeds = preset.name, preset.reason, options.baseline_seeds
    output = Path(os.path.abspath(os.path.expanduser(options.output)))
    plan = make_plan(study, name, reason, overrides, values, n_seeds, output, baseline_seeds)
    # Typed settings are never replaced: compiled code is then used or refused.
    torch_settings = {name: value for name, value in TORCH_SETTINGS.items() if name not in overrides}
    if plan.model is None or not torch_settings:
        return plan
    if (plan.folder / STUDY_FILE).exists():
        recorded_settings = flatten_settings(read_study(plan.folder).settings)
        settings = {name: recorded_settings[name] for name in torch_settings if name in recorded_settings}
    else:
        obstacle = find_compiled_obstacle(plan.ppo_configs, os.environ)
        if not obstacle:
            return plan
        settings, reason = torch_settings, f"{reason}; torch instead of compiled code: {obstacle}"
    return make_plan(study, name, reason, {**overrides, **settings}, values, n_seeds, output, baseline_seeds)


def _check_preset(study: Study, preset: str) -> None:
    """Raise PlanError if the study has no axis values under a preset, as may happen for a study from a file."""
    if preset not in study.family.presets:  # the plan refuses it
        return
    try:
        study.get_grid(preset)
    except KeyError:
        raise PlanError(
            f"Study {study.name} has no values of {study.axis.setting} under preset {preset}: type --preset "
            f"{next(iter(study.axis.grids))}, or add values to its axis."
        ) from None


def _collect_option_settings(study: Study, typed_values: Mapping[str, object]) -> dict[str, object]:
    """Turn typed options into settings. Raises PlanError for an option whose setting the study does not have."""
    known_fields = list_field_names(study.family.config_class)
    option_settings: dict[str, object] = {}
    for field, value in typed_values.items():
        names = OPTION_SETTINGS[field]
        if not set(names) <= set(known_fields):
            raise PlanError(
                f"{_format_option(field)} does not belong to study {study.name}, which has no setting {names[0]}: "
                f"leave it out. `{format_command('settings', study.name, '--all')}` lists its settings."
            )
        option_settings |= dict.fromkeys(names, value)
    return option_settings


def _collect_game_settings(study: Study, game: str | None, preset: str) -> dict[str, object]:
    """Collect the settings that come with the game of --env. Raises PlanError if study or game do not allow it."""
    games = study.family.games
    if game is None:
        return {}
    if not games:
        raise PlanError(f"--env does not belong to study {study.name}, which plays no game: leave it out.")
    is_own_game = parse_part_name(game) is not None
    if game not in games and not is_own_game:
        if game.endswith(".py"):
            raise PlanError(
                f"--env {format_value(game)} does not say which game of the file: type "
                f"--env {format_value(game)}:NAME, with the name of a class."
            )
        nearest = get_close_matches(game.lower(), games, n=1)
        raise PlanError(
            f"--env {format_value(game)} is not a game{f' (nearest: {nearest[0]})' if nearest else ''}: type "
            f"one of {', '.join(games)}, or a game of yours as {PART_FORM}."
        )
    if study.game and game != study.game:
        raise PlanError(
            f"--env does not belong to study {study.name}, whose arms are named after {study.game}: leave it out."
        )
    if is_own_game:
        return {**load_game_settings(game), "env.name": game}
    return study.family.make_game_settings(game, preset)


def _select_preset_settings(study: Study, preset: ChosenPreset) -> dict[str, object]:
    """Select the preset's further settings that the study has, except those in which its arms differ."""
    known_fields = list_field_names(study.family.config_class)
    return {
        name: value
        for name, value in preset.settings.items()
        if name in known_fields and name not in study.axis.swept_fields
    }


def parse_axis_values(study: Study, axis_texts: Mapping[str, str | None]) -> tuple[str, ...] | None:
    """Parse the typed values of the study's axis, from its flag or --values; None if none were typed.

    Raises PlanError for a flag of another study's axis, and if both options were typed.
    """
    typed_texts = {option: text for option, text in axis_texts.items() if text is not None}
    for option in typed_texts:
        if option not in (study.axis.option, VALUES_OPTION):
            raise PlanError(
                f"{option} does not belong to study {study.name}, whose axis is {study.axis.setting}: "
                f"type {study.axis.option}."
            )
    if len(typed_texts) > 1:
        raise PlanError(
            f"{' and '.join(typed_texts)} are two names for one option of study {study.name}: type one of them."
        )
    return next((expand_groups(study, parse_values(text, option)) for option, text in typed_texts.items()), None)


def _collect_include_zero(study: Study, text: str | None) -> dict[str, object]:
    """Parse --rollout_filter_include_zero. Raises PlanError if the study has no filter, or if its axis sets this."""
    option, setting = "--rollout_filter_include_zero", "filter.rollout_filter_include_zero"
    if text is None:
        return {}
    if setting not in list_field_names(study.family.config_class):
        raise PlanError(f"{option} does not belong to study {study.name}, which filters no groups: leave it out.")
    if not study.has_include_zero_option:
        raise PlanError(
            f"{option} does not belong to study {study.name}, whose axis sets it: type {study.axis.option} "
            f"(the value nofilter is the arm in which it is True)."
        )
    return {setting: parse_bool(text, option)}


def _collect_strategy(study: Study, text: str | None) -> dict[str, object]:
    """Parse --rollout_filter_strategy. Raises PlanError if the study does not have this option."""
    option, setting = "--rollout_filter_strategy", "filter.rollout_filter_strategy"
    if text is None:
        return {}
    # In other studies that filter groups, only --set changes the strategy.
    if not study.strategy_aliases:
        advice = (
            f"type --set {setting}=NAME" if setting in list_field_names(study.family.config_class) else "leave it out"
        )
        raise PlanError(f"{option} does not belong to study {study.name}: {advice}.")
    if text not in study.strategy_aliases:
        raise PlanError(
            f"{option} {format_value(text)} is not a strategy: type one of {', '.join(study.strategy_aliases)}."
        )
    return {setting: study.strategy_aliases[text]}
