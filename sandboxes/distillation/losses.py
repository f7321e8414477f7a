"""Losses of on-policy distillation. Axes: E members, B sequences, T positions, A actions.

p is the student's policy, q the teacher's, μ the policy with which the student sampled the batch, l the log-probability
of the sampled token under p, sg(.) a stop-gradient.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from sandboxes.distillation.settings import Support
from sandboxes.toys.losses import clipped_policy_loss
from trainable.algo.losses import full_kl


class TopKSupport(NamedTuple):
    """The tokens [..., A] over which a truncated divergence sums, and the probability [...] of them in each policy."""

    mask: Tensor
    student_mass: Tensor
    teacher_mass: Tensor


def reverse_kl_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """Compute the mean [E] over B and T of the exact KL(p‖q) = Σ_a p (log p − log q), with all gradients through p."""
    return full_kl(student, teacher).mean((1, 2))


@torch.no_grad()
def select_support(student: Tensor, teacher: Tensor, k: int, support: Support) -> TopKSupport:
    """Select the k most likely tokens of the student, the teacher or both; arguments are log-probabilities [..., A]."""
    masks = {"student": _mark_top_k(student, k), "teacher": _mark_top_k(teacher, k)}
    mask = masks["student"] & masks["teacher"] if support == "intersection" else masks[support]
    student_mass, teacher_mass = ((log_probs.exp() * mask).sum(-1) for log_probs in (student, teacher))
    return TopKSupport(mask, student_mass, teacher_mass)


def _mark_top_k(log_probs: Tensor, k: int) -> Tensor:
    indices = log_probs.topk(min(k, log_probs.shape[-1]), dim=-1).indices
    return torch.zeros_like(log_probs, dtype=torch.bool).scatter(-1, indices, True)


def truncated_reverse_kl_loss(student: Tensor, teacher: Tensor, mask: Tensor, normalize: bool) -> Tensor:
    """Compute the mean [E] over B and T of Σ_{a in S} p (log p − log q).

    Without `normalize`, p and q are not normalized over S, as published. The sum is then not a divergence: moving the
    student's mass out of S, where nothing penalizes it, lowers the sum, and its minimum is negative. With `normalize`,
    it is the KL of the two policies given S. If S contains all tokens, both equal `reverse_kl_loss`.

    student, teacher: [E, B, T, A] log p and log q. mask: [E, B, T, A] bool, S; where it is empty, the term is 0.
    """
    if normalize:
        # An empty support would normalize over nothing; the mask of the sum below makes its term 0.
        is_used = mask | ~mask.any(-1, keepdim=True)
        student, teacher = (
            torch.where(is_used, log_probs, -torch.inf).log_softmax(-1).masked_fill(~is_used, 0.0)
            for log_probs in (student, teacher)
        )
    terms = torch.where(mask, student.exp() * (student - teacher), 0)
    return terms.sum(-1).mean((1, 2))


def policy_gradient_loss(
    action_log_probs: Tensor, behavior_log_probs: Tensor, teacher_log_probs: Tensor, clip: float
) -> Tensor:
    """Compute PPO's clipped surrogate [E] with the advantage A_t = log q(a_t) − μ_t of each token, without a baseline.

    On policy the ratio is 1, and the loss has the gradient of −mean( sg(A_t) l_t ). In expectation this is the gradient
    of KL(p‖q) at the sampled prefixes. All arguments but `clip`: [E, B, T], of the sampled tokens.
    """
    advantages = teacher_log_probs - behavior_log_probs
    return clipped_policy_loss(action_log_probs, behavior_log_probs, advantages, clip, clip).loss.mean((1, 2))


def sequence_policy_gradient_loss(
    action_log_probs: Tensor, behavior_log_probs: Tensor, teacher_log_probs: Tensor, is_mean: bool
) -> Tensor:
    """Compute −mean_B Σ_t sg(G_t) l_t [E] with the return to go G_t = Σ_{u >= t} (log q(a_u) − μ_u).

    In expectation it has the gradient of the KL between the policies over whole sequences. is_mean: divide by T, the
    normalization of the other losses. Other arguments: [E, B, T], of the sampled tokens.
    """
    advantages = teacher_log_probs - behavior_log_probs
    returns = advantages.flip(-1).cumsum(-1).flip(-1)
    sums = -(returns.detach() * action_log_probs).sum(-1).mean(-1)
    return sums / action_log_probs.shape[-1] if is_mean else sums
