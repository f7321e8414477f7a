"""Statistics of episodes: results of validations and tests, and summaries of training rollouts and batches."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainable.algo.losses import estimate_kl
from trainable.algo.reductions import masked_mean
from trainable.config.own_parts import pin_parts
from trainable.config.run_config import RunConfig
from trainable.envs.environment import Level, LevelSource
from trainable.ppo.step_record import BatchSummary, RolloutSummary, Validation
from trainable.ppo.update import Targets
from trainable.rollout.batch import Batch
from trainable.rollout.episode import Episode
from trainable.runs.episode_lines import RecordedEpisode


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
    """Number the symmetry classes of levels, given by their keys, in order of first appearance.

    Example:
        >>> number_classes([b"x", b"y", b"x"])
        [0, 1, 0]
    """
    class_numbers: dict[bytes, int] = {}
    return [class_numbers.setdefault(key, len(class_numbers)) for key in keys]


def summarize_rollout(episodes: Sequence[Episode], group_size: int) -> RolloutSummary:
    """Average over all episodes of a step, before the filter. The episodes of a group are consecutive."""
    num_episodes, num_turns = len(episodes), sum(len(episode.texts) for episode in episodes)
    success_by_group = reshape_by_group([float(episode.success) for episode in episodes], group_size)
    return RolloutSummary(
        train_success=float(success_by_group.mean()),
        train_pass_at_group=float((success_by_group.sum(1) > 0).float().mean()),
        train_reward=sum(episode.score for episode in episodes) / num_episodes,
        train_actions=sum(episode.actions for episode in episodes) / num_episodes,
        train_invalid_turns=sum(episode.invalid_turns for episode in episodes) / num_turns,
        train_response_tokens=sum(episode.response_tokens for episode in episodes) / num_episodes,
    )


def summarize_batch(
    batch: Batch, targets: Targets, episodes: Sequence[Episode], has_values: bool, has_entropies: bool = True
) -> BatchSummary:
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
    return BatchSummary(
        batch_size=len(batch.lengths),
        trained_tokens=int(mask.sum()),
        padding_fraction=1 - float(batch.count_needed_tokens().sum()) / mask.numel(),
        # Over the sampled tokens of the episodes instead of the batch, so that copies do not count.
        entropy=sum(float(e.entropies.sum()) for e in episodes) / sum(e.response_tokens for e in episodes)
        if has_entropies
        else None,
        kl_to_reference=kl,
        value_mean=value_mean,
        explained_variance=explained_variance,
    )


def estimate_mean_kl(batch: Batch, ref_logprobs: Tensor) -> float:
    """Estimate the KL of the sampling policy to the reference, in nats, as the mean of k3 over the sampled tokens.

    The estimator is k3 whichever KL the run trains with, so that runs can be compared. ref_logprobs: (B, T).
    """
    return float(masked_mean(estimate_kl(batch.logprobs, ref_logprobs, "low_var_kl"), batch.mask))


def summarize_validation(evaluations: Sequence[Evaluation], is_unseen: Sequence[bool]) -> Validation | None:
    """Summarize a validation. `evaluations` is empty (the result is None), or sampled, or sampled and greedy.

    is_unseen: for each episode, whether its level differs from every training level.
    """
    if not evaluations:
        return None
    sampled, *greedy = evaluations
    return Validation(
        val_success=sampled.success,
        val_success_unseen=sampled.compute_success_where(is_unseen),
        val_reward=sampled.score,
        val_invalid_turns=sampled.invalid_turns,
        val_kl_to_reference=sampled.kl_to_reference,
        val_greedy_success=greedy[0].success if greedy else None,
    )


def reshape_by_group(values: Sequence[float], group_size: int) -> Tensor:
    """Arrange values of consecutive episodes in a (P, G) float32 tensor."""
    return torch.tensor(values, dtype=torch.float32).view(-1, group_size)


def make_evaluation_key(config: RunConfig, weights: Mapping[str, Tensor], reference: str | None) -> str:
    """Hash everything that affects the validation of an untrained policy, with SHA-256.

    That is the weights of the policy, the seed, the game with its levels, and the settings of the sampler. Settings of
    training do not matter, except for the weights of turns that are recorded with episodes of trees, so all arms of a
    study over losses have the same key.

    weights: the policy's tensors by name, on the CPU. reference: fingerprint of the reference model for a measured KL,
    or None if the untrained policy is the reference.
    """
    settings = pin_parts(config).model_dump(mode="json", include={"seed", "env", "model", "rollout"})
    # If the policy is the reference, there is no KL to measure.
    kl_source = [config.measures_val_kl, reference] if reference else None
    # Recorded episodes of trees include the weights of their turns.
    tree_settings = (
        [config.algorithm.tree_weighting, config.algorithm.train_children] if config.env.kind.has_trees else None
    )
    choices = [settings, kl_source, config.trainer.log_val_generations, tree_settings]
    digest = hashlib.sha256(json.dumps(choices, sort_keys=True).encode())
    for name, tensor in sorted(weights.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
