"""Allowed values of settings: tasks, modes of reward noise, and replay priorities."""

SEQUENCE_TASKS = ("token_reversal", "masked_reversal", "chain_reversal", "chain_arithmetic", "format_answer")
CHAIN_TASKS = ("chain_reversal", "chain_arithmetic", "format_answer")
TOKEN_REWARD_TASKS = ("token_reversal", "masked_reversal")
"""Tasks whose reward is a mean over tokens, so that each token has its own reward."""
BANDIT_TASKS = ("mnist", "lm_bandit")
TASKS = (*SEQUENCE_TASKS, *BANDIT_TASKS)

SHARED_NOISE_MODES = ("label_flip", "random_reward", "false_positive_action0", "spurious_feature")
SEQUENCE_NOISE_MODES = ("false_positive_rare_token", "false_positive_sep")
NOISE_MODES = ("none", *SHARED_NOISE_MODES, *SEQUENCE_NOISE_MODES)
"""How a reward is corrupted: modes for every task, and modes for sequence tasks only."""

REPLAY_PRIORITIES = ("uniform", "reward", "advantage", "surprisal", "delight", "fresh_delight", "freshness")
"""What the probability of drawing a batch from the replay buffer depends on: the source's six, and age alone."""
