"""Allowed values of settings, and settings that are read only under others (`trainable.config.conditions`)."""

from sandboxes.update_rules.config.rules import RULES
from trainable.config.base_config import ReadCondition
from trainable.config.conditions import derive_conditions

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


_TASK_SETTINGS = {
    **dict.fromkeys(("vocab_size", "seq_len", "d_model", "nhead", "num_layers"), SEQUENCE_TASKS),
    "binary_reward": TOKEN_REWARD_TASKS,
    "score_len": ("masked_reversal",),
    **dict.fromkeys(("hidden", "mnist_folder"), BANDIT_TASKS[:1]),
    **dict.fromkeys(("model_name", "text_file", "context_len", "kl_weight"), BANDIT_TASKS[1:]),
}

UPDATE_RULE_CONDITIONS: tuple[ReadCondition, ...] = (
    *derive_conditions(
        "task", {task: [name for name in _TASK_SETTINGS if task in _TASK_SETTINGS[name]] for task in TASKS}
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
