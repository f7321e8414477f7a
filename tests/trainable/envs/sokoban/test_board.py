import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.oracles.sokoban import make_board, make_random_board, oracle_act, parse_board, parse_grid
from tests.strategies.examples import draw_examples
from trainable.envs.sokoban.board import Action, step

SEEDS = st.integers(0, 2**32 - 1)


@draw_examples(60)
@given(SEEDS, st.integers(4, 8), st.integers(4, 8), st.integers(1, 4))
def test_step_equals_the_literal_rules(seed, rows, cols, boxes):
    rng = np.random.default_rng(seed)
    boxes = min(boxes, ((rows - 2) * (cols - 2) - 1) // 2)
    cells = np.stack([make_random_board(rng, rows, cols, boxes) for _ in range(12)])
    games = [parse_board(board) for board in cells]
    for _ in range(8):
        actions = rng.integers(0, 5, len(games))
        outcome = step(cells, actions)
        expected = [oracle_act(game, action) for game, action in zip(games, actions.tolist(), strict=True)]
        games = [next_game for next_game, _ in expected]
        np.testing.assert_array_equal(outcome.cells, [make_board(game) for game in games])
        np.testing.assert_allclose(outcome.rewards, [reward for _, reward in expected], rtol=1e-12)
        np.testing.assert_array_equal(outcome.solved, [game.boxes == game.targets for game in games])
        cells = outcome.cells


BY_HAND = {
    "published level 123": (
        "######/######/#O####/#XP###/#__###/######",
        {"DOWN": -0.1, "LEFT": -0.1, "UP": 10.9},
        "######/######/#√####/#P_###/#__###/######",
    ),
    "a box leaves its target, under the player": (
        "######/#_P√_#/#_XO_#/######",
        {"RIGHT": -1.1},
        "######/#__SX#/#_XO_#/######",
    ),
    "a box comes back onto its target": (
        "#######/#_OXP_#/#_XO__#/#######",
        {"LEFT": 0.9},
        "#######/#_√P__#/#_XO__#/#######",
    ),
    "a solved board pays again": ("#####/#P√_#/#___#/#####", {"DOWN": 9.9}, "#####/#_√_#/#P__#/#####"),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_rewards_and_boards_by_hand(name):
    before, rewards, after = BY_HAND[name]
    cells = parse_grid(before.replace("/", "\n"))[None]
    for action, reward in rewards.items():
        outcome = step(cells, np.array([Action[action]]))
        cells = outcome.cells
        assert outcome.rewards.item() == pytest.approx(reward, abs=1e-12)
    np.testing.assert_array_equal(cells[0], parse_grid(after.replace("/", "\n")))
    assert outcome.solved.item() == ("X" not in after)


def test_step_leaves_its_input_alone_and_takes_any_memory_order():
    rng = np.random.default_rng(3)
    cells = np.stack([make_random_board(rng, 6, 6, 2) for _ in range(16)])
    cells_before = cells.copy()
    actions = rng.integers(1, 5, 16)
    expected = step(cells, actions)
    strided = np.repeat(cells, 2, axis=0)[::2].transpose(0, 2, 1).copy().transpose(0, 2, 1)
    np.testing.assert_array_equal(cells, cells_before)
    np.testing.assert_array_equal(step(strided, actions).cells, expected.cells)
    one_by_one = [step(cells[i : i + 1], actions[i : i + 1]).cells[0] for i in range(16)]
    np.testing.assert_array_equal(one_by_one, expected.cells)
    outcome = step(np.zeros((0, 6, 6), dtype=np.int8), np.zeros(0, dtype=np.int64))
    assert outcome.cells.shape == (0, 6, 6)
    assert [len(field) for field in outcome[1:]] == [0, 0]
