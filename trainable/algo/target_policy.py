"""Target policy optimization: treat the rollouts of a group as a distribution, and move it towards a better one.

Shapes: B sequences in P groups.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class TargetPolicyLoss(NamedTuple):
    """The scalar loss over P groups, and quantities without gradient for the update and its diagnostics."""

    loss: Tensor
    sequence_weights: Tensor
    """(B,) −∂loss/∂c. The loss −Σ_i weight_i c_i has the same gradient."""
    entropy: Tensor
    """Mean over groups of the target's entropy, in nats: log G if it is uniform."""
    top_prob: Tensor
    """Mean over groups of the target's largest probability."""


class GroupDistributions(NamedTuple):
    """For each rollout (B,), its log-probabilities within its group in float64, and the index of its group."""

    log_p: Tensor
    """log p, with gradient."""
    log_q: Tensor
    """log q of the target, a constant."""
    group_index: Tensor
    """(B,) int, the groups numbered 0 ... P − 1."""
    n_groups: int
    """P."""


def compute_group_distributions(
    logprobs: Tensor, old_logprobs: Tensor, skills: Tensor, group_ids: Tensor, eta: float
) -> GroupDistributions:
    """Compute policy and target as distributions over the rollouts of each group, for `target_policy_loss`.

        p = softmax(c),   q = softmax(log softmax(o) + z / η)

    Callers that average differently use −Σ_i q_i log p_i of each group.

    Args:
        logprobs: (B,) c, nats; the gradient flows through it.
        old_logprobs: (B,) o, nats; zeros for a target that does not depend on the sampling policy.
        skills: (B,) z.
        group_ids: (B,) int, equal for the rollouts of one prompt, or for the candidates of one choice.
        eta: η > 0.

    Example:
        A skill of log 3 makes the first of two equally likely rollouts three times as likely as the second.

        >>> skills, group_ids = torch.tensor([3.0, 1.0]).log(), torch.tensor([0, 0])
        >>> result = compute_group_distributions(torch.zeros(2), torch.zeros(2), skills, group_ids, eta=1.0)
        >>> result.log_p.exp().round(decimals=4).tolist(), result.log_q.exp().round(decimals=4).tolist()
        ([0.5, 0.5], [0.75, 0.25])

    Source: see `target_policy_loss`. The published sandbox also has the variant without the old policy.
    Degenerate: a group of one has p = q = 1, so no loss and no gradient.
    """
    _, group_index = torch.unique(group_ids, return_inverse=True)
    num_groups = int(group_index.max()) + 1
    # Log-probs are sums of hundreds of nats, so float32 has too few digits for the small differences in p − q.
    log_p = _group_log_softmax(logprobs.double(), group_index, num_groups)
    with torch.no_grad():
        log_q = _group_log_softmax(
            _group_log_softmax(old_logprobs.double(), group_index, num_groups) + skills.double() / eta,
            group_index,
            num_groups,
        )
    return GroupDistributions(log_p, log_q, group_index, num_groups)


def target_policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, skills: Tensor, group_ids: Tensor, eta: float
) -> TargetPolicyLoss:
    """Compute the cross-entropy of the policy, restricted to each group, from a target that prefers skilled rollouts.

        p = softmax(c),   q = softmax(log softmax(o) + z / η),   L = mean over groups of −Σ_i q_i log p_i
        ∂L/∂c_i = (p_i − q_i) / P

    with softmax over the rollouts of a group. The target q is a constant.

    Log-probs are sums over sequences, so their differences grow with length: among long rollouts, p and q put nearly
    all mass on one rollout, whatever the skills, unless η is small compared to these differences.

    Args:
        logprobs: (B,) c, sum of log π over the trained tokens of each sequence, nats; the gradient flows through it.
        old_logprobs: (B,) o, the same under the sampling policy.
        skills: (B,) z, such as `advantages.group_skill` per sequence.
        group_ids: (B,) int, equal for the rollouts of one prompt. Every group must be complete.
        eta: η > 0; a gain of η in skill multiplies a rollout's probability, relative to others, by e.

    Example:
        >>> skills, group_ids = torch.tensor([3.0, 1.0]).log(), torch.tensor([0, 0])
        >>> result = target_policy_loss(torch.zeros(2), torch.zeros(2), skills, group_ids, eta=1.0)
        >>> round(result.loss.item(), 4), result.sequence_weights.round(decimals=4).tolist()  # log 2, q − p
        (0.6931, [0.25, -0.25])

    Source: target policy optimization (jeankaddour/tpo), as implemented in the published sandbox of update rules.
    Degenerate: a group of one has gradient 0. Equal skills give q = softmax(o), a pull back to the old policy, which is
    0 as long as the policy is unchanged.
    """
    log_p, log_q, group_index, num_groups = compute_group_distributions(logprobs, old_logprobs, skills, group_ids, eta)
    with torch.no_grad():
        target_probs = log_q.exp()
        entropy = -(target_probs * log_q).sum() / num_groups
        top_prob = target_probs.new_zeros(num_groups).scatter_reduce(0, group_index, target_probs, "amax").mean()
        sequence_weights = (target_probs - log_p.exp()) / num_groups
    return TargetPolicyLoss(-(target_probs * log_p).sum() / num_groups, sequence_weights, entropy, top_prob)


def _group_log_softmax(x: Tensor, group_index: Tensor, num_groups: int) -> Tensor:
    """Compute the log-softmax of `x` (B,) over the members of each of `num_groups` groups."""
    # The maximum cancels in the result. Without it, exp could underflow for all members of a group, giving log 0.
    group_max = x.new_full((num_groups,), -torch.inf).scatter_reduce(0, group_index, x.detach(), "amax")
    shifted_x = x - group_max[group_index]
    return shifted_x - x.new_zeros(num_groups).index_add(0, group_index, shifted_x.exp()).log()[group_index]
