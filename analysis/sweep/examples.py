"""Choose example episodes for a report: what the policy of each arm did before, during and after training."""

import math
import warnings
from typing import Any, NamedTuple

from analysis.data.episodes import format_turns, read_episodes_of_run
from analysis.data.frames import StudyFrames
from trainable.files.json_values import DamageWarning
from trainable.files.paths import LINE_CHARACTERS, escape_controls
from trainable.runs.episode_lines import RecordedEpisode

MAX_ARMS = 12
"""A study with more arms has no examples in its report; the command `transcripts` prints them."""
_MAX_CHARACTERS = 8_000
"""Maximum length of an episode on the page, since large models may write long ones."""


class ArmExamples(NamedTuple):
    """The examples of an arm, all from one run.

    episodes: for each, its title, its name in the summary (such as `solved after step 60`), is_trained, step, level,
    success, stop_reason, score and text.
    """

    arm: str
    seed: int
    episodes: tuple[dict[str, Any], ...]


def choose_examples(frames: StudyFrames) -> list[ArmExamples]:
    """Choose, from each arm's smallest seed, a solved and a failed episode of its first and of its last validation.

    If episodes from training steps were recorded, adds the ones with the largest and the smallest advantage in the last
    such step. An arm without recorded episodes is left out. The result is empty if the frames were not loaded from a
    folder, and for studies of more than `MAX_ARMS` arms.
    """
    if not frames.folders or len(frames.runs_by_arm) > MAX_ARMS:
        return []
    (folder,) = frames.folders
    examples = []
    for arm, runs in frames.runs_by_arm.items():
        first_run = runs.loc[runs["seed"].idxmin()]
        with warnings.catch_warnings():  # damaged lines were reported when the frames were loaded
            warnings.simplefilter("ignore", DamageWarning)
            episodes = read_episodes_of_run(folder, first_run["run_id"])
        validated, trained = (
            [episode for episode in episodes if episode.is_trained == is_trained] for is_trained in (False, True)
        )
        chosen = [*_choose_episodes(validated), *_choose_trained_episodes(trained)]
        if chosen:
            examples.append(ArmExamples(arm, int(first_run["seed"]), tuple(map(_describe_episode, chosen))))
    return examples


def _choose_episodes(episodes: list[RecordedEpisode]) -> list[RecordedEpisode]:
    """Choose a solved and a failed episode of the first and of the last step, if any. The input is sorted."""
    firsts: dict[tuple[int, bool], RecordedEpisode] = {}
    for episode in episodes:
        firsts.setdefault((episode.step, episode.success), episode)
    steps = sorted({episode.step for episode in episodes})
    keys = [(step, success) for step in dict.fromkeys((*steps[:1], *steps[-1:])) for success in (True, False)]
    return [firsts[key] for key in keys if key in firsts]


def _choose_trained_episodes(episodes: list[RecordedEpisode]) -> list[RecordedEpisode]:
    """Choose the episodes of the last step with the largest and smallest advantage; one if all are equal."""
    last_step = max((episode.step for episode in episodes), default=0)
    by_advantage = sorted((episode for episode in episodes if episode.step == last_step), key=_get_advantage)
    is_equal = bool(by_advantage) and _get_advantage(by_advantage[0]) == _get_advantage(by_advantage[-1])
    return by_advantage[:1] if is_equal else [*by_advantage[-1:], *by_advantage[:1]]


def _get_advantage(episode: RecordedEpisode) -> float:
    """Return the advantage of an episode; 0 if no turn has one."""
    return 0.0 if math.isnan(episode.advantage) else episode.advantage


def _describe_episode(episode: RecordedEpisode) -> dict[str, Any]:
    text = escape_controls("\n".join(format_turns(episode)), allowed=LINE_CHARACTERS)
    half = _MAX_CHARACTERS // 2
    if (num_left_out := len(text) - 2 * half) > 0:
        # A tree ends with its answer and the evidence.
        text = f"{text[:half]}\n[{num_left_out:,} of {len(text):,} characters left out]\n{text[-half:]}"
    fields = ("step", "level", "success", "stop_reason", "score", "is_trained")
    title = f"After step {episode.step}, level {episode.level}"
    name = f"{'solved' if episode.success else 'failed'} after step {episode.step}"
    if episode.is_trained:
        title = f"Trained in step {episode.step}, level {episode.level}, rollout {episode.rollout}"
        name = f"advantage {_get_advantage(episode):+.3g} in step {episode.step}"
    return {**{key: getattr(episode, key) for key in fields}, "title": title, "name": name, "text": text}
