"""The group filter of a step: selects the groups of episodes to train on."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trainable.algo.filters import ZERO_SCORE, Rule, compute_group_scores, parse_rule, select_groups
from trainable.config.choices import FILTER_STRATEGIES
from trainable.config.own_parts import get_part
from trainable.config.sections import FilterConfig
from trainable.ppo.evaluation import reshape_by_group
from trainable.ppo.step_record import FilterDecision
from trainable.rollout.episode import Episode
from trainable.runs.failures import NonFiniteError

_MAX_GROUPS_SHOWN = 3
"""Maximum number of groups that a message names."""


class Selection(NamedTuple):
    """The result of the filter: the episodes of the selected groups, in order, and the columns of the row."""

    episodes: list[Episode]
    decision: FilterDecision


def filter_episodes(episodes: Sequence[Episode], settings: FilterConfig, group_size: int) -> Selection:
    """Select the groups to train on by their scores (see `FilterConfig`). The selection may be empty.

    Raises NonFiniteError if scores or reward stds are not finite in float32, which huge penalties can cause.

    episodes: complete groups of `group_size` consecutive episodes; `Episode.group` numbers the groups from 0.
    """
    rewards = reshape_by_group([episode.score for episode in episodes], group_size)
    entropies = reshape_by_group([float(episode.entropies[episode.mask].mean()) for episode in episodes], group_size)
    lengths = reshape_by_group([float(episode.response_tokens) for episode in episodes], group_size)
    scores = compute_group_scores(settings.rollout_filter_metric, rewards, entropies, lengths)
    # The std columns always describe the rewards, whatever the filter's metric, so that runs with different filters can
    # be compared.
    stds = compute_group_scores("reward_std", rewards)
    _check_finite({"rewards": rewards, f"scores ({settings.rollout_filter_metric})": scores, "reward stds": stds})
    is_largest, has_zero = settings.rollout_filter_type == "largest", settings.rollout_filter_include_zero
    is_kept = select_groups(scores, _make_rule(settings), is_largest, has_zero)
    groups_kept = int(is_kept.sum())
    decision = FilterDecision(
        reward_std=float(stds.mean()),
        reward_std_max=float(stds.max()),
        zero_std_groups=int((stds <= ZERO_SCORE).sum()),
        groups=len(is_kept),
        groups_kept=groups_kept,
        kept_ratio=groups_kept / len(is_kept),
        # The mean over no groups would be NaN. The column is documented as 0 in this case, which `groups_kept`
        # distinguishes from a measured 0. Stop rules and comparisons of arms do not read it.
        reward_std_kept=float(stds[is_kept].mean()) if groups_kept else 0.0,
    )
    return Selection([episode for episode in episodes if is_kept[episode.group]], decision)


def _make_rule(settings: FilterConfig) -> Rule:
    """Make the rule of the strategy that `settings` selects."""
    if settings.rollout_filter_strategy not in FILTER_STRATEGIES:
        own_rule = get_part(settings.rollout_filter_strategy)
        return lambda scores, largest, num_groups: own_rule(scores, settings.rollout_filter_value, largest)
    return parse_rule(
        settings.rollout_filter_strategy,
        settings.rollout_filter_value,
        settings.rollout_filter_top_p_prob_mode,
        settings.rollout_filter_selection_eps,
    )


def _check_finite(group_tensors: Mapping[str, Tensor]) -> None:
    """Raise NonFiniteError if a tensor (P, ...) is not finite, with its name and groups in which it is not."""
    for name, tensor in group_tensors.items():
        is_finite = torch.isfinite(tensor).reshape(len(tensor), -1).all(1)
        if not bool(is_finite.all()):
            groups = ", ".join(map(str, torch.where(~is_finite)[0].tolist()[:_MAX_GROUPS_SHOWN]))
            raise NonFiniteError(
                f"{name} were not finite in {int((~is_finite).sum())} of {len(tensor)} groups (such as {groups})"
            )
