"""Demonstrations for supervised training: a solver plays Sokoban in the compact prompt, with habits that RL can fix."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from trainable.envs.prompts import END_OF_MESSAGE, Observation, PromptTemplate, format_reply
from trainable.envs.sokoban.board import DIRECTIONS, Action, Cells, Tile, step
from trainable.envs.sokoban.game import ACTION_NAMES
from trainable.envs.sokoban.generate import Level
from trainable.envs.sokoban.solver import Distances, compute_distance_table
from trainable.tiny.tokenizer import PLAN_LETTERS, format_place

_TILES_BY_SYMBOL = {
    "P": (Tile.PLAYER, Tile.PLAYER_ON_TARGET),
    "X": (Tile.BOX, Tile.BOX_ON_TARGET),
    "O": (Tile.TARGET, Tile.BOX_ON_TARGET, Tile.PLAYER_ON_TARGET),
}
_MOVES = tuple(PLAN_LETTERS)


@dataclass(frozen=True)
class Habits:
    """The bad habits of the demonstrator. Each number is the fraction of turns with the habit, drawn independently.

    detour: the plan begins with a legal move that leaves the level solvable but brings it no nearer to its solution.
    careless: the thought is right, but the actions of the answer are random.
    unfinished: the reply ends after its thought and is malformed.
    """

    detour: float = 0.0
    careless: float = 0.0
    unfinished: float = 0.0


@dataclass(frozen=True)
class Segment:
    """A segment of a dialogue: its text, and whether the model is trained on it."""

    text: str
    is_trained: bool


def make_dialogue(
    level: Level,
    template: PromptTemplate,
    habits: Habits,
    rng: np.random.Generator,
    max_turns: int,
    max_actions_per_turn: int,
    max_actions: int,
) -> list[Segment]:
    """One episode of the demonstrator, until the level is solved or a limit is reached: prompts and replies in turn."""
    cells, table = level.cells, compute_distance_table(level.cells)
    segments = [
        Segment(
            template.format_first_turn(Observation(turn=1, state=cells, actions_left=max_actions)), is_trained=False
        )
    ]
    actions_left = max_actions
    for turn in range(1, max_turns + 1):
        text, actions = _make_reply(cells, table, habits, rng, max_actions_per_turn)
        segments.append(Segment(text + END_OF_MESSAGE, is_trained=True))
        cells, reward, solved, action_count = _play_actions(cells, actions[:actions_left])
        actions_left -= action_count
        if solved or actions_left == 0 or turn == max_turns:
            return segments
        next_observation = Observation(turn + 1, cells, actions_left, reward)
        segments.append(Segment(template.format_next_turn(next_observation), is_trained=False))
    return segments


def make_dialogues(
    levels: Sequence[Level],
    template: PromptTemplate,
    habits: Habits,
    rng: np.random.Generator,
    max_turns: int,
    max_actions_per_turn: int,
    max_actions: int,
) -> Iterator[list[Segment]]:
    """One dialogue per level. Each level is first rotated or mirrored at random."""
    for level in levels:
        cells = np.rot90(level.cells, int(rng.integers(4)))
        if rng.integers(2):
            cells = cells.T
        turned_level = Level(level.seed, np.ascontiguousarray(cells))
        yield make_dialogue(turned_level, template, habits, rng, max_turns, max_actions_per_turn, max_actions)


def _make_reply(
    cells: Cells, table: Distances, habits: Habits, rng: np.random.Generator, max_actions_per_turn: int
) -> tuple[str, list[Action]]:
    spots = {symbol: _find_cell(cells, tiles) for symbol, tiles in _TILES_BY_SYMBOL.items()}
    plan = _plan_actions(
        spots["P"], spots["X"], cells.shape[1], table, rng, has_detour=bool(rng.random() < habits.detour)
    )
    names = "".join(format_place(symbol, *divmod(spot, cells.shape[1])) for symbol, spot in spots.items())
    thought = names + "".join(PLAN_LETTERS[action] for action in plan)
    if rng.random() < habits.unfinished:
        return thought, []
    actions = plan[:max_actions_per_turn]
    if rng.random() < habits.careless:
        actions = [_MOVES[number] for number in rng.integers(len(_MOVES), size=max_actions_per_turn)]
    return format_reply(thought, [ACTION_NAMES[action] for action in actions]), actions


def _find_cell(cells: Cells, tiles: tuple[Tile, ...]) -> int:
    """Flat index of the one cell whose tile is one of `tiles`."""
    return next(spot for spot, tile in enumerate(cells.ravel().tolist()) if tile in tiles)


def _plan_actions(
    player: int, box: int, cols: int, table: Distances, rng: np.random.Generator, has_detour: bool
) -> list[Action]:
    """A shortest plan with random tie-breaking, after a detour if `has_detour` and a detour exists.

    The table alone decides which moves are legal: cells with a distance of 0 or more can be entered.
    """
    plan: list[Action] = []
    while (distance := int(table[player, box])) > 0:
        moves = [(action, *_move(player, box, action, cols)) for action in _MOVES]
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
    """Whether a move is on a shortest path; for a detour, off it, with the level unsolved and still solvable."""
    return next_distance > 0 and next_distance != distance - 1 if is_detour else next_distance == distance - 1


def _play_actions(cells: Cells, actions: Sequence[Action]) -> tuple[Cells, float, bool, int]:
    """The level after `actions`, their summed reward, whether it is solved, and how many actions were executed."""
    reward, solved, action_count = 0.0, False, 0
    for action in actions:
        outcome = step(cells[None], np.array([action]))
        cells, solved = outcome.cells[0], bool(outcome.solved[0])
        reward += float(outcome.rewards[0])
        action_count += 1
        if solved:
            break
    return cells, reward, solved, action_count
