"""Settings of one run of pedagogical reinforcement learning. Names and defaults are those of the source's documents."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from sandboxes.toys.settings import RunnerConfig
from trainable.config.base_config import BaseRunConfig, ReadCondition
from trainable.config.conditions import SMALLEST_CLIP, derive_conditions
from trainable.config.setting_types import Common, Finite, NonNegative, Positive

STUDENT_ONLY = "StudentGRPO"
_TEACHER_SETTINGS = ("teacher_lr", "teacher_steps", "spike_beta", "learnability_lambda")
EVAL_PROMPTS = 1000
"""Prompts of an evaluation: with an error of 0.5, its standard error is 0.016."""
MAX_TENSOR_ENTRIES = 2**28
"""1 GiB in float32; larger sizes are typing errors."""


class PedagogyRunnerConfig(RunnerConfig):
    """Length, evaluation, checkpoints and machine of a run."""

    total_training_steps: Common[int] = Field(
        300, ge=1, le=100_000, description="iterations of the updates of teacher and student; alias num_steps"
    )


class PedagogyConfig(BaseRunConfig):
    """Configuration of one run of pedagogical reinforcement learning.

    aliases: for each name of a setting in the source's documents, the name here.
    """

    aliases: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"num_steps": "trainer.total_training_steps", "eval_every": "trainer.test_freq"}
    )
    list_command: ClassVar[str] = "settings pedagogy"
    conditions: ClassVar[tuple[ReadCondition, ...]] = (
        *derive_conditions(
            "method",
            {
                "PedagogicalRL": (*_TEACHER_SETTINGS, "gate_kappa", "gate_gamma"),
                "TeacherRL": _TEACHER_SETTINGS,
            },
        ),
        ReadCondition(
            "clip_epsilon",
            lambda c: c.clip_epsilon < SMALLEST_CLIP,
            "a batch is trained on once, by the policy that sampled it, so all ratios are 1",
        ),
    )
    first_row_step: ClassVar[int] = 0

    seed: int = Field(0, ge=0, le=400, description="seed of weights, prompts and samples")
    task: Common[Literal["hinted_arithmetic"]] = Field("hinted_arithmetic", description="the task to learn")
    method: Common[Literal["PedagogicalRL", "TeacherRL", "StudentGRPO"]] = Field(
        "PedagogicalRL",
        description="a teacher rewarded for what its student can learn, a teacher with an additive penalty of the "
        "student's surprise, or a student that learns alone",
    )
    content_vocab_size: Common[int] = Field(5, ge=1, description="number of content tokens, without two separators")
    completion_len: Common[int] = Field(3, ge=1, description="tokens to produce; only the last answer_len are graded")
    answer_len: Common[int] = Field(1, ge=1, description="tokens of the answer, all of which must be correct")
    batch_size: Common[int] = Field(96, ge=2, description="completions per update")
    group_size: Common[int] = Field(8, ge=2, description="completions per prompt where groups are compared")
    teacher_lr: Common[Positive] = Field(1e-3, description="learning rate of the teacher")
    student_lr: Common[Positive] = Field(1e-3, description="learning rate of the student")
    teacher_steps: int = Field(1, ge=0, le=1_000, description="updates of the teacher per iteration")
    student_steps: int = Field(1, ge=1, le=1_000, description="updates of the student per iteration")
    spike_beta: Common[Positive] = Field(
        5.0, description="PedagogicalRL: from the mean of the surprise gaps (towards 0) to their maximum (large)"
    )
    learnability_lambda: Common[NonNegative] = Field(
        0.5, description="PedagogicalRL: decay of the learnability; TeacherRL: weight of the student's surprise"
    )
    gate_kappa: Positive = Field(4.0, description="PedagogicalRL: steepness of the gate of the student's imitation")
    gate_gamma: Finite = Field(-2.5, description="PedagogicalRL: log-probability at which the gate is half open")
    clip_epsilon: NonNegative = Field(0.2, lt=1, description="clip range of the ratios, which are 1 here")
    d_model: int = Field(64, ge=1, description="width of the transformers")
    nhead: int = Field(2, ge=1, description="attention heads")
    num_layers: int = Field(2, ge=1, le=1_000, description="transformer blocks")
    trainer: PedagogyRunnerConfig = PedagogyRunnerConfig()

    @property
    def num_actions(self) -> int:
        """A, the content tokens and the two separators, which can be written too."""
        return self.content_vocab_size + 2

    @property
    def max_positions(self) -> int:
        """Positions of the models: the teacher's prompt (two inputs, separator, answer, separator) and a completion."""
        return 4 + self.answer_len + self.completion_len

    def get_row_steps(self, step: int) -> range:
        """The steps of the rows, one per evaluation, that a run has written after `step` training steps."""
        return range(0, step, self.trainer.test_freq)

    @model_validator(mode="after")
    def _check_combination(self) -> "PedagogyConfig":
        entries = max(
            4 * self.batch_size * self.max_positions * self.d_model,
            self.batch_size * self.max_positions**2 * self.nhead,
            max(self.batch_size, EVAL_PROMPTS) * self.completion_len * self.num_actions,
            4 * self.num_layers * self.d_model**2,
            (self.num_actions + self.max_positions) * self.d_model,
        )
        reasons = {
            f"nhead={self.nhead} does not divide d_model={self.d_model}: set nhead=1, or another divisor": (
                self.d_model % self.nhead != 0
            ),
            f"batch_size={self.batch_size} is not a multiple of group_size={self.group_size}: set batch_size="
            f"{max(1, self.batch_size // self.group_size) * self.group_size}": self.batch_size % self.group_size != 0,
            f"answer_len={self.answer_len} does not fit into completion_len={self.completion_len}: set completion_len="
            f"{self.answer_len}, or more": self.answer_len > self.completion_len,
            f"teacher_steps=0 leaves the teacher of method={self.method} untrained: set teacher_steps=1, or more": (
                self.teacher_steps == 0 and self.method != STUDENT_ONLY
            ),
            f"a tensor of this run would have {entries} entries, and the maximum is {MAX_TENSOR_ENTRIES}: set smaller "
            f"sizes (batch_size={self.batch_size} completion_len={self.completion_len} content_vocab_size="
            f"{self.content_vocab_size} d_model={self.d_model} num_layers={self.num_layers})": (
                entries > MAX_TENSOR_ENTRIES
            ),
        }
        reason = next((reason for reason, applies in reasons.items() if applies), None)
        if reason is not None:
            raise ValueError(reason)
        return self
