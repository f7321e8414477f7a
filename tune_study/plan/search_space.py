"""Make the space of a search from --vary or the study's family, under the settings of a preset."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from trainable.config.aliases import flatten_settings
from trainable.config.base_config import BaseRunConfig
from trainable.config.run_config import resolve_key
from trainable.config.setting_types import format_value
from trainable.families import Family
from trainable.runs.study_record import Dimension
from tune_study.plan.errors import PlanError
from tune_study.plan.typed_settings import can_apply, check_varied

EXAMPLES = "--vary actor.lr=1e-5:1e-3:log, --vary algorithm.adv_estimator=gae,grpo"
_SCALES = {"": None, "log": True, "linear": False}
LOG_RATIO = 10
"""An interval with positive ends that differ by at least this factor gets a log scale, unless a scale is typed."""


def make_space(family: Family, base_config: BaseRunConfig, texts: Sequence[str]) -> tuple[Dimension, ...]:
    """Make the space of a search, with absolute intervals.

    Args:
        family: family of the study.
        base_config: the settings that all points share.
        texts: the values of --vary; if empty, the family's space is used.

    Raises PlanError or ConfigError if a text is not a dimension, if a setting does not take a value, or if a condition
    can never be met.
    """
    settings = flatten_settings(base_config.model_dump(mode="json"))
    if not texts:
        if not family.search_space:
            raise PlanError(f"A search over this study needs the settings to change: type {EXAMPLES}, or similar.")
        dimensions = list(family.search_space)
    else:
        # Two settings may depend on the same third one, which is then listed with both.
        dimensions = list(dict.fromkeys(dimension for text in texts for dimension in _parse(text, family)))
    space = tuple(_resolve(dimension, base_config, settings) for dimension in dimensions)
    names = [dimension.name for dimension in space]
    if duplicates := [name for number, name in enumerate(names) if name in names[:number]]:
        raise PlanError(f"--vary has {format_value(duplicates[0])} twice: give it once.")
    _check_overlaps(space)
    for number, dimension in enumerate(space):
        _check_condition(dimension, space[:number])
        for value in dimension.values or (f"{dimension.low:g}", f"{dimension.high:g}"):
            check_varied(base_config, _make_point(dimension, value))
    return space


def _parse(text: str, family: Family) -> list[Dimension]:
    """Parse one --vary: KEY, KEY=LOW:HIGH[:SCALE] or KEY=VALUE,VALUE, the last two optionally with `if KEY=VALUE`."""
    body, _, condition_text = text.partition(" if ")
    key, sign, values_text = body.strip().partition("=")
    setting = resolve_key(key.strip(), family.config_class)
    if setting == "seed":
        raise PlanError("Seeds are not searched: type --seeds N for the number of seeds per point.")
    condition = _parse_condition(text, condition_text, family) if condition_text else ()
    if not sign:
        if condition:
            raise PlanError(
                f"--vary {format_value(text)} has a condition and no values: type them, like "
                "'actor.kl_loss_coef=1e-3:1 if actor.use_kl_loss=True'."
            )
        return _find_declared(text, setting, family)
    # The name of a plug-in has a colon as well, but a choice has at least one comma.
    if ":" in values_text and "," not in values_text:
        low, high, is_log = _parse_interval(text, values_text)
        return [Dimension(setting, low, high, is_log, condition=condition)]
    values = tuple(value.strip() for value in values_text.split(","))
    if len(values) < 2 or not all(values) or len(set(values)) < len(values):
        raise PlanError(
            f"--vary {format_value(text)} has neither an interval nor two different values: type {EXAMPLES}, or "
            "similar."
        )
    return [Dimension(setting, values=values, condition=condition)]


def _find_declared(text: str, setting: str, family: Family) -> list[Dimension]:
    """Find the dimensions that the family declares for a setting, and those on which they depend."""
    dimensions = [dimension for dimension in family.search_space if dimension.setting == setting]
    if not dimensions:
        names = ", ".join(dict.fromkeys(dimension.setting for dimension in family.search_space)) or "none"
        raise PlanError(
            f"--vary {format_value(text)} has no values, and only these settings have some of their own: {names}. Type "
            f"{EXAMPLES}, or similar."
        )
    conditions = {dimension.condition[0] for dimension in dimensions if dimension.condition}
    return [
        dimension for dimension in family.search_space if dimension.setting in conditions or dimension in dimensions
    ]


def _parse_condition(text: str, condition_text: str, family: Family) -> tuple[str, str]:
    key, sign, value = condition_text.strip().partition("=")
    if not sign or not value.strip():
        raise PlanError(
            f"--vary {format_value(text)} has a condition without a value: type it like "
            "'actor.kl_loss_coef=1e-3:1 if actor.use_kl_loss=True'."
        )
    return resolve_key(key.strip(), family.config_class), value.strip()


def _parse_interval(text: str, values_text: str) -> tuple[float, float, bool]:
    """Parse LOW:HIGH or LOW:HIGH:SCALE into (low, high, is_log)."""
    low_text, high_text, *rest = (field.strip() for field in values_text.split(":"))
    scale = rest[0] if rest else ""
    try:
        low, high = float(low_text), float(high_text)
    except ValueError:
        low = high = math.nan
    if not (math.isfinite(low) and math.isfinite(high) and low < high) or len(rest) > 1 or scale not in _SCALES:
        raise PlanError(
            f"--vary {format_value(text)} is not an interval: type KEY=LOW:HIGH, with :log or :linear if the scale "
            "matters, like actor.lr=1e-5:1e-3:log."
        )
    if scale == "log" and low <= 0:
        raise PlanError(f"--vary {format_value(text)}: a log scale has no 0: type a positive lower end, or :linear.")
    is_log = _SCALES[scale]
    return low, high, (low > 0 and high / low >= LOG_RATIO) if is_log is None else is_log


def _resolve(dimension: Dimension, base_config: BaseRunConfig, settings: Mapping[str, Any]) -> Dimension:
    """Convert the interval to the setting's units, with whole numbers if the setting takes no others."""
    if dimension.values:
        return dimension
    if dimension.is_relative:
        value = settings[dimension.setting]
        return replace(dimension, low=dimension.low * value, high=dimension.high * value, is_relative=False)
    are_whole = dimension.low.is_integer() and dimension.high.is_integer()
    is_integer = are_whole and not can_apply(base_config, _make_point(dimension, f"{dimension.low + 0.5:g}"))
    return replace(
        dimension, is_integer=is_integer and can_apply(base_config, _make_point(dimension, f"{dimension.low:g}"))
    )


def _make_point(dimension: Dimension, value: str) -> dict[str, str]:
    """Make the settings of a point that has this value of a dimension and meets its condition."""
    condition = dict([dimension.condition]) if dimension.condition else {}
    return {**condition, dimension.setting: value}


def _check_condition(dimension: Dimension, earlier: Sequence[Dimension]) -> None:
    """Raise PlanError unless the dimension of the condition comes earlier and has the value."""
    if not dimension.condition:
        return
    setting, value = dimension.condition
    values = [value for other in earlier if other.setting == setting for value in other.values]
    if value not in values:
        advice = f"its values are {', '.join(values)}" if values else f"type a --vary {setting}=VALUE,VALUE before it"
        raise PlanError(f"--vary {format_value(dimension.name)} can never be met: {advice}.")


def _check_overlaps(space: Sequence[Dimension]) -> None:
    """Raise PlanError if a point could have two values of one setting."""
    for number, dimension in enumerate(space):
        for other in space[:number]:
            # Only conditions on different values of one setting exclude each other.
            excludes = dimension.condition and other.condition and dimension.condition[0] == other.condition[0]
            if dimension.setting == other.setting and not excludes:
                raise PlanError(
                    f"--vary has {format_value(dimension.setting)} twice, and a point could meet both: give it once, "
                    "or under conditions on different values of one setting."
                )
