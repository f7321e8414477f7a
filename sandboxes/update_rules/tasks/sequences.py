"""Sequence tasks: prompts, rollouts in groups or with candidates, teacher-forced passes, greedy evaluation."""

import torch
from torch import Tensor

from sandboxes.toys.decoding import Completions, decode_greedily, generate_completions, sample_actions, select_log_probs
from sandboxes.toys.rngs import MemberRngs
from sandboxes.toys.sequence_rewards import SEQUENCE_KINDS, compute_sequence_rewards
from sandboxes.toys.settings import EVAL_PROMPTS
from sandboxes.toys.transformer import TransformerEnsemble, TransformerShape, init_transformer_ensemble
from sandboxes.update_rules.config.settings import UpdateRuleConfig
from sandboxes.update_rules.rollouts import Candidates, Rollouts
from sandboxes.update_rules.tasks.rewards import (
    detect_sequence_feature,
    filter_groups,
    find_varied_groups,
    make_noisy_rewards,
)


class SequenceTask:
    """One of the five sequence tasks (see `update_rules.rollouts.Task`). T is seq_len, tokens are actions."""

    def __init__(self, config: UpdateRuleConfig) -> None:
        self.config = config
        self.kind = SEQUENCE_KINDS[config.task]
        self.separator = config.vocab_size
        self.score_mask = torch.ones(config.seq_len, dtype=torch.bool)
        if config.task == "masked_reversal":
            self.score_mask[: config.seq_len - config.score_len] = False

    def make_models(self, rngs: MemberRngs) -> TransformerEnsemble:
        """Initialize the model of each member."""
        config = self.config
        num_actions = config.vocab_size + 1 + self.kind.num_extra_tokens
        shape = TransformerShape(
            num_actions, config.d_model, config.nhead, config.num_layers, max_positions=2 * config.seq_len + 1
        )
        return init_transformer_ensemble(shape, rngs)

    def sample(self, models: TransformerEnsemble, rngs: MemberRngs, step: int) -> Rollouts:
        """Sample a batch: batch_size rollouts of as many prompts, or batch_size / group_size for grouped rules."""
        config = self.config
        samples_per_prompt = config.samples_per_prompt
        prompts = self._sample_prompts(rngs, "sandbox_prompts", step, config.batch_size // samples_per_prompt)
        uniforms = rngs.uniform("sandbox_samples", step, shape=(config.batch_size, config.seq_len))
        completions = generate_completions(
            models, self._append_separator(prompts), config.seq_len, uniforms, samples_per_prompt
        )
        prompts = prompts.repeat_interleave(samples_per_prompt, dim=1)
        is_correct = completions.tokens == self._make_labels(prompts)
        is_solved = is_correct[..., self.score_mask].all(-1)
        has_feature = detect_sequence_feature(config.reward_noise_mode, prompts, completions.tokens, self.separator)
        rewards = make_noisy_rewards(config, rngs, step, self._compute_rewards(is_correct), is_solved, has_feature)
        is_mixed = find_varied_groups(rewards, samples_per_prompt) if config.rule.has_groups else None
        keep_mask, scalars = filter_groups(rewards, is_mixed)
        candidates = self._sample_candidates(completions, prompts, rngs, step) if config.rule.has_candidates else None
        return Rollouts(
            observations=torch.cat((self._append_separator(prompts), completions.tokens), dim=-1),
            actions=completions.tokens,
            labels=self._make_labels(prompts),
            rewards=rewards,
            behavior_log_probs=select_log_probs(completions.log_probs, completions.tokens),
            behavior_baseline=completions.log_probs.exp().square().sum(-1),
            keep_mask=keep_mask,
            age=torch.zeros(len(rewards), dtype=torch.int64),
            group_size=samples_per_prompt if config.rule.has_groups else None,
            score_mask=None if self.score_mask.all() else self.score_mask.expand(*rewards.shape, -1),
            expected_reward=self._compute_expected_reward(models, prompts),
            candidates=candidates,
            scalars=scalars,
        )

    def compute_logits(self, models: TransformerEnsemble, rollouts: Rollouts) -> Tensor:
        """Compute logits [E, B, T, A] at the sampled positions, with gradients."""
        return models.compute_logits(rollouts.observations[..., :-1], self.config.seq_len)

    def compute_oracle_log_probs(self, models: TransformerEnsemble, rollouts: Rollouts) -> Tensor:
        """Compute log-probabilities [E, B, T, A] given the correct tokens, with gradients."""
        prompts = rollouts.observations[..., : self.config.seq_len]
        return self._compute_label_log_probs(models, prompts)

    def evaluate(self, models: TransformerEnsemble, rngs: MemberRngs, step: int) -> dict[str, Tensor]:
        """Compute errors, entropy and separators of greedy answers to EVAL_PROMPTS new prompts per member."""
        prompts = self._sample_prompts(rngs, "sandbox_evaluation", step, EVAL_PROMPTS)
        tokens, log_probs = decode_greedily(models, self._append_separator(prompts), self.config.seq_len)
        is_correct = tokens == self._make_labels(prompts)
        # If the reward judges whole sequences, so does the error.
        is_sequence_error = self.kind.make_chain_spans is not None or self.config.binary_reward
        scored_correct = is_correct[..., self.score_mask]
        columns = {
            "test_error": _compute_fraction(~(scored_correct.all(-1) if is_sequence_error else scored_correct)),
            "entropy": -(log_probs.exp() * log_probs).sum(-1).mean((1, 2)),
            "greedy_separator_rate": _compute_fraction(tokens == self.separator),
        }
        if not self.score_mask.all():
            columns["test_error_unscored"] = _compute_fraction(~is_correct[..., ~self.score_mask])
        if self.kind.make_chain_spans is not None:
            columns["chain_reward"] = self._compute_rewards(is_correct).mean(1)
        return columns

    def _sample_prompts(self, rngs: MemberRngs, purpose: str, step: int, num_prompts: int) -> Tensor:
        """Sample prompts [E, num_prompts, H]. Fewer prompts are a prefix of more, so grouped rules share them."""
        return rngs.integers(purpose, step, high=self.config.vocab_size, shape=(num_prompts, self.config.seq_len))

    def _append_separator(self, prompts: Tensor) -> Tensor:
        return torch.cat((prompts, torch.full_like(prompts[..., :1], self.separator)), dim=-1)

    def _make_labels(self, prompts: Tensor) -> Tensor:
        return self.kind.make_labels(prompts, self.config.vocab_size)

    def _compute_rewards(self, is_correct: Tensor) -> Tensor:
        return compute_sequence_rewards(self.kind, is_correct, self.score_mask, self.config.binary_reward)

    def _compute_label_log_probs(self, models: TransformerEnsemble, prompts: Tensor) -> Tensor:
        sequences = torch.cat((self._append_separator(prompts), self._make_labels(prompts)), dim=-1)
        return models.compute_logits(sequences[..., :-1], self.config.seq_len).log_softmax(-1)

    @torch.no_grad()
    def _compute_expected_reward(self, models: TransformerEnsemble, prompts: Tensor) -> Tensor | None:
        """Compute the probability [E, B] of the correct answer if it is the mean reward (ungrouped), else None."""
        config = self.config
        is_noise_free = config.task == "token_reversal" and config.binary_reward and config.reward_noise_mode == "none"
        # A fractional reward also counts partly correct answers, and a grouped rule uses its group for comparison.
        if not is_noise_free or config.rule.has_groups:
            return None
        log_probs = self._compute_label_log_probs(models, prompts)
        return select_log_probs(log_probs, self._make_labels(prompts)).sum(-1).exp()

    def _sample_candidates(self, completions: Completions, prompts: Tensor, rngs: MemberRngs, step: int) -> Candidates:
        """Sample group_size next tokens at every prefix of the rollouts, with reward 1 if correct at a scored position.

        The distribution at each prefix is known from the rollout, so this needs no forward pass.
        """
        # Candidate 0 is the sampled token. The others have a separate stream (index 1), so that every rule with the
        # same seed samples the same sequences.
        uniform_shape = (self.config.batch_size, self.config.seq_len, self.config.group_size - 1)
        uniforms = rngs.uniform("sandbox_samples", step, 1, shape=uniform_shape)
        extra_actions = sample_actions(completions.log_probs[..., None, :], uniforms)
        actions = torch.cat((completions.tokens[..., None], extra_actions), dim=-1)
        is_correct = (actions == self._make_labels(prompts)[..., None]) & self.score_mask[:, None]
        return Candidates(actions, completions.log_probs.gather(-1, actions), is_correct.float())


def _compute_fraction(mask: Tensor) -> Tensor:
    """Compute the fraction [E] of True in mask [E, ...]."""
    return mask.flatten(1).float().mean(-1)
