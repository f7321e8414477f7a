"""Base classes: of a section of settings, and of the configurations of all study families, with what a driver reads."""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, model_validator

from trainable.config.aliases import flatten_settings
from trainable.config.setting_types import MAX_FLOAT, MAX_INTEGER, MIN_FLOAT, format_value

EXECUTION_SETTINGS = (
    "logger",
    "ray_num_cpus",
    "resume_every",
    "resume_seconds",
    "save_freq",
    "disk_patience",
    "device",
)
"""Settings of the section `trainer` that decide how a run is executed, and not which numbers it computes."""


class SettingsSection(BaseModel):
    """A group of settings that cannot be changed and refuses unknown keys."""

    # `validate_default`: a default is checked and converted like a value that a user types.
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    @model_validator(mode="after")
    def _check_number_range(self) -> Self:
        """Refuse numbers that tensors cannot represent: integers beyond 32 bits, and floats that float32 cannot hold.

        This covers every setting, so that no field can be forgotten. Thresholds and durations do not enter float32
        arithmetic, but they do not need other numbers either.
        """
        for name, field in type(self).model_fields.items():
            setting = getattr(self, name)
            for value in setting if isinstance(setting, tuple) else (setting,):
                if isinstance(value, int) and abs(value) > MAX_INTEGER:
                    raise ValueError(f"{name}={format_value(value)}: must be between -{MAX_INTEGER} and {MAX_INTEGER}")
                # Written so that NaN is refused as well.
                if isinstance(value, float) and value and not MIN_FLOAT <= abs(value) <= MAX_FLOAT:
                    raise ValueError(
                        f"{name}={format_value(setting)}: must be a number of float32, in size from {MIN_FLOAT:.2g} to "
                        f"{MAX_FLOAT:.2g} (the default is {format_value(field.default)})"
                    )
        return self


class ReadCondition(NamedTuple):
    """When a run reads some of its settings."""

    settings: str
    """A regular expression that matches their dotted names."""
    is_read: Callable[[Any], bool]
    """Returns whether a configuration reads them. Its argument is of the class of the family."""
    advice: str
    """What has to be set for that, or why they are not read."""


class BaseTrainerConfig(SettingsSection):
    """The settings of the section `trainer` that all families have.

    total_training_steps: steps per run. test_freq: steps between two evaluations. save_freq: steps between two saved
    checkpoints, -1 for none. resume_every: steps between two rolling checkpoints. resume_seconds: seconds of training
    after which there is a rolling checkpoint earlier than that, or None. disk_patience: seconds that a run waits while
    the disk is full. device: auto, cpu or cuda. n_gpus_per_node: GPUs per trial. ray_num_cpus: CPUs given
    to Ray. logger: where rows are logged in addition to their files.
    """

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


class BaseRunConfig(SettingsSection):
    """All settings of a run.

    aliases: for each key of the published documents, the dotted field that it stands for. list_command: the command
    that lists the settings. unhashed_settings: for each section, the settings that are not part of the hash, which are
    those of logging, checkpoints and placement. conditions: which settings are read only under which others.
    first_row_step: the step of a run's first row. It is 1 if rows describe trained steps, and 0 if weights are measured
    before they are trained.
    """

    aliases: ClassVar[Mapping[str, str]] = MappingProxyType({})
    list_command: ClassVar[str] = "settings"
    unhashed_settings: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType({"trainer": EXECUTION_SETTINGS})

    conditions: ClassVar[tuple[ReadCondition, ...]] = ()

    first_row_step: ClassVar[int] = 1

    seed: int
    trainer: BaseTrainerConfig

    def get_row_steps(self, step: int) -> range:
        """The steps of the rows that a run has after `step` training steps."""
        return range(1, step + 1)

    def find_unread_settings(self) -> dict[str, str]:
        """The settings that this run does not read, by dotted name, with the advice of their condition.

        Runs that differ in nothing else have the same rows.
        """
        unmet_conditions = [condition for condition in self.conditions if not condition.is_read(self)]
        return {
            name: condition.advice
            for name in flatten_settings(self.model_dump())
            # The first condition decides: the last entry of a name in a dict is the one that stays.
            for condition in reversed(unmet_conditions)
            if re.fullmatch(condition.settings, name)
        }

    def is_same_run(self, other: "BaseRunConfig") -> bool:
        """Whether both configure one run: they differ at most in its number of steps and in its placement.

        A row depends on no step after it, so a run that was made longer goes on from the states of the shorter one.
        """
        return self.seed == other.seed and self.compute_run_hash() == other.compute_run_hash()

    def compute_run_hash(self) -> str:
        """The hash of what makes a run that run: `compute_hash` without the number of steps."""
        settings = self.dump_for_hash()
        del settings["trainer"]["total_training_steps"]
        return _hash_settings(settings)

    def dump_for_hash(self) -> dict[str, Any]:
        """Every setting that can change a result, without the seed."""
        dumped_settings = self.model_dump(mode="json", exclude={"seed"})
        for section, settings in self.unhashed_settings.items():
            for setting in settings:
                del dumped_settings[section][setting]
        return dumped_settings

    def compute_hash(self) -> str:
        """Twelve hex digits that identify the configuration: a hash of every setting that can change a result.

        Neither the seed nor the placement of a run is hashed. Placement changes the order of floating-point sums, and
        with it the last digits of a row, but a study can be continued on other GPUs than those it was started on.
        """
        return _hash_settings(self.dump_for_hash())


def _hash_settings(settings: Mapping[str, Any]) -> str:
    # Sorted, so that the order in which settings are declared does not matter. Twelve digits are 48 bits: enough to
    # tell the arms of a study apart, and short enough for tables.
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]
