"""The test levels of Sokoban. Their seeds are shipped as a file, so that runs need no search.

Run as a module to print the file of test seeds.
"""

import json
from pathlib import Path

from trainable.envs.level_sets import TEST_LEVELS, find_test_levels
from trainable.envs.sokoban.generate import SokobanLevel, generate_levels

TEST_SEEDS_FILE = Path(__file__).with_name("test_seeds.json")


def make_test_levels(count: int = TEST_LEVELS) -> list[SokobanLevel]:
    """Make the first `count` of the 512 test levels, all distinct up to symmetry, from the shipped seeds."""
    return generate_levels(json.loads(TEST_SEEDS_FILE.read_text(encoding="utf-8"))["seeds"][:count])


def main() -> None:
    """Print the file of test seeds."""
    levels = find_test_levels(generate_levels)
    assert levels is not None  # Sokoban has enough levels
    about = "Seeds of the test levels; printed by: python -m trainable.envs.sokoban.held_out"
    print(json.dumps({"about": about, "seeds": [level.seed for level in levels]}, indent=0))


if __name__ == "__main__":
    main()
