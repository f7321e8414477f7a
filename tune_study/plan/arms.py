"""Find the arm that a command names."""

from collections.abc import Collection

from trainable.config.aliases import shorten_setting
from trainable.config.setting_types import format_value
from tune_study.plan.errors import PlanError


def find_arm(text: str, arms: Collection[str], setting: str | None, option: str = "--arm") -> str:
    """The arm called `text`: its value, such as 0.1, or the name that a report gives it, such as `KL 0.1`.

    arms: those of the study. setting: that of the study's axis; None without one. option: where the arm was typed.
    Raises PlanError, with the arms, if there is none of this name.
    """
    names = {f"{shorten_setting(setting)} {arm}".lower(): arm for arm in arms} if setting else {}
    arm = text if text in arms else names.get(" ".join(text.lower().split()))
    if arm is None:
        choices = ", ".join(map(format_value, arms))
        raise PlanError(f"There is no arm {format_value(text)}: type {option} with one of {choices}.")
    return arm
