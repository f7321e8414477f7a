"""Turn the options of the command `run` into the plan of a study: its settings, its axis values and its folder."""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

from search_spaces import STUDIES, SUITES
from search_spaces.declaration.study import Study
from trainable.config.aliases import flatten_settings
from trainable.config.command_lines import format_command
from trainable.config.own_parts import PART_FORM, parse_part_name
from trainable.config.run_config import ConfigError, list_field_names
from trainable.config.setting_types import format_value
from trainable.runs.study_record import STUDY_FILE
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

VALUES_OPTION = "--values"
"""The option for the values of any study's axis; some studies have a published one in addition."""

OPTION_SETTINGS: Mapping[str, tuple[str, ...]] = {
    "--steps": ("trainer.total_training_steps",),
    "--model": ("model.path",),
    "--gpus-per-exp": ("trainer.n_gpus_per_node",),
    "--ray-num-cpus": ("trainer.ray_num_cpus",),
    "--gpu-memory-utilization": ("rollout.gpu_memory_utilization",),
    "--save-freq": ("trainer.save_freq",),
    "--keep-best": ("trainer.keep_best",),
    "--ppo-micro-batch-size-per-gpu": (
        "actor.ppo_micro_batch_size_per_gpu",
        "critic.ppo_micro_batch_size_per_gpu",
    ),
    "--log-prob-micro-batch-size-per-gpu": (
        "rollout.log_prob_micro_batch_size_per_gpu",
        "rollout.ref_log_prob_micro_batch_size_per_gpu",
    ),
}
"""The settings that each option assigns, by option. An option for several settings is one of the published scripts."""


DEFAULT_MAX_SEEDS = 20


class RunOptions(NamedTuple):
    """The options of `run` that say what to run; None for an option that was not typed.

    Attributes:
        preset: --preset, or the default preset.
        preset_reason: why this preset was chosen.
        preset_settings: further settings of the preset.
        option_values: the value of each option of OPTION_SETTINGS, by option.
        axis_texts: the text of each option for the values of an axis, by option.
        game: --env.
        include_zero: text of --rollout_filter_include_zero.
        strategy: text of --rollout_filter_strategy.
        assignments: the `key=value` of each --set.
        seeds: --seeds.
        baseline_seeds: --baseline-seeds.
        until_resolved: --until-resolved.
        max_seeds: --max-seeds.
        smoke: --smoke.
    """

    preset: str
    preset_reason: str
    preset_settings: Mapping[str, object]
    option_values: Mapping[str, object]
    axis_texts: Mapping[str, str | None]
    game: str | None
    include_zero: str | None
    strategy: str | None
    assignments: Iterable[str]
    seeds: int | None
    baseline_seeds: int | None
    until_resolved: bool
    max_seeds: int | None
    smoke: bool


def find_studies(
    name: str, kl_type: str | None, accepts_change: bool = False
) -> tuple[tuple[Study, StudySource | None], ...]:
    """The study `name`, or the studies of the suite `name`, each with the file that declares it, if one does.

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
    options: RunOptions,
    output: Path,
    storage: str | None,
    extend: bool,
    real: bool,
    source: StudySource | None = None,
    complete: Callable[[StudyPlan], StudyPlan] = lambda plan: plan,
) -> StudyPlan:
    """Plan a study from its options, merged with the study that its folder may already contain.

    Args:
        study: the study.
        options: what to run.
        output: parent folder of results/, logs/ and model_saving/.
        storage: text of --storage, None without the option.
        extend: whether --extend was typed.
        real: False for a dry run, which does not access the storage.
        source: the file that declares the study; None for a study of this package.
        complete: changes the plan before it is merged with the study in the folder.

    Raises PlanError or ConfigError if the study cannot be run.
    """
    _check_preset(study, options.preset)
    values = parse_axis_values(study, options.axis_texts)
    option_settings = {
        **_collect_option_settings(study, options.option_values),
        **_collect_filter_settings(study, options),
    }
    game_settings = _collect_game_settings(study, options)
    # Settings that were typed take precedence over those that come with the game.
    overrides = {
        **game_settings,
        **_select_preset_settings(study, options),
        **collect_overrides(study, option_settings, options.assignments),
    }
    if options.preset in study.family.presets:  # otherwise the plan refuses it
        load_named_files(study, source.path if source else "", values, options.preset, overrides.values())
    # The processes of runs have other working folders, in which a relative path would not be found.
    for setting in overrides.keys() & {*study.family.model_settings, *study.family.path_settings}:
        if overrides[setting] is not None:
            overrides[setting] = make_absolute(str(overrides[setting]))
    # Settings and seeds that were typed take precedence over those of --smoke.
    if options.smoke:
        overrides = {**_get_smoke_settings(study), **overrides}
    n_seeds = options.seeds if options.seeds is not None or not options.smoke else 1
    try:
        plan = _plan_with_torch_if_needed(study, options, overrides, values, n_seeds, output)
    except ConfigError as error:
        raise ConfigError(_name_typed_options(str(error), options.option_values)) from None
    plan = replace(plan, storage=None if storage is None else locate.parse_storage_uri(storage), source=source)
    plan = locate.merge_with_existing(complete(plan), extend, is_real=real)
    if not options.until_resolved and options.max_seeds is not None:
        raise PlanError("--max-seeds belongs to --until-resolved: type both, or neither.")
    if not options.until_resolved and plan.max_seeds is None:
        return plan
    from analysis.stats.sequential import find_fewest_seeds  # imports SciPy

    # Without --max-seeds, a study that has a maximum keeps it.
    max_seeds = options.max_seeds or plan.max_seeds or DEFAULT_MAX_SEEDS
    return set_max_seeds(plan, max_seeds, find_fewest_seeds(max(len(plan.values) - 1, 1)))


def _name_typed_options(problem: str, option_values: Mapping[str, object]) -> str:
    """A problem of settings in the words that were typed: `--steps 0` instead of the setting that it stands for."""
    for option, value in option_values.items():
        if value is not None:
            for name in OPTION_SETTINGS[option]:
                problem = problem.replace(f"{name}={value}:", f"{option} {value}:")
    return problem


def _plan_with_torch_if_needed(
    study: Study,
    options: RunOptions,
    overrides: Mapping[str, object],
    values: tuple[str, ...] | None,
    n_seeds: int | None,
    output: Path,
) -> StudyPlan:
    """Plan a new study; if its preset uses compiled code, and that cannot run an arm, torch takes its place.

    A study that is in the folder already keeps the code with which it began, unless another was typed.
    """
    preset, reason, baseline_seeds = options.preset, options.preset_reason, options.baseline_seeds
    plan = make_plan(study, preset, reason, overrides, values, n_seeds, output, baseline_seeds)
    # Compiled code that was typed is used or refused.
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
    return make_plan(study, preset, reason, {**overrides, **settings}, values, n_seeds, output, baseline_seeds)


def _check_preset(study: Study, preset: str) -> None:
    """Raise PlanError for a preset under which the study has no values of its axis, as a study of a file may."""
    if preset not in study.family.presets:  # the plan refuses it
        return
    try:
        study.get_grid(preset)
    except KeyError:
        raise PlanError(
            f"Study {study.name} has no values of {study.axis.setting} under preset {preset}: type --preset "
            f"{next(iter(study.axis.grids))}, or add values to its axis."
        ) from None


def _get_smoke_settings(study: Study) -> dict[str, object]:
    """The settings of --smoke. Raise PlanError for a study that declares none."""
    if not study.smoke_settings:
        raise PlanError(f"--smoke does not belong to study {study.name}: type --steps N for a short run.")
    return dict(study.smoke_settings)


def _collect_option_settings(study: Study, option_values: Mapping[str, object]) -> dict[str, object]:
    """Settings from the typed options. Raise PlanError for an option whose setting the study does not have."""
    known_fields = list_field_names(study.family.config_class)
    option_settings: dict[str, object] = {}
    for option, value in option_values.items():
        if value is None:
            continue
        if not set(OPTION_SETTINGS[option]) <= set(known_fields):
            raise PlanError(
                f"{option} does not belong to study {study.name}, which has no setting {OPTION_SETTINGS[option][0]}: "
                f"leave it out. `{format_command('settings', study.name, '--all')}` lists its settings."
            )
        option_settings |= dict.fromkeys(OPTION_SETTINGS[option], value)
    return option_settings


def _collect_game_settings(study: Study, options: RunOptions) -> dict[str, object]:
    """The settings that come with the game of --env. PlanError for a study or a game that does not have any."""
    games = study.family.games
    if options.game is None:
        return {}
    if not games:
        raise PlanError(f"--env does not belong to study {study.name}, which plays no game: leave it out.")
    is_own_game = parse_part_name(options.game) is not None
    if options.game not in games and not is_own_game:
        if options.game.endswith(".py"):
            raise PlanError(
                f"--env {format_value(options.game)} does not say which game of the file: type "
                f"--env {format_value(options.game)}:NAME, with the name of a class."
            )
        nearest = get_close_matches(options.game.lower(), games, n=1)
        raise PlanError(
            f"--env {format_value(options.game)} is not a game{f' (nearest: {nearest[0]})' if nearest else ''}: type "
            f"one of {', '.join(games)}, or a game of yours as {PART_FORM}."
        )
    if study.game and options.game != study.game:
        raise PlanError(
            f"--env does not belong to study {study.name}, whose arms are named after {study.game}: leave it out."
        )
    if is_own_game:
        return {**load_game_settings(options.game), "env.name": options.game}
    return study.family.make_game_settings(options.game, options.preset)


def _select_preset_settings(study: Study, options: RunOptions) -> dict[str, object]:
    """The further settings of the preset that the study has, without those in which its arms differ."""
    known_fields = list_field_names(study.family.config_class)
    return {
        name: value
        for name, value in options.preset_settings.items()
        if name in known_fields and name not in study.axis.swept_fields
    }


def _collect_filter_settings(study: Study, options: RunOptions) -> dict[str, object]:
    """Settings of the filter from their two options. The options are apart because few studies have them."""
    filter_settings = {
        "filter.rollout_filter_include_zero": _parse_include_zero(study, options.include_zero),
        "filter.rollout_filter_strategy": _parse_strategy(study, options.strategy),
    }
    return {name: value for name, value in filter_settings.items() if value is not None}


def parse_axis_values(study: Study, axis_texts: Mapping[str, str | None]) -> tuple[str, ...] | None:
    """The values that were typed for the study's axis, by its flag or by --values; None if none were typed.

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


def _parse_include_zero(study: Study, text: str | None) -> bool | None:
    """The value of --rollout_filter_include_zero. PlanError if the study has no filter, or if its axis sets this."""
    option = "--rollout_filter_include_zero"
    if text is None:
        return None
    if "filter.rollout_filter_include_zero" not in list_field_names(study.family.config_class):
        raise PlanError(f"{option} does not belong to study {study.name}, which filters no groups: leave it out.")
    if not study.has_include_zero_option:
        raise PlanError(
            f"{option} does not belong to study {study.name}, whose axis sets it: type {study.axis.option} "
            f"(the value nofilter is the arm in which it is True)."
        )
    return parse_bool(text, option)


def _parse_strategy(study: Study, text: str | None) -> str | None:
    """The filter strategy that --rollout_filter_strategy names. PlanError if the study does not have this option."""
    option = "--rollout_filter_strategy"
    if text is None:
        return None
    # Other studies that filter groups fix the strategy, which only --set changes.
    if not study.strategy_aliases:
        setting = "filter.rollout_filter_strategy"
        advice = (
            f"type --set {setting}=NAME" if setting in list_field_names(study.family.config_class) else "leave it out"
        )
        raise PlanError(f"{option} does not belong to study {study.name}: {advice}.")
    if text not in study.strategy_aliases:
        raise PlanError(
            f"{option} {format_value(text)} is not a strategy: type one of {', '.join(study.strategy_aliases)}."
        )
    return study.strategy_aliases[text]
