"""FrozenLake: walk over slippery ice to the goal without falling into a hole, with the maps and rules of RAGEN.

Slips differ from the published ones. There, they depend on the environment's seed, so all rollouts of a group share
them. Here each episode draws its slips separately, so they contribute to the spread of rewards within a group.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from trainable.config.setting_types import PromptStyle
from trainable.envs.environment import Measure, TurnLimits, TurnOutcome
from trainable.envs.level_sets import find_test_levels, make_searched_test_levels
from trainable.envs.prompts import format_action_rules, format_board

Tiles = npt.NDArray[np.int8]

FROZEN, HOLE, START, GOAL = range(4)
ACTION_NAMES = ("Left", "Down", "Right", "Up")
"""The actions in Gymnasium's order. A slip turns an action into one of its two neighbors in this circle."""

MAX_FOLLOWED_SEQUENCES = 100_000
"""`compute_best` returns None above this number of sequences x cells, which takes seconds for 512 levels."""

_STEPS = ((0, -1), (1, 0), (0, 1), (-1, 0))
_NAMES_BY_WORD = {name.lower(): name for name in ACTION_NAMES}
_MEANINGS = {"P": "player", "_": "empty", "O": "hole", "G": "goal", "X": "player in hole", "√": "player on goal"}


@dataclass(frozen=True, eq=False)
class Lake:
    """A level: its seed, and its map, int8 (N, N), read-only, with one START and one GOAL."""

    seed: int
    tiles: Tiles

    @property
    def key(self) -> bytes:
        """The map up to the eight symmetries of the square: the smallest bytes of the eight maps."""
        return min(np.rot90(side, turns).tobytes() for side in (self.tiles, self.tiles.T) for turns in range(4))


class LakeState(NamedTuple):
    """A map, int8 (N, N), and the flat cell of the player."""

    tiles: Tiles
    player: int


@dataclass(frozen=True)
class FrozenLake:
    """FrozenLake on random square maps."""

    size: int = 4
    """Side of the map."""
    p: float = 0.9
    """Probability that a tile is frozen rather than a hole."""
    success_rate: float = 0.8
    """Probability of moving in the intended direction. The two perpendicular directions share the rest equally."""
    observation_format: str = "grid_coord"
    """How the full style shows a map: grid, coord or grid_coord."""
    name = "frozenlake"
    title = "FrozenLake"
    measures: ClassVar[Mapping[str, Measure]] = MappingProxyType({})

    @property
    def has_held_out_levels(self) -> bool:
        """Whether there are enough maps for separate sets. Small maps, or maps with hardly any holes, are too few."""
        return find_test_levels(self) is not None

    def make_levels(self, seeds: Sequence[int]) -> list[Lake]:
        """Generate the published map of each seed."""
        return [Lake(int(seed), _generate_tiles(int(seed), self.size, self.p)) for seed in seeds]

    def make_test_levels(self, count: int) -> list[Lake]:
        """Make the first `count` test maps, different up to symmetry and in no published set if there are enough."""
        return make_searched_test_levels(self, count)

    def start(self, levels: Sequence[Lake]) -> list[LakeState]:
        """Put the player on the start of each map."""
        return [LakeState(level.tiles, int((level.tiles == START).argmax())) for level in levels]

    def step(
        self, states: Sequence[LakeState], actions: Sequence[Sequence[str]], luck: npt.NDArray[np.float64]
    ) -> TurnOutcome:
        """Move each player. An action's random number decides if it slips, and to which side (see `_find_slips`)."""
        moves = make_moves(self.size)
        tiles = np.stack([state.tiles.reshape(-1) for state in states])
        players, rows = np.array([state.player for state in states]), np.arange(len(states))
        done, success = np.zeros(len(states), dtype=bool), np.zeros(len(states), dtype=bool)
        rewards, action_counts = np.zeros(len(states)), np.zeros(len(states), dtype=np.int64)
        for number in range(max(map(len, actions), default=0)):
            directions = np.array(
                [ACTION_NAMES.index(names[number]) if number < len(names) else -1 for names in actions]
            )
            moving = (directions >= 0) & ~done
            turned = (directions + _find_slips(luck[:, number], self.success_rate)) % len(ACTION_NAMES)
            players = np.where(moving, moves[players, turned], players)
            action_counts += moving
            reached = tiles[rows, players]
            is_at_goal = moving & (reached == GOAL)
            rewards += is_at_goal
            success |= is_at_goal
            done |= is_at_goal | (moving & (reached == HOLE))
        next_states = [LakeState(state.tiles, int(player)) for state, player in zip(states, players, strict=True)]
        return TurnOutcome(next_states, rewards, action_counts, done, success)

    def read_action(self, word: str) -> str | None:
        """Parse left, down, right or up, in any case."""
        return _NAMES_BY_WORD.get(word.lower())

    def format_instructions(self, max_actions: int) -> str:
        """Describe the rules, the symbols of a map, and the actions."""
        legend = ", ".join(f"{symbol}: {meaning}" for symbol, meaning in _MEANINGS.items())
        slip = (
            "The ice is slippery: a move may go to the left or to the right of the direction that you choose. "
            if self.success_rate < 1
            else ""
        )
        return (
            "You are a helpful assistant. You are solving FrozenLake: walk to the goal, and do not step into a hole. "
            f"{slip}A move off the map leaves you where you are. Your answer is a sequence of actions, for example "
            "<answer>Right || Down</answer>.\n"
            f"The meaning of each symbol is:\n{legend}\n{format_action_rules(ACTION_NAMES, max_actions)}"
        )

    def format_state(self, state: LakeState, style: PromptStyle) -> str:
        """Render the map with the player. The compact style shows only the grid."""
        flat_tiles = state.tiles.reshape(-1).tolist()
        player_label = {HOLE: "Player in hole", GOAL: "Player on goal"}.get(flat_tiles[state.player], "Player")
        cells_by_label = {
            "Start": [cell for cell, tile in enumerate(flat_tiles) if tile == START],
            "Goal": [cell for cell, tile in enumerate(flat_tiles) if tile == GOAL],
            player_label: [state.player],
            "Holes": [cell for cell, tile in enumerate(flat_tiles) if tile == HOLE],
        }
        observation_format = "grid" if style == "compact" else self.observation_format
        return format_board(_render_grid(state), state.tiles.shape, cells_by_label, observation_format)

    def compute_chance(self, levels: Sequence[Lake], limits: TurnLimits) -> npt.NDArray[np.float64]:
        """Compute the exact probability that uniformly random actions reach the goal, by following all walks."""
        tiles, players = self._stack(levels)
        values = (tiles == GOAL).astype(np.float64)
        for _ in range(limits.reachable_actions):
            values = np.mean([self._expect(values, tiles, action) for action in range(len(ACTION_NAMES))], axis=0)
        return values[np.arange(len(levels)), players]

    def compute_best(self, levels: Sequence[Lake], limits: TurnLimits) -> npt.NDArray[np.float64] | None:
        """Compute the success of the best policy, by value iteration over turns.

        values[t, a] is the largest probability of success with t turns and a actions left. The actions of a turn are
        chosen together, so a turn maximizes over all sequences. Return None if there are too many sequences.
        """
        longest_turn = min(limits.actions_per_turn, limits.actions)
        sequences = limits.turns * limits.actions * len(ACTION_NAMES) ** longest_turn
        if sequences * self.size**2 > MAX_FOLLOWED_SEQUENCES:
            return None
        tiles, players = self._stack(levels)
        at_goal = (tiles == GOAL).astype(np.float64)
        values = {(0, actions): at_goal for actions in range(limits.actions + 1)}
        for turns in range(1, limits.turns + 1):
            values[turns, 0] = at_goal
            for actions in range(1, limits.actions + 1):
                best = at_goal
                for length in range(1, min(limits.actions_per_turn, actions) + 1):
                    for sequence in itertools.product(range(len(ACTION_NAMES)), repeat=length):
                        value = values[turns - 1, actions - length]
                        for action in reversed(sequence):
                            value = self._expect(value, tiles, action)
                        best = np.maximum(best, value)
                values[turns, actions] = best
        return values[limits.turns, limits.actions][np.arange(len(levels)), players]

    def _stack(self, levels: Sequence[Lake]) -> tuple[Tiles, npt.NDArray[np.intp]]:
        """Return the flat maps (B, N * N) and the flat cells of their starts."""
        tiles = np.stack([level.tiles.reshape(-1) for level in levels])
        return tiles, (tiles == START).argmax(axis=1)

    def _expect(self, values: npt.NDArray[np.float64], tiles: Tiles, action: int) -> npt.NDArray[np.float64]:
        """Compute the expected value (B, N * N) after an action in each cell. Goals and holes keep their value."""
        moves = make_moves(self.size)
        slip = (1 - self.success_rate) / 2
        expected = sum(
            probability * values[:, moves[:, (action + turn) % len(ACTION_NAMES)]]
            for turn, probability in ((-1, slip), (0, self.success_rate), (1, slip))
        )
        return np.where((tiles == GOAL) | (tiles == HOLE), values, expected)


def _find_slips(luck: npt.NDArray[np.float64], success_rate: float) -> npt.NDArray[np.int64]:
    """Map random numbers to turns of the direction, -1, 0 or 1, in Gymnasium's order of outcomes."""
    slip = (1 - success_rate) / 2
    return np.searchsorted(np.array([slip, slip + success_rate]), luck, side="right") - 1


def compute_distances(tiles: Tiles) -> list[int]:
    """Compute the fewest moves (N * N entries) from each cell to the goal around all holes, without slips.

    Holes, and cells without a path, get N * N, which is longer than any path.
    """
    flat_tiles, neighbors = tiles.reshape(-1).tolist(), make_moves(len(tiles)).tolist()
    distances = [len(flat_tiles)] * len(flat_tiles)
    frontier, distance = {flat_tiles.index(GOAL)}, 0
    while frontier:
        for cell in frontier:
            distances[cell] = distance
        distance += 1
        frontier = {
            neighbor
            for cell in frontier
            for neighbor in neighbors[cell]
            if flat_tiles[neighbor] != HOLE and distances[neighbor] == len(flat_tiles)
        }
    return distances


@lru_cache(maxsize=8)
def make_moves(size: int) -> npt.NDArray[np.intp]:
    """List the flat cell (N * N, 4) that each move leads to from each cell. Moves off the map stay in place."""
    rows, cols = np.divmod(np.arange(size * size), size)
    return np.stack(
        [np.clip(rows + down, 0, size - 1) * size + np.clip(cols + right, 0, size - 1) for down, right in _STEPS],
        axis=1,
    )


def _generate_tiles(seed: int, size: int, p: float) -> Tiles:
    """Draw maps, with the published random numbers, until a path around the holes joins start and goal."""
    rng = np.random.Generator(np.random.PCG64(seed))
    while True:
        # Gymnasium draws letters; a choice between two numbers uses the same random numbers.
        tiles = rng.choice(2, (size, size), p=[p, 1 - p]).astype(np.int8)
        start, goal = (tuple(rng.integers(size, size=2)) for _ in range(2))
        if start == goal:
            continue
        tiles[start], tiles[goal] = START, GOAL
        if compute_distances(tiles)[int(start[0] * size + start[1])] < size * size:
            tiles.flags.writeable = False
            return tiles


def _render_grid(state: LakeState) -> str:
    size = len(state.tiles)
    symbols = ["O" if tile == HOLE else "G" if tile == GOAL else "_" for tile in state.tiles.reshape(-1).tolist()]
    symbols[state.player] = {"O": "X", "G": "√"}.get(symbols[state.player], "P")
    return "\n".join("".join(symbols[row * size : (row + 1) * size]) for row in range(size))
