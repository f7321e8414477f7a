"""Statistics of episodes: results of validations and tests, summaries of training rollouts and batches, and texts."""

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor

from trainable.algo.losses import estimate_kl
from trainable.algo.reductions import compute_tree_weights, masked_mean
from trainable.config.sections import AlgorithmConfig
from trainable.envs.environment import Level, LevelSource
from trainable.models.codec import Codec
from trainable.ppo.targets import PreparedBatch
from trainable.ppo.update import Targets
from trainable.rollout.episode import Batch, Episode, collate, reshape_by_group
from trainable.runs.episode_lines import MAX_ANSWER_CHARS, RecordedChild, RecordedEpisode, RecordedTurn

Columns = dict[str, float | None]
"""Columns of a training step (`records.STEP_COLUMNS`). None: not measured in this step."""


class Evaluation(NamedTuple):
    """The result of playing all levels of a split. `to_line` makes its record for levels.jsonl.

    step: training steps before the evaluation. split: val or test. mode: sampled or greedy. levels: seed of each
    episode's level. clusters: for each episode, the index of its level's symmetry class. Levels that are equal up to
    symmetry form a cluster in confidence intervals. successes: whether each episode ended with success. score: mean
    score of the episodes. invalid_turns: fraction of turns that were invalid. kl_to_reference: KL to the reference in
    nats per token, or None if not measured. measures: means of the measures of the game. episodes: the episodes whose
    texts are recorded.
    """

    step: int
    split: str
    mode: str
    levels: tuple[int, ...]
    clusters: tuple[int, ...]
    successes: tuple[bool, ...]
    score: float
    invalid_turns: float
    kl_to_reference: float | None = None
    measures: Mapping[str, float] = MappingProxyType({})
    episodes: tuple[RecordedEpisode, ...] = ()

    @property
    def success(self) -> float:
        """Fraction of episodes that ended with success."""
        return sum(self.successes) / len(self.successes)

    def compute_success_where(self, is_selected: Sequence[bool]) -> float | None:
        """Compute the success rate of the episodes for which `is_selected` is True, or None if there are none."""
        selected = [success for success, is_in in zip(self.successes, is_selected, strict=True) if is_in]
        return sum(selected) / len(selected) if selected else None

    def to_line(self) -> dict[str, object]:
        """Make the record for levels.jsonl."""
        return {
            "step": self.step,
            "split": self.split,
            "mode": self.mode,
            "levels": self.levels,
            "clusters": self.clusters,
            "success": "".join("1" if success else "0" for success in self.successes),
        }


def make_evaluation(
    episodes: Sequence[Episode], step: int, split: str, mode: str, clusters: Sequence[int]
) -> Evaluation:
    """Summarize `episodes` as an evaluation. clusters: for each group, the index of its level's symmetry class."""
    num_turns = sum(len(episode.texts) for episode in episodes)
    return Evaluation(
        step=step,
        split=split,
        mode=mode,
        levels=tuple(episode.level_seed for episode in episodes),
        clusters=tuple(clusters[episode.group] for episode in episodes),
        successes=tuple(episode.success for episode in episodes),
        score=sum(episode.score for episode in episodes) / len(episodes),
        invalid_turns=sum(episode.invalid_turns for episode in episodes) / num_turns,
    )


def measure_episodes(
    source: LevelSource[Any], levels: Sequence[Level], episodes: Sequence[Episode]
) -> dict[str, float]:
    """Average each measure of the game over the episodes that have it. levels: of each group."""
    means: dict[str, float] = {}
    for name, measure in source.measures.items():
        values = [measure(levels[episode.group], list(chain(*episode.turn_actions))) for episode in episodes]
        values = [value for value in values if not math.isnan(value)]
        if values:
            means[name] = sum(values) / len(values)
    return means


def number_classes(keys: Sequence[bytes]) -> list[int]:
    """Number the symmetry classes of levels, given by their keys, in order of first appearance."""
    class_numbers: dict[bytes, int] = {}
    return [class_numbers.setdefault(key, len(class_numbers)) for key in keys]


def summarize_rollout(episodes: Sequence[Episode], group_size: int) -> Columns:
    """Average over all episodes of a step, before the filter. The episodes of a group are consecutive."""
    num_episodes, num_turns = len(episodes), sum(len(episode.texts) for episode in episodes)
    success_by_group = reshape_by_group([float(episode.success) for episode in episodes], group_size)
    return {
        "train_success": float(success_by_group.mean()),
        "train_pass_at_group": float((success_by_group.sum(1) > 0).float().mean()),
        "train_reward": sum(episode.score for episode in episodes) / num_episodes,
        "train_actions": sum(episode.actions for episode in episodes) / num_episodes,
        "train_invalid_turns": sum(episode.invalid_turns for episode in episodes) / num_turns,
        "train_response_tokens": sum(episode.response_tokens for episode in episodes) / num_episodes,
    }


def summarize_batch(
    batch: Batch, targets: Targets, episodes: Sequence[Episode], has_values: bool, has_entropies: bool = True
) -> Columns:
    """Summarize the batch before the update.

    episodes: the episodes that the filter kept; `batch` may also contain copies of some. has_values: whether the values
    in `targets` come from a critic (otherwise they are zeros). has_entropies: whether the episodes have entropies.
    """
    mask, kl, value_mean, explained_variance = batch.mask, None, None, None
    if targets.ref_logprobs is not None:
        kl = estimate_mean_kl(batch, targets.ref_logprobs)
    if has_values:
        values, returns = targets.values[mask], targets.returns[mask]
        value_mean, return_variance = float(values.mean()), float(returns.var())
        # Equal returns have no variance to explain, so the column stays empty.
        explained_variance = 1 - float((returns - values).var()) / return_variance if return_variance > 0 else None
    return {
        "batch_size": len(batch.lengths),
        "trained_tokens": int(mask.sum()),
        "padding_fraction": 1 - float(batch.count_needed_tokens().sum()) / mask.numel(),
        # Over the sampled tokens of the episodes instead of the batch, so that copies do not count.
        "entropy": sum(float(e.entropies.sum()) for e in episodes) / sum(e.response_tokens for e in episodes)
        if has_entropies
        else None,
        "kl_to_reference": kl,
        "value_mean": value_mean,
        "explained_variance": explained_variance,
    }


def estimate_mean_kl(batch: Batch, ref_logprobs: Tensor) -> float:
    """Estimate the KL of the sampling policy to the reference, in nats, as the mean of k3 over the sampled tokens.

    The estimator is k3 whichever KL the run trains with, so that runs can be compared. ref_logprobs: (B, T).
    """
    return float(masked_mean(estimate_kl(batch.logprobs, ref_logprobs, "low_var_kl"), batch.mask))


def summarize_validation(evaluations: Sequence[Evaluation], is_unseen: Sequence[bool]) -> Columns:
    """Summarize a validation on all levels. `evaluations` is empty, or sampled, or sampled and greedy.

    is_unseen: for each episode, whether its level differs from every training level.
    """
    if not evaluations:
        return {}
    sampled, *greedy = evaluations
    return {
        "val_success": sampled.success,
        "val_success_unseen": sampled.compute_success_where(is_unseen),
        "val_reward": sampled.score,
        "val_invalid_turns": sampled.invalid_turns,
        "val_kl_to_reference": sampled.kl_to_reference,
        "val_greedy_success": greedy[0].success if greedy else None,
    }


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
    observations, replies = (
        codec.decode([rollout.tokens[(rollout.turns == turn) & mask] for turn in turns], skip_special_tokens=False)
        for mask in (~rollout.mask, rollout.mask)
    )
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
