"""Settings of one run of the update-rule sandbox. Names and defaults follow the source's documents."""

from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from sandboxes.toys.settings import RunnerConfig, ToyRunConfig
from sandboxes.update_rules.config.conditions import NOISE_MODES, REPLAY_PRIORITIES, TASKS, UPDATE_RULE_CONDITIONS
from sandboxes.update_rules.config.rejections import find_rejection
from sandboxes.update_rules.config.rules import DEFAULT_METHOD, METHODS, Rule, get_rule
from trainable.config.base_config import ReadCondition
from trainable.config.own_parts import Choice
from trainable.config.setting_types import Common, Fraction, LocalPath, NonNegative, Outside, ParseNull, Positive

MethodName = Annotated[str, AfterValidator(Choice(METHODS))]


class UpdateRuleConfig(ToyRunConfig):
    """Configuration of one run of the update-rule sandbox."""

    list_command: ClassVar[str] = "settings sandbox"
    conditions: ClassVar[tuple[ReadCondition, ...]] = UPDATE_RULE_CONDITIONS

    seed: int = Field(0, ge=0, le=400, description="seed of weights, prompts, samples and noise")
    task: Common[Literal[TASKS]] = Field("mnist", description="the task to learn")  # type: ignore[valid-type]
    method: Common[MethodName] = Field(DEFAULT_METHOD, description="the update rule")
    delay: Common[int] = Field(0, ge=0, description="steps between sampling a batch and training on it")
    batch_size: Common[int] = Field(100, ge=1, description="rollouts per step")
    lr: Common[Positive] = Field(1e-3, description="learning rate of Adam")
    inner_epochs: Common[int] = Field(1, ge=1, le=1_000, description="optimizer steps per batch")
    group_size: Common[int] = Field(
        4, ge=1, description="grouped rules: rollouts per prompt; rules with candidates: candidates per prefix"
    )
    baseline: Literal["expected", "zero", "constant"] = Field(
        "expected",
        description="where the mean reward is not known: expected (sum of squared probabilities), zero, constant (0.5)",
    )
    std_normalization: Common[bool] = Field(
        True, description="GRPO and DAPO: divide a group's advantages by the standard deviation of its rewards"
    )
    eta: Common[NonNegative] = Field(1.0, description="temperature of the delight gate; R2VPO: lambda; PMDMean: tau")
    tpo_eta: Common[NonNegative] = Field(1.0, description="temperature of TPO's target")
    grpo_beta: Common[NonNegative] = Field(0.04, description="coefficient of the KL to the sampling policy")
    iw_cap: Positive = Field(10.0, description="cap of the importance weights")
    clip_low: Common[NonNegative] = Field(0.2, description="lower clip bound of ratios: 1 - clip_low")
    clip_high: Common[NonNegative] = Field(
        0.28, description="upper clip bound of ratios, ASPO and DAPO: 1 + clip_high; other rules: 1 + clip_low"
    )
    kondo_keep: float = Field(0.5, gt=0, le=1, description="Kondo: fraction of rollouts to keep")
    guard_strength: Fraction = Field(0.5, description="DGEntropyGuard: largest reduction of a sample's weight")
    uncertainty_scale: NonNegative = Field(1.0, description="UncertaintyDG and RewardVarianceDG: kappa")
    uncertainty_threshold: NonNegative = Field(
        0.5, description="FilteredDG: leave out samples whose reward standard deviation is larger than this"
    )
    distill_alpha: NonNegative = Field(0.5, description="SelfDistillDG and SCOPELite: weight of the loss on labels")
    replay_capacity: Common[int] = Field(0, ge=0, description="batches in the replay buffer; 0: no replay")
    replay_priority: Common[Literal[REPLAY_PRIORITIES]] = Field(  # type: ignore[valid-type]
        "fresh_delight", description="priority by which batches are drawn from the replay buffer"
    )
    replay_age_decay: NonNegative = Field(
        0.02, description="fresh_delight, freshness and FreshDG: decay rate per step of age"
    )
    reward_noise: Common[Fraction] = Field(0.0, description="probability that noise may change a reward")
    reward_noise_mode: Common[Literal[NOISE_MODES]] = Field("none", description="how noise changes a reward")  # type: ignore[valid-type]
    diagnostics: bool = Field(
        False, description="measure the cosine between the gradients of rule and oracle, every 5th evaluation"
    )
    entropy_diagnostics: bool = Field(
        False, description="measure the effect of an update on the entropy, at every evaluation"
    )
    oracle_fit: bool = Field(
        False,
        description="correlate the influence of samples on the oracle's loss with their weights, at every evaluation",
    )
    vocab_size: Common[int] = Field(2, ge=1, description="number of content tokens, without the separator")
    seq_len: Common[int] = Field(10, ge=1, description="tokens to produce")
    score_len: int = Field(5, ge=1, description="masked_reversal: number of last positions that count")
    binary_reward: bool = Field(False, description="reward 1 for a fully correct sequence, otherwise 0")
    d_model: int = Field(64, ge=1, description="width of the transformer")
    nhead: int = Field(2, ge=1, description="attention heads")
    num_layers: int = Field(2, ge=1, le=1_000, description="transformer blocks")
    hidden: int = Field(50, ge=1, description="mnist: width of the two hidden layers")
    mnist_folder: Annotated[LocalPath | None, ParseNull, Outside("file")] = Field(
        None, description="mnist: folder with MNIST's four IDX files; null: synthetic images"
    )
    model_name: Annotated[LocalPath, Outside("model")] = Field(
        "sokoban-tiny", description="lm_bandit: a causal LM, local or from the hub"
    )
    text_file: Annotated[LocalPath | None, ParseNull, Outside("file")] = Field(
        None, description="lm_bandit: a text with one passage per line; null: the shipped text"
    )
    context_len: int = Field(128, ge=1, description="lm_bandit: tokens before the one to predict")
    kl_weight: NonNegative = Field(0.0, description="lm_bandit: reward penalty per nat of KL to the initial weights")
    fallback_patience: int = Field(
        10, ge=1, description="consecutive batches without a group of differing rewards that end a run"
    )
    trainer: RunnerConfig = RunnerConfig()

    @property
    def rule(self) -> Rule:
        """The record of the update rule `method`."""
        return get_rule(self.method, self.group_size)

    @property
    def samples_per_prompt(self) -> int:
        """Rollouts per prompt in a batch: group_size for grouped rules, otherwise 1."""
        return self.group_size if self.rule.has_groups else 1

    @property
    def max_tensor_entries(self) -> int:
        """Entries of a member's largest tensor, up to a small factor: weights, activations or stored batches."""
        positions = 2 * self.seq_len + 1  # prompt, separator, answer
        tokens = self.batch_size * positions * (self.group_size if self.rule.has_candidates else 1)
        # The buffer never has more batches than the run has steps.
        n_batches = min(max(self.replay_capacity, self.delay + 1), self.trainer.total_training_steps)
        sizes = {
            "mnist": (784 * self.hidden, self.hidden**2, self.batch_size * max(784 * n_batches, self.hidden)),
            "lm_bandit": (self.batch_size * self.context_len * n_batches,),
        }
        sequence_sizes = (
            (self.vocab_size + positions) * self.d_model,
            4 * self.num_layers * self.d_model**2,
            4 * tokens * self.d_model,
            tokens * self.nhead * positions,
            tokens * self.vocab_size,
            tokens * n_batches,
        )
        return max(sizes.get(self.task, sequence_sizes))

    def get_row_steps(self, step: int) -> range:
        """Return the steps of the rows (one per evaluation) that a run has written after `step` training steps.

        Evaluations start at step `delay`, because batches of that age do not exist earlier.
        """
        return range(self.delay, step, self.trainer.test_freq)

    def explain_rejection(self) -> str | None:
        """See `ToyRunConfig`."""
        return find_rejection(self)
