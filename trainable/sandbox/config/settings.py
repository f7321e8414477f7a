"""The settings of one run of the update-rule sandbox, named as its documents name them; defaults are theirs too."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from trainable.config.base_config import BaseRunConfig, BaseTrainerConfig
from trainable.config.setting_types import Common, Fraction, ModelPath, NonNegative, ParseNull, Positive
from trainable.sandbox.config.names import NOISE_MODES, REPLAY_PRIORITIES, TASKS
from trainable.sandbox.config.rejections import find_rejection
from trainable.sandbox.config.rules import DEFAULT_METHOD, METHODS, RULES, Rule


class RunnerConfig(BaseTrainerConfig):
    """Length, rhythm and place of a run."""

    total_training_steps: Common[int] = Field(
        1000, ge=1, le=100_000, description="batches of rollouts; alias num_steps"
    )
    test_freq: Common[int] = Field(
        20, ge=1, description="evaluate every so many steps and at the end; alias eval_every"
    )
    resume_every: int = Field(100, ge=1, description="steps between rolling states for recovery")
    save_freq: int = Field(-1, description="keep a global_step_<N> folder every so many steps; -1: none")
    disk_patience: NonNegative = Field(600.0, description="seconds that a run waits for room on a full disk")
    device: Literal["cpu"] = Field("cpu", description="models of 0.1 M parameters gain nothing from a GPU")
    n_gpus_per_node: NonNegative = Field(0, le=0, description="GPUs a trial")
    ray_num_cpus: int = Field(16, ge=1, description="CPUs that Ray may use")
    logger: tuple[Literal["console", "tensorboard"], ...] = Field(("console", "tensorboard"), description="always on")


class UpdateRuleConfig(BaseRunConfig):
    """One configuration of the update-rule sandbox; with its seed, one run.

    aliases: keys of the documents that have another name here, which all studies share.
    """

    aliases: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"num_steps": "trainer.total_training_steps", "eval_every": "trainer.test_freq"}
    )
    list_command: ClassVar[str] = "settings sandbox"
    unhashed_settings: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType(
        {"trainer": ("logger", "ray_num_cpus", "resume_every", "save_freq", "disk_patience", "device")}
    )
    first_row_step: ClassVar[int] = 0

    seed: int = Field(0, ge=0, le=400, description="of weights, prompts, samples and noise")
    task: Common[Literal[TASKS]] = Field("mnist", description="what is learned")  # type: ignore[valid-type]
    method: Common[Literal[METHODS]] = Field(DEFAULT_METHOD, description="the update rule")  # type: ignore[valid-type]
    delay: Common[int] = Field(0, ge=0, description="steps that a batch waits before it is trained on")
    batch_size: Common[int] = Field(100, ge=1, description="rollouts a step")
    lr: Common[Positive] = Field(1e-3, description="learning rate of Adam")
    inner_epochs: Common[int] = Field(1, ge=1, description="optimizer steps a batch")
    group_size: Common[int] = Field(4, ge=1, description="rollouts a prompt of grouped rules; candidates a prefix")
    baseline: Literal["expected", "zero", "constant"] = Field(
        "expected", description="sum of squared probabilities, 0, or 0.5"
    )
    std_normalization: Common[bool] = Field(
        True, description="GRPO and DAPO divide a group's advantages by their deviation"
    )
    eta: Common[NonNegative] = Field(1.0, description="temperature of the delight gate; R2VPO: lambda; PMDMean: tau")
    tpo_eta: Common[NonNegative] = Field(1.0, description="temperature of TPO's target")
    grpo_beta: Common[NonNegative] = Field(0.04, description="coefficient of the KL to the policy that sampled")
    iw_cap: Positive = Field(10.0, description="largest importance weight")
    clip_low: Common[NonNegative] = Field(0.2, description="ratios are clipped below 1 minus this")
    clip_high: Common[NonNegative] = Field(
        0.28, description="ASPO and DAPO: and above 1 plus this; others: 1 plus clip_low"
    )
    kondo_keep: float = Field(0.5, gt=0, le=1, description="share of rollouts that Kondo keeps")
    guard_strength: Fraction = Field(0.5, description="DGEntropyGuard: most that a sample's weight is lowered")
    uncertainty_scale: NonNegative = Field(1.0, description="UncertaintyDG and RewardVarianceDG: kappa")
    uncertainty_threshold: NonNegative = Field(0.5, description="FilteredDG: largest deviation of rewards")
    distill_alpha: NonNegative = Field(0.5, description="SelfDistillDG and SCOPELite: weight of the labels' loss")
    replay_capacity: Common[int] = Field(0, ge=0, description="batches kept for replay; 0: none")
    replay_priority: Common[Literal[REPLAY_PRIORITIES]] = Field("fresh_delight", description="what a batch is drawn by")  # type: ignore[valid-type]
    replay_age_decay: NonNegative = Field(0.02, description="fresh_delight, freshness and FreshDG: decay a step of age")
    reward_noise: Common[Fraction] = Field(0.0, description="share of rewards that noise may change")
    reward_noise_mode: Common[Literal[NOISE_MODES]] = Field("none", description="what it changes them to")  # type: ignore[valid-type]
    diagnostics: bool = Field(False, description="cosine of the update with the oracle's, every 5 evaluations")
    entropy_diagnostics: bool = Field(False, description="what an update does to the entropy, at each evaluation")
    oracle_fit: bool = Field(False, description="influence of samples against the oracle, at each evaluation")
    vocab_size: Common[int] = Field(2, ge=1, description="content tokens; the separator comes on top")
    seq_len: Common[int] = Field(10, ge=1, description="tokens to produce")
    score_len: int = Field(5, ge=1, description="masked_reversal: last positions that count")
    binary_reward: bool = Field(False, description="1 for a whole sequence that is right, else 0")
    d_model: int = Field(64, ge=1, description="width of the transformer")
    nhead: int = Field(2, ge=1, description="attention heads")
    num_layers: int = Field(2, ge=1, description="blocks")
    hidden: int = Field(50, ge=1, description="mnist: width of the two hidden layers")
    mnist_folder: Annotated[ModelPath | None, ParseNull] = Field(
        None, description="mnist: folder of the four IDX files; null: a stand-in"
    )
    model_name: ModelPath = Field("sokoban-tiny", description="lm_bandit: a causal LM, local or of the hub")
    text_file: Annotated[ModelPath | None, ParseNull] = Field(
        None, description="lm_bandit: a text, one passage a line; null: the shipped one"
    )
    context_len: int = Field(128, ge=1, description="lm_bandit: tokens before the one to predict")
    kl_weight: NonNegative = Field(0.0, description="lm_bandit: price of a nat of KL to the first weights")
    fallback_patience: int = Field(10, ge=1, description="batches in a row without a mixed group that end a run")
    trainer: RunnerConfig = RunnerConfig()

    @property
    def rule(self) -> Rule:
        """What the update rule is that `method` names."""
        return RULES[self.method]

    def get_row_steps(self, step: int) -> range:
        """The steps of the rows that a run has once `step` steps are trained: those of its evaluations."""
        return range(self.delay, step, self.trainer.test_freq)

    @model_validator(mode="after")
    def _check_combination(self) -> "UpdateRuleConfig":
        reason = find_rejection(self)
        if reason is not None:
            raise ValueError(reason)
        return self
