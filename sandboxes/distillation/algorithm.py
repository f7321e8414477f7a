"""The algorithm of on-policy distillation: sample from the student, compare with the teacher, update; and its losses.

Axes: E members, B sequences, T positions, A actions. p is the student's policy, q the teacher's, μ the policy with
which the student sampled the batch, l the log-probability of the sampled token under p, sg(.) a stop-gradient.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from sandboxes.distillation.settings import SEQUENCE_PG, TOP_K, DistillationConfig, Support
from sandboxes.toys.decoding import decode_greedily, generate_completions, select_log_probs
from sandboxes.toys.ensemble import Algorithm, EnsembleTrainer, UpdateResult
from sandboxes.toys.losses import clipped_policy_loss
from sandboxes.toys.optimizer import MemberAdam, descend
from sandboxes.toys.rngs import MemberRngs
from sandboxes.toys.sequence_rewards import SEQUENCE_KINDS, compute_sequence_rewards
from sandboxes.toys.settings import EVAL_PROMPTS
from sandboxes.toys.transformer import init_transformer_ensemble, make_shape
from trainable.algo.losses import entropy_from_logits, full_kl
from trainable.runs.training import TrainerFamily

_KINDS = {"reversal": "token_reversal", "soft_reversal": "token_reversal", "format_answer": "format_answer"}
TIE_BREAK = 0.001
"""Relative weight per index of a content token, which orders tokens at equal distance. Source: published."""


@dataclass(frozen=True)
class DistillationBatch:
    """Sequences sampled by the student, a batch for each of E members: B sequences of T tokens, A actions."""

    observations: Tensor
    """[E, B, L] tokens (prompt, separator, sampled tokens)."""
    actions: Tensor
    """[E, B, T] the sampled tokens."""
    rewards: Tensor
    """[E, B] in [0, 1]. Rewards are measured, but not trained on."""
    behavior_log_probs: Tensor
    """[E, B, T] log-probabilities of the sampled tokens under the student that sampled them."""
    teacher_log_probs: Tensor
    """[E, B, T, A]."""


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


class DistillationAlgorithm(Algorithm[DistillationBatch]):
    """Students that learn from a teacher."""

    def __init__(self, config: DistillationConfig, seeds: Sequence[int]) -> None:
        self.config, self.rngs = config, MemberRngs(seeds)
        self.kind = SEQUENCE_KINDS[_KINDS[config.task]]
        self.teacher_table = make_teacher_table(config)
        self.models = init_transformer_ensemble(make_shape(config), self.rngs)
        self.optimizer = MemberAdam(self.models.weights, config.lr)
        self.optimizers = {"adam": self.optimizer}
        # [E, P] a random unit vector for each member, on which gradients are projected.
        self.direction: Tensor | None = None
        if config.measures_variance:
            direction = self.rngs.normal("sandbox_direction", shape=tuple(self.optimizer.weights.shape[1:])).float()
            self.direction = direction / direction.norm(dim=1, keepdim=True)

    def evaluate(self, step: int) -> dict[str, Tensor]:
        """Compute error and entropy of greedy answers to EVAL_PROMPTS new prompts; empty if `measures_variance`."""
        if self.config.measures_variance:
            return {}
        prompts = self._sample_prompts("sandbox_evaluation", step, EVAL_PROMPTS)
        tokens, log_probs = decode_greedily(self.models, self._append_separator(prompts), self.config.seq_len)
        is_wrong = tokens != self._make_labels(prompts)
        return {
            "test_error": is_wrong.float().mean((1, 2)),
            "entropy": entropy_from_logits(log_probs).mean((1, 2)),
            "greedy_separator_rate": (tokens == self.config.vocab_size).float().mean((1, 2)),
        }

    def sample(self, step: int) -> DistillationBatch:
        """Sample a batch of sequences, with the teacher's distribution at each of their positions."""
        config = self.config
        prompts = self._sample_prompts("sandbox_prompts", step, config.batch_size)
        uniforms = self.rngs.uniform("sandbox_samples", step, shape=(config.batch_size, config.seq_len))
        completions = generate_completions(self.models, self._append_separator(prompts), config.seq_len, uniforms)
        labels = self._make_labels(prompts)
        scores_all = torch.ones(config.seq_len, dtype=torch.bool)
        return DistillationBatch(
            observations=torch.cat((self._append_separator(prompts), completions.tokens), dim=-1),
            actions=completions.tokens,
            rewards=compute_sequence_rewards(self.kind, completions.tokens == labels, scores_all, binary=False),
            behavior_log_probs=select_log_probs(completions.log_probs, completions.tokens),
            teacher_log_probs=self.teacher_table[labels],
        )

    def train(self, batch: DistillationBatch, step: int, is_row: bool) -> UpdateResult:
        """Take one step on the batch, or only measure its gradient if `measures_variance`."""
        student = self.models.compute_logits(batch.observations[..., :-1], self.config.seq_len).log_softmax(-1)
        is_warmup = step < self.config.warmup_steps
        loss = self._compute_loss(student, batch, is_warmup)
        metrics = {"loss": loss.detach()}
        if is_row:
            metrics |= self._measure(student.detach(), batch)
            metrics["is_warmup"] = torch.full_like(metrics["loss"], float(is_warmup))
        if self.direction is None:
            return UpdateResult(metrics, descend(self.optimizer, loss))
        gradient = self.optimizer.compute_gradient(loss)
        metrics |= {"gradient_projection": (gradient * self.direction).sum(1), "gradient_norm": gradient.norm(dim=1)}
        is_finite = gradient.isfinite().all(dim=1).tolist()
        return UpdateResult(metrics, [[] if finite else ["gradient"] for finite in is_finite])

    def _compute_loss(self, student: Tensor, batch: DistillationBatch, is_warmup: bool) -> Tensor:
        """Compute the loss [E] of the method, or of the exact warm-up. student: [E, B, T, A] log-probabilities."""
        config, teacher = self.config, batch.teacher_log_probs
        if config.method == "OPDReverseKL" or is_warmup:
            return reverse_kl_loss(student, teacher)
        if config.method == TOP_K:
            support = select_support(student, teacher, config.top_k, config.top_k_support)
            return truncated_reverse_kl_loss(student, teacher, support.mask, config.normalize_top_k)
        sampled_log_probs = (
            select_log_probs(student, batch.actions),
            batch.behavior_log_probs,
            select_log_probs(teacher, batch.actions),
        )
        if config.method == SEQUENCE_PG:
            return sequence_policy_gradient_loss(*sampled_log_probs, is_mean=config.sequence_mean)
        return policy_gradient_loss(*sampled_log_probs, clip=config.clip_epsilon)

    def _measure(self, student: Tensor, batch: DistillationBatch) -> dict[str, Tensor]:
        """Measure the columns of the batch before the step, [E] each. student: [E, B, T, A] log-probabilities."""
        config, teacher = self.config, batch.teacher_log_probs
        student_entropy, teacher_entropy = entropy_from_logits(student), entropy_from_logits(teacher)
        k = min(config.overlap_k, config.num_actions)
        means = {
            "reverse_kl": full_kl(student, teacher),
            "forward_kl": full_kl(teacher, student),
            "sampled_reverse_kl": batch.behavior_log_probs - select_log_probs(teacher, batch.actions),
            "student_entropy": student_entropy,
            "teacher_entropy": teacher_entropy,
            "entropy_gap": student_entropy - teacher_entropy,
            "top1_agreement": (student.argmax(-1) == teacher.argmax(-1)).float(),
            "overlap_at_k": select_support(student, teacher, k, "intersection").mask.sum(-1) / k,
        }
        if config.method == TOP_K:
            support = select_support(student, teacher, config.top_k, config.top_k_support)
            means |= {
                "student_topk_mass": support.student_mass,
                "teacher_topk_mass": support.teacher_mass,
                "topk_support_size": support.mask.sum(-1).float(),
            }
        return {"reward": batch.rewards.mean(1), **{name: value.mean((1, 2)) for name, value in means.items()}}

    def _sample_prompts(self, purpose: str, step: int, count: int) -> Tensor:
        return self.rngs.integers(purpose, step, high=self.config.vocab_size, shape=(count, self.config.seq_len))

    def _append_separator(self, prompts: Tensor) -> Tensor:
        return torch.cat((prompts, torch.full_like(prompts[..., :1], self.config.vocab_size)), dim=-1)

    def _make_labels(self, prompts: Tensor) -> Tensor:
        return self.kind.make_labels(prompts, self.config.vocab_size)


def make_teacher_table(config: DistillationConfig) -> Tensor:
    """Make the teacher's log-probabilities [A, A]; row y is for positions where y is correct.

    reversal, format_answer: 1 − ε for y, and ε / (A − 1) for every other token.

    soft_reversal: proportional to exp(−d(j, y) / τ) (1 + 0.001 j) for a content token j, where d is the distance on the
    circle of the V content tokens, and to `special_token_weight` for the separator. The separator is never correct; its
    row equals the first content token's.
    """
    actions = torch.arange(config.num_actions)
    if config.task != "soft_reversal":
        others = config.teacher_epsilon / (config.num_actions - 1)
        return torch.where(actions == actions[:, None], 1 - config.teacher_epsilon, others).double().log().float()
    vocab_size = config.vocab_size
    distance = (actions - actions[:, None] % vocab_size).abs() % vocab_size
    cyclic_distance = torch.minimum(distance, vocab_size - distance).double()
    # The tie-break is a factor, so its logarithm is added.
    content = -cyclic_distance / config.teacher_temperature + (1 + TIE_BREAK * actions.double()).log()
    special = torch.tensor(config.special_token_weight, dtype=torch.float64).log()
    return torch.where(actions < vocab_size, content, special).log_softmax(-1).float()


make_trainer = partial(EnsembleTrainer, make_algorithm=DistillationAlgorithm)
"""Make a trainer of a configuration with one student per seed."""
TRAINER = TrainerFamily(make_trainer)
