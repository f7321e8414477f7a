"""Reward vectors of actions, scores of sets of them, and the value of a set over all weights of the objectives.

Axes: E members, G groups of K sets each (B = G K), M candidates, D objectives, W weights.
"""

import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from sandboxes.vector_rewards.settings import SIMPLEX_POINTS

MAX_SETS = 50_000
"""Enumerations of more sets than this are skipped."""


class Front(NamedTuple):
    """The actions of a task."""

    rewards: Tensor
    """[A, D] the reward vector of each action, in [0, 1]."""
    gold_weights: Tensor
    """[D] the weights with which ScalarGRPO and MultiRLVR train."""
    deployment_weights: Tensor
    """[N, D] the weights with which a policy is used; scores at deployment are means over them."""


def make_front(task: str) -> Front:
    """Make the front of a task.

    pareto_front: the published seven actions with two objectives. Five of them are not dominated, and the compromise
    (0.6, 0.6) is the best at the gold weights, so coverage is not rewarded at deployment.

    pareto_large: four objectives. 20 actions are the unit vectors in the directions of the integer vectors of sum 3, so
    none dominates another and each is the best for some weights. Four more are 0.4 times the mixed directions of pairs,
    and dominated. It is deployed with each objective alone and with equal weights, each of which has a different best
    action.
    """
    if task == "pareto_front":
        vectors = [[1.0, 0.0], [0.85, 0.25], [0.6, 0.6], [0.25, 0.85], [0.0, 1.0], [0.3, 0.2], [0.05, 0.05]]
        gold = torch.tensor([0.5, 0.5])
        return Front(torch.tensor(vectors), gold, gold[None])
    directions = [counts for counts in itertools.product(range(4), repeat=4) if sum(counts) == 3]
    front = torch.tensor(directions, dtype=torch.float64)
    weak = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1], [1, 0, 0, 1]], dtype=torch.float64)
    rewards = torch.cat((front / front.norm(dim=1, keepdim=True), 0.4 * weak / math.sqrt(2))).float()
    gold = torch.full((4,), 0.25)
    return Front(rewards, gold, torch.cat((torch.eye(4), gold[None])))


def make_prompt_rewards(front: Front, num_prompts: int) -> Tensor:
    """Make the rewards [P, A, D]: prompt i rolls the actions by i, and odd i reverse the order of the objectives."""
    rolled_rewards = [front.rewards.roll(index, dims=0) for index in range(num_prompts)]
    return torch.stack([rewards.flip(-1) if index % 2 else rewards for index, rewards in enumerate(rolled_rewards)])


def make_simplex_points(dimensions: int) -> Tensor:
    """Make weights [L, D] that cover the simplex evenly, the same in every run.

    The gaps between sorted uniform numbers are uniform on the simplex. The numbers come from a Sobol sequence, shifted
    by half a step so that none is 0. With two objectives the weights are the midpoints of L equal intervals.
    """
    numbers = torch.quasirandom.SobolEngine(dimensions - 1).draw(SIMPLEX_POINTS, dtype=torch.float64)
    cuts = (numbers + 0.5 / SIMPLEX_POINTS).sort(dim=1).values
    return torch.diff(cuts, dim=1, prepend=torch.zeros(len(cuts), 1), append=torch.ones(len(cuts), 1))


def find_best_set(rewards: Tensor, size: int) -> tuple[float, tuple[int, ...]] | None:
    """Find the set of `size` actions [A, D] with the largest mean best score over the simplex; None if too many."""
    size = min(size, len(rewards))
    if math.comb(len(rewards), size) > MAX_SETS:
        return None
    scores = rewards.double() @ make_simplex_points(rewards.shape[1]).T
    sets = torch.tensor(list(itertools.combinations(range(len(rewards)), size)))
    values = torch.cat([scores[chunk].amax(1).mean(1) for chunk in sets.split(500)])
    best = int(values.argmax())
    return float(values[best]), tuple(sets[best].tolist())


def compute_simplex_scores(probabilities: Tensor, rewards: Tensor) -> Tensor:
    """Compute the expected best score [...] of a random set, averaged over the simplex; exact, without sampling.

    The probability that the best of M independent candidates is at most v is the product of each one's. So for each
    weight the actions are sorted by their scores, and the product of the slots' cumulative probabilities is the
    distribution.

    probabilities: [..., M, A] of each action in each slot. rewards: [..., A, D], broadcast against the leading axes.
    """
    points = make_simplex_points(rewards.shape[-1])
    scores = torch.einsum("...ad,ld->...la", rewards.double(), points)
    values, order = scores.sort(dim=-1)
    leading_shape = torch.broadcast_shapes(probabilities.shape[:-2], rewards.shape[:-2])
    shape = (*leading_shape, len(points), *probabilities.shape[-2:])
    slots = probabilities.double()[..., None, :, :].expand(shape)
    cumulative = slots.gather(-1, order[..., None, :].expand(shape)).cumsum(-1).prod(-2)
    mass = torch.cat((cumulative[..., :1], cumulative.diff(dim=-1)), dim=-1)
    return (mass * values).sum(-1).mean(-1)


def score_scalar(vector_rewards: Tensor, gold_weights: Tensor) -> Tensor:
    """Compute the best gold score [E, B] of a set: max over M of gold [D] . r [E, B, M, D].

    ScalarGRPO uses it with a single candidate, MultiRLVR with several.
    """
    return (vector_rewards @ gold_weights).amax(-1)


def score_over_weights(vector_rewards: Tensor, weights: Tensor, group_size: int) -> Tensor:
    """Compute the mean [E, B] over sampled weights of a set's best score: mean over W of max over M of w . r.

    The maximum is inside the mean: a set is good if for each weight some candidate is, whichever it is. vector_rewards:
    [E, B, M, D] r. weights: [E, G, W, D], shared by the K sets of a group, which are compared at the same weights.
    """
    groups = vector_rewards.unflatten(1, (-1, group_size))
    scores = groups @ weights[:, :, None].transpose(-1, -2)
    return scores.amax(-2).mean(-1).flatten(1)
