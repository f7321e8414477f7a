"""Settings of one run of pedagogical reinforcement learning. Names and defaults follow the source's documents."""

from typing import ClassVar, Literal

from pydantic import Field

from sandboxes.toys.settings import (
    CLIP_CONDITION,
    RunnerConfig,
    Size,
    ToyRunConfig,
    reject_heads,
    reject_partial_groups,
)
from trainable.config.base_config import ReadCondition
from trainable.config.conditions import derive_conditions
from trainable.config.setting_types import Common, Finite, NonNegative, Positive

STUDENT_ONLY = "StudentGRPO"
_TEACHER_SETTINGS = ("teacher_lr", "teacher_steps", "spike_beta", "learnability_lambda")


class PedagogyRunnerConfig(RunnerConfig):
    """Length, evaluation, checkpoints and machine of a run."""

    total_training_steps: Common[int] = Field(300, ge=1, le=100_000, description="iterations; alias num_steps")


class PedagogyConfig(ToyRunConfig):
    """Configuration of one run of pedagogical reinforcement learning."""

    list_command: ClassVar[str] = "settings pedagogy"
    conditions: ClassVar[tuple[ReadCondition, ...]] = (
        *derive_conditions(
            "method",
            {"PedagogicalRL": (*_TEACHER_SETTINGS, "gate_kappa", "gate_gamma"), "TeacherRL": _TEACHER_SETTINGS},
        ),
        CLIP_CONDITION,
    )

    task: Common[Literal["hinted_arithmetic"]] = Field("hinted_arithmetic", description="the task to learn")
    method: Common[Literal["PedagogicalRL", "TeacherRL", "StudentGRPO"]] = Field(
        "PedagogicalRL",
        description="a teacher rewarded for what its student can learn, a teacher with an additive penalty of the "
        "student's surprise, or a student that learns alone",
    )
    content_vocab_size: Common[Size] = Field(5, description="number of content tokens, without two separators")
    completion_len: Common[Size] = Field(3, description="tokens to produce; only the last answer_len are graded")
    answer_len: Common[Size] = Field(1, description="tokens of the answer, all of which must be correct")
    batch_size: Common[int] = Field(96, ge=2, le=10_000, description="completions per update")
    group_size: Common[int] = Field(8, ge=2, le=10_000, description="completions per prompt where groups are compared")
    teacher_lr: Common[Positive] = Field(1e-3, description="learning rate of the teacher")
    student_lr: Common[Positive] = Field(1e-3, description="learning rate of the student")
    teacher_steps: int = Field(1, ge=0, le=1_000, description="updates of the teacher per iteration")
    student_steps: int = Field(1, ge=1, le=1_000, description="updates of the student per iteration")
    spike_beta: Common[Positive] = Field(
        5.0, description="PedagogicalRL: 0: mean of surprise gaps, large: their maximum"
    )
    learnability_lambda: Common[NonNegative] = Field(
        0.5, description="decay of the learnability, or weight of the surprise"
    )
    gate_kappa: Positive = Field(4.0, description="PedagogicalRL: steepness of the gate of the student's imitation")
    gate_gamma: Finite = Field(-2.5, description="PedagogicalRL: log-probability at which the gate is half open")
    clip_epsilon: NonNegative = Field(0.2, lt=1, description="clip range of the ratios, which are 1 here")
    d_model: Size = Field(64, description="width of the transformers")
    nhead: Size = Field(2, description="attention heads")
    num_layers: Size = Field(2, description="transformer blocks")
    trainer: PedagogyRunnerConfig = PedagogyRunnerConfig()

    @property
    def num_actions(self) -> int:
        """A, the number of content tokens plus the two separators, which can also be written."""
        return self.content_vocab_size + 2

    @property
    def max_positions(self) -> int:
        """Number of positions: the teacher's prompt (two inputs, separator, answer, separator) and a completion."""
        return 4 + self.answer_len + self.completion_len

    def list_rejections(self) -> dict[str, bool]:
        """See `SettingsSection`."""
        return {
            **reject_heads(self),
            **reject_partial_groups(self),
            f"answer_len={self.answer_len} does not fit into completion_len={self.completion_len}: set completion_len="
            f"{self.answer_len}, or more": self.answer_len > self.completion_len,
            f"teacher_steps=0 leaves the teacher of method={self.method} untrained: set teacher_steps=1, or more": (
                self.teacher_steps == 0 and self.method != STUDENT_ONLY
            ),
        }
