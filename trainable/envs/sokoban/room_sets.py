"""Which rooms are for training, validation, test and demonstration, and that test rooms are met nowhere else.

Set            Seeds                                          Shares no room with
training       10000 + 1,000,000 k + counter                  test (outside the published 10000..13199 by replacement)
validation     123, 124, ... (512 of them are published)      test, demonstration
demonstration  700,000,000 and up, some left out              validation, test
test           512 of 900,000,000 and up, shipped as a file   validation, published training, demonstration, itself
replacement    1,000,000,000 and up, some left out            test

"Shares no room" is meant up to the eight symmetries of the square (`Room.key`): seeds alone do not keep rooms apart.
Run as a module it prints the file of test seeds; with --write it writes it.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import count as counting
from itertools import islice
from pathlib import Path

from trainable.envs.sokoban.generate import Room, generate_room, generate_rooms

PUBLISHED_TRAINING_SEEDS = range(10_000, 13_200)
PUBLISHED_VALIDATION_SEEDS = range(123, 635)
SEEDS_PER_RUN = 1_000_000
FIRST_DEMONSTRATION_SEED = 700_000_000
FIRST_TEST_SEED = 900_000_000
FIRST_REPLACEMENT_SEED = 1_000_000_000
TEST_ROOMS = 512
TEST_SEEDS_FILE = Path(__file__).with_name("test_seeds.json")

_BLOCK = 64


def training_seed(seed_index: int, group_counter: int, base: int = 10_000) -> int:
    """The seed of one training room: base + 1,000,000 * seed_index + group_counter.

    seed_index: which of the seeds of a study, from 0 (the published stream).
    group_counter: groups handed out before this one; env_groups * (t - 1) + i for group i of the 1-based step t.
    """
    seed = base + SEEDS_PER_RUN * seed_index + group_counter
    if seed_index < 0 or not 0 <= group_counter < SEEDS_PER_RUN or not 0 <= seed < FIRST_DEMONSTRATION_SEED:
        raise ValueError(
            f"no training room for seed index {seed_index}, group {group_counter}, base {base}: an index is 0 or more, "
            f"a group 0 to {SEEDS_PER_RUN - 1}, and their seed below {FIRST_DEMONSTRATION_SEED}"
        )
    return seed


def training_rooms(
    seed_index: int, step: int, env_groups: int, base: int = 10_000, skip: frozenset[bytes] = frozenset()
) -> list[Room]:
    """Make the rooms of one training step, one for each group.

    A room whose key is in `skip` is replaced, unless it is a published one (seeds 10000..13199, which share no room
    with the test set): seed s by the first of 1,000,000,000 + s, 1,000,000,001 + s, ... whose key is not in `skip`.
    So what a seed becomes depends on nothing but the seed and `skip`.

    seed_index: see `training_seed`. step: from 1. env_groups: groups a step. base: first seed of index 0.
    skip: keys of the test rooms, `room_keys(test_rooms())`.
    """
    if step < 1 or env_groups < 1:
        raise ValueError(f"step {step} with {env_groups} groups; both are at least 1")
    seeds = [training_seed(seed_index, env_groups * (step - 1) + group, base) for group in range(env_groups)]
    return [_replaced(room, skip) for room in generate_rooms(seeds)]


def validation_rooms(count: int = 512, base: int = 123) -> list[Room]:
    """Make the rooms of seeds base, base + 1, ...; the defaults are the published 512, 472 of them distinct boards."""
    return generate_rooms(range(base, base + count))


def test_rooms(count: int = TEST_ROOMS) -> list[Room]:  # noqa: PT028 - rooms for testing a policy, not a test
    """Make the first `count` of the 512 test rooms, all distinct up to symmetry, from the seeds in the shipped file."""
    if not 0 <= count <= TEST_ROOMS:
        raise ValueError(f"{count} test rooms; there are 0 to {TEST_ROOMS}")
    seeds: list[int] = json.loads(TEST_SEEDS_FILE.read_text(encoding="utf-8"))["seeds"]
    return generate_rooms(seeds[:count])


def demonstration_rooms(count: int, first: int = 0) -> list[Room]:
    """Make rooms to show a policy how to play: none of them is a validation or test room.

    They come in the order of their seeds from 700,000,000 + first on. To go on after a call, pass
    `first=rooms[-1].seed - FIRST_DEMONSTRATION_SEED + 1`. Rooms may repeat among themselves.
    """
    if count < 0 or first < 0:
        raise ValueError(f"{count} demonstration rooms from {first} on; both are at least 0")
    held_out = _held_out_keys()
    start = FIRST_DEMONSTRATION_SEED + first
    rooms = list(islice((room for room in _rooms_from(start) if room.key not in held_out), count))
    if rooms and rooms[-1].seed >= FIRST_TEST_SEED:
        raise ValueError(f"{count} demonstration rooms from {first} on reach the test seeds; ask for fewer")
    return rooms


def room_keys(rooms: Iterable[Room]) -> frozenset[bytes]:
    """Collect the rooms' keys (each room up to the eight symmetries)."""
    return frozenset(room.key for room in rooms)


def find_test_seeds(count: int = TEST_ROOMS) -> list[int]:
    """Search the first `count` test seeds: in order, those whose room is in no published set and was not found before.

    The shipped file is this search's result; nothing searches at start-up.
    """
    published = (*PUBLISHED_VALIDATION_SEEDS, *PUBLISHED_TRAINING_SEEDS)
    met = set(room_keys(generate_rooms(published)))
    seeds: list[int] = []
    for room in _rooms_from(FIRST_TEST_SEED):
        if len(seeds) == count:
            break
        if room.key not in met:
            met.add(room.key)
            seeds.append(room.seed)
    return seeds


def seeds_file_content() -> str:
    """What the shipped file of test seeds holds: JSON, one seed a line."""
    about = "Seeds of the test rooms; made by: python -m trainable.envs.sokoban.room_sets --write"
    return json.dumps({"about": about, "seeds": find_test_seeds()}, indent=0) + "\n"


def _replaced(room: Room, skip: frozenset[bytes]) -> Room:
    if not skip or room.seed in PUBLISHED_TRAINING_SEEDS or room.key not in skip:
        return room
    candidates = (generate_room(seed) for seed in counting(FIRST_REPLACEMENT_SEED + room.seed))
    return next(candidate for candidate in candidates if candidate.key not in skip)


def _rooms_from(seed: int) -> Iterator[Room]:
    for start in counting(seed, _BLOCK):
        yield from generate_rooms(range(start, start + _BLOCK))


@lru_cache(maxsize=1)
def _held_out_keys() -> frozenset[bytes]:
    return room_keys(validation_rooms()) | room_keys(test_rooms())


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the file of test seeds, or write it in its place."""
    parser = argparse.ArgumentParser(prog="python -m trainable.envs.sokoban.room_sets", description=main.__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {TEST_SEEDS_FILE.name} in the package")
    if parser.parse_args(arguments).write:
        TEST_SEEDS_FILE.write_text(seeds_file_content(), encoding="utf-8")
    else:
        sys.stdout.write(seeds_file_content())


if __name__ == "__main__":
    main()
