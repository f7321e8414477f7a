"""The filter applied to episodes: which groups are trained on, and the row's columns about the decision."""

from collections.abc import Sequence
from typing import NamedTuple

from trainable.algo.filters import group_scores, parse_rule, select_groups
from trainable.config.sections import FilterConfig
from trainable.ppo.evaluation import by_group
from trainable.rollout.episode import Episode


class Kept(NamedTuple):
    """What the filter decided: episodes of kept groups, in order, and the counts of the decision."""

    episodes: list[Episode]
    groups: int
    row: dict[str, float]


def filter_episodes(episodes: Sequence[Episode], settings: FilterConfig, group_size: int) -> Kept:
    """Keep whole groups by their score (see `FilterConfig`). episodes: whole groups, `group_size` each, in order."""
    rewards = by_group([episode.score for episode in episodes], group_size)
    entropies = by_group([float(episode.entropies[episode.mask].mean()) for episode in episodes], group_size)
    lengths = by_group([float(episode.response_tokens) for episode in episodes], group_size)
    scores = group_scores(settings.rollout_filter_metric, rewards, entropies, lengths)
    rule = parse_rule(
        settings.rollout_filter_strategy, settings.rollout_filter_value,
        settings.rollout_filter_top_p_prob_mode, settings.rollout_filter_selection_eps,
    )  # fmt: skip
    keep = select_groups(scores, rule, settings.rollout_filter_type == "largest", settings.rollout_filter_include_zero)
    stds = group_scores("reward_std", rewards)
    groups = int(keep.sum())
    row: dict[str, float] = {
        "reward_std": float(stds.mean()),
        "reward_std_max": float(stds.max()),
        "zero_std_groups": int((stds <= 1e-10).sum()),
        "groups": len(keep),
        "groups_kept": groups,
        "kept_ratio": groups / len(keep),
        "reward_std_kept": float(stds[keep].mean()) if groups else 0.0,
    }
    return Kept([episode for episode in episodes if keep[episode.group]], groups, row)
