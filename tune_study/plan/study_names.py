"""Find studies and their arms by the names that users type."""

import difflib
import os
from collections.abc import Collection

from search_spaces.catalog import STUDIES, SUITES
from search_spaces.declaration.study import Study
from trainable.config.aliases import shorten_setting
from trainable.config.command_lines import format_command
from trainable.config.setting_types import format_value
from tune_study.plan.errors import PlanError


def normalize_study_name(name: str) -> str:
    """Normalize the typed name of a study or suite, which may have underscores and capital letters, like Top_P."""
    return name.replace("_", "-").lower()


def find_study(name: str, kl_type: str | None = None) -> Study:
    """Find the study `name` (see `normalize_study_name`). Raises PlanError that lists all studies if there is none.

    kl_type: value of --kl-type, which chooses a variant of the study; None for the variant that the study fixes.
    """
    study = STUDIES.get(normalize_study_name(name))
    if study is None:
        raise PlanError(f"There is no study `{format_value(name)}`.{_suggest_study(name)}")
    if kl_type is None:
        return study
    if not study.variants:
        advice = "type --set actor.kl_loss_type=NAME"
        # The KL loss differs between the arms of smoke-all, so --set would be refused as well.
        if "actor.kl_loss_type" in study.axis.swept_fields:
            advice = f"it has all of them; for one alone, type `run smoke --kl-type {format_value(kl_type)}`"
        raise PlanError(f"--kl-type does not belong to study {study.name}: {advice}.")
    if kl_type not in study.variants:
        raise PlanError(
            f"--kl-type {format_value(kl_type)} is not a KL loss of the grid: type one of {', '.join(study.variants)}."
        )
    return study.get_variant(kl_type)


def _suggest_study(name: str) -> str:
    """Suggest, after a space, what may be meant by a name that no study has, or list all names."""
    if "," in name:
        return " One command runs one study or one suite."
    if os.path.isfile(f"{name}.py"):  # pathlib raises an error if a name is too long
        return f" Did you mean the file {name}.py?"
    typed, names = normalize_study_name(name), [*STUDIES, *SUITES]
    # Results folders begin with the name of their study. In a short name, one wrong letter may be half of it.
    nearest = (
        difflib.get_close_matches(typed, names, 1, cutoff=0.9)
        or [known for known in names if typed.startswith(f"{known}-")][:1]
        or difflib.get_close_matches(typed, names)
        or difflib.get_close_matches(typed, names, 1, cutoff=0.5)
    )
    if nearest:
        return f" Nearest: {', '.join(nearest)}. All studies with their questions: {format_command('list')}"
    return (
        f" The studies are {', '.join(STUDIES)}: type one of them, for example `{format_command('run', 'kl')}`, or for "
        f"`run` a suite of studies: {', '.join(SUITES)}."
    )


def find_arm(text: str, arms: Collection[str], setting: str | None, option: str = "--arm") -> str:
    """Find an arm by its value, such as 0.1 or 0.10, or by its name in reports, such as `KL 0.1`.

    arms: the study's arms. setting: the axis of the study, if it is one setting. option: where the arm was typed.
    Raises PlanError, listing the arms, if there is none of this name.
    """
    label = _simplify(shorten_setting(setting)) if setting else ""
    value = _simplify(text).removeprefix(label)
    equal_arms = [arm for arm in arms if _simplify(arm) == value or is_same_number(arm, value)]
    arm = text if text in arms else next(iter(equal_arms), None)
    if arm is None:
        choices = ", ".join(map(format_value, arms))
        raise PlanError(f"There is no arm {format_value(text)}: type {option} with one of {choices}.")
    return arm


def _simplify(text: str) -> str:
    """Remove case, spaces and equals signs from a text."""
    return "".join(text.lower().replace("=", " ").split())


def parse_number(text: str) -> float | None:
    """Parse a number; None for other texts, and for numbers with `_`, which float() would accept."""
    try:
        return None if "_" in text else float(text)
    except ValueError:
        return None


def is_same_number(text: str, other_text: str) -> bool:
    """Check whether two texts are one number, as 0 and 0.0."""
    return (number := parse_number(text)) is not None and number == parse_number(other_text)
