"""Generate from each seed the same level as the published generator, with integers and bit masks instead of arrays.

Only the inner cells of a board are numbered here, row by row. The seeds that `find_test_levels` finds are shipped as a
file, so that runs need no search.
"""

import hashlib
import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trainable.envs.level_sets import TEST_LEVELS
from trainable.envs.sokoban.board import Cells, Tile

TEST_SEEDS_FILE = Path(__file__).with_name("test_seeds.json")

# Published settings.
_SIDE = 6  # rows and columns of a board, with its border of walls
_CARVE_STEPS = 20
_TURN_PROBABILITY = 0.35
_TRIES = 4
_SEARCH_DEPTH = 300

_MIN_FLOOR = 3  # cells: the player, the box on its target, and the box after a pull
_WALK_DIRECTIONS = ((1, 0), (0, 1), (-1, 0), (0, -1))
_PULL_DIRECTIONS = ((-1, 0), (1, 0), (0, -1), (0, 1))
_STAMPS = (
    ((0, -1), (0, 0), (0, 1)),
    ((-1, 0), (0, 0), (1, 0)),
    ((0, -1), (0, 0), (1, 0)),
    ((0, -1), (0, 0), (1, -1), (1, 0)),
    ((0, 0), (0, 1), (1, 0)),
)
_BACKTRACK = -1  # marks, on the stack of the search, that all successors of a state have been searched


@dataclass(frozen=True, eq=False)
class SokobanLevel:
    """A start board and its seed. Levels compare by identity: compare `cells` or `key` instead.

    seed: the requested seed, even if the level was made from a derived one (see `compute_fallback_seed`).
    cells: int8 (6, 6), read-only.
    """

    seed: int
    cells: Cells

    @property
    def key(self) -> bytes:
        """The level up to the eight symmetries of the square: the smallest bytes of the eight boards."""
        boards: list[bytes] = [board.tobytes() for board in self.cells.reshape(-1)[_SYMMETRIES]]
        return min(boards)


def generate_levels(seeds: Iterable[int]) -> list[SokobanLevel]:
    """Generate the published level of each seed, from 0 to 2**32 - 1.

    1. Carve: walk 20 steps, turning with probability 0.35, and stamp one of five 3x3 shapes of floor at each step.
    2. Place the player, then a target with the box on it, on random floor cells.
    3. Pull: search depth-first (up, down, left, right; 300 states deep) and keep the first state with the largest
       Manhattan distance between box and target. If it is 0, start again at 1, up to 4 times in total.
    4. With probability 0.5 (0.8 if that distance is 1), walk the player 1 to 3 steps away.

    If a seed carves fewer than 3 cells of floor, or all tries fail, `compute_fallback_seed(seed)` replaces the seed.
    Source: published code. Its two random streams (Python's and NumPy's legacy one) are local here.
    """
    numpy_rng = np.random.RandomState(0)  # reseeded for each level, which is faster than making a new one
    return [SokobanLevel(int(seed), _generate_board(int(seed), numpy_rng)) for seed in seeds]


def make_test_levels(count: int = TEST_LEVELS) -> list[SokobanLevel]:
    """Make the first `count` of the 512 test levels, all distinct up to symmetry, from the shipped seeds."""
    return generate_levels(json.loads(TEST_SEEDS_FILE.read_text(encoding="utf-8"))["seeds"][:count])


def compute_fallback_seed(seed: int) -> int:
    """Replace a seed that gives no level by the first 4 bytes (big-endian) of the SHA-256 of its decimal digits.

    The published code uses Python's `hash` of this string, which differs between processes.
    """
    return int.from_bytes(hashlib.sha256(str(seed).encode()).digest()[:4], "big")


def _generate_board(seed: int, numpy_rng: np.random.RandomState) -> Cells:
    numpy_rng.seed(seed)
    cells = _try_generate(random.Random(seed), numpy_rng)
    return _generate_board(compute_fallback_seed(seed), numpy_rng) if cells is None else cells


def _try_generate(python_rng: random.Random, numpy_rng: np.random.RandomState) -> Cells | None:
    """Carve, place and pull until the box is off its target; return None if the seed gives no level."""
    for _ in range(_TRIES):
        floor_mask = _carve(python_rng)
        floor = [cell for cell in range(_SIZE) if floor_mask >> cell & 1]
        if len(floor) < _MIN_FLOOR:
            return None
        player = floor[numpy_rng.randint(len(floor))]
        free_cells = [cell for cell in floor if cell != player]
        target = free_cells[numpy_rng.randint(len(free_cells))]
        score, box, player = _pull(floor, player, target)
        if score > 0:
            # 0.8 and 0.5 are the published probabilities.
            player = _walk_player(python_rng, set(floor) - {box}, player, 0.8 if score == 1 else 0.5)
            return _make_board(floor, player, box, target)
    return None


def _carve(python_rng: random.Random) -> int:
    """Walk at random (in the published order of draws) and stamp floor; return a bit mask of the inner floor cells."""
    row_step, col_step = python_rng.choice(_WALK_DIRECTIONS)
    # As published, the walk may start on the far border; the first step moves it inside.
    row, col = python_rng.randint(1, _SIDE - 1), python_rng.randint(1, _SIDE - 1)
    floor_mask = 0
    for _ in range(_CARVE_STEPS):
        if python_rng.random() < _TURN_PROBABILITY:
            row_step, col_step = python_rng.choice(_WALK_DIRECTIONS)
        row = min(max(row + row_step, 1), _SIDE - 2)
        col = min(max(col + col_step, 1), _SIDE - 2)
        floor_mask |= python_rng.choice(_STAMP_MASKS[_CELL_AT[row, col]])
    return floor_mask


def _pull(floor: list[int], player: int, target: int) -> tuple[int, int, int]:
    """Pull the box backwards from its target; return (score, box, player) of the first state with the best score.

    A state is (moved * size + box) * size + player. `moved` is 1 once the box has been pulled: the published search
    keeps such states apart even when the box is back on its first cell. The score is the Manhattan distance of box and
    target. The published score is 0 where the player covers the target. With one box, this makes no difference: the
    search reaches such a state from one with the same score (the player walked) or a higher one (the box came closer).
    """
    walls = bytearray(b"\x01" * _SIZE)
    for cell in floor:
        walls[cell] = 0
    scores = _SCORES[target]
    best_state = max(_search(target * _SIZE + player, walls * (2 * _SIZE)), key=scores.__getitem__)
    return scores[best_state], *divmod(best_state % _SIZE**2, _SIZE)


def _search(start: int, closed: bytearray) -> list[int]:
    """List the states in the order in which a recursive depth-first search enters them.

    start: index of a state into `closed`, which has one byte per state, 1 where the player would be in a wall. Visited
    states are set to 1.
    """
    visited_states: list[int] = []
    stack = [start]
    depth = 1
    while stack:
        state = stack.pop()
        if state == _BACKTRACK:
            depth -= 1
        elif depth < _SEARCH_DEPTH and not closed[state]:
            closed[state] = 1
            visited_states.append(state)
            stack += _PULLS[state]
            depth += 1
    return visited_states


def _walk_player(python_rng: random.Random, free_cells: set[int], player: int, probability: float) -> int:
    """With `probability`, walk the player 1 to 3 steps over free cells, without visiting a cell twice."""
    if python_rng.random() > probability:
        return player
    free_cells = free_cells - {player}
    for _ in range(3):  # the 3 and the 0.5 below are as published
        next_cells = [cell for cell in _STEPS[player] if cell in free_cells]
        if not next_cells:
            break
        player = python_rng.choice(next_cells)
        free_cells = free_cells - {player}
        if python_rng.random() > 0.5:
            break
    return player


def _make_board(floor: list[int], player: int, box: int, target: int) -> Cells:
    tiles = bytearray(_SIDE**2)
    for cell in floor:
        tiles[_FLAT[cell]] = Tile.FLOOR
    tiles[_FLAT[target]] = Tile.TARGET
    tiles[_FLAT[box]] = Tile.BOX
    tiles[_FLAT[player]] = Tile.PLAYER_ON_TARGET if player == target else Tile.PLAYER
    return np.frombuffer(bytes(tiles), dtype=np.int8).reshape(_SIDE, _SIDE)  # read-only, since `bytes` are


def _make_pull_table() -> list[tuple[int, ...]]:
    """List for each state on a board without inner walls `_BACKTRACK` and then its successors.

    They are in reverse order, because the stack of `_search` pops the last first.
    """
    table: list[tuple[int, ...]] = []
    for moved in range(2):
        for box in range(_SIZE):
            for player, neighbors in enumerate(_STEPS):
                # The opposite neighbor in each direction: a box there is pulled along.
                behind = (neighbors[1], neighbors[0], neighbors[3], neighbors[2])
                successors = [
                    (_SIZE + player) * _SIZE + ahead if back == box else (moved * _SIZE + box) * _SIZE + ahead
                    for ahead, back in zip(neighbors, behind, strict=True)
                    if ahead is not None and ahead != box
                ]
                table.append((_BACKTRACK, *reversed(successors)))
    return table


_PLACES = [(row, col) for row in range(1, _SIDE - 1) for col in range(1, _SIDE - 1)]
_SIZE = len(_PLACES)
_FLAT = [row * _SIDE + col for row, col in _PLACES]
_CELL_AT = {place: cell for cell, place in enumerate(_PLACES)}
_STEPS = [tuple(_CELL_AT.get((row + i, col + j)) for i, j in _PULL_DIRECTIONS) for row, col in _PLACES]
"""The neighbor of each cell in each direction; None for the border."""
_STAMP_MASKS = [
    [sum(1 << _CELL_AT[row + i, col + j] for i, j in stamp if (row + i, col + j) in _CELL_AT) for stamp in _STAMPS]
    for row, col in _PLACES
]
"""The bit mask of floor that each stamp carves at each cell."""
_PULLS = _make_pull_table()
_SCORES = [2 * b"".join(bytes([abs(row - i) + abs(col - j)]) * _SIZE for i, j in _PLACES) for row, col in _PLACES]
"""The score of each state, by target."""
_INDEX = np.arange(_SIDE**2).reshape(_SIDE, _SIDE)
_SYMMETRIES = np.array([np.rot90(side, turns).reshape(-1) for side in (_INDEX, _INDEX.T) for turns in range(4)])
"""Flat indices (8, 36) of the four rotations of a board, then of its mirror image."""
