"""Slow, literal versions of the formulas in trainable/algo/mutual_information.py, on Python floats."""

import itertools
import math
from collections.abc import Sequence

Matrix = Sequence[Sequence[float]]


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def population_std(values: Sequence[float]) -> float:
    center = mean(values)
    return math.sqrt(mean([(value - center) ** 2 for value in values]))


def log_mean_exp(scores: Sequence[float]) -> float:
    """log (1/M) Σ exp s, with the largest score factored out."""
    top = max(scores)
    return top + math.log(math.fsum(math.exp(score - top) for score in scores) / len(scores))


def mutual_information(sums: Matrix, lengths: Sequence[int], own_columns: Sequence[int]) -> dict[str, float]:
    rows, prompts = range(len(sums)), len(sums[0])
    per_token = [[score / lengths[i] for score in sums[i]] for i in rows]
    matched = [per_token[i][own_columns[i]] for i in rows]
    marginal = [log_mean_exp(per_token[i]) for i in rows]
    matched_seq = [sums[i][own_columns[i]] for i in rows]
    marginal_seq = [log_mean_exp(sums[i]) for i in rows]
    marginal_paper = [marginal_seq[i] / lengths[i] for i in rows]
    mi = mean([matched[i] - marginal[i] for i in rows])
    mi_seq = mean([matched_seq[i] - marginal_seq[i] for i in rows])
    mi_paper = mean([(sums[i][own_columns[i]] - marginal_seq[i]) / lengths[i] for i in rows])
    return {
        "mi_estimate": mi,
        "mi_seq_estimate": mi_seq,
        "mi_upper_bound": math.log(prompts),
        "matched_log_prob_mean": mean(matched),
        "marginal_log_prob_mean": mean(marginal),
        "conditional_entropy_est": -mean(matched),
        "reasoning_entropy_est": -mean(marginal),
        "conditional_entropy_seq_est": -mean(matched_seq),
        "reasoning_entropy_seq_est": -mean(marginal_seq),
        "marginal_std": population_std(marginal),
        "marginal_std_seq": population_std(marginal_seq),
        "mi_zscore": mean([(matched[i] - marginal[i]) / (population_std(marginal) + 1e-3) for i in rows]),
        "mi_zscore_seq": mean(
            [(matched_seq[i] - marginal_seq[i]) / (population_std(marginal_seq) + 1e-3) for i in rows]
        ),
        "mi_estimate_paper": mi_paper,
        "mi_upper_bound_paper": mean([math.log(prompts) / length for length in lengths]),
        "marginal_log_prob_mean_paper": mean(marginal_paper),
        "reasoning_entropy_est_paper": -mean(marginal_paper),
        "marginal_std_paper": population_std(marginal_paper),
        "mi_zscore_paper": mean(
            [(matched[i] - marginal_paper[i]) / (population_std(marginal_paper) + 1e-3) for i in rows]
        ),
    }


def moving_average(values: Sequence[float]) -> list[float]:
    """The first average is the first value. Each later one is 0.9 times the last average plus 0.1 times the value."""
    averages = [values[0]]
    for value in values[1:]:
        averages.append(0.9 * averages[-1] + 0.1 * value)
    return averages


def select_top_k(scores: Sequence[float], k: int) -> list[int]:
    """Return the k likeliest columns. Equal scores are ranked by column."""
    return sorted(range(len(scores)), key=lambda j: (-scores[j], j))[:k]


def accuracy(sums: Matrix, own_columns: Sequence[int], classes: Sequence[int], k: int) -> float:
    hits = 0
    for scores, column in zip(sums, own_columns, strict=True):
        hits += any(classes[j] == classes[column] for j in select_top_k(scores, k))
    return hits / len(own_columns)


def retrieval(sums: Matrix, own_columns: Sequence[int], classes: Sequence[int]) -> dict[str, float]:
    chance = mean([sum(other == classes[column] for other in classes) / len(classes) for column in own_columns])
    metrics = {}
    for k, suffix in ((1, ""), (2, "@2"), (4, "@4"), (8, "@8")):
        chance_level = min(1.0, min(k, len(classes)) * chance)
        metrics[f"retrieval_accuracy{suffix}"] = accuracy(sums, own_columns, classes, k)
        metrics[f"retrieval_chance_level{suffix}"] = chance_level
        metrics[f"retrieval_above_chance{suffix}"] = accuracy(sums, own_columns, classes, k) - chance_level
    return metrics


def mean_shuffled_accuracy(sums: Matrix, own_columns: Sequence[int], classes: Sequence[int]) -> float:
    """Compute the mean accuracy over every permutation of `own_columns`."""
    return mean(
        [accuracy(sums, shuffled_columns, classes, 1) for shuffled_columns in itertools.permutations(own_columns)]
    )
