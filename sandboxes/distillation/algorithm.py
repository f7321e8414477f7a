"""The algorithm of on-policy distillation: sample from the student, compare with the teacher, update."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from sandboxes.distillation import losses
from sandboxes.distillation.settings import SEQUENCE_PG, TOP_K, DistillationConfig
from sandboxes.toys.decoding import decode_greedily, generate_completions, select_log_probs
from sandboxes.toys.ensemble import Algorithm, EnsembleTrainer, UpdateResult
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
            return losses.reverse_kl_loss(student, teacher)
        if config.method == TOP_K:
            support = losses.select_support(student, teacher, config.top_k, config.top_k_support)
            return losses.truncated_reverse_kl_loss(student, teacher, support.mask, config.normalize_top_k)
        sampled_log_probs = (
            select_log_probs(student, batch.actions),
            batch.behavior_log_probs,
            select_log_probs(teacher, batch.actions),
        )
        if config.method == SEQUENCE_PG:
            return losses.sequence_policy_gradient_loss(*sampled_log_probs, is_mean=config.sequence_mean)
        return losses.policy_gradient_loss(*sampled_log_probs, clip=config.clip_epsilon)

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
            "overlap_at_k": losses.select_support(student, teacher, k, "intersection").mask.sum(-1) / k,
        }
        if config.method == TOP_K:
            support = losses.select_support(student, teacher, config.top_k, config.top_k_support)
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
        others = config.teacher_epsilon / max(config.num_actions - 1, 1)
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
