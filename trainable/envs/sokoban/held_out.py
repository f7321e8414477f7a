"""The test levels of Sokoban. Their seeds are shipped as a file, so that runs need no search.

Run as a module to print the file of test seeds, or with --write to write it.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from trainable.envs.level_sets import TEST_LEVELS, find_test_levels
from trainable.envs.sokoban.generate import SokobanLevel, generate_levels

TEST_SEEDS_FILE = Path(__file__).with_name("test_seeds.json")


def make_test_levels(count: int = TEST_LEVELS) -> list[SokobanLevel]:
    """Make the first `count` of the 512 test levels, all distinct up to symmetry, from the shipped seeds."""
    if not 0 <= count <= TEST_LEVELS:
        raise ValueError(f"{count} test levels; the count must be between 0 and {TEST_LEVELS}")
    seeds: list[int] = json.loads(TEST_SEEDS_FILE.read_text(encoding="utf-8"))["seeds"]
    return generate_levels(seeds[:count])


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the file of test seeds, or with --write write it into the package."""
    parser = argparse.ArgumentParser(prog="python -m trainable.envs.sokoban.held_out", description=main.__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {TEST_SEEDS_FILE.name} into the package")
    writes_file = parser.parse_args(arguments).write
    about = "Seeds of the test levels; made by: python -m trainable.envs.sokoban.held_out --write"
    levels = find_test_levels(generate_levels)
    assert levels is not None  # Sokoban has enough levels
    text = json.dumps({"about": about, "seeds": [level.seed for level in levels]}, indent=0) + "\n"
    if writes_file:
        TEST_SEEDS_FILE.write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)


if __name__ == "__main__":
    main()
