"""The sections of a run's settings: every one typed, bounded, documented, frozen. Defaults are the published ones."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from trainable.config.choices import (
    ADVANTAGE_ESTIMATORS,
    FILTER_STRATEGIES,
    POLICY_LOSSES,
    AdvantageEstimator,
    PolicyLossKind,
)
from trainable.config.section import Section
from trainable.config.setting_types import (
    Common,
    FilterMetric,
    Finite,
    Fraction,
    GroupCount,
    KLKind,
    LoraTargets,
    LossAggMode,
    ModelPath,
    NonNegative,
    ParseNull,
    Positive,
    ShareBelowOne,
)
from trainable.config.study_config import BaseTrainerConfig


class ModelConfig(Section):
    """The policy and how it is spoken to."""

    path: Common[ModelPath] = Field("Qwen/Qwen2.5-3B", description="hub id, local folder, or `sokoban-tiny` (shipped)")
    prompt_style: Literal["full", "compact"] = Field(
        "full", description="published prompt, or its compact form for the shipped tiny model"
    )
    chat_format: Literal["auto", "chatml"] = Field(
        "auto", description="the tokenizer's chat template, ChatML where it has none; or ChatML in any case"
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        "bfloat16", description="what passes compute in; weights, optimizer and sums are float32"
    )
    enable_gradient_checkpointing: bool = Field(True, description="recompute each block in the backward pass")
    lora_rank: int = Field(0, ge=0, le=1024, description="adapters of this rank learn, beside frozen weights; 0: off")
    lora_alpha: Positive = Field(16, description="an adapter counts alpha / rank times")
    lora_target_modules: LoraTargets = Field(
        "all-linear", description="layers of a block with an adapter, such as [q_proj,v_proj]; all-linear: every one"
    )


class EnvConfig(Section):
    """Levels, groups and the protocol's limits (published environment `CoordSokoban`: 6x6, one box)."""

    env_groups: Common[GroupCount] = Field(8, description="P: training prompts (levels) a step")
    group_size: Common[int] = Field(16, ge=1, description="G: rollouts of each training level")
    val_env_groups: Common[GroupCount] = Field(512, description="validation levels; the same ones every time")
    val_group_size: int = Field(1, ge=1, description="rollouts of each validation level")
    test_env_groups: int = Field(512, ge=0, le=512, description="test levels, evaluated once at the end; 0: none")
    seed_train: int = Field(
        10_000, ge=0, le=200_000_000, description="first level seed of training (run seed k adds 1,000,000 k)"
    )
    seed_val: int = Field(123, ge=0, le=200_000_000, description="first level seed of validation")
    max_turn: Common[int] = Field(5, ge=1, description="replies an episode")
    max_actions_per_turn: int = Field(2, ge=1, description="actions executed of one reply")
    max_actions_per_traj: int = Field(10, ge=1, description="actions executed in an episode")
    format_penalty: Annotated[float, Field(le=0, allow_inf_nan=False)] = Field(
        -0.1, description="added to the episode's score once for each turn with an invalid or empty answer"
    )
    observation_format: Literal["grid_coord", "grid", "coord"] = Field(
        "grid_coord", description="how the full prompt shows a level; the compact prompt has one form"
    )


class RolloutConfig(Section):
    """Sampling."""

    name: Literal["torch", "vllm"] = Field("vllm", description="the engine that samples")
    temperature: Common[Positive] = Field(
        1.0, description="training; log-probs are of the tempered distribution everywhere"
    )
    val_temperature: NonNegative = Field(0.5, description="sampled validation and test; 0 is greedy")
    response_length: Common[int] = Field(400, ge=1, description="new tokens a turn at most")
    log_prob_micro_batch_size_per_gpu: int = Field(8, ge=1, description="longest sequences a pass without gradients")
    ref_log_prob_micro_batch_size_per_gpu: int = Field(8, ge=1, description="longest sequences a reference pass")
    gpu_memory_utilization: float = Field(0.5, gt=0, le=1, description="share of the device given to vLLM")
    enforce_eager: bool = Field(True, description="vLLM without CUDA graphs: starts faster, samples slower")
    free_cache_engine: bool = Field(True, description="vLLM's weights and cache leave the device during the update")
    max_model_len: Annotated[int | None, ParseNull] = Field(
        3600, ge=1, description="tokens of a conversation at most; null: the model's own context"
    )
    logprob_tolerance: Positive = Field(
        0.05, description="mean difference of vLLM's and the trainer's log-probs, in nats, that ends a run"
    )
    gradient_analysis_num_buckets: int = Field(
        6, ge=1, description="buckets of groups by reward spread, where quantile"
    )
    gradient_analysis_bucket_mode: Literal["quantile", "fixed_rv"] = Field(
        "quantile", description="equally many groups a bucket, or edges at a reward std of 1, 2, 3, 4, 5"
    )


class FilterConfig(Section):
    """Which groups of a step are trained on: the reward-variance filter."""

    rollout_filter_strategy: Common[Literal[tuple(FILTER_STRATEGIES)]] = Field(  # type: ignore[valid-type]
        "top_p", description="mass of scores, fraction (top_k, top_f), count of groups, or ratio to the best score"
    )
    rollout_filter_value: Common[Positive] = Field(
        1.0, description="mass (top_p), fraction (top_k, top_f), count, or ratio"
    )
    rollout_filter_type: Literal["largest", "smallest"] = Field("largest", description="which scores are kept")
    rollout_filter_metric: Common[FilterMetric] = Field(
        "reward_variance", description="score of a group; the published name, the number is a standard deviation"
    )
    rollout_filter_include_zero: Common[bool] = Field(
        True, description="False drops groups of zero score before the strategy"
    )
    rollout_filter_top_p_prob_mode: Literal["softmax", "linear"] = Field(
        "linear", description="mass of softmax(scores), which depends on their scale, or of the scores themselves"
    )
    rollout_filter_selection_eps: NonNegative = Field(0.01, description="slack of the linear top_p threshold")

    @model_validator(mode="after")
    def _check_filter_value(self) -> "FilterConfig":
        value, strategy = self.rollout_filter_value, self.rollout_filter_strategy
        if FILTER_STRATEGIES[strategy].counts_groups:
            if value < 1 or value != int(value):
                raise ValueError(f"rollout_filter_value {value} is not a count of groups; top_k_abs takes 1, 2, 3, ...")
        elif value > 1:
            raise ValueError(f"rollout_filter_value {value} is above 1; {strategy} takes a value in (0, 1]")
        return self


class OptimConfig(Section):
    """What actor and critic share: AdamW and the cut of a step into mini-batches."""

    betas: tuple[ShareBelowOne, ShareBelowOne] = Field(
        (0.9, 0.999), description="AdamW's decay of first and second moments"
    )
    weight_decay: NonNegative = Field(0.01, description="AdamW's, decoupled")
    grad_clip: Positive = Field(1.0, description="largest total gradient norm")
    ppo_epochs: int = Field(1, ge=1, description="passes over a step's batch")
    ppo_mini_batch_size: Common[int] = Field(32, ge=1, description="sequences an optimizer step")
    ppo_micro_batch_size_per_gpu: int = Field(4, ge=1, description="sequences whose loss is averaged together")

    @model_validator(mode="after")
    def _check_micro_batch_size(self) -> "OptimConfig":
        if self.ppo_mini_batch_size % self.ppo_micro_batch_size_per_gpu:
            raise ValueError(
                f"ppo_micro_batch_size_per_gpu {self.ppo_micro_batch_size_per_gpu} does not divide "
                f"ppo_mini_batch_size {self.ppo_mini_batch_size}"
            )
        return self


class ActorConfig(OptimConfig):
    """The policy's losses and optimizer."""

    lr: Common[Positive] = Field(1e-6, description="AdamW's, constant")
    policy_loss: Common[Literal[tuple(POLICY_LOSSES)]] = Field(  # type: ignore[valid-type]
        "ppo_clip", description="clipped ratios of tokens, or target policy optimisation over the rollouts of a group"
    )
    tpo_eta: Positive = Field(
        1.0, description="tpo: a skill of so much makes a rollout e times as likely in the target"
    )
    clip_ratio_low: Common[ShareBelowOne] = Field(0.2, description="the ratio is cut below 1 - this")
    clip_ratio_high: Common[NonNegative] = Field(0.28, description="the ratio is cut above 1 + this")
    clip_ratio_c: Annotated[float, Field(gt=1, allow_inf_nan=False)] = Field(
        3.0, description="dual clip: bound for negative advantages"
    )
    loss_agg_mode: LossAggMode = Field("token-mean", description="how tokens' losses become a micro-batch's loss")
    entropy_coeff: Common[Finite] = Field(
        0.0, description="weight of the entropy bonus (full vocabulary, response tokens)"
    )
    entropy_from_logits_with_chunking: bool = Field(True, description="bound its memory; changes no number")
    use_kl_loss: Common[bool] = Field(False, description="penalise KL to the frozen reference in the actor loss")
    kl_loss_coef: Common[NonNegative] = Field(0.001, description="weight of that penalty; 0 switches use_kl_loss off")
    kl_loss_type: Common[KLKind] = Field(  # type: ignore[valid-type]
        "kl", description="estimator; the published `kl` has no anchoring gradient as a loss"
    )
    tis_imp_ratio_cap: Annotated[float | None, ParseNull] = Field(
        None,
        ge=1,
        allow_inf_nan=False,
        description="truncated importance sampling of vLLM's tokens: largest weight of one, such as 2; null: off",
    )
    filter_loss_scaling: Literal["none", "linear", "sqrt"] = Field(
        "none", description="scale advantages by the kept share of groups, or its square root"
    )

    @property
    def loss(self) -> PolicyLossKind:
        """What the policy loss needs."""
        return POLICY_LOSSES[self.policy_loss]

    @model_validator(mode="after")
    def _disable_zero_kl_loss(self) -> Self:
        if self.kl_loss_coef == 0:
            self.__dict__["use_kl_loss"] = False  # Frozen for others; nobody has seen it yet.
        return self


class CriticConfig(OptimConfig):
    """The value function's loss and optimizer."""

    lr: Common[Positive] = Field(1e-5, description="AdamW's, constant; with shared_trunk, of the head alone")
    cliprange_value: Positive = Field(0.5, description="how far a value may move from the one before the update")
    shared_trunk: bool = Field(False, description="value head on the policy's own trunk: one network, one update")


class KLControl(Section):
    """Coefficient of the KL penalty in the reward (use_kl_in_reward)."""

    type: Literal["fixed", "adaptive"] = Field("fixed", description="keep kl_coef, or steer it to target_kl")
    kl_coef: NonNegative = Field(0.0, description="weight of the penalty (first weight, where adaptive)")
    target_kl: Positive = Field(0.1, description="nats a token, where adaptive")
    horizon: Positive = Field(10_000.0, description="sequences over which an error of 1 doubles the weight")


class AlgorithmConfig(Section):
    """Advantages."""

    adv_estimator: Common[Literal[tuple(ADVANTAGE_ESTIMATORS)]] = Field(  # type: ignore[valid-type]
        "gae", description="gae needs the critic, the others use none"
    )
    gamma: Common[Fraction] = Field(1.0, description="discount a token")
    lam: Common[Fraction] = Field(1.0, description="lambda of GAE")
    bi_level_gae: bool = Field(False, description="GAE over turns first, then over each turn's tokens")
    high_level_gamma: Fraction = Field(0.95, description="discount a turn, for bi_level_gae")
    norm_adv_by_std_in_grpo: bool = Field(True, description="divide by the group's standard deviation (off: Dr. GRPO)")
    zero_task_advantage: Common[bool] = Field(False, description="advantages 0: only KL and entropy move the policy")
    use_kl_in_reward: Common[bool] = Field(False, description="subtract the KL penalty from each token's reward")
    kl_penalty: KLKind = Field("kl", description="estimator of that penalty")  # type: ignore[valid-type]
    kl_ctrl: KLControl = KLControl()

    @property
    def estimator(self) -> AdvantageEstimator:
        """What the advantage estimator needs."""
        return ADVANTAGE_ESTIMATORS[self.adv_estimator]

    @model_validator(mode="after")
    def _check_estimator(self) -> "AlgorithmConfig":
        if self.bi_level_gae and not self.estimator.has_turn_level:
            raise ValueError(f"bi_level_gae needs adv_estimator=gae, not {self.adv_estimator}")
        if self.use_kl_in_reward and self.kl_penalty == "full":
            raise ValueError("kl_penalty=full needs whole distributions; in the reward use kl, abs, mse or low_var_kl")
        return self


class TrainerConfig(BaseTrainerConfig):
    """Length, rhythm and place of a run."""

    total_training_steps: Common[int] = Field(400, ge=1, le=100_000, description="steps of a run")
    test_freq: Common[int] = Field(
        10, description="validate every so many steps and at the last; <= 0: never in between"
    )
    val_before_train: bool = Field(True, description="validate the base policy first")
    save_freq: Common[int] = Field(-1, description="keep a global_step_<N> folder every so many steps; -1: none")
    resume_every: Common[int] = Field(25, ge=1, description="steps between rolling states for recovery")
    nonfinite_patience: int = Field(
        3, ge=1, description="steps in a row with an update skipped for non-finite numbers that fail the run"
    )
    disk_patience: NonNegative = Field(
        600.0, description="seconds that a run waits for room on a full disk, or for its storage"
    )
    critic_warmup: int = Field(0, ge=0, description="first step that updates the policy, if above 1")
    gradient_analysis_mode: bool = Field(False, description="measure the gradients of each bucket of groups")
    gradient_analysis_every: int = Field(50, ge=1, description="at step 1 and every so many steps after it")
    gradient_analysis_env_groups: Annotated[int | None, ParseNull] = Field(
        None, ge=1, description="groups played for the analysis; null, for this or the next: the step's own batch"
    )
    gradient_analysis_group_size: Annotated[int | None, ParseNull] = Field(
        None, ge=2, description="rollouts of each of them"
    )
    gradient_analysis_sketch: Annotated[int | None, ParseNull] = Field(
        2**18, ge=2**8, le=2**24, description="entries that stand for a gradient; null: all of it, dozens of times"
    )
    gradient_analysis_log_prefilter: bool = Field(False, description="analyse the batch before the filter as well")
    gradient_analysis_only: bool = Field(False, description="update neither policy nor critic: measure only")
    exit_after_gradient_analysis: bool = Field(False, description="the first analysis is the run's last step")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: the GPU where one is visible")
    n_gpus_per_node: Common[NonNegative] = Field(1, le=64, description="GPUs a trial: a fraction, or a whole number")
    strategy: Literal["auto", "torch", "deepspeed"] = Field(
        "auto", description="who updates; auto: torch on one device, DeepSpeed over several"
    )
    zero_stage: int = Field(2, ge=1, le=3, description="what DeepSpeed deals out: 1 optimizer, 2 gradients, 3 weights")
    offload_optimizer: bool = Field(False, description="DeepSpeed keeps the optimizer in the host's memory")
    offload_parameters: bool = Field(False, description="and between updates the weights, with zero_stage 3")
    ray_num_cpus: int = Field(16, ge=1, description="CPUs that Ray may use")
    logger: tuple[Literal["console", "wandb", "tensorboard"], ...] = Field(
        ("console", "tensorboard"), description="naming wandb logs to it offline; the other two are always on"
    )

    def is_gradient_analysis_step(self, step: int) -> bool:
        """Whether gradients are analysed at `step`, from 1: at the first, and every so many after it."""
        return self.gradient_analysis_mode and (step - 1) % self.gradient_analysis_every == 0

    @model_validator(mode="after")
    def _stop_after_first_analysis(self) -> Self:
        if self.gradient_analysis_mode and self.exit_after_gradient_analysis:
            self.__dict__["total_training_steps"] = 1  # Frozen for others; nobody has seen it yet.
        return self

    @model_validator(mode="after")
    def _check_parameter_offload(self) -> Self:
        if self.offload_parameters and self.zero_stage != 3:
            raise ValueError(
                f"offload_parameters True needs zero_stage=3, where each rank keeps a part of the weights; zero_stage "
                f"is {self.zero_stage}"
            )
        return self


class CollapseDetectionConfig(Section):
    """The mutual information of prompts and thoughts: a diagnosis, which stops nothing."""

    first_turn_enabled: Common[bool] = Field(
        True, description="thoughts of first turns against the openings of all groups"
    )
    multi_turn_enabled: Common[bool] = Field(True, description="thoughts of all turns against each other's prompts")
    compute_freq: Common[int] = Field(5, ge=1, description="at step 1 and every so many steps")
    num_samples: int = Field(64, ge=2, description="thoughts that are scored")
    all_quantities: bool = Field(
        False, description="also write the 28 quantities of a sample that are for comparison with published logs"
    )


class EarlyStopConfig(Section):
    """The published stop rules' numbers."""

    variance_baseline_steps: int = Field(10, ge=1, description="non-empty steps whose mean is the baseline")
    variance_window: int = Field(10, ge=1, description="latest non-empty steps that must all be below")
    variance_ratio: Common[NonNegative] = Field(0.1, description="share of the baseline")
    success_threshold: Common[NonNegative] = Field(
        0.01, description="validation success that counts as a failure below it"
    )
    success_patience: int = Field(5, ge=1, description="validations in a row below the threshold")
    empty_stop_steps: Common[int] = Field(5, description="steps in a row with nothing kept; <= 0: rule off")
