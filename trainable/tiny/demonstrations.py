"""Dialogues in which a solver plays Sokoban in the compact protocol, with habits that reinforcement can mend."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from trainable.envs.sokoban.board import DIRECTIONS, Action, Cells, Tile, step
from trainable.envs.sokoban.generate import Level
from trainable.envs.sokoban.prompt import END_OF_MESSAGE, Observation, Protocol, reply_text
from trainable.envs.sokoban.solver import Distances, distance_table
from trainable.tiny.tokenizer import PLAN_LETTERS, place

_NAMED = {
    "P": (Tile.PLAYER, Tile.PLAYER_ON_TARGET),
    "X": (Tile.BOX, Tile.BOX_ON_TARGET),
    "O": (Tile.TARGET, Tile.BOX_ON_TARGET, Tile.PLAYER_ON_TARGET),
}
_MOVES = tuple(PLAN_LETTERS)


@dataclass(frozen=True)
class Habits:
    """How the demonstrator strays: shares of turns, drawn independently.

    detour: the plan begins with a legal move that leaves the level solvable but brings it no nearer.
    careless: the thought is right, the answer's actions are drawn at random.
    unfinished: the reply ends after its thought, which is malformed.
    """

    detour: float = 0.0
    careless: float = 0.0
    unfinished: float = 0.0


@dataclass(frozen=True)
class Segment:
    """A stretch of a dialogue: its text, and whether the model is to learn it."""

    text: str
    learned: bool


def dialogue(
    level: Level, protocol: Protocol, habits: Habits, rng: np.random.Generator, turns: int, per_turn: int, budget: int
) -> list[Segment]:
    """One episode played by the demonstrator under the protocol's limits: given and replied text in turn."""
    cells, table = level.cells, distance_table(level.cells)
    segments = [Segment(protocol.opening(Observation(1, cells, budget)), False)]
    left = budget
    for turn in range(1, turns + 1):
        text, actions = _reply(cells, table, habits, rng, per_turn)
        segments.append(Segment(text + END_OF_MESSAGE, True))
        cells, reward, solved, used = _play(cells, actions[:left])
        left -= used
        if solved or left == 0 or turn == turns:
            return segments
        segments.append(Segment(protocol.following(Observation(turn + 1, cells, left, reward)), False))
    return segments


def dialogues(
    levels: Sequence[Level], protocol: Protocol, habits: Habits, rng: np.random.Generator, turns: int, per_turn: int,
    budget: int,
) -> Iterator[list[Segment]]:  # fmt: skip
    """One dialogue a level, each level turned or mirrored at random."""
    for level in levels:
        cells = np.rot90(level.cells, int(rng.integers(4)))
        if rng.integers(2):
            cells = cells.T
        turned = Level(level.seed, np.ascontiguousarray(cells))
        yield dialogue(turned, protocol, habits, rng, turns, per_turn, budget)


def _reply(
    cells: Cells, table: Distances, habits: Habits, rng: np.random.Generator, per_turn: int
) -> tuple[str, list[Action]]:
    spots = {symbol: _spot(cells, tiles) for symbol, tiles in _NAMED.items()}
    plan = _plan(spots["P"], spots["X"], cells.shape[1], table, rng, detour=bool(rng.random() < habits.detour))
    names = "".join(place(symbol, *divmod(spot, cells.shape[1])) for symbol, spot in spots.items())
    thought = names + "".join(PLAN_LETTERS[action] for action in plan)
    if rng.random() < habits.unfinished:
        return thought, []
    actions = plan[:per_turn]
    if rng.random() < habits.careless:
        actions = [_MOVES[number] for number in rng.integers(len(_MOVES), size=per_turn)]
    return reply_text(thought, actions), actions


def _spot(cells: Cells, tiles: tuple[Tile, ...]) -> int:
    """Flat place of the one thing that is any of `tiles`."""
    return next(spot for spot, tile in enumerate(cells.ravel().tolist()) if tile in tiles)


def _plan(player: int, box: int, cols: int, table: Distances, rng: np.random.Generator, detour: bool) -> list[Action]:
    """A shortest plan with ties drawn at random, after a detour if one is asked for and there is one.

    The table alone tells where a move leads: a place with a distance of 0 or more can be stood on.
    """
    plan: list[Action] = []
    while (distance := int(table[player, box])) > 0:
        ways = [(action, *_moved(player, box, action, cols)) for action in _MOVES]
        straying = detour and not plan
        chosen = [way for way in ways if _is_way(int(table[way[1], way[2]]), distance, straying)]
        if straying and not chosen:
            detour = False
            continue
        action, player, box = chosen[rng.integers(len(chosen))]
        plan.append(action)
    return plan


def _moved(player: int, box: int, action: Action, cols: int) -> tuple[int, int]:
    row, col = DIRECTIONS[action]
    offset = row * cols + col
    return player + offset, box + offset if player + offset == box else box


def _is_way(reached: int, distance: int, straying: bool) -> bool:
    """On the shortest path; or, straying, off it with the level unsolved and still solvable."""
    return reached > 0 and reached != distance - 1 if straying else reached == distance - 1


def _play(cells: Cells, actions: Sequence[Action]) -> tuple[Cells, float, bool, int]:
    """The level after `actions`, their summed reward, whether it is solved, and how many were played."""
    reward, solved, used = 0.0, False, 0
    for action in actions:
        outcome = step(cells[None], np.array([action]))
        cells, solved = outcome.cells[0], bool(outcome.solved[0])
        reward += float(outcome.rewards[0])
        used += 1
        if solved:
            break
    return cells, reward, solved, used
