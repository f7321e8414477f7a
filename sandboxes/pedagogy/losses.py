"""Formulas of pedagogical reinforcement learning. E members, B completions, T positions.

p is the student's policy given its prompt, without the hint; a_t is a token of the teacher's completion.
"""

import math

import torch
from torch import Tensor

from sandboxes.toys.decoding import select_log_probs


def compute_surprise_gaps(student_log_probs: Tensor, actions: Tensor) -> Tensor:
    """Compute g_t = max_a log p(a) − log p(a_t) [E, B, T] >= 0 from log-probabilities [E, B, T, A] and actions a_t."""
    return student_log_probs.amax(-1) - select_log_probs(student_log_probs, actions)


def compute_spike_penalty(gaps: Tensor, beta: float) -> Tensor:
    """Compute (logsumexp_t(β g_t) − log T) / β [E, B] of gaps [E, B, T].

    It is the mean of the gaps as β goes to 0, and their maximum as β goes to infinity, so that a single token that the
    student would never write counts more than many small surprises.
    """
    return (torch.logsumexp(beta * gaps, dim=-1) - math.log(gaps.shape[-1])) / beta


def compute_learnability(penalty: Tensor, decay: float) -> Tensor:
    """Compute exp(−λ penalty), in (0, 1]. It multiplies the task reward, so that a wrong answer earns nothing."""
    return torch.exp(-decay * penalty)


def compute_gate(action_log_probs: Tensor, kappa: float, gamma: float) -> Tensor:
    """Compute σ(κ (log p(a_t) − γ)), without gradient: near 1 for tokens within the student's reach, else near 0."""
    return torch.sigmoid(kappa * (action_log_probs.detach() - gamma))


def gated_imitation_loss(action_log_probs: Tensor, gate: Tensor) -> Tensor:
    """Compute the mean [E] over completions of Σ_t w_t (−log p_t) / max(Σ_t w_t, 1e-8).

    The gate w [E, B, T] moves weight between the tokens of a completion without changing the total.
    """
    return ((gate * -action_log_probs).sum(-1) / gate.sum(-1).clamp(min=1e-8)).mean(-1)
