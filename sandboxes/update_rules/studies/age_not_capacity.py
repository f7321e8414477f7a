"""Does the capacity of a replay buffer still matter when the mean age of the replayed samples is fixed?

A batch is drawn by freshness alone, with probability proportional to exp(-decay x age). For each capacity the decay is
chosen so that the drawn ages have the given mean, independently of what is learned. In the arms that end in `-delight`
the same decay multiplies a batch's delight, as in the documents' studies; the resulting ages are measured
(mean_replay_age). DG-delayN trains on batches of exactly that age.
"""

import math

from sandboxes.toys.study import SMOKE_SETTINGS
from sandboxes.update_rules.family import make_sandbox_study
from search_spaces.declaration.study import Contrasts
from trainable.families import Settings

CAPACITIES = (8, 16, 32)
# updates; 3.5 and 7.5 are the largest mean ages that the capacities 8 and 16 can have
AGES = (1.5, 3.5, 7.5)


def compute_mean_age(decay: float, capacity: int) -> float:
    """Compute the mean age (updates) of a batch drawn from ages 0 ... capacity - 1 with weights exp(-decay x age)."""
    weights = [math.exp(-decay * age) for age in range(capacity)]
    return sum(age * weight for age, weight in enumerate(weights)) / sum(weights)


def solve_decay(age: float, capacity: int) -> float:
    """Find the decay per update, to four digits, at which `compute_mean_age` is `age`, which this capacity can have."""
    # The mean age falls as the decay rises. At 50 only age 0 is drawn, and 60 halvings leave far less than four digits.
    low, high = 0.0, 50.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if compute_mean_age(middle, capacity) > age else (low, middle)
    return round(high, 4)


REPLAY_PRIORITIES = {"": "freshness", "-delight": "fresh_delight"}
"""The priority by which a batch is drawn, by the suffix of the arm's name."""

ARMS: dict[str, Settings] = {
    "DG": {"method": "DG"},
    **{f"DG-delay{delay}": {"method": "DG", "delay": delay} for delay in (2, 4, 8)},
    **{
        f"capacity{capacity}-age{age}{end}": {
            "method": "ReplayDG",
            "replay_capacity": capacity,
            "replay_age_decay": solve_decay(age, capacity),
            "replay_priority": priority,
        }
        for end, priority in REPLAY_PRIORITIES.items()
        for age in AGES
        for capacity in CAPACITIES
        if age <= compute_mean_age(decay=0.0, capacity=capacity)  # the capacity 8 cannot have the mean age 7.5
    },
}


def _make_arm_pairs(first_template: str, second_template: str) -> tuple[tuple[str, str], ...]:
    """Pair existing arms, by filling both templates of their names with every {age} and {capacity}."""
    combinations = [{"age": age, "capacity": capacity} for age in AGES for capacity in CAPACITIES]
    pairs = [(first_template.format(**values), second_template.format(**values)) for values in combinations]
    return tuple(dict.fromkeys(pair for pair in pairs if set(pair) <= set(ARMS)))


_CONTRASTED_NAMES = {
    "capacity 32 against 8 at one mean age": ("capacity32-age{age}", "capacity8-age{age}"),
    "capacity 32 against 16 at one mean age": ("capacity32-age{age}", "capacity16-age{age}"),
    "mean age 3.5 against 1.5 at one capacity": ("capacity{capacity}-age3.5", "capacity{capacity}-age1.5"),
    "mean age 7.5 against 1.5 at one capacity": ("capacity{capacity}-age7.5", "capacity{capacity}-age1.5"),
    "capacity 32 against 8, drawn by delight too": ("capacity32-age{age}-delight", "capacity8-age{age}-delight"),
    "capacity 32 against 16, drawn by delight too": ("capacity32-age{age}-delight", "capacity16-age{age}-delight"),
    "drawn by delight too against by freshness alone": (
        "capacity{capacity}-age{age}-delight",
        "capacity{capacity}-age{age}",
    ),
}
CONTRASTS: Contrasts = {name: _make_arm_pairs(*names) for name, names in _CONTRASTED_NAMES.items()}

STUDY = make_sandbox_study(
    name="age-not-capacity",
    question=__doc__,
    arms=ARMS,
    baseline="DG",
    setting="capacity and freshness decay",
    contrasts=CONTRASTS,
    smoke_settings={**SMOKE_SETTINGS, "trainer.total_training_steps": 10, "trainer.test_freq": 10},
)
