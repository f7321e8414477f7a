"""The collapse diagnostics: how much a policy's thoughts depend on the prompt, computed from cross log-probs.

Shapes: N thoughts (rows), M prompts (columns). L is (N, M): entry (i, j) is the log-prob of thought i after prompt j,
in nats, summed over the |z_i| tokens of the thought. ℓ = L / |z|. `own_columns` is the column of the prompt after which
each thought was sampled.

Metrics are returned as a dict under their published names. The published code computes the mixture over prompts from
the length-normalized scores ℓ. The paper computes it from L and divides by the length afterwards; its metrics end in
`_paper`. Both estimates take the prompts of the batch as equally likely.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

# All three from the published code (RAGEN `collapse_metrics`).
STD_EPS = 1e-3
"""Added to the std in a z-score, in nats, to avoid a division by 0 if all thoughts have equal scores."""
EMA_DECAY = 0.9
"""Weight of the previous steps in the moving average of the std."""
TOP_K = (2, 4, 8)
"""The values of k in the retrieval metrics, in addition to 1."""

# Maps each normalization, by the suffix of its std and z-score columns, to the column of its mutual information.
_INFORMATION_NAMES = {"": "mi_estimate", "_seq": "mi_seq_estimate", "_paper": "mi_estimate_paper"}


class MixtureScores(NamedTuple):
    """Log-probs (N,) of each thought after its own prompt, and under the mixture of all prompts."""

    matched_logprobs: Tensor
    marginal_logprobs: Tensor

    @property
    def information(self) -> float:
        """I(X; Z), the mean of matched − marginal."""
        return float((self.matched_logprobs - self.marginal_logprobs).mean())

    @property
    def std(self) -> float:
        """Standard deviation of the marginal, divisor N."""
        return float(self.marginal_logprobs.std(correction=0))

    @property
    def zscore(self) -> float:
        """The information in units of the standard deviation of the marginal."""
        return self.information / (self.std + STD_EPS)


def compute_mixture_scores(scores: Tensor, own_columns: Tensor) -> MixtureScores:
    """Score each thought after its own prompt, and by the log of its mean likelihood over all prompts.

        matched_i = s_i,own(i)        marginal_i = log (1/M) Σ_j exp s_ij = logsumexp_j s_ij − log M

    scores: (N, M) log-probs s, summed (L) or length-normalized (ℓ). own_columns: (N,) int64, column of each row's own
    prompt.

    Returns matched and marginal, (N,) each. matched − marginal is at most log M, which it reaches if every other prompt
    makes the thought impossible.

    Example:
        >>> scores = torch.tensor([[0.5, 0.1], [0.2, 0.4]]).log()
        >>> result = compute_mixture_scores(scores, own_columns=torch.tensor([0, 1]))
        >>> result.matched_logprobs.exp().double().round(decimals=4).tolist()
        [0.5, 0.4]
        >>> result.marginal_logprobs.exp().double().round(decimals=4).tolist()
        [0.3, 0.3]

    Source: published code (RAGEN `collapse_metrics`).
    Degenerate: equal columns, or a single one, give matched = marginal.
    """
    matched_logprobs = scores.gather(1, own_columns[:, None]).squeeze(1)
    return MixtureScores(matched_logprobs, scores.logsumexp(dim=1) - math.log(scores.shape[1]))


def compute_information_metrics(logprob_sums: Tensor, lengths: Tensor, own_columns: Tensor) -> dict[str, float]:
    """Compute the mutual information of prompts and thoughts, thought entropies with and without prompt, and z-scores.

        published   m_i = ℓ_i,own        g_i = logsumexp_j ℓ_ij − log M
        sequence    m_i = L_i,own        g_i = logsumexp_j L_ij − log M
        paper       m_i = L_i,own / |z_i|    g_i = (logsumexp_j L_ij − log M) / |z_i|

        I(X; Z) = mean (m − g)    H(Z|X) = −mean m    H(Z) = −mean g    z-score = mean (m − g) / (std g + 1e-3)

    H(Z) = I + H(Z|X) holds by construction and is no check. The published estimate is never below the paper's.

    logprob_sums: (N, M) log-probs L. lengths: (N,) tokens |z|, at least 1 each. own_columns: (N,) int64, column of each
    row's own prompt.

    Returns `mi_estimate`, `mi_seq_estimate`, `mi_upper_bound` (log M, of both), `matched_log_prob_mean`,
    `marginal_log_prob_mean`, `conditional_entropy_est`, `reasoning_entropy_est`, `conditional_entropy_seq_est`,
    `reasoning_entropy_seq_est`, `marginal_std`, `marginal_std_seq`, `mi_zscore`, `mi_zscore_seq`; and
    `mi_estimate_paper`, `mi_upper_bound_paper` (mean log M / |z|), `marginal_log_prob_mean_paper`,
    `reasoning_entropy_est_paper`, `marginal_std_paper`, `mi_zscore_paper`. The matched term is the same for both. In
    nats per token, except `_seq` in nats per thought. Standard deviations have the divisor N.

    Example:
        Two thoughts of one token: the information is (log 5/3 + log 4/3) / 2, and at most log 2.

        >>> logprob_sums, lengths = torch.tensor([[0.5, 0.1], [0.2, 0.4]]).log(), torch.tensor([1, 1])
        >>> metrics = compute_information_metrics(logprob_sums, lengths, own_columns=torch.tensor([0, 1]))
        >>> round(metrics["mi_estimate"], 4), round(metrics["mi_upper_bound"], 4)
        (0.3993, 0.6931)

    Source: published code (RAGEN `collapse_metrics`); RAGEN-2, arXiv 2604.06268, for the paper's.
    Degenerate: a single thought, or thoughts equally likely under the mixture, have std 0 and a z-score of I / 1e-3.
    """
    # float64, since log-probs summed over hundreds of tokens are large, and the information is a small difference.
    logprob_sums64, lengths64, log_m = logprob_sums.double(), lengths.double(), math.log(logprob_sums.shape[1])
    per_token, per_sequence = (
        compute_mixture_scores(logprob_sums64 / lengths64[:, None], own_columns),
        compute_mixture_scores(logprob_sums64, own_columns),
    )
    # The paper divides after the logarithm of the mixture, the published code before it.
    per_token_paper = MixtureScores(
        per_sequence.matched_logprobs / lengths64, per_sequence.marginal_logprobs / lengths64
    )
    return {
        "mi_estimate": per_token.information,
        "mi_seq_estimate": per_sequence.information,
        "mi_estimate_paper": per_token_paper.information,
        "mi_upper_bound": log_m,
        "mi_upper_bound_paper": log_m * float(lengths64.reciprocal().mean()),
        "matched_log_prob_mean": float(per_token.matched_logprobs.mean()),
        "marginal_log_prob_mean": float(per_token.marginal_logprobs.mean()),
        "marginal_log_prob_mean_paper": float(per_token_paper.marginal_logprobs.mean()),
        "conditional_entropy_est": -float(per_token.matched_logprobs.mean()),
        "conditional_entropy_seq_est": -float(per_sequence.matched_logprobs.mean()),
        "reasoning_entropy_est": -float(per_token.marginal_logprobs.mean()),
        "reasoning_entropy_seq_est": -float(per_sequence.marginal_logprobs.mean()),
        "reasoning_entropy_est_paper": -float(per_token_paper.marginal_logprobs.mean()),
        "marginal_std": per_token.std,
        "marginal_std_seq": per_sequence.std,
        "marginal_std_paper": per_token_paper.std,
        "mi_zscore": per_token.zscore,
        "mi_zscore_seq": per_sequence.zscore,
        "mi_zscore_paper": per_token_paper.zscore,
    }


def smooth_zscores(
    metrics: Mapping[str, float], averages: Mapping[str, float] | None
) -> tuple[dict[str, float], dict[str, float]]:
    """Update the moving average of the marginals' std, and compute z-scores with it.

        std_1 = first std        std_t = 0.9 std_t−1 + 0.1 std        z = I / (std_t + 1e-3)

    metrics: result of `compute_information_metrics` at this step. averages: second result at the previous step, for the
    same kind of sample; None at the first step.

    Returns `marginal_std_ema` and `mi_zscore_ema`, each also with `_seq` and `_paper`, and the next averages as plain
    numbers, which a checkpoint can store.

    Example:
        >>> stds = {"marginal_std": 1.0, "marginal_std_seq": 1.0, "marginal_std_paper": 1.0}
        >>> metrics = {**stds, "mi_estimate": 0.5, "mi_seq_estimate": 0.5, "mi_estimate_paper": 0.5}
        >>> smoothed, averages = smooth_zscores(metrics, averages=dict.fromkeys(stds, 2.0))
        >>> round(averages["marginal_std"], 4), round(smoothed["mi_zscore_ema"], 4)  # 0.9·2 + 0.1·1, 0.5 / 1.901
        (1.9, 0.263)

    Source: published code (RAGEN `collapse_metrics`).
    """
    smoothed_metrics, next_averages = {}, {}
    for variant, information in _INFORMATION_NAMES.items():
        name = f"marginal_std{variant}"
        std = metrics[name] if averages is None else EMA_DECAY * averages[name] + (1 - EMA_DECAY) * metrics[name]
        next_averages[name] = std
        smoothed_metrics[f"marginal_std_ema{variant}"] = std
        smoothed_metrics[f"mi_zscore_ema{variant}"] = metrics[information] / (std + STD_EPS)
    return smoothed_metrics, next_averages


def compute_retrieval_metrics(logprob_sums: Tensor, own_columns: Tensor, classes: Tensor) -> dict[str, float]:
    """Measure how often a thought's own prompt is the one that makes it likeliest, or among the best k.

        accuracy@k = fraction of rows with a column of the row's own class among the k best
        chance = mean_i (columns of the class of own(i)) / M        chance@k = min(1, k · chance)

    Args:
        logprob_sums: (N, M) log-probs; dividing a row by its length changes nothing.
        own_columns: (N,) int64, column of each row's own prompt.
        classes: (M,) int64 from 0. Columns of identical prompts share a class, and any of them is right.

    Returns `retrieval_accuracy`, `retrieval_chance_level`, `retrieval_above_chance`, and each with `@2`, `@4`, `@8`.

    Example:
        Both thoughts are most likely after the first prompt, which only the first one followed.

        >>> logprob_sums = torch.tensor([[-1.0, -2.0], [-1.0, -2.0]])
        >>> metrics = compute_retrieval_metrics(logprob_sums, own_columns=torch.arange(2), classes=torch.arange(2))
        >>> metrics["retrieval_accuracy"], metrics["retrieval_chance_level"], metrics["retrieval_accuracy@2"]
        (0.5, 0.5, 1.0)

    Source: published code (RAGEN `collapse_metrics`). Equal scores rank by column; the published code leaves their
    order undefined.
    Degenerate: k above M counts all columns. chance@k is an upper bound if classes have several columns.
    """
    # (N, M), with the columns ranked for each row: True for columns of the row's own class.
    is_correct = classes[_rank_columns(logprob_sums)] == classes[own_columns][:, None]
    chance_at_one = float(torch.bincount(classes)[classes[own_columns]].double().mean()) / len(classes)
    metrics = {}
    for k, suffix in ((1, ""), *((k, f"@{k}") for k in TOP_K)):
        accuracy, chance_level = float(is_correct[:, :k].any(dim=1).double().mean()), min(1.0, k * chance_at_one)
        metrics[f"retrieval_accuracy{suffix}"] = accuracy
        metrics[f"retrieval_chance_level{suffix}"] = chance_level
        metrics[f"retrieval_above_chance{suffix}"] = accuracy - chance_level
    return metrics


def compute_shuffled_accuracy(
    logprob_sums: Tensor, own_columns: Tensor, classes: Tensor, generator: torch.Generator, num_shuffles: int = 100
) -> float:
    """Compute the retrieval accuracy with prompts shuffled among the thoughts, a control that must be at chance.

        mean over permutations π of the fraction of rows whose best column is of the class of own(π(i))

    The expectation of the shuffled accuracy is Σ_c (fraction of rows retrieved as c) · (fraction of rows that are c).
    It is the chance level if every column has equally many rows and no twin, and close to it otherwise.

    logprob_sums, own_columns, classes: as for `compute_retrieval_metrics`. generator: CPU generator that draws the
    permutations. num_shuffles: number of permutations, at least 1.

    Example:
        Every permutation gives the first prompt to one of the two thoughts, and both thoughts retrieve this prompt.

        >>> logprob_sums, columns = torch.tensor([[-1.0, -2.0], [-1.0, -2.0]]), torch.arange(2)
        >>> compute_shuffled_accuracy(logprob_sums, columns, columns, torch.Generator().manual_seed(0))
        0.5

    Degenerate: a single thought always keeps its prompt, so the result is its accuracy.
    """
    retrieved_classes, true_classes = classes[_rank_columns(logprob_sums)[:, 0]], classes[own_columns]
    shuffled_classes = [
        true_classes[torch.randperm(len(own_columns), generator=generator).to(true_classes.device)]
        for _ in range(num_shuffles)
    ]
    return float((torch.stack(shuffled_classes) == retrieved_classes).double().mean())


def _rank_columns(logprob_sums: Tensor) -> Tensor:
    """Rank the columns of each row, (N, M), likeliest first."""
    return torch.sort(logprob_sums, dim=1, descending=True, stable=True).indices
