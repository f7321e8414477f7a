"""The level sets of a game: training, validation, test and demonstrations. No other set contains a test level.

Set            Seeds                                          Shares no level with
training       10000 + 1,000,000 k + counter                  test (by replacement)
validation     123, 124, ... (512 of them by default)         test, demonstration
demonstration  700,000,000 and up, some left out              validation, test
test           512 of 900,000,000 and up                      validation, published training, demonstration, itself
replacement    1,000,000,000 and up, some left out            test

Every game uses the seeds of the published Sokoban levels. A plan whose training and validation seeds overlap is
refused. Different seeds can give equal levels, so levels are compared up to symmetry (`Level.key`). A game with few
levels cannot keep its sets apart (`LevelSource.has_held_out_levels`): its sets contain whatever levels their seeds
give.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from itertools import count as counting
from typing import Any, NamedTuple

from trainable.config.run_config import RunConfig
from trainable.config.setting_types import MAX_LEVELS
from trainable.envs.environment import FIRST_TEST_SEED, L, Level, LevelSource

MakeLevels = Callable[[Sequence[int]], Sequence[L]]
"""Makes the level of each seed."""

PUBLISHED_TRAINING_SEEDS = range(10_000, 13_200)
PUBLISHED_VALIDATION_SEEDS = range(123, 635)
# The bounds of env.seed_train and of the run's seed keep training seeds below the demonstration seeds.
SEEDS_PER_RUN = MAX_LEVELS
FIRST_DEMONSTRATION_SEED = 700_000_000
FIRST_REPLACEMENT_SEED = 1_000_000_000
TEST_LEVELS = 512
CANDIDATES_PER_TEST_LEVEL = 16

_BLOCK_SIZE = 64  # levels made per call in a search: making many at once is faster


def compute_training_seed(seed_index: int, group_counter: int, base: int = 10_000) -> int:
    """Compute the seed of one training level: base + 1,000,000 * seed_index + group_counter.

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
    environment: LevelSource[L],
    seed_index: int,
    step: int,
    env_groups: int,
    base: int = 10_000,
    excluded_keys: frozenset[bytes] = frozenset(),
) -> list[L]:
    """Make the levels of one training step, one for each group.

    A level whose key is in `excluded_keys` is replaced: for seed s, by the first level of the seeds 1,000,000,000 + s,
    1,000,000,001 + s, ... whose key is not excluded. The level of a seed therefore depends only on the seed and
    `excluded_keys`. Published levels of Sokoban (seeds 10000..13199) are never replaced, because none of them is in the
    test set.

    seed_index: see `compute_training_seed`. step: from 1. env_groups: groups per step. base: first seed of index 0.
    excluded_keys: see `collect_excluded_keys`.
    """
    if step < 1 or env_groups < 1:
        raise ValueError(f"step {step} with {env_groups} groups; both must be at least 1")
    seeds = [compute_training_seed(seed_index, env_groups * (step - 1) + group, base) for group in range(env_groups)]
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
    if count < 0 or first_index < 0:
        raise ValueError(f"{count} demonstration levels from {first_index} on; both must be at least 0")
    held_out_keys: frozenset[bytes] = frozenset()
    if environment.has_held_out_levels:
        held_out_levels = [*make_validation_levels(environment), *environment.make_test_levels(TEST_LEVELS)]
        held_out_keys = collect_level_keys(held_out_levels)
    candidates = _iter_levels(environment.make_levels, FIRST_DEMONSTRATION_SEED + first_index)
    levels = list(islice((level for level in candidates if level.key not in held_out_keys), count))
    if levels and levels[-1].seed >= FIRST_TEST_SEED:
        raise ValueError(f"{count} demonstration levels from {first_index} on reach the test seeds; ask for fewer")
    return levels


class RunLevels(NamedTuple):
    """The levels of one run, generated in advance so that steps do not wait for them.

    training: for each step, one level per group. unseen_mask: True for each validation level that is no training level
    of the run, up to symmetry.
    """

    training: list[list[Level]]
    validation: list[Level]
    test: list[Level]
    unseen_mask: list[bool]


def make_run_levels(environment: LevelSource[Any], config: RunConfig) -> RunLevels:
    """Make all levels of the run with this config. No training level is a test level."""
    env = config.env
    test_set = list(environment.make_test_levels(env.test_env_groups))
    validation = make_validation_levels(environment, env.val_env_groups, env.seed_val)
    excluded_keys = collect_excluded_keys(environment, test_set)
    training = [
        make_training_levels(environment, config.seed, step, env.env_groups, env.seed_train, excluded_keys)
        for step in range(1, config.trainer.total_training_steps + 1)
    ]
    training_keys = collect_level_keys(chain.from_iterable(training))
    return RunLevels(training, validation, test_set, [level.key not in training_keys for level in validation])


def collect_level_keys(levels: Iterable[Level]) -> frozenset[bytes]:
    """Collect the keys of levels, which identify them up to symmetry."""
    return frozenset(level.key for level in levels)


def collect_excluded_keys(environment: LevelSource[Any], test_levels: Iterable[Level]) -> frozenset[bytes]:
    """Collect the keys of test levels, to exclude them from training; none if the game cannot keep its sets apart."""
    return collect_level_keys(test_levels) if environment.has_held_out_levels else frozenset()


def find_test_levels(make_levels: MakeLevels[L], count: int = TEST_LEVELS) -> list[L] | None:
    """Find the first `count` test levels in the order of their seeds, all different and in no published set.

    Return None if 16 candidate seeds per test level do not give enough different levels.
    """
    published_seeds = (*PUBLISHED_VALIDATION_SEEDS, *PUBLISHED_TRAINING_SEEDS)
    seen_keys = set(collect_level_keys(make_levels(published_seeds)))
    levels: list[L] = []
    for level in islice(_iter_levels(make_levels, FIRST_TEST_SEED), CANDIDATES_PER_TEST_LEVEL * count):
        if len(levels) == count:
            break
        if level.key not in seen_keys:
            seen_keys.add(level.key)
            levels.append(level)
    return levels if len(levels) == count else None


def _find_replacement(environment: LevelSource[L], seed: int, excluded_keys: frozenset[bytes]) -> L:
    candidates = (environment.make_levels([candidate])[0] for candidate in counting(FIRST_REPLACEMENT_SEED + seed))
    return next(candidate for candidate in candidates if candidate.key not in excluded_keys)


def _iter_levels(make_levels: MakeLevels[L], seed: int) -> Iterator[L]:
    for start in counting(seed, _BLOCK_SIZE):
        yield from make_levels(range(start, start + _BLOCK_SIZE))
