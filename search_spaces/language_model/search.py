"""The settings that a search over language models changes by default: rate, KL, entropy, clip range and filter."""

from search_spaces.declaration.search import Dimension

_STRATEGY = "filter.rollout_filter_strategy"

SEARCH_SPACE: tuple[Dimension, ...] = (
    Dimension("actor.lr", 0.1, 10, is_log=True, is_relative=True),
    Dimension("actor.use_kl_loss", values=("False", "True")),
    Dimension("actor.kl_loss_coef", 1e-3, 1, is_log=True, condition=("actor.use_kl_loss", "True")),
    Dimension("actor.entropy_coeff", 1e-4, 0.1, is_log=True),
    Dimension("actor.clip_ratio_high", 0.1, 0.5),
    # Groups with the largest spread of rewards: by their share of it, or by their number.
    Dimension(_STRATEGY, values=("top_p", "top_k")),
    Dimension("filter.rollout_filter_value", 0.4, 1, condition=(_STRATEGY, "top_p")),
    Dimension("filter.rollout_filter_value", 0.25, 1, condition=(_STRATEGY, "top_k")),
)
"""Intervals of one to three powers of ten around the values of published recipes."""
