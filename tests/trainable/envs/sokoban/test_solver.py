from itertools import product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.oracles.sokoban import make_board, make_random_board, parse_board, solve
from tests.strategies.examples import draw_examples
from trainable.envs import level_sets
from trainable.envs.sokoban.board import is_solved, step
from trainable.envs.sokoban.game import Sokoban
from trainable.envs.sokoban.solver import compute_distance_table

SEEDS = st.integers(0, 2**32 - 1)


def replay(cells, actions):
    for action in actions:
        cells = step(cells[None], np.array([action])).cells[0]
    return cells


def test_solutions_of_all_validation_levels_solve_them_and_agree_with_the_table():
    for level in level_sets.make_validation_levels(Sokoban()):
        actions = solve(level.cells)
        assert is_solved(replay(level.cells, actions)[None]).item()
        game = parse_board(level.cells)
        (box,) = game.boxes
        player = game.player[0] * 6 + game.player[1]
        assert compute_distance_table(level.cells)[player, box[0] * 6 + box[1]] == len(actions)


@draw_examples(10)
@given(SEEDS)
def test_every_entry_of_the_table_is_the_length_of_a_shortest_solution(seed):
    cells = make_random_board(np.random.default_rng(seed), 5, 6, 1)
    table = compute_distance_table(cells)
    assert table.dtype == np.int16
    game = parse_board(cells)
    places = list(product(range(5), range(6)))
    for (player_index, player), (box_index, box) in product(enumerate(places), repeat=2):
        if player in game.floor and box in game.floor and player != box:
            solution = solve(make_board(game._replace(player=player, boxes=frozenset({box}))))
            assert table[player_index, box_index] == (-1 if solution is None else len(solution))
        else:
            assert table[player_index, box_index] == -1
