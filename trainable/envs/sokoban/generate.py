"""Generate from each seed the same level as the published generator, with integers and bit masks instead of arrays."""

import hashlib
import random
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trainable.envs.sokoban.board import Cells, Tile

MAX_SEED = 2**32 - 1
MAX_FALLBACKS = 100
"""Derived seeds to try if a seed gives no level. Bounds the search for settings that never give one."""

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
    cells: int8 (R, C), read-only.
    """

    seed: int
    cells: Cells

    @property
    def key(self) -> bytes:
        """The level up to the eight symmetries of the square: the smallest bytes of the eight boards."""
        rows, cols = self.cells.shape
        boards: list[bytes] = [board.tobytes() for board in self.cells.reshape(-1)[_make_symmetries(rows, cols)]]
        return min(boards)


class LevelSettings(NamedTuple):
    """The settings of `generate_levels`; the defaults are published."""

    rows: int = 6
    cols: int = 6
    num_steps: int = 20
    p_change_directions: float = 0.35
    tries: int = 4
    search_depth: int = 300


PUBLISHED_SETTINGS = LevelSettings()


def generate_levels(seeds: Iterable[int], settings: LevelSettings = PUBLISHED_SETTINGS) -> list[SokobanLevel]:
    """Generate the published level of each seed.

    1. Carve: walk `num_steps` steps, turning with probability `p_change_directions`, and stamp one of five 3x3 shapes
       of floor at each step.
    2. Place the player, then a target with the box on it, on random floor cells.
    3. Pull: search depth-first (up, down, left, right; `search_depth` states deep) and keep the first state with the
       largest Manhattan distance between box and target. If it is 0, start again at 1, up to `tries` times in total.
    4. With probability 0.5 (0.8 if that distance is 1), walk the player 1 to 3 steps away.

    If a seed carves fewer than 3 cells of floor, or all tries fail, `compute_fallback_seed(seed)` replaces the seed.

    seeds: 0 to 2**32 - 1. rows, cols: 4 to 20, the border included. (On larger boards the published search stops after
    300,000 states, which is not implemented here.)
    Source: published code. Its two random streams (Python's and NumPy's legacy one) are local here.
    Raises ValueError for a seed out of range, or if 100 derived seeds give no level.
    """
    numpy_rng = np.random.RandomState(0)  # reseeded for each level, which is faster than making a new one
    return [SokobanLevel(int(seed), _generate_board(int(seed), numpy_rng, settings)) for seed in seeds]


def compute_fallback_seed(seed: int) -> int:
    """Replace a seed that gives no level by the first 4 bytes (big-endian) of the SHA-256 of its decimal digits.

    The published code uses Python's `hash` of this string, which differs between processes.
    """
    return int.from_bytes(hashlib.sha256(str(seed).encode()).digest()[:4], "big")


def _generate_board(seed: int, numpy_rng: np.random.RandomState, settings: LevelSettings) -> Cells:
    if not 0 <= seed <= MAX_SEED:
        raise ValueError(f"seed is {seed}; it must be between 0 and {MAX_SEED} (2**32 - 1)")
    candidate = seed
    for _ in range(MAX_FALLBACKS + 1):
        numpy_rng.seed(candidate)
        cells = _try_generate(random.Random(candidate), numpy_rng, settings)
        if cells is not None:
            return cells
        candidate = compute_fallback_seed(candidate)
    raise ValueError(
        f"seed {seed} and {MAX_FALLBACKS} seeds derived from it give no level with {settings}: raise num_steps, so "
        "that more floor is carved"
    )


def _try_generate(python_rng: random.Random, numpy_rng: np.random.RandomState, settings: LevelSettings) -> Cells | None:
    """Carve, place and pull until the box is off its target; return None if the seed gives no level."""
    grid = _make_grid(settings.rows, settings.cols)
    for _ in range(settings.tries):
        floor_mask = _carve(python_rng, settings, grid)
        floor = [cell for cell in range(grid.size) if floor_mask >> cell & 1]
        if len(floor) < _MIN_FLOOR:
            return None
        player = floor[numpy_rng.randint(len(floor))]
        free_cells = [cell for cell in floor if cell != player]
        target = free_cells[numpy_rng.randint(len(free_cells))]
        score, box, player = _pull(grid, floor, player, target, settings.search_depth)
        if score > 0:
            # 0.8 and 0.5 are the published probabilities.
            player = _walk_player(python_rng, grid, set(floor) - {box}, player, 0.8 if score == 1 else 0.5)
            return _make_board(grid, floor, player, box, target)
    return None


def _carve(python_rng: random.Random, settings: LevelSettings, grid: "_Grid") -> int:
    """Walk at random (in the published order of draws) and stamp floor; return a bit mask of the inner floor cells."""
    height, width = settings.rows - 2, settings.cols - 2
    row_step, col_step = python_rng.choice(_WALK_DIRECTIONS)
    # As published, the walk may start on the far border; the first step moves it inside.
    row = python_rng.randint(1, settings.rows - 1)
    col = python_rng.randint(1, settings.cols - 1)
    floor_mask = 0
    for _ in range(settings.num_steps):
        if python_rng.random() < settings.p_change_directions:
            row_step, col_step = python_rng.choice(_WALK_DIRECTIONS)
        row = min(max(row + row_step, 1), height)
        col = min(max(col + col_step, 1), width)
        floor_mask |= python_rng.choice(grid.stamps[(row - 1) * width + col - 1])
    return floor_mask


def _pull(grid: "_Grid", floor: list[int], player: int, target: int, search_depth: int) -> tuple[int, int, int]:
    """Pull the box backwards from its target; return (score, box, player) of the first state with the best score."""
    walls = bytearray(b"\x01" * grid.size)
    for cell in floor:
        walls[cell] = 0
    start = target * grid.size + player
    visited_states = _search(start, walls * (2 * grid.size), grid.pulls, search_depth)
    scores = _compute_scores(grid.rows, grid.cols, target)
    best_state = max(visited_states, key=scores.__getitem__)
    return scores[best_state], *divmod(best_state % grid.size**2, grid.size)


def _search(start: int, closed: bytearray, pulls: tuple[tuple[int, ...], ...], search_depth: int) -> list[int]:
    """List the states in the order in which a recursive depth-first search enters them.

    start: index of a state into `closed` and `pulls`.
    closed: one byte per state, 1 where the player would be in a wall. Visited states are set to 1.
    pulls: for each state, `_BACKTRACK` and then its successors in reverse order, because a stack pops the last first.
    """
    visited_states: list[int] = []
    stack = [start]
    depth = 1
    while stack:
        state = stack.pop()
        if state == _BACKTRACK:
            depth -= 1
        elif depth < search_depth and not closed[state]:
            closed[state] = 1
            visited_states.append(state)
            stack += pulls[state]
            depth += 1
    return visited_states


def _walk_player(
    python_rng: random.Random, grid: "_Grid", free_cells: set[int], player: int, probability: float
) -> int:
    """With `probability`, walk the player 1 to 3 steps over free cells, without visiting a cell twice."""
    if python_rng.random() > probability:
        return player
    free_cells = free_cells - {player}
    for _ in range(3):  # the 3 and the 0.5 below are as published
        next_cells = [cell for cell in grid.neighbors[player] if cell in free_cells]
        if not next_cells:
            break
        player = python_rng.choice(next_cells)
        free_cells = free_cells - {player}
        if python_rng.random() > 0.5:
            break
    return player


def _make_board(grid: "_Grid", floor: list[int], player: int, box: int, target: int) -> Cells:
    tiles = bytearray(grid.rows * grid.cols)
    for cell in floor:
        tiles[grid.board_cells[cell]] = Tile.FLOOR
    tiles[grid.board_cells[target]] = Tile.TARGET
    tiles[grid.board_cells[box]] = Tile.BOX
    tiles[grid.board_cells[player]] = Tile.PLAYER_ON_TARGET if player == target else Tile.PLAYER
    # An array over `bytes` is read-only.
    return np.frombuffer(bytes(tiles), dtype=np.int8).reshape(grid.rows, grid.cols)


class _Grid(NamedTuple):
    """Look-up tables of one board size. Only inner cells are numbered, row by row.

    A state of the backward search is (moved * size + box) * size + player. `moved` is 1 once the box has been pulled:
    the published search keeps such states apart even when the box is back on its first cell.
    """

    rows: int
    cols: int
    size: int
    coordinates: tuple[tuple[int, int], ...]
    board_cells: tuple[int, ...]
    neighbors: tuple[tuple[int, ...], ...]
    stamps: tuple[tuple[int, ...], ...]
    pulls: tuple[tuple[int, ...], ...]


@lru_cache(maxsize=8)
def _make_grid(rows: int, cols: int) -> _Grid:
    coordinates = tuple((row, col) for row in range(1, rows - 1) for col in range(1, cols - 1))
    cell_at = {place: cell for cell, place in enumerate(coordinates)}
    steps = tuple(
        tuple(cell_at.get((row + row_step, col + col_step)) for row_step, col_step in _PULL_DIRECTIONS)
        for row, col in coordinates
    )
    return _Grid(
        rows=rows,
        cols=cols,
        size=len(coordinates),
        coordinates=coordinates,
        board_cells=tuple(row * cols + col for row, col in coordinates),
        neighbors=tuple(tuple(cell for cell in around if cell is not None) for around in steps),
        stamps=tuple(
            tuple(
                sum(1 << cell_at[(row + i, col + j)] for i, j in stamp if (row + i, col + j) in cell_at)
                for stamp in _STAMPS
            )
            for row, col in coordinates
        ),
        pulls=_make_pull_table(steps),
    )


def _make_pull_table(steps: tuple[tuple[int | None, ...], ...]) -> tuple[tuple[int, ...], ...]:
    """List the successors of each state on a board without inner walls, in the format of `_search`."""
    size = len(steps)
    table: list[tuple[int, ...]] = []
    for moved in range(2):
        for box in range(size):
            for player, neighbors in enumerate(steps):
                # The opposite neighbor in each direction: a box there is pulled along.
                behind = (neighbors[1], neighbors[0], neighbors[3], neighbors[2])
                successors = [
                    (size + player) * size + ahead if back == box else (moved * size + box) * size + ahead
                    for ahead, back in zip(neighbors, behind, strict=True)
                    if ahead is not None and ahead != box
                ]
                table.append((_BACKTRACK, *reversed(successors)))
    return tuple(table)


@lru_cache(maxsize=64)
def _compute_scores(rows: int, cols: int, target: int) -> bytes:
    """Compute the score of each state: the Manhattan distance of box and target."""
    # The published score is 0 where the player covers the target. With one box, this makes no difference: the search
    # reaches such a state from one with the same score (the player walked) or a higher one (the box came closer).
    grid = _make_grid(rows, cols)
    row, col = grid.coordinates[target]
    distances = (abs(row - i) + abs(col - j) for i, j in grid.coordinates)
    return 2 * b"".join(bytes([distance]) * grid.size for distance in distances)


@lru_cache(maxsize=8)
def _make_symmetries(rows: int, cols: int) -> npt.NDArray[np.intp]:
    """Return flat indices (8, R*C) of the four rotations of a board, then of its mirror image."""
    index = np.arange(rows * cols).reshape(rows, cols)
    turned_indices = [np.rot90(side, turns).reshape(-1) for side in (index, index.T) for turns in range(4)]
    return np.array(turned_indices)
