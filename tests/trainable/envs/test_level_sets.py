import pytest

from trainable.config.run_config import RunConfig
from trainable.config.sections import EnvConfig, FilterConfig, TrainerConfig
from trainable.envs import level_sets
from trainable.envs.environment import FIRST_TEST_SEED
from trainable.envs.sokoban.game import Sokoban
from trainable.envs.sokoban.generate import generate_levels, make_test_levels

SOKOBAN = Sokoban()
SEEDS = range(1_010_000, 1_010_256)
"""The first training levels of a run with seed 1."""


@pytest.fixture(scope="module")
def test_keys():
    return level_sets.collect_level_keys(make_test_levels())


@pytest.fixture(scope="module")
def published_keys():
    return level_sets.collect_level_keys(generate_levels(range(10_000, 13_200)))


def list_seeds(levels):
    return [level.seed for level in levels]


def list_boards(levels):
    return [level.cells.tobytes() for level in levels]


def test_validation_levels_are_the_published_seeds():
    assert list_seeds(level_sets.make_validation_levels(SOKOBAN)) == list(range(123, 635))
    assert list_seeds(level_sets.make_validation_levels(SOKOBAN, 3, base=1000)) == [1000, 1001, 1002]


@pytest.mark.parametrize("seed", [0, 3])
def test_a_run_has_the_level_seeds_of_its_configuration(monkeypatch, seed):
    env = EnvConfig(env_groups=3, val_env_groups=5, test_env_groups=4, seed_train=700, seed_val=50)
    config = RunConfig(
        seed=seed,
        env=env,
        trainer=TrainerConfig(total_training_steps=4),
        filter=FilterConfig(max_num_gen_batches=3, rollout_filter_include_zero=False),
    )
    monkeypatch.setattr(level_sets, "collect_excluded_keys", lambda *_: frozenset())  # none is replaced
    levels = level_sets.make_run_levels(SOKOBAN, config)
    first = 700 + 1_000_000 * seed
    assert [list_seeds(step) for step in levels.training] == [
        [first + 3 * step, first + 3 * step + 1, first + 3 * step + 2] for step in range(4)
    ]
    assert config.training_level_seeds == range(first, first + 12)
    # Two further batches per step, with seeds that neither training nor gradient analyses have.
    assert [seed for batch in levels.refill for seed in list_seeds(batch)] == [
        first + 250_000 + number for number in range(24)
    ]
    assert list(map(len, levels.refill)) == [3] * 8
    assert list_seeds(levels.validation) == [*config.validation_level_seeds]
    assert min(list_seeds(levels.test)) >= FIRST_TEST_SEED


def test_no_setting_gives_training_or_validation_the_seeds_of_test_levels():
    largest = RunConfig.model_validate(
        {
            "seed": 400,
            "env": {"seed_train": 200_000_000, "seed_val": 200_000_000, "env_groups": 10, "val_env_groups": 1_000_000},
            "trainer": {"total_training_steps": 100_000},
        }
    )
    assert max(largest.training_level_seeds.stop, largest.validation_level_seeds.stop) <= FIRST_TEST_SEED


def test_test_levels_are_distinct_and_met_nowhere_else(test_keys, published_keys):
    """So no published training level is replaced."""
    assert len(test_keys) == len(make_test_levels()) == 512
    assert not test_keys & level_sets.collect_level_keys(level_sets.make_validation_levels(SOKOBAN))
    assert not test_keys & published_keys
    assert min(list_seeds(make_test_levels())) >= 900_000_000


@pytest.mark.long
def test_the_shipped_seeds_are_what_the_search_finds():
    assert list_seeds(level_sets.find_test_levels(SOKOBAN)) == list_seeds(make_test_levels())


def test_other_training_levels_are_replaced_where_they_are_test_levels(test_keys):
    unfiltered_levels = level_sets.make_training_levels(SOKOBAN, SEEDS)
    filtered_levels = level_sets.make_training_levels(SOKOBAN, SEEDS, test_keys)
    assert test_keys & level_sets.collect_level_keys(unfiltered_levels)
    assert not test_keys & level_sets.collect_level_keys(filtered_levels)
    for old_level, new_level in zip(unfiltered_levels, filtered_levels, strict=True):
        if old_level.key in test_keys:
            assert new_level.seed - old_level.seed >= 1_000_000_000
        else:
            assert new_level.seed == old_level.seed


def test_a_replacement_depends_on_its_own_seed_only(test_keys):
    levels = level_sets.make_training_levels(SOKOBAN, SEEDS[:64], test_keys)
    separate_levels = [level_sets.make_training_levels(SOKOBAN, [seed], test_keys)[0] for seed in SEEDS[:64]]
    assert list_boards(separate_levels) == list_boards(levels)
    assert list_seeds(separate_levels) == list_seeds(levels)


def test_a_replacement_is_the_first_seed_that_is_allowed():
    (level,) = level_sets.make_training_levels(SOKOBAN, SEEDS[:1])
    first_seed = 1_000_000_000 + level.seed
    candidates = generate_levels(range(first_seed, first_seed + 20))
    excluded_keys = frozenset({level.key, candidates[0].key})
    expected = next(candidate for candidate in candidates if candidate.key not in excluded_keys)
    assert list_seeds(level_sets.make_training_levels(SOKOBAN, SEEDS[:1], excluded_keys)) == [expected.seed]


def test_demonstrations_go_on_where_a_call_ended_and_show_no_validation_or_test_level(test_keys):
    levels = level_sets.make_demonstration_levels(SOKOBAN, 20)
    first_levels = level_sets.make_demonstration_levels(SOKOBAN, 8)
    next_index = first_levels[-1].seed - level_sets.FIRST_DEMONSTRATION_SEED + 1
    later_levels = level_sets.make_demonstration_levels(SOKOBAN, 12, first_index=next_index)
    assert list_boards(first_levels) + list_boards(later_levels) == list_boards(levels)
    assert level_sets.make_demonstration_levels(SOKOBAN, 0) == []
    keys = level_sets.collect_level_keys(level_sets.make_demonstration_levels(SOKOBAN, 400))
    assert not keys & test_keys
    assert not keys & level_sets.collect_level_keys(level_sets.make_validation_levels(SOKOBAN))
