"""Which update rules need what: names only, so that settings are checked without torch."""

GROUPED = ("GRPO", "DrGRPO", "DAPO", "DAPOLite", "TPO", "TPONoAnchor", "GroupPG", "TEMPO", "MaxRL")
"""Rules that sample several rollouts a prompt and compare them."""

CANDIDATE = ("TPOToken", "GRPOToken")
"""Rules that draw several next tokens at every prefix, each with a reward of its own."""

DELIGHT = (
    "DG", "ReplayDG", "FreshDG", "DGEntropyGuard", "UncertaintyDG", "FilteredDG", "RewardVarianceDG", "Kondo",
    "DGToken", "SelfDistillDG", "SCOPELite",
)  # fmt: skip
"""Rules that gate a sample by advantage times surprisal, with the temperature `eta`."""

TARGET = ("TPO", "TPONoAnchor", "GroupPG", "TPOFullAction", "TPOToken")
"""Rules that read the temperature `tpo_eta`."""

SEQUENCE_ONLY = ("DGToken", "SelfDistillDG", "SCOPELite")
"""Rules that need the right token of every position of a sequence."""

METHODS = (
    "CE", "REINFORCE", "PG", "TrajPG", "ASPO", "R2VPO", "LogGrowth", "PMDMean",
    *DELIGHT, *GROUPED, "TPOFullAction", *CANDIDATE,
)  # fmt: skip
"""All names, those of `trainable.sandbox.rules.catalog.UPDATE_RULES`."""

SEQUENCE_TASKS = ("token_reversal", "masked_reversal", "chain_reversal", "chain_arithmetic", "format_answer")
CHAIN_TASKS = ("chain_reversal", "chain_arithmetic", "format_answer")
BANDITS = ("mnist", "lm_bandit")
TASKS = (*SEQUENCE_TASKS, *BANDITS)

SHARED_NOISE = ("label_flip", "random_reward", "false_positive_action0", "spurious_feature")
SEQUENCE_NOISE = ("false_positive_rare_token", "false_positive_sep")
NOISE_MODES = ("none", *SHARED_NOISE, *SEQUENCE_NOISE)
"""What a corrupted reward becomes: modes that every task has, and those that only sequences have."""

PRIORITIES = ("uniform", "reward", "advantage", "surprisal", "delight", "fresh_delight", "freshness")
"""By what a batch of the replay buffer is drawn: the documents' six, and age alone."""
