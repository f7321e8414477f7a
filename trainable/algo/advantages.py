"""Advantages of trained tokens: GAE (plain and bi-level) with a critic, and group baselines without one.

Shapes: B sequences, T tokens. `mask` (B, T) is True at trained tokens. All other tokens (observations, padding) are
skipped in time, as if they did not exist. Every result is a constant (no gradient) and 0 where `mask` is False.
`scores` (B,) are the scores R of sequences, and `group_ids` (B,) integers, equal for the rollouts of one prompt.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trainable.algo.reductions import masked_whiten

STD_FLOOR = 1e-6  # verl 0.6.1 adds this to the std of a group, so that equal scores are not divided by 0
SKILL_STD_FLOOR = 1e-6  # up to this std, the scores of a group count as equal (published sandbox)


class AdvantagesReturns(NamedTuple):
    """Advantages (B, T), not whitened, and the returns (B, T) that the critic is fitted to."""

    advantages: Tensor
    returns: Tensor


def compute_overlong_penalty(num_tokens: int, max_tokens: int, buffer_tokens: int, penalty_factor: float) -> float:
    """Compute the soft overlong punishment, a number of at most 0 that is added to the reward of a reply.

        0                                              where L <= L_max − L_buffer
        −factor · (L − (L_max − L_buffer)) / L_buffer  above that, so −factor at L = L_max

    num_tokens: tokens L of the reply. max_tokens: L_max, at which replies are cut. buffer_tokens: L_buffer >= 1, the
    last tokens before that. penalty_factor: the punishment of a reply of L_max tokens, in units of the reward.

    Example:
        >>> [compute_overlong_penalty(n, max_tokens=10, buffer_tokens=4, penalty_factor=1.0) for n in (3, 6, 8, 10)]
        [0.0, 0.0, -0.5, -1.0]

    Source: Yu et al. 2025, arXiv:2503.14476 (DAPO), eq. 13, where the factor is 1; verl `overlong_buffer`.
    Degenerate: with a buffer of L_max tokens, the punishment is proportional to the length.
    """
    return -penalty_factor * max(num_tokens - (max_tokens - buffer_tokens), 0) / buffer_tokens + 0.0


@torch.no_grad()
def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> AdvantagesReturns:
    """Estimate generalized advantages over the trained tokens of each sequence.

        δ_t = r_t + γ V_{t+1} − V_t,    A_t = Σ_{l>=0} (γλ)^l δ_{t+l},    return_t = A_t + V_t

    where t counts trained tokens only, and V is 0 after the last one (the episode has ended).

    Args:
        rewards: (B, T); not read where `mask` is False.
        values: (B, T) V of the state before each token; likewise.
        gamma: discount γ per trained token.
        lam: λ, 1 for Monte-Carlo returns, 0 for one-step temporal differences.

    Example:
        The token in the middle is an observation. With λ = γ = 1, both returns are the final reward.

        >>> rewards, values = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.5, 9.0, 0.25]])
        >>> result = gae(rewards, values, torch.tensor([[True, False, True]]), gamma=1.0, lam=1.0)
        >>> result.advantages.tolist(), result.returns.tolist()
        ([[0.5, 0.0, 0.75]], [[1.0, 0.0, 1.0]])

    Source: Schulman et al. 2016, arXiv:1506.02438, eq. 16; observations are skipped as in the published code (verl
    0.6.1 `compute_gae_advantage_return`). That code whitens at the end; here the caller applies `masked_whiten`.
    Degenerate: a row without a trained token is zero.
    """
    # With the trained tokens moved to the front, the recursion over time has no gaps.
    order = _order_trained_first(mask)
    is_trained = mask.gather(1, order)
    compact_rewards, compact_values = (x.gather(1, order).masked_fill(~is_trained, 0) for x in (rewards, values))
    advantages = _compute_gae(compact_rewards, compact_values, _shift_left(is_trained), gamma, lam)
    return _scatter_back(advantages, compact_values, order)


@torch.no_grad()
def bi_level_gae(
    rewards: Tensor, values: Tensor, mask: Tensor, turn_ids: Tensor, gamma: float, lam: float, high_level_gamma: float
) -> AdvantagesReturns:
    """Apply GAE over turns, then over the tokens of each turn, towards the return of the turn.

    Let e_k be the last trained token of turn k and r_k the sum of the rewards on its trained tokens.

        turns:   δ_k = r_k + γ_H V(e_{k+1}) − V(e_k),   G_k = V(e_k) + Σ_{l>=0} (γ_H λ)^l δ_{k+l}
        tokens:  δ_t = γ V_{t+1} − V_t before the end,   δ_{e_k} = G_k − V(e_k),   A_t = Σ_{l=0}^{e_k−t} (γλ)^l δ_{t+l}

    The token sum stops at the end of the turn; later turns act through G_k alone. return_t = A_t + V_t.

    Args:
        rewards, values: (B, T); not read where `mask` is False.
        turn_ids: (B, T) int; consecutive trained tokens with the same id are one turn. Not read where `mask` is False.
        gamma: discount γ per token, within a turn.
        lam: λ, for both levels.
        high_level_gamma: discount γ_H per turn.

    Example:
        The first turn has two tokens and the second turn one. With V = 0 and γ_H = 1/2, the reward of the second turn
        counts half in the first.

        >>> rewards, values = torch.tensor([[0.0, 0.0, 1.0]]), torch.zeros(1, 3)
        >>> mask, turn_ids = torch.ones(1, 3, dtype=torch.bool), torch.tensor([[0, 0, 1]])
        >>> bi_level_gae(rewards, values, mask, turn_ids, gamma=1.0, lam=1.0, high_level_gamma=0.5).advantages.tolist()
        [[0.5, 0.5, 1.0]]

    Source: published code (`compute_bi_level_gae_advantage_return`), in which turns end at non-zero rewards, so a turn
    with reward 0 is merged with the next one. Explicit turn ids avoid that.
    Degenerate: a row without a trained token is zero; one turn per row is `gae`, one token per turn is `gae` at γ_H.
    """
    order = _order_trained_first(mask)
    is_trained = mask.gather(1, order)
    compact_rewards, compact_values = (x.gather(1, order).masked_fill(~is_trained, 0) for x in (rewards, values))
    compact_ids = turn_ids.gather(1, order)
    # True where the next token is trained, too, and belongs to the same turn.
    same_turn = F.pad(compact_ids[:, 1:] == compact_ids[:, :-1], (0, 1)) & _shift_left(is_trained)
    turn_ends = is_trained & ~same_turn

    # With the ends of turns as the mask, `gae` treats each turn as one token.
    turn_rewards = _sum_to_next_end(compact_rewards, turn_ends)
    turn_returns = gae(turn_rewards, compact_values, turn_ends, high_level_gamma, lam).returns
    # The return of a turn is the only reward within it, and `same_turn` stops the recursion at its end.
    advantages = _compute_gae(turn_returns, compact_values, same_turn, gamma, lam)
    return _scatter_back(advantages, compact_values, order)


def _order_trained_first(mask: Tensor) -> Tensor:
    """Order the positions of each row, (B, T): first the trained ones, then the others, each in time."""
    return torch.argsort(~mask, dim=1, stable=True)


def _shift_left(x: Tensor) -> Tensor:
    """Compute x_{t+1}, with zero (False) after the last position."""
    return F.pad(x[:, 1:], (0, 1))


def _compute_gae(rewards: Tensor, values: Tensor, is_continued: Tensor, gamma: float, lam: float) -> Tensor:
    """Compute A_t = r_t + γ c_t V_{t+1} − V_t + γλ c_t A_{t+1}, with c = `is_continued` True where t+1 continues t."""
    continuation = is_continued.to(values.dtype)
    deltas = rewards + gamma * continuation * _shift_left(values) - values
    return _compute_discounted_sums(deltas, gamma * lam * continuation)


def _compute_discounted_sums(x: Tensor, discount: Tensor) -> Tensor:
    """Compute y_t = x_t + d_t y_{t+1} along time, for x and discount d of shape (B, T).

    Each pass doubles the number of steps that y_t has summed, so log2(T) passes replace a loop over T.
    """
    offset = 1
    # Here y_t holds the sum of `offset` steps, and d_t the discount over that many.
    while offset < x.shape[1]:
        x = x + discount * F.pad(x[:, offset:], (0, offset))
        discount = discount * F.pad(discount[:, offset:], (0, offset))
        offset *= 2
    return x


def _sum_to_next_end(rewards: Tensor, is_end: Tensor) -> Tensor:
    """Move each reward (B, T) to the next position where `is_end` is True, which may be its own, and sum there."""
    # After the last end nothing is trained and all rewards are 0, so their target may be any position.
    last_index = is_end.shape[1] - 1
    positions = torch.arange(last_index + 1, device=is_end.device).expand_as(is_end)
    next_end = torch.where(is_end, positions, last_index).flip(1).cummin(dim=1).values.flip(1)
    return torch.zeros_like(rewards).scatter_add(1, next_end, rewards)


def _scatter_back(advantages: Tensor, values: Tensor, order: Tensor) -> AdvantagesReturns:
    """Put compacted advantages (B, T) back in their places, with their returns."""
    zeros = torch.zeros_like(advantages)
    return AdvantagesReturns(zeros.scatter(1, order, advantages), zeros.scatter(1, order, advantages + values))


class _GroupStats(NamedTuple):
    """For each sequence (B,), float64: its score minus its group's mean, the group's std, and the group's size."""

    centered: Tensor
    std: Tensor
    size: Tensor


def _compute_group_stats(scores: Tensor, group_ids: Tensor, correction: int = 1) -> _GroupStats:
    """Compare scores (B,) within each group. The divisor of the variance is G − `correction`."""
    _, group_index = torch.unique(group_ids, return_inverse=True)
    size = torch.bincount(group_index)  # (P,)
    # In float32, the mean of equal scores can be off by a rounding error, which dividing by the equally tiny std would
    # turn into an advantage.
    scores64 = scores.double()
    group_sums = scores64.new_zeros(len(size))
    centered = scores64 - (group_sums.index_add(0, group_index, scores64) / size)[group_index]
    variance = group_sums.index_add(0, group_index, centered.square()) / (size - correction).clamp(min=1)
    return _GroupStats(centered, variance.sqrt()[group_index], size[group_index])


def _broadcast_to_tokens(advantages: Tensor, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Put the advantage of each sequence (B,) on each of its trained tokens, (B, T)."""
    return torch.where(mask, advantages.to(dtype)[:, None], 0)


@torch.no_grad()
def grpo(
    scores: Tensor,
    group_ids: Tensor,
    mask: Tensor,
    norm_by_std: bool,
    *,
    has_batch_std: bool = False,
    correction: int = 1,
    std_floor: float = STD_FLOOR,
    min_std: float = 0.0,
) -> Tensor:
    """Compute group-relative advantages, one per sequence, on each of its trained tokens (B, T).

        A_i = (R_i − mean_g R) / (std_g R + std_floor)        without `norm_by_std`: A_i = R_i − mean_g R
        where std_g R <= min_std: 0                           with `has_batch_std`: std R instead of std_g R

    Args:
        norm_by_std: divide by the group's standard deviation; False is Dr. GRPO.
        has_batch_std: divide by the standard deviation of all B scores about their common mean, instead of the group's.
            Groups of small spread then keep small advantages.
        correction: the divisor of the variance is G − correction.
        std_floor: added to the standard deviation, so that the division is safe.
        min_std: a standard deviation up to this value counts as rounding error, and the group gets no advantage.

    The defaults suit language models (verl 0.6.1 `compute_grpo_outcome_advantage`). The published sandbox of update
    rules uses correction 0, std_floor 1e-8 and min_std 1e-8.

    Example:
        >>> scores, group_ids = torch.tensor([2.0, 0.0]), torch.tensor([7, 7])
        >>> mask = torch.tensor([[True, True], [True, False]])
        >>> grpo(scores, group_ids, mask, norm_by_std=False).tolist()
        [[1.0, 1.0], [-1.0, 0.0]]
        >>> grpo(scores, group_ids, mask, norm_by_std=True).double().round(decimals=4).tolist()  # std is √2
        [[0.7071, 0.7071], [-0.7071, 0.0]]

    Source: Shao et al. 2024, arXiv:2402.03300, sec. 4.1.2; Liu et al. 2025, arXiv:2503.20783 (Dr. GRPO); Liu et al.
    2025, arXiv:2508.08221 (Lite PPO: the batch's std; TRL `scale_rewards="batch"`, which adds 1e-4 to it).
    Degenerate: a group of one, or of equal scores, has advantage 0. The published code gives a group of one its raw
    score.
    """
    stats = _compute_group_stats(scores, group_ids, correction)
    if not norm_by_std:
        return _broadcast_to_tokens(stats.centered, mask, scores.dtype)
    # As one group, the batch has the same guards against rounding.
    std = _compute_group_stats(scores, torch.zeros_like(group_ids), correction).std if has_batch_std else stats.std
    advantages = torch.where(std <= min_std, 0, stats.centered / (std + std_floor))
    return _broadcast_to_tokens(advantages, mask, scores.dtype)


@torch.no_grad()
def prefix_tree_grpo(
    scores: Tensor, group_ids: Tensor, trees: Tensor, mask: Tensor, norm_by_std: bool, *, has_batch_std: bool = False
) -> Tensor:
    """Add the advantages of `grpo` in the group and in the prefix tree of each sequence, on its trained tokens (B, T).

        A_i = grpo_g(R)_i + grpo_{g,k}(R)_i        k: the prefix tree of sequence i in its group g

    The tokens of a shared prefix are trained in each of its sequences, with the advantage of each.

    trees: (B,) int, number of the prefix tree within the group. norm_by_std, has_batch_std: see `grpo`, of both terms.

    Example:
        The second tree of the group scores higher as a whole, and its sequences are equal.

        >>> scores, trees = torch.tensor([0.0, 2.0, 3.0, 3.0]), torch.tensor([0, 0, 1, 1])
        >>> group_ids, mask = torch.zeros(4, dtype=torch.long), torch.ones(4, 1, dtype=torch.bool)
        >>> prefix_tree_grpo(scores, group_ids, trees, mask, norm_by_std=False).flatten().tolist()  # mean 2; 1 and 3
        [-3.0, 1.0, 1.0, 1.0]

    Source: Ji et al. 2025, arXiv:2509.21240 (Tree-GRPO; adv_estimator=tree of its code).
    Degenerate: with one tree per group, twice `grpo`; with trees of one sequence, `grpo`.
    """
    _, tree_ids = torch.unique(torch.stack([group_ids, trees]), dim=1, return_inverse=True)
    return grpo(scores, group_ids, mask, norm_by_std, has_batch_std=has_batch_std) + grpo(
        scores, tree_ids, mask, norm_by_std, has_batch_std=has_batch_std
    )


@torch.no_grad()
def group_skill(
    scores: Tensor, group_ids: Tensor, mask: Tensor, *, factor_dtype: torch.dtype = torch.float32
) -> Tensor:
    """Standardize the scores of each group, on each trained token (B, T).

        z_i = (R_i − mean_g R) / std_g R        where std_g R ≤ 1e-6: z_i = R_i − mean_g R

    Unlike in `grpo` by default, the std has the divisor G, and nothing is added to it.

    factor_dtype: dtype of the factor that turns the divisor G − 1 into G: float32 for language models, whose z is
    rounded to float32 anyway, or float64 in the sandbox of update rules, whose tests require 1e-9.

    Example:
        >>> scores, group_ids, mask = torch.tensor([3.0, 1.0]), torch.tensor([0, 0]), torch.ones(2, 1, dtype=torch.bool)
        >>> group_skill(scores, group_ids, mask).double().round(decimals=4).tolist()  # mean 2, std 1
        [[1.0], [-1.0]]

    Source: target policy optimization (jeankaddour/tpo), as in the published sandbox of update rules.
    Degenerate: a group of one, or of equal scores, has skill 0.
    """
    stats = _compute_group_stats(scores, group_ids)
    # From the divisor G − 1 to the divisor G.
    std = stats.std * ((stats.size - 1).to(factor_dtype) / stats.size).sqrt()
    return _broadcast_to_tokens(stats.centered / torch.where(std > SKILL_STD_FLOOR, std, 1.0), mask, scores.dtype)


@torch.no_grad()
def rloo(scores: Tensor, group_ids: Tensor, mask: Tensor) -> Tensor:
    """Compute REINFORCE leave-one-out advantages (B, T): a rollout's baseline is the mean of the rest of its group.

        A_i = R_i − mean_{j≠i} R_j = G / (G − 1) · (R_i − mean_g R)

    Example:
        >>> mask = torch.ones(3, 1, dtype=torch.bool)
        >>> rloo(torch.tensor([3.0, 1.0, 2.0]), torch.tensor([0, 0, 0]), mask).tolist()  # 3 − 1.5, 1 − 2.5, 2 − 2
        [[1.5], [-1.5], [0.0]]

    Source: Ahmadian et al. 2024, arXiv:2402.14740.
    Degenerate: a group of one has advantage 0.
    """
    stats = _compute_group_stats(scores, group_ids)
    return _broadcast_to_tokens(stats.centered * stats.size / (stats.size - 1).clamp(min=1), mask, scores.dtype)


@torch.no_grad()
def reinforce_plus_plus(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """Compute the discounted return from each trained token on, whitened over the batch, (B, T).

        G_t = Σ_{l>=0} γ^l r_{t+l},    A = whiten(G)

    rewards: (B, T), with any KL penalty already subtracted; not read where `mask` is False. gamma: discount γ per
    trained token.

    Example:
        The returns are 0.5 and 1, with mean 0.75 and std √(1/8).

        >>> advantages = reinforce_plus_plus(torch.tensor([[0.0, 1.0]]), torch.tensor([[True, True]]), gamma=0.5)
        >>> advantages.double().round(decimals=4).tolist()
        [[-0.7071, 0.7071]]

    Source: Hu 2025, arXiv:2501.03262. The published code resets the sum to 0 at each untrained token, so a turn does
    not see the rewards of later turns; here untrained tokens are skipped, as in `gae`.
    Degenerate: see `masked_whiten`.
    """
    zero_values = torch.zeros_like(rewards)
    return masked_whiten(gae(rewards, zero_values, mask, gamma, lam=1.0).returns, mask)


@torch.no_grad()
def reinforce_plus_plus_baseline(scores: Tensor, group_ids: Tensor, mask: Tensor) -> Tensor:
    """Subtract the group's mean from each score, and whiten over all trained tokens of the batch, (B, T).

        A = whiten(R_i − mean_g R)

    Example:
        Centered on the group's mean, the scores are −1 and 1, with mean 0 and std √2.

        >>> scores, group_ids, mask = torch.tensor([1.0, 3.0]), torch.tensor([0, 0]), torch.ones(2, 1, dtype=torch.bool)
        >>> reinforce_plus_plus_baseline(scores, group_ids, mask).double().round(decimals=4).tolist()
        [[-0.7071], [0.7071]]

    Source: Hu 2025, arXiv:2501.03262 (the variant with a group baseline).
    Degenerate: a group of one enters the whitening with 0. If every group has equal scores, all advantages are 0.
    """
    centered = _compute_group_stats(scores, group_ids).centered
    return masked_whiten(_broadcast_to_tokens(centered, mask, scores.dtype), mask)
