"""Time the environment on one core: actions, levels and solver tables per second. Prints a JSON object.

Run, with the project installed: python benchmarks/environment.py [--repetitions 7]
"""

import json
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
from machine import describe
from options import make_parser, parse_count

from trainable.envs.sokoban.board import step
from trainable.envs.sokoban.generate import SokobanLevel, generate_levels
from trainable.envs.sokoban.solver import compute_distance_table

BATCH = 128  # boards that are played at once: the 8 x 16 episodes of a training step
ACTIONS_PER_EPISODE = 10
EPISODES = 200
LEVELS = 2000


def measure_rate(work: Callable[[], object], items: int, repetitions: int) -> float:
    """Items per CPU second: the median of several repetitions, after one call that is not timed."""
    work()
    rates = []
    for _ in range(repetitions):
        start = time.process_time()
        work()
        rates.append(items / (time.process_time() - start))
    return round(statistics.median(rates), 1)


def play_random_actions(levels: Sequence[SokobanLevel]) -> None:
    """Play random actions: EPISODES times ACTIONS_PER_EPISODE actions on each level, all levels in one batch."""
    actions = np.random.default_rng(0).integers(1, 5, (EPISODES, ACTIONS_PER_EPISODE, len(levels)))
    start = np.stack([level.cells for level in levels])
    for episode in actions:
        cells = start
        for action in episode:
            cells = step(cells, action).cells


def measure(repetitions: int) -> dict[str, object]:
    """All three measurements, with a description of the machine."""
    levels = generate_levels(range(123, 123 + BATCH))
    return {
        "benchmark": "environment",
        "env_steps_per_cpu_second": measure_rate(
            lambda: play_random_actions(levels), BATCH * EPISODES * ACTIONS_PER_EPISODE, repetitions
        ),
        "batch": BATCH,
        "levels_per_cpu_second": measure_rate(
            lambda: generate_levels(range(20_000, 20_000 + LEVELS)), LEVELS, repetitions
        ),
        "solver_tables_per_cpu_second": measure_rate(
            lambda: [compute_distance_table(level.cells) for level in levels], BATCH, repetitions
        ),
        "repetitions": repetitions,
        **describe(),
    }


def main() -> None:
    """Measure and print."""
    parser = make_parser(__doc__)
    parser.add_argument("--repetitions", type=parse_count, default=7, help="timed repetitions of each measurement")
    print(json.dumps(measure(parser.parse_args().repetitions), indent=1))


if __name__ == "__main__":
    main()
