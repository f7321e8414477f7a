"""What is measured of each of the two samples of the collapse diagnostics, under the published names.

M: prompts of the sample. docs/collapse_diagnostics.md teaches how to read `QUANTITIES`.
"""

from typing import NamedTuple


class Quantity(NamedTuple):
    """One number of a sample: its published name, its unit, and what it is."""

    name: str
    unit: str
    meaning: str


QUANTITIES: tuple[Quantity, ...] = (
    Quantity("mi_estimate", "nats", "I(X; Z) per token: reasoning_entropy_est - conditional_entropy_est"),
    Quantity("mi_seq_estimate", "nats", "I(X; Z) per thought: reasoning_entropy_seq_est - conditional_entropy_seq_est"),
    Quantity("mi_upper_bound", "nats", "log M: bound of mi_estimate and of mi_seq_estimate"),
    Quantity(
        "conditional_entropy_est",
        "nats",
        "H(Z given X) per token: minus the mean over thoughts of the log-prob per token after the own prompt",
    ),
    Quantity(
        "conditional_entropy_seq_est",
        "nats",
        "H(Z given X) per thought: minus the mean log-prob of whole thoughts after the own prompt",
    ),
    Quantity(
        "reasoning_entropy_est",
        "nats",
        "H(Z) per token: minus the mean of the log of the mean over prompts of exp(log-prob per token)",
    ),
    Quantity(
        "reasoning_entropy_seq_est",
        "nats",
        "H(Z) per thought: minus the mean of the log of the mean over prompts of exp(log-prob of the whole thought)",
    ),
    Quantity(
        "retrieval_accuracy",
        "share",
        "thoughts that their own prompt, or one equal to it, makes likeliest / thoughts",
    ),
    Quantity("retrieval_chance_level", "share", "mean over thoughts of (prompts equal to the own one, and itself) / M"),
    Quantity("retrieval_shuffled", "share", "retrieval_accuracy, the own prompts dealt out anew: mean of 100 deals"),
)
"""In every row that is diagnosed: information and entropies in two units, and retrieval with what chance gives."""

EXTRA_QUANTITIES: tuple[Quantity, ...] = (
    Quantity("mi_estimate_paper", "nats", "I(X; Z) per token: reasoning_entropy_est_paper - conditional_entropy_est"),
    Quantity("mi_upper_bound_paper", "nats", "mean over thoughts of log M / tokens: bound of mi_estimate_paper"),
    Quantity("matched_log_prob_mean", "nats", "-conditional_entropy_est"),
    Quantity("marginal_log_prob_mean", "nats", "-reasoning_entropy_est"),
    Quantity("marginal_log_prob_mean_paper", "nats", "-reasoning_entropy_est_paper"),
    Quantity(
        "reasoning_entropy_est_paper",
        "nats",
        "H(Z) per token: minus the mean of (the log of the mean over prompts of exp(log-prob of the "
        "whole thought)) / tokens",
    ),
    Quantity(
        "marginal_std",
        "nats",
        "standard deviation (divisor N) over thoughts of the terms of marginal_log_prob_mean",
    ),
    Quantity("marginal_std_seq", "nats", "the same of the terms of reasoning_entropy_seq_est"),
    Quantity("marginal_std_paper", "nats", "the same of the terms of marginal_log_prob_mean_paper"),
    Quantity("mi_zscore", "1", "mi_estimate / (marginal_std + 1e-3)"),
    Quantity("mi_zscore_seq", "1", "mi_seq_estimate / (marginal_std_seq + 1e-3)"),
    Quantity("mi_zscore_paper", "1", "mi_estimate_paper / (marginal_std_paper + 1e-3)"),
    Quantity("marginal_std_ema", "nats", "marginal_std at the first diagnosis, then 0.9 old + 0.1 new"),
    Quantity("marginal_std_ema_seq", "nats", "the same of marginal_std_seq"),
    Quantity("marginal_std_ema_paper", "nats", "the same of marginal_std_paper"),
    Quantity("mi_zscore_ema", "1", "mi_estimate / (marginal_std_ema + 1e-3)"),
    Quantity("mi_zscore_ema_seq", "1", "mi_seq_estimate / (marginal_std_ema_seq + 1e-3)"),
    Quantity("mi_zscore_ema_paper", "1", "mi_estimate_paper / (marginal_std_ema_paper + 1e-3)"),
    Quantity(
        "retrieval_accuracy@2",
        "share",
        "thoughts with such a prompt among the 2 that make them likeliest / thoughts",
    ),
    Quantity("retrieval_accuracy@4", "share", "the same among 4"),
    Quantity("retrieval_accuracy@8", "share", "the same among 8"),
    Quantity("retrieval_chance_level@2", "share", "min(1, 2 retrieval_chance_level)"),
    Quantity("retrieval_chance_level@4", "share", "min(1, 4 retrieval_chance_level)"),
    Quantity("retrieval_chance_level@8", "share", "min(1, 8 retrieval_chance_level)"),
    Quantity("retrieval_above_chance", "share", "retrieval_accuracy - retrieval_chance_level"),
    Quantity("retrieval_above_chance@2", "share", "retrieval_accuracy_at_2 - retrieval_chance_level_at_2"),
    Quantity("retrieval_above_chance@4", "share", "retrieval_accuracy_at_4 - retrieval_chance_level_at_4"),
    Quantity("retrieval_above_chance@8", "share", "retrieval_accuracy_at_8 - retrieval_chance_level_at_8"),
)
"""Only with `collapse_detection.all_quantities`: other normalisations, spreads, z-scores, and ranks beside the first.

No document, report or rule of ours reads them; they are for comparison with logs of the published system.
"""
