"""The sequence tasks: prompts, rollouts in groups or with candidates, teacher-forced passes, greedy evaluation."""

import torch
from torch import Tensor

from trainable.sandbox.batch.members import Streams
from trainable.sandbox.batch.reward_noise import corrupted, sequence_feature
from trainable.sandbox.batch.rollouts import Candidates, Rollouts
from trainable.sandbox.config.settings import UpdateRuleConfig
from trainable.sandbox.models.decoding import Continuations, continuations, drawn, taken
from trainable.sandbox.models.transformer import Transformers, TransformerShape, first_transformers
from trainable.sandbox.tasks.groups import all_kept, kept_rollouts, spread_groups
from trainable.sandbox.tasks.sequence_rewards import SEQUENCE_KINDS, sequence_rewards
from trainable.sandbox.tasks.task import Models

EVALUATED_PROMPTS = 1000
EVALUATED_AT_ONCE = 250  # of each member, so that what one token needs stays in the processor's cache


class SequenceTask:
    """One of the five sequence tasks (see `trainable.sandbox.tasks.task.Task`). T is seq_len, tokens are actions."""

    def __init__(self, config: UpdateRuleConfig) -> None:
        self.config = config
        self.kind = SEQUENCE_KINDS[config.task]
        self.separator = config.vocab_size
        self.scored = torch.ones(config.seq_len, dtype=torch.bool)
        if config.task == "masked_reversal":
            self.scored[: config.seq_len - config.score_len] = False

    @property
    def actions(self) -> int:
        """Content tokens, the separator, and a task's own."""
        return self.config.vocab_size + 1 + self.kind.own_tokens

    def make_models(self, streams: Streams) -> Transformers:
        """First weights of every member."""
        config = self.config
        return first_transformers(
            TransformerShape(self.actions, config.d_model, config.nhead, config.num_layers, 2 * config.seq_len + 1),
            streams,
        )

    def sample(self, models: Models, streams: Streams, step: int) -> Rollouts:
        """One batch: batch_size rollouts, of as many prompts, or of batch_size / group_size for grouped rules."""
        config, own = self.config, _own(models)
        each = config.group_size if config.rule.has_groups else 1
        prompts = self._prompts(streams, "sandbox_prompts", step, config.batch_size // each)
        uniforms = streams.uniform("sandbox_samples", step, shape=(config.batch_size, config.seq_len))
        went_on = continuations(own, self._observed(prompts), config.seq_len, uniforms, each)
        prompts = prompts.repeat_interleave(each, dim=1)
        rewards = self._noisy_rewards(prompts, went_on.tokens, streams, step)
        keep, scalars = all_kept(rewards)
        if config.rule.has_groups:
            keep, scalars = kept_rollouts(spread_groups(rewards, each), each)
        return Rollouts(
            observations=torch.cat((self._observed(prompts), went_on.tokens), dim=-1),
            actions=went_on.tokens,
            labels=self._labels(prompts),
            rewards=rewards,
            actor_log_probs=taken(went_on.log_probs, went_on.tokens),
            actor_baseline=went_on.log_probs.exp().square().sum(-1),
            keep=keep,
            age=torch.zeros(len(rewards), dtype=torch.int64),
            group_size=each if config.rule.has_groups else None,
            score_mask=None if self.scored.all() else self.scored.expand(*rewards.shape, -1),
            expected_reward=self._expected_reward(own, prompts),
            candidates=self._candidates(went_on, prompts, streams, step) if config.rule.has_candidates else None,
            scalars=scalars,
        )

    def log_probs(self, models: Models, rollouts: Rollouts) -> Tensor:
        """[E, B, T, A] log-probabilities after the actor's own tokens; with gradients."""
        return self.raw_logits(models, rollouts).log_softmax(-1)

    def raw_logits(self, models: Models, rollouts: Rollouts) -> Tensor:
        """[E, B, T, A] logits of the same positions; with gradients."""
        return _own(models).logits(rollouts.observations[..., :-1], self.config.seq_len)

    def oracle_log_probs(self, models: Models, rollouts: Rollouts) -> Tensor:
        """[E, B, T, A] log-probabilities after the right tokens; with gradients."""
        prompts = rollouts.observations[..., : self.config.seq_len]
        return self._oracle_log_probs(_own(models), prompts)

    def evaluate(self, models: Models, streams: Streams, step: int) -> dict[str, Tensor]:
        """Greedy answers to EVALUATED_PROMPTS fresh prompts of each member: errors, entropy, separators."""
        prompts = self._prompts(streams, "sandbox_evaluation", step, EVALUATED_PROMPTS)
        parts = [
            continuations(_own(models), some, self.config.seq_len)
            for some in self._observed(prompts).split(EVALUATED_AT_ONCE, dim=1)
        ]
        tokens, log_probs = (torch.cat(part, dim=1) for part in zip(*parts, strict=True))
        right = tokens == self._labels(prompts)
        whole = self.kind.parts is not None or self.config.binary_reward
        scored = right[..., self.scored]
        columns = {
            "test_error": _share(~(scored.all(-1) if whole else scored)),
            "entropy": -(log_probs.exp() * log_probs).sum(-1).mean((1, 2)),
            "greedy_separator_rate": _share(tokens == self.separator),
        }
        if not self.scored.all():
            columns["test_error_unscored"] = _share(~right[..., ~self.scored])
        if self.kind.parts is not None:
            columns["chain_reward"] = self._rewards(right).mean(1)
        return columns

    def _prompts(self, streams: Streams, purpose: str, step: int, rows: int) -> Tensor:
        """Prompts [E, rows, H]; of fewer rows, they are the first ones of more."""
        return streams.integers(purpose, step, below=self.config.vocab_size, shape=(rows, self.config.seq_len))

    def _observed(self, prompts: Tensor) -> Tensor:
        return torch.cat((prompts, torch.full_like(prompts[..., :1], self.separator)), dim=-1)

    def _labels(self, prompts: Tensor) -> Tensor:
        return self.kind.labels(prompts, self.config.vocab_size)

    def _rewards(self, right: Tensor) -> Tensor:
        return sequence_rewards(self.kind, right, self.scored, self.config.binary_reward)

    def _noisy_rewards(self, prompts: Tensor, tokens: Tensor, streams: Streams, step: int) -> Tensor:
        config, right = self.config, tokens == self._labels(prompts)
        rewards, mode = self._rewards(right), config.reward_noise_mode
        if mode == "none":
            return rewards
        uniforms = streams.uniform("sandbox_noise", step, shape=(config.batch_size, 2))
        featured = sequence_feature(mode, prompts, tokens, self.separator)
        return corrupted(rewards, uniforms, mode, config.reward_noise, right[..., self.scored].all(-1), featured)

    def _oracle_log_probs(self, models: Transformers, prompts: Tensor) -> Tensor:
        sequences = torch.cat((self._observed(prompts), self._labels(prompts)), dim=-1)
        return models.logits(sequences[..., :-1], self.config.seq_len).log_softmax(-1)

    @torch.no_grad()
    def _expected_reward(self, models: Transformers, prompts: Tensor) -> Tensor | None:
        """[E, B] probability of the right answer, where that is the mean reward of an ungrouped batch."""
        config = self.config
        plain = config.task == "token_reversal" and config.binary_reward and config.reward_noise_mode == "none"
        if not plain or config.rule.has_groups:
            return None
        return taken(self._oracle_log_probs(models, prompts), self._labels(prompts)).sum(-1).exp()

    def _candidates(self, went_on: Continuations, prompts: Tensor, streams: Streams, step: int) -> Candidates:
        """group_size next tokens at every prefix of the rollouts, each worth whether it is right and scored.

        The distribution at each prefix is known from the rollout itself, so no prefix is read again.
        """
        others = (self.config.batch_size, self.config.seq_len, self.config.group_size - 1)
        uniforms = streams.uniform("sandbox_samples", step, 1, shape=others)
        drawn_too = drawn(went_on.log_probs[..., None, :], uniforms)
        actions = torch.cat((went_on.tokens[..., None], drawn_too), dim=-1)
        right = (actions == self._labels(prompts)[..., None]) & self.scored[:, None]
        return Candidates(actions, went_on.log_probs.gather(-1, actions), right.float())


def _share(wrong: Tensor) -> Tensor:
    """[E] share of True among [E, ...]."""
    return wrong.flatten(1).float().mean(-1)


def _own(models: Models) -> Transformers:
    assert isinstance(models, Transformers), "models are those of make_models"
    return models
