"""Filters of prompt groups: score each group, and select by score which groups a step keeps.

Shapes: P prompts (groups), G rollouts per group. Each rule is a function of the candidates' scores. `select_groups` is
the published pipeline around the rules: it converts scores to float32, optionally removes zero scores, and applies a
rule.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

# Both constants are from the published code (RAGEN `rollout_filter`).
ZERO_SCORE = 1e-10
"""A score whose absolute value is at most this counts as 0."""
MIN_P_SLACK = 1e-10
"""Slack of `min_p`: added to or subtracted from its thresholds, and added to the ratio when dividing by it."""


@dataclass(frozen=True)
class TopP:
    """Keep the best groups that together reach a fraction `mass` of the total score. 1 keeps every candidate."""

    mass: float
    """Fraction of the total score to reach, in (0, 1]."""
    prob_mode: str = "softmax"
    """`softmax`: a group's fraction of the total is softmax(score). `linear`: it is score / Σ score."""
    eps: float = 0.01
    """Linear mode only: subtracted from the score to reach, which rejects a batch of near-zero scores."""

    def __post_init__(self) -> None:
        _require(0 < self.mass <= 1, "top_p mass", self.mass, "above 0 and at most 1, such as 0.9; 1 keeps all groups")
        _require(self.prob_mode in ("softmax", "linear"), "top_p prob_mode", self.prob_mode, "softmax or linear")
        _require(0 <= self.eps < math.inf, "top_p eps", self.eps, "finite and not negative, such as 0.01")


@dataclass(frozen=True)
class TopK:
    """Keep a fraction of all groups, counted before zero scores are dropped, but at least one group."""

    fraction: float
    """Fraction of the groups, in (0, 1]."""

    def __post_init__(self) -> None:
        _require(
            0 < self.fraction <= 1, "top_k fraction", self.fraction, "above 0 and at most 1; for a count: top_k_abs"
        )


@dataclass(frozen=True)
class TopKAbs:
    """Keep a number of groups, or all candidates if there are fewer."""

    count: int
    """Groups to keep, at least 1."""

    def __post_init__(self) -> None:
        _require(self.count >= 1, "top_k_abs count", self.count, "a whole number of at least 1; for a fraction: top_k")


@dataclass(frozen=True)
class MinP:
    """Keep the groups whose score is within a factor `ratio` of the best score."""

    ratio: float
    """Fraction of the best score, in [0, 1]; 1 keeps only ties with the best."""

    def __post_init__(self) -> None:
        _require(0 <= self.ratio <= 1, "min_p ratio", self.ratio, "between 0 and 1, such as 0.1")


@dataclass(frozen=True)
class OwnRule:
    """Keep the groups that a plug-in selects."""

    function: Callable[[Tensor, float, bool], Tensor]
    """Called with the candidates' scores (n,), `value`, and whether to prefer high scores. Returns (n,) bool."""
    value: float
    """The value of the setting rollout_filter_value."""


Rule = TopP | TopK | TopKAbs | MinP | OwnRule


def _require(is_valid: bool, name: str, value: object, allowed: str) -> None:
    """Raise ValueError, with `value` and the allowed values, unless `is_valid`."""
    if not is_valid:
        raise ValueError(f"{name} is {value!r}; it must be {allowed}.")


def _parse_count(value: float) -> int:
    _require(value % 1 == 0, "top_k_abs count", value, "a whole number of at least 1; for a fraction: top_k")
    return int(value)


def parse_rule(strategy: str, value: float, prob_mode: str = "softmax", eps: float = 0.01) -> Rule:
    """Make a rule from the name of a strategy and its value.

        top_p → TopP(mass)    top_k, top_f → TopK(fraction)    top_k_abs → TopKAbs(count)    min_p → MinP(ratio)

    strategy: a name above. `top_f` is an older name of `top_k`. value: the mass, fraction, count or ratio. prob_mode:
    for top_p, `softmax` or `linear`. eps: for top_p in linear mode.

    Example:
        >>> parse_rule("top_k", 0.25)
        TopK(fraction=0.25)
        >>> parse_rule("top_k_abs", 4.0)
        TopKAbs(count=4)

    Source: published code (RAGEN `rollout_filter`). A count must be a whole number; the published code truncates it.
    """
    # Functions, since constructing a rule checks the value, whose range depends on the strategy.
    rules: dict[str, Callable[[], Rule]] = {
        "top_p": lambda: TopP(value, prob_mode, eps),
        "top_k": lambda: TopK(value),
        "top_f": lambda: TopK(value),
        "top_k_abs": lambda: TopKAbs(_parse_count(value)),
        "min_p": lambda: MinP(value),
    }
    _require(strategy in rules, "filter strategy", strategy, f"one of {', '.join(rules)}")
    return rules[strategy]()


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
    _require(metric in statistics, "filter metric", metric, f"one of {', '.join(statistics)}")
    metric_values, statistic = statistics[metric]
    if metric_values is None:
        raise ValueError(
            f"filter metric {metric!r} needs the rollouts' {metric.split('_')[0]} values; none were given."
        )
    return statistic(metric_values.float())


def _std(x: Tensor) -> Tensor:
    return x.std(dim=1) if x.shape[1] > 1 else x.new_zeros(len(x))


def _mean(x: Tensor) -> Tensor:
    return x.mean(dim=1)


def select_groups(scores: Tensor, rule: Rule, largest: bool = True, include_zero: bool = True) -> Tensor:
    """Select the groups to keep, (P,) bool: optionally drop zero scores, then apply `rule` to the rest.

    Args:
        scores: (P,) score of each group; used as float32.
        rule: a `TopP`, `TopK`, `TopKAbs`, `MinP` or `OwnRule`.
        largest: prefer high scores; False prefers low ones.
        include_zero: False removes groups with |score| <= 1e-10 before the rule sees them.

    Example:
        >>> scores = torch.tensor([0.0, 1.0, 3.0])
        >>> select_groups(scores, TopKAbs(1)).tolist()
        [False, False, True]
        >>> select_groups(scores, TopP(1.0), include_zero=False).tolist()
        [False, True, True]

    Source: published code (RAGEN `rollout_filter`). Ties go to the lower index. Scores are summed in sorted order, so
    permuting the groups permutes the result.
    Degenerate: without candidates, nothing is kept.
    """
    scores = scores.float()
    if not torch.isfinite(scores).all():
        raise ValueError(f"group scores are {scores.tolist()}; every score must be finite.")
    candidates = torch.ones_like(scores, dtype=torch.bool) if include_zero else scores.abs() > ZERO_SCORE
    is_kept = torch.zeros_like(candidates)
    if candidates.any():
        is_kept[candidates] = _apply_rule(rule, scores[candidates], largest, num_groups=len(scores))
    return is_kept


def _apply_rule(rule: Rule, scores: Tensor, largest: bool, num_groups: int) -> Tensor:
    """Select the candidates that `rule` keeps. num_groups: number of groups before zero scores were dropped."""
    match rule:
        # By definition, mass 1 keeps every candidate. Linear mode would drop scores that are not positive.
        case TopP(mass=1):
            return torch.ones_like(scores, dtype=torch.bool)
        case TopP(prob_mode="softmax"):
            return top_p_softmax(scores, rule.mass, largest)
        case TopP():
            return top_p_linear(scores, rule.mass, rule.eps, largest)
        # As published, a fraction of all groups, not only of the candidates.
        case TopK():
            return top_k(scores, int(rule.fraction * num_groups), largest)
        case TopKAbs():
            return top_k(scores, rule.count, largest)
        case MinP():
            return min_p(scores, rule.ratio, largest)
        case OwnRule():
            return rule.function(scores, rule.value, largest)


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
    _require(num_groups >= 1, "number of groups before the filter", num_groups, "at least 1")
    _require(
        0 <= num_kept <= num_groups,
        "number of groups kept",
        num_kept,
        f"between 0 and the {num_groups} groups before the filter",
    )
    scales = {"none": 1.0, "linear": num_kept / num_groups, "sqrt": math.sqrt(num_kept / num_groups)}
    _require(mode in scales, "filter_loss_scaling", mode, f"one of {', '.join(scales)}")
    return scales[mode]
