"""The level sets of a game: training, validation, test and demonstrations. No other set contains a test level.

Set            Seeds                                          Shares no level with
training       10000 + 1,000,000 k + counter                  test (by replacement)
refill         260000 + 1,000,000 k + counter                 test (by replacement)
validation     123, 124, ... (512 of them by default)         test, demonstration
demonstration  700,000,000 and up, some left out              validation, test
test           512 of 900,000,000 and up                      validation, published training, demonstration, itself
replacement    1,000,000,000 and up, some left out            test

Every game uses the seeds of the published Sokoban levels. A plan whose training and validation seeds overlap is
refused. Different seeds can give equal levels, so levels are compared up to symmetry (`Level.key`). A game with few
levels cannot keep its sets apart (`LevelSource.has_held_out_levels`): its sets contain whatever levels their seeds
give.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain, islice
from itertools import count as counting
from typing import Any, NamedTuple

from trainable.config.run_config import RunConfig
from trainable.envs.environment import FIRST_TEST_SEED, L, Level, LevelSource

PUBLISHED_TRAINING_SEEDS = range(10_000, 13_200)
PUBLISHED_VALIDATION_SEEDS = range(123, 635)
FIRST_DEMONSTRATION_SEED = 700_000_000
"""The bounds of env.seed_train and of the run's seed keep training seeds below this one."""
FIRST_REPLACEMENT_SEED = 1_000_000_000
TEST_LEVELS = 512
CANDIDATES_PER_TEST_LEVEL = 16

_BLOCK_SIZE = 64  # levels made per call in a search: making many at once is faster


def make_training_levels(
    environment: LevelSource[L], seeds: Sequence[int], excluded_keys: frozenset[bytes] = frozenset()
) -> list[L]:
    """Make the training levels of `seeds`.

    A level whose key is in `excluded_keys` (see `collect_excluded_keys`) is replaced: for seed s, by the first level of
    the seeds 1,000,000,000 + s, 1,000,000,001 + s, ... whose key is not excluded. The level of a seed therefore depends
    only on the seed and `excluded_keys`. Published levels of Sokoban (seeds 10000..13199) are never replaced, because
    none of them is in the test set.
    """
    return [
        _find_replacement(environment, level.seed, excluded_keys) if level.key in excluded_keys else level
        for level in environment.make_levels(seeds)
    ]


def make_validation_levels(environment: LevelSource[L], count: int = 512, base: int = 123) -> list[L]:
    """Make the levels of seeds base, base + 1, ...; by default, the seeds of the published Sokoban levels."""
    return list(environment.make_levels(range(base, base + count)))


def make_demonstration_levels(environment: LevelSource[L], count: int, first_index: int = 0) -> list[L]:
    """Make levels for demonstrations, without validation and test levels if the game can keep its sets apart.

    Levels are in the order of their seeds, from 700,000,000 + first_index on. To continue after a call, pass
    `first_index=levels[-1].seed - FIRST_DEMONSTRATION_SEED + 1`. Levels can repeat within the set.
    """
    held_out_keys: frozenset[bytes] = frozenset()
    if environment.has_held_out_levels:
        held_out_levels = [*make_validation_levels(environment), *environment.make_test_levels(TEST_LEVELS)]
        held_out_keys = collect_level_keys(held_out_levels)
    candidates = _iter_levels(environment, FIRST_DEMONSTRATION_SEED + first_index)
    return list(islice((level for level in candidates if level.key not in held_out_keys), count))


class RunLevels(NamedTuple):
    """The levels of one run, generated in advance so that steps do not wait for them.

    training: for each step, one level per group. refill: as many levels for each further batch that a step may sample,
    in the order of steps and batches. unseen_mask: True for each validation level that is no training level
    of the run, up to symmetry.
    """

    training: list[list[Level]]
    refill: list[list[Level]]
    validation: list[Level]
    test: list[Level]
    unseen_mask: list[bool]


def make_run_levels(environment: LevelSource[Any], config: RunConfig) -> RunLevels:
    """Make all levels of the run with this config. No training level is a test level."""
    env = config.env
    test_set = list(environment.make_test_levels(env.test_env_groups))
    validation = make_validation_levels(environment, env.val_env_groups, env.seed_val)
    excluded_keys = collect_excluded_keys(environment, test_set)
    training, refill = (
        [
            make_training_levels(environment, seeds[first : first + env.env_groups], excluded_keys)
            for first in range(0, len(seeds), env.env_groups)
        ]
        for seeds in (config.training_level_seeds, config.refill_level_seeds)
    )
    training_keys = collect_level_keys(chain(*training, *refill))
    return RunLevels(training, refill, validation, test_set, [level.key not in training_keys for level in validation])


def collect_level_keys(levels: Iterable[Level]) -> frozenset[bytes]:
    """Collect the keys of levels, which identify them up to symmetry."""
    return frozenset(level.key for level in levels)


def collect_excluded_keys(environment: LevelSource[Any], test_levels: Iterable[Level]) -> frozenset[bytes]:
    """Collect the keys of test levels, to exclude them from training; none if the game cannot keep its sets apart."""
    return collect_level_keys(test_levels) if environment.has_held_out_levels else frozenset()


def make_searched_test_levels(environment: Any, count: int) -> list[Any]:
    """Make the first `count` test levels, different up to symmetry and in no published set if there are enough."""
    levels = find_test_levels(environment)
    return list(
        environment.make_levels(range(FIRST_TEST_SEED, FIRST_TEST_SEED + count)) if levels is None else levels[:count]
    )


@lru_cache(maxsize=8)  # the search tries thousands of levels, and a process may train several runs
def find_test_levels(environment: Any, count: int = TEST_LEVELS) -> tuple[Any, ...] | None:
    """Find the first `count` test levels in the order of their seeds, all different and in no published set.

    Return None if 16 candidate seeds per test level do not give enough different levels.
    """
    published_seeds = (*PUBLISHED_VALIDATION_SEEDS, *PUBLISHED_TRAINING_SEEDS)
    seen_keys = set(collect_level_keys(environment.make_levels(published_seeds)))
    levels: list[Level] = []
    for level in islice(_iter_levels(environment, FIRST_TEST_SEED), CANDIDATES_PER_TEST_LEVEL * count):
        if len(levels) == count:
            break
        if level.key not in seen_keys:
            seen_keys.add(level.key)
            levels.append(level)
    return tuple(levels) if len(levels) == count else None


def _find_replacement(environment: LevelSource[L], seed: int, excluded_keys: frozenset[bytes]) -> L:
    candidates = (environment.make_levels([candidate])[0] for candidate in counting(FIRST_REPLACEMENT_SEED + seed))
    return next(candidate for candidate in candidates if candidate.key not in excluded_keys)


def _iter_levels(environment: LevelSource[L], seed: int) -> Iterator[L]:
    for start in counting(seed, _BLOCK_SIZE):
        yield from environment.make_levels(range(start, start + _BLOCK_SIZE))
