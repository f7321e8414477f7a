"""One run of a plan: its names, settings and paths."""

from dataclasses import dataclass
from pathlib import Path

from search_spaces.language_model.family import as_run_config
from trainable.config.base_config import BaseRunConfig
from trainable.config.run_config import RunConfig


@dataclass(frozen=True)
class RunSpec:
    """One run: one arm with one seed.

    Attributes:
        run_id: unique name of the run, which is also the name of its folder.
        study_name: name of the study.
        arm: value of the axis, as it was typed.
        label: the arm as it appears in file names.
        seed: the seed.
        experiment_name: name of the arm's experiment, the same for all seeds.
        config: all settings of the run.
        log_path: path of the run's log, relative to the output folder.
        checkpoint_dir: folder of the run's saved checkpoints, relative to the output folder.
    """

    run_id: str
    study_name: str
    arm: str
    label: str
    seed: int
    experiment_name: str
    config: BaseRunConfig
    log_path: Path
    checkpoint_dir: Path

    @property
    def ppo_config(self) -> RunConfig:
        """The settings as a RunConfig. Raise TypeError if the run does not fine-tune a language model with PPO."""
        return as_run_config(self.config)

    @property
    def keeps_best(self) -> bool:
        """Whether the checkpoint of the best validation stays. Only language models have the setting."""
        return bool(getattr(self.config.trainer, "keep_best", False))

    @property
    def keeps_last(self) -> bool:
        """Whether the last state stays after the run's end. It always does in families without the setting."""
        return bool(getattr(self.config.trainer, "keep_last", True))

    @property
    def steps(self) -> int:
        """Number of training steps."""
        return self.config.trainer.total_training_steps
