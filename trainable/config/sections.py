"""The settings of a PPO run by section, with types, bounds and descriptions. Defaults are the published values.

`python -m tune_study settings` prints the descriptions.
"""

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from trainable.config.base_config import BaseTrainerConfig, SettingsSection
from trainable.config.choices import (
    ADVANTAGE_ESTIMATORS,
    EXACT_KL,
    FILTER_METRICS,
    FILTER_STRATEGIES,
    OWN_ESTIMATOR,
    OWN_FILTER,
    OWN_LOSS,
    POLICY_LOSSES,
    AdvantageEstimator,
    FilterStrategy,
    PolicyLossKind,
)
from trainable.config.constants import MAX_DEFAULT_THREADS
from trainable.config.games import (
    GAMES,
    OWN_GAME,
    CountdownConfig,
    DatasetConfig,
    FrozenLakeConfig,
    Game,
    MastermindConfig,
    PapersConfig,
)
from trainable.config.own_parts import Choice
from trainable.config.setting_types import (
    MAX_FLOAT,
    MAX_LEVELS,
    AlarmText,
    Common,
    Finite,
    Fraction,
    FractionBelowOne,
    GroupCount,
    KLKind,
    LocalPath,
    LoraTargets,
    LossAggMode,
    NonNegative,
    Outside,
    ParseNull,
    Patience,
    Positive,
    PowerOfTwo,
    Precision,
    PromptStyle,
    reject_episodes,
)

GAME_REWARD = "game"
"""The value of env.reward that selects the rewards of the game."""

GameName = Annotated[str, AfterValidator(Choice(tuple(GAMES)))]
RewardName = Annotated[str, AfterValidator(Choice((GAME_REWARD,)))]
FilterStrategyName = Annotated[str, AfterValidator(Choice(tuple(FILTER_STRATEGIES)))]
PolicyLossName = Annotated[str, AfterValidator(Choice(tuple(POLICY_LOSSES)))]
EstimatorName = Annotated[str, AfterValidator(Choice(tuple(ADVANTAGE_ESTIMATORS)))]
OwnPartName = Annotated[str, AfterValidator(Choice(()))]


class ModelConfig(SettingsSection):
    """The policy model, its prompts, its precision and its LoRA adapters."""

    path: Annotated[Common[LocalPath], Outside("model")] = "Qwen/Qwen2.5-3B"
    """Hugging Face id, folder, or a shipped policy: sokoban-tiny, frozenlake-tiny, mastermind-tiny"""
    prompt_style: PromptStyle = "full"
    """the published prompt, or a compact one for the shipped model"""
    chat_format: Literal["auto", "chatml"] = "auto"
    """auto: the tokenizer's chat template, or ChatML if it has none; chatml: always ChatML"""
    dtype: Precision = "bfloat16"
    """precision of forward and backward passes; weights, optimizer and sums stay float32"""
    loss_scale: PowerOfTwo = 2.0**16
    """a power of two that losses are multiplied by in backward passes in float16, and gradients divided by, since
    float16 would round the smallest ones to 0"""
    head_dtype: Literal["model", "float32"] = "model"
    """type of logits in trainer, engine and reference; model: model.dtype; float32: the same products, summed in
    float32 and not rounded"""
    enable_gradient_checkpointing: bool = True
    """recompute each block in the backward pass: less memory, slower"""
    compiled_passes: bool = False
    """forward and backward passes of tiny Qwen2 models in compiled code, in float32 on a CPU; numbers differ from torch
    by rounding"""
    reference_path: Annotated[LocalPath | None, ParseNull, Outside("model")] = None
    """the model that KL terms refer to, such as a teacher, with the policy's tokenizer: a Hugging Face id, a folder, or
    a shipped policy or its teacher; null: the policy before training"""
    lora_rank: int = Field(0, ge=0, le=1024)
    """rank of the LoRA adapters over frozen weights; 0: full fine-tuning"""
    lora_alpha: Positive = Field(16, description="LoRA alpha: adapters are scaled by alpha / rank")
    lora_target_modules: LoraTargets = "all-linear"
    """linear layers that get an adapter, such as [q_proj,v_proj]; all-linear: all of them"""
    load_in_4bit: bool = False
    """with LoRA: store all linear layers of the blocks in 4 bits (NF4, by bitsandbytes) instead of model.dtype, for
    less memory"""


class EnvConfig(SettingsSection):
    """The game, its levels and groups, and the limits of an episode."""

    name: Common[GameName] = "sokoban"
    """the game; each game but sokoban has a section env.NAME of settings of its own"""
    reward: RewardName = GAME_REWARD
    """game: the rewards of the game; or a function that replaces them, turn by turn"""

    env_groups: Common[GroupCount] = Field(8, description="P: training prompts (levels) per step")
    group_size: Common[int] = Field(16, ge=1, description="G: rollouts per training prompt")
    val_env_groups: Common[GroupCount] = Field(512, description="validation levels, the same at every validation")
    val_group_size: int = Field(1, ge=1, description="rollouts per validation level")
    test_env_groups: int = Field(512, ge=0, le=512)
    """test levels, evaluated once after the last step; 0: none"""
    seed_train: int = Field(10_000, ge=0, le=200_000_000)
    """seed of the first training level (run seed k adds 1,000,000 k)"""
    seed_val: int = Field(123, ge=0, le=200_000_000, description="seed of the first validation level")
    max_turn: Common[int] = Field(5, ge=1, description="maximum turns (replies) per episode")
    max_actions_per_turn: int = Field(2, ge=1, le=1_000, description="maximum actions executed per turn")
    max_actions_per_traj: int = Field(10, ge=1, description="maximum actions executed per episode")
    format_penalty: Annotated[float, Field(le=0, allow_inf_nan=False)] = -0.1
    """added to the episode's score for each turn with an invalid or empty answer"""
    overlong_buffer_len: int = Field(0, ge=0)
    """soft overlong punishment: the last N tokens before rollout.response_length, over which the score of the episode
    falls linearly by overlong_penalty_factor for each reply (DAPO); 0: none"""
    overlong_penalty_factor: Positive = 1.0
    """punishment of a reply of full length, with overlong_buffer_len"""
    observation_format: Literal["grid_coord", "grid", "coord"] = "grid_coord"
    """how the full prompt shows a board or map; ignored by the compact prompt"""
    frozenlake: FrozenLakeConfig = FrozenLakeConfig()
    mastermind: MastermindConfig = MastermindConfig()
    countdown: CountdownConfig = CountdownConfig()
    dataset: DatasetConfig = DatasetConfig()
    papers: PapersConfig = PapersConfig()

    @property
    def max_conversations_per_rollout(self) -> int:
        """In a game of trees, a root and the maximum number of its children; otherwise 1."""
        return 1 + self.papers.max_children if self.kind.has_trees else 1

    @property
    def kind(self) -> Game:
        """The declaration of the selected game."""
        return GAMES.get(self.name, OWN_GAME)

    def list_rejections(self) -> dict[str, bool]:
        """See `SettingsSection`."""
        return {
            **reject_episodes("env_groups", self.env_groups, "group_size", self.group_size),
            **reject_episodes("val_env_groups", self.val_env_groups, "val_group_size", self.val_group_size),
        }


class RolloutConfig(SettingsSection):
    """Sampling and the inference engine."""

    name: Literal["torch", "compiled", "vllm"] = "vllm"
    """inference engine for sampling; compiled: the tiny models on a CPU, in numba"""
    temperature: Common[Positive] = 1.0
    """sampling temperature in training; every log-prob is of the tempered distribution"""
    val_temperature: NonNegative = Field(0.5, description="sampling temperature for validation and test; 0: greedy")
    response_length: Common[int] = Field(400, ge=1, description="maximum new tokens per turn")
    log_prob_micro_batch_size_per_gpu: int = Field(8, ge=1)
    """maximum sequences per forward pass without gradients, if all were as long as the longest"""
    ref_log_prob_micro_batch_size_per_gpu: int = Field(8, ge=1)
    """maximum sequences per forward pass of the reference, if all were as long as the longest"""
    gpu_memory_utilization: Annotated[float | None, ParseNull] = Field(None, gt=0, le=1)
    """fraction of a run's GPU memory reserved for vLLM; null: as kv_cache_gib says"""
    kv_cache_gib: Annotated[Positive | None, ParseNull] = None
    """GiB of vLLM's KV cache; null: what the conversations of a training step need, or as many of them as fit"""
    enforce_eager: bool = Field(False, description="run vLLM without CUDA graphs: starts faster, samples slower")
    free_cache_engine: bool = Field(True, description="free vLLM's weights and KV cache on the GPU during updates")
    max_model_len: Annotated[int | None, ParseNull] = Field(3600, ge=1)
    """maximum tokens per conversation; null: the model's context length"""
    logprob_tolerance: Positive = 0.05
    """fail the run if vLLM's and the trainer's log-probs of a fixed prompt differ by more on average after a sync
    (nats); larger differences over sampled tokens are only reported"""
    recompute_logprobs: bool = True
    """train from log-probs that the trainer recomputes for the sampled tokens; False: from those of an engine with its
    own weights, without a pass, so that ratios contain the mismatch"""
    weight_noise: NonNegative = Field(0.0, le=1.0)
    """std of the noise that each sync adds to the engine's weights, relative to their size: rounding of bfloat16 is
    about 0.001"""
    ts_n: int = Field(0, ge=0, le=1_000)
    """N: nodes per prefix tree and round, from which new training episodes branch (Tree-GRPO); 0: none. A group has
    trees of 1 + ts_l ts_n episodes"""
    ts_l: int = Field(1, ge=1, le=1_000, description="L: rounds of branching")
    gradient_analysis_num_buckets: int = Field(6, ge=1)
    """number of buckets of groups by reward std, for bucket mode quantile"""
    gradient_analysis_bucket_mode: Literal["quantile", "fixed_rv"] = "quantile"
    """quantile: equally many groups per bucket; fixed_rv: edges at reward std 1, 2, 3, 4, 5"""

    def list_rejections(self) -> dict[str, bool]:
        """See `SettingsSection`."""
        # If max_model_len is null, the model limits the context, and the plan checks it.
        return {
            f"max_model_len={self.max_model_len}: a conversation has a prompt and a reply of up to "
            f"response_length={self.response_length} tokens: set a longer rollout.max_model_len, or null for the "
            "model's context, or a shorter rollout.response_length": (
                self.max_model_len is not None and self.max_model_len <= self.response_length
            )
        }

    @property
    def episodes_per_tree(self) -> int:
        """Number of episodes of a prefix tree; 1 if episodes do not branch."""
        return 1 + self.ts_l * self.ts_n

    @property
    def uses_vllm(self) -> bool:
        """Whether vLLM samples, with its own weights and KV cache."""
        return self.name == "vllm"

    @property
    def uses_compiled_sampler(self) -> bool:
        """Whether the compiled sampler of the tiny models samples."""
        return self.name == "compiled"

    @property
    def has_own_weights(self) -> bool:
        """Whether the engine samples from a copy of the trainer's weights, as vLLM and engines with noise do."""
        return self.uses_vllm or self.weight_noise > 0

    @property
    def trains_from_engine_logprobs(self) -> bool:
        """Whether training uses log-probs from an engine with its own weights, which may differ from the trainer's."""
        return self.has_own_weights and not self.recompute_logprobs

    @property
    def has_entropies(self) -> bool:
        """Whether training episodes have entropies. vLLM reports none, so with it the trainer must recompute."""
        return self.recompute_logprobs or not self.uses_vllm


class FilterConfig(SettingsSection):
    """The reward-variance filter: which groups of a step are trained on."""

    rollout_filter_strategy: Common[FilterStrategyName] = "top_p"
    """how to keep groups; top_p: score mass; top_k, top_f: fraction; top_k_abs: count; min_p: ratio"""
    rollout_filter_value: Common[Positive] = 1.0
    """score mass (top_p), fraction of groups (top_k, top_f), group count (top_k_abs), or minimum score relative to the
    best (min_p)"""
    rollout_filter_type: Literal["largest", "smallest"] = "largest"
    """keep the groups with the largest or the smallest scores"""
    rollout_filter_metric: Common[Literal[tuple(FILTER_METRICS)]] = "reward_variance"  # type: ignore[valid-type]
    """score of a group; reward_variance is in fact the standard deviation, as published"""
    rollout_filter_include_zero: Common[bool] = True
    """False: drop groups with score 0 before the strategy is applied"""
    rollout_filter_top_p_prob_mode: Literal["softmax", "linear"] = "linear"
    """top_p mass of softmax(scores), which depends on their scale, or of the scores"""
    rollout_filter_selection_eps: NonNegative = 0.01
    """linear top_p: subtracted from the score mass that must be reached, in units of the score"""
    max_num_gen_batches: int = Field(1, ge=1, le=100)
    """dynamic sampling (DAPO): sample and filter up to N batches of env.env_groups levels per step, until as many
    groups have passed the filter; surplus groups are dropped"""
    mask_void_turns: bool = False
    """leave episodes with a turn without a valid answer out of the losses (SimpleTIR); advantages count them"""
    mask_only_void_turns: bool = False
    """with mask_void_turns: leave out the tokens of these turns alone, and train the other turns of the episode"""
    mask_truncated_completions: bool = False
    """leave episodes with a reply of full length, or that ran out of context, out of the losses (overlong filtering);
    advantages count them"""

    @property
    def masks_episodes(self) -> bool:
        """Whether losses leave out some episodes of the groups that the filter kept."""
        return self.mask_void_turns or self.mask_truncated_completions

    @property
    def strategy(self) -> FilterStrategy:
        """The declaration of the selected strategy."""
        return FILTER_STRATEGIES.get(self.rollout_filter_strategy, OWN_FILTER)

    def list_rejections(self) -> dict[str, bool]:
        """See `SettingsSection`."""
        value, strategy = self.rollout_filter_value, self.strategy
        start = f"rollout_filter_value={value}: must be"
        return {
            f"{start} a whole number of groups (1, 2, 3, ...) for {self.rollout_filter_strategy}": (
                strategy.counts_groups and (value < 1 or value != int(value))
            ),
            f"{start} in (0, 1] for {self.rollout_filter_strategy} (try --set filter.rollout_filter_value=0.9)": (
                value > 1 and not strategy.counts_groups and not strategy.takes_any_value
            ),
        }


class OptimConfig(SettingsSection):
    """Optimizer settings that actor and critic both have: AdamW and mini-batches."""

    betas: tuple[FractionBelowOne, FractionBelowOne] = (0.9, 0.999)
    """AdamW betas: decay of the first and second moments"""
    weight_decay: NonNegative = Field(0.01, description="AdamW weight decay (decoupled)")
    grad_clip: Positive = Field(1.0, description="clip the global gradient norm at this value")
    ppo_epochs: int = Field(1, ge=1, le=1_000, description="epochs over each step's batch")
    ppo_mini_batch_size: Common[int] = Field(32, ge=1, description="sequences per optimizer step")
    ppo_micro_batch_size_per_gpu: int = Field(4, ge=1)
    """micro-batch size: number of sequences that a loss is averaged over, with all modes of loss_agg_mode but
    token-mean-global"""
    lr: Common[Positive] = Field(1e-6, description="learning rate")

    def list_rejections(self) -> dict[str, bool]:
        """See `SettingsSection`."""
        return {
            # AdamW passes this quotient to a float32 kernel, which raises an error if it overflows. The quotient is
            # largest in the first step, since later steps divide by 1 - betas[0] ** step.
            f"lr={self.lr}: must be at most {MAX_FLOAT * (1 - self.betas[0]):.2g}, because AdamW divides it by "
            f"1 - betas[0], and float32 ends at {MAX_FLOAT:.2g} (the default is "
            f"{type(self).model_fields['lr'].default})": self.lr / (1 - self.betas[0]) > MAX_FLOAT,
            # The loss is a mean over micro-batches, as published, so they must have the same size.
            f"ppo_micro_batch_size_per_gpu={self.ppo_micro_batch_size_per_gpu}: does not divide "
            f"ppo_mini_batch_size={self.ppo_mini_batch_size}": (
                self.ppo_mini_batch_size % self.ppo_micro_batch_size_per_gpu != 0
            ),
        }


class ActorConfig(OptimConfig):
    """The policy's losses and optimizer."""

    policy_loss: Common[PolicyLossName] = "ppo_clip"
    """ppo_clip: clipped token ratios; gspo: clipped ratios of episodes, for clip ranges such as 3e-4 and 4e-4; cispo:
    REINFORCE with clipped token ratios as weights; cppo: a bound on the change of a token's probability that depends on
    its prefix; tpo: target policy optimization over the rollouts of a group"""
    tpo_eta: Positive = 1.0
    """tpo temperature: the skill that makes a rollout e times as likely in the target"""
    clip_ratio_low: Common[Fraction] = 0.2
    """lower clip range: ratios are clipped to >= 1 - this; 1: no lower bound, as cispo was published"""
    clip_ratio_high: Common[NonNegative] = 0.28
    """upper clip range: ratios are clipped to <= 1 + this"""
    clip_ratio_c: Annotated[float, Field(gt=1, allow_inf_nan=False)] = 3.0
    """dual clip: upper bound of the ratio for negative advantages"""
    cppo_delta: Positive = 0.15
    """cppo: the largest change of a token's probability at the start of an episode"""
    cppo_delta_b: NonNegative = 0.015
    """cppo: the mean change over a prefix beyond which less is allowed after it"""
    cppo_w_min: Annotated[float, Field(gt=0, le=1)] = 0.8
    """cppo: weight of the last token's change; it falls from 1 at the first token"""
    stapo_tau_p: Annotated[float | None, ParseNull] = Field(None, gt=0, le=1)
    """STAPO: drop the policy loss of tokens with a positive advantage and a probability below this, such as 0.002, and
    low entropy; null: off"""
    stapo_entropy_quantile: Fraction = 0.75
    """with stapo_tau_p: the fraction of these tokens, those of lowest entropy, that is dropped"""
    loss_agg_mode: LossAggMode = "token-mean"
    """how token losses are aggregated; token-mean, as published, is a mean of the means of micro-batches, and
    token-mean-global a mean over all tokens of a mini-batch"""
    entropy_coeff: Common[Finite] = 0.0
    """entropy bonus coefficient (full vocabulary, response tokens); 0: none"""
    entropy_from_logits_with_chunking: bool = True
    """compute the entropy in chunks to bound memory; changes no number"""
    use_kl_loss: Common[bool] = False
    """add a penalty on the KL to the frozen reference to the actor loss"""
    kl_loss_coef: Common[NonNegative] = Field(0.001, description="coefficient of the KL loss; 0: turns use_kl_loss off")
    kl_loss_type: Common[KLKind] = "kl"  # type: ignore[valid-type]
    """KL estimator of the loss; kl, the published one, does not pull towards the reference"""
    tis_imp_ratio_cap: Annotated[float | None, ParseNull] = Field(None, ge=1, allow_inf_nan=False)
    """importance sampling from the engine's to the trainer's distribution: cap of a weight, such as 2; null: off"""
    tis_mode: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = "token_truncate"
    """with tis_imp_ratio_cap: weights of tokens, or their product over an episode; above the cap truncated to it (TIS),
    or set to 0"""
    tis_imp_ratio_floor: Annotated[Fraction | None, ParseNull] = None
    """with a mask: smaller weights are set to 0, too; IcePop: token_mask from 0.5 to 5; null: none"""
    filter_loss_scaling: Literal["none", "linear", "sqrt"] = "none"
    """scale advantages by the fraction of groups kept (linear) or its square root (sqrt)"""

    @property
    def reads_reference_distribution(self) -> bool:
        """Whether the loss has the exact KL, which needs the reference's distribution over the whole vocabulary."""
        return self.use_kl_loss and self.kl_loss_type == EXACT_KL

    def list_rejections(self) -> dict[str, bool]:
        """See `SettingsSection`."""
        return {
            **super().list_rejections(),
            f"tis_imp_ratio_floor={self.tis_imp_ratio_floor}: needs tis_mode=token_mask or sequence_mask, because "
            f"{self.tis_mode} sets no weight to 0": (
                self.tis_imp_ratio_floor is not None and not self.tis_mode.endswith("mask")
            ),
        }

    @property
    def loss(self) -> PolicyLossKind:
        """The declaration of the selected policy loss, with its requirements."""
        return POLICY_LOSSES.get(self.policy_loss, OWN_LOSS)


class CriticConfig(OptimConfig):
    """The value function's loss and optimizer."""

    lr: Common[Positive] = 1e-5
    """learning rate; with shared_trunk, of the value head alone"""
    cliprange_value: Positive = 0.5
    """clip range of the value loss: how far a value may move from its old one"""
    shared_trunk: bool = Field(False, description="put the value head on the policy's trunk: one network, one update")


class KLControl(SettingsSection):
    """The coefficient of the KL penalty in the reward (use_kl_in_reward)."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """fixed: constant kl_coef; adaptive: adjust it towards target_kl"""
    kl_coef: NonNegative = 0.0
    """coefficient of the KL penalty in the reward (adaptive: initial value); 0: none"""
    target_kl: Positive = Field(0.1, description="target KL for adaptive, in nats per token")
    horizon: Positive = 10_000.0
    """adaptive: sequences over which kl_coef changes by at most about 20 %"""


class AlgorithmConfig(SettingsSection):
    """Advantage estimation and the KL penalty in the reward."""

    adv_estimator: Common[EstimatorName] = "gae"
    """advantage estimator; gae trains a critic, the others need none"""
    gamma: Common[Fraction] = Field(1.0, description="discount factor per token")
    lam: Common[Fraction] = Field(1.0, description="GAE lambda")
    critic_lam: Annotated[Fraction | None, ParseNull] = None
    """GAE lambda of the returns that the critic is fitted to; null: lam. VC-PPO and VAPO: 1, with lam=0.95"""
    bi_level_gae: bool = Field(False, description="gae: first over turns, then over the tokens of each turn")
    high_level_gamma: Fraction = Field(0.95, description="discount factor per turn, for bi_level_gae")
    norm_adv_by_std_in_grpo: bool = True
    """grpo, tree: divide by the group's standard deviation (False: Dr. GRPO)"""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """grpo, tree: the scores whose standard deviation norm_adv_by_std_in_grpo divides by; batch: all of the batch (Lite
    PPO); none: turns norm_adv_by_std_in_grpo off"""
    tree_weighting: Literal["root-and-children", "one-per-tree"] = "root-and-children"
    """papers: weight of the root of a tree and of all its children, 1 each as published, or 1 together"""
    train_children: bool = Field(True, description="papers: train the children of a tree, too")
    zero_task_advantage: Common[bool] = False
    """set advantages to 0, so that only KL and entropy move the policy"""
    use_kl_in_reward: Common[bool] = Field(False, description="subtract a KL penalty from each token's reward")
    kl_penalty: KLKind = Field("kl", description="KL estimator of the penalty in the reward")  # type: ignore[valid-type]
    kl_ctrl: KLControl = KLControl()

    @property
    def estimator(self) -> AdvantageEstimator:
        """The declaration of the selected advantage estimator, with its requirements."""
        return ADVANTAGE_ESTIMATORS.get(self.adv_estimator, OWN_ESTIMATOR)

    def list_rejections(self) -> dict[str, bool]:
        """See `SettingsSection`."""
        return {
            f"bi_level_gae=True: needs adv_estimator=gae, not {self.adv_estimator}": (
                self.bi_level_gae and not self.estimator.has_turn_level
            ),
            "kl_penalty=full: needs whole distributions; in the reward use kl, abs, mse or low_var_kl": (
                self.use_kl_in_reward and self.kl_penalty == EXACT_KL
            ),
        }

    @model_validator(mode="after")
    def _disable_scaling(self) -> Self:
        if self.scale_rewards == "none":
            # Written past the frozen pydantic model, before anyone else has the instance.
            self.__dict__["norm_adv_by_std_in_grpo"] = False
        return self


class TrainerConfig(BaseTrainerConfig):
    """The length of a run, its schedule of validations, checkpoints and analyses, and its hardware."""

    total_training_steps: Common[int] = Field(400, ge=1, le=100_000, description="training steps per run")
    test_freq: Common[int] = 10
    """validate every N steps and after the last; <= 0: only the final evaluation"""
    val_before_train: bool = Field(True, description="validate the untrained policy before step 1")
    measure_val_kl: bool = False
    """measure the KL to the reference at each sampled validation, also without a KL term"""
    ref_model_sync_steps: Annotated[int | None, ParseNull] = Field(None, ge=1)
    """after every N steps, move the reference of KL terms to the policy, so that it can go further; null: never"""
    ref_model_mixup_alpha: float = Field(1.0, gt=0, le=1)
    """with ref_model_sync_steps: weight of the policy in the new reference, beside the old one; 1: a copy"""
    ref_model_reset_kl: Annotated[Positive | None, ParseNull] = None
    """copy the policy to the reference after a step whose kl_to_reference was above this, in nats; null: never"""
    ref_model_reset_optimizer: bool = False
    """when the reference becomes a copy of the policy, set the moments of the actor's optimizer to 0 (ProRL)"""
    log_val_generations: int = Field(0, ge=0, le=MAX_LEVELS)
    """record the text of a sampled episode of the first N validation levels"""
    log_train_generations: int = Field(0, ge=0, le=MAX_LEVELS)
    """at each validation, also record the text of the first N episodes that the step trained on, with the advantage of
    each turn"""
    save_freq: Common[int] = Field(-1, description="keep a checkpoint (folder global_step_<N>) every N steps; -1: none")
    keep_best: bool = False
    """also keep the rolling checkpoint of the best validation so far (val_success)"""
    keep_last: bool = True
    """keep the last state of a run that has ended; false: only what save_freq and keep_best keep"""
    resume_every: Common[int] = Field(25, ge=1, description="write the rolling checkpoint for recovery every N steps")
    resume_seconds: Annotated[NonNegative | None, ParseNull] = None
    """write it earlier, so that at most N seconds of training are lost; null: by steps only"""
    async_checkpoints: bool = False
    """write checkpoints while the next step samples, instead of waiting for the disk"""
    nonfinite_patience: int = Field(3, ge=1)
    """fail the run after N consecutive steps that skip an update for non-finite numbers"""
    own_stop_rules: tuple[OwnPartName, ...] = ()
    """functions of yours that may stop a run too, such as [my_rules.py:too_long]"""
    disk_patience: Patience = Field(600.0, description="seconds to wait while the disk is full")
    critic_warmup: int = Field(0, ge=0)
    """first step that updates the policy (earlier ones train only the critic); 0 or 1: all do"""
    gradient_analysis_mode: bool = Field(False, description="analyze the gradients of buckets of groups")
    gradient_analysis_every: int = Field(50, ge=1, description="analyze gradients at step 1 and every N steps after it")
    gradient_analysis_env_groups: Annotated[int | None, ParseNull] = Field(None, ge=1)
    """groups sampled for the analysis; null here or for the group size: the step's batch is used"""
    gradient_analysis_group_size: Annotated[int | None, ParseNull] = Field(None, ge=2)
    """rollouts per group sampled for the analysis"""
    gradient_analysis_sketch: Annotated[int | None, ParseNull] = Field(2**18, ge=2**8, le=2**24)
    """sketch size: entries per gradient; null: whole gradients, dozens of model copies"""
    gradient_analysis_log_prefilter: bool = Field(False, description="also analyze the batch before the filter")
    gradient_analysis_only: bool = Field(False, description="update neither policy nor critic; only analyze")
    exit_after_gradient_analysis: bool = Field(False, description="end the run after the first analysis")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: the GPU if one is visible, else the CPU")
    n_gpus_per_node: Common[NonNegative] = Field(1, le=64)
    """GPUs per trial: a fraction of one, or a whole number"""
    strategy: Literal["auto", "torch", "deepspeed"] = "auto"
    """training backend; auto: torch on one device, DeepSpeed on several"""
    zero_stage: int = Field(2, ge=1, le=3)
    """ZeRO stage of DeepSpeed: shards 1 optimizer, 2 also gradients, 3 also weights"""
    offload_optimizer: bool = Field(False, description="DeepSpeed: keep the optimizer state in CPU memory")
    offload_parameters: bool = False
    """DeepSpeed with zero_stage=3: keep the weights in CPU memory between updates"""
    swap_to_host: Annotated[bool | None, ParseNull] = None
    """keep networks and optimizer states in host memory while nothing reads them: less GPU memory, a few seconds per
    step, the same numbers; null: only if the run would not fit otherwise"""
    ray_num_cpus: int = Field(16, ge=1, description="CPUs given to Ray")
    num_threads: Annotated[int | None, ParseNull] = Field(
        None,
        ge=1,
        le=64,
        description="CPU threads per GPU of a run, for checkpoints, loading and vLLM's scheduler; null: its share of "
        f"the cores, at most {MAX_DEFAULT_THREADS}; without a GPU, threads and CPUs of a run, whose sums depend on it; "
        "null: 1",
    )
    logger: tuple[Literal["console", "wandb", "tensorboard"], ...] = ("console", "tensorboard")
    """add wandb to log to it offline; console and tensorboard are always on"""

    @property
    def cpu_threads(self) -> int:
        """Threads with which a run without a GPU computes. It reserves as many CPUs."""
        return self.num_threads or 1 if self.n_gpus_per_node == 0 else 1

    def is_gradient_analysis_step(self, step: int) -> bool:
        """Check whether gradients are analyzed at `step`, counted from 1: at step 1 and every N steps after it."""
        return self.gradient_analysis_mode and (step - 1) % self.gradient_analysis_every == 0

    @property
    def uses_deepspeed(self) -> bool:
        """Whether DeepSpeed runs the optimizers, as it always does with several GPUs: torch updates on one device."""
        return self.strategy == "deepspeed" or self.n_gpus_per_node > 1

    @model_validator(mode="after")
    def _stop_after_first_analysis(self) -> Self:
        if self.gradient_analysis_mode and self.exit_after_gradient_analysis:
            # Written past the frozen pydantic model, before anyone else has the instance. The first analysis is at
            # step 1.
            self.__dict__["total_training_steps"] = 1
        return self

    def list_rejections(self) -> dict[str, bool]:
        """See `SettingsSection`."""
        groups, size = self.gradient_analysis_env_groups or 1, self.gradient_analysis_group_size or 1
        return {
            **reject_episodes("gradient_analysis_env_groups", groups, "gradient_analysis_group_size", size),
            "swap_to_host=True: with DeepSpeed it needs zero_stage=3 and offload_optimizer=False, and these are "
            f"{self.zero_stage} and {self.offload_optimizer}": (
                bool(self.swap_to_host) and self.uses_deepspeed and (self.zero_stage != 3 or self.offload_optimizer)
            ),
            "offload_parameters=True: needs zero_stage=3, which shards the weights over the ranks; zero_stage is "
            f"{self.zero_stage}": self.offload_parameters and self.zero_stage != 3,
        }


class CollapseDetectionConfig(SettingsSection):
    """The mutual information between prompts and thoughts: a diagnosis that never stops a run."""

    first_turn_enabled: Common[bool] = True
    """score first-turn thoughts against the first prompts of all groups"""
    multi_turn_enabled: Common[bool] = True
    """score thoughts of all turns against the prompts of all of these turns"""
    compute_freq: Common[int] = Field(5, ge=1, description="diagnose at step 1 and at every N-th step")
    num_samples: int = Field(64, ge=2, description="maximum number of thoughts scored per diagnosis")
    all_quantities: bool = Field(False, description="also write the 28 quantities per sample that published logs have")


class EarlyStopConfig(SettingsSection):
    """The thresholds and windows of the published stop rules, and an optional alarm."""

    variance_baseline_steps: int = Field(10, ge=1)
    """the first N non-empty steps, whose mean reward std is the baseline"""
    variance_window: int = Field(10, ge=1)
    """stop when the last N non-empty steps are all below the threshold"""
    variance_ratio: Common[NonNegative] = 0.1
    """threshold of the reward std, as a fraction of the baseline"""
    success_threshold: Common[Fraction] = Field(0.01, description="validation success below this counts as a failure")
    success_patience: int = Field(5, ge=1, description="stop after N consecutive validations below the threshold")
    empty_stop_steps: Common[int] = 5
    """stop after N consecutive steps with no group kept; <= 0: never"""
    alarm: AlarmText = ""
    """also stop when a measure is beyond a threshold, as the command `alarms` prints it; "": never"""
