"""Target policy optimisation: a group's rollouts as one distribution, moved towards a better one of the same rollouts.

Shapes: B sequences in P groups.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class TargetPolicyLoss(NamedTuple):
    """Loss over P groups, a scalar, with what the update and its diagnostics need, without gradient."""

    loss: Tensor
    sequence_weights: Tensor
    """(B,) −∂loss/∂c: what a sequence's summed log-prob is multiplied with in a loss of the same gradient, negated."""
    entropy: Tensor
    """Mean over groups of the target's entropy, in nats: log G where it is uniform."""
    top_prob: Tensor
    """Mean over groups of the target's largest probability."""


class GroupDistributions(NamedTuple):
    """Of each rollout (B,), float64: the logarithms of its shares of its group, and where its group is."""

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
    """Policy and target as distributions over each group's rollouts: what the loss of `target_policy` is made of.

        p = softmax(c),   q = softmax(log softmax(o) + z / η)

    A caller with a mean of its own takes −Σ_i q_i log p_i of each group.

    Args:
        logprobs: (B,) c, nats; the gradient flows through it.
        old_logprobs: (B,) o, nats; zeros for a target that does not start from the policy that sampled.
        skills: (B,) z.
        group_ids: (B,) int, equal for the rollouts of one prompt, or for candidates of one choice.
        eta: η > 0.

    Source: that of `target_policy`, whose published sandbox also has the variant without the old policy.
    Degenerate: a group of one has p = q = 1, so no loss and no gradient.
    """
    if not eta > 0:
        raise ValueError(f"tpo_eta is {eta}; it must be above 0, such as 1.0.")
    _, group_index = torch.unique(group_ids, return_inverse=True)
    num_groups = int(group_index.max()) + 1
    # Sums of hundreds of nats leave float32 too few digits for the small differences that p − q is made of.
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
    """Cross-entropy of the policy, restricted to each group's rollouts, from a target that prefers the skilled ones.

        p = softmax(c),   q = softmax(log softmax(o) + z / η),   L = mean over groups of −Σ_i q_i log p_i
        ∂L/∂c_i = (p_i − q_i) / P

    with softmax over the rollouts of a group. The target q is a constant.

    Args:
        logprobs: (B,) c, sum of log π over the trained tokens of each sequence, nats; the gradient flows through it.
        old_logprobs: (B,) o, the same under the policy that sampled.
        skills: (B,) z, such as `advantages.group_skill` before it is put on tokens.
        group_ids: (B,) int, equal for the rollouts of one prompt. Every group must be whole.
        eta: η > 0; a gain of η in skill multiplies a rollout's probability, relative to others, by e.

    The sums are over whole sequences, so their differences grow with length: among long rollouts p and q put nearly
    all on one of them, whatever the skills, unless η is small against those differences.

    Source: target policy optimisation (jeankaddour/tpo), as the published sandbox of update rules has it.
    Degenerate: a group of one has gradient 0; equal skills give q = softmax(o), a pull back to the old policy that is 0
    where the policy is still the old one.
    """
    log_p, log_q, group_index, num_groups = compute_group_distributions(logprobs, old_logprobs, skills, group_ids, eta)
    with torch.no_grad():
        target_probs = log_q.exp()
        entropy = -(target_probs * log_q).sum() / num_groups
        top_prob = target_probs.new_zeros(num_groups).scatter_reduce(0, group_index, target_probs, "amax").mean()
        sequence_weights = (target_probs - log_p.exp()) / num_groups
    return TargetPolicyLoss(-(target_probs * log_p).sum() / num_groups, sequence_weights, entropy, top_prob)


def _group_log_softmax(x: Tensor, group_index: Tensor, num_groups: int) -> Tensor:
    """log softmax of `x` (B,) over the members of each of `count` groups."""
    group_max = x.new_full((num_groups,), -torch.inf).scatter_reduce(0, group_index, x.detach(), "amax")
    shifted_x = x - group_max[group_index]
    return shifted_x - x.new_zeros(num_groups).index_add(0, group_index, shifted_x.exp()).log()[group_index]
