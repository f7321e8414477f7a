"""Names that settings choose from: tasks, modes of reward noise, and priorities of replay."""

SEQUENCE_TASKS = ("token_reversal", "masked_reversal", "chain_reversal", "chain_arithmetic", "format_answer")
CHAIN_TASKS = ("chain_reversal", "chain_arithmetic", "format_answer")
TOKEN_REWARD_TASKS = ("token_reversal", "masked_reversal")
"""Tasks whose reward is a mean over tokens, so that each token has one of its own."""
BANDIT_TASKS = ("mnist", "lm_bandit")
TASKS = (*SEQUENCE_TASKS, *BANDIT_TASKS)

SHARED_NOISE_MODES = ("label_flip", "random_reward", "false_positive_action0", "spurious_feature")
SEQUENCE_NOISE_MODES = ("false_positive_rare_token", "false_positive_sep")
NOISE_MODES = ("none", *SHARED_NOISE_MODES, *SEQUENCE_NOISE_MODES)
"""What a corrupted reward becomes: modes that every task has, and those that only sequences have."""

REPLAY_PRIORITIES = ("uniform", "reward", "advantage", "surprisal", "delight", "fresh_delight", "freshness")
"""By what a batch of the replay buffer is drawn: the documents' six, and age alone."""
