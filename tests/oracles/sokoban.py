"""Slow literal versions of the Sokoban parts: sets of places, one board at a time, recursion."""

import random
from typing import NamedTuple

import numpy as np

Place = tuple[int, int]
STEPS: dict[int, Place] = {1: (-1, 0), 2: (1, 0), 3: (0, -1), 4: (0, 1)}


class Game(NamedTuple):
    """A board as sets of (row, col) places; everything that is not `floor` is wall."""

    shape: Place
    floor: frozenset[Place]
    targets: frozenset[Place]
    boxes: frozenset[Place]
    player: Place


def read(cells):
    """Board codes (R, C) to a Game."""
    at = {(r, c): int(code) for r, row in enumerate(cells.tolist()) for c, code in enumerate(row)}

    def places(*codes):
        return frozenset(place for place, code in at.items() if code in codes)

    (player,) = places(5, 6)
    return Game(cells.shape, places(1, 2, 3, 4, 5, 6), places(2, 3, 6), places(3, 4), player)


def write(game):
    """A Game to board codes (R, C)."""
    cells = np.zeros(game.shape, dtype=np.int8)
    for place in game.floor:
        on_target = place in game.targets
        cells[place] = 2 if on_target else 1
        if place in game.boxes:
            cells[place] = 3 if on_target else 4
        if place == game.player:
            cells[place] = 6 if on_target else 5
    return cells


def add(place, step):
    return place[0] + step[0], place[1] + step[1]


def oracle_act(game, action):
    """(game afterwards, reward) of one action on one board, by the rules as they are told."""
    if action == 0:
        return game, 0.0
    ahead = add(game.player, STEPS[action])
    behind = add(ahead, STEPS[action])
    after = game
    if ahead in game.boxes:
        if behind in game.floor and behind not in game.boxes:
            after = game._replace(player=ahead, boxes=game.boxes - {ahead} | {behind})
    elif ahead in game.floor:
        after = game._replace(player=ahead)
    covered_before = len(game.boxes & game.targets)
    covered_after = len(after.boxes & after.targets)
    reward = -0.1
    if covered_after > covered_before:
        reward += 1
    if covered_after < covered_before:
        reward -= 1
    if covered_after == len(after.targets):
        reward += 10
    return after, reward


def oracle_shortest(cells, limit):
    """Fewest actions that solve the board, by trying all actions level by level; None if more than `limit`."""
    level = {read(cells)}
    seen = set(level)
    for length in range(limit + 1):
        if any(game.boxes == game.targets for game in level):
            return length
        level = {oracle_act(game, action)[0] for game in level for action in STEPS} - seen
        seen |= level
    return None


def random_board(rng, rows, cols, boxes, wall_share=0.25):
    """A board with random inner walls, where boxes and player may stand on targets."""
    inner = [(r, c) for r in range(1, rows - 1) for c in range(1, cols - 1)]
    order = [inner[i] for i in rng.permutation(len(inner))]
    walls = min(int(wall_share * len(inner)), len(inner) - 2 * boxes - 1)
    floor = order[walls:]
    targets = [floor[i] for i in rng.choice(len(floor), boxes, replace=False)]
    return write(Game((rows, cols), frozenset(floor), frozenset(targets), frozenset(floor[1 : boxes + 1]), floor[0]))


def oracle_level(seed, rows, cols, num_steps, search_depth, tries=4, p_change_directions=0.35):
    """The published generator, told again over sets of places; None where a seed makes no level."""
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
            return write(Game((rows, cols), frozenset(floor), frozenset({target}), frozenset({box}), player))
    return None


def oracle_carve(rng, rows, cols, num_steps, p_change_directions):
    stamps = ["000111000", "010010010", "000110010", "000110110", "000011010"]
    directions = [(1, 0), (0, 1), (-1, 0), (0, -1)]
    (direction,) = rng.sample(directions, 1)
    place = rng.randint(1, rows - 1), rng.randint(1, cols - 1)
    floor = set()
    for _ in range(num_steps):
        if rng.random() < p_change_directions:
            (direction,) = rng.sample(directions, 1)
        row, col = add(place, direction)
        place = sorted((1, row, rows - 2))[1], sorted((1, col, cols - 2))[1]
        (stamp,) = rng.sample(stamps, 1)
        floor |= {add(place, (i // 3 - 1, i % 3 - 1)) for i in range(9) if stamp[i] == "1"}
    return {(r, c) for r, c in floor if 0 < r < rows - 1 and 0 < c < cols - 1}


def oracle_reverse_play(floor, player, target, search_depth):
    """(score, box, player) of the first best state in depth-first order."""
    seen = set()
    best = [-1, None, None]

    def visit(player, box, pulled, depth):
        if depth >= search_depth or (player, box, pulled) in seen:
            return
        seen.add((player, box, pulled))
        score = abs(box[0] - target[0]) + abs(box[1] - target[1]) if pulled and player != target else 0
        if score > best[0]:
            best[:] = score, box, player
        for row_step, col_step in STEPS.values():
            ahead, back = add(player, (row_step, col_step)), add(player, (-row_step, -col_step))
            if ahead in floor and ahead != box:
                visit(ahead, player if back == box else box, pulled or back == box, depth + 1)

    visit(player, target, False, 1)
    return best


def oracle_wander(rng, free, player, move_probability):
    if rng.random() > move_probability:
        return player
    trail = [player]
    while len(trail) < 4:
        ways = [place for place in (add(player, step) for step in STEPS.values()) if place in free - set(trail)]
        if not ways:
            break
        player = rng.choice(ways)
        trail.append(player)
        if len(trail) == 4 or rng.random() > 0.5:
            break
    return player
