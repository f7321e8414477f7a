"""Distances of one-box levels from their solutions."""

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from trainable.envs.sokoban.board import BOXES, DIRECTIONS, PLAYERS, TARGETS, Cells, Tile

Distances = npt.NDArray[np.int16]


def compute_distance_table(cells: Cells) -> Distances:
    """Compute the fewest actions that solve a one-box level from every position of player and box.

    distance(player, box) is 0 where the box is on the target, and otherwise 1 + the smallest distance after one action.
    It is -1 where the level cannot be solved, or where player or box cannot be.

    cells: int8 (R, C), a board with one box. Only its walls and its target matter.
    Returns int16 (R*C, R*C), indexed by flat cells [player, box].
    """
    flat = cells.reshape(-1)
    (target_cell,) = _find_cells(cells, TARGETS)
    rows, cols = cells.shape
    # Player and box are never in the border of walls, so only inner cells are numbered.
    inner = np.arange(rows * cols).reshape(rows, cols)[1:-1, 1:-1].reshape(-1)
    target = int(np.searchsorted(inner, target_cell))
    distances_by_box = _compute_distances((flat[inner] == Tile.WALL).tobytes(), target, _list_predecessors(rows, cols))
    table = np.full((rows * cols, rows * cols), -1, dtype=np.int16)
    table[inner[:, None], inner] = np.array(distances_by_box, dtype=np.int16).reshape(inner.size, inner.size).T
    return table


def find_places(cells: Cells) -> tuple[int, int]:
    """Find the flat cells of the player and of the only box, the indices into a distance table."""
    (player,) = _find_cells(cells, PLAYERS)
    (box,) = _find_cells(cells, BOXES)
    return player, box


def _compute_distances(walls: bytes, target: int, predecessors: tuple[tuple[int, ...], ...]) -> list[int]:
    """Compute the distance of every state with one breadth-first search backwards from all solved states.

    walls: one byte per inner cell, 1 for a wall. target: an inner cell.
    Returns the distance of each state box * size + player, or -1.
    """
    size = len(walls)
    closed = bytearray(walls * size)  # closes states with the player in a wall
    frontier = [target * size + player for player in range(size) if player != target and not walls[player]]
    distances = [-1] * size**2
    distance = 0
    while frontier:
        next_frontier: list[int] = []
        for state in frontier:
            if not closed[state]:
                closed[state] = 1
                distances[state] = distance
                next_frontier += predecessors[state]
        frontier = next_frontier
        distance += 1
    return distances


@lru_cache(maxsize=8)  # depends only on the size of the board, and a study uses one size
def _list_predecessors(rows: int, cols: int) -> tuple[tuple[int, ...], ...]:
    """List the states one action before each state (box * size + player, over inner cells), ignoring walls."""
    places = [(row, col) for row in range(1, rows - 1) for col in range(1, cols - 1)]
    cell_at = {place: cell for cell, place in enumerate(places)}
    size = len(places)
    table: list[list[int]] = [[] for _ in range(size**2)]
    for came_from, (row, col) in enumerate(places):
        for row_step, col_step in DIRECTIONS.values():
            ahead = cell_at.get((row + row_step, col + col_step))
            behind = cell_at.get((row + 2 * row_step, col + 2 * col_step))
            if ahead is None:
                continue
            # The player walked from `came_from` to `ahead`, and the box was on neither cell.
            for box in range(size):
                if box not in (came_from, ahead):
                    table[box * size + ahead].append(box * size + came_from)
            # The player pushed the box from `ahead` to `behind`.
            if behind is not None:
                table[behind * size + ahead].append(ahead * size + came_from)
    return tuple(tuple(states) for states in table)


def _find_cells(cells: Cells, tiles: tuple[int, ...]) -> frozenset[int]:
    return frozenset(cell for cell, tile in enumerate(cells.reshape(-1).tolist()) if tile in tiles)
