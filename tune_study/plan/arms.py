"""Find the arm that a command names."""

from collections.abc import Collection

from trainable.config.aliases import shorten_setting
from trainable.config.setting_types import format_value
from tune_study.plan.errors import PlanError


def find_arm(text: str, arms: Collection[str], setting: str | None, option: str = "--arm") -> str:
    """The arm called `text`: its value, such as 0.1 or 0.10, or the name that a report gives it, such as `KL 0.1`.

    arms: those of the study. setting: that of the study's axis; None without one. option: where the arm was typed.
    Raises PlanError, with the arms, if there is none of this name.
    """
    label = _simplify(shorten_setting(setting)) if setting else ""
    value = _simplify(text).removeprefix(label)
    equal_arms = [arm for arm in arms if _simplify(arm) == value or _is_same_number(arm, value)]
    arm = text if text in arms else next(iter(equal_arms), None)
    if arm is None:
        choices = ", ".join(map(format_value, arms))
        raise PlanError(f"There is no arm {format_value(text)}: type {option} with one of {choices}.")
    return arm


def _simplify(text: str) -> str:
    """Text without case, spaces and equals signs."""
    return "".join(text.lower().replace("=", " ").split())


def _is_same_number(text: str, other_text: str) -> bool:
    try:
        return float(text) == float(other_text)
    except ValueError:
        return False
