"""At one mean age of the replayed samples, does the capacity of the buffer still matter?

A batch is drawn with probability proportional to exp(-decay x age) times its delight. For each capacity the decay is
solved for so that exp(-decay x age) alone, over the ages that the buffer holds, has the wanted mean age; what the
sampling made of it is measured (mean_replay_age). DG-delayN trains on batches of that one age.
"""

import math

from search_spaces.family import Settings
from search_spaces.sandbox import SMOKE, sandbox_study
from search_spaces.study import Contrasts

CAPACITIES = (8, 16, 32)
AGES = (1.5, 3.5, 7.5)


def mean_age(decay: float, capacity: int) -> float:
    """Mean age in updates of a draw over the ages 0 ... capacity - 1 with weights exp(-decay x age)."""
    weights = [math.exp(-decay * age) for age in range(capacity)]
    return sum(age * weight for age, weight in enumerate(weights)) / sum(weights)


def decay_for(age: float, capacity: int) -> float:
    """The decay a step, to four digits, with which `mean_age` is `age`; ValueError if no decay >= 0 gives it."""
    if not 0 < age <= mean_age(0.0, capacity):
        raise ValueError(f"a buffer of {capacity} batches has no mean age of {age}")
    low, high = 0.0, 50.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if mean_age(middle, capacity) > age else (low, middle)
    return round(high, 4)


ARMS: dict[str, Settings] = {
    "DG": {"method": "DG"},
    **{f"DG-delay{delay}": {"method": "DG", "delay": delay} for delay in (2, 4, 8)},
    **{
        f"capacity{capacity}-age{age}": {
            "method": "ReplayDG",
            "replay_capacity": capacity,
            "replay_age_decay": decay_for(age, capacity),
        }
        for age in AGES
        for capacity in CAPACITIES
        if age <= mean_age(0.0, capacity)
    },
}

CONTRASTS: Contrasts = {
    "capacity 32 against 8 at one mean age": tuple(
        (f"capacity32-age{age}", f"capacity8-age{age}") for age in AGES if f"capacity8-age{age}" in ARMS
    ),
    "capacity 32 against 16 at one mean age": tuple((f"capacity32-age{age}", f"capacity16-age{age}") for age in AGES),
    "mean age 3.5 against 1.5 at one capacity": tuple(
        (f"capacity{capacity}-age3.5", f"capacity{capacity}-age1.5") for capacity in CAPACITIES
    ),
    "mean age 7.5 against 1.5 at one capacity": tuple(
        (f"capacity{capacity}-age7.5", f"capacity{capacity}-age1.5") for capacity in CAPACITIES[1:]
    ),
}

STUDY = sandbox_study(
    name="age-not-capacity",
    question=__doc__,
    arms=ARMS,
    baseline="DG",
    setting="capacity and freshness decay",
    contrasts=CONTRASTS,
    smoke={**SMOKE, "trainer.total_training_steps": 10, "trainer.test_freq": 5},
)
