"""The collapse diagnostics of one training step: how much the policy's thoughts depend on their prompts.

Two samples of the step's episodes are scored, every thought after every prompt. `first_turn` has the thoughts of first
turns and the first prompts of their groups. `trajectory` has thoughts and prompts of all turns.
"""

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from trainable.algo.mutual_information import (
    compute_information_metrics,
    compute_retrieval_metrics,
    compute_shuffled_accuracy,
    smooth_zscores,
)
from trainable.backend.world import SINGLE_PROCESS, World
from trainable.config.sections import CollapseDetectionConfig
from trainable.config.seeds import make_rng
from trainable.diagnostics.cross_scores import compute_cross_scores
from trainable.models.codec import Codec
from trainable.models.interface import LanguageModel
from trainable.ppo.evaluation import number_classes
from trainable.rollout.episode import Episode
from trainable.runs.records import EXTRA_QUANTITIES

if TYPE_CHECKING:
    from trainable.ppo.trainer import PPOTrainer

END_OF_THOUGHT = "</think>"
Tokens = npt.NDArray[np.int64]


class Turn(NamedTuple):
    """A turn's prompt (T,) and thought (N,), which is empty for an invalid turn."""

    prompt: Tokens
    thought: Tokens

    @property
    def is_valid(self) -> bool:
        """Whether there is a thought."""
        return len(self.thought) > 0


class ThoughtPairs(NamedTuple):
    """N thoughts (rows) to be scored after M prompts (columns).

    own_columns: (N,) column of each thought's own prompt. classes: (M,) equal for columns with equal tokens.
    """

    prompts: tuple[Tokens, ...]
    thoughts: tuple[Tokens, ...]
    own_columns: npt.NDArray[np.int64]
    classes: npt.NDArray[np.int64]


def read_turns(episodes: Sequence[Episode], codec: Codec) -> list[list[Turn]]:
    """Split each episode into its turns.

    A thought consists of the sampled tokens that end before the first `</think>`, without blank tokens at both ends. A
    token that spans the end of the thought and the start of the tag (such as `.</`) is left out.

    Source: published code (RAGEN), which tokenizes the stripped text of the thought again.
    Degenerate: a thought that is empty, blank or not closed has no tokens.
    """
    # Each sampled token is decoded once, since most occur many times.
    ids = np.unique(np.concatenate([episode.tokens[episode.mask] for episode in episodes]))
    pieces = dict(zip(ids.tolist(), codec.decode([[token] for token in ids.tolist()]), strict=True))
    return [[_make_turn(episode, turn, pieces) for turn in range(len(episode.texts))] for episode in episodes]


def _make_turn(episode: Episode, turn: int, pieces: dict[int, str]) -> Turn:
    reply_positions = np.flatnonzero(episode.mask & (episode.turns == turn))
    reply = episode.tokens[reply_positions]
    texts = [pieces[token] for token in reply.tolist()]
    thought_end = "".join(texts).find(END_OF_THOUGHT)
    # `find` gives -1 for an unclosed thought. No token ends at or before -1, so the thought has no tokens.
    is_inside = np.cumsum([len(text) for text in texts]) <= thought_end
    thought_positions = np.flatnonzero(is_inside & [bool(text.strip()) for text in texts])
    thought = reply[thought_positions[0] : thought_positions[-1] + 1] if len(thought_positions) else reply[:0]
    return Turn(episode.tokens[: reply_positions[0]], thought)


def compute_thought_coverage(turns: Sequence[Sequence[Turn]]) -> dict[str, float]:
    """Count the turns that can be diagnosed, under the published names with `_` for `/`.

    Source: published code (RAGEN `collapse_metrics`).  Degenerate: no episode gives zeros.
    """
    num_valid = sum(turn.is_valid for episode in turns for turn in episode)
    num_first_valid = sum(episode[0].is_valid for episode in turns)
    return {
        "collapse_valid_thinking_rate": num_valid / max(1, sum(len(episode) for episode in turns)),
        "collapse_first_turn_num_total": len(turns),
        "collapse_first_turn_num_valid": num_first_valid,
        "collapse_first_turn_valid_rate": num_first_valid / max(1, len(turns)),
    }


def sample_first_turn_pairs(
    turns: Sequence[Sequence[Turn]], groups: Sequence[int], num_samples: int, rng: np.random.Generator
) -> ThoughtPairs:
    """Sample thoughts of first turns, with the openings of their groups as prompts.

    The rows are up to `num_samples` of the episodes with a valid first turn, drawn without replacement. There is one
    column per group among them, ordered by group.

    turns: by episode. groups: of each episode; the episodes of a group have the same opening. rng: not used if at most
    `num_samples` episodes are valid.

    Source: published code (RAGEN `collapse_metrics`).  Degenerate: no valid first turn gives no rows and no columns.
    """
    valid_episodes = np.array([number for number, episode in enumerate(turns) if episode[0].is_valid], dtype=np.int64)
    chosen_episodes = (
        rng.choice(valid_episodes, num_samples, replace=False) if num_samples < len(valid_episodes) else valid_episodes
    )
    # first_rows: the first row of each group, which has the group's opening.
    _, first_rows, own_columns = np.unique(np.asarray(groups)[chosen_episodes], return_index=True, return_inverse=True)
    prompts = [turns[number][0].prompt for number in chosen_episodes[first_rows]]
    return _make_pairs(prompts, [turns[number][0].thought for number in chosen_episodes], own_columns)


def sample_trajectory_pairs(
    turns: Sequence[Sequence[Turn]], num_samples: int, rng: np.random.Generator
) -> ThoughtPairs:
    """Sample thoughts of all turns with their prompts: one row and one column per draw.

    There are min(num_samples, number of valid turns) draws. Each draws an episode and then one of its valid turns, both
    uniformly and with replacement. An episode without a valid turn gives no row. turns: by episode.

    Source: published code (RAGEN `collapse_metrics`).  Degenerate: no valid turn gives no rows and no columns.
    """
    valid_turns = [[turn for turn in episode if turn.is_valid] for episode in turns]
    num_draws = min(num_samples, sum(len(episode) for episode in valid_turns))
    chosen_turns = []
    # As published, the episode is drawn first, so turns of short episodes are more likely.
    for _ in range(num_draws):
        episode = valid_turns[rng.integers(len(valid_turns))]
        if episode:
            chosen_turns.append(episode[rng.integers(len(episode))])
    return _make_pairs(
        [turn.prompt for turn in chosen_turns], [turn.thought for turn in chosen_turns], np.arange(len(chosen_turns))
    )


def _make_pairs(
    prompts: Sequence[Tokens], thoughts: Sequence[Tokens], own_columns: npt.NDArray[np.int64]
) -> ThoughtPairs:
    # Prompts can be equal, because levels repeat and turns are drawn with replacement. Retrieving an equal prompt
    # counts as correct.
    classes = number_classes([prompt.tobytes() for prompt in prompts])
    return ThoughtPairs(tuple(prompts), tuple(thoughts), own_columns, np.array(classes, dtype=np.int64))


MovingAverages = Mapping[str, float]

_EXTRA_NAMES = frozenset(quantity.name for quantity in EXTRA_QUANTITIES)
_SECONDS_COLUMNS = {"first_turn": "seconds_collapse_first_turn", "trajectory": "seconds_collapse_multi_turn"}
"""The column of the duration, by sample."""


def is_due(step: int, settings: CollapseDetectionConfig) -> bool:
    """Check whether training step `step` (from 1) is diagnosed: step 1 and every `compute_freq`-th.

    Source: published code (RAGEN `CollapseDetector`).  Degenerate: never, if both samples are off.
    """
    is_on = settings.first_turn_enabled or settings.multi_turn_enabled
    return is_on and (step == 1 or step % settings.compute_freq == 0)


def diagnose_episodes(
    model: LanguageModel,
    codec: Codec,
    episodes: Sequence[Episode],
    settings: CollapseDetectionConfig,
    averages: Mapping[str, MovingAverages],
    rng: np.random.Generator,
    world: World = SINGLE_PROCESS,
) -> tuple[dict[str, float], dict[str, MovingAverages]]:
    """Diagnose all episodes of a step, before the filter, with the policy that played them.

    A sample has no quantities, and its averages stay unchanged, if it has no thought, fewer than two different prompts,
    or a non-finite score. (The published code also scores two groups with equal first prompts.) The context of
    the model fits every thought after every prompt, since a rollout leaves room for a full reply after each.

    model: the policy before the step's update. Its weights, gradients and mode are unchanged. averages: those of the
    previous diagnosis, or {}. rng: each sample draws from a separate child, so that switching one sample off leaves the
    other unchanged. world: ranks with the same episodes. Each scores some prompts.

    Returns the step's `collapse_...` and `seconds_collapse_...` columns that have a value, and by sample the moving
    averages of the standard deviations `marginal_std...` for the next diagnosis; JSON-serializable. The columns are the
    number of turns with a thought, and for each sample the quantities of `compute_information_metrics`,
    `smooth_zscores` and `compute_retrieval_metrics`, `retrieval_shuffled`, and the duration. Only `all_quantities`
    includes `trainable.runs.records.EXTRA_QUANTITIES`. Log-probs are in nats, at temperature 1.

    Source: published code (RAGEN `CollapseDetector.compute_collapse_metrics`).
    """
    turns = read_turns(episodes, codec)
    row, next_averages = compute_thought_coverage(turns), dict(averages)
    if not settings.first_turn_enabled:  # published: first turns are counted only if their sample is on
        row = {name: value for name, value in row.items() if not name.startswith("collapse_first_turn_")}
    # Spawn both generators in any case, so that one sample does not depend on whether the other is on.
    first_rng, trajectory_rng = rng.spawn(2)
    samples: dict[str, tuple[ThoughtPairs, np.random.Generator]] = {}
    if settings.first_turn_enabled:
        groups = [episode.group for episode in episodes]
        samples["first_turn"] = sample_first_turn_pairs(turns, groups, settings.num_samples, first_rng), first_rng
    if settings.multi_turn_enabled:
        samples["trajectory"] = sample_trajectory_pairs(turns, settings.num_samples, trajectory_rng), trajectory_rng
    for sample, (pairs, sample_rng) in samples.items():
        start = time.perf_counter()
        measurement = _compute_quantities(model, pairs, averages.get(sample), sample_rng, world)
        if measurement is not None:
            # All quantities are cheap to compute. Some are left out only to keep the rows short.
            quantities, next_averages[sample] = measurement
            row |= {
                f"collapse_{sample}_{key.replace('@', '_at_')}": value
                for key, value in quantities.items()
                if settings.all_quantities or key not in _EXTRA_NAMES
            }
        row[_SECONDS_COLUMNS[sample]] = time.perf_counter() - start
    return row, next_averages


def diagnose_step(trainer: "PPOTrainer", episodes: Sequence[Episode]) -> dict[str, float]:
    """Compute the columns of `diagnose_episodes` for the trainer's step; {} if the step is not due.

    The trainer's policy must have played `episodes`. The trainer stores the moving averages, also in checkpoints.
    """
    config, step = trainer.config, trainer.step_index
    if not is_due(step, config.collapse_detection):
        return {}
    rng = make_rng(config.seed, "collapse", step)
    with trainer.backends["actor"].gather_weights():
        row, trainer.collapse_averages = diagnose_episodes(
            trainer.model,
            trainer.codec,
            episodes,
            config.collapse_detection,
            trainer.collapse_averages,
            rng,
            trainer.world,
        )
    return row


def _compute_quantities(
    model: LanguageModel, pairs: ThoughtPairs, averages: MovingAverages | None, rng: np.random.Generator, world: World
) -> tuple[dict[str, float], MovingAverages] | None:
    """Compute a sample's quantities, by published names, and its next averages; None if it cannot be measured."""
    # With a single prompt, I(X; Z) is 0 and every retrieval is correct for any policy.
    if not len(pairs.own_columns) or len(np.unique(pairs.classes)) < 2:
        return None
    prompts, thoughts = ([tokens.tolist() for tokens in sequences] for sequences in (pairs.prompts, pairs.thoughts))
    logprob_sums = compute_cross_scores(model, prompts, thoughts, world=world)
    if not torch.isfinite(logprob_sums).all():
        return None  # do not stop the run: sampler and update check for non-finite numbers themselves
    own_columns, classes = torch.from_numpy(pairs.own_columns), torch.from_numpy(pairs.classes)
    metrics = compute_information_metrics(logprob_sums, torch.tensor(list(map(len, thoughts))), own_columns)
    smoothed_metrics, next_averages = smooth_zscores(metrics, averages)
    generator = torch.Generator().manual_seed(int(rng.integers(2**62)))
    shuffled_accuracy = compute_shuffled_accuracy(logprob_sums, own_columns, classes, generator)
    return {
        **metrics,
        **smoothed_metrics,
        **compute_retrieval_metrics(logprob_sums, own_columns, classes),
        "retrieval_shuffled": shuffled_accuracy,
    }, next_averages
