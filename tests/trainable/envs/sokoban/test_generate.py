import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.oracles.sokoban import generate_level, oracle_generate_level, solve
from tests.strategies.examples import draw_examples
from trainable.envs import level_sets
from trainable.envs.sokoban.game import Sokoban, render
from trainable.envs.sokoban.generate import SokobanLevel, compute_fallback_seed, generate_levels

ROOT = Path(__file__).parents[4]
REFERENCE = json.loads((ROOT / "tests/data/sokoban_levels.json").read_text(encoding="utf-8"))["levels"]
FALLBACK_SEEDS = (3248, 11482)  # found by search; the second is one of the published training seeds


@pytest.mark.parametrize("entry", REFERENCE, ids=lambda entry: str(entry["seed"]))
def test_published_levels_are_reproduced(entry):
    level = generate_level(entry["seed"])
    assert render(level.cells, "grid").replace("\n", "/") == entry["level"]
    assert len(solve(level.cells)) == entry["shortest"]


def test_published_validation_levels_have_the_published_difficulty():
    levels = level_sets.make_validation_levels(Sokoban())
    lengths = [len(solve(level.cells)) for level in levels]
    assert Counter(lengths) == {1: 48, 2: 127, 3: 55, 4: 86, 5: 75, 6: 52, 7: 28, 8: 26, 9: 7, 10: 8}
    assert round(np.mean(lengths), 2) == 3.99
    assert len({level.cells.tobytes() for level in levels}) == 472
    assert len(level_sets.collect_level_keys(levels)) == 389
    assert [entry["seed"] for entry in REFERENCE] == list(range(123, 219))
    lengths = [len(solve(level.cells)) for level in generate_levels(range(10_000, 10_800))]
    assert sum(lengths) / 800 == 4.145
    assert sum(length <= 10 for length in lengths) / 800 == 0.9925


@draw_examples(60)
@given(st.integers(0, 2**32 - 1))
def test_levels_equal_the_literal_generator(seed):
    expected = oracle_generate_level(seed)
    if expected is None:
        expected = generate_level(compute_fallback_seed(seed)).cells
    np.testing.assert_array_equal(generate_level(seed).cells, expected)


def test_levels_do_not_depend_on_global_streams_or_on_each_other_and_are_read_only():
    separate_levels = [generate_level(seed).cells.tobytes() for seed in (5, 123, 3248)]
    np.random.seed(99)  # noqa: NPY002
    joint_levels = [level.cells.tobytes() for level in generate_levels((5, 123, 3248))]
    reversed_levels = [level.cells.tobytes() for level in generate_levels((3248, 123, 5))]
    assert separate_levels == joint_levels == reversed_levels[::-1]
    cells = generate_level(123).cells
    with pytest.raises(ValueError, match="read-only"):
        cells[0, 0] = 1


@pytest.mark.parametrize("seed", FALLBACK_SEEDS)
def test_a_seed_without_a_level_takes_the_level_of_its_derived_seed(seed):
    assert oracle_generate_level(seed) is None
    level = generate_level(seed)
    assert level.seed == seed
    np.testing.assert_array_equal(level.cells, oracle_generate_level(compute_fallback_seed(seed)))
    # printf 3248 | sha256sum
    assert compute_fallback_seed(3248) == 0x59AE69C1


@draw_examples(30)
@given(st.integers(0, 2**32 - 1), st.integers(0, 3), st.booleans())
def test_key_is_the_same_for_all_eight_symmetries(seed, quarter_turns, mirrored):
    cells = generate_level(seed).cells
    turned_cells = np.rot90(cells.T if mirrored else cells, quarter_turns)
    assert SokobanLevel(0, turned_cells).key == SokobanLevel(0, cells).key
    symmetric_boards = [np.rot90(board, turns).tobytes() for board in (cells, cells.T) for turns in range(4)]
    assert SokobanLevel(0, cells).key == min(symmetric_boards)
