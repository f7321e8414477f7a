"""All states of one-box levels: where each action leads, and how far each state is from the solution."""

import numpy as np
import numpy.typing as npt

from trainable.envs.sokoban.board import BOXES, DIRECTIONS, PLAYERS, TARGETS, Cells, Tile

Distances = npt.NDArray[np.int16]

_UNSOLVED = 2**14
"""Larger than any distance."""


def find_places(cells: Cells) -> tuple[int, int]:
    """Find the flat cells of the player and of the only box, the indices into a distance table."""
    flat = cells.reshape(-1)
    return int(np.isin(flat, PLAYERS).argmax()), int(np.isin(flat, BOXES).argmax())


def compute_distance_table(cells: Cells) -> Distances:
    """Compute the fewest actions that solve a one-box level from every position of player and box.

    distance(player, box) is 0 where the box is on the target, and otherwise 1 + the smallest distance after one action.
    It is -1 where the level cannot be solved, or where player or box cannot be.

    cells: int8 (R, C), a board with one box. Only its walls and its target matter.
    Returns int16 (R*C, R*C), indexed by flat cells [player, box].
    """
    flat, size = cells.reshape(-1), cells.size
    (next_states,) = make_transitions(cells[None])
    distances = np.full(size**2 + 1, _UNSOLVED, dtype=np.int16)
    distances[-1] = 0
    # Each pass finds the states that are one action further away.
    while ((nearer := np.minimum(distances, distances[next_states].min(axis=0) + 1)) != distances).any():
        distances = nearer
    table = np.where(distances == _UNSOLVED, np.int16(-1), distances)[:-1].reshape(size, size)
    table[:, np.isin(flat, TARGETS)] = 0
    is_wall = flat == Tile.WALL
    table[is_wall[:, None] | is_wall | np.eye(size, dtype=bool)] = -1
    return table


def make_transitions(boards: Cells) -> npt.NDArray[np.intp]:
    """Compute the next state (B, 4, S) of each board, action and state. The last state is `solved`, which is final.

    boards: int8 (B, R, C) with one box. A state is player * R*C + box over flat cells. Impossible states are included,
    but never reached.
    """
    batch, rows, cols = boards.shape
    size = rows * cols
    flat_boards = boards.reshape(batch, size)
    is_wall = flat_boards == Tile.WALL
    targets = np.isin(flat_boards, TARGETS).argmax(axis=1)
    player, box = (grid.reshape(-1) for grid in np.divmod(np.arange(size**2), size))
    solved_state = size**2
    tables = []
    for row_step, col_step in DIRECTIONS.values():
        offset = row_step * cols + col_step
        # Wrapping at the border reads another wall (see `board.step`).
        ahead, behind = (player + offset) % size, (player + 2 * offset) % size
        pushes = ahead == box
        blocked = is_wall[:, ahead] | (pushes & is_wall[:, behind])  # (B, S)
        next_box = np.where(pushes, behind, box)
        next_state = np.where(blocked, player * size + box, ahead * size + next_box)
        # A box on the target ends the episode. A blocked action leaves the level as it is, unsolved.
        table = np.where(~blocked & (next_box == targets[:, None]), solved_state, next_state)
        tables.append(np.pad(table, ((0, 0), (0, 1)), constant_values=solved_state))
    return np.stack(tables, axis=1)
