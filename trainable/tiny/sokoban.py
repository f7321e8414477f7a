"""Demonstrations and vocabulary of sokoban-tiny: a solver plays shortest solutions."""

import itertools
from collections.abc import Sequence

import numpy as np

from trainable.envs.sokoban.board import DIRECTIONS, Action, Cells, Tile
from trainable.envs.sokoban.game import ACTION_NAMES, SYMBOLS
from trainable.envs.sokoban.solver import Distances, compute_distance_table
from trainable.tiny.dialogues import Demonstrator, MakePlan, Plan, turn_board
from trainable.tiny.tokenizer import Vocabulary, format_place

PLAN_LETTERS: dict[Action, str] = {action: name[0] for action, name in ACTION_NAMES.items()}
"""Letters of a plan in a thought, one per action."""

ACTIONS_SHOWN = 10
"""Rewards of up to this many actions are single pieces: the default of env.max_actions_per_traj."""

_TILES_BY_SYMBOL = {
    "P": (Tile.PLAYER, Tile.PLAYER_ON_TARGET),
    "X": (Tile.BOX, Tile.BOX_ON_TARGET),
    "O": (Tile.TARGET, Tile.BOX_ON_TARGET, Tile.PLAYER_ON_TARGET),
}


def _can_neighbor(first: str, second: str) -> bool:
    """Check whether a level with one player, one box and one target can contain both symbols."""
    contents = {"O": "target", "√": "target box", "X": "box", "P": "player", "S": "player target"}
    return not set(contents.get(first, "").split()) & set(contents.get(second, "").split())


def make_vocabulary() -> Vocabulary:
    """Make the pieces: pairs of neighboring cells, and for thoughts the positions of player, box, target, and plans."""
    cells = [SYMBOLS[tile] for tile in Tile]
    pairs = [a + b for a, b in itertools.product(cells, cells) if _can_neighbor(a, b)]
    inner_range = range(1, 5)  # rows and columns of a 6x6 level without its walls
    places = [format_place(symbol, row, col) for symbol in "PXO" for row in inner_range for col in inner_range]
    return Vocabulary(
        rewards=tuple(-tenths / 10 + 0.0 for tenths in range(ACTIONS_SHOWN + 1)),
        state_pieces=(*pairs, *(pair + "\n" for pair in pairs), *cells),
        thought_pieces=(*places, *PLAN_LETTERS.values()),
        action_pieces=tuple(ACTION_NAMES.values()),
    )


def start_plans(cells: Cells) -> MakePlan:
    """Prepare plans for one level, whose distances are computed once."""
    table = compute_distance_table(cells)

    def make_plan(states: Sequence[Cells], has_detour: bool, rng: np.random.Generator) -> Plan:
        cells = states[-1]
        cols = cells.shape[1]
        spots = {symbol: int(np.isin(cells, tiles).argmax()) for symbol, tiles in _TILES_BY_SYMBOL.items()}
        actions = _plan_actions(spots["P"], spots["X"], cols, table, rng, has_detour)
        names = "".join(format_place(symbol, *divmod(spot, cols)) for symbol, spot in spots.items())
        thought = names + "".join(PLAN_LETTERS[action] for action in actions)
        return Plan(thought, [ACTION_NAMES[action] for action in actions])

    return make_plan


DEMONSTRATOR = Demonstrator(start_plans, turn_board, tuple(ACTION_NAMES.values()))


def _plan_actions(
    player: int, box: int, cols: int, table: Distances, rng: np.random.Generator, has_detour: bool
) -> list[Action]:
    """Plan a shortest solution with random tie-breaking, after a detour if `has_detour` and one exists.

    A detour is a legal move that leaves the level solvable but brings it no nearer to its solution. The table defines
    which moves are legal: cells with a distance of 0 or more can be entered.
    """
    plan: list[Action] = []
    while (distance := int(table[player, box])) > 0:
        moves = [(action, *_move(player, box, action, cols)) for action in PLAN_LETTERS]
        is_detour = has_detour and not plan
        candidates = [move for move in moves if _is_candidate(int(table[move[1], move[2]]), distance, is_detour)]
        if is_detour and not candidates:  # every other move is blocked, solves the level or makes it unsolvable
            has_detour = False
            continue
        action, player, box = candidates[rng.integers(len(candidates))]
        plan.append(action)
    return plan


def _move(player: int, box: int, action: Action, cols: int) -> tuple[int, int]:
    row, col = DIRECTIONS[action]
    offset = row * cols + col
    return player + offset, box + offset if player + offset == box else box


def _is_candidate(next_distance: int, distance: int, is_detour: bool) -> bool:
    """Check whether a move is on a shortest path, or for a detour, off it with the level unsolved but solvable."""
    return next_distance > 0 and next_distance != distance - 1 if is_detour else next_distance == distance - 1
