"""The measures of a grid. Each is a column of `layout.make_cell_table` and a heat map of the report."""

from typing import NamedTuple


class Measure(NamedTuple):
    """A measure: name of its column, label with unit, caption of its heat map, and whether its color scale is log."""

    name: str
    label: str
    caption: str
    log: bool = False


SUCCESS = Measure(
    "success",
    "success at the end (fraction of episodes)",
    "Sampled success on the validation levels, the mean of the last four validations.",
)
LATE_MEANS: tuple[Measure, ...] = (
    Measure(
        "entropy",
        "entropy (nats per token)",
        "Entropy of the sampling policy: mean over the last quarter of each run's steps.",
    ),
    Measure(
        "reward_std",
        "reward std in the group (reward)",
        "Standard deviation of the rewards in a group: mean over the last quarter of each run's steps. Near 0, rewards "
        "carry no signal.",
    ),
    Measure(
        "kl_to_reference",
        "KL to the reference (nats)",
        "KL to the reference, as the k3 estimate whatever the form of the loss: mean over the last quarter of each "
        "run's steps. Colors have a log scale. Without a KL loss there is no reference pass, and thus no number.",
        log=True,  # it spans orders of magnitude over the coefficients of a grid
    ),
)
"""Step columns that are averaged over the last quarter of a run's own steps."""
MEASURES: tuple[Measure, ...] = (SUCCESS, *LATE_MEANS)
