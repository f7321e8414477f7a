import pytest

from trainable.config.run_config import RunConfig
from trainable.config.sections import EnvConfig, TrainerConfig
from trainable.envs import level_sets
from trainable.envs.environment import FIRST_TEST_SEED
from trainable.envs.sokoban import held_out
from trainable.envs.sokoban.game import Sokoban
from trainable.envs.sokoban.generate import generate_levels

SOKOBAN = Sokoban()


@pytest.fixture(scope="module")
def test_keys():
    return level_sets.collect_level_keys(held_out.make_test_levels())


@pytest.fixture(scope="module")
def published_keys():
    return level_sets.collect_level_keys(generate_levels(range(10_000, 13_200)))


def list_seeds(levels):
    return [level.seed for level in levels]


def list_boards(levels):
    return [level.cells.tobytes() for level in levels]


@pytest.mark.parametrize("env_groups", [4, 8])
def test_training_seeds_shift_by_the_groups_of_a_step(env_groups):
    steps = [list_seeds(level_sets.make_training_levels(SOKOBAN, 0, step, env_groups)) for step in (1, 2, 3)]
    assert steps == [list(range(10_000 + env_groups * t, 10_000 + env_groups * (t + 1))) for t in range(3)]


def test_training_seeds_of_another_seed_index_and_base():
    assert level_sets.compute_training_seed(0, 3199) == 13_199
    assert level_sets.compute_training_seed(2, 5) == 2_010_005
    assert list_seeds(level_sets.make_training_levels(SOKOBAN, 1, 2, 3, base=500)) == [1_000_503, 1_000_504, 1_000_505]


def test_validation_levels_are_the_published_seeds():
    assert list_seeds(level_sets.make_validation_levels(SOKOBAN)) == list(range(123, 635))
    assert list_seeds(level_sets.make_validation_levels(SOKOBAN, 3, base=1000)) == [1000, 1001, 1002]


@pytest.mark.parametrize("seed", [0, 3])
def test_a_run_has_the_level_seeds_of_its_configuration(monkeypatch, seed):
    env = EnvConfig(env_groups=3, val_env_groups=5, test_env_groups=4, seed_train=700, seed_val=50)
    config = RunConfig(seed=seed, env=env, trainer=TrainerConfig(total_training_steps=4))
    monkeypatch.setattr(level_sets, "collect_excluded_keys", lambda *_: frozenset())  # none is replaced
    levels = level_sets.make_run_levels(SOKOBAN, config)
    assert [seed for step in levels.training for seed in list_seeds(step)] == [*config.training_level_seeds]
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
    assert len(test_keys) == len(held_out.make_test_levels()) == 512
    assert not test_keys & level_sets.collect_level_keys(level_sets.make_validation_levels(SOKOBAN))
    assert not test_keys & published_keys
    assert min(list_seeds(held_out.make_test_levels())) >= 900_000_000


@pytest.mark.long
def test_the_shipped_seeds_are_what_the_search_finds(capsys):
    held_out.main([])
    assert capsys.readouterr().out == held_out.TEST_SEEDS_FILE.read_text(encoding="utf-8")
    assert list_seeds(level_sets.find_test_levels(generate_levels, 24)) == list_seeds(held_out.make_test_levels(24))


@pytest.mark.long
def test_write_writes_the_shipped_file(monkeypatch, tmp_path):
    shipped_bytes = held_out.TEST_SEEDS_FILE.read_bytes()
    monkeypatch.setattr(held_out, "TEST_SEEDS_FILE", tmp_path / "seeds.json")
    held_out.main(["--write"])
    assert (tmp_path / "seeds.json").read_bytes() == shipped_bytes


def test_fewer_test_levels_are_the_first_ones():
    assert list_boards(held_out.make_test_levels(5)) == list_boards(held_out.make_test_levels())[:5]


@pytest.mark.long
def test_published_training_levels_stay_as_published(test_keys):
    published_levels = generate_levels(range(10_000, 13_200))
    assert list_boards(level_sets.make_training_levels(SOKOBAN, 0, 1, 3200, excluded_keys=test_keys)) == list_boards(
        published_levels
    )


def test_other_training_levels_are_replaced_where_they_are_test_levels(test_keys):
    unfiltered_levels = level_sets.make_training_levels(SOKOBAN, 1, 1, 256)
    filtered_levels = level_sets.make_training_levels(SOKOBAN, 1, 1, 256, excluded_keys=test_keys)
    replacements = [
        (old_level, new_level)
        for old_level, new_level in zip(unfiltered_levels, filtered_levels, strict=True)
        if old_level.key in test_keys
    ]
    assert replacements
    assert not test_keys & level_sets.collect_level_keys(filtered_levels)
    assert all(new_level.seed - old_level.seed >= 1_000_000_000 for old_level, new_level in replacements)
    assert [
        new_level.seed
        for old_level, new_level in zip(unfiltered_levels, filtered_levels, strict=True)
        if old_level.key not in test_keys
    ] == [old_level.seed for old_level in unfiltered_levels if old_level.key not in test_keys]


def test_a_replacement_depends_on_its_own_seed_only(test_keys):
    levels = level_sets.make_training_levels(SOKOBAN, 1, 1, 64, excluded_keys=test_keys)
    levels_by_step = [
        level
        for step in range(1, 9)
        for level in level_sets.make_training_levels(SOKOBAN, 1, step, 8, excluded_keys=test_keys)
    ]
    assert list_boards(levels_by_step) == list_boards(levels)
    assert list_seeds(levels_by_step) == list_seeds(levels)


def test_a_replacement_is_the_first_seed_that_is_allowed():
    (level,) = level_sets.make_training_levels(SOKOBAN, 1, 1, 1)
    first_seed = 1_000_000_000 + level.seed
    candidates = generate_levels(range(first_seed, first_seed + 20))
    excluded_keys = frozenset({level.key, candidates[0].key})
    expected = next(candidate for candidate in candidates if candidate.key not in excluded_keys)
    assert list_seeds(level_sets.make_training_levels(SOKOBAN, 1, 1, 1, excluded_keys=excluded_keys)) == [expected.seed]


def test_demonstrations_show_no_validation_or_test_level(test_keys):
    keys = level_sets.collect_level_keys(level_sets.make_demonstration_levels(SOKOBAN, 400))
    assert not keys & test_keys
    assert not keys & level_sets.collect_level_keys(level_sets.make_validation_levels(SOKOBAN))


def test_demonstrations_go_on_where_a_call_ended():
    levels = level_sets.make_demonstration_levels(SOKOBAN, 20)
    first_levels = level_sets.make_demonstration_levels(SOKOBAN, 8)
    later_levels = level_sets.make_demonstration_levels(
        SOKOBAN, 12, first_index=first_levels[-1].seed - level_sets.FIRST_DEMONSTRATION_SEED + 1
    )
    assert list_boards(first_levels) + list_boards(later_levels) == list_boards(levels)
    assert level_sets.make_demonstration_levels(SOKOBAN, 0) == []


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (level_sets.compute_training_seed, (-1, 0), "seed index -1"),
        (level_sets.compute_training_seed, (0, 1_000_000), "group 1000000"),
        (level_sets.compute_training_seed, (700, 0), "below 700000000"),
        (level_sets.make_training_levels, (SOKOBAN, 0, 0, 8), "step 0"),
        (level_sets.make_training_levels, (SOKOBAN, 0, 1, 0), "0 groups"),
        (held_out.make_test_levels, (513,), "between 0 and 512"),
        (level_sets.make_demonstration_levels, (SOKOBAN, -1), "-1 demonstration levels"),
        (level_sets.make_demonstration_levels, (SOKOBAN, 3, 200_000_000), "test seeds"),
    ],
)
def test_bad_arguments_are_named(function, arguments, message):
    with pytest.raises(ValueError, match=message):
        function(*arguments)
