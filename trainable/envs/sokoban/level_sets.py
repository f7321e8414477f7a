"""The level sets for training, validation, test and demonstrations; test levels are in no other set.

Set            Seeds                                          Shares no level with
training       10000 + 1,000,000 k + counter                  test (outside the published 10000..13199 by replacement)
validation     123, 124, ... (512 of them are published)      test, demonstration
demonstration  700,000,000 and up, some left out              validation, test
test           512 of 900,000,000 and up, shipped as a file   validation, published training, demonstration, itself
replacement    1,000,000,000 and up, some left out            test

Levels are compared up to the eight symmetries of the square (`Level.key`): different seeds can give equal levels.
Run as a module, this prints the file of test seeds; with --write it writes the file.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import count as counting
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from trainable.config.run_config import RunConfig
from trainable.envs.sokoban.generate import Level, generate_level, generate_levels

PUBLISHED_TRAINING_SEEDS = range(10_000, 13_200)
PUBLISHED_VALIDATION_SEEDS = range(123, 635)
# The bounds of env.seed_train and of the run's seed keep training below the demonstrations.
SEEDS_PER_RUN = 1_000_000
FIRST_DEMONSTRATION_SEED = 700_000_000
FIRST_TEST_SEED = 900_000_000
FIRST_REPLACEMENT_SEED = 1_000_000_000
TEST_LEVELS = 512
TEST_SEEDS_FILE = Path(__file__).with_name("test_seeds.json")

_BLOCK_SIZE = 64  # levels generated per call in a search, since `generate_levels` is faster for many seeds at once


def compute_training_seed(seed_index: int, group_counter: int, base: int = 10_000) -> int:
    """The seed of one training level: base + 1,000,000 * seed_index + group_counter.

    seed_index: the run's seed, from 0 (the published stream).
    group_counter: number of groups before this one; env_groups * (t - 1) + i for group i of the 1-based step t.
    """
    seed = base + SEEDS_PER_RUN * seed_index + group_counter
    if seed_index < 0 or not 0 <= group_counter < SEEDS_PER_RUN or not 0 <= seed < FIRST_DEMONSTRATION_SEED:
        raise ValueError(
            f"no training level for seed index {seed_index}, group {group_counter}, base {base}: the index must be at "
            f"least 0, the group 0 to {SEEDS_PER_RUN - 1}, and their level seed below {FIRST_DEMONSTRATION_SEED}"
        )
    return seed


def make_training_levels(
    seed_index: int, step: int, env_groups: int, base: int = 10_000, excluded_keys: frozenset[bytes] = frozenset()
) -> list[Level]:
    """Make the levels of one training step, one for each group.

    A level whose key is in `excluded_keys` is replaced, unless it is a published one (seeds 10000..13199, which share
    no level with the test set). The replacement of seed s is the level of the first of the seeds 1,000,000,000 + s,
    1,000,000,001 + s, ... whose key is not excluded. The level of a seed therefore depends only on the seed and
    `excluded_keys`.

    seed_index: see `compute_training_seed`. step: from 1. env_groups: groups per step. base: first seed of index 0.
    excluded_keys: keys of the test levels, `collect_level_keys(make_test_levels())`.
    """
    if step < 1 or env_groups < 1:
        raise ValueError(f"step {step} with {env_groups} groups; both must be at least 1")
    seeds = [compute_training_seed(seed_index, env_groups * (step - 1) + group, base) for group in range(env_groups)]
    return [_replace_if_excluded(level, excluded_keys) for level in generate_levels(seeds)]


def make_validation_levels(count: int = 512, base: int = 123) -> list[Level]:
    """Make the levels of seeds base, base + 1, ...; the defaults are the published 512, 472 of them distinct boards."""
    return generate_levels(range(base, base + count))


def make_test_levels(count: int = TEST_LEVELS) -> list[Level]:
    """Make the first `count` of the 512 test levels, all distinct up to symmetry, from the shipped seeds."""
    if not 0 <= count <= TEST_LEVELS:
        raise ValueError(f"{count} test levels; the count must be between 0 and {TEST_LEVELS}")
    seeds: list[int] = json.loads(TEST_SEEDS_FILE.read_text(encoding="utf-8"))["seeds"]
    return generate_levels(seeds[:count])


def make_demonstration_levels(count: int, first_index: int = 0) -> list[Level]:
    """Make levels for demonstrations: none of them is a validation or test level.

    The levels are in the order of their seeds from 700,000,000 + first_index on. To continue after a call, pass
    `first_index=levels[-1].seed - FIRST_DEMONSTRATION_SEED + 1`. Levels can repeat within the set.
    """
    if count < 0 or first_index < 0:
        raise ValueError(f"{count} demonstration levels from {first_index} on; both must be at least 0")
    held_out_keys = _collect_held_out_keys()
    start = FIRST_DEMONSTRATION_SEED + first_index
    levels = list(islice((level for level in _iter_levels(start) if level.key not in held_out_keys), count))
    if levels and levels[-1].seed >= FIRST_TEST_SEED:
        raise ValueError(f"{count} demonstration levels from {first_index} on reach the test seeds; ask for fewer")
    return levels


class RunLevels(NamedTuple):
    """The levels of one run, generated in advance, so that no step waits for them.

    training: for each step, one level per group. unseen_mask: for each validation level, whether no training level of
    the run equals it up to symmetry.
    """

    training: list[list[Level]]
    validation: list[Level]
    test: list[Level]
    unseen_mask: list[bool]


def make_run_levels(config: RunConfig) -> RunLevels:
    """The levels of the run of `config`, its seed included; no training level is a test level."""
    env = config.env
    test_set = make_test_levels(env.test_env_groups)
    validation = make_validation_levels(env.val_env_groups, env.seed_val)
    excluded_keys = collect_level_keys(test_set)
    training = [
        make_training_levels(config.seed, step, env.env_groups, env.seed_train, excluded_keys=excluded_keys)
        for step in range(1, config.trainer.total_training_steps + 1)
    ]
    training_keys = collect_level_keys(level for levels in training for level in levels)
    return RunLevels(training, validation, test_set, [level.key not in training_keys for level in validation])


def collect_level_keys(levels: Iterable[Level]) -> frozenset[bytes]:
    """The keys of the levels, which are equal for levels that are equal up to symmetry."""
    return frozenset(level.key for level in levels)


def find_test_seeds(count: int = TEST_LEVELS) -> list[int]:
    """Search the first `count` test seeds, in order. Their levels are all different and in no published set.

    The shipped file is the result of this search. Runs read that file and do not search again.
    """
    published_seeds = (*PUBLISHED_VALIDATION_SEEDS, *PUBLISHED_TRAINING_SEEDS)
    seen_keys = set(collect_level_keys(generate_levels(published_seeds)))
    seeds: list[int] = []
    for level in _iter_levels(FIRST_TEST_SEED):
        if len(seeds) == count:
            break
        if level.key not in seen_keys:
            seen_keys.add(level.key)
            seeds.append(level.seed)
    return seeds


def format_seeds_file() -> str:
    """The content of the shipped file of test seeds: JSON, one seed per line."""
    description = "Seeds of the test levels; made by: python -m trainable.envs.sokoban.level_sets --write"
    return json.dumps({"about": description, "seeds": find_test_seeds()}, indent=0) + "\n"


def _replace_if_excluded(level: Level, excluded_keys: frozenset[bytes]) -> Level:
    if not excluded_keys or level.seed in PUBLISHED_TRAINING_SEEDS or level.key not in excluded_keys:
        return level
    candidates = (generate_level(seed) for seed in counting(FIRST_REPLACEMENT_SEED + level.seed))
    return next(candidate for candidate in candidates if candidate.key not in excluded_keys)


def _iter_levels(seed: int) -> Iterator[Level]:
    for start in counting(seed, _BLOCK_SIZE):
        yield from generate_levels(range(start, start + _BLOCK_SIZE))


@lru_cache(maxsize=1)
def _collect_held_out_keys() -> frozenset[bytes]:
    return collect_level_keys(make_validation_levels()) | collect_level_keys(make_test_levels())


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the file of test seeds, or with --write write it into the package."""
    parser = argparse.ArgumentParser(prog="python -m trainable.envs.sokoban.level_sets", description=main.__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {TEST_SEEDS_FILE.name} into the package")
    if parser.parse_args(arguments).write:
        TEST_SEEDS_FILE.write_text(format_seeds_file(), encoding="utf-8")
    else:
        sys.stdout.write(format_seeds_file())


if __name__ == "__main__":
    main()
