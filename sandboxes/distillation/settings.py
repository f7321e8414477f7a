"""Settings of one run of on-policy distillation. Names and defaults follow the source's documents."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, Literal

from pydantic import Field

from sandboxes.toys.settings import (
    CLIP_CONDITION,
    PUBLISHED_NAMES,
    ShortRunnerConfig,
    Size,
    ToyRunConfig,
    reject_heads,
)
from trainable.config.base_config import ReadCondition
from trainable.config.conditions import derive_conditions
from trainable.config.setting_types import Common, NonNegative, Positive

Support = Literal["student", "teacher", "intersection"]
TOP_K = "OPDTopKReverseKL"
SEQUENCE_PG = "OPDSequencePG"


class DistillationConfig(ToyRunConfig):
    """Configuration of one run of on-policy distillation."""

    aliases: ClassVar[Mapping[str, str]] = MappingProxyType({**PUBLISHED_NAMES, "support": "top_k_support"})
    list_command: ClassVar[str] = "settings opd"
    conditions: ClassVar[tuple[ReadCondition, ...]] = (
        *derive_conditions("method", {TOP_K: ("top_k", "top_k_support"), "OPDPG": ("clip_epsilon",)}),
        *derive_conditions(
            "task",
            {
                **dict.fromkeys(("reversal", "format_answer"), ("teacher_epsilon",)),
                "soft_reversal": ("teacher_temperature", "special_token_weight"),
            },
        ),
        CLIP_CONDITION,
        ReadCondition("lr", lambda c: not c.measures_variance, "it needs measures_variance=false"),
        ReadCondition(
            "max_seq_len", lambda c: c.max_seq_len > c.seq_len, "the model has positions for seq_len in any case"
        ),
    )

    task: Common[Literal["reversal", "soft_reversal", "format_answer"]] = Field(
        "reversal", description="what the teacher knows; soft_reversal: a teacher that is graded around the answer"
    )
    method: Common[Literal["OPDReverseKL", "OPDTopKReverseKL", "OPDPG", "OPDSequencePG"]] = Field(
        "OPDReverseKL",
        description="the loss: exact reverse KL, its sum over a top-k support, or a policy gradient of sampled tokens, "
        "per token or with the return of the rest of the sequence",
    )
    batch_size: Common[Size] = Field(64, description="sampled sequences per step")
    lr: Common[Positive] = Field(1e-3, description="learning rate of Adam")
    vocab_size: Common[Size] = Field(2, description="number of content tokens, without the separator")
    seq_len: Common[Size] = Field(10, description="tokens to produce")
    max_seq_len: int = Field(0, ge=0, description="longest seq_len that the model has positions for; 0: seq_len")
    d_model: Size = Field(64, description="width of the transformer")
    nhead: Size = Field(2, description="attention heads")
    num_layers: Size = Field(2, description="transformer blocks")
    teacher_epsilon: float = Field(
        1e-3, gt=0, lt=1, description="reversal, format_answer: the teacher's probability of wrong tokens"
    )
    teacher_temperature: Common[Positive] = Field(1.0, description="soft_reversal: breadth of the teacher")
    special_token_weight: Common[Positive] = Field(0.02, description="soft_reversal: weight of the separator")
    clip_epsilon: NonNegative = Field(0.2, lt=1, description="OPDPG: clip range of the ratio, which is 1 on policy")
    overlap_k: Size = Field(2, description="k of the column overlap_at_k")
    top_k: Common[Size] = Field(2, description="OPDTopKReverseKL: tokens of the support")
    top_k_support: Common[Support] = Field("student", description="OPDTopKReverseKL: whose most likely tokens count")
    normalize_top_k: Common[bool] = Field(
        False, description="OPDTopKReverseKL: normalize both policies over the support"
    )
    warmup_steps: Common[int] = Field(0, ge=0, description="OPDTopKReverseKL: first steps, with the exact KL")
    sequence_mean: bool = Field(False, description="OPDSequencePG: mean over tokens, as the other losses; false: sum")
    measures_variance: bool = Field(False, description="take no step, but measure each batch's gradient")
    trainer: ShortRunnerConfig = ShortRunnerConfig()

    @property
    def num_actions(self) -> int:
        """A, the number of tokens that the student can emit: content, separator, and format_answer's answer token."""
        return self.vocab_size + 1 + (self.task == "format_answer")

    @property
    def max_positions(self) -> int:
        """Number of positions of the model: a prompt, the separator and an answer of the maximum length."""
        return 2 * max(self.seq_len, self.max_seq_len) + 1

    def list_rejections(self) -> dict[str, bool]:
        """See `SettingsSection`."""
        return {
            **reject_heads(self),
            "task=format_answer adds the first two tokens of the prompt: set seq_len=2 or more": (
                self.task == "format_answer" and self.seq_len < 2
            ),
            f"warmup_steps={self.warmup_steps} precede the top-k loss, which only method={TOP_K} has: set "
            "warmup_steps=0": self.warmup_steps > 0 and self.method != TOP_K,
            f"warmup_steps={self.warmup_steps} leaves no step for the top-k loss in total_training_steps="
            f"{self.trainer.total_training_steps}: set num_steps above {self.warmup_steps}, or fewer warmup_steps": (
                self.warmup_steps >= self.trainer.total_training_steps
            ),
            f"normalize_top_k=true is about the support of method={TOP_K}, and method={self.method} has none: set "
            "normalize_top_k=false": self.normalize_top_k and self.method != TOP_K,
            "measures_variance=true takes the variance over all batches, and rows are written every "
            f"test_freq={self.trainer.test_freq} of them: set eval_every=1": (
                self.measures_variance and self.trainer.test_freq != 1
            ),
            f"measures_variance=true trains nothing, and warmup_steps={self.warmup_steps} would mix the gradients of "
            "two losses: set warmup_steps=0": self.measures_variance and self.warmup_steps > 0,
            f"sequence_mean=true is about the sum of method={SEQUENCE_PG}, and method={self.method} is a mean already: "
            "set sequence_mean=false": self.sequence_mean and self.method != SEQUENCE_PG,
        }
