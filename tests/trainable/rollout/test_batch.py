import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.scripted import make_episode, make_random_episodes
from tests.strategies.examples import draw_examples
from trainable.rollout.episode import Batch, collate, place_episode_scores, place_turn_rewards

episode_lists = st.integers(0, 2**32 - 1).map(lambda seed: make_random_episodes(1 + seed % 9, 3, seed))


@draw_examples(30)
@given(episode_lists)
def test_every_number_of_an_episode_is_at_its_place(episodes) -> None:
    batch = collate(episodes)
    assert batch.tokens.shape == (len(episodes), max(len(episode.tokens) for episode in episodes))
    for row, episode in enumerate(episodes):
        size = len(episode.tokens)
        assert int(batch.lengths[row]) == size
        for field_name in ("tokens", "mask", "logprobs", "turns"):
            actual = getattr(batch, field_name)[row]
            assert actual[:size].tolist() == getattr(episode, field_name).tolist()
            assert not actual[size:].any()
        assert batch.rewards[row, :size].tolist() == place_turn_rewards(episode).tolist()
        assert int(batch.group_ids[row]) == episode.group
        assert float(batch.scores[row]) == pytest.approx(episode.score)
    # Rewards add up to the score wherever they are placed.
    for rewards in (batch.rewards, place_episode_scores(batch)):
        torch.testing.assert_close(rewards.sum(1), batch.scores, rtol=1e-4, atol=1e-5)
        assert not rewards[~batch.mask].any()
    # A trained token is predicted from the one before it.
    positions = batch.find_prediction_positions()
    width = batch.tokens.shape[1]
    trained_positions = [(row, t) for row, episode in enumerate(episodes) for t in np.flatnonzero(episode.mask)]
    assert positions.tolist() == [row * width + t - 1 for row, t in trained_positions]
    assert batch.tokens[batch.mask].tolist() == [int(episodes[row].tokens[t]) for row, t in trained_positions]


def test_places_of_rewards() -> None:
    # One episode has 2 prompt, 3 sampled, 1 prompt and 2 sampled tokens; the other is shorter.
    batch = collate([make_episode([(2, 3, -0.2), (1, 2, 10.9)]), make_episode([(1, 1, -0.1)])])
    expected = [[0, 0, 0, 0, -0.2, 0, 0, 10.9], [0, -0.1, 0, 0, 0, 0, 0, 0]]
    torch.testing.assert_close(batch.rewards, torch.tensor(expected))
    final_scores = place_episode_scores(batch)
    torch.testing.assert_close(final_scores, torch.tensor([[0, 0, 0, 0, 0, 0, 0, 10.7], [0, -0.1, 0, 0, 0, 0, 0, 0]]))


@draw_examples(30)
@given(episode_lists, st.randoms(use_true_random=False))
def test_rows_are_the_batch_of_the_chosen_episodes(episodes, random) -> None:
    rows = [random.randrange(len(episodes)) for _ in range(random.randint(1, 5))]
    selected_batch = collate(episodes).select_rows(torch.tensor(rows))
    expected_batch = collate([episodes[row] for row in rows])
    assert selected_batch.tree_ids.tolist() == rows  # trees keep the numbers that they have in their batch
    for actual, expected in zip(selected_batch, expected_batch._replace(tree_ids=torch.tensor(rows)), strict=True):
        assert torch.equal(actual, expected)


def test_all_tensors_are_on_the_device_of_the_batch() -> None:
    """As in test_qwen2, a tensor that is created without a device lands on `meta`."""
    batch = collate(make_random_episodes(4, 2))
    expected = place_episode_scores(batch)
    with torch.device("meta"):
        actual, positions = place_episode_scores(batch), batch.find_prediction_positions()
        rows = batch.select_rows(torch.tensor([0, 2], device="cpu"))
    assert torch.equal(actual, expected)
    assert positions.device.type == rows.tokens.device.type == "cpu"
    assert isinstance(rows, Batch)
