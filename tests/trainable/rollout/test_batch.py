import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.scripted import make_episode, make_random_episodes
from trainable.rollout.batch import Batch, collate, place_episode_scores, place_turn_rewards, split_mini_batches

episode_lists = st.integers(0, 2**32 - 1).map(lambda seed: make_random_episodes(1 + seed % 9, 3, seed))


@settings(deadline=None, max_examples=30)
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


@settings(deadline=None, max_examples=30)
@given(episode_lists)
def test_rewards_add_up_to_the_score_wherever_they_are_placed(episodes) -> None:
    batch = collate(episodes)
    for rewards in (batch.rewards, place_episode_scores(batch)):
        torch.testing.assert_close(rewards.sum(1), batch.scores, rtol=1e-4, atol=1e-5)
        assert not rewards[~batch.mask].any()


def test_places_of_rewards() -> None:
    # Tokens: 2 given, 3 sampled, 1 given, 2 sampled; and a shorter one.
    batch = collate([make_episode([(2, 3, -0.2), (1, 2, 10.9)]), make_episode([(1, 1, -0.1)])])
    expected = [[0, 0, 0, 0, -0.2, 0, 0, 10.9], [0, -0.1, 0, 0, 0, 0, 0, 0]]
    torch.testing.assert_close(batch.rewards, torch.tensor(expected))
    last = place_episode_scores(batch)
    torch.testing.assert_close(last, torch.tensor([[0, 0, 0, 0, 0, 0, 0, 10.7], [0, -0.1, 0, 0, 0, 0, 0, 0]]))


@settings(deadline=None, max_examples=30)
@given(episode_lists)
def test_a_trained_token_is_predicted_from_the_one_before_it(episodes) -> None:
    batch = collate(episodes)
    where = batch.find_prediction_positions()
    width = batch.tokens.shape[1]
    flat = [(row, t) for row, episode in enumerate(episodes) for t in np.flatnonzero(episode.mask)]
    assert where.tolist() == [row * width + t - 1 for row, t in flat]
    assert batch.tokens[batch.mask].tolist() == [int(episodes[row].tokens[t]) for row, t in flat]


@settings(deadline=None, max_examples=30)
@given(episode_lists, st.randoms(use_true_random=False))
def test_rows_are_the_batch_of_the_chosen_episodes(episodes, random) -> None:
    index = [random.randrange(len(episodes)) for _ in range(random.randint(1, 5))]
    chosen = collate(episodes).select_rows(torch.tensor(index))
    for actual, expected in zip(chosen, collate([episodes[row] for row in index]), strict=True):
        assert torch.equal(actual, expected)


def test_mini_batches_are_consecutive_and_the_last_may_be_short() -> None:
    pieces = [piece.tolist() for piece in split_mini_batches(torch.tensor([4, 2, 0, 1, 3]), 2)]
    assert pieces == [[4, 2], [0, 1], [3]]


def test_nothing_is_made_on_another_device_than_the_batch() -> None:
    """As in test_qwen2: what names no device lands on `meta`."""
    batch = collate(make_random_episodes(4, 2))
    expected = place_episode_scores(batch)
    with torch.device("meta"):
        actual, where, rows = (
            place_episode_scores(batch),
            batch.find_prediction_positions(),
            batch.select_rows(torch.tensor([0, 2], device="cpu")),
        )
    assert torch.equal(actual, expected)
    assert where.device.type == rows.tokens.device.type == "cpu"
    assert isinstance(rows, Batch)
