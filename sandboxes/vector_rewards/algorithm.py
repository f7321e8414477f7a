"""The algorithm of Vector Policy Optimization: sample sets of candidates, score them, take clipped policy steps.

Axes: E members, G groups of K sets each (B = G K), M candidates, D objectives, W weights, A actions, P prompts.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from sandboxes.toys.decoding import sample_actions, select_log_probs
from sandboxes.toys.ensemble import Algorithm, EnsembleTrainer, UpdateResult
from sandboxes.toys.losses import clipped_policy_loss, group_advantages
from sandboxes.toys.optimizer import MemberAdam, descend, merge_names
from sandboxes.toys.rngs import MemberRngs
from sandboxes.vector_rewards.settings import SIMPLEX_POINTS, VectorRewardConfig
from trainable.algo.losses import entropy_from_logits
from trainable.runs.training import TrainerFamily

BEST_OF = (1, 3, 9)
"""Values of k in best_at_k."""


@dataclass(frozen=True)
class SetBatch:
    """Sets of candidates, a batch for each of E members: G groups of K sets (B = G K) of M candidates."""

    prompts: Tensor
    """[E, B] the prompt of each set; the K sets of a group share it."""
    actions: Tensor
    """[E, B, M] the action of each candidate."""
    behavior_log_probs: Tensor
    """[E, B, M] log-probabilities of the actions under the policy that sampled them."""
    set_scores: Tensor
    """[E, B] the scores that the method trains on."""
    gold_scores: Tensor
    """[E, B] the best gold score of each set."""


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


def compute_best_score(rewards: Tensor, size: int) -> float:
    """Compute the largest mean best score over the simplex of a set of `size` actions [A, D]; NaN if too many sets."""
    size = min(size, len(rewards))
    if math.comb(len(rewards), size) > MAX_SETS:
        return math.nan
    scores = rewards.double() @ make_simplex_points(rewards.shape[1]).T
    sets = torch.tensor(list(itertools.combinations(range(len(rewards)), size)))
    return max(float(scores[chunk].amax(1).mean(1).max()) for chunk in sets.split(500))


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


class SetPolicies:
    """E policies: the embeddings of a prompt and of an answer slot are added, then Linear, tanh, Linear."""

    def __init__(self, config: VectorRewardConfig, num_actions: int, rngs: MemberRngs) -> None:
        hidden, bound = config.hidden, config.hidden**-0.5
        initial_weights = {
            "prompts": rngs.normal("sandbox_weights", 1, shape=(config.num_prompts, hidden)),
            "slots": rngs.normal("sandbox_weights", 2, shape=(config.num_candidates, hidden)),
            "hidden.matrix": rngs.bounded_weights(3, (hidden, hidden), bound),
            "hidden.bias": rngs.bounded_weights(4, (hidden,), bound),
            "head.matrix": rngs.bounded_weights(5, (hidden, num_actions), bound),
            "head.bias": rngs.bounded_weights(6, (num_actions,), bound),
        }
        self.weights = {name: tensor.float().requires_grad_() for name, tensor in initial_weights.items()}

    def compute_log_probs(self) -> Tensor:
        """Compute log-probabilities [E, P, M, A] of the actions in each slot, for every prompt."""
        weights = self.weights
        states = weights["prompts"][:, :, None] + weights["slots"][:, None]
        shape = states.shape[:3]
        states = torch.baddbmm(weights["hidden.bias"][:, None], states.flatten(1, 2), weights["hidden.matrix"]).tanh()
        logits = torch.baddbmm(weights["head.bias"][:, None], states, weights["head.matrix"])
        return logits.view(*shape, -1).log_softmax(-1)


class VectorRewardAlgorithm(Algorithm[SetBatch]):
    """Policies over sets of candidates."""

    def __init__(self, config: VectorRewardConfig, seeds: Sequence[int]) -> None:
        self.config, self.rngs = config, MemberRngs(seeds)
        self.front = make_front(config.task)
        self.rewards = make_prompt_rewards(self.front, config.num_prompts)
        self.policies = SetPolicies(config, len(self.front.rewards), self.rngs)
        self.optimizer = MemberAdam(self.policies.weights, config.lr)
        self.optimizers = {"adam": self.optimizer}
        self.best_score = compute_best_score(self.front.rewards, config.eval_candidates)

    def evaluate(self, step: int) -> dict[str, Tensor]:
        """Compute the published scores of sampled sets, and the exact score over all weights of the objectives."""
        config = self.config
        log_probs = self.policies.compute_log_probs()
        uniforms = self.rngs.uniform(
            "sandbox_evaluation", step, shape=(config.num_prompts, config.eval_sets, config.num_candidates)
        )
        actions = sample_actions(log_probs[:, :, None].expand(*uniforms.shape, -1), uniforms)
        prompts = torch.arange(config.num_prompts)[:, None, None]
        rewards = self.rewards[prompts, actions]
        # A pool contains the candidates of all sets of a prompt, in the order in which they were drawn.
        pools = (rewards @ self.front.deployment_weights.T).flatten(2, 3)
        slots = torch.arange(config.eval_candidates) % config.num_candidates
        simplex_score = compute_simplex_scores(log_probs[:, :, slots].exp(), self.rewards).mean(1)
        return {
            "mean_scalar_reward": (rewards @ self.front.gold_weights).mean((1, 2, 3)),
            **{f"best_at_{k}": pools[:, :, :k].amax(2).mean((1, 2)) for k in BEST_OF},
            "pool_diversity_l1": _compute_diversity(rewards).mean((1, 2)),
            "entropy": entropy_from_logits(log_probs).mean((1, 2)),
            "simplex_score": simplex_score,
            "simplex_gap": self.best_score - simplex_score,
        }

    def sample(self, step: int) -> SetBatch:
        """Sample a batch of sets, with their scores."""
        config = self.config
        groups = config.batch_size // config.group_size
        prompts = self.rngs.integers("sandbox_prompts", step, high=config.num_prompts, shape=(groups,))
        prompts = prompts.repeat_interleave(config.group_size, dim=1)
        log_probs = self._select_prompts(self.policies.compute_log_probs(), prompts)
        uniforms = self.rngs.uniform("sandbox_samples", step, shape=(config.batch_size, config.num_candidates))
        actions = sample_actions(log_probs, uniforms)
        vector_rewards = self.rewards[prompts[..., None], actions]
        gold_scores = score_scalar(vector_rewards, self.front.gold_weights)
        set_scores = gold_scores
        if config.method == "VPOGRPO":
            set_scores = score_over_weights(vector_rewards, self._draw_weights(step, groups), config.group_size)
        return SetBatch(prompts, actions, select_log_probs(log_probs, actions), set_scores, gold_scores)

    def _draw_weights(self, step: int, groups: int) -> Tensor:
        """Draw weights [E, G, W, D], uniform on the simplex: normalized exponential numbers."""
        shape = (groups, self.config.num_weight_samples, self.front.rewards.shape[1])
        exponentials = -torch.log1p(-self.rngs.uniform("sandbox_scalarizations", step, shape=shape))
        return (exponentials / exponentials.sum(-1, keepdim=True)).float()

    def _select_prompts(self, log_probs: Tensor, prompts: Tensor) -> Tensor:
        """Select the rows of log_probs [E, P, M, A] for prompts [E, B]: [E, B, M, A]."""
        return log_probs.gather(1, prompts[..., None, None].expand(*prompts.shape, *log_probs.shape[2:]))

    def train(self, batch: SetBatch, step: int, is_row: bool) -> UpdateResult:
        """Take the inner epochs on the batch; every candidate has the advantage of its set."""
        config = self.config
        group_ids = torch.arange(batch.set_scores.numel()) // config.group_size
        advantages = group_advantages(batch.set_scores.flatten(), group_ids, True).view(batch.set_scores.shape)
        advantages = advantages[..., None].expand(batch.actions.shape)
        nonfinite_names: list[list[str]] = [[] for _ in batch.set_scores]
        metrics: dict[str, Tensor] = {}
        for _ in range(config.inner_epochs):
            log_probs = self._select_prompts(self.policies.compute_log_probs(), batch.prompts)
            log_probs = select_log_probs(log_probs, batch.actions)
            clip = config.clip_epsilon
            policy_loss = clipped_policy_loss(log_probs, batch.behavior_log_probs, advantages, clip, clip)
            loss = policy_loss.loss.mean((1, 2))
            nonfinite_names = merge_names(nonfinite_names, descend(self.optimizer, loss))
            metrics = {"loss": loss.detach(), "ratio_mean": policy_loss.ratio.mean((1, 2))}
        if is_row:
            metrics |= {
                "reward": batch.set_scores.mean(1),
                "gold_set_reward": batch.gold_scores.mean(1),
                "adv_abs_mean": advantages.abs().mean((1, 2)),
            }
        return UpdateResult(metrics, nonfinite_names)


def _compute_diversity(rewards: Tensor) -> Tensor:
    """Compute the mean L1 distance [E, P, S] of pairs of reward vectors [E, P, S, M, D] in a set; 0 if M is 1."""
    candidates = rewards.shape[-2]
    if candidates == 1:
        return torch.zeros(rewards.shape[:-2])
    distances = (rewards[..., :, None, :] - rewards[..., None, :, :]).abs().sum(-1)
    return distances.sum((-1, -2)) / (candidates * (candidates - 1))


make_trainer = partial(EnsembleTrainer, make_algorithm=VectorRewardAlgorithm)
"""Make a trainer of a configuration with one policy per seed."""
TRAINER = TrainerFamily(make_trainer)
