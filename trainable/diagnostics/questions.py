"""What can be asked of a policy that is not trained any more: what it said, how sure it was, what it expected."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from trainable.models.codec import Codec
from trainable.ppo.trainer import PPOTrainer
from trainable.ppo.update import TokenFunction, compute_at_trained_tokens
from trainable.rollout.batch import Batch, collate
from trainable.rollout.episode import Episode


class ScoredToken(NamedTuple):
    """One sampled token of an episode.

    logprob: nats, under the policy as it is now, at the training temperature. entropy: nats, of the distribution that
    it was sampled from. value: what the critic expects of the rest, in reward; None without a critic.
    """

    turn: int
    token: int
    text: str
    logprob: float
    entropy: float
    value: float | None


def format_transcript(episode: Episode, codec: Codec) -> str:
    """The episode as it was read and sampled, with how it ended: one text for a person."""
    (text,) = codec.decode([episode.tokens])
    rewards = ", ".join(f"{reward:g}" for reward in episode.turn_rewards)
    return (
        f"level {episode.level_seed}: {episode.stop_reason.value} after {episode.actions} actions, "
        f"score {episode.score:g} (turns: {rewards})\n{text}"
    )


def score_tokens(trainer: PPOTrainer, episodes: Sequence[Episode]) -> list[list[ScoredToken]]:
    """The sampled tokens of each episode, asked of the trainer's policy and critic; nothing is changed."""
    batch = Batch(*(tensor.to(trainer.device) for tensor in collate(episodes)))
    rows_per_pass = trainer.config.rollout.log_prob_micro_batch_size_per_gpu
    logprob_function = TokenFunction.for_logprobs(trainer.model, trainer.config.rollout.temperature)
    logprobs, values = (
        compute_at_trained_tokens(batch, rows_per_pass, logprob_function).cpu(),
        trainer.compute_values(batch),
    )
    return [
        [
            ScoredToken(
                int(episode.turns[place]),
                int(episode.tokens[place]),
                text,
                float(logprobs[number, place]),
                float(episode.entropies[place]),
                None if values is None else float(values[number, place]),
            )
            for place, text in _list_sampled_tokens(episode, trainer.codec)
        ]
        for number, episode in enumerate(episodes)
    ]


def _list_sampled_tokens(episode: Episode, codec: Codec) -> list[tuple[int, str]]:
    positions = torch.from_numpy(episode.mask).nonzero().squeeze(-1).tolist()
    return list(zip(positions, codec.decode([[int(episode.tokens[place])] for place in positions]), strict=True))
