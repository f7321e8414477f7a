"""Transcripts of episodes with log-prob, entropy and value of each sampled token, to inspect a trained policy."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from trainable.models.codec import Codec
from trainable.ppo.trainer import PPOTrainer
from trainable.ppo.update import TokenFunction, compute_at_trained_tokens
from trainable.rollout.batch import collate
from trainable.rollout.episode import Episode


class ScoredToken(NamedTuple):
    """One sampled token of an episode.

    logprob: in nats, under the current policy, at the training temperature. entropy: in nats, of the distribution that
    the token was sampled from; NaN in a run without entropies (see `RolloutConfig.has_entropies`). value: the critic's
    estimate of the remaining reward; None without a critic.
    """

    turn: int
    token: int
    text: str
    logprob: float
    entropy: float
    value: float | None


def format_transcript(episode: Episode, codec: Codec) -> str:
    """Format an episode as readable text: how it ended, its prompts and its replies."""
    (text,) = codec.decode([episode.tokens])
    rewards = ", ".join(f"{reward:g}" for reward in episode.turn_rewards)
    return (
        f"level {episode.level_seed}: {episode.stop_reason.value} after {episode.actions} actions, "
        f"score {episode.score:g} (turns: {rewards})\n{text}"
    )


def score_tokens(trainer: PPOTrainer, episodes: Sequence[Episode]) -> list[list[ScoredToken]]:
    """Score the sampled tokens of each episode with the trainer's policy and critic, without changing the trainer."""
    batch = collate(episodes).to(trainer.device)
    rows_per_pass = trainer.config.rollout.log_prob_micro_batch_size_per_gpu
    logprob_function = TokenFunction.for_logprobs(trainer.model, trainer.config.rollout.temperature)
    logprobs = compute_at_trained_tokens(batch, rows_per_pass, logprob_function).cpu()
    values = trainer.compute_values(batch)
    return [
        [
            ScoredToken(
                int(episode.turns[position]),
                int(episode.tokens[position]),
                text,
                float(logprobs[number, position]),
                float(episode.entropies[position]),
                None if values is None else float(values[number, position]),
            )
            for position, text in _list_sampled_tokens(episode, trainer.codec)
        ]
        for number, episode in enumerate(episodes)
    ]


def _list_sampled_tokens(episode: Episode, codec: Codec) -> list[tuple[int, str]]:
    positions = torch.from_numpy(episode.mask).nonzero().squeeze(-1).tolist()
    texts = codec.decode([[int(episode.tokens[position])] for position in positions])
    return list(zip(positions, texts, strict=True))
