"""Demonstrations and vocabulary of frozenlake-tiny: shortest paths around holes, ignoring slips."""

import itertools
from collections.abc import Sequence

import numpy as np

from trainable.envs.games.frozen_lake import ACTION_NAMES, GOAL, HOLE, START, LakeState, compute_distances, make_moves
from trainable.tiny.dialogues import Demonstrator, MakePlan, Plan, turn_board
from trainable.tiny.tokenizer import Vocabulary, format_place

SIZE = 4
PLAN_LETTERS = tuple(name[0] for name in ACTION_NAMES)
"""Letters of a plan in a thought, one per action."""


def make_vocabulary() -> Vocabulary:
    """Make the pieces: pairs of neighboring tiles, and for thoughts the positions of player and goal, and plans."""
    tiles = "PGXO√_"
    # A map has at most one player (P; X in a hole; √ on the goal) and one goal (G, √).
    pairs = [
        a + b
        for a, b in itertools.product(tiles, tiles)
        if not (a in "PX√" and b in "PX√") and not (a in "G√" and b in "G√")
    ]
    places = [format_place(symbol, row, col) for symbol in ("P", "G") for row in range(SIZE) for col in range(SIZE)]
    return Vocabulary(
        rewards=(0.0,),
        state_pieces=(*pairs, *(pair + "\n" for pair in pairs), *tiles),
        thought_pieces=(*places, *PLAN_LETTERS),
        action_pieces=ACTION_NAMES,
    )


def turn_map(state: LakeState, rng: np.random.Generator) -> LakeState:
    """Rotate and mirror a map at random, with the player on its start."""
    tiles = turn_board(state.tiles, rng)
    return LakeState(tiles, int((tiles == START).argmax()))


def start_plans(state: LakeState) -> MakePlan:
    """Prepare plans for one map, whose distances to the goal are computed once."""
    tiles = state.tiles.reshape(-1)
    distances, moves = compute_distances(state.tiles), make_moves(len(state.tiles))

    def make_plan(states: Sequence[LakeState], has_detour: bool, rng: np.random.Generator) -> Plan:
        cell, plan = states[-1].player, list[int]()
        while tiles[cell] != GOAL:
            next_cells = moves[cell]
            steps = [action for action in range(4) if distances[next_cells[action]] == distances[cell] - 1]
            if has_detour and not plan:
                # Safe steps that are not on a shortest path, including moves off the map.
                detours = [a for a in range(4) if a not in steps and tiles[next_cells[a]] not in (HOLE, GOAL)]
                steps = detours or steps
            action = steps[rng.integers(len(steps))]
            plan.append(action)
            cell = int(next_cells[action])
        size = len(state.tiles)
        goal = int((tiles == GOAL).argmax())
        places = [("P", states[-1].player), ("G", goal)]
        names = "".join(format_place(symbol, *divmod(place, size)) for symbol, place in places)
        thought = names + "".join(PLAN_LETTERS[action] for action in plan)
        return Plan(thought, [ACTION_NAMES[action] for action in plan])

    return make_plan


DEMONSTRATOR = Demonstrator(start_plans, turn_map, ACTION_NAMES)
