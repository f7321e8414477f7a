"""The algorithm of Vector Policy Optimization: sample sets of candidates, score them, take clipped policy steps."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from sandboxes.toys.decoding import sample_actions, select_log_probs
from sandboxes.toys.ensemble import Algorithm, EnsembleTrainer, UpdateResult
from sandboxes.toys.losses import clipped_policy_loss, group_advantages
from sandboxes.toys.optimizer import MemberAdam, descend, merge_names
from sandboxes.toys.rngs import MemberRngs
from sandboxes.vector_rewards import fronts
from sandboxes.vector_rewards.settings import VectorRewardConfig
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
        self.front = fronts.make_front(config.task)
        self.rewards = fronts.make_prompt_rewards(self.front, config.num_prompts)
        self.policies = SetPolicies(config, len(self.front.rewards), self.rngs)
        self.optimizer = MemberAdam(self.policies.weights, config.lr)
        self.optimizers = {"adam": self.optimizer}
        best_set = fronts.find_best_set(self.front.rewards, config.eval_candidates)
        self.best_score = math.nan if best_set is None else best_set[0]

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
        simplex_score = fronts.compute_simplex_scores(log_probs[:, :, slots].exp(), self.rewards).mean(1)
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
        gold_scores = fronts.score_scalar(vector_rewards, self.front.gold_weights)
        set_scores = gold_scores
        if config.method == "VPOGRPO":
            set_scores = fronts.score_over_weights(vector_rewards, self._draw_weights(step, groups), config.group_size)
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
