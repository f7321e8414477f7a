from itertools import product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.oracles.sokoban import make_board, make_random_board, oracle_shortest_length, parse_board, parse_grid, solve
from tests.strategies.examples import draw_examples
from trainable.envs import level_sets
from trainable.envs.sokoban.board import Action, is_solved, step
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


@draw_examples(40)
@given(SEEDS, st.integers(1, 2))
def test_solve_is_as_short_as_brute_force(seed, boxes):
    cells = make_random_board(np.random.default_rng(seed), 5, 5, boxes)
    solution = solve(cells)
    expected = oracle_shortest_length(cells, limit=60)
    if expected is None:
        assert solution is None
    else:
        assert len(solution) == expected
        assert is_solved(replay(cells, solution)[None]).item()


def test_solve_is_as_short_as_trying_all_sequences():
    for level in level_sets.make_validation_levels(Sokoban(), 48):
        shortest = len(solve(level.cells))
        for length in range(min(shortest, 4) + 1):
            sequences = np.array(list(product(range(1, 5), repeat=length)), dtype=np.int64).reshape(4**length, length)
            cells = np.repeat(level.cells[None], len(sequences), axis=0)
            for actions in sequences.T:
                cells = step(cells, actions).cells
            assert is_solved(cells).any() == (length == shortest)


def test_solved_and_unsolvable_boards():
    solved, unsolvable = parse_grid("#####\n#P√_#\n#####"), parse_grid("#####\n#XPO#\n#####")
    assert solve(solved) == ()
    assert solve(unsolvable) is None


def test_a_limit_on_actions_hides_longer_solutions_only():
    cells = parse_grid("######\n######\n#O####\n#XP###\n#__###\n######")
    assert solve(cells, max_actions=2) is None
    assert solve(cells, max_actions=3) == (Action.DOWN, Action.LEFT, Action.UP)
