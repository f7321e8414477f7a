"""Settings of one run of Vector Policy Optimization. Names and defaults follow the source's documents."""

from typing import ClassVar, Literal

from pydantic import Field

from sandboxes.toys.settings import ShortRunnerConfig, Size, ToyRunConfig, reject_partial_groups
from trainable.config.base_config import ReadCondition
from trainable.config.conditions import SMALLEST_CLIP, derive_conditions
from trainable.config.setting_types import Common, NonNegative, Positive

SCALAR = "ScalarGRPO"
SIMPLEX_POINTS = 2048
"""Number of weights over which a mean over the simplex is computed."""


class VectorRewardConfig(ToyRunConfig):
    """Configuration of one run of Vector Policy Optimization."""

    list_command: ClassVar[str] = "settings vpo"
    conditions: ClassVar[tuple[ReadCondition, ...]] = (
        *derive_conditions("method", {"VPOGRPO": ("num_weight_samples",)}),
        ReadCondition(
            "clip_epsilon",
            lambda c: c.inner_epochs > 1 or c.clip_epsilon < SMALLEST_CLIP,
            "a batch is trained on once, so all ratios are 1: set inner_epochs=2, or more",
        ),
    )

    seed: int = Field(0, ge=0, le=400, description="seed of weights, prompts, samples and scalarizations")
    task: Common[Literal["pareto_front", "pareto_large"]] = Field(
        "pareto_front", description="the rewards: the published front of 2 objectives, or one of 20 points in 4"
    )
    method: Common[Literal["ScalarGRPO", "MultiRLVR", "VPOGRPO"]] = Field(
        "VPOGRPO",
        description="score of a set: its only candidate, its best one, or the mean of the best over random weights",
    )
    batch_size: Common[int] = Field(128, ge=2, le=10_000, description="sets per step")
    group_size: Common[int] = Field(8, ge=2, le=10_000, description="sets per prompt")
    inner_epochs: Common[int] = Field(4, ge=1, le=1_000, description="optimizer steps per batch")
    lr: Common[Positive] = Field(3e-3, description="learning rate of Adam")
    clip_epsilon: Common[NonNegative] = Field(0.2, lt=1, description="clip range of the ratios")
    num_prompts: Size = Field(8, description="different prompts; each has its own order of actions")
    num_candidates: Common[Size] = Field(3, description="candidates of a set; ScalarGRPO has one")
    num_weight_samples: Common[Size] = Field(16, description="VPOGRPO: random weights per group of sets")
    hidden: Size = Field(32, description="width of the policy")
    eval_sets: Size = Field(12, description="sets per prompt in an evaluation")
    eval_candidates: Size = Field(3, description="candidates of a set in the score over all weights")
    trainer: ShortRunnerConfig = ShortRunnerConfig()

    def list_rejections(self) -> dict[str, bool]:
        """See `SettingsSection`."""
        return {
            f"method={SCALAR} scores single candidates: set num_candidates=1": (
                self.method == SCALAR and self.num_candidates != 1
            ),
            f"method={self.method} chooses among the candidates of a set: set num_candidates=2 or more": (
                self.method != SCALAR and self.num_candidates == 1
            ),
            **reject_partial_groups(self),
        }
