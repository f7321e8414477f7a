"""Signal and noise of a gradient equal loops over vectors, and are unbiased over every draw of a bandit."""

import math
from collections.abc import Sequence
from itertools import product

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from tests.oracles import gradient_signal as oracle
from tests.strategies.algo import examples
from trainable.algo.gradient_signal import (
    GradientSignal,
    compute_component_cosines,
    compute_fold_gram,
    compute_published_norm,
    compute_update_fractions,
    estimate_gradient_signal,
    split_folds,
)
from trainable.algo.reductions import compute_loss_weights


def estimate_signal(fold_gradients: Tensor, counts: Sequence[float] | None = None) -> GradientSignal:
    """The statistics of fold gradients (K, D) of one component."""
    gram = compute_fold_gram([fold_gradients[:, None]])[:, 0, :, 0]
    return estimate_gradient_signal(gram, None if counts is None else torch.tensor(counts))


def make_vectors(*shape: int, seed: int = 0, drift: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return drift + torch.randn(*shape, generator=generator, dtype=torch.float64)


def is_close(value: float, expected: float, scale: float) -> bool:
    return value == pytest.approx(expected, rel=1e-9, abs=1e-10 * scale)


# The identities


@examples
@given(oracle.folds())
def test_signal_and_noise_equal_the_loops(folds: tuple[Tensor, list[float]]) -> None:
    (x, counts), scale = folds, folds[0].square().sum().item()
    vectors = x[:, 0].tolist()
    statistics = estimate_signal(x[:, 0], counts)
    mean_vector = oracle.mean(vectors, counts)
    assert is_close(statistics.norm**2, oracle.dot(mean_vector, mean_vector), scale)
    assert is_close(statistics.noise, oracle.noise(vectors, counts), scale)
    assert is_close(statistics.signal, oracle.signal(vectors, counts), scale)
    assert is_close(statistics.norm**2, statistics.signal + statistics.noise, scale)
    assert statistics.noise >= 0
    # The signal of equal folds is the mean product of different folds.
    equal = estimate_signal(x[:, 0])
    assert is_close(equal.signal, oracle.mean_of_products(vectors), scale)
    assert is_close(equal.noise, estimate_signal(x[:, 0], [3.0] * len(x)).noise, scale)


@pytest.mark.parametrize("count", [2, 4, 6])
def test_signal_and_noise_are_means_over_all_splits_into_halves(count: int) -> None:
    x = make_vectors(count, 3, seed=count, drift=0.3)
    splits = list(oracle.split_halves(x.tolist()))
    assert len(splits) == math.comb(count, count // 2)
    products = [oracle.dot(a, b) for a, b in splits]
    distances = [oracle.squared_distance(a, b) / 4 for a, b in splits]
    assert estimate_signal(x).signal == pytest.approx(sum(products) / len(splits))
    assert estimate_signal(x).noise == pytest.approx(sum(distances) / len(splits))


@pytest.mark.parametrize("count", [3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("equal", [True, False])
def test_the_interval_equals_a_loop_that_deletes_one_fold(count: int, equal: bool) -> None:
    x = make_vectors(count, 4, seed=count)
    counts = [1.0] * count if equal else [1.0 + k % 3 for k in range(count)]
    statistics = estimate_signal(x, None if equal else counts)
    assert statistics.snr == pytest.approx(oracle.signal(x.tolist(), counts) / oracle.noise(x.tolist(), counts))
    interval = oracle.compute_interval(x.tolist(), counts, 0.95)
    assert (statistics.low, statistics.high) == pytest.approx(interval, rel=1e-9)
    assert estimate_signal(-1e-5 * x, None if equal else counts)[3:] == pytest.approx(statistics[3:])


@examples
@given(oracle.folds(components=3))
def test_shares_sum_to_one_and_equal_the_loops_as_do_cosines(folds: tuple[Tensor, list[float]]) -> None:
    x, counts = folds
    means = [oracle.mean(x[:, c].tolist(), counts) for c in range(3)]
    update = [sum(entries) for entries in zip(*means, strict=True)]
    sizes = [math.sqrt(oracle.dot(g, g)) for g in means]
    assume(min(sizes) > 1e-2)
    assume(oracle.dot(update, update) > 1e-2)
    shares = compute_update_fractions(compute_fold_gram([x]), torch.tensor(counts))
    expected = [oracle.dot(g, update) / oracle.dot(update, update) for g in means]
    torch.testing.assert_close(shares, torch.tensor(expected, dtype=torch.float64))
    assert shares.sum().item() == pytest.approx(1)
    cosines = compute_component_cosines(compute_fold_gram([x]), torch.tensor(counts))
    for (c, a), (d, b) in product(enumerate(means), repeat=2):
        assert cosines[c, d].item() == pytest.approx(oracle.dot(a, b) / (sizes[c] * sizes[d]), abs=1e-9)


def test_shares_and_cosines_by_hand() -> None:
    # G_task = (4, 0), G_entropy = (-1, 0) and G_kl = (0, 1), so the total gradient is (3, 1).
    x = torch.tensor([[[4.0, 1.0], [-2.0, 0.0], [0.0, 0.0]], [[4.0, -1.0], [0.0, 0.0], [0.0, 2.0]]])
    expected_shares = torch.tensor([1.2, -0.3, 0.1], dtype=torch.float64)
    torch.testing.assert_close(compute_update_fractions(compute_fold_gram([x])), expected_shares)
    expected = torch.tensor([[1.0, -1.0, 0.0], [-1.0, 1.0, 0.0], [0.0, 0.0, 1.0]], dtype=torch.float64)
    torch.testing.assert_close(compute_component_cosines(compute_fold_gram([x])), expected)


# The Gram matrix


def test_gram_holds_the_products_summed_over_blocks_of_parameters() -> None:
    x = make_vectors(4, 3, 10)
    blocks = [x[..., :4].reshape(4, 3, 2, 2), x[..., 4:5], x[..., 5:]]
    gram = compute_fold_gram(iter(blocks))
    assert gram.shape == (4, 3, 4, 3)
    for k, c, n, d in product(range(4), range(3), range(4), range(3)):
        assert gram[k, c, n, d].item() == pytest.approx(oracle.dot(x[k, c].tolist(), x[n, d].tolist()))
    x = torch.full((1, 1, 4096), 0.1)
    assert compute_fold_gram([x]).item() == pytest.approx(4096 * x[0, 0, 0].item() ** 2, rel=1e-13)
    assert compute_fold_gram([x.bfloat16()]).dtype == torch.float64
    x = make_vectors(4, 3, 5)
    update_gram = compute_fold_gram([x.sum(dim=1, keepdim=True)])[:, 0, :, 0]
    torch.testing.assert_close(compute_fold_gram([x]).sum(dim=(1, 3)), update_gram)


# Expectations over every draw of a bandit


def compute_expectations(component: str, sizes: Sequence[int]) -> tuple[float, ...]:
    """E |G|², E signal and E noise over every draw of `sizes[k]` prompts in fold k, whose gradient is their mean."""
    sums = [0.0, 0.0, 0.0]
    for probability, gradients in oracle.iterate_bandit_draws(component, sum(sizes)):
        means = [fold.mean(dim=0) for fold in torch.split(gradients, list(sizes))]
        statistics = estimate_signal(torch.stack(means), sizes)
        for i, value in enumerate((statistics.norm**2, statistics.signal, statistics.noise)):
            sums[i] += probability * value
    return tuple(sums)


@pytest.mark.parametrize("component", oracle.BANDIT_COMPONENTS)
def test_signal_and_noise_are_unbiased_over_all_draws_of_a_bandit(component: str) -> None:
    square, variance = oracle.compute_bandit_moments(component)
    squared_norm, signal, noise = compute_expectations(component, (1, 1, 1))
    assert variance > 1e-4
    assert signal == pytest.approx(square, rel=1e-9)
    assert noise == pytest.approx(variance / 3, rel=1e-9)
    assert squared_norm == pytest.approx(square + variance / 3, rel=1e-9)  # a squared norm is biased upwards


@pytest.mark.parametrize("drift", [0.0, 0.25, 1.0])
def test_the_interval_covers_the_true_ratio(drift: float) -> None:
    runs, count, width = 150, 8, 40
    draws = make_vectors(runs, count, width, drift=drift)
    ratio = count * drift**2
    statistics = [estimate_signal(x) for x in draws]
    coverage = sum(s.low <= ratio <= s.high for s in statistics) / runs
    assert coverage >= 0.92
    assert sum(s.high - s.low for s in statistics) / runs < 2 * (1 + ratio)  # the interval is not wide
    assert sum(s.snr for s in statistics) / runs == pytest.approx(ratio, abs=0.05 * (1 + ratio))


# Degenerate cases


def test_few_folds_have_a_norm_and_no_interval() -> None:
    statistics = estimate_signal(torch.tensor([[3.0, 4.0]]))
    assert statistics.norm == 5
    assert all(math.isnan(x) for x in statistics[1:])
    statistics = estimate_signal(torch.tensor([[1.0, 2.0], [3.0, 0.0]]))  # mean (2, 1), product 3
    assert statistics[:4] == pytest.approx((math.sqrt(5), 3.0, 2.0, 1.5))
    assert math.isnan(statistics.low)
    assert math.isnan(statistics.high)


@pytest.mark.parametrize("counts", [None, [1.0, 7.0, 3.0, 5.0, 2.0]])
def test_identical_folds_have_no_noise_and_no_ratio(counts: list[float] | None) -> None:
    row = make_vectors(1, 1000)
    statistics = estimate_signal(row.expand(5, -1), counts)
    assert statistics.noise == 0
    assert statistics.signal == pytest.approx(row.square().sum().item())
    assert all(math.isnan(x) for x in statistics[3:])


def test_a_component_of_zero_has_no_cosine_and_components_that_cancel_no_share() -> None:
    x = make_vectors(3, 3, 5)
    x[:, 1] = 0
    cosines = compute_component_cosines(compute_fold_gram([x]))
    assert cosines[1].isnan().all()
    assert cosines[:, 1].isnan().all()
    assert not cosines[0, [0, 2]].isnan().any()
    assert compute_update_fractions(compute_fold_gram([x]))[1] == 0
    x = make_vectors(4, 1, 50).float()
    assert compute_update_fractions(compute_fold_gram([torch.cat([x, -x], dim=1)])).isnan().all()
    opposed = compute_component_cosines(compute_fold_gram([torch.cat([x, -2 * x], dim=1)]))
    torch.testing.assert_close(opposed, torch.tensor([[1.0, -1.0], [-1.0, 1.0]], dtype=torch.float64))


def test_what_float32_rounds_away_is_neither_noise_nor_a_direction() -> None:
    x = make_vectors(1, 1, 50)
    folds = (1 + 1e-7 * torch.arange(4, dtype=torch.float64)).view(4, 1, 1) * x  # four folds that agree up to rounding
    statistics = estimate_signal(folds[:, 0])
    assert statistics.noise == 0
    assert math.isnan(statistics.snr)
    signed = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64).view(4, 1, 1) * folds
    assert compute_component_cosines(compute_fold_gram([torch.cat([signed, folds], dim=1)]))[0].isnan().all()
    assert compute_update_fractions(compute_fold_gram([torch.cat([folds, -(1 + 1e-7) * folds], dim=1)])).isnan().all()


# Folds


@examples
@given(st.lists(st.integers(0, 12), min_size=1, max_size=30), st.integers(1, 9), st.integers(0, 5))
def test_folds_are_whole_groups_and_as_equal_as_possible(ids: list[int], count: int, seed: int) -> None:
    group_ids = torch.tensor(ids)
    fold_ids = split_folds(group_ids, count, torch.Generator().manual_seed(seed))
    fold_of = dict(zip(ids, fold_ids.tolist(), strict=True))
    assert fold_ids.tolist() == [fold_of[group] for group in ids]
    sizes = torch.bincount(torch.tensor(list(fold_of.values())))
    assert len(sizes) == min(count, len(set(ids)))
    assert sizes.min() >= 1
    assert sizes.max() - sizes.min() <= 1


def test_every_split_of_the_groups_comes_up_and_the_generator_decides() -> None:
    ids = torch.tensor([7, 3, 9, 4])
    splits = {tuple(split_folds(ids, 2, torch.Generator().manual_seed(seed)).tolist()) for seed in range(100)}
    assert len(splits) == 6
    assert {sum(split) for split in splits} == {2}
    repeated_splits = [split_folds(ids, 2, torch.Generator().manual_seed(3)).tolist() for _ in range(2)]
    assert repeated_splits[0] == repeated_splits[1]
    assert split_folds(torch.zeros(0, dtype=torch.long), 4, torch.Generator()).tolist() == []


# The published norm


@pytest.mark.parametrize("size", [4, 8, 11, 13, 2])
def test_the_published_norm_divides_a_short_mini_batch_as_if_it_were_whole(size: int) -> None:
    mini_batch_size, micro_batch_size, width = 4, 2, 3
    features = make_vectors(size, 5, width, seed=size)  # the gradient of each token's loss
    mask = make_vectors(size, 5, seed=size + 1, drift=0) > -0.7
    norms, sequences = [], []
    for rows in torch.arange(size).split(mini_batch_size):
        weights = compute_loss_weights(mask[rows], "token-mean", micro_batch_size).double()
        norms.append(torch.einsum("bt,btn->n", weights, features[rows]).norm())
        sequences.append(len(rows))
    tokens = int(mask.sum())
    sizes = (mini_batch_size, micro_batch_size)
    published_norm = compute_published_norm(torch.stack(norms), torch.tensor(sequences), tokens, *sizes)
    expected_norm = oracle.published_norm(features.tolist(), mask.tolist(), *sizes)
    assert published_norm == pytest.approx((expected_norm, expected_norm / size, expected_norm / tokens), rel=1e-6)


def test_the_published_norm_of_the_published_bucket_and_of_nothing() -> None:
    # 336 sequences are ten mini-batches of 32 and one of 16, which counts as half a mini-batch.
    published_norm = compute_published_norm(torch.ones(11), torch.tensor([32] * 10 + [16]), 1000, 32, 4)
    assert published_norm == pytest.approx((10.5 / 11, 10.5 / 11 / 336, 10.5 / 11 / 1000))
    empty = torch.zeros(0)
    assert all(math.isnan(x) for x in compute_published_norm(empty, empty.long(), 0, 32, 4))
