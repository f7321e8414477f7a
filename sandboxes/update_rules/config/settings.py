"""Settings of one run of the update-rule sandbox. Names and defaults follow the source's documents."""

from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from sandboxes.toys.settings import (
    RunnerConfig,
    Size,
    ToyRunConfig,
    reject_heads,
    reject_partial_groups,
)
from sandboxes.update_rules.config.rules import DEFAULT_METHOD, METHODS, RULES, Rule, get_rule
from trainable.config.base_config import ReadCondition
from trainable.config.conditions import derive_conditions
from trainable.config.own_parts import Choice
from trainable.config.setting_types import Common, Fraction, LocalPath, NonNegative, Outside, ParseNull, Positive

SEQUENCE_TASKS = ("token_reversal", "masked_reversal", "chain_reversal", "chain_arithmetic", "format_answer")
CHAIN_TASKS = ("chain_reversal", "chain_arithmetic", "format_answer")
TOKEN_REWARD_TASKS = ("token_reversal", "masked_reversal")
"""Tasks whose reward is a mean over tokens, so that each token has a reward."""
BANDIT_TASKS = ("mnist", "lm_bandit")
TASKS = (*SEQUENCE_TASKS, *BANDIT_TASKS)

SHARED_NOISE_MODES = ("label_flip", "random_reward", "false_positive_action0", "spurious_feature")
SEQUENCE_NOISE_MODES = ("false_positive_rare_token", "false_positive_sep")
NOISE_MODES = ("none", *SHARED_NOISE_MODES, *SEQUENCE_NOISE_MODES)
"""How a reward is corrupted: modes for every task, and modes for sequence tasks only."""

REPLAY_PRIORITIES = ("uniform", "reward", "advantage", "surprisal", "delight", "fresh_delight", "freshness")
"""What the probability of drawing a batch from the replay buffer depends on: the source's six, and age alone."""

_MODEL_SETTINGS = ("vocab_size", "seq_len", "d_model", "nhead", "num_layers")
_CONDITIONS: tuple[ReadCondition, ...] = (
    *derive_conditions(
        "task",
        {
            **dict.fromkeys(SEQUENCE_TASKS, _MODEL_SETTINGS),
            "token_reversal": (*_MODEL_SETTINGS, "binary_reward"),
            "masked_reversal": (*_MODEL_SETTINGS, "binary_reward", "score_len"),
            "mnist": ("hidden", "mnist_folder"),
            "lm_bandit": ("model_name", "text_file", "context_len", "kl_weight"),
        },
    ),
    *derive_conditions(
        "method",
        {
            method: (
                *({*rule.settings} - {"eta"}),
                *(["tpo_eta"] if rule.temperature == "target" else []),
                *(["clip_high"] if rule.clip == "clip_high" else []),
                *(["group_size"] if rule.has_groups or rule.has_candidates else []),
            )
            for method, rule in RULES.items()
        },
        others_read=True,
    ),
    ReadCondition(
        "eta",
        lambda c: (
            c.rule.temperature in ("gate", "regression")
            or "eta" in c.rule.settings
            or c.oracle_fit
            or c.method not in RULES
        ),
        "it needs a method with a gate, such as method=DG",
    ),
    ReadCondition("replay_priority", lambda c: c.replay_capacity > 0, "it needs replay_capacity above 0"),
    ReadCondition(
        "replay_age_decay",
        lambda c: (
            c.rule.discounts_age
            or c.method not in RULES
            or (c.replay_capacity > 0 and c.replay_priority in ("fresh_delight", "freshness"))
        ),
        "it needs method=FreshDG, or replay_capacity above 0 and replay_priority=fresh_delight or freshness",
    ),
)


class UpdateRuleConfig(ToyRunConfig):
    """Configuration of one run of the update-rule sandbox."""

    list_command: ClassVar[str] = "settings sandbox"
    conditions: ClassVar[tuple[ReadCondition, ...]] = _CONDITIONS

    seed: int = Field(0, ge=0, le=400, description="seed of weights, prompts, samples and noise")
    task: Common[Literal[TASKS]] = Field("mnist", description="the task to learn")  # type: ignore[valid-type]
    method: Common[Annotated[str, AfterValidator(Choice(METHODS))]] = Field(
        DEFAULT_METHOD, description="the update rule"
    )
    delay: Common[int] = Field(0, ge=0, description="steps between sampling a batch and training on it")
    batch_size: Common[Size] = Field(100, description="rollouts per step")
    lr: Common[Positive] = Field(1e-3, description="learning rate of Adam")
    inner_epochs: Common[int] = Field(1, ge=1, le=1_000, description="optimizer steps per batch")
    group_size: Common[Size] = Field(4, description="rollouts per prompt, or candidates per prefix")
    baseline: Literal["expected", "zero", "constant"] = Field(
        "expected",
        description="if the mean reward is unknown: expected (sum of squared probabilities), zero, constant (0.5)",
    )
    std_normalization: Common[bool] = Field(
        True, description="GRPO and DAPO: divide advantages by the group's deviation"
    )
    eta: Common[NonNegative] = Field(1.0, description="temperature of the delight gate; R2VPO: lambda; PMDMean: tau")
    tpo_eta: Common[NonNegative] = Field(1.0, description="temperature of TPO's target")
    grpo_beta: Common[NonNegative] = Field(0.04, description="coefficient of the KL to the sampling policy")
    iw_cap: Positive = Field(10.0, description="cap of the importance weights")
    clip_low: Common[NonNegative] = Field(0.2, description="lower clip bound of ratios: 1 - clip_low")
    clip_high: Common[NonNegative] = Field(0.28, description="ASPO and DAPO: upper clip bound of ratios: 1 + clip_high")
    kondo_keep: float = Field(0.5, gt=0, le=1, description="Kondo: fraction of rollouts to keep")
    guard_strength: Fraction = Field(0.5, description="DGEntropyGuard: largest reduction of a sample's weight")
    uncertainty_scale: NonNegative = Field(1.0, description="UncertaintyDG and RewardVarianceDG: kappa")
    uncertainty_threshold: NonNegative = Field(0.5, description="FilteredDG: largest deviation of rewards to train on")
    distill_alpha: NonNegative = Field(0.5, description="SelfDistillDG and SCOPELite: weight of the loss on labels")
    replay_capacity: Common[int] = Field(0, ge=0, description="batches in the replay buffer; 0: no replay")
    replay_priority: Common[Literal[REPLAY_PRIORITIES]] = Field(  # type: ignore[valid-type]
        "fresh_delight", description="priority by which batches are drawn from the replay buffer"
    )
    replay_age_decay: NonNegative = Field(0.02, description="fresh_delight, freshness, FreshDG: decay per step")
    reward_noise: Common[Fraction] = Field(0.0, description="probability that noise may change a reward")
    reward_noise_mode: Common[Literal[NOISE_MODES]] = Field("none", description="how noise changes a reward")  # type: ignore[valid-type]
    diagnostics: bool = Field(False, description="every 5th evaluation: cosine of the gradients of rule and oracle")
    entropy_diagnostics: bool = Field(False, description="measure the effect of updates on the entropy")
    oracle_fit: bool = Field(False, description="correlate the influence of samples on the oracle with weights")
    vocab_size: Common[Size] = Field(2, description="number of content tokens, without the separator")
    seq_len: Common[Size] = Field(10, description="tokens to produce")
    score_len: Size = Field(5, description="masked_reversal: number of last positions that count")
    binary_reward: bool = Field(False, description="reward 1 for a fully correct sequence, otherwise 0")
    d_model: Size = Field(64, description="width of the transformer")
    nhead: Size = Field(2, description="attention heads")
    num_layers: Size = Field(2, description="transformer blocks")
    hidden: Size = Field(50, description="mnist: width of the two hidden layers")
    mnist_folder: Annotated[LocalPath | None, ParseNull, Outside("file")] = Field(
        None, description="mnist: folder with MNIST's four IDX files; null: synthetic images"
    )
    model_name: Annotated[LocalPath, Outside("model")] = Field(
        "sokoban-tiny", description="lm_bandit: a causal LM, local or from the hub"
    )
    text_file: Annotated[LocalPath | None, ParseNull, Outside("file")] = Field(
        None, description="lm_bandit: a text with one passage per line; null: the shipped text"
    )
    context_len: Size = Field(128, description="lm_bandit: tokens before the one to predict")
    kl_weight: NonNegative = Field(0.0, description="lm_bandit: reward penalty per nat of KL to the initial weights")
    fallback_patience: int = Field(10, ge=1, description="batches in a row without mixed groups that end a run")
    trainer: RunnerConfig = RunnerConfig()

    @property
    def rule(self) -> Rule:
        """The record of the update rule `method`."""
        return get_rule(self.method, self.group_size)

    @property
    def samples_per_prompt(self) -> int:
        """Rollouts per prompt in a batch: group_size for grouped rules, otherwise 1."""
        return self.group_size if self.rule.has_groups else 1

    def get_row_steps(self, step: int) -> range:
        """See `ToyRunConfig`. Evaluations start at step `delay`, because batches of that age do not exist earlier."""
        return range(self.delay, step, self.trainer.test_freq)

    def list_rejections(self) -> dict[str, bool]:
        """List combinations that would not measure what their names say; see `SettingsSection`."""
        method, task, rule = self.method, self.task, self.rule
        is_bandit, is_chain = task in BANDIT_TASKS, task in CHAIN_TASKS
        is_old, is_noisy = self.delay > 0 or self.replay_capacity > 0, self.reward_noise > 0
        return {
            # Shapes and schedules.
            **reject_heads(self),
            f"replay_capacity={self.replay_capacity} drops every batch before delay={self.delay} lets it be used: "
            f"set replay_capacity above {self.delay}, or delay=0": 0 < self.replay_capacity <= self.delay,
            f"delay={self.delay} has no effect within total_training_steps={self.trainer.total_training_steps} "
            f"steps, which would all train on new batches: set num_steps above {self.delay}": (
                self.delay >= self.trainer.total_training_steps
            ),
            f"task={task} adds tokens of the prompt and needs two of them: set seq_len=2 or more": (
                task in ("chain_arithmetic", "format_answer") and self.seq_len < 2
            ),
            f"score_len={self.score_len} scores more positions than seq_len={self.seq_len} has: set "
            f"score_len={self.seq_len}, or less": task == "masked_reversal" and self.score_len > self.seq_len,
            f"task={task} rewards each part of the chain, and a binary reward has no parts: set binary_reward=false": (
                is_chain and self.binary_reward
            ),
            # Reward noise.
            f"reward_noise={self.reward_noise} with reward_noise_mode={self.reward_noise_mode}: set reward_noise above "
            "0 and a mode such as label_flip, or reward_noise=0 reward_noise_mode=none": (
                is_noisy == (self.reward_noise_mode == "none")
            ),
            f"reward_noise_mode={self.reward_noise_mode} looks for a token in a sequence, but task={task} has only "
            "one action: set reward_noise_mode=false_positive_action0, or task=token_reversal": (
                is_bandit and self.reward_noise_mode in SEQUENCE_NOISE_MODES
            ),
            # Which rule fits which regime.
            f"method={method} compares samples of the same prompt, and with group_size={self.group_size} there is "
            "nothing to compare: set group_size=2 or more": (
                (rule.has_groups or rule.has_candidates) and self.group_size < 2
            ),
            **{reason: rule.has_groups and applies for reason, applies in reject_partial_groups(self).items()},
            f"method={method} assigns credit to the tokens of a sequence, but task={task} has only one action: set "
            "task=token_reversal": rule.needs_token_labels and is_bandit,
            f"method={method} needs a reward for each token, without noise: set task=token_reversal or "
            "task=masked_reversal, binary_reward=false reward_noise=0 reward_noise_mode=none": (
                rule.needs_token_rewards and (task not in TOKEN_REWARD_TASKS or self.binary_reward or is_noisy)
            ),
            f"method={method} needs candidates from the current policy, so it cannot train on old batches: set "
            "delay=0 replay_capacity=0": rule.has_candidates and is_old,
            f"method={method} trains on candidates, but the diagnostics measure only the tokens that were taken: "
            "set diagnostics=false entropy_diagnostics=false oracle_fit=false": (
                rule.has_candidates and (self.diagnostics or self.entropy_diagnostics or self.oracle_fit)
            ),
            f"method={method} without a replay buffer is the same as {rule.on_policy_rule}: set replay_capacity=5, "
            f"or method={rule.on_policy_rule}": rule.needs_replay and self.replay_capacity == 0,
            f"method={method} on batches of age 0 is the same as {rule.on_policy_rule}: set replay_capacity=5 or "
            f"delay=4, or method={rule.on_policy_rule}": rule.discounts_age and not is_old,
            f"method={method} weights a sample by the probability of one action, but task={task} has sequences: set "
            "task=mnist": rule.needs_one_action and not is_bandit,
            f"method={method} is defined for rewards without a KL term, but kl_weight={self.kl_weight} adds one: "
            "set kl_weight=0": rule.needs_kl_free_rewards and self.kl_weight > 0,
            f"method={method} is derived for rewards that are always correct, and noise breaks that: set "
            "reward_noise=0 reward_noise_mode=none": rule.needs_noise_free_rewards and is_noisy,
            f"method={method} divides by a success rate, so rewards must be 0 or 1: set task=token_reversal "
            "binary_reward=true, or kl_weight=0 with task=lm_bandit": (
                rule.needs_success_rate
                and ((not is_bandit and not self.binary_reward) or (task == "lm_bandit" and self.kl_weight > 0))
            ),
            f"method={method} builds a target over all actions of one choice, and only mnist has few enough: set "
            "task=mnist": rule.needs_all_actions and task != "mnist",
            f"method={method} builds its target from the current policy, so old samples would move the target: set "
            "delay=0 replay_capacity=0 inner_epochs=1": rule.needs_all_actions and (is_old or self.inner_epochs > 1),
            # Values that a rule would divide by zero, or that leave it without effect.
            f"method={method} needs an eta above 0: set eta=1": (
                rule.temperature in ("gate", "regression") and self.eta == 0
            ),
            f"method={method} divides rewards by tpo_eta, which must be above 0: set tpo_eta=1": (
                rule.temperature == "target" and self.tpo_eta == 0
            ),
            f"clip_low={self.clip_low} clips nothing, because a ratio is never below 0: set clip_low=0.2, or "
            "another value below 1": rule.clip is not None and self.clip_low >= 1,
        }
