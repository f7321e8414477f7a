"""The algorithm of pedagogical reinforcement learning: its formulas; the teacher's update, then the student's.

Axes: E members, B completions, T positions. p is the student's policy given its prompt, without the hint; a_t is a
token of the teacher's completion.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from sandboxes.pedagogy.settings import STUDENT_ONLY, PedagogyConfig
from sandboxes.toys.decoding import decode_greedily, generate_completions, select_log_probs
from sandboxes.toys.ensemble import Algorithm, EnsembleTrainer, UpdateResult
from sandboxes.toys.losses import clipped_policy_loss, group_advantages
from sandboxes.toys.optimizer import MemberAdam, descend, merge_names
from sandboxes.toys.rngs import MemberRngs
from sandboxes.toys.settings import EVAL_PROMPTS
from sandboxes.toys.transformer import TransformerEnsemble, init_transformer_ensemble, make_shape
from trainable.algo.losses import entropy_from_logits
from trainable.runs.training import TrainerFamily

_TEACHER_DRAWS, _STUDENT_DRAWS = 0, 1  # indices of the random streams of a step


@dataclass(frozen=True)
class LessonBatch:
    """Completions of one policy, a batch for each of E members: B completions of T tokens."""

    inputs: Tensor
    """[E, B, 2] the two numbers of each prompt."""
    actions: Tensor
    """[E, B, T] the sampled tokens."""
    behavior_log_probs: Tensor
    """[E, B, T] log-probabilities under the policy that sampled them, given its prompt."""
    task_rewards: Tensor
    """[E, B] 1 where the answer is correct, otherwise 0."""


@dataclass(frozen=True)
class Arithmetic:
    """The task hinted_arithmetic: makes prompts with and without the answer, and grades the last tokens."""

    config: PedagogyConfig

    def make_answers(self, inputs: Tensor) -> Tensor:
        """Compute answers [..., answer_len]: (x0 + k x1) modulo V for k = 1, 2, ...; the published task has k = 1."""
        factors = torch.arange(1, self.config.answer_len + 1)
        return (inputs[..., :1] + factors * inputs[..., 1:]) % self.config.content_vocab_size

    def make_student_prompts(self, inputs: Tensor) -> Tensor:
        """Make the student's prompts [..., 3]: the inputs and the query separator."""
        return torch.cat((inputs, torch.full_like(inputs[..., :1], self.config.content_vocab_size)), dim=-1)

    def make_teacher_prompts(self, inputs: Tensor) -> Tensor:
        """Make the teacher's prompts [..., 4 + answer_len]: inputs, hint separator, answer, query separator."""
        query = torch.full_like(inputs[..., :1], self.config.content_vocab_size)
        return torch.cat((inputs, query + 1, self.make_answers(inputs), query), dim=-1)

    def grade(self, inputs: Tensor, actions: Tensor) -> Tensor:
        """Grade actions [..., T]: [...] 1 where the last tokens are the answer, otherwise 0; earlier ones are free."""
        return (actions[..., -self.config.answer_len :] == self.make_answers(inputs)).all(-1).float()


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


class PedagogyAlgorithm(Algorithm[LessonBatch]):
    """Pairs of a teacher and a student."""

    def __init__(self, config: PedagogyConfig, seeds: Sequence[int]) -> None:
        self.config, self.rngs, self.task = config, MemberRngs(seeds), Arithmetic(config)
        shape = make_shape(config)
        self.student = init_transformer_ensemble(shape, self.rngs)
        # Both start from the same weights.
        self.teacher = TransformerEnsemble(
            shape, {name: tensor.detach().clone().requires_grad_() for name, tensor in self.student.weights.items()}
        )
        self.student_optimizer = MemberAdam(self.student.weights, config.student_lr)
        self.teacher_optimizer = MemberAdam(self.teacher.weights, config.teacher_lr)
        self.optimizers = {"student": self.student_optimizer, "teacher": self.teacher_optimizer}

    def evaluate(self, step: int) -> dict[str, Tensor]:
        """Compute errors and entropies of the greedy completions of student and teacher to EVAL_PROMPTS new prompts."""
        inputs = self._sample_inputs("sandbox_evaluation", EVAL_PROMPTS, step)
        columns: dict[str, Tensor] = {}
        policies = {"": (self.student, self.task.make_student_prompts(inputs))}
        if self.config.method != STUDENT_ONLY:
            policies["teacher_"] = (self.teacher, self.task.make_teacher_prompts(inputs))
        for prefix, (models, prompts) in policies.items():
            tokens, log_probs = decode_greedily(models, prompts, self.config.completion_len)
            error, entropy = 1 - self.task.grade(inputs, tokens).mean(1), entropy_from_logits(log_probs).mean((1, 2))
            columns |= {f"{prefix}test_error": error, f"{prefix}entropy": entropy}
        return columns

    def sample(self, step: int) -> LessonBatch:
        """Sample the step's first batch, in groups, from the teacher, or from the student if it learns alone."""
        return self._sample_batch((step, _TEACHER_DRAWS, 0), self.config.group_size)

    def _sample_batch(self, indices: tuple[int, ...], group_size: int) -> LessonBatch:
        """Sample a batch with `group_size` completions per prompt. indices: of the random streams."""
        config = self.config
        is_student = config.method == STUDENT_ONLY
        inputs = self._sample_inputs("sandbox_prompts", config.batch_size // group_size, *indices)
        prompts = self.task.make_student_prompts(inputs) if is_student else self.task.make_teacher_prompts(inputs)
        uniforms = self.rngs.uniform("sandbox_samples", *indices, shape=(config.batch_size, config.completion_len))
        models = self.student if is_student else self.teacher
        completions = generate_completions(models, prompts, config.completion_len, uniforms, group_size)
        inputs = inputs.repeat_interleave(group_size, dim=1)
        return LessonBatch(
            inputs,
            completions.tokens,
            select_log_probs(completions.log_probs, completions.tokens),
            self.task.grade(inputs, completions.tokens),
        )

    def _sample_inputs(self, purpose: str, count: int, *indices: int) -> Tensor:
        return self.rngs.integers(purpose, *indices, high=self.config.content_vocab_size, shape=(count, 2))

    def train(self, batch: LessonBatch, step: int, is_row: bool) -> UpdateResult:
        """Update the teacher on its completions, then the student on new ones of the teacher; or only the student."""
        config, is_alone = self.config, self.config.method == STUDENT_ONLY
        metrics: dict[str, Tensor] = {}
        nonfinite_names: list[list[str]] = [[] for _ in batch.task_rewards]
        update = self._reinforce_student if is_alone else self._update_teacher
        for index in range(config.student_steps if is_alone else config.teacher_steps):
            names, columns = update(
                self._sample_batch((step, _TEACHER_DRAWS, index), config.group_size) if index else batch
            )
            nonfinite_names = merge_names(nonfinite_names, names)
            metrics |= columns
        for index in range(0 if is_alone else config.student_steps):
            names, columns = self._imitate(self._sample_batch((step, _STUDENT_DRAWS, index), 1))
            nonfinite_names = merge_names(nonfinite_names, names)
            metrics |= columns
        return UpdateResult(metrics, nonfinite_names)

    def _reinforce_student(self, batch: LessonBatch) -> tuple[list[list[str]], dict[str, Tensor]]:
        """Take one GRPO step on the task reward with completions of the student."""
        prompts = self.task.make_student_prompts(batch.inputs)
        loss, advantages = self._compute_grpo_loss(self.student, prompts, batch, batch.task_rewards)
        return descend(self.student_optimizer, loss), {
            "student_loss": loss.detach(),
            "task_reward": batch.task_rewards.mean(1),
            "adv_abs_mean": advantages.abs().mean(1),
            "mixed_group_rate": self._compute_mixed_rate(batch.task_rewards),
        }

    def _update_teacher(self, batch: LessonBatch) -> tuple[list[list[str]], dict[str, Tensor]]:
        """Take one step of the teacher; the student only judges its completions."""
        config = self.config
        with torch.no_grad():
            student_log_probs = self._compute_student_log_probs(batch)
            gaps = compute_surprise_gaps(student_log_probs, batch.actions)
            surprisal = -select_log_probs(student_log_probs, batch.actions)
        penalty = compute_spike_penalty(gaps, config.spike_beta)
        learnability = compute_learnability(penalty, config.learnability_lambda)
        penalized = batch.task_rewards - config.learnability_lambda * surprisal.mean(-1)
        rewards = batch.task_rewards * learnability if config.method == "PedagogicalRL" else penalized
        prompts = self.task.make_teacher_prompts(batch.inputs)
        loss, advantages = self._compute_grpo_loss(self.teacher, prompts, batch, rewards)
        return descend(self.teacher_optimizer, loss), {
            "teacher_loss": loss.detach(),
            "teacher_reward": rewards.mean(1),
            "task_reward": batch.task_rewards.mean(1),
            "learnability": learnability.mean(1),
            "spike_penalty": penalty.mean(1),
            "avg_surprise_gap": gaps.mean((1, 2)),
            "max_surprise_gap": gaps.amax(2).mean(1),
            "avg_student_surprisal": surprisal.mean((1, 2)),
            "adv_abs_mean": advantages.abs().mean(1),
            "mixed_group_rate": self._compute_mixed_rate(batch.task_rewards),
        }

    def _imitate(self, lessons: LessonBatch) -> tuple[list[list[str]], dict[str, Tensor]]:
        """Take one step of the student on the teacher's completions, right or wrong."""
        config = self.config
        log_probs = self._compute_student_log_probs(lessons)
        log_probs, is_gated = select_log_probs(log_probs, lessons.actions), config.method == "PedagogicalRL"
        gates = compute_gate(log_probs, config.gate_kappa, config.gate_gamma)
        gate = gates if is_gated else torch.ones_like(log_probs)
        loss = gated_imitation_loss(log_probs, gate)
        return descend(self.student_optimizer, loss), {
            "student_loss": loss.detach(),
            "gate_mean": gate.detach().mean((1, 2)),
            "lesson_log_prob_mean": log_probs.detach().mean((1, 2)),
            "lesson_task_reward": lessons.task_rewards.mean(1),
        }

    def _compute_grpo_loss(
        self, models: TransformerEnsemble, prompts: Tensor, batch: LessonBatch, rewards: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute GRPO's loss [E] and advantages [E, B] of `batch` with `rewards` [E, B]. prompts: [E, B, L]."""
        group_ids = torch.arange(rewards.numel()) // self.config.group_size
        advantages = group_advantages(rewards.flatten(), group_ids, True).view(rewards.shape)
        log_probs = select_log_probs(self._compute_log_probs(models, prompts, batch.actions), batch.actions)
        clip = self.config.clip_epsilon
        token_advantages = advantages[..., None].expand(log_probs.shape)
        policy_loss = clipped_policy_loss(log_probs, batch.behavior_log_probs, token_advantages, clip, clip)
        return policy_loss.loss.mean((1, 2)), advantages

    def _compute_log_probs(self, models: TransformerEnsemble, prompts: Tensor, actions: Tensor) -> Tensor:
        """Compute log-probabilities [E, B, T, A] at the positions of actions [E, B, T] after prompts [E, B, L]."""
        tokens = torch.cat((prompts, actions[..., :-1]), dim=-1)
        return models.compute_logits(tokens, actions.shape[-1]).log_softmax(-1)

    def _compute_student_log_probs(self, batch: LessonBatch) -> Tensor:
        return self._compute_log_probs(self.student, self.task.make_student_prompts(batch.inputs), batch.actions)

    def _compute_mixed_rate(self, task_rewards: Tensor) -> Tensor:
        """Compute the fraction [E] of groups that contain both right and wrong answers."""
        groups = task_rewards.unflatten(1, (-1, self.config.group_size))
        return (groups.amax(-1) != groups.amin(-1)).float().mean(1)


make_trainer = partial(EnsembleTrainer, make_algorithm=PedagogyAlgorithm)
"""Make a trainer of a configuration with a teacher and a student per seed."""
TRAINER = TrainerFamily(make_trainer)
