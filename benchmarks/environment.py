"""How fast the game is on one core: actions, rooms and solver tables a second, as one JSON object.

Run, with the project installed: python benchmarks/environment.py
"""

import json
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
from machine import describe

from trainable.sokoban.board import step
from trainable.sokoban.generate import Room, generate_rooms
from trainable.sokoban.solver import distance_table

BATCH = 128
ACTIONS_PER_EPISODE = 10
EPISODES = 200
ROOMS = 2000
REPETITIONS = 7


def rate(work: Callable[[], object], items: int) -> float:
    """Items a CPU second: the median of several repetitions after one that is not counted."""
    work()
    rates = []
    for _ in range(REPETITIONS):
        start = time.process_time()
        work()
        rates.append(items / (time.process_time() - start))
    return round(statistics.median(rates), 1)


def play(rooms: Sequence[Room]) -> None:
    """Play random actions: EPISODES times ACTIONS_PER_EPISODE actions on each room, all rooms in one batch."""
    actions = np.random.default_rng(0).integers(1, 5, (EPISODES, ACTIONS_PER_EPISODE, len(rooms)))
    start = np.stack([room.cells for room in rooms])
    for episode in actions:
        cells = start
        for action in episode:
            cells = step(cells, action).cells


def measure() -> dict[str, object]:
    """Run all three measurements and name the machine."""
    rooms = generate_rooms(range(123, 123 + BATCH))
    return {
        "benchmark": "environment",
        "env_steps_per_cpu_second": rate(lambda: play(rooms), BATCH * EPISODES * ACTIONS_PER_EPISODE),
        "batch": BATCH,
        "rooms_per_cpu_second": rate(lambda: generate_rooms(range(20_000, 20_000 + ROOMS)), ROOMS),
        "solver_tables_per_cpu_second": rate(lambda: [distance_table(room.cells) for room in rooms], BATCH),
        "repetitions": REPETITIONS,
        **describe(),
    }


if __name__ == "__main__":
    print(json.dumps(measure(), indent=1))
