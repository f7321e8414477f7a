"""Reject combinations of settings that would not measure what their names say, with a reason and a fix."""

from collections.abc import Callable
from typing import Any, NamedTuple

from sandboxes.update_rules.config.conditions import BANDIT_TASKS, CHAIN_TASKS, SEQUENCE_NOISE_MODES, TOKEN_REWARD_TASKS

MAX_TENSOR_ENTRIES = 2**30
"""4 GiB in float32, for each of several tensors of each seed. Larger sizes are typos: the operating system would kill
the process, after which the run would be restarted."""


class Rejection(NamedTuple):
    """A rejected combination of settings."""

    applies: Callable[[Any], bool]
    """Check whether an `UpdateRuleConfig` is such a combination. Typed Any, because the module of that class imports
    this one."""
    reason: str
    """A sentence that says what is wrong and what to set. Settings in braces are filled in."""


REJECTIONS: tuple[Rejection, ...] = (
    # Shapes and schedules.
    Rejection(
        lambda c: c.d_model % c.nhead != 0,
        "nhead={c.nhead} does not divide d_model={c.d_model}: set nhead=1, or another divisor",
    ),
    Rejection(
        lambda c: c.max_tensor_entries > MAX_TENSOR_ENTRIES,
        "a tensor of this run would have {c.max_tensor_entries} entries, and the maximum is "
        f"{MAX_TENSOR_ENTRIES}"
        ": set smaller sizes (task={c.task} batch_size={c.batch_size} group_size={c.group_size} seq_len={c.seq_len} "
        "vocab_size={c.vocab_size} d_model={c.d_model} nhead={c.nhead} num_layers={c.num_layers} hidden={c.hidden} "
        "context_len={c.context_len} replay_capacity={c.replay_capacity} delay={c.delay})",
    ),
    Rejection(
        lambda c: 0 < c.replay_capacity <= c.delay,
        "replay_capacity={c.replay_capacity} drops every batch before delay={c.delay} lets it be used: set "
        "replay_capacity above {c.delay}, or delay=0",
    ),
    Rejection(
        lambda c: c.delay >= c.trainer.total_training_steps,
        "delay={c.delay} has no effect within total_training_steps={c.trainer.total_training_steps} steps, which would "
        "all train on new batches: set num_steps above {c.delay}",
    ),
    Rejection(
        lambda c: c.task in ("chain_arithmetic", "format_answer") and c.seq_len < 2,
        "task={c.task} adds tokens of the prompt and needs two of them: set seq_len=2 or more",
    ),
    Rejection(
        lambda c: c.task == "masked_reversal" and c.score_len > c.seq_len,
        "score_len={c.score_len} scores more positions than seq_len={c.seq_len} has: set "
        "score_len={c.seq_len}, or less",
    ),
    Rejection(
        lambda c: c.task in CHAIN_TASKS and c.binary_reward,
        "task={c.task} rewards each part of the chain, and a binary reward has no parts: set binary_reward=false",
    ),
    # Reward noise.
    Rejection(
        lambda c: c.reward_noise > 0 and c.reward_noise_mode == "none",
        "reward_noise={c.reward_noise} needs a mode: set reward_noise_mode=label_flip, or another mode, or "
        "reward_noise=0",
    ),
    Rejection(
        lambda c: c.reward_noise == 0 and c.reward_noise_mode != "none",
        "reward_noise_mode={c.reward_noise_mode} changes no reward at reward_noise=0: set reward_noise above 0, or "
        "reward_noise_mode=none",
    ),
    Rejection(
        lambda c: c.task in BANDIT_TASKS and c.reward_noise_mode in SEQUENCE_NOISE_MODES,
        "reward_noise_mode={c.reward_noise_mode} looks for a token in a sequence, but task={c.task} has only one "
        "action: set reward_noise_mode=false_positive_action0, or task=token_reversal",
    ),
    # Which rule fits which regime.
    Rejection(
        lambda c: (c.rule.has_groups or c.rule.has_candidates) and c.group_size < 2,
        "method={c.method} compares samples of the same prompt, and with group_size={c.group_size} there is nothing to "
        "compare: set group_size=2 or more",
    ),
    Rejection(
        lambda c: c.rule.has_groups and c.batch_size % c.group_size != 0,
        "method={c.method} splits a batch into groups, but batch_size={c.batch_size} is not a multiple of "
        "group_size={c.group_size}: set batch_size=96 group_size=8, or another multiple",
    ),
    Rejection(
        lambda c: c.rule.needs_token_labels and c.task in BANDIT_TASKS,
        "method={c.method} assigns credit to the tokens of a sequence, but task={c.task} has only one action: set "
        "task=token_reversal",
    ),
    Rejection(
        lambda c: c.rule.needs_token_rewards and c.task not in TOKEN_REWARD_TASKS,
        "method={c.method} needs rewards that are a sum over tokens, but those of task={c.task} are not: set "
        "task=token_reversal or task=masked_reversal",
    ),
    Rejection(
        lambda c: c.rule.needs_token_rewards and c.binary_reward,
        "method={c.method} needs a reward for each token, but a binary reward is one number per sequence: set "
        "binary_reward=false",
    ),
    Rejection(
        lambda c: c.rule.needs_token_rewards and c.reward_noise > 0,
        "method={c.method} reads whether each token is correct, but noise changes the rewards of sequences only: set "
        "reward_noise=0 reward_noise_mode=none",
    ),
    Rejection(
        lambda c: c.rule.has_candidates and (c.delay > 0 or c.replay_capacity > 0),
        "method={c.method} needs candidates from the current policy, so it cannot train on old batches: set delay=0 "
        "replay_capacity=0",
    ),
    Rejection(
        lambda c: c.rule.has_candidates and (c.diagnostics or c.entropy_diagnostics or c.oracle_fit),
        "method={c.method} trains on candidates, but the diagnostics measure only the tokens that were taken: set "
        "diagnostics=false entropy_diagnostics=false oracle_fit=false",
    ),
    Rejection(
        lambda c: c.rule.needs_replay and c.replay_capacity == 0,
        "method={c.method} without a replay buffer is the same as {c.rule.on_policy_rule}: set replay_capacity=5, or "
        "method={c.rule.on_policy_rule}",
    ),
    Rejection(
        lambda c: c.rule.discounts_age and c.replay_capacity == 0 and c.delay == 0,
        "method={c.method} on batches of age 0 is the same as {c.rule.on_policy_rule}: set replay_capacity=5 or "
        "delay=4, or method={c.rule.on_policy_rule}",
    ),
    Rejection(
        lambda c: c.rule.needs_one_action and c.task not in BANDIT_TASKS,
        "method={c.method} weights a sample by the probability of one action, but task={c.task} has sequences: set "
        "task=mnist",
    ),
    Rejection(
        lambda c: c.rule.needs_kl_free_rewards and c.kl_weight > 0,
        "method={c.method} is defined for rewards without a KL term, but kl_weight={c.kl_weight} adds one: set "
        "kl_weight=0",
    ),
    Rejection(
        lambda c: c.rule.needs_noise_free_rewards and c.reward_noise > 0,
        "method={c.method} is derived for rewards that are always correct, and noise breaks that: set reward_noise=0 "
        "reward_noise_mode=none",
    ),
    Rejection(
        lambda c: c.rule.needs_success_rate and c.task in CHAIN_TASKS,
        "method={c.method} divides by a success rate, but task={c.task} gives partial rewards: set task=token_reversal "
        "binary_reward=true",
    ),
    Rejection(
        lambda c: c.rule.needs_success_rate and c.task in TOKEN_REWARD_TASKS and not c.binary_reward,
        "method={c.method} divides by a success rate, which is not defined for rewards between 0 and 1: set "
        "binary_reward=true",
    ),
    Rejection(
        lambda c: c.rule.needs_success_rate and c.task == "lm_bandit" and c.kl_weight > 0,
        "method={c.method} needs rewards of 0 and 1, but kl_weight={c.kl_weight} adds a KL term: set kl_weight=0",
    ),
    Rejection(
        lambda c: c.rule.needs_all_actions and c.task != "mnist",
        "method={c.method} builds a target over all actions of one choice, and only mnist has few enough: set "
        "task=mnist",
    ),
    Rejection(
        lambda c: c.rule.needs_all_actions and (c.delay > 0 or c.replay_capacity > 0 or c.inner_epochs > 1),
        "method={c.method} builds its target from the current policy, so old samples would move the target: set "
        "delay=0 replay_capacity=0 inner_epochs=1",
    ),
    # Values that a rule would divide by zero, or that leave it without effect.
    Rejection(
        lambda c: c.rule.temperature == "gate" and c.eta == 0,
        "method={c.method} divides delight by eta, which must be above 0: set eta=1",
    ),
    Rejection(
        lambda c: c.rule.temperature == "regression" and c.eta == 0,
        "method={c.method} fits the log-ratio times eta to the advantage, so eta=0 leaves nothing to fit: set eta=1",
    ),
    Rejection(
        lambda c: c.rule.temperature == "target" and c.tpo_eta == 0,
        "method={c.method} divides rewards by tpo_eta, which must be above 0: set tpo_eta=1",
    ),
    Rejection(
        lambda c: c.rule.clip is not None and c.clip_low >= 1,
        "clip_low={c.clip_low} clips nothing, because a ratio is never below 0: set clip_low=0.2, or another value "
        "below 1",
    ),
)
"""Rejected combinations, checked in this order. The error message has the reason of the first one that applies."""


def find_rejection(config: Any) -> str | None:
    """Explain why `config` cannot be run, in a sentence that says what to set; None if it can be run."""
    return next((reason.format(c=config) for applies, reason in REJECTIONS if applies(config)), None)
