import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainable.algo.gradient_signal import assign_fixed_buckets, assign_quantile_buckets


@pytest.mark.parametrize(
    ("groups", "buckets", "sizes"),
    [(128, 6, [21, 21, 21, 21, 21, 23]), (7, 6, [1, 1, 1, 1, 1, 2]), (4, 6, [1, 1, 1, 1]), (1, 6, [1]), (0, 6, [])],
)
def test_published_sizes(groups: int, buckets: int, sizes: list[int]) -> None:
    scores = torch.randperm(groups, generator=torch.Generator().manual_seed(0)).float()
    assigned = assign_quantile_buckets(scores, buckets)
    assert torch.bincount(assigned).tolist() == sizes


@given(st.lists(st.floats(0, 6, width=32), min_size=1, max_size=40), st.integers(1, 8))
def test_a_higher_bucket_never_holds_a_lower_score(scores: list[float], buckets: int) -> None:
    values = torch.tensor(scores)
    assigned = assign_quantile_buckets(values, buckets)
    assert assigned.max() == min(buckets, len(scores)) - 1
    for bucket in range(int(assigned.max())):
        assert values[assigned == bucket].max() <= values[assigned == bucket + 1].min()


def test_equal_scores_rank_by_index() -> None:
    assert assign_quantile_buckets(torch.zeros(6), 3).tolist() == [0, 0, 1, 1, 2, 2]


def test_fixed_edges_open_to_the_right() -> None:
    scores = torch.tensor([0.0, 0.99, 1.0, 1.5, 2.0, 4.99, 5.0, 6.1])
    assert assign_fixed_buckets(scores).tolist() == [0, 0, 1, 1, 2, 4, 5, 5]
