"""The quantities that the collapse diagnostics measure for each of their two samples, under the published names.

M: number of prompts in the sample. docs/collapse_diagnostics.md explains how to interpret `QUANTITIES`.
"""

from typing import NamedTuple


class Quantity(NamedTuple):
    """One quantity of a sample: its published name, its unit and its meaning."""

    name: str
    unit: str
    meaning: str


QUANTITIES: tuple[Quantity, ...] = (
    Quantity("mi_estimate", "nats", "I(X; Z) per token: reasoning_entropy_est - conditional_entropy_est"),
    Quantity("mi_seq_estimate", "nats", "I(X; Z) per thought: reasoning_entropy_seq_est - conditional_entropy_seq_est"),
    Quantity("mi_upper_bound", "nats", "log M: upper bound of mi_estimate and of mi_seq_estimate"),
    Quantity(
        "conditional_entropy_est",
        "nats",
        "H(Z | X) per token: minus the mean over thoughts of the log-prob per token given the thought's own prompt",
    ),
    Quantity(
        "conditional_entropy_seq_est",
        "nats",
        "H(Z | X) per thought: minus the mean over thoughts of the log-prob of the whole thought given its own prompt",
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
        "fraction",
        "thoughts to which their own prompt, or an equal one, gives the highest probability / thoughts",
    ),
    Quantity(
        "retrieval_chance_level",
        "fraction",
        "mean over thoughts of (number of prompts equal to the thought's own, including itself) / M",
    ),
    Quantity(
        "retrieval_shuffled",
        "fraction",
        "retrieval_accuracy after shuffling the prompts among the thoughts: mean of 100 shuffles",
    ),
)
"""Written in every row with a diagnosis: mutual information and entropies per token and per thought, and retrieval.

Retrieval means finding a thought's own prompt among all prompts. `retrieval_chance_level` is its rate by chance.
"""

EXTRA_QUANTITIES: tuple[Quantity, ...] = (
    Quantity("mi_estimate_paper", "nats", "I(X; Z) per token: reasoning_entropy_est_paper - conditional_entropy_est"),
    Quantity("mi_upper_bound_paper", "nats", "mean over thoughts of log M / tokens: upper bound of mi_estimate_paper"),
    Quantity("matched_log_prob_mean", "nats", "-conditional_entropy_est"),
    Quantity("marginal_log_prob_mean", "nats", "-reasoning_entropy_est"),
    Quantity("marginal_log_prob_mean_paper", "nats", "-reasoning_entropy_est_paper"),
    Quantity(
        "reasoning_entropy_est_paper",
        "nats",
        "H(Z) per token: minus the mean of (the log of the mean over prompts of exp(log-prob of the whole thought)) / "
        "tokens",
    ),
    Quantity(
        "marginal_std", "nats", "standard deviation (divisor N) over thoughts of the terms of marginal_log_prob_mean"
    ),
    Quantity("marginal_std_seq", "nats", "as marginal_std, of the terms of reasoning_entropy_seq_est"),
    Quantity("marginal_std_paper", "nats", "as marginal_std, of the terms of marginal_log_prob_mean_paper"),
    Quantity("mi_zscore", "1", "mi_estimate / (marginal_std + 1e-3)"),
    Quantity("mi_zscore_seq", "1", "mi_seq_estimate / (marginal_std_seq + 1e-3)"),
    Quantity("mi_zscore_paper", "1", "mi_estimate_paper / (marginal_std_paper + 1e-3)"),
    Quantity("marginal_std_ema", "nats", "moving average of marginal_std: its first value, then 0.9 old + 0.1 new"),
    Quantity("marginal_std_ema_seq", "nats", "as marginal_std_ema, of marginal_std_seq"),
    Quantity("marginal_std_ema_paper", "nats", "as marginal_std_ema, of marginal_std_paper"),
    Quantity("mi_zscore_ema", "1", "mi_estimate / (marginal_std_ema + 1e-3)"),
    Quantity("mi_zscore_ema_seq", "1", "mi_seq_estimate / (marginal_std_ema_seq + 1e-3)"),
    Quantity("mi_zscore_ema_paper", "1", "mi_estimate_paper / (marginal_std_ema_paper + 1e-3)"),
    Quantity(
        "retrieval_accuracy@2",
        "fraction",
        "thoughts with their own prompt, or an equal one, among the 2 that give them the highest probability / "
        "thoughts",
    ),
    Quantity("retrieval_accuracy@4", "fraction", "as retrieval_accuracy@2, among the 4"),
    Quantity("retrieval_accuracy@8", "fraction", "as retrieval_accuracy@2, among the 8"),
    Quantity("retrieval_chance_level@2", "fraction", "min(1, 2 retrieval_chance_level)"),
    Quantity("retrieval_chance_level@4", "fraction", "min(1, 4 retrieval_chance_level)"),
    Quantity("retrieval_chance_level@8", "fraction", "min(1, 8 retrieval_chance_level)"),
    Quantity("retrieval_above_chance", "fraction", "retrieval_accuracy - retrieval_chance_level"),
    Quantity("retrieval_above_chance@2", "fraction", "retrieval_accuracy_at_2 - retrieval_chance_level_at_2"),
    Quantity("retrieval_above_chance@4", "fraction", "retrieval_accuracy_at_4 - retrieval_chance_level_at_4"),
    Quantity("retrieval_above_chance@8", "fraction", "retrieval_accuracy_at_8 - retrieval_chance_level_at_8"),
)
"""Written only if `collapse_detection.all_quantities` is set: other normalizations, spreads, z-scores, retrieval at k.

Reports and stop rules of this project do not use them. They allow comparisons with logs of the published system.
"""
