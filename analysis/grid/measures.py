"""What the cells of a grid are measured by: each measure is a column of `layout.cells` and a heat map of the report."""

from typing import NamedTuple


class Measure(NamedTuple):
    """name: of its column. label: with its unit. caption: of its heat map. log: whether the colours' scale is."""

    name: str
    label: str
    caption: str
    log: bool = False


SUCCESS = Measure(
    "success",
    "success at the end (share of episodes)",
    "Success on the validation levels, sampled, at the last validation.",
)
LATE_MEANS: tuple[Measure, ...] = (
    Measure(
        "entropy",
        "entropy (nats a token)",
        "Entropy of the sampling policy, mean over the last quarter of each run's steps.",
    ),
    Measure(
        "reward_std",
        "reward std in the group (reward)",
        "Standard deviation of rewards in a group, mean over the last quarter of each run's steps. Near 0 the rewards "
        "carry no signal.",
    ),
    Measure(
        "kl_to_reference",
        "KL to the reference (nats)",
        "KL to the reference (k3 estimate, whatever the form of the loss), mean over the last quarter of each run's "
        "steps; log scale. Without a KL loss there is no reference pass, and no number.",
        log=True,
    ),
)
"""Step columns, as means over the last quarter of a run's own steps."""
MEASURES: tuple[Measure, ...] = (SUCCESS, *LATE_MEANS)
