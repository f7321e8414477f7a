"""Slow, literal versions of the Sokoban functions: sets of places, one board at a time, recursion."""

import random
from typing import NamedTuple

import numpy as np

from trainable.envs.sokoban.generate import generate_levels

Cell = tuple[int, int]
MOVES: dict[int, Cell] = {1: (-1, 0), 2: (1, 0), 3: (0, -1), 4: (0, 1)}


class Game(NamedTuple):
    """A board as sets of (row, col) places; everything that is not `floor` is wall."""

    shape: Cell
    floor: frozenset[Cell]
    targets: frozenset[Cell]
    boxes: frozenset[Cell]
    player: Cell


def parse_board(cells):
    """Convert board codes (R, C) to a Game."""
    code_at = {(r, c): int(code) for r, row in enumerate(cells.tolist()) for c, code in enumerate(row)}

    def find_cells(*codes):
        return frozenset(cell for cell, code in code_at.items() if code in codes)

    (player,) = find_cells(5, 6)
    return Game(cells.shape, find_cells(1, 2, 3, 4, 5, 6), find_cells(2, 3, 6), find_cells(3, 4), player)


def make_board(game):
    """Convert a Game to board codes (R, C)."""
    cells = np.zeros(game.shape, dtype=np.int8)
    for cell in game.floor:
        on_target = cell in game.targets
        cells[cell] = 2 if on_target else 1
        if cell in game.boxes:
            cells[cell] = 3 if on_target else 4
        if cell == game.player:
            cells[cell] = 6 if on_target else 5
    return cells


def add_move(cell, move):
    return cell[0] + move[0], cell[1] + move[1]


def oracle_act(game, action):
    """Return the next game and the reward of one action on one board, by the rules of the game."""
    if action == 0:
        return game, 0.0
    ahead = add_move(game.player, MOVES[action])
    behind = add_move(ahead, MOVES[action])
    next_game = game
    if ahead in game.boxes:
        if behind in game.floor and behind not in game.boxes:
            next_game = game._replace(player=ahead, boxes=game.boxes - {ahead} | {behind})
    elif ahead in game.floor:
        next_game = game._replace(player=ahead)
    covered_before = len(game.boxes & game.targets)
    covered_after = len(next_game.boxes & next_game.targets)
    reward = -0.1
    if covered_after > covered_before:
        reward += 1
    if covered_after < covered_before:
        reward -= 1
    if covered_after == len(next_game.targets):
        reward += 10
    return next_game, reward


def solve(cells, max_actions=None):
    """Return a shortest solution, the first in the order up, down, left, right; None if there is none of that length.

    Breadth-first, with player and boxes as flat cells, which is faster than on a Game.
    """
    codes, cols = cells.reshape(-1).tolist(), cells.shape[1]
    open_cells = {cell for cell, code in enumerate(codes) if code}
    targets, boxes = ({cell for cell, code in enumerate(codes) if code in kinds} for kinds in ((2, 3, 6), (3, 4)))
    (player,) = (cell for cell, code in enumerate(codes) if code in (5, 6))
    paths = {(player, frozenset(boxes)): ()}
    queue = list(paths)
    for state in queue:  # the loop also visits states that are appended below
        (player, boxes), path = state, paths[state]
        if boxes == targets:
            return path
        if max_actions is not None and len(path) >= max_actions:
            continue
        for action, (row_step, col_step) in MOVES.items():
            ahead = player + row_step * cols + col_step
            behind = 2 * ahead - player
            is_pushed = ahead in boxes
            if ahead not in open_cells or (is_pushed and (behind not in open_cells or behind in boxes)):
                continue
            next_state = ahead, boxes - {ahead} | {behind} if is_pushed else boxes
            if next_state not in paths:
                paths[next_state] = (*path, action)
                queue.append(next_state)
    return None


def parse_grid(text):
    """Parse board codes (R, C) from grid lines, the inverse of `render(cells, "grid")`."""
    return np.array([["#_O√XPS".index(symbol) for symbol in line] for line in text.strip("\n").split("\n")], np.int8)


def generate_level(seed):
    """Return the level of one seed."""
    return generate_levels([seed])[0]


def make_random_board(rng, rows, cols, boxes, wall_fraction=0.25):
    """Make a board with random inner walls, where boxes and player may be on targets."""
    inner = [(r, c) for r in range(1, rows - 1) for c in range(1, cols - 1)]
    order = [inner[i] for i in rng.permutation(len(inner))]
    walls = min(int(wall_fraction * len(inner)), len(inner) - 2 * boxes - 1)
    floor = order[walls:]
    targets = [floor[i] for i in rng.choice(len(floor), boxes, replace=False)]
    return make_board(
        Game((rows, cols), frozenset(floor), frozenset(targets), frozenset(floor[1 : boxes + 1]), floor[0])
    )


def oracle_generate_level(seed, rows=6, cols=6, num_steps=20, search_depth=300, tries=4, p_change_directions=0.35):
    """The published generator over sets of places. Returns None where a seed makes no level."""
    rng, numpy_rng = random.Random(seed), np.random.RandomState(seed)
    for _ in range(tries):
        floor = oracle_carve(rng, rows, cols, num_steps, p_change_directions)
        if len(floor) <= 2:
            return None
        free = sorted(floor)
        player = free.pop(numpy_rng.randint(len(free)))
        target = free[numpy_rng.randint(len(free))]
        score, box, player = oracle_reverse_play(floor, player, target, search_depth)
        if score > 0:
            player = oracle_wander(rng, floor - {box}, player, 0.8 if score == 1 else 0.5)
            return make_board(Game((rows, cols), frozenset(floor), frozenset({target}), frozenset({box}), player))
    return None


def oracle_carve(rng, rows, cols, num_steps, p_change_directions):
    stamps = ["000111000", "010010010", "000110010", "000110110", "000011010"]
    directions = [(1, 0), (0, 1), (-1, 0), (0, -1)]
    (direction,) = rng.sample(directions, 1)
    cell = rng.randint(1, rows - 1), rng.randint(1, cols - 1)
    floor = set()
    for _ in range(num_steps):
        if rng.random() < p_change_directions:
            (direction,) = rng.sample(directions, 1)
        row, col = add_move(cell, direction)
        cell = sorted((1, row, rows - 2))[1], sorted((1, col, cols - 2))[1]
        (stamp,) = rng.sample(stamps, 1)
        floor |= {add_move(cell, (i // 3 - 1, i % 3 - 1)) for i in range(9) if stamp[i] == "1"}
    return {(r, c) for r, c in floor if 0 < r < rows - 1 and 0 < c < cols - 1}


def oracle_reverse_play(floor, player, target, search_depth):
    """Return (score, box, player) of the first best state in depth-first order."""
    visited = set()
    best = [-1, None, None]

    def visit(player, box, has_pulled, depth):
        if depth >= search_depth or (player, box, has_pulled) in visited:
            return
        visited.add((player, box, has_pulled))
        score = abs(box[0] - target[0]) + abs(box[1] - target[1]) if has_pulled and player != target else 0
        if score > best[0]:
            best[:] = score, box, player
        for row_step, col_step in MOVES.values():
            ahead, back = add_move(player, (row_step, col_step)), add_move(player, (-row_step, -col_step))
            if ahead in floor and ahead != box:
                visit(ahead, player if back == box else box, has_pulled or back == box, depth + 1)

    visit(player, target, False, 1)
    return best


def oracle_wander(rng, free, player, move_probability):
    if rng.random() > move_probability:
        return player
    trail = [player]
    while len(trail) < 4:
        next_cells = [cell for cell in (add_move(player, step) for step in MOVES.values()) if cell in free - set(trail)]
        if not next_cells:
            break
        player = rng.choice(next_cells)
        trail.append(player)
        if len(trail) == 4 or rng.random() > 0.5:
            break
    return player
