"""Slow, literal versions of the formulas in trainable/algo, on Python lists: one loop for each sum or each choice."""

import math
import statistics
import struct
from collections.abc import Sequence
from itertools import pairwise

Row = Sequence[float]
RowMask = Sequence[bool]


def whiten(x: Row, mask: RowMask) -> list[float]:
    trained_values = [v for v, m in zip(x, mask, strict=True) if m]
    if len(trained_values) < 2:
        return [0.0 for _ in x]
    mean, variance = statistics.fmean(trained_values), statistics.variance(trained_values)
    return [(v - mean) / math.sqrt(variance + 1e-8) if m else 0.0 for v, m in zip(x, mask, strict=True)]


def aggregate(loss: Sequence[Row], mask: Sequence[RowMask], mode: str, padded_length: int) -> float:
    """One aggregation of a (B, T) loss, with loops."""
    rows = [[x for x, m in zip(xs, ms, strict=True) if m] for xs, ms in zip(loss, mask, strict=True)]
    if mode.startswith("token-mean"):
        tokens = [x for row in rows for x in row]
        return sum(tokens) / len(tokens) if tokens else 0.0
    if mode == "seq-mean-token-sum-norm":
        return sum(sum(row) for row in rows) / padded_length
    trained_rows = [row for row in rows if row]
    if not trained_rows:
        return 0.0
    if mode == "seq-mean-token-sum":
        return sum(sum(row) for row in trained_rows) / len(trained_rows)
    assert mode == "seq-mean-token-mean"
    return sum(sum(row) / len(row) for row in trained_rows) / len(trained_rows)


def aggregate_micro(loss: Sequence[Row], mask: Sequence[RowMask], mode: str, padded_length: int, size: int) -> float:
    """Mean over micro-batches of the aggregation of each; token-mean-global knows no micro-batches."""
    if mode == "token-mean-global":
        return aggregate(loss, mask, mode, padded_length)
    losses = [
        aggregate(loss[start : start + size], mask[start : start + size], mode, padded_length)
        for start in range(0, len(loss), size)
    ]
    return sum(losses) / len(losses)


def gae(rewards: Row, values: Row, mask: RowMask, gamma: float, lam: float) -> tuple[list[float], list[float]]:
    """A_t = Σ_l (γλ)^l δ_{t+l}, the double sum over trained tokens; return_t = A_t + V_t."""
    trained_positions = [t for t, m in enumerate(mask) if m]
    r, v = [rewards[t] for t in trained_positions], [values[t] for t in trained_positions] + [0.0]
    delta = [r[i] + gamma * v[i + 1] - v[i] for i in range(len(r))]
    advantages, returns = [0.0] * len(mask), [0.0] * len(mask)
    for i, t in enumerate(trained_positions):
        advantages[t] = sum((gamma * lam) ** k * delta[i + k] for k in range(len(delta) - i))
        returns[t] = advantages[t] + values[t]
    return advantages, returns


def published_gae(rewards: Row, values: Row, mask: RowMask, gamma: float, lam: float) -> list[float]:
    """The recursion over all positions with carried values. Its result has no meaning where the mask is False."""
    next_value = carried_advantage = 0.0
    advantages = [0.0] * len(mask)
    for t in reversed(range(len(mask))):
        delta = rewards[t] + gamma * next_value - values[t]
        if mask[t]:
            carried_advantage = delta + gamma * lam * carried_advantage
            next_value = values[t]
        advantages[t] = carried_advantage
    return advantages


def bi_level_gae(
    rewards: Row, values: Row, mask: RowMask, turn_ids: Sequence[int], gamma: float, lam: float, high_level_gamma: float
) -> tuple[list[float], list[float]]:
    turns: list[list[int]] = []
    for t in [t for t, m in enumerate(mask) if m]:
        if turns and turn_ids[turns[-1][-1]] == turn_ids[t]:
            turns[-1].append(t)
        else:
            turns.append([t])
    advantages, returns = [0.0] * len(mask), [0.0] * len(mask)
    turn_returns = _compute_turn_returns(turns, rewards, values, high_level_gamma, lam)
    for turn, target_return in zip(turns, turn_returns, strict=True):
        for i, t in enumerate(turn):
            delta = [gamma * values[next_position] - values[position] for position, next_position in pairwise(turn)]
            delta.append(target_return - values[turn[-1]])
            advantages[t] = sum((gamma * lam) ** k * delta[i + k] for k in range(len(turn) - i))
            returns[t] = advantages[t] + values[t]
    return advantages, returns


def _compute_turn_returns(turns: list[list[int]], rewards: Row, values: Row, gamma: float, lam: float) -> list[float]:
    end_values = [values[turn[-1]] for turn in turns] + [0.0]
    delta = [sum(rewards[t] for t in turn) + gamma * end_values[k + 1] - end_values[k] for k, turn in enumerate(turns)]
    return [
        end_values[k] + sum((gamma * lam) ** step * delta[k + step] for step in range(len(turns) - k))
        for k in range(len(turns))
    ]


def gather_groups(scores: Row, group_ids: Sequence[int]) -> list[list[float]]:
    """Return the scores of the group of each sequence, including its own."""
    return [[s for s, g in zip(scores, group_ids, strict=True) if g == group_id] for group_id in group_ids]


def population_grpo(scores: Row, group_ids: Sequence[int], floor: float) -> list[float]:
    """Divide by the deviation (divisor G) plus `floor`. A deviation that is not above `floor` counts as 0."""
    advantages = []
    for score, group in zip(scores, gather_groups(scores, group_ids), strict=True):
        std = statistics.pstdev(group)
        advantages.append((score - statistics.fmean(group)) / (std + floor) if std > floor else 0.0)
    return advantages


def grpo(scores: Row, group_ids: Sequence[int], norm_by_std: bool) -> list[float]:
    advantages = []
    for score, group in zip(scores, gather_groups(scores, group_ids), strict=True):
        std = statistics.stdev(group) if len(group) > 1 else 0.0
        advantages.append((score - statistics.fmean(group)) / (std + 1e-6 if norm_by_std else 1.0))
    return advantages


def batch_grpo(scores: Row, group_ids: Sequence[int]) -> list[float]:
    """Divide the differences from the group's mean by the deviation of all scores."""
    std = statistics.stdev(scores) if len(scores) > 1 else 0.0
    groups = gather_groups(scores, group_ids)
    return [(score - statistics.fmean(group)) / (std + 1e-6) for score, group in zip(scores, groups, strict=True)]


def rloo(scores: Row, group_ids: Sequence[int]) -> list[float]:
    advantages = []
    for i, score in enumerate(scores):
        others = [s for j, s in enumerate(scores) if group_ids[j] == group_ids[i] and j != i]
        advantages.append(score - statistics.fmean(others) if others else 0.0)
    return advantages


def reward_to_go(rewards: Row, mask: RowMask, gamma: float) -> list[float]:
    trained_positions = [t for t, m in enumerate(mask) if m]
    returns = [0.0] * len(mask)
    for i, t in enumerate(trained_positions):
        returns[t] = sum(gamma**k * rewards[u] for k, u in enumerate(trained_positions[i:]))
    return returns


def ppo_clip(logprob: float, old: float, advantage: float, low: float, high: float, c: float) -> float:
    ratio = math.exp(min(max(logprob - old, -20.0), 20.0))
    loss = max(-advantage * ratio, -advantage * min(max(ratio, 1 - low), 1 + high))
    return min(loss, -advantage * c) if advantage < 0 else loss


def split_episodes(episode_index: Sequence[int]) -> list[list[int]]:
    """The positions of the tokens of each episode."""
    return [[i for i, e in enumerate(episode_index) if e == episode] for episode in sorted(set(episode_index))]


def gspo(
    logprobs: Row, old: Row, advantages: Row, episode_index: Sequence[int], low: float, high: float
) -> list[float]:
    losses = [0.0] * len(logprobs)
    for tokens in split_episodes(episode_index):
        mean = sum(logprobs[i] - old[i] for i in tokens) / len(tokens)
        ratio = math.exp(min(max(mean, -20.0), 20.0))
        for i in tokens:
            losses[i] = max(-advantages[i] * ratio, -advantages[i] * min(max(ratio, 1 - low), 1 + high))
    return losses


def cispo(logprob: float, old: float, advantage: float, low: float, high: float) -> float:
    ratio = math.exp(min(max(logprob - old, -20.0), 20.0))
    return -advantage * min(max(ratio, 1 - low), 1 + high) * logprob


def cppo(
    logprobs: Row, old: Row, advantages: Row, episode_index: Sequence[int], delta: float, delta_b: float, w_min: float
) -> list[float]:
    """Algorithm 1 of the paper, token by token."""
    losses = [0.0] * len(logprobs)
    for tokens in split_episodes(episode_index):
        weight_sum = divergence_sum = 0.0
        for t, i in enumerate(tokens, 1):
            ratio = math.exp(min(max(logprobs[i] - old[i], -20.0), 20.0))
            weight = 1 - (1 - w_min) / (len(tokens) - 1) * (t - 1) if len(tokens) > 1 else 1.0
            divergence = weight * abs(math.exp(logprobs[i]) - math.exp(old[i]))
            bound = min(delta, delta + delta_b * weight_sum - divergence_sum)
            if advantages[i] * (ratio - 1) <= 0 or divergence <= bound:
                losses[i] = -advantages[i] * ratio
            weight_sum, divergence_sum = weight_sum + weight, divergence_sum + divergence
    return losses


def spurious_tokens(
    logprobs: Sequence[Row],
    entropies: Sequence[Row],
    advantages: Sequence[Row],
    mask: Sequence[RowMask],
    tau_p: float,
    quantile: float,
) -> set[tuple[int, int]]:
    """The positions that STAPO silences."""
    candidates = [
        (b, t)
        for b, row in enumerate(mask)
        for t, is_trained in enumerate(row)
        if is_trained and advantages[b][t] > 0 and logprobs[b][t] < math.log(tau_p)
    ]
    ordered = sorted(entropies[b][t] for b, t in candidates)
    if not ordered:
        return set()
    place = quantile * (len(ordered) - 1)
    below, above = ordered[math.floor(place)], ordered[math.ceil(place)]
    threshold = below + (above - below) * (place - math.floor(place))
    return {(b, t) for b, t in candidates if entropies[b][t] < threshold}


def kl(p: Row, q: Row) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def kl_gradient(p: Row, q: Row) -> list[float]:
    """∂KL(p‖q) / ∂z where p = softmax(z)."""
    return [a * (math.log(a / b) - kl(p, q)) for a, b in zip(p, q, strict=True)]


def reverse_kl_gradient(p: Row, q: Row) -> list[float]:
    """∂KL(q‖p) / ∂z where p = softmax(z)."""
    return [a - b for a, b in zip(p, q, strict=True)]


def is_zero(score: float) -> bool:
    """|score| <= 1e-10, both as float32 numbers."""
    (limit,) = struct.unpack("f", struct.pack("f", 1e-10))
    return abs(score) <= limit


def select_groups(
    scores: Row, strategy: str, value: float, prob_mode: str, eps: float, largest: bool, include_zero: bool
) -> tuple[list[bool], float]:
    """Return which groups are kept, and how near the closest decision is to a tie of real numbers."""
    candidates = [i for i, s in enumerate(scores) if include_zero or not is_zero(s)]
    ranked_groups = sorted(candidates, key=lambda i: (-scores[i] if largest else scores[i], i))
    chosen_ranks, margin = _choose_ranks(
        [scores[i] for i in ranked_groups], strategy, value, prob_mode, eps, largest, len(scores)
    )
    kept_groups = {ranked_groups[rank] for rank in chosen_ranks}
    return [i in kept_groups for i in range(len(scores))], margin


def _choose_ranks(
    ranked_scores: list[float], strategy: str, value: float, prob_mode: str, eps: float, largest: bool, total: int
) -> tuple[list[int], float]:
    """Return the kept ranks and the margin."""
    if not ranked_scores or (strategy == "top_p" and value >= 1):
        return list(range(len(ranked_scores))), math.inf
    if strategy == "top_p":
        return (
            _select_softmax_prefix(ranked_scores, value, largest)
            if prob_mode == "softmax"
            else _select_linear_prefix(ranked_scores, value, eps)
        )
    if strategy == "min_p":
        return _select_near_best(ranked_scores, value, largest)
    count = int(value) if strategy == "top_k_abs" else int(value * total)
    return list(range(max(min(count, len(ranked_scores)), 1))), math.inf


def _select_softmax_prefix(ranked_scores: list[float], mass: float, largest: bool) -> tuple[list[int], float]:
    logits = ranked_scores if largest else [-s for s in ranked_scores]
    weights = [math.exp(x - max(logits)) for x in logits]
    sums = [sum(weights[: k + 1]) / sum(weights) for k in range(len(weights))]
    count = next((k + 1 for k, reached in enumerate(sums) if reached >= mass), len(sums))
    return list(range(count)), min(abs(reached - mass) for reached in sums)


def _select_linear_prefix(ranked_scores: list[float], mass: float, eps: float) -> tuple[list[int], float]:
    target = mass * sum(ranked_scores) - eps
    gathered_mass, count, margin = 0.0, 0, abs(target)
    for score in ranked_scores:
        if gathered_mass >= target or score <= 0:
            break
        gathered_mass += score
        count += 1
        margin = min(margin, abs(gathered_mass - target))
    return list(range(count if gathered_mass >= target else 0)), margin


def _select_near_best(ranked_scores: list[float], ratio: float, largest: bool) -> tuple[list[int], float]:
    best = ranked_scores[0]
    if ratio == 1:
        return [rank for rank, s in enumerate(ranked_scores) if s == best], math.inf
    bound = best * ratio - 1e-10 if largest else best / (ratio + 1e-10) + 1e-10
    chosen_ranks = [rank for rank, s in enumerate(ranked_scores) if (s >= bound if largest else s <= bound)]
    return chosen_ranks, min(abs(s - bound) for s in ranked_scores)


def group_skill(scores: Row, group_ids: Sequence[int]) -> list[float]:
    skills = []
    for score, group in zip(scores, gather_groups(scores, group_ids), strict=True):
        std = statistics.pstdev(group)
        skills.append((score - statistics.fmean(group)) / (std if std > 1e-6 else 1.0))
    return skills


def softmax(x: Row) -> list[float]:
    top = max(x)
    total = sum(math.exp(logit - top) for logit in x)
    return [math.exp(logit - top) / total for logit in x]


def target_policy(
    logprobs: Row, old: Row, skills: Row, group_ids: Sequence[int], eta: float
) -> tuple[float, list[float], float, float]:
    """Loss, minus its gradient, entropy and largest probability of the target; group by group, rollout by rollout."""
    groups = sorted(set(group_ids))
    negative_gradient = [0.0] * len(logprobs)
    loss = entropy = max_probability = 0.0
    for group_id in groups:
        rows = [i for i, group in enumerate(group_ids) if group == group_id]
        p, old_probs = softmax([logprobs[i] for i in rows]), softmax([old[i] for i in rows])
        max_logit = max(skills[i] / eta for i in rows)
        tilted_probs = [share * math.exp(skills[i] / eta - max_logit) for share, i in zip(old_probs, rows, strict=True)]
        q = [tilted_prob / sum(tilted_probs) for tilted_prob in tilted_probs]
        for i, prob, target_prob in zip(rows, p, q, strict=True):
            negative_gradient[i] = (target_prob - prob) / len(groups)
            loss -= target_prob * math.log(prob) / len(groups)
            entropy -= target_prob * math.log(target_prob) / len(groups) if target_prob else 0.0
        max_probability += max(q) / len(groups)
    return loss, negative_gradient, entropy, max_probability
