"""Sokoban as an environment: the published levels, rules, rewards and prompts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from trainable.config.setting_types import PromptStyle
from trainable.envs.environment import Measure, TurnLimits, TurnOutcome
from trainable.envs.prompts import format_action_rules, format_board
from trainable.envs.sokoban.board import DIRECTIONS, TARGETS, Action, Cells, Tile, step
from trainable.envs.sokoban.generate import SokobanLevel, generate_levels, make_test_levels
from trainable.envs.sokoban.solver import compute_distance_table, find_places, make_transitions

SYMBOLS: dict[int, str] = {
    Tile.WALL: "#",
    Tile.FLOOR: "_",
    Tile.TARGET: "O",
    Tile.BOX_ON_TARGET: "√",
    Tile.BOX: "X",
    Tile.PLAYER: "P",
    Tile.PLAYER_ON_TARGET: "S",
}

# A target under a box or the player is listed as a target, too, so its cell appears in two lines.
_COORDINATE_LINES: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("Targets", TARGETS),
    ("Boxes", (int(Tile.BOX),)),
    ("Boxes on target", (int(Tile.BOX_ON_TARGET),)),
    ("Player", (int(Tile.PLAYER),)),
    ("Player on target", (int(Tile.PLAYER_ON_TARGET),)),
)

ACTION_NAMES: dict[Action, str] = {action: action.name.capitalize() for action in Action if action != Action.NONE}
"""Names of the actions in replies."""

_ACTIONS_BY_NAME = {name: action for action, name in ACTION_NAMES.items()}
_NAMES_BY_WORD = {name.lower(): name for name in ACTION_NAMES.values()}
_MEANINGS = {tile: tile.name.lower().replace("_", " ") for tile in Tile} | {Tile.FLOOR: "empty"}


@dataclass(frozen=True)
class Sokoban:
    """Sokoban on 6x6 boards with one box, as published (`CoordSokoban`). A state is a board, int8 (R, C).

    observation_format: how the full style shows a board (see `format_board`).
    """

    observation_format: str = "grid_coord"
    name = "sokoban"
    title = "Sokoban"
    has_held_out_levels = True
    measures: ClassVar[Mapping[str, Measure]] = MappingProxyType({})

    def make_levels(self, seeds: Sequence[int]) -> list[SokobanLevel]:
        """Generate the published level of each seed."""
        return generate_levels(seeds)

    def make_test_levels(self, count: int) -> list[SokobanLevel]:
        """Make the first `count` of the 512 shipped test levels."""
        return make_test_levels(count)

    def start(self, levels: Sequence[SokobanLevel]) -> list[Cells]:
        """Return the start boards."""
        return [level.cells for level in levels]

    def step(
        self, states: Sequence[Cells], actions: Sequence[Sequence[str]], luck: npt.NDArray[np.float64]
    ) -> TurnOutcome:
        """Execute the actions with one call of `board.step` per action, for all boards at once."""
        codes = np.zeros((len(states), max(map(len, actions), default=0)), dtype=np.int64)
        for row, names in enumerate(actions):
            codes[row, : len(names)] = [_ACTIONS_BY_NAME[name] for name in names]  # the rest stays 0: Action.NONE
        cells = np.stack(states)
        solved = np.zeros(len(states), dtype=bool)
        rewards = np.zeros(len(states))
        action_counts = np.zeros(len(states), dtype=np.int64)
        for column in codes.T:
            # Actions after the solution are ignored, because `board.step` would pay the bonus for a solved board again.
            executed_codes = np.where(solved, Action.NONE, column)
            outcome = step(cells, executed_codes)
            cells = outcome.cells
            rewards += outcome.rewards
            action_counts += executed_codes != Action.NONE
            solved |= outcome.solved & (executed_codes != Action.NONE)
        return TurnOutcome(list(cells), rewards, action_counts, done=solved, success=solved)

    def read_action(self, word: str) -> str | None:
        """Parse up, down, left or right, in any case."""
        return _NAMES_BY_WORD.get(word.lower())

    def format_instructions(self, max_actions: int) -> str:
        """Describe the rules, the symbols of a board, and the actions."""
        legend = ", ".join(f"{SYMBOLS[tile]}: {meaning}" for tile, meaning in _MEANINGS.items())
        action_rules = format_action_rules(tuple(ACTION_NAMES.values()), max_actions)
        return (
            "You are a helpful assistant. You are solving a Sokoban puzzle: move the player so that every box stands "
            "on a target. You are given a grid and zero-indexed coordinates (row, column), from (0, 0) at the top left "
            "to (5, 5) at the bottom right. Moving toward a box next to you pushes it one cell, if the cell behind it "
            "is free. You cannot push a box through a wall or another box, and you cannot pull. Your answer is a "
            "sequence of actions, for example <answer>Right || Right || Up</answer>.\n"
            f"The meaning of each symbol is:\n{legend}\n{action_rules}"
        )

    def format_state(self, state: Cells, style: PromptStyle) -> str:
        """Render the board. The compact style omits the outer wall, which every level has."""
        return render(state[1:-1, 1:-1], "grid") if style == "compact" else render(state, self.observation_format)

    def compute_chance(self, levels: Sequence[SokobanLevel], limits: TurnLimits) -> npt.NDArray[np.float64]:
        """Compute the exact probability that uniformly random actions solve each level, by following all walks."""
        boards = np.stack([level.cells for level in levels])
        next_states = make_transitions(boards)
        num_levels, _, num_states = next_states.shape
        # Backwards over actions, and for all levels at once, in one flat array.
        next_states = next_states + num_states * np.arange(num_levels)[:, None, None]
        next_states = next_states.transpose(1, 0, 2).reshape(len(DIRECTIONS), -1)
        values = np.zeros((num_levels, num_states))
        values[:, -1] = 1.0  # the state `solved`
        for _ in range(limits.reachable_actions):
            values = values.reshape(-1)[next_states].mean(axis=0)
        players, boxes = np.array([find_places(level.cells) for level in levels]).T
        return values.reshape(num_levels, num_states)[np.arange(num_levels), players * boards[0].size + boxes]

    def compute_best(self, levels: Sequence[SokobanLevel], limits: TurnLimits) -> npt.NDArray[np.float64]:
        """Return 1 for each level that can be solved within the limits, 0 otherwise."""
        distances = [int(compute_distance_table(level.cells)[find_places(level.cells)]) for level in levels]
        return np.array([float(0 <= distance <= limits.reachable_actions) for distance in distances])


def render(cells: Cells, observation_format: str) -> str:
    """Render a board, int8 (R, C), as the text that a policy sees; see `format_board` for the formats.

    Source: published code (texts to the byte).
    """
    symbols = cells.tobytes().decode("latin-1").translate(SYMBOLS)  # each cell is the character of its code
    grid = "\n".join([symbols[start : start + cells.shape[1]] for start in range(0, cells.size, cells.shape[1])])
    if observation_format == "grid":  # skips the coordinates, which every compact prompt leaves out
        return grid
    codes = cells.reshape(-1).tolist()
    cells_by_label = {
        label: [cell for cell, code in enumerate(codes) if code in kinds] for label, kinds in _COORDINATE_LINES
    }
    return format_board(grid, cells.shape, cells_by_label, observation_format)
