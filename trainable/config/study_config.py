"""What every configuration of a run has, whatever it trains: what the driver needs to plan, place and name runs."""

import hashlib
import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from trainable.config.section import Section


class BaseTrainerConfig(Section):
    """The section `trainer` of a configuration, as far as all have it: length, rhythm and place of a run.

    total_training_steps: steps of a run. test_freq: steps between two evaluations. save_freq: steps between two
    checkpoints to keep, -1 for none. resume_every: steps between two states for recovery. disk_patience: seconds that a
    run waits for room on a full disk. device: auto, cpu or cuda. n_gpus_per_node: GPUs a trial. ray_num_cpus: CPUs that
    Ray may use. logger: where rows go beside their files.
    """

    total_training_steps: int
    test_freq: int
    save_freq: int
    resume_every: int
    disk_patience: float
    device: str
    n_gpus_per_node: float
    ray_num_cpus: int
    logger: tuple[str, ...]


class BaseRunConfig(Section):
    """All settings of a run.

    aliases: keys of documents -> dotted fields. listed: the command that lists its settings. without_result: section ->
    settings that cannot change a row. first_row: the step of a run's first row: 1 where rows are of steps that were
    trained, 0 where weights are measured before they are trained.
    """

    aliases: ClassVar[Mapping[str, str]] = MappingProxyType({})
    list_command: ClassVar[str] = "settings"
    unhashed_settings: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType({})

    first_row_step: ClassVar[int] = 1

    seed: int
    trainer: BaseTrainerConfig

    def get_row_steps(self, step: int) -> range:
        """The steps of the rows that a run has once `step` steps are trained."""
        return range(1, step + 1)

    def dump_for_hash(self) -> dict[str, Any]:
        """Every setting that can change a result, the seed left out."""
        dumped_settings = self.model_dump(mode="json", exclude={"seed"})
        for section, settings in self.unhashed_settings.items():
            for setting in settings:
                del dumped_settings[section][setting]
        return dumped_settings

    def compute_hash(self) -> str:
        """Twelve hex digits that name the configuration: every setting that can change a result, the seed left out.

        Where a run is placed changes the order of its sums, and so a row in its last digits: a study can go on with
        other GPUs than it was started with.
        """
        return hashlib.sha256(json.dumps(self.dump_for_hash(), sort_keys=True).encode()).hexdigest()[:12]
