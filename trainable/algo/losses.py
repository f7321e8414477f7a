"""Losses of policy and critic per token, KL estimators and penalties, importance weights, and statistics of logits.

Every loss maps tensors of one shape, flat (N,) over trained tokens or (B, T), to a tensor of this shape. The caller
reduces it: `(compute_loss_weights(mask, mode) * loss).sum()`. Shapes: N tokens, V vocabulary entries, B sequences of T
tokens.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trainable.algo.names import KL_KINDS

# Both limits are in nats, from the published code (verl 0.6.1).
LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to ± this, so that ratios cannot overflow and no single token dominates their mean."""
K3_LIMIT = 10.0
"""k3 is clamped to ± this, since it is exponential in the log-ratio."""


def compute_log_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Compute the log-ratio of the policy to the policy at the start of the update, per token, in nats, within ±20.

        x = clamp(logπ − logπ_old, ±20)

    The ratio of `ppo_clip_loss` is exp(x), and the column `ppo_kl` is the token mean of −x.

    logprobs: log π of the sampled tokens, nats; the gradient flows through it. old_logprobs: log π of the policy at the
    start of the update.

    Example:
        >>> compute_log_ratio(torch.tensor([-1.0, -51.0, -1.0]), torch.tensor([-1.5, -1.0, -51.0])).tolist()
        [0.5, -20.0, 20.0]

    Source: published code (verl 0.6.1 `compute_policy_loss`).
    Degenerate: beyond ±20 the gradient is 0. NaN stays NaN.
    """
    return (logprobs - old_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


class PolicyLoss(NamedTuple):
    """Policy loss of each token, and the quantities that its diagnostics need, all of one shape."""

    loss: Tensor
    ratio: Tensor
    """π(a|s) / π_old(a|s), or its geometric mean over the episode for `gspo_loss`, without gradient."""
    clipped: Tensor
    """bool: whether the clip or the mask of the loss applies. Its token mean is `pg_clipfrac`."""
    clipped_lower: Tensor | None = None
    """bool: whether the bound of the dual clip applies. Its token mean is `pg_clipfrac_lower`. None without one."""


def ppo_clip_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_low: float, clip_high: float, clip_c: float
) -> PolicyLoss:
    """Compute PPO's clipped surrogate loss per token, with asymmetric and dual clip.

        ρ  = exp(clamp(logπ − logπ_old, ±20))
        L₁ = −A ρ,   L₂ = −A clamp(ρ, 1 − ε_low, 1 + ε_high),   L = max(L₁, L₂);   where A < 0: L = min(L, −c A)

    Args:
        logprobs: log π of the sampled tokens, nats; the gradient flows through it.
        old_logprobs: log π of the policy at the start of the update.
        advantages: A.
        clip_low: ε_low, in [0, 1]. At 1 there is no lower bound.
        clip_high: ε_high, >= 0.
        clip_c: c > 1, the largest loss of a token with a negative advantage, in units of |A|.

    Example:
        Ratios 1.5 (clipped to 1.2), 0.5 (not clipped, since A > 0) and 5 (bounded by the dual clip at c = 3).

        >>> logprobs, advantages = torch.tensor([1.5, 0.5, 5.0]).log(), torch.tensor([1.0, 1.0, -1.0])
        >>> result = ppo_clip_loss(logprobs, torch.zeros(3), advantages, clip_low=0.2, clip_high=0.2, clip_c=3.0)
        >>> result.loss.double().round(decimals=4).tolist()
        [-1.2, -0.5, 3.0]
        >>> result.clipped.tolist(), result.clipped_lower.tolist()
        ([True, False, False], [False, False, True])

    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7; asymmetric clip: Yu et al. 2025, arXiv:2503.14476 (DAPO);
    dual clip: Ye et al. 2020, arXiv:1912.09729; the clamp at 20 nats: published code (verl 0.6.1).
    Degenerate: at ρ = 1 the gradient is −A ∇logπ, as in REINFORCE. A = 0 gives 0.
    """
    ratio = compute_log_ratio(logprobs, old_logprobs).exp()
    unclipped_loss = -advantages * ratio
    clipped_loss = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    pessimistic_loss = torch.maximum(unclipped_loss, clipped_loss)
    # With a negative advantage, this maximum grows with the ratio without bound. The dual clip bounds it.
    dual_clip_bound = -clip_c * advantages
    is_negative = advantages < 0
    loss = torch.where(is_negative, torch.minimum(pessimistic_loss, dual_clip_bound), pessimistic_loss)
    return PolicyLoss(
        loss, ratio.detach(), clipped_loss > unclipped_loss, is_negative & (pessimistic_loss > dual_clip_bound)
    )


def gspo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    episode_index: Tensor,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """Compute the loss of group sequence policy optimization per token, whose ratio is that of the episode.

        s = exp(clamp(mean of logπ − logπ_old over the trained tokens of the episode, ±20))
        ρ = sg(s) π / sg(π),   L = max(−A ρ, −A clamp(ρ, 1 − ε_low, 1 + ε_high))

    where sg stops the gradient. Every token of an episode has the value ρ = s, and its own gradient s ∇logπ. If the
    advantages of an episode are equal, as with critic-free estimators, the mean of L over its tokens has the value and
    the gradient of the sequence form max(−A s, −A clamp(s, ...)). The paper averages over tokens and then over
    sequences, so `seq-mean-token-mean` is its aggregation. The other modes only weight the episodes by their lengths.

    Args:
        logprobs, old_logprobs, advantages: (N,), as for `ppo_clip_loss`.
        episode_index: (N,) int, the episode of each token. All trained tokens of an episode must be among the N.
        clip_low: ε_low, in [0, 1]; 3e-4 in the paper, whose ratios vary less than those of tokens.
        clip_high: ε_high, >= 0; 4e-4 in the paper.

    Example:
        Ratios 4 and 1 of two tokens have the geometric mean 2, which is clipped to 1.5; the other episode keeps 0.5.

        >>> logprobs, episode_index = torch.tensor([4.0, 1.0, 0.5]).log(), torch.tensor([0, 0, 1])
        >>> result = gspo_loss(logprobs, torch.zeros(3), torch.ones(3), episode_index, clip_low=0.2, clip_high=0.5)
        >>> result.ratio.double().round(decimals=4).tolist(), result.clipped.tolist()
        ([2.0, 2.0, 0.5], [True, True, False])
        >>> result.loss.double().round(decimals=4).tolist()
        [-1.5, -1.5, -0.5]

    Source: Zheng et al. 2025, arXiv:2507.18071, eq. 7 for s and the form GSPO-token for L, as in published code (verl
    `policy_loss.loss_mode=gspo`, which clamps the exponent at 10 instead). No dual clip.
    Degenerate: for episodes of one token, `ppo_clip_loss` without a dual clip. No tokens give an empty result. Beyond
    ±20 the gradient is 0.
    """
    # Sums in float64, since the paper's clip ranges are smaller than the rounding errors of a long float32 sum.
    log_ratios = (logprobs - old_logprobs).detach().double()
    counts = torch.bincount(episode_index)
    sums = log_ratios.new_zeros(len(counts)).index_add(0, episode_index, log_ratios)
    log_ratio_means = (sums / counts)[episode_index].to(logprobs.dtype)
    # The bracket is 0 and has the gradient of the token's log-prob.
    log_ratio = (log_ratio_means + (logprobs - logprobs.detach())).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = log_ratio.exp()
    unclipped_loss = -advantages * ratio
    clipped_loss = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    return PolicyLoss(torch.maximum(unclipped_loss, clipped_loss), ratio.detach(), clipped_loss > unclipped_loss)


def cispo_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> PolicyLoss:
    """Compute REINFORCE with a clipped importance weight per token.

        ρ = exp(clamp(logπ − logπ_old, ±20)),   L = −A sg(clamp(ρ, 1 − ε_low, 1 + ε_high)) logπ

    where sg stops the gradient. A clipped token keeps the gradient of its log-prob with a bounded weight, while
    `ppo_clip_loss` drops it.

    Args:
        logprobs, old_logprobs, advantages: as for `ppo_clip_loss`.
        clip_low: ε_low, in [0, 1]. At 1 there is no lower bound, as MiniMax-M1 and ScaleRL train.
        clip_high: ε_high, >= 0. ScaleRL and TRL set the largest weight, ε_max = 1 + ε_high; ScaleRL chose 5.

    Example:
        Weights 2 (clipped to 1.5) and 0.5, times minus the log-probs.

        >>> logprobs = torch.tensor([-1.0, -1.0])
        >>> old_logprobs = logprobs - torch.tensor([2.0, 0.5]).log()
        >>> result = cispo_loss(logprobs, old_logprobs, torch.tensor([1.0, -1.0]), clip_low=1.0, clip_high=0.5)
        >>> result.loss.double().round(decimals=4).tolist(), result.clipped.tolist()
        ([1.5, -0.5], [True, False])

    Source: MiniMax 2025, arXiv:2506.13585, eq. 4 and 5; Khatri et al. 2025, arXiv:2510.13786 (ScaleRL); published code
    (verl `policy_loss.loss_mode=cispo`, TRL `loss_type=cispo`, which has no lower bound).
    Degenerate: at ρ = 1 the gradient is −A ∇logπ, as in REINFORCE. A = 0 gives 0. The value of L depends on logπ, so it
    is not near 0 on average.
    """
    ratio = compute_log_ratio(logprobs, old_logprobs).detach().exp()
    weights = ratio.clamp(1 - clip_low, 1 + clip_high)
    return PolicyLoss(-advantages * weights * logprobs, ratio, weights != ratio)


def cppo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    episode_index: Tensor,
    delta: float,
    delta_b: float,
    w_min: float,
) -> PolicyLoss:
    """Compute the policy loss per token, with a trust region that depends on the position and on the prefix.

        ρ_t = exp(clamp(logπ − logπ_old, ±20)),   D_t = |π − π_old|,   w_t = 1 − (1 − w_min)(t − 1) / (T − 1)
        c_t = min(δ, δ + δ_b Σ_{j<t} w_j − Σ_{j<t} w_j D_j)
        L_t = −A_t ρ_t   where A_t (ρ_t − 1) <= 0 or w_t D_t <= c_t,   else 0

    t = 1 ... T counts the trained tokens of an episode. Early tokens may move less, as later ones depend on them, and
    a prefix whose weighted mean of D exceeds δ_b leaves less to the next token. Updates back towards π_old are kept.

    Args:
        logprobs, old_logprobs, advantages: (N,), as for `ppo_clip_loss`. The paper takes the policy that sampled as the
            old one.
        episode_index: (N,) int, ascending: the episode of each token, in the order of the tokens. All trained tokens of
            an episode must be among the N.
        delta: δ > 0, the largest weighted divergence of a token, a difference of probabilities.
        delta_b: δ_b >= 0, the mean divergence of a prefix beyond which it tightens the bound.
        w_min: weight of the last token, in (0, 1].

    Example:
        Both tokens move by 0.1. With δ = 0.1 and no budget for prefixes, nothing is left to the second.

        >>> logprobs, old_logprobs = torch.tensor([0.6, 0.6]).log(), torch.tensor([0.51, 0.51]).log()
        >>> result = cppo_loss(
        ...     logprobs, old_logprobs, torch.ones(2), torch.tensor([0, 0]), delta=0.1, delta_b=0.0, w_min=0.8
        ... )
        >>> result.clipped.tolist(), result.loss.double().round(decimals=4).tolist()
        ([False, True], [-1.1765, -0.0])

    Source: Mao et al. 2026, arXiv:2606.10968, eq. 8 to 11 and algorithm 1, with δ = 0.15, δ_b = 0.015 and w_min = 0.8
    for dense models. D is the binary form, which needs no other tokens; the paper's results are with the 20 most likely
    ones, and its base models set δ_b from the quantiles of each episode, which is missing here.
    Degenerate: with w_min = 1 and large δ_b, the uniform bound D <= δ. At ρ = 1 the gradient is −A ∇logπ. No tokens
    give an empty result.
    """
    ratio = compute_log_ratio(logprobs, old_logprobs).exp()
    with torch.no_grad():
        counts = torch.bincount(episode_index)
        starts, lengths = (counts.cumsum(0) - counts)[episode_index], counts[episode_index]
        positions = torch.arange(len(episode_index), device=episode_index.device) - starts
        # Sums of thousands of small numbers, in float64.
        weights = 1 - (1 - w_min) * positions.double() / (lengths - 1).clamp(min=1)
        divergences = weights * (logprobs.double().exp() - old_logprobs.double().exp()).abs()
        weight_sums, divergence_sums = (
            totals - totals[starts] for totals in (x.cumsum(0) - x for x in (weights, divergences))
        )
        bounds = (delta + delta_b * weight_sums - divergence_sums).clamp(max=delta)
        is_masked = (advantages * (ratio - 1) > 0) & (divergences > bounds)
    return PolicyLoss(-advantages * ratio * ~is_masked, ratio.detach(), is_masked)


@torch.no_grad()
def find_spurious_tokens(
    logprobs: Tensor, entropies: Tensor, advantages: Tensor, mask: Tensor, tau_p: float, quantile: float
) -> Tensor:
    """Find the tokens that STAPO silences: unlikely ones that are rewarded although the policy was nearly certain.

        C = trained tokens with A > 0 and π < τ_p,   silenced: tokens of C with H below the q-quantile of H over C

    A silenced token has no policy loss, and the loss is aggregated over the other trained tokens.

    Args:
        logprobs: (B, T) log π of the sampled tokens, nats.
        entropies: (B, T) H, entropy of π at the sampled tokens, nats.
        advantages: (B, T) A.
        mask: (B, T) bool, the trained tokens of a mini-batch.
        tau_p: τ_p, in (0, 1]; 0.002 in the paper.
        quantile: q, in [0, 1]; 0.75 in the paper. The quantile interpolates linearly.

    Returns (B, T) bool.

    Example:
        Three tokens are unlikely and rewarded. The median of their entropies is 0.4.

        >>> probs, entropies = torch.tensor([[0.001, 0.001, 0.001, 0.9]]), torch.tensor([[0.1, 0.4, 2.0, 0.1]])
        >>> mask = torch.ones(1, 4, dtype=torch.bool)
        >>> find_spurious_tokens(probs.log(), entropies, torch.ones(1, 4), mask, tau_p=0.002, quantile=0.5).tolist()
        [[True, False, False, False]]

    Source: Liu et al. 2026, arXiv:2602.15620 (STAPO), definition of the S2T mask, in its version of May 2026. Its
    algorithm takes π and H from the current policy, as far as the text that we could read shows. The caller here takes
    the policy that sampled, which is the current one at the first optimizer step of a training step: the mask is then
    known before the passes, and does not depend on how they are cut. Whether the authors' code takes the quantile over
    a mini-batch, as the paper says, or over a micro-batch could not be verified.
    Degenerate: fewer than two tokens in C silence nothing, and so does q = 0.
    """
    is_candidate = mask & (advantages > 0) & (logprobs < math.log(tau_p))
    if not bool(is_candidate.any()):
        return is_candidate
    threshold = torch.quantile(entropies[is_candidate].double(), quantile)
    return is_candidate & (entropies.double() < threshold)


class ValueLoss(NamedTuple):
    """Value loss of each token, and whether the clipped error was larger (bool), whose mean is `vf_clipfrac`."""

    loss: Tensor
    clipped: Tensor


def value_clip_loss(values: Tensor, old_values: Tensor, returns: Tensor, cliprange: float) -> ValueLoss:
    """Compute the critic's clipped squared error per token.

        V_clip = clamp(V, V_old ± ε),   L = ½ max((V − R)², (V_clip − R)²)

    values: V; the gradient flows through it. old_values: V at the start of the update. returns: R. cliprange: ε > 0, in
    units of the return.

    Example:
        The first value moved by more than ε, so it is clipped to 0.5 and its error counts as 1.5 instead of 1.

        >>> values, old_values, returns = torch.tensor([1.0, 2.0]), torch.tensor([0.0, 2.0]), torch.tensor([2.0, 1.0])
        >>> result = value_clip_loss(values, old_values, returns, cliprange=0.5)
        >>> result.loss.tolist(), result.clipped.tolist()
        ([1.125, 0.5], [True, False])

    Source: published code (PPO implementations since OpenAI baselines; verl 0.6.1 `compute_value_loss`).
    Degenerate: the gradient is 0 where clipping makes the error larger, and V − R elsewhere.
    """
    clipped_values = torch.clamp(values, old_values - cliprange, old_values + cliprange)
    error, clipped_error = (values - returns).square(), (clipped_values - returns).square()
    return ValueLoss(0.5 * torch.maximum(error, clipped_error), clipped_error > error)


def _k3(d: Tensor) -> Tensor:
    log_ratio = (-d).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    # expm1 keeps the digits that exp(x) − 1 loses where policy and reference nearly agree.
    return torch.expm1(log_ratio) - log_ratio


KL_FORMULAS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda d: d,
    "k2": lambda d: 0.5 * d.square(),
    "k3": _k3,
    "abs": torch.abs,
}
"""The formulas of `estimate_kl` in d. `names.KL_KINDS` maps the names of settings to them."""


def estimate_kl(logprobs: Tensor, ref_logprobs: Tensor, kind: str, limit: float = K3_LIMIT) -> Tensor:
    """Estimate KL(π‖π_ref) per token, from tokens sampled from π, in nats.

        d = logπ − logπ_ref
        kl, k1 = d        abs = |d|        mse, k2 = d²/2        low_var_kl, k3 = exp(−d) + d − 1
        any of them with a `+`: its value, with the gradient of k2

    In a loss on samples of π, only the gradient matters, which differs between the estimators:

        E ∇k1 = 0        E ∇k2 = ∇KL(π‖π_ref)        E ∇k3 = ∇KL(π_ref‖π)        E ∇abs = E sign(d) ∇logπ

    so k1 as a loss does not keep π near π_ref, although E k1 = E k3 = KL(π‖π_ref).

    Args:
        logprobs: log π of the sampled tokens, nats.
        ref_logprobs: log π_ref of the same tokens.
        kind: a name above.
        limit: k3 is clamped to ± this, nats. 10 as published for language models (verl 0.6.1 `kl_penalty`), infinite in
            the published sandbox of update rules.

    Example:
        >>> logprobs, ref_logprobs = torch.tensor([-1.0, -2.0]), torch.tensor([-2.0, -2.0])
        >>> estimate_kl(logprobs, ref_logprobs, "k1").tolist(), estimate_kl(logprobs, ref_logprobs, "k2").tolist()
        ([1.0, 0.0], [0.5, 0.0])
        >>> estimate_kl(logprobs, ref_logprobs, "k3").double().round(decimals=4).tolist()  # 1/e + 1 − 1
        [0.3679, 0.0]

    Source: Schulman 2020, "Approximating KL divergence". −d of k3 is clamped to ±20, as in both published codes. Tests
    verify the gradients by enumeration.
    Degenerate: at π = π_ref every value is 0. The gradients of k2 and k3 are 0, and k1 has ∇logπ.
    """
    base_kind = kind.removesuffix("+")
    d = logprobs - ref_logprobs
    formula = KL_KINDS[base_kind]
    value = KL_FORMULAS[formula](d)
    if formula == "k3":
        value = value.clamp(-limit, limit)
    if kind == base_kind:
        return value
    # The bracket is 0 and has the gradient of k2.
    surrogate = KL_FORMULAS["k2"](d)
    return value.detach() + (surrogate - surrogate.detach())


def full_kl(logits: Tensor, ref_logits: Tensor) -> Tensor:
    """Compute KL(π‖π_ref) of each row (N,), in nats, as the exact sum over the vocabulary.

        KL = Σ_v π_v (logπ_v − logπ_ref,v)

    logits: (N, V) of the policy, divided by the sampling temperature. ref_logits: (N, V) of the reference, likewise.

    Example:
        >>> logits, ref_logits = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log()
        >>> full_kl(logits, ref_logits).double().round(decimals=4).tolist()  # (log 2 + log 2/3) / 2
        [0.1438]

    Source: definition.  Degenerate: equal logits give 0 with zero gradient. Logits must be finite.
    """
    logprobs, ref_logprobs = _log_softmax(logits), _log_softmax(ref_logits)
    return (logprobs.exp() * (logprobs - ref_logprobs)).sum(dim=-1)


def entropy_from_logits(logits: Tensor) -> Tensor:
    """Compute the entropy of the softmax of each row (N,), in nats.

        H = −Σ_v π_v logπ_v = logsumexp(z) − Σ_v π_v z_v

    logits: (N, V), divided by the sampling temperature.

    Example:
        >>> entropy_from_logits(torch.zeros(1, 4)).double().round(decimals=4).tolist()  # log 4
        [1.3863]

    Source: definition.  Degenerate: equal logits give log V with zero gradient. Logits must be finite.
    """
    logprobs = _log_softmax(logits)
    return -(logprobs.exp() * logprobs).sum(dim=-1)


def logprobs_from_logits(logits: Tensor, tokens: Tensor) -> Tensor:
    """Compute the log-probability of one token in each row (N,), in nats.

        log π(a) = z_a − logsumexp(z)

    logits: (N, V), divided by the sampling temperature. tokens: (N,) int64, the token a of each row.

    Example:
        >>> logits = torch.tensor([[1.0, 3.0]]).log()  # probabilities 1/4 and 3/4
        >>> logprobs_from_logits(logits, torch.tensor([1])).exp().double().round(decimals=4).tolist()
        [0.75]

    Source: definition.  Degenerate: no rows give an empty result.
    """
    return -F.cross_entropy(_upcast(logits), tokens, reduction="none")


def _log_softmax(logits: Tensor) -> Tensor:
    return torch.log_softmax(_upcast(logits), dim=-1)


def _upcast(x: Tensor) -> Tensor:
    """Convert `x` to float32 unless its dtype is more precise, since sums over a vocabulary need the digits."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


MAX_RELATIVE_ERROR = 0.2  # bound of the error in one update, Ziegler et al. 2019, sec. 2.2


@torch.no_grad()
def apply_kl_penalty(
    rewards: Tensor, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, kind: str, kl_coef: float
) -> Tensor:
    """Subtract the KL penalty from the rewards of trained tokens, (B, T), without gradient.

        r'_t = r_t − β KL_t on trained tokens,   r'_t = r_t elsewhere

    Args:
        rewards: (B, T).
        logprobs: (B, T) log π of the sampled tokens, nats; not read where `mask` is False.
        ref_logprobs: (B, T) log π_ref of the same tokens; likewise.
        mask: (B, T) bool.
        kind: estimator, as in `estimate_kl`.
        kl_coef: β, reward per nat.

    Example:
        >>> logprobs, ref_logprobs = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-2.0, -2.0]])
        >>> mask = torch.tensor([[True, True]])
        >>> apply_kl_penalty(torch.tensor([[0.0, 1.0]]), logprobs, ref_logprobs, mask, kind="k1", kl_coef=0.5).tolist()
        [[-0.5, 1.0]]

    Source: Ziegler et al. 2019, arXiv:1909.08593, eq. 2 (with k1).  Degenerate: β = 0 changes nothing.
    """
    penalty = kl_coef * estimate_kl(logprobs, ref_logprobs, kind)
    return rewards - torch.where(mask, penalty, 0)


def adapt_kl_coef(coef: float, current_kl: float, target_kl: float, n_steps: int, horizon: float) -> float:
    """Adapt a KL coefficient, to steer the measured KL towards a target.

        error = clamp(KL / target − 1, ±0.2),   β ← β (1 + error · n / horizon)

    coef: β >= 0, reward per nat. current_kl, target_kl: in nats, reduced in the same way. n_steps: sequences with this
    KL. horizon: sequences over which an error of 1 would double β.

    Example:
        A KL of twice the target gives the largest error, 0.2. Half a horizon later, β has grown by 10 %.

        >>> round(adapt_kl_coef(0.1, current_kl=0.2, target_kl=0.1, n_steps=50, horizon=100), 6)
        0.11

    Source: Ziegler et al. 2019, arXiv:1909.08593, sec. 2.2; the horizon is from their code.  Degenerate: 0 stays 0.
    """
    error = min(max(current_kl / target_kl - 1, -MAX_RELATIVE_ERROR), MAX_RELATIVE_ERROR)
    return coef * (1 + error * n_steps / horizon)


def adapt_entropy_coef(coef: float, entropy: float, target: float, delta: float, low: float, high: float) -> float:
    """Adapt the coefficient c of an entropy bonus, to keep the entropy H from falling below a target.

        c ← min(c + δ, high) if H <= target,   max(c − δ, low) otherwise

    The bonus of the next step has the coefficient c if H <= target, and 0 otherwise. entropy, target: token means in
    nats. delta: δ, per step.

    Example:
        >>> adapt_entropy_coef(0.5, entropy=0.1, target=0.2, delta=0.25, low=0.0, high=1.0)
        0.75

    Source: Skywork-OR1 (He et al. 2025, arXiv:2505.22312), adaptive entropy control, as in TRL's GRPOTrainer with
    use_adaptive_entropy.  Degenerate: low = high is a constant coefficient, applied only at or below the target.
    """
    return min(coef + delta, high) if entropy <= target else max(coef - delta, low)


def compute_importance_weights(
    trainer_logprobs: Tensor,
    engine_logprobs: Tensor,
    mask: Tensor,
    cap: float,
    floor: float | None = None,
    is_sequence: bool = False,
    is_mask: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute importance weights from the engine's to the trainer's distribution, without gradient.

    trainer_logprobs: (B, T) the trainer's log-probs of the tokens. engine_logprobs: (B, T) the engine's. mask: (B, T)
    True where a token was sampled. cap: the largest weight, at least 1. floor: with a mask, the smallest weight, or
    None. is_sequence: whether the weight of a token is the product of the ratios of all sampled tokens in its episode,
    instead of the token's ratio. is_mask: whether weights outside of floor and cap become 0. Otherwise, weights above
    the cap become the cap.

    Returns (B, T) weights, and (B, T) bool, True where a ratio was truncated or masked. Without truncation and masks,
    weighted losses have the expectation of the trainer's distribution: E_engine[w f] = E_trainer[f] (Ionides 2008).

    Example:
        >>> trainer, engine = torch.tensor([[0.2, 0.9]]).log(), torch.tensor([[0.1, 0.3]]).log()
        >>> mask = torch.tensor([[True, True]])
        >>> weights, is_clipped = compute_importance_weights(trainer, engine, mask, cap=2.5)
        >>> weights, is_clipped
        (tensor([[2.0000, 2.5000]]), tensor([[False,  True]]))
        >>> compute_importance_weights(trainer, engine, mask, cap=2.5, is_mask=True)[0]
        tensor([[2., 0.]])

    Source: truncated tokens (TIS): Yao et al. 2025. Masked tokens with a floor (IcePop): Ling team 2025, with 0.5 and
    5. Masked sequences: Liu et al. 2025, "When speed kills stability".
    """
    log_ratio = torch.where(mask, trainer_logprobs - engine_logprobs, 0).detach()
    if is_sequence:
        log_ratio = log_ratio.double().sum(1, keepdim=True).expand(mask.shape)
    is_outside = log_ratio > math.log(cap)
    # Truncated before exp, so that it cannot overflow.
    weights = log_ratio.clamp_max(math.log(cap)).exp().to(trainer_logprobs.dtype)
    if is_mask:
        if floor:  # a floor of 0 masks nothing
            is_outside = is_outside | (log_ratio < math.log(floor))
        weights = weights.masked_fill(is_outside, 0)
    return weights, is_outside
