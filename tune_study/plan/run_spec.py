"""One run of a plan: its names, settings and paths."""

from dataclasses import dataclass
from pathlib import Path

from search_spaces.language_model.family import as_run_config
from trainable.config.base_config import BaseRunConfig
from trainable.config.run_config import RunConfig


@dataclass(frozen=True)
class RunSpec:
    """One run: one arm with one seed."""

    run_id: str
    """Unique name of the run and of its folder."""
    study_name: str
    arm: str
    """Value of the axis, as it was typed."""
    label: str
    """The arm as it appears in file names."""
    seed: int
    experiment_name: str
    """Name of the arm's experiment, the same for all seeds."""
    config: BaseRunConfig
    """All settings of the run."""
    log_path: Path
    """Path of the run's log, relative to the output folder."""
    checkpoint_dir: Path
    """Folder of the run's saved checkpoints, relative to the output folder."""

    @property
    def name(self) -> str:
        """Name of the run where a person reads it, within its study."""
        return f"arm {self.arm} seed {self.seed}"

    @property
    def ppo_config(self) -> RunConfig:
        """The settings as a RunConfig. Raises TypeError if the run does not fine-tune a language model with PPO."""
        return as_run_config(self.config)

    @property
    def keeps_best(self) -> bool:
        """Whether the checkpoint of the best validation is kept. Only language models have the setting."""
        return bool(getattr(self.config.trainer, "keep_best", False))

    @property
    def keeps_last(self) -> bool:
        """Whether the last state is kept after the run's end. It always is in families without the setting."""
        return bool(getattr(self.config.trainer, "keep_last", True))

    @property
    def steps(self) -> int:
        """Number of training steps."""
        return self.config.trainer.total_training_steps
