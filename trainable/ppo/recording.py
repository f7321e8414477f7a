"""Record episodes as texts: some of each validation, and some that were trained on, with the advantage of each turn."""

import math
from collections.abc import Sequence

from trainable.algo.trees import compute_tree_weights
from trainable.config.sections import AlgorithmConfig
from trainable.models.codec import Codec
from trainable.ppo.targets import PreparedBatch
from trainable.rollout.batch import collate
from trainable.rollout.episode import Episode
from trainable.runs.episode_lines import MAX_ANSWER_CHARS, RecordedChild, RecordedEpisode, RecordedTurn

NumbersPerTurn = list[float | None]
"""A number for each turn of a rollout, or None for turns without one."""


def record_episode(
    episode: Episode,
    step: int,
    codec: Codec,
    settings: AlgorithmConfig | None = None,
    advantages: Sequence[NumbersPerTurn] | None = None,
) -> RecordedEpisode:
    """Record the texts of an episode and its children, decoded from their tokens.

    step: training steps before the validation, or the step that trained on the episode. settings: in a game of trees,
    how the turns of a tree are weighted; None in other games. advantages: for an episode that was trained on, the
    advantage of each turn of each rollout.
    """
    nothing: NumbersPerTurn = [None] * max(len(rollout.texts) for rollout in episode.rollouts)
    weights = _compute_turn_weights(episode, settings) if settings else [nothing] * len(episode.rollouts)
    turns, *children_turns = (
        _record_turns(rollout, codec, *numbers)
        for rollout, *numbers in zip(
            episode.rollouts, weights, advantages or [nothing] * len(episode.rollouts), strict=True
        )
    )
    return RecordedEpisode(
        step=step,
        level=episode.level_seed,
        turns=turns,
        success=episode.success,
        stop_reason=episode.stop_reason.value,
        score=episode.score,
        children=tuple(
            RecordedChild(child.parent_turn, turns, child.stop_reason.value, _cut(child.answer))
            for child, turns in zip(episode.children, children_turns, strict=True)
        ),
        answer=_cut(episode.answer),
        evidence=_cut("\n".join(episode.evidence) if episode.evidence else None),
    )


def record_trained_episodes(
    episodes: Sequence[Episode],
    prepared: PreparedBatch,
    count: int,
    step: int,
    codec: Codec,
    settings: AlgorithmConfig | None,
) -> list[RecordedEpisode]:
    """Record the first `count` episodes that a step trains on, with the mean advantage of the tokens of each turn.

    episodes: the episodes that the filter kept, with which `prepared` begins, in this order. step, settings: see
    `record_episode`. Rollouts that are not in the batch, such as children that are not trained, have no advantages.
    """
    recorded_episodes, numbers = [], dict[int, int]()
    for place, episode in enumerate(episodes[:count]):
        rollout = numbers[episode.group] = numbers.get(episode.group, -1) + 1
        advantages = _average_advantages(prepared, place, episode)
        recorded = record_episode(episode, step, codec, settings, advantages)
        recorded_episodes.append(recorded._replace(rollout=rollout))
    return recorded_episodes


def _average_advantages(prepared: PreparedBatch, place: int, episode: Episode) -> list[NumbersPerTurn]:
    """Average the advantages over each turn, for all rollouts of the episode at `place` in the batch."""
    batch, advantages = prepared.batch, prepared.targets.advantages
    rows = (batch.tree_ids == place).nonzero().squeeze(-1).tolist()
    means: list[NumbersPerTurn] = []
    for number, rollout in enumerate(episode.rollouts):
        turns = range(len(rollout.texts))
        if number >= len(rows):
            means.append([None] * len(turns))
            continue
        row = rows[number]
        of_turns = (advantages[row][batch.mask[row] & (batch.turns[row] == turn)] for turn in turns)
        values = [float(of_turn.mean()) for of_turn in of_turns]
        # A non-finite advantage only skips an update, so the run goes on, but a line cannot contain such a number.
        means.append([value if math.isfinite(value) else None for value in values])
    return means


def _record_turns(
    rollout: Episode, codec: Codec, weights: NumbersPerTurn, advantages: NumbersPerTurn
) -> tuple[RecordedTurn, ...]:
    turns = range(len(rollout.texts))
    observations = codec.decode_all([rollout.tokens[(rollout.turns == turn) & ~rollout.mask] for turn in turns])
    replies = codec.decode_all([rollout.tokens[(rollout.turns == turn) & rollout.mask] for turn in turns])
    return tuple(
        RecordedTurn(
            observation=observations[turn],
            reply=replies[turn],
            actions=rollout.turn_actions[turn],
            reward=float(rollout.turn_rewards[turn]),
            valid=rollout.turn_validity[turn],
            weight=weights[turn],
            advantage=advantages[turn],
        )
        for turn in turns
    )


def _cut(text: str | None) -> str | None:
    if text is None or len(text) <= MAX_ANSWER_CHARS:
        return text
    ending = f" ... ({len(text):,} characters)"
    return text[: MAX_ANSWER_CHARS - len(ending)] + ending


def _compute_turn_weights(episode: Episode, settings: AlgorithmConfig) -> list[NumbersPerTurn]:
    """Compute the weight of each turn of each rollout in the loss of a tree."""
    batch = collate([episode])
    weights = compute_tree_weights(
        batch.mask, batch.turns, batch.tree_ids, batch.is_root, settings.tree_weighting, settings.train_children
    )
    return [
        [float(row_weights[row_turns == turn].sum()) for turn in range(len(rollout.texts))]
        for rollout, row_weights, row_turns in zip(episode.rollouts, weights, batch.turns, strict=True)
    ]
