"""A KL penalty in the reward instead of the loss, and the controller of its coefficient.

Shapes: B sequences, T tokens.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trainable.algo.losses import estimate_kl

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


@dataclass(frozen=True)
class AdaptiveKLController:
    """A KL coefficient that steers the measured KL towards a target. Without a horizon, it is fixed.

        error = clamp(KL / target − 1, ±0.2),   β ← β (1 + error · n / horizon)

    Example:
        A KL of twice the target gives the largest error, 0.2. Half a horizon later, β has grown by 10 %.

        >>> controller = AdaptiveKLController(coef=0.1, target=0.1, horizon=100)
        >>> round(controller.update(current_kl=0.2, n_steps=50).coef, 6)
        0.11

    Source: Ziegler et al. 2019, arXiv:1909.08593, sec. 2.2; the horizon is from their code.
    """

    coef: float
    """β >= 0, reward per nat. 0 stays 0."""
    target: float = 0.1
    """Target KL in nats, reduced in the same way as the measured KL."""
    horizon: float | None = None
    """Steps over which an error of 1 would double β, in the unit of `n_steps`; None keeps β fixed."""

    def __post_init__(self) -> None:
        if not 0 <= self.coef < math.inf:
            raise ValueError(f"kl_coef is {self.coef}; it must be finite and at least 0, such as 0.001.")
        if not 0 < self.target < math.inf:
            raise ValueError(f"target KL is {self.target}; it must be finite and above 0 nats, such as 0.1.")
        if self.horizon is not None and not self.horizon > 0:
            raise ValueError(f"KL horizon is {self.horizon}; it must be above 0, or None for a fixed coefficient.")

    def update(self, current_kl: float, n_steps: int) -> "AdaptiveKLController":
        """Return a new controller, updated for `n_steps` sequences with a KL of `current_kl` nats."""
        if self.horizon is None:
            return self
        error = min(max(current_kl / self.target - 1, -MAX_RELATIVE_ERROR), MAX_RELATIVE_ERROR)
        return replace(self, coef=self.coef * (1 + error * n_steps / self.horizon))
