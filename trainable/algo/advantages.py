"""Advantages of trained tokens: GAE (plain and bi-level) from a critic, and group baselines without one.

Shapes: B sequences, T tokens. `mask` is True where a token is trained; the others (observations, padding) are skipped
in time as if they were not there. Every result is a constant (no gradient) and 0 where `mask` is False.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trainable.algo.reductions import masked_whiten

STD_FLOOR = 1e-6
SKILL_STD_FLOOR = 1e-6


class AdvantagesReturns(NamedTuple):
    """Advantages (B, T), not whitened, and the returns (B, T) that the critic is fitted to."""

    advantages: Tensor
    returns: Tensor


@torch.no_grad()
def conserve_rewards(rewards: Tensor, mask: Tensor) -> Tensor:
    """Move each reward on an untrained token to the last trained token before it, or else to the first after it.

    Args:
        rewards: (B, T).
        mask: (B, T) bool.

    Returns:
        (B, T), zero where `mask` is False. The sum of a row is conserved.

    The published GAE drops rewards on untrained tokens without a word.
    Degenerate: a row without a trained token has nowhere to put its reward and becomes zero.
    """
    positions = torch.arange(mask.shape[1], device=mask.device).expand_as(mask)
    last_before = torch.where(mask, positions, -1).cummax(dim=1).values
    first = mask.int().argmax(dim=1, keepdim=True)
    receiver = torch.where(last_before >= 0, last_before, first)
    moved = torch.zeros_like(rewards).scatter_add(1, receiver, rewards)
    return torch.where(mask, moved, 0)


@torch.no_grad()
def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> AdvantagesReturns:
    """Generalised advantage estimation over the trained tokens of each sequence.

        δ_t = r_t + γ V_{t+1} − V_t,    A_t = Σ_{l>=0} (γλ)^l δ_{t+l},    return_t = A_t + V_t

    where t counts trained tokens only and V after the last one is 0 (the episode has ended).

    Args:
        rewards: (B, T); a reward on an untrained token is moved by `conserve_rewards`, never lost.
        values: (B, T) V of the state before each token; not read where `mask` is False.
        mask: (B, T) bool.
        gamma: discount γ a trained token.
        lam: λ, 1 for Monte-Carlo returns, 0 for one-step temporal differences.

    Source: Schulman et al. 2016, arXiv:1506.02438, eq. 16; skipping of observations as in the published code (verl
    0.6.1 `compute_gae_advantage_return`), which whitens afterwards: here `masked_whiten` is the caller's step.
    Degenerate: a row without a trained token is zero.
    """
    order = _trained_first(mask)
    live = mask.gather(1, order)
    compact_values = values.gather(1, order).masked_fill(~live, 0)
    compact_rewards = conserve_rewards(rewards, mask).gather(1, order)
    advantages = _recursion(compact_rewards, compact_values, _next_of(live), gamma, lam)
    return _restore(advantages, compact_values, order)


@torch.no_grad()
def bi_level_gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    turn_ids: Tensor,
    gamma: float,
    lam: float,
    high_level_gamma: float,
) -> AdvantagesReturns:
    """GAE over turns, then GAE over the tokens of each turn towards the return of that turn.

    Let e_k be the last trained token of turn k and r_k the sum of the rewards on its trained tokens.

        turns:   δ_k = r_k + γ_H V(e_{k+1}) − V(e_k),   G_k = V(e_k) + Σ_{l>=0} (γ_H λ)^l δ_{k+l}
        tokens:  δ_t = γ V_{t+1} − V_t before the end,   δ_{e_k} = G_k − V(e_k),   A_t = Σ_{l=0}^{e_k−t} (γλ)^l δ_{t+l}

    The token sum stops at the end of the turn; later turns act through G_k alone. return_t = A_t + V_t.

    Args:
        rewards: (B, T); moved by `conserve_rewards` first, so the reward of a turn may sit on the observation after it.
        values: (B, T); not read where `mask` is False.
        mask: (B, T) bool.
        turn_ids: (B, T) int; a turn is a run of trained tokens of one id. Not read where `mask` is False.
        gamma: discount γ a token, inside a turn.
        lam: λ, of both levels.
        high_level_gamma: discount γ_H a turn.

    Source: published code (`compute_bi_level_gae_advantage_return`), which takes every position of non-zero reward for
    a turn end, so that a turn of reward 0 joins the next one; given turn ids depart from that rule.
    Degenerate: a row without a trained token is zero; one turn a row is `gae`, one token a turn is `gae` at γ_H.
    """
    order = _trained_first(mask)
    live = mask.gather(1, order)
    compact_values = values.gather(1, order).masked_fill(~live, 0)
    compact_ids = turn_ids.gather(1, order)
    same_turn = F.pad(compact_ids[:, 1:] == compact_ids[:, :-1], (0, 1)) & _next_of(live)
    turn_ends = live & ~same_turn

    turn_rewards = _sum_to_next_end(conserve_rewards(rewards, mask).gather(1, order), turn_ends)
    turn_returns = gae(turn_rewards, compact_values, turn_ends, high_level_gamma, lam).returns
    advantages = _recursion(turn_returns, compact_values, same_turn, gamma, lam)
    return _restore(advantages, compact_values, order)


def _trained_first(mask: Tensor) -> Tensor:
    """Order (B, T) of the positions of each row: the trained ones in time, then the others."""
    return torch.argsort(~mask, dim=1, stable=True)


def _next_of(x: Tensor) -> Tensor:
    """x_{t+1}, and zero (False) after the last."""
    return F.pad(x[:, 1:], (0, 1))


def _recursion(rewards: Tensor, values: Tensor, goes_on: Tensor, gamma: float, lam: float) -> Tensor:
    """A_t = r_t + γ c_t V_{t+1} − V_t + γλ c_t A_{t+1}, with c = `goes_on` (B, T) True where t+1 follows on t."""
    follows = goes_on.to(values.dtype)
    deltas = rewards + gamma * follows * _next_of(values) - values
    return _discounted_sums(deltas, gamma * lam * follows)


def _discounted_sums(x: Tensor, discount: Tensor) -> Tensor:
    """y_t = x_t + d_t y_{t+1} along time, for x and discount d of shape (B, T).

    Each pass doubles how far ahead y_t has summed, so log2(T) passes replace a loop over T.
    """
    ahead = 1
    while ahead < x.shape[1]:
        x = x + discount * F.pad(x[:, ahead:], (0, ahead))
        discount = discount * F.pad(discount[:, ahead:], (0, ahead))
        ahead *= 2
    return x


def _sum_to_next_end(rewards: Tensor, ends: Tensor) -> Tensor:
    """Add up `rewards` (B, T) on the next position, itself included, where `ends` is True."""
    last = ends.shape[1] - 1
    positions = torch.arange(last + 1, device=ends.device).expand_as(ends)
    next_end = torch.where(ends, positions, last).flip(1).cummin(dim=1).values.flip(1)
    return torch.zeros_like(rewards).scatter_add(1, next_end, rewards)


def _restore(advantages: Tensor, values: Tensor, order: Tensor) -> AdvantagesReturns:
    """Put compacted advantages (B, T) back in their places, with their returns."""
    empty = torch.zeros_like(advantages)
    return AdvantagesReturns(empty.scatter(1, order, advantages), empty.scatter(1, order, advantages + values))


class _GroupScores(NamedTuple):
    """For each sequence (B,), float64: its score minus its group's mean, the group's std, and the group's size."""

    centred: Tensor
    std: Tensor
    size: Tensor


def _by_group(scores: Tensor, group_ids: Tensor, correction: int = 1) -> _GroupScores:
    """Scores (B,) beside those of their group; the std's divisor is G − `correction`."""
    _, group = torch.unique(group_ids, return_inverse=True)
    size = torch.bincount(group)  # (P,)
    # In float32 the mean of equal scores can miss them by a rounding, which a division by the std would blow up.
    exact = scores.double()
    total = exact.new_zeros(len(size))
    centred = exact - (total.index_add(0, group, exact) / size)[group]
    variance = total.index_add(0, group, centred.square()) / (size - correction).clamp(min=1)
    return _GroupScores(centred, variance.sqrt()[group], size[group])


def _broadcast(advantages: Tensor, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """One advantage a sequence (B,) on each of its trained tokens, (B, T)."""
    return torch.where(mask, advantages.to(dtype)[:, None], 0)


@torch.no_grad()
def grpo(
    scores: Tensor, group_ids: Tensor, mask: Tensor, norm_by_std: bool, *,
    correction: int = 1, floor: float = STD_FLOOR, least_std: float = 0.0,
) -> Tensor:  # fmt: skip
    """Group-relative advantage, one number per sequence, on each of its trained tokens (B, T).

        A_i = (R_i − mean_g R) / (std_g R + floor)        without `norm_by_std`: A_i = R_i − mean_g R
        where std_g R <= least_std: 0

    Args:
        scores: (B,) score R of each sequence.
        group_ids: (B,) int, equal for the rollouts of one prompt. A duplicated sequence counts twice.
        mask: (B, T) bool.
        norm_by_std: divide by the group's standard deviation; False is Dr. GRPO.
        correction: the standard deviation has the divisor G − correction.
        floor: what is added to it.
        least_std: a deviation up to this is one of rounding, and the group has no advantage.

    The defaults are those of language models (verl 0.6.1 `compute_grpo_outcome_advantage`); the published sandbox of
    update rules has correction 0, floor 1e-8 and least_std 1e-8.
    Source: Shao et al. 2024, arXiv:2402.03300, sec. 4.1.2; Liu et al. 2025, arXiv:2503.20783 (Dr. GRPO).
    Degenerate: a group of one, or of equal scores, has advantage 0. The published code gives a group of one its raw
    score.
    """
    group = _by_group(scores, group_ids, correction)
    if not norm_by_std:
        return _broadcast(group.centred, mask, scores.dtype)
    advantages = torch.where(group.std <= least_std, 0, group.centred / (group.std + floor))
    return _broadcast(advantages, mask, scores.dtype)


@torch.no_grad()
def group_skill(scores: Tensor, group_ids: Tensor, mask: Tensor, *, precision: torch.dtype = torch.float32) -> Tensor:
    """Standardised score of a rollout in its group, on each of its trained tokens (B, T).

        z_i = (R_i − mean_g R) / std_g R        where std_g R ≤ 1e-6: z_i = R_i − mean_g R

    Args:
        scores: (B,) score R of each sequence.
        group_ids: (B,) int, equal for the rollouts of one prompt.
        mask: (B, T) bool.
        precision: of the factor that turns the divisor G − 1 into G. float32 as language models are trained, whose z is
            rounded to that anyway; float64 in the sandbox of update rules, which loops check to 1e-9.

    The std has the divisor G, unlike that of `grpo` by default, and nothing is added to it.
    Source: target policy optimisation (jeankaddour/tpo), as the published sandbox of update rules has it.
    Degenerate: a group of one, or of equal scores, has skill 0.
    """
    group = _by_group(scores, group_ids)
    std = group.std * ((group.size - 1).to(precision) / group.size).sqrt()
    return _broadcast(group.centred / torch.where(std > SKILL_STD_FLOOR, std, 1.0), mask, scores.dtype)


@torch.no_grad()
def rloo(scores: Tensor, group_ids: Tensor, mask: Tensor) -> Tensor:
    """REINFORCE leave-one-out: the baseline of a rollout is the mean of the others in its group, (B, T).

        A_i = R_i − mean_{j≠i} R_j = G / (G − 1) · (R_i − mean_g R)

    Args:
        scores: (B,) score R of each sequence.
        group_ids: (B,) int, equal for the rollouts of one prompt.
        mask: (B, T) bool.

    Source: Ahmadian et al. 2024, arXiv:2402.14740.
    Degenerate: a group of one has no other rollout and advantage 0.
    """
    group = _by_group(scores, group_ids)
    return _broadcast(group.centred * group.size / (group.size - 1).clamp(min=1), mask, scores.dtype)


@torch.no_grad()
def reinforce_plus_plus(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """Discounted reward to go over trained tokens, whitened over the batch, (B, T).

        G_t = Σ_{l>=0} γ^l r_{t+l},    A = whiten(G)

    Args:
        rewards: (B, T), with any KL penalty already in them; moved by `conserve_rewards` first.
        mask: (B, T) bool.
        gamma: discount γ a trained token.

    Source: Hu 2025, arXiv:2501.03262. The published code sets the sum to 0 at each untrained token, so a turn does not
    see the rewards of later turns; here untrained tokens are skipped, as in `gae`.
    Degenerate: see `masked_whiten`.
    """
    no_critic = torch.zeros_like(rewards)
    return masked_whiten(gae(rewards, no_critic, mask, gamma, lam=1.0).returns, mask)


@torch.no_grad()
def reinforce_plus_plus_baseline(scores: Tensor, group_ids: Tensor, mask: Tensor) -> Tensor:
    """Score minus the group's mean, on each trained token, whitened over the batch, (B, T).

        A = whiten(R_i − mean_g R)

    Args:
        scores: (B,) score R of each sequence.
        group_ids: (B,) int, equal for the rollouts of one prompt.
        mask: (B, T) bool.

    Source: Hu 2025, arXiv:2501.03262 (the variant with a group baseline).
    Degenerate: a group of one enters the whitening with 0; if every group has equal scores all advantages are 0.
    """
    centred = _by_group(scores, group_ids).centred
    return masked_whiten(_broadcast(centred, mask, scores.dtype), mask)
