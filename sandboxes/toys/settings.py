"""Settings that all toy studies share: the section `trainer`, and how invalid combinations are rejected."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from trainable.config.base_config import BaseRunConfig, BaseTrainerConfig, ReadCondition
from trainable.config.conditions import SMALLEST_CLIP
from trainable.config.setting_types import Common, NonNegative, ParseNull, Patience

PUBLISHED_NAMES: Mapping[str, str] = MappingProxyType(
    {"num_steps": "trainer.total_training_steps", "eval_every": "trainer.test_freq"}
)
"""Maps the setting names in the sources' documents to the names that all studies use."""
EVAL_PROMPTS = 1000
"""Prompts per evaluation: with an error of 0.5 per answer, its standard error is 0.016."""
Size = Annotated[int, Field(ge=1, le=10_000)]
"""A number of prompts, tokens, layers or channels. Larger ones are typos."""
CLIP_CONDITION = ReadCondition(
    "clip_epsilon",
    lambda c: c.clip_epsilon < SMALLEST_CLIP,
    "a batch is trained on once, by the policy that sampled it, so all ratios are 1",
)


class RunnerConfig(BaseTrainerConfig):
    """Length, evaluation, checkpoints and machine of a run."""

    total_training_steps: Common[int] = Field(1000, ge=1, le=100_000, description="training steps; alias num_steps")
    test_freq: Common[int] = Field(20, ge=1, description="steps between evaluations; alias eval_every")
    resume_every: int = Field(100, ge=1, description="steps between rolling checkpoints")
    resume_seconds: Annotated[NonNegative | None, ParseNull] = Field(
        10.0, description="write them earlier, so that at most N seconds of training are lost; null: by steps only"
    )
    save_freq: int = Field(-1, description="steps between saved checkpoints, in global_step_<N> folders; -1: none")
    disk_patience: Patience = Field(600.0, description="seconds to wait for space on a full disk")
    device: Literal["cpu"] = Field("cpu", description="models of 0.1 M parameters gain nothing from a GPU")
    n_gpus_per_node: NonNegative = Field(0, le=0, description="GPUs per trial")
    ray_num_cpus: int = Field(16, ge=1, description="CPUs that Ray may use")
    logger: tuple[Literal["console", "tensorboard"], ...] = Field(("console", "tensorboard"), description="always on")


class ShortRunnerConfig(RunnerConfig):
    """Length, evaluation, checkpoints and machine of a run."""

    total_training_steps: Common[int] = Field(500, ge=1, le=100_000, description="training steps; alias num_steps")


class ToyRunConfig(BaseRunConfig):
    """Configuration of one run of a toy study."""

    aliases: ClassVar[Mapping[str, str]] = PUBLISHED_NAMES
    first_row_step: ClassVar[int] = 0

    seed: int = Field(0, ge=0, le=400, description="seed of weights, prompts and samples")

    def get_row_steps(self, step: int) -> range:
        """Return the steps of the rows, one per evaluation, that a run has written after `step` training steps."""
        return range(0, step, self.trainer.test_freq)


def reject_heads(config: Any) -> dict[str, bool]:
    """Check whether the attention heads divide the width; maps the reason to show to True if they do not."""
    return {
        f"nhead={config.nhead} does not divide d_model={config.d_model}: set nhead=1, or another divisor": (
            config.d_model % config.nhead != 0
        )
    }


def reject_partial_groups(config: Any) -> dict[str, bool]:
    """Check whether groups fill a batch; maps the reason to show to True if the last one would not be full."""
    fitting_size = max(1, config.batch_size // config.group_size) * config.group_size
    return {
        f"batch_size={config.batch_size} is not a multiple of group_size={config.group_size}: set batch_size="
        f"{fitting_size}": config.batch_size % config.group_size != 0
    }
