"""Define a search over settings: its space, its points, and the study whose arms are the points."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from search_spaces.declaration.study import Axis, Study
from trainable.config.base_config import BaseRunConfig
from trainable.config.run_config import resolve_key
from trainable.config.schedules import split_values
from trainable.config.setting_types import flatten_settings, format_value
from trainable.families import Family, Settings
from trainable.runs.study_record import Dimension, Search
from tune_study.plan.errors import PlanError
from tune_study.plan.typed_settings import can_apply, check_varied

DEFAULT_POINT = "default"
"""The arm with the preset's settings: the first point of every search, and the one that others are compared with."""

FIRST_POINTS = 10
"""Number of points, including the default, that are drawn before results are used, as by default in Optuna."""

EXAMPLES = "--vary actor.lr=1e-5:1e-3:log, --vary algorithm.adv_estimator=gae,grpo"
_CONDITION_EXAMPLE = "'actor.kl_loss_coef=1e-3:1 if actor.use_kl_loss=True'"
LOG_RATIO = 10
"""An interval with positive ends that differ by at least this factor gets a log scale, unless a scale is typed."""


def name_point(number: int) -> str:
    """Name the arm of the point that is drawn as number `number`; number 0 is the default."""
    return f"point-{number}" if number else DEFAULT_POINT


def make_point_study(study: Study, points: Mapping[str, Settings]) -> Study:
    """Make a study whose arms are points (settings by arm). It equals `study` otherwise, but has a separate folder."""
    templates = replace(study, name=f"search-{study.name}", published_templates=None).name_templates
    return replace(
        study,
        question="Which settings are best, of those under which no run collapses?",
        axis=Axis("point", dict.fromkeys(study.family.presets, tuple(points)), "--points", named_settings=points),
        baseline=DEFAULT_POINT,
        baseline_seeds=1,
        published_templates=replace(templates, title=f"Search {study.name}", summary="point={arm}"),
        contrasts={},
        interactions={},
        variants={},
    )


def find_search_differences(old: Search, new: Search) -> list[str]:
    """List as `option: old -> new` what may not change once a search has begun, since later points depend on it."""
    pairs: Sequence[tuple[str, object, object]] = (
        ("--vary", describe_space(old.space), describe_space(new.space)),
        ("--objective", ",".join(old.objectives), ",".join(new.objectives)),
        ("--points-per-round", old.points_per_round, new.points_per_round),
        ("--search-seed", old.seed, new.seed),
        ("--asha", old.grace_steps, new.grace_steps),
    )
    return [f"{option}: {before} -> {after}" for option, before, after in pairs if before != after]


def describe_space(space: Sequence[Dimension]) -> str:
    """Describe the space as it can be typed, each dimension as a value of --vary."""
    return "; ".join(map(format_dimension, space))


def format_dimension(dimension: Dimension) -> str:
    """Format a dimension as a value of --vary.

    >>> format_dimension(Dimension("actor.lr", 1e-5, 1e-3, is_log=True))
    'actor.lr=1e-05:0.001:log'
    """
    text = ",".join(dimension.values)
    if not text:
        text = f"{dimension.low:g}:{dimension.high:g}:{'log' if dimension.is_log else 'linear'}"
    condition = f" if {'='.join(dimension.condition)}" if dimension.condition else ""
    return f"{dimension.setting}={text}{condition}"


def make_space(family: Family, base_config: BaseRunConfig, texts: Sequence[str]) -> tuple[Dimension, ...]:
    """Make the space of a search, with absolute intervals, from the values of --vary, or else from the family's space.

    base_config: the settings that all points share. Raises PlanError or ConfigError if a text is not a dimension, if a
    setting does not take a value, or if a condition can never be met.
    """
    if not texts and not family.search_space:
        raise PlanError(f"A search over this study needs the settings to change: type {EXAMPLES}, or similar.")
    dimensions = [dimension for text in texts for dimension in _parse(text, family)] or family.search_space
    # Two settings may depend on the same third one, which is then listed with both.
    space: list[Dimension] = []
    for declared in dict.fromkeys(dimensions):
        dimension = declared
        if not declared.values and declared.is_relative:  # to the setting of the base
            value = flatten_settings(base_config.at_step(1).model_dump(mode="json"))[declared.setting]
            dimension = replace(declared, low=declared.low * value, high=declared.high * value, is_relative=False)
        elif not declared.values:  # whole numbers if the setting takes no others
            takes_low, takes_half = (
                can_apply(base_config, _make_point(declared, f"{declared.low + step:g}")) for step in (0, 0.5)
            )
            are_whole = declared.low.is_integer() and declared.high.is_integer()
            dimension = replace(declared, is_integer=are_whole and takes_low and not takes_half)
        space.append(dimension)
    for number, dimension in enumerate(space):
        _check_condition(dimension, space[:number])
        for value in dimension.values or (f"{dimension.low:g}", f"{dimension.high:g}"):
            check_varied(base_config, _make_point(dimension, value))
    return tuple(space)


def _parse(text: str, family: Family) -> list[Dimension]:
    """Parse one --vary: KEY, KEY=LOW:HIGH[:SCALE] or KEY=VALUE,VALUE, the last two optionally with `if KEY=VALUE`."""
    body, _, condition_text = text.partition(" if ")
    key, sign, values_text = body.strip().partition("=")
    setting = resolve_key(key.strip(), family.config_class)
    if setting == "seed":
        raise PlanError("Seeds are not searched: type --seeds N for the number of seeds per point.")
    condition: tuple[str, str] | tuple[()] = ()
    if condition_text:
        condition_key, _, condition_value = map(str.strip, condition_text.partition("="))
        if not condition_value or not sign:
            raise PlanError(
                f"--vary {format_value(text)} has a condition and lacks a value: type it like {_CONDITION_EXAMPLE}."
            )
        condition = resolve_key(condition_key, family.config_class), condition_value
    if not sign:  # the dimensions that the family declares for the setting, and those on which they depend
        own = [dimension for dimension in family.search_space if dimension.setting == setting]
        if not own:
            names = ", ".join(dict.fromkeys(dimension.setting for dimension in family.search_space)) or "none"
            raise PlanError(
                f"--vary {format_value(text)} has no values, and only these settings have some of their own: {names}. "
                f"Type {EXAMPLES}, or similar."
            )
        settings = {setting, *(dimension.condition[0] for dimension in own if dimension.condition)}
        return [dimension for dimension in family.search_space if dimension.setting in settings]
    # The name of a plug-in has a colon as well, but a choice has at least one comma.
    if ":" in values_text and "," not in values_text:
        return [replace(_parse_interval(text, setting, values_text), condition=condition)]
    values = split_values(values_text)
    if len(values) < 2 or not all(values) or len(set(values)) < len(values):
        raise PlanError(
            f"--vary {format_value(text)} has neither an interval nor two different values: type {EXAMPLES}, or "
            "similar."
        )
    return [Dimension(setting, values=values, condition=condition)]


def _parse_interval(text: str, setting: str, values_text: str) -> Dimension:
    """Parse LOW:HIGH or LOW:HIGH:SCALE."""
    low_text, high_text, *rest = (field.strip() for field in values_text.split(":"))
    try:
        low, high = float(low_text), float(high_text)
    except ValueError:
        low = high = math.nan
    if not (math.isfinite(low) and math.isfinite(high) and low < high) or rest not in ([], [""], ["log"], ["linear"]):
        raise PlanError(
            f"--vary {format_value(text)} is not an interval: type KEY=LOW:HIGH, with :log or :linear if the scale "
            "matters, like actor.lr=1e-5:1e-3:log."
        )
    if rest == ["log"] and low <= 0:
        raise PlanError(f"--vary {format_value(text)}: a log scale has no 0: type a positive lower end, or :linear.")
    is_log = rest == ["log"] or (rest != ["linear"] and low > 0 and high / low >= LOG_RATIO)
    return Dimension(setting, low, high, is_log)


def _make_point(dimension: Dimension, value: str) -> dict[str, str]:
    """Make the settings of a point that has this value of a dimension and meets its condition."""
    condition = dict([dimension.condition]) if dimension.condition else {}
    return {**condition, dimension.setting: value}


def _check_condition(dimension: Dimension, earlier: Sequence[Dimension]) -> None:
    """Raise PlanError if the condition can never be met, or if a point could have two values of the setting."""
    condition = dimension.condition
    values = [value for other in earlier if condition and other.setting == condition[0] for value in other.values]
    if condition and condition[1] not in values:
        advice = f"its values are {', '.join(values)}" if values else f"type a --vary {condition[0]}=VALUE,VALUE before"
        raise PlanError(f"--vary {format_value(dimension.name)} can never be met: {advice}.")
    for other in earlier:
        # Only conditions on different values of one setting exclude each other.
        excludes = condition and other.condition and condition[0] == other.condition[0] and condition != other.condition
        if dimension.setting == other.setting and not excludes:
            raise PlanError(
                f"--vary has {format_value(dimension.setting)} twice, and a point could meet both: give it once, "
                "or under conditions on different values of one setting."
            )
