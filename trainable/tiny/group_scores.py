"""How often the rollouts of a shipped policy on one level have equal scores before training.

`group_scores.json` in this folder is recorded by `python -m trainable.tiny --record-groups`: 32 rollouts on each of 512
training levels. From these, the share of groups with equal scores follows for any smaller group size. Since levels
differ in difficulty, it is much larger than the mean success alone would suggest.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from trainable.config.constants import SHIPPED_MODELS
from trainable.config.run_config import RunConfig
from trainable.config.sections import GAME_REWARD

GROUP_SCORES_PATH = Path(__file__).parent / "group_scores.json"
SetSizes = Mapping[int, int]
"""Numbers of sets of rollouts with equal scores on one level, by the size of the set (at least 2)."""

_ENV_SETTINGS = ("name", "max_turn", "max_actions_per_turn", "max_actions_per_traj")
_ROLLOUT_SETTINGS = ("temperature", "response_length", "max_model_len", "weight_noise")


class GroupScores(NamedTuple):
    """The rollouts of one policy in one game.

    settings: the settings that determine their actions. format_penalty: also affects their scores. levels: number of
    levels. samples: rollouts per level. scores, successes: sizes of the sets of rollouts with equal scores, and with
    equal success.
    """

    settings: dict[str, Any]
    format_penalty: float
    levels: int
    samples: int
    scores: SetSizes
    successes: SetSizes


def count_sets(scores_by_level: Iterable[Iterable[float]]) -> dict[int, int]:
    """Count the sets of rollouts with equal scores by their size, over all levels.

    Example:
        >>> count_sets([[1.0, 0.0, 1.0, 1.0, 0.5, 0.0], [0.0, 0.0]])
        {2: 2, 3: 1}
    """
    sizes = Counter(size for scores in scores_by_level for size in Counter(scores).values() if size > 1)
    return dict(sorted(sizes.items()))


def compute_equal_share(sizes: SetSizes, levels: int, samples: int, group_size: int) -> float:
    """Estimate, without bias, the share of groups of G rollouts with equal scores, from K >= G rollouts per level.

    For a level with n_c rollouts of score c, it is the share of subsets of G rollouts with equal scores:
    sum_c binom(n_c, G) / binom(K, G). The result is the mean over levels.

    sizes: the n_c of all levels. levels: number of levels. samples: K. group_size: G, at least 2.

    Example:
        >>> compute_equal_share({3: 1, 4: 1}, levels=2, samples=4, group_size=2)  # 3 of 6 pairs, and all of them
        0.75
    """
    equal_subsets = sum(count * math.comb(size, group_size) for size, count in sizes.items())
    return equal_subsets / (levels * math.comb(samples, group_size))


def list_group_settings(config: RunConfig) -> dict[str, Any]:
    """Select the settings that determine the actions of an untrained policy."""
    env, rollout = config.env.model_dump(mode="json"), config.rollout.model_dump(mode="json")
    return {
        "model": config.model.path,
        "prompt_style": config.model.prompt_style,
        **{name: env[name] for name in _ENV_SETTINGS},
        **env.get(config.env.name, {}),  # the section of the game, if it has one
        **{name: rollout[name] for name in _ROLLOUT_SETTINGS},
    }


@cache
def read_group_scores(path: Path = GROUP_SCORES_PATH) -> tuple[GroupScores, ...]:
    """Read the recorded rollouts of shipped policies."""
    entries = json.loads(path.read_text("utf-8"))
    for entry in entries:
        for name in ("scores", "successes"):
            entry[name] = {int(size): count for size, count in entry[name].items()}
    return tuple(GroupScores(**entry) for entry in entries)


def write_group_scores(entries: Iterable[GroupScores], path: Path = GROUP_SCORES_PATH) -> None:
    """Write the rollouts of shipped policies, one line per policy."""
    lines = [json.dumps(entry._asdict()) for entry in entries]
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


def describe_groups(configs: Iterable[RunConfig]) -> list[str]:
    """Describe the shares of groups with equal scores before training, in a sentence per shipped policy and game.

    Runs with other models, limits, levels or temperatures, for which no rollouts are recorded, are left out.
    """
    sizes: dict[tuple[int, bool], set[int]] = {}
    for config in configs:
        if config.model.path not in SHIPPED_MODELS or config.env.group_size == 1:
            continue
        settings = list_group_settings(config)
        for index, entry in enumerate(read_group_scores()):
            if entry.settings == settings:
                has_scores = config.env.reward == GAME_REWARD and config.env.format_penalty == entry.format_penalty
                has_scores &= config.env.overlong_buffer_len == 0
                sizes.setdefault((index, has_scores), set()).add(config.env.group_size)
    return [
        _format_shares(read_group_scores()[index], sorted(group_sizes), has_scores)
        for (index, has_scores), group_sizes in sizes.items()
    ]


def _format_shares(entry: GroupScores, group_sizes: list[int], has_scores: bool) -> str:
    def format_percentages(sizes: SetSizes) -> str:
        # The share falls with the group size, so the largest recorded size gives a bound for larger groups.
        shares = [
            compute_equal_share(sizes, entry.levels, entry.samples, min(group_size, entry.samples))
            for group_size in group_sizes
        ]
        return f"{'/'.join('<1' if share < 0.005 else f'{100 * share:.0f}' for share in shares)} %"

    bound = "at most " if max(group_sizes) > entry.samples else ""
    equal_text = f"{bound}{format_percentages(entry.scores)} have equal scores, and " if has_scores else ""
    return (
        f"Groups before training: of those with group_size={'/'.join(map(str, group_sizes))}, {equal_text}in "
        f"{bound}{format_percentages(entry.successes)} all rollouts succeed or all fail ({entry.settings['model']}, "
        f"{entry.levels} levels x {entry.samples} samples)"
    )
