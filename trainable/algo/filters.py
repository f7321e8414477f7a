"""Filters of prompt groups: score each group, and select by score which groups a step keeps.

Shapes: P prompts (groups), G rollouts per group. Each rule is a function of the candidates' scores. `select_groups` is
the published pipeline around the rules: it converts scores to float32, optionally removes zero scores, and applies a
rule.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

# Both constants are from the published code (RAGEN `rollout_filter`).
ZERO_SCORE = 1e-10
"""A score whose absolute value is at most this counts as 0."""
MIN_P_SLACK = 1e-10
"""Slack of `min_p`: added to or subtracted from its thresholds, and added to the ratio when dividing by it."""


Rule = Callable[[Tensor, bool, int], Tensor]
"""Called with the candidates' scores (n,), whether to prefer high scores, and the number of groups before zero scores
were dropped. Returns (n,) bool: the candidates to keep."""


def parse_rule(strategy: str, value: float, prob_mode: str = "softmax", eps: float = 0.01) -> Rule:
    """Make a rule from the name of a strategy and its value.

        top_p: a fraction of the total score    top_k, top_f: a fraction of all groups
        top_k_abs: a number of groups           min_p: a fraction of the best score

    strategy: a name above. `top_f` is an older name of `top_k`. value: see `FilterConfig`, which checks its range.
    prob_mode: `softmax` or `linear`, how top_p turns scores into fractions of the total. eps: for top_p in linear mode,
    subtracted from the score to reach, which rejects a batch of near-zero scores.

    Example:
        >>> parse_rule("top_k", 0.25)(torch.tensor([1.0, 3.0, 2.0]), True, 8).tolist()
        [False, True, True]

    Source: published code (RAGEN `rollout_filter`).
    """

    def keep_mass(scores: Tensor, largest: bool, num_groups: int) -> Tensor:
        if value == 1:  # by definition, every candidate. Linear mode would drop scores that are not positive.
            return torch.ones_like(scores, dtype=torch.bool)
        if prob_mode == "softmax":
            return top_p_softmax(scores, value, largest)
        return top_p_linear(scores, value, eps, largest)

    def keep_fraction(scores: Tensor, largest: bool, num_groups: int) -> Tensor:
        # As published, a fraction of all groups, not only of the candidates.
        return top_k(scores, int(value * num_groups), largest)

    rules: dict[str, Rule] = {
        "top_p": keep_mass,
        "top_k": keep_fraction,
        "top_f": keep_fraction,
        "top_k_abs": lambda scores, largest, num_groups: top_k(scores, int(value), largest),
        "min_p": lambda scores, largest, num_groups: min_p(scores, value, largest),
    }
    return rules[strategy]


def compute_group_scores(
    metric: str, rewards: Tensor, entropies: Tensor | None = None, lengths: Tensor | None = None
) -> Tensor:
    """Compute the score by which each group is ranked, (P,) float32.

        reward_variance, reward_std     std_i R (divisor G − 1)     reward  mean_i R     reward_sum  Σ_i R
        entropy_variance, entropy_std   std_i H (divisor G − 1)     entropy mean_i H     length      mean_i length

    Despite its published name, `reward_variance` is a standard deviation: it scales with the rewards.

    metric: a name above. rewards: (P, G) score R of each rollout. entropies: (P, G) token-mean entropy H of each
    rollout, in nats. lengths: (P, G) response tokens of each rollout.

    Example:
        >>> rewards = torch.tensor([[0.0, 2.0], [1.0, 1.0]])
        >>> compute_group_scores("reward", rewards).tolist()
        [1.0, 1.0]
        >>> compute_group_scores("reward_std", rewards).double().round(decimals=4).tolist()
        [1.4142, 0.0]

    Source: published code (RAGEN `rollout_filter`).
    Degenerate: the standard deviation of a group of one is 0 (published: NaN).
    """
    # For each metric, the values that it reads and their statistic over a group's rollouts.
    statistics: dict[str, tuple[Tensor | None, Callable[[Tensor], Tensor]]] = {
        "reward_variance": (rewards, _std),
        "reward_std": (rewards, _std),
        "reward": (rewards, _mean),
        "reward_sum": (rewards, lambda x: x.sum(dim=1)),
        "entropy_variance": (entropies, _std),
        "entropy_std": (entropies, _std),
        "entropy": (entropies, _mean),
        "length": (lengths, _mean),
    }
    metric_values, statistic = statistics[metric]
    assert metric_values is not None, metric
    return statistic(metric_values.float())


def _std(x: Tensor) -> Tensor:
    return x.std(dim=1) if x.shape[1] > 1 else x.new_zeros(len(x))


def _mean(x: Tensor) -> Tensor:
    return x.mean(dim=1)


def select_groups(scores: Tensor, rule: Rule, largest: bool = True, include_zero: bool = True) -> Tensor:
    """Select the groups to keep, (P,) bool: optionally drop zero scores, then apply `rule` to the rest.

    Args:
        scores: (P,) score of each group; used as float32.
        rule: see `parse_rule`.
        largest: prefer high scores; False prefers low ones.
        include_zero: False removes groups with |score| <= 1e-10 before the rule sees them.

    Example:
        >>> scores = torch.tensor([0.0, 1.0, 3.0])
        >>> select_groups(scores, parse_rule("top_k_abs", 1)).tolist()
        [False, False, True]
        >>> select_groups(scores, parse_rule("top_p", 1.0), include_zero=False).tolist()
        [False, True, True]

    Source: published code (RAGEN `rollout_filter`). Ties go to the lower index. Scores are summed in sorted order, so
    permuting the groups permutes the result.
    Degenerate: without candidates, nothing is kept.
    """
    scores = scores.float()
    candidates = torch.ones_like(scores, dtype=torch.bool) if include_zero else scores.abs() > ZERO_SCORE
    is_kept = torch.zeros_like(candidates)
    if candidates.any():
        is_kept[candidates] = rule(scores[candidates], largest, len(scores))
    return is_kept


def top_p_softmax(scores: Tensor, mass: float, largest: bool = True) -> Tensor:
    """Keep the shortest ranked prefix whose softmax probabilities sum to `mass` or more, (P,) bool.

        p = softmax(s) (softmax(−s) for the smallest),  k = min{k : p_(1) + … + p_(k) >= mass}

    The scale of the scores matters: if they are nearly equal, about mass · P groups are kept, and if they differ by
    several units, only the few best.

    scores: (P,) float32, P >= 1. mass: in (0, 1]. largest: rank high scores first.

    Example:
        >>> top_p_softmax(torch.tensor([1.0, 1.0, 1.0, 1.0]), mass=0.5).tolist()  # probability 1/4 each
        [True, True, False, False]
        >>> top_p_softmax(torch.tensor([0.0, 0.0, 0.0, 9.0]), mass=0.5).tolist()
        [False, False, False, True]

    Degenerate: if rounding leaves the sum below `mass`, all groups are kept.
    """
    sorted_scores, order = torch.sort(scores, descending=largest, stable=True)
    probabilities = torch.softmax(sorted_scores if largest else -sorted_scores, dim=0)
    # Index of the first sum that reaches the mass. The group at this index is kept, too.
    cutoff = int(torch.searchsorted(probabilities.cumsum(dim=0), mass))
    return _make_prefix_mask(order, cutoff + 1)


def top_p_linear(scores: Tensor, mass: float, eps: float, largest: bool = True) -> Tensor:
    """Keep the shortest ranked prefix of positive scores whose sum reaches mass · Σ s − eps, (P,) bool.

        k = min{k : s_(1) + … + s_(k) >= mass · Σ s − eps}

    scores: (P,) float32, P >= 1. mass: in (0, 1]. eps: slack, in units of the score. largest: rank high scores first.

    Example:
        >>> top_p_linear(torch.tensor([1.0, 2.0, 5.0]), mass=0.75, eps=0.0).tolist()  # 5 + 2 reach 6
        [False, True, True]

    Degenerate: nothing is kept if the target is not positive (near-zero scores: the batch is rejected), or if it is not
    reached before the first score that is not positive.
    """
    sorted_scores, order = torch.sort(scores, descending=largest, stable=True)
    target = mass * sorted_scores.sum() - eps
    # prefix_sums[k] is the sum of the k best, added in float64 and compared in float32 as in the published loop.
    prefix_sums = F.pad(sorted_scores.double().cumsum(dim=0), (1, 0)).float()
    is_reached = prefix_sums >= target
    # The argmax of a mask is its first True, or 0 if there is none. As published, nothing is kept if the prefix has a
    # score that is not positive.
    count = int(is_reached.int().argmax())
    is_possible = bool(is_reached.any()) and bool((sorted_scores[:count] > 0).all())
    return _make_prefix_mask(order, count if is_possible else 0)


def top_k(scores: Tensor, count: int, largest: bool = True) -> Tensor:
    """Keep the `count` best scores, but at least one, (P,) bool.

    scores: (P,) float32, P >= 1. count: groups to keep. largest: prefer high scores.

    Example:
        >>> top_k(torch.tensor([1.0, 3.0, 2.0]), count=2).tolist()
        [False, True, True]
    """
    order = torch.sort(scores, descending=largest, stable=True).indices
    return _make_prefix_mask(order, max(count, 1))


def min_p(scores: Tensor, ratio: float, largest: bool = True) -> Tensor:
    """Keep scores near the best one, (P,) bool.

        largest: s >= ratio · max s − 1e-10        smallest: s <= min s / (ratio + 1e-10) + 1e-10

    scores: (P,) float32, P >= 1. In float64, a ratio of 1 might not keep the minimum itself. ratio: in [0, 1]. largest:
    compare with the highest score instead of the lowest.

    Example:
        >>> min_p(torch.tensor([1.0, 2.0, 4.0]), ratio=0.5).tolist()
        [False, True, True]

    Degenerate: with negative scores nothing may be kept, since ratio · max exceeds max.
    """
    if largest:
        return scores >= scores.max() * ratio - MIN_P_SLACK
    return scores <= scores.min() / (ratio + MIN_P_SLACK) + MIN_P_SLACK


def _make_prefix_mask(order: Tensor, count: int) -> Tensor:
    """Make a mask (P,) of the first `count` indices in `order`."""
    is_kept = torch.zeros_like(order, dtype=torch.bool)
    is_kept[order[:count]] = True
    return is_kept


def compute_filter_loss_scale(mode: str, num_kept: int, num_groups: int) -> float:
    """Compute the factor on the advantages of the groups that a filter kept.

        none: 1        linear: num_kept / num_groups        sqrt: sqrt(num_kept / num_groups)

    mode: a name above. num_kept: groups kept. num_groups: groups before the filter.

    Example:
        >>> compute_filter_loss_scale("sqrt", num_kept=1, num_groups=4)
        0.5

    Source: published code (RAGEN `filter_loss_scaling`).  Degenerate: 0 if nothing is kept, except for `none`.
    """
    scales = {"none": 1.0, "linear": num_kept / num_groups, "sqrt": math.sqrt(num_kept / num_groups)}
    return scales[mode]
