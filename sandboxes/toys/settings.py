"""The section `trainer` of all toy studies."""

from typing import Annotated, Literal

from pydantic import Field

from trainable.config.base_config import BaseTrainerConfig
from trainable.config.setting_types import Common, NonNegative, ParseNull, Patience


class RunnerConfig(BaseTrainerConfig):
    """Length, evaluation, checkpoints and machine of a run."""

    total_training_steps: Common[int] = Field(
        1000, ge=1, le=100_000, description="training steps, one batch of rollouts each; alias num_steps"
    )
    test_freq: Common[int] = Field(
        20, ge=1, description="steps between evaluations; the last step is evaluated too; alias eval_every"
    )
    resume_every: int = Field(100, ge=1, description="steps between rolling checkpoints")
    resume_seconds: Annotated[NonNegative | None, ParseNull] = Field(
        10.0,
        description="write them earlier, so that at most N seconds of training are lost; null: by steps only",
    )
    save_freq: int = Field(-1, description="steps between saved checkpoints, in global_step_<N> folders; -1: none")
    disk_patience: Patience = Field(600.0, description="seconds to wait for space on a full disk")
    device: Literal["cpu"] = Field("cpu", description="models of 0.1 M parameters gain nothing from a GPU")
    n_gpus_per_node: NonNegative = Field(0, le=0, description="GPUs per trial")
    ray_num_cpus: int = Field(16, ge=1, description="CPUs that Ray may use")
    logger: tuple[Literal["console", "tensorboard"], ...] = Field(("console", "tensorboard"), description="always on")
