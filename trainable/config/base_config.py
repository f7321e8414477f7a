"""Base classes of sections of settings and of run configurations, with all that a driver reads of any study family."""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Self, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    ModelWrapValidatorHandler,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from trainable.config.schedules import (
    Controller,
    Schedule,
    is_controller,
    is_schedule,
    parse_controller,
    parse_schedule,
)
from trainable.config.setting_types import MAX_FLOAT, MAX_INTEGER, MIN_FLOAT, flatten_settings, format_value

EXECUTION_SETTINGS = (
    "logger",
    "ray_num_cpus",
    "resume_every",
    "resume_seconds",
    "save_freq",
    "disk_patience",
    "device",
)
"""Settings of the section `trainer` that change how a run is executed, but not the numbers that it computes."""


class SettingsSection(BaseModel):
    """An immutable group of settings that rejects unknown keys."""

    # `validate_default`: defaults are checked and converted like values that a user types.
    # `use_attribute_docstrings`: a description is the text below its field, unless it fits into the line of the field.
    # `protected_namespaces`: a setting may be called like a method of pydantic, such as model_name.
    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, use_attribute_docstrings=True, protected_namespaces=()
    )

    @model_validator(mode="after")
    def _check_number_range(self) -> Self:
        """Reject numbers that tensors cannot represent: integers beyond 32 bits, and floats beyond float32."""
        for name, field in type(self).model_fields.items():
            setting = getattr(self, name)
            for value in setting if isinstance(setting, tuple) else (setting,):
                if isinstance(value, int) and abs(value) > MAX_INTEGER:
                    raise ValueError(f"{name}={format_value(value)}: must be between -{MAX_INTEGER} and {MAX_INTEGER}")
                # Written so that NaN is rejected, too.
                if isinstance(value, float) and value and not MIN_FLOAT <= abs(value) <= MAX_FLOAT:
                    raise ValueError(
                        f"{name}={format_value(setting)}: must be a number of float32, in size from {MIN_FLOAT:.2g} to "
                        f"{MAX_FLOAT:.2g} (the default is {format_value(field.default)})"
                    )
        return self

    def list_rejections(self) -> dict[str, bool]:
        """List reasons why combinations of settings cannot be run, with what to set, and whether each applies here."""
        return {}

    @model_validator(mode="after")
    def _check_rejections(self) -> Self:
        for reason, applies in self.list_rejections().items():
            if applies:
                raise ValueError(reason)
        return self


class ReadCondition(NamedTuple):
    """A condition under which a run reads certain settings."""

    settings: str
    """A regular expression that matches their dotted names."""
    is_read: Callable[[Any], bool]
    """Checks whether a configuration reads them. Takes an instance of the family's configuration class."""
    advice: str
    """What to set so that they are read, or why they are not read."""


class BaseTrainerConfig(SettingsSection):
    """The settings of the section `trainer` that all families have, described in `sections.TrainerConfig`."""

    total_training_steps: int
    test_freq: int
    save_freq: int
    resume_every: int
    resume_seconds: float | None
    disk_patience: float
    device: str
    n_gpus_per_node: float
    ray_num_cpus: int
    logger: tuple[str, ...]

    @property
    def cpu_threads(self) -> int:
        """Threads with which a run without a GPU computes. It reserves as many CPUs."""
        return 1

    @property
    def has_ranks(self) -> bool:
        """Whether a run with several GPUs has a process per GPU, which the Trainable starts."""
        return True


class BaseRunConfig(SettingsSection):
    """All settings of a run.

    aliases: for each key of the published documents, the dotted field that it stands for. list_command: the command
    that lists the settings. unhashed_settings: for each section, the settings that the hash leaves out (logging,
    checkpoints and placement). conditions: which settings are read only if others have certain values.
    first_row_step: the step of a run's first row: 1 if rows describe trained steps, 0 if the untrained weights are
    measured, too. schedulable_settings: the dotted numbers that may have a schedule. declared_sections: sections whose
    settings a study declares.

    A setting with a schedule or controller holds its value in step 1, and `at_step` has the values of any step. Dumps
    contain the text of the schedule or controller, so that they can be validated again.
    """

    aliases: ClassVar[Mapping[str, str]] = MappingProxyType({})
    list_command: ClassVar[str] = "settings"
    unhashed_settings: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType({"trainer": EXECUTION_SETTINGS})

    conditions: ClassVar[tuple[ReadCondition, ...]] = ()

    first_row_step: ClassVar[int] = 1

    schedulable_settings: ClassVar[tuple[str, ...]] = ()
    declared_sections: ClassVar[frozenset[str]] = frozenset()

    _schedules: dict[str, Schedule | Controller] = PrivateAttr(default_factory=dict)

    seed: int
    trainer: BaseTrainerConfig

    @model_validator(mode="wrap")
    @classmethod
    def _read_schedules(cls, settings: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Replace schedules by their values in step 1, and store them."""
        if not isinstance(settings, Mapping):
            return handler(settings)
        first_values, schedules = dict(settings), dict[str, Schedule | Controller]()
        for name in cls.schedulable_settings:
            text = _find_entry(settings, name)
            if not is_schedule(text):
                continue
            try:
                schedule = parse_controller(text, name) if is_controller(text) else parse_schedule(text)
            except ValueError as error:
                raise ValueError(f"{name}={format_value(text)}: {error}") from None
            first_values = _replace_entry(first_values, name, schedule.compute_value(1))
            if isinstance(schedule, Controller) or len({value for _, value in schedule.points}) > 1:
                schedules[name] = schedule
        config = handler(first_values)
        if schedules:
            config._schedules = schedules
        return config

    @model_validator(mode="after")
    def _check_scheduled_values(self) -> Self:
        """Check the settings of every step, as if they were constant."""
        for step in self.scheduled_steps:
            type(self).model_validate(self.at_step(step).model_dump())
        return self

    @model_serializer(mode="wrap")
    def _write_schedules(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        settings: dict[str, Any] = handler(self)
        for name, schedule in self._schedules.items():
            settings = _replace_entry(settings, name, schedule.text)
        return settings

    @property
    def schedules(self) -> Mapping[str, Schedule | Controller]:
        """Schedules and controllers by dotted setting. A constant schedule is not one of them, but a number."""
        return self._schedules

    @property
    def controllers(self) -> dict[str, Controller]:
        """The controllers by dotted setting."""
        return {name: value for name, value in self._schedules.items() if isinstance(value, Controller)}

    @property
    def scheduled_steps(self) -> list[int]:
        """The steps whose settings stand for all steps (see `Schedule.checked_steps`); none without schedules."""
        return sorted({step for schedule in self._schedules.values() for step in schedule.checked_steps})

    def at_step(self, step: int, controlled_values: Mapping[str, float] = MappingProxyType({})) -> Self:
        """Return the settings of training step `step`, in which schedules and controllers are replaced by numbers.

        controlled_values: the values of settings with controllers in this step; without them, those of step 1.
        """
        config: Any = self
        for name, schedule in self._schedules.items():
            config = _replace_field(config, name, controlled_values.get(name, schedule.compute_value(step)))
        if self._schedules:
            config._schedules = {}
        return cast(Self, config)

    def get_row_steps(self, step: int) -> range:
        """Return the steps for which a run has rows after `step` training steps."""
        return range(1, step + 1)

    def find_unread_settings(self) -> dict[str, str]:
        """Find the settings that this run does not read: their dotted names, with the advice of their condition.

        Runs that differ only in these settings have the same rows.
        """
        if self._schedules:
            first, *others = (self.at_step(step).find_unread_settings() for step in self.scheduled_steps)
            return {name: advice for name, advice in first.items() if all(name in unread for unread in others)}
        unmet_conditions = [condition for condition in self.conditions if not condition.is_read(self)]
        names = tuple(flatten_settings(self.model_dump()))
        # Reversed, so that the first condition that matches a name decides: a dict keeps the last value of a key.
        advice = {
            name: condition.advice
            for condition in reversed(unmet_conditions)
            for name in _find_matches(condition.settings, names)
        }
        return {name: advice[name] for name in names if name in advice}

    def is_same_run(self, other: "BaseRunConfig") -> bool:
        """Check whether both configure the same run: they differ at most in number of steps, logging and placement.

        Rows do not depend on later steps, so a longer run continues from the checkpoints of the shorter one.
        """
        return self.seed == other.seed and self.compute_run_hash() == other.compute_run_hash()

    def compute_run_hash(self) -> str:
        """Compute a hash like `compute_hash`, but without the number of steps."""
        settings = self.dump_for_hash()
        del settings["trainer"]["total_training_steps"]
        return _hash_settings(settings)

    def dump_for_hash(self) -> dict[str, Any]:
        """Dump every setting that can change a result, except the seed."""
        dumped_settings = self.model_dump(mode="json", exclude={"seed"})
        for section, settings in self.unhashed_settings.items():
            for setting in settings:
                del dumped_settings[section][setting]
        return dumped_settings

    def compute_hash(self) -> str:
        """Hash every setting that can change a result into twelve hex digits, which identify the configuration.

        The seed and the placement of a run are left out. Placement changes the order of floating-point sums, and with
        it the last digits of a row, but a study may continue on other GPUs than it started on.
        """
        return _hash_settings(self.dump_for_hash())


@cache
def _find_matches(pattern: str, names: tuple[str, ...]) -> list[str]:
    """Find the names that a pattern matches. The arms of a study ask for the same ones."""
    return [name for name in names if re.fullmatch(pattern, name)]


def _find_entry(settings: object, name: str) -> Any:
    """Find the entry with a dotted name in nested mappings; None if there is none."""
    for key in name.split("."):
        settings = settings.get(key) if isinstance(settings, Mapping) else None
    return settings


def _replace_entry(settings: Mapping[str, Any], name: str, value: object) -> dict[str, Any]:
    """Replace the entry with a dotted name in nested mappings."""
    section, _, rest = name.partition(".")
    return {**settings, section: _replace_entry(settings.get(section, {}), rest, value) if rest else value}


def _replace_field(section: BaseModel, name: str, value: float) -> BaseModel:
    """Replace the field with a dotted name in nested sections, without validation."""
    field, _, rest = name.partition(".")
    return section.model_copy(update={field: _replace_field(getattr(section, field), rest, value) if rest else value})


def _hash_settings(settings: Mapping[str, Any]) -> str:
    # Sorted, so that the order of declaration does not matter. Twelve digits are 48 bits: enough to tell the arms of a
    # study apart, and short enough for tables.
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]
