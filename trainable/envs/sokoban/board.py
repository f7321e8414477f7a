"""The rules of Sokoban on a batch of boards: tiles, actions, and one step."""

from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Cells = npt.NDArray[np.int8]

REWARD_ACTION = -0.1
REWARD_BOX_ON_TARGET = 1.0
REWARD_BOX_OFF_TARGET = -1.0
REWARD_SOLVED = 10.0


class Tile(IntEnum):
    """The content of one cell of a board.

    The published code uses 5 for every player and keeps targets in a second array. Here a player on a target has a
    separate code, so that one array holds the whole board.
    """

    WALL = 0
    FLOOR = 1
    TARGET = 2
    BOX_ON_TARGET = 3
    BOX = 4
    PLAYER = 5
    PLAYER_ON_TARGET = 6


class Action(IntEnum):
    """An action, with the published codes 1 to 4. All four can push a box.

    NONE is added here: it changes nothing and has reward 0, so that finished boards can stay in a batch.
    """

    NONE = 0
    UP = 1
    DOWN = 2
    LEFT = 3
    RIGHT = 4


DIRECTIONS: dict[Action, tuple[int, int]] = {
    Action.UP: (-1, 0),
    Action.DOWN: (1, 0),
    Action.LEFT: (0, -1),
    Action.RIGHT: (0, 1),
}


class Outcome(NamedTuple):
    """The result of one action on each of B boards.

    cells: int8 (B, R, C), a new array of the boards afterwards.
    rewards: float64 (B,).
    solved: bool (B,), True where every box is on a target afterwards.
    """

    cells: Cells
    rewards: npt.NDArray[np.float64]
    solved: npt.NDArray[np.bool_]


def step(cells: Cells, actions: npt.NDArray[np.integer]) -> Outcome:
    """Execute one action on each board.

    The player moves to the next cell if it is free (floor or an empty target), or pushes the box there if the cell
    behind the box is free. Any other action leaves the board unchanged.

    reward = -0.1  +1 if a box came onto a target  -1 if one left a target  +10 if all targets are covered,
    and 0 for Action.NONE. A blocked action costs -0.1. A box that was on a target before the action earns nothing
    (in the published code it earns +1 on the first action). As published, every further action on a solved board earns
    +10 again, so the caller must end the episode at `solved`.

    cells: int8 (B, R, C), each board with a border of walls, one player, and as many boxes as targets (not checked).
    actions: integers (B,), codes of `Action`.
    Source: published code (rules and rewards). B = 0 gives empty arrays.
    """
    next_cells: Cells = np.array(cells, dtype=np.int8, order="C")
    flat = next_cells.reshape(-1)
    player = np.flatnonzero(flat >= _PLAYER)
    path = player[:, None] + _make_offsets(cells.shape[2]).take(actions, axis=0)
    # The three cells of a path are encoded as one number, the index into the tables of results. A path leaves the array
    # only behind a border wall; wrapping then reads and writes another wall.
    code = flat.take(path, mode="wrap") @ _CODE_WEIGHTS
    flat.put(path, _TABLES.tiles.take(code, axis=0), mode="wrap")
    solved = is_solved(next_cells)
    rewards = _TABLES.rewards.take(code)
    rewards += REWARD_SOLVED * (solved & (actions != _NONE))  # not in the tables: depends on the whole board
    return Outcome(next_cells, rewards, solved)


def is_solved(cells: Cells) -> npt.NDArray[np.bool_]:
    """Check for each board whether every box is on a target.

    cells: int8 (B, R, C). Returns bool (B,). A board without boxes counts as solved.
    """
    batch, rows, cols = cells.shape
    unsolved: npt.NDArray[np.bool_] = (cells.reshape(batch, rows * cols) == _BOX).any(axis=1)
    return ~unsolved


@lru_cache(maxsize=16)
def _make_offsets(cols: int) -> npt.NDArray[np.intp]:
    """Return flat offsets (action, 3) from the player to its own cell, the cell ahead, and the cell behind that."""
    ahead = np.zeros(len(Action), dtype=np.intp)
    for action, (row_step, col_step) in DIRECTIONS.items():
        ahead[action] = row_step * cols + col_step
    offsets: npt.NDArray[np.intp] = ahead[:, None] * np.arange(3)
    offsets.flags.writeable = False
    return offsets


class _Tables(NamedTuple):
    """Results for each triple of tile codes (player's cell, cell ahead, cell behind that).

    The index of a triple is triple @ _CODE_WEIGHTS.
    """

    tiles: Cells  # (triples, 3)
    rewards: npt.NDArray[np.float64]  # (triples,), without the bonus for a solved board


def _build_tables() -> _Tables:
    # A blocked action leaves the triple as it is, so each row starts as the triple itself.
    triples = np.indices((len(Tile),) * 3, dtype=np.int8).reshape(3, -1).T.copy()
    rewards = np.full(len(triples), REWARD_ACTION)
    for row, (player, ahead, behind) in enumerate(triples.tolist()):
        if ahead >= Tile.PLAYER:
            rewards[row] = 0.0  # Action.NONE: the cell ahead is the player's own
        elif player >= Tile.PLAYER and (behind if ahead in BOXES else ahead) in (Tile.FLOOR, Tile.TARGET):
            triples[row] = _advance(player, ahead, behind)
            rewards[row] += _BOX_REWARDS.get((ahead, behind), 0.0)
    return _Tables(triples, rewards)


def _advance(player: int, ahead: int, behind: int) -> tuple[int, int, int]:
    vacated_tile = Tile.TARGET if player == Tile.PLAYER_ON_TARGET else Tile.FLOOR
    entered_tile = Tile.PLAYER_ON_TARGET if ahead in (Tile.TARGET, Tile.BOX_ON_TARGET) else Tile.PLAYER
    if ahead in BOXES:
        behind = Tile.BOX_ON_TARGET if behind == Tile.TARGET else Tile.BOX
    return vacated_tile, entered_tile, behind


# Plain integers, because comparing an int8 array with an IntEnum member makes numpy widen the array first (slow).
_NONE = int(Action.NONE)
_BOX = int(Tile.BOX)
_PLAYER = int(Tile.PLAYER)
TARGETS = (int(Tile.TARGET), int(Tile.BOX_ON_TARGET), int(Tile.PLAYER_ON_TARGET))
BOXES = (_BOX, int(Tile.BOX_ON_TARGET))
PLAYERS = (_PLAYER, int(Tile.PLAYER_ON_TARGET))
_CODE_WEIGHTS = np.array([len(Tile) ** 2, len(Tile), 1], dtype=np.int16)
_BOX_REWARDS: dict[tuple[int, int], float] = {
    (Tile.BOX, Tile.TARGET): REWARD_BOX_ON_TARGET,
    (Tile.BOX_ON_TARGET, Tile.FLOOR): REWARD_BOX_OFF_TARGET,
}
_TABLES = _build_tables()
