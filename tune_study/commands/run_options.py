"""Turn a request of the command `run` into a study's plan: its settings, axis values and folder."""

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
from tune_study.commands.requests import RunRequest, list_assigned_settings
from tune_study.folder import locate
from tune_study.folder.study_file import read_study
from tune_study.placement.model_files import make_absolute
from tune_study.placement.resources import TORCH_SETTINGS, find_compiled_obstacle
from tune_study.plan.errors import PlanError
from tune_study.plan.own_study import StudySource, is_study_file, load_game_settings, load_named_files, load_own_study
from tune_study.plan.study_plan import StudyPlan, make_plan, set_max_seeds
from tune_study.plan.typed_settings import (
    collect_overrides,
    expand_groups,
    find_study,
    normalize_study_name,
    parse_values,
)

VALUES_OPTION = "--values"
"""The option for the values of any study's axis; some studies have a published one in addition."""
DEFAULT_MAX_SEEDS = 20


class ChosenPreset(NamedTuple):
    """The typed or default preset, why it was chosen, and further settings for it."""

    name: str
    reason: str
    settings: Mapping[str, object] = MappingProxyType({})


def find_studies(name: str, kl_type: str | None, accepts_change: bool) -> list[tuple[Study, StudySource | None]]:
    """Find a study, or those of a suite, by its name or its file, each with its source if a file declares it.

    kl_type: see `find_study`. accepts_change: see `StudySource`. Raises PlanError if there is no such study.
    """
    suite = SUITES.get(normalize_study_name(name))
    is_file = is_study_file(name)
    if kl_type is not None and (is_file or suite is not None):
        raise PlanError(f"--kl-type does not belong to {format_value(name, 1000)}: leave it out.")
    if is_file:
        return [load_own_study(name, accepts_change)]
    if accepts_change:
        raise PlanError(f"--accept-changed-file does not belong to {name}, which no file declares: leave it out.")
    return [(find_study(name, kl_type), None)] if suite is None else [(STUDIES[study], None) for study in suite]


def plan_from_options(
    study: Study,
    preset: ChosenPreset,
    request: RunRequest,
    source: StudySource | None = None,
    complete: Callable[[StudyPlan], StudyPlan] = lambda plan: plan,
) -> StudyPlan:
    """Plan a study, merged with the study that its folder may already contain. A dry run does not access the storage.

    preset: the preset; the one in `request` is ignored. source: the file that declares the study; None for a study of
    this package. complete: changes the plan before it is merged with the study in the folder.

    Raises PlanError or ConfigError if the study cannot be run.
    """
    _check_preset(study, preset.name)
    values = parse_axis_values(study, request)
    known_settings = list_field_names(study.family.config_class)
    game_settings = _collect_game_settings(study, request.env, preset.name)
    # Except those in which the arms differ.
    preset_settings = {
        name: value
        for name, value in preset.settings.items()
        if name in known_settings and name not in study.axis.swept_fields
    }
    option_settings = _collect_option_settings(study, request)
    # Typed settings take precedence over the game's.
    typed_settings = collect_overrides(study, option_settings, request.list_assignments())
    overrides = {**game_settings, **preset_settings, **typed_settings}
    if preset.name in study.family.presets:  # the plan refuses others
        load_named_files(study, source.path if source else "", values, preset.name, overrides.values())
    # The processes of runs have other working folders, where a relative path would not be found.
    for setting in overrides.keys() & {*study.family.model_settings, *study.family.path_settings}:
        if overrides[setting] is not None:
            overrides[setting] = make_absolute(str(overrides[setting]))
    n_seeds = request.seeds
    if request.smoke:
        if not study.smoke_settings:
            raise PlanError(f"--smoke does not belong to study {study.name}: type --steps N for a short run.")
        # Typed settings and seeds take precedence over --smoke.
        overrides = {**study.smoke_settings, **overrides}
        n_seeds = 1 if n_seeds is None else n_seeds
    output = Path(os.path.abspath(os.path.expanduser(request.output)))

    def make_plan_with(settings: Mapping[str, object], reason: str) -> StudyPlan:
        all_overrides = {**overrides, **settings}
        return make_plan(study, preset.name, reason, all_overrides, values, n_seeds, output, request.baseline_seeds)

    try:
        plan = make_plan_with({}, preset.reason)
        torch_settings, reason = _choose_torch(plan, overrides)
        if torch_settings:
            plan = make_plan_with(torch_settings, preset.reason + reason)
    except ConfigError as error:
        # A problem of `--steps 0` names the option, not the setting that it sets.
        problem = str(error)
        for option, setting, value in list_assigned_settings(request):
            problem = problem.replace(f"{setting}={value}:", f"{option} {value}:")
        raise ConfigError(problem) from None
    storage = None if request.storage is None else locate.parse_storage_uri(request.storage)
    plan = complete(replace(plan, storage=storage, source=source))
    plan = locate.merge_with_existing(plan, request.extend, is_real=not request.dry_run)
    if not request.until_resolved and request.max_seeds is not None:
        raise PlanError("--max-seeds belongs to --until-resolved: type both, or neither.")
    if not request.until_resolved and plan.max_seeds is None:
        return plan
    from analysis.stats.sequential import find_fewest_seeds  # imports SciPy

    # Without --max-seeds, a study keeps the maximum that it has.
    max_seeds = request.max_seeds or plan.max_seeds or DEFAULT_MAX_SEEDS
    return set_max_seeds(plan, max_seeds, find_fewest_seeds(max(len(plan.values) - 1, 1)))


def _choose_torch(plan: StudyPlan, overrides: Mapping[str, object]) -> tuple[Mapping[str, object], str]:
    """Choose torch if the preset's compiled code cannot run an arm: return its settings and the reason, else nothing.

    A study that is already in the folder keeps the code with which it began. Typed settings are never replaced:
    compiled code is then used or refused.
    """
    settings = {name: value for name, value in TORCH_SETTINGS.items() if name not in overrides}
    if plan.model is None or not settings:
        return {}, ""
    if (plan.folder / STUDY_FILE).exists():
        recorded_settings = flatten_settings(read_study(plan.folder).settings)
        return {name: recorded_settings[name] for name in settings if name in recorded_settings}, ""
    obstacle = find_compiled_obstacle(plan.ppo_configs, os.environ)
    return (settings, f"; torch instead of compiled code: {obstacle}") if obstacle else ({}, "")


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


def _collect_option_settings(study: Study, request: RunRequest) -> dict[str, object]:
    """Collect the settings of the typed options. Raises PlanError for a setting that the study does not have."""
    known_settings = list_field_names(study.family.config_class)
    option_settings: dict[str, object] = {}
    for option, setting, value in list_assigned_settings(request):
        if setting not in known_settings:
            raise PlanError(
                f"{option} does not belong to study {study.name}, which has no setting {setting}: leave it out. "
                f"`{format_command('settings', study.name, '--all')}` lists its settings."
            )
        is_strategy = setting == "filter.rollout_filter_strategy"
        option_settings[setting] = study.strategy_aliases.get(value, value) if is_strategy else value
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


def parse_axis_values(study: Study, request: RunRequest) -> tuple[str, ...] | None:
    """Parse the typed values of the study's axis, from its flag or --values; None if none were typed.

    Raises PlanError for a flag of another study's axis, and if both options were typed.
    """
    flags = dict.fromkeys((VALUES_OPTION, *(known.axis.option for known in STUDIES.values())))
    texts = {flag: getattr(request, flag.removeprefix("--").replace("-", "_"), None) for flag in flags}
    typed_texts = {flag: text for flag, text in texts.items() if text is not None}
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
