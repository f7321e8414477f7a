"""Importance weights for tokens that were not sampled from the trainer's distribution."""

import math
from typing import NamedTuple

import torch
from torch import Tensor


class ImportanceCorrection(NamedTuple):
    """How to weight the loss of tokens that the engine has sampled.

    cap: the largest weight, at least 1. floor: with a mask, the smallest weight, or None. is_sequence: whether the
    weight of a token is the product of the ratios of all sampled tokens in its episode, instead of the token's ratio.
    is_mask: whether weights outside of floor and cap become 0. Otherwise, weights above the cap become the cap.

    Truncated tokens (TIS): Yao et al. 2025. Masked tokens with a floor (IcePop): Ling team 2025, with 0.5 and 5. Masked
    sequences: Liu et al. 2025, "When speed kills stability".
    """

    cap: float
    floor: float | None = None
    is_sequence: bool = False
    is_mask: bool = False


def compute_importance_weights(
    trainer_logprobs: Tensor, engine_logprobs: Tensor, mask: Tensor, correction: ImportanceCorrection
) -> tuple[Tensor, Tensor]:
    """Compute importance weights from the engine's to the trainer's distribution, without gradient.

    trainer_logprobs: (B, T) the trainer's log-probs of the tokens. engine_logprobs: (B, T) the engine's. mask: (B, T)
    True where a token was sampled. correction: how ratios become weights.

    Returns (B, T) weights, and (B, T) bool, True where a ratio was truncated or masked. Without truncation and masks,
    weighted losses have the expectation of the trainer's distribution: E_engine[w f] = E_trainer[f] (Ionides 2008).

    Example:
        >>> trainer, engine = torch.tensor([[0.2, 0.9]]).log(), torch.tensor([[0.1, 0.3]]).log()
        >>> mask = torch.tensor([[True, True]])
        >>> weights, is_clipped = compute_importance_weights(trainer, engine, mask, ImportanceCorrection(cap=2.5))
        >>> weights, is_clipped
        (tensor([[2.0000, 2.5000]]), tensor([[False,  True]]))
        >>> compute_importance_weights(trainer, engine, mask, ImportanceCorrection(cap=2.5, is_mask=True))[0]
        tensor([[2., 0.]])
    """
    log_ratio = torch.where(mask, trainer_logprobs - engine_logprobs, 0).detach()
    if correction.is_sequence:
        log_ratio = log_ratio.double().sum(1, keepdim=True).expand(mask.shape)
    is_outside = log_ratio > math.log(correction.cap)
    # Truncated before exp, so that it cannot overflow.
    weights = log_ratio.clamp_max(math.log(correction.cap)).exp().to(trainer_logprobs.dtype)
    if correction.is_mask:
        if correction.floor:  # a floor of 0 masks nothing
            is_outside = is_outside | (log_ratio < math.log(correction.floor))
        weights = weights.masked_fill(is_outside, 0)
    return weights, is_outside
