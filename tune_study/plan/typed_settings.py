"""Parse axis values and settings as they are typed on the command line."""

from collections.abc import Iterable, Mapping, Sequence

from search_spaces.declaration.study import Study
from trainable.config.base_config import BaseRunConfig
from trainable.config.command_lines import format_command
from trainable.config.run_config import ConfigError, apply_overrides, resolve_key
from trainable.config.setting_types import format_value
from tune_study.plan.errors import PlanError


def expand_groups(study: Study, entries: Sequence[str]) -> tuple[str, ...]:
    """Replace names of groups of values by their members, and keep names of arms.

    An arm that was typed in addition to its group counts once. In studies without groups, entries are unchanged. Raises
    PlanError for an unknown name, and for an entry that is given twice.
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
    if duplicates := [entry for number, entry in enumerate(entries) if entry in entries[:number]]:
        raise PlanError(f"{study.axis.option} has {format_value(duplicates[0])} twice: give each group once.")
    selected_values = {value for entry in entries for value in value_groups.get(entry, (entry,))}
    # In the grid's order, not the typed one.
    return tuple(value for value in arms if value in selected_values)


def parse_values(text: str, option: str) -> tuple[str, ...]:
    """Parse the comma-separated list of an option, without blanks. Raises PlanError if an entry is empty."""
    values = tuple(entry.strip() for entry in text.split(","))
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
            raise PlanError(
                f"`{name}` is given twice (`--set {format_value(assignment)}` is the second): give it once."
            )
        overrides[name] = value.strip()
    for name in set() if is_axis_free else study.axis.swept_fields & overrides.keys():
        raise PlanError(
            f"The arms of study {study.name} differ in `{name}`: choose its values with {study.axis.option}."
        )
    for name, setting in overrides.items():
        if name not in options:
            _refuse_grid(study, name, str(setting))
    return overrides


def _refuse_grid(study: Study, name: str, text: str) -> None:
    """Raise PlanError for a comma-separated list if the setting takes each value but not the list."""
    texts = [part.strip() for part in text.split(",")]
    if len(texts) == 1:
        return
    base = study.family.config_class.model_validate({})
    if not can_apply(base, {name: text}) and all(can_apply(base, {name: value}) for value in texts):
        study_name = f"my-{name.rpartition('.')[2]}".replace("_", "-")
        command = format_command("new", study_name, "--vary", f"{name}={','.join(texts)}")
        raise PlanError(
            f"--set {name}={format_value(text)}: a setting has one value in all arms. To compare several, declare a "
            f"study of them: `{command}`."
        )


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
