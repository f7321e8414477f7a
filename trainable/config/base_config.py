"""Base class of the configurations of all study families: the fields with which a driver plans and names runs."""

import hashlib
import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from trainable.config.section import Section

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


class BaseTrainerConfig(Section):
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


class BaseRunConfig(Section):
    """All settings of a run.

    aliases: for each key of the published documents, the dotted field that it stands for. list_command: the command
    that lists the settings. unhashed_settings: for each section, the settings that are not part of the hash, which are
    those of logging, checkpoints and placement.
    first_row_step: the step of a run's first row. It is 1 if rows describe trained steps, and 0 if weights are measured
    before they are trained.
    """

    aliases: ClassVar[Mapping[str, str]] = MappingProxyType({})
    list_command: ClassVar[str] = "settings"
    unhashed_settings: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType({"trainer": EXECUTION_SETTINGS})

    first_row_step: ClassVar[int] = 1

    seed: int
    trainer: BaseTrainerConfig

    def get_row_steps(self, step: int) -> range:
        """The steps of the rows that a run has after `step` training steps."""
        return range(1, step + 1)

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
        # Sorted, so that the order in which settings are declared does not matter. Twelve digits are 48 bits: enough to
        # tell the arms of a study apart, and short enough for tables.
        return hashlib.sha256(json.dumps(self.dump_for_hash(), sort_keys=True).encode()).hexdigest()[:12]
