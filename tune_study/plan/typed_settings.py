"""Find studies and arms by the names that users type, and parse typed values, settings and files of settings."""

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from search_spaces.catalog import STUDIES, SUITES, TRAINERS, get_declaration
from search_spaces.declaration.study import Study
from trainable.config.base_config import BaseRunConfig
from trainable.config.command_lines import format_command
from trainable.config.run_config import ConfigError, apply_overrides, resolve_key
from trainable.config.schedules import split_values
from trainable.config.setting_types import format_value
from tune_study.plan.errors import PlanError


def expand_groups(study: Study, entries: Sequence[str]) -> tuple[str, ...]:
    """Replace names of groups of values by their members, and keep names of arms.

    An arm that was typed in addition to its group counts once. In studies without groups, entries are unchanged. Raises
    PlanError for an unknown name.
    """
    value_groups = study.axis.value_groups
    if not value_groups:
        return tuple(entries)
    arms = dict.fromkeys(value for grid in study.axis.grids.values() for value in grid)
    for entry in entries:
        if entry not in value_groups and entry not in arms:
            raise PlanError(
                f"{study.axis.option} {format_value(entry)} is not a group: type one or more of "
                f"{','.join(value_groups)}, or names of arms, which --dry-run lists in its column `arm`."
            )
    selected_values = {value for entry in entries for value in value_groups.get(entry, (entry,))}
    # In the grid's order, not the typed one.
    return tuple(value for value in arms if value in selected_values)


def parse_values(text: str, option: str) -> tuple[str, ...]:
    """Parse the comma-separated list of an option, without blanks. Raises PlanError if an entry is empty."""
    values = split_values(text)
    if not all(values):
        raise PlanError(
            f"{option} '{format_value(text)}' has an empty entry: type values separated by single commas, like "
            f"0,0.01,0.1."
        )
    return values


def collect_overrides(
    study: Study, options: Mapping[str, object], assignments: Iterable[str], is_axis_free: bool = False
) -> dict[str, object]:
    """Collect the settings of `options` (values by setting) and of each --set (`key=value`).

    is_axis_free: whether settings of the axis are allowed, as for a probe, which has no option for them. Raises
    PlanError if one is set twice or belongs to the axis.
    """
    overrides: dict[str, object] = dict(options)
    for assignment in assignments:
        key, sign, value = assignment.partition("=")
        if not sign:
            raise PlanError(
                f"--set '{format_value(assignment)}' has no value: type --set key=value, like --set actor.lr=1e-5."
            )
        name = resolve_key(key.strip(), study.family.config_class)
        if name == "seed":  # without effect, since every run has its own seed
            raise PlanError("`seed` is not a setting of a study: type --seeds N to run the seeds 0 to N-1.")
        if name in overrides:
            raise PlanError(f"`{name}` is given twice (`{format_value(assignment)}` is the second): give it once.")
        overrides[name] = value.strip()
    for name in set() if is_axis_free else study.axis.swept_fields & overrides.keys():
        raise PlanError(
            f"The arms of study {study.name} differ in `{name}`: choose its values with {study.axis.option}."
        )
    for name, setting in overrides.items():
        text, texts = str(setting), split_values(str(setting))
        if name in options or len(texts) == 1:
            continue
        base = study.family.config_class.model_validate({})
        if not can_apply(base, {name: text}) and all(
            can_apply(base, {name: value}) for value in texts
        ):  # the setting takes each value but not the list
            study_name = f"my-{name.rpartition('.')[2]}".replace("_", "-")
            command = format_command("new", study_name, "--vary", f"{name}={','.join(texts)}")
            raise PlanError(
                f"--set {name}={format_value(text)}: a setting has one value in all arms. To compare several, declare "
                f"a study of them: `{command}`."
            )
    return overrides


def can_apply(base_config: BaseRunConfig, settings: Mapping[str, object]) -> bool:
    """Check whether a configuration accepts these settings."""
    try:
        apply_overrides(base_config, settings)
    except ConfigError:
        return False
    return True


def check_varied(base_config: BaseRunConfig, settings: Mapping[str, object]) -> None:
    """Raise ConfigError, naming all of them, if settings of --vary cannot be used together."""
    try:
        apply_overrides(base_config, settings)
    except ConfigError as error:
        shown = " ".join(f"{setting}={format_value(value)}" for setting, value in settings.items())
        raise ConfigError(f"--vary: {shown} cannot be used: {error}") from None


def format_values(study: Study, values: Sequence[str]) -> str:
    """Format the values of an axis as text; if it has groups, as the number of arms of each group."""
    value_groups = study.axis.value_groups
    if not value_groups:
        return ",".join(values)
    counts = {group: len(set(values).intersection(arms)) for group, arms in value_groups.items()}
    return ", ".join(f"group {group} ({count} arms)" for group, count in counts.items() if count)


def normalize_study_name(name: str) -> str:
    """Normalize the typed name of a study or suite, which may have underscores and capital letters, like Top_P."""
    return name.replace("_", "-").lower()


def find_study(name: str, kl_type: str | None = None, trainer: str | None = None) -> Study:
    """Find the study `name` (see `normalize_study_name`). Raises PlanError that lists all studies if there is none.

    trainer: value of --trainer, the trainer of somebody else; None for ours. kl_type: value of --kl-type, which chooses
    a variant of the study; None for the variant that the study fixes.
    """
    name = normalize_study_name(name) if trainer is None else f"{normalize_study_name(name)}-{trainer}"
    study = get_declaration(name)
    if study is None and trainer is not None:
        choices = ", ".join(f"{stem} --trainer {known}" for known, (_, stems) in TRAINERS.items() for stem in stems)
        raise PlanError(f"No study has this name and --trainer {format_value(trainer)}: type one of {choices}.")
    if study is None:
        problem = f"There is no study `{format_value(name)}`."
        if nearest := difflib.get_close_matches(normalize_study_name(name), [*STUDIES, *SUITES]):
            advice = f"Nearest: {', '.join(nearest)}. All studies with their questions: {format_command('list')}"
            raise PlanError(f"{problem} {advice}")
        raise PlanError(
            f"{problem} The studies are {', '.join(STUDIES)}: type one of them, for example "
            f"`{format_command('run', 'kl')}`, or for `run` a suite of studies: {', '.join(SUITES)}."
        )
    if kl_type is None:
        return study
    if not study.variants:
        raise PlanError(f"--kl-type does not belong to study {study.name}: type --set actor.kl_loss_type=NAME.")
    if kl_type not in study.variants:
        raise PlanError(
            f"--kl-type {format_value(kl_type)} is not a KL loss of the grid: type one of {', '.join(study.variants)}."
        )
    return study.get_variant(kl_type)


def find_arm(text: str, arms: Collection[str], option: str = "--arm") -> str:
    """Find an arm by its value, such as 0.1 or 0.10. option: where it was typed.

    Raises PlanError, listing the arms, if there is none of this value.
    """
    arm = text if text in arms else next((arm for arm in arms if is_same_number(arm, text)), None)
    if arm is None:
        choices = ", ".join(map(format_value, arms))
        raise PlanError(f"There is no arm {format_value(text)}: type {option} with one of {choices}.")
    return arm


def parse_number(text: str) -> float | None:
    """Parse a number; None for other texts, and for numbers with `_`, which float() would accept."""
    try:
        return None if "_" in text else float(text)
    except ValueError:
        return None


def is_same_number(text: str, other_text: str) -> bool:
    """Check whether two texts are one number, as 0 and 0.0."""
    return (number := parse_number(text)) is not None and number == parse_number(other_text)


def merge_assignments(files: Iterable[Path], typed: Iterable[str]) -> tuple[str, ...]:
    """Merge the `key=value` lines of files with typed assignments, which take precedence.

    Empty lines and text after a `#` are ignored. A setting that is given twice is refused later. Raises PlanError,
    naming file and line, if a file cannot be read or a line has another form.
    """
    typed = tuple(typed)
    typed_keys = {assignment.partition("=")[0].strip() for assignment in typed}
    assignments: list[str] = []
    for path in files:
        name = f"--config {format_value(str(path), 1000)}"
        try:
            text = path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(
                f"{name} cannot be read ({error}): type a text file with a line key=value per setting."
            ) from None
        for number, line in enumerate(text.splitlines(), 1):
            key, sign, value = (part.strip() for part in line.partition("#")[0].partition("="))
            if not sign and not key:
                continue
            if not key or not value:
                raise PlanError(
                    f"{name}, line {number}: {format_value(line.strip())} is not key=value, such as actor.lr=1e-5."
                )
            if key not in typed_keys:
                assignments.append(f"{key}={value}")
    return (*assignments, *typed)
