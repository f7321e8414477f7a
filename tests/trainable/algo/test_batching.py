import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies.algo import examples
from trainable.algo.batching import adjust_copy, order_by_group, order_length_stratified, split_by_tokens


def make_generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@examples
@given(st.lists(st.integers(1, 5), max_size=12))
def test_the_order_is_even_ranks_up_then_odd_ranks_down(lengths: list[int]) -> None:
    ranked = sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
    expected = [i for rank, i in enumerate(ranked) if rank % 2 == 0]
    expected += reversed([i for rank, i in enumerate(ranked) if rank % 2 == 1])
    assert order_length_stratified(torch.tensor(lengths, dtype=torch.long)).tolist() == expected


@examples
@given(st.integers(1, 4), st.permutations(range(5)), st.data())
def test_pieces_of_the_order_hold_whole_groups_in_the_order_of_their_tokens(
    group_size: int, groups: list[int], drawing: st.DataObject
) -> None:
    ids = drawing.draw(st.permutations([group for group in groups for _ in range(group_size)]))
    lengths = drawing.draw(st.lists(st.integers(1, 9), min_size=len(ids), max_size=len(ids)))
    order = order_by_group(torch.tensor(lengths), torch.tensor(ids)).tolist()
    assert sorted(order) == list(range(len(ids)))
    mini_batches = [order[start : start + group_size] for start in range(0, len(order), group_size)]
    assert all(len({ids[index] for index in rows}) == 1 and rows == sorted(rows) for rows in mini_batches)
    tokens = torch.tensor(
        [sum(length for length, owner in zip(lengths, ids, strict=True) if owner == group) for group in range(5)]
    )
    assert [ids[rows[0]] for rows in mini_batches] == order_length_stratified(tokens).tolist()


def test_groups_of_one_and_equal_lengths_keep_their_order() -> None:
    lengths = torch.tensor([50, 10, 40, 20, 30])
    assert order_by_group(lengths, torch.arange(5)).tolist() == order_length_stratified(lengths).tolist()
    # The order of an unstable sort differs only for more than sixteen numbers.
    assert order_length_stratified(torch.full((64,), 7)).tolist() == [*range(0, 64, 2), *range(63, 0, -2)]


@examples
@given(st.lists(st.integers(0, 30), max_size=20), st.integers(1, 60), st.booleans())
def test_passes_hold_every_sequence_once_and_no_more_tokens_than_asked(
    lengths: list[int], max_tokens: int, needs_padding: bool
) -> None:
    passes = split_by_tokens(torch.tensor(lengths, dtype=torch.long), max_tokens, needs_padding)
    rows = [i for indices in passes for i in indices.tolist()]
    assert rows == sorted(range(len(lengths)), key=lambda i: (lengths[i], i))

    def count_tokens(indices: list[int]) -> int:
        sizes = [lengths[i] for i in indices]
        return len(sizes) * max(sizes) if needs_padding else sum(sizes)

    start = 0
    for indices in passes:
        end = start + len(indices)
        assert count_tokens(rows[start:end]) <= max_tokens or len(indices) == 1
        # The next sequence would not have fit.
        assert end == len(rows) or count_tokens(rows[start : end + 1]) > max_tokens
        start = end


@examples
@given(st.integers(0, 40), st.integers(1, 50), st.integers(0, 3))
def test_copies_follow_the_originals_and_are_spread_evenly(n: int, multiple: int, seed: int) -> None:
    indices = adjust_copy(n, multiple, make_generator(seed)).tolist()
    assert indices[:n] == list(range(n))
    assert len(indices) == math.ceil(n / multiple) * multiple
    counts = [indices.count(i) for i in range(n)]
    assert max(counts, default=0) - min(counts, default=0) <= 1
