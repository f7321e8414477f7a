"""Shares of the expected step equal loops, are unbiased over every draw of a bandit, and are robust to noise."""

import pytest
import torch
from hypothesis import given
from torch import Tensor

from tests.oracles import gradient_signal as oracle
from tests.strategies.algo import examples
from tests.trainable.algo.test_gradient_signal import is_close, make_vectors
from trainable.algo.gradient_signal import (
    compute_fold_gram,
    estimate_gradient_signal,
    estimate_signal_fractions,
)


@examples
@given(oracle.folds(components=3))
def test_parts_of_the_signal_equal_the_loops_and_sum_to_it(folds: tuple[Tensor, list[float]]) -> None:
    (x, counts), scale = folds, folds[0].square().sum().item()
    products = estimate_signal_fractions(compute_fold_gram([x]), torch.tensor(counts)).products.tolist()
    expected = oracle.cross_products(x.tolist(), counts)
    assert all(is_close(actual, product, scale) for actual, product in zip(products, expected, strict=True))
    signal = estimate_gradient_signal(compute_fold_gram([x]).sum(dim=(1, 3)), torch.tensor(counts)).signal
    assert is_close(sum(products), signal, scale)


@pytest.mark.parametrize("count", [3, 5, 8])
@pytest.mark.parametrize("equal", [True, False])
def test_shares_of_the_expected_step_equal_a_loop_that_deletes_one_fold(count: int, equal: bool) -> None:
    x = make_vectors(count, 3, 6, seed=count)
    x[:, 2] *= -0.5  # one component that points against the others
    counts = [1.0] * count if equal else [1.0 + k % 3 for k in range(count)]
    fractions = estimate_signal_fractions(compute_fold_gram([x]), None if equal else torch.tensor(counts))
    expected_intervals = oracle.compute_share_intervals(x.tolist(), counts, 0.95)
    for component, expected_interval in enumerate(expected_intervals):
        actual = tuple(column[component].item() for column in (fractions.fraction, fractions.low, fractions.high))
        assert actual == pytest.approx(expected_interval, rel=1e-9, abs=1e-12)
    assert fractions.fraction.sum().item() == pytest.approx(1)
    assert fractions.fraction[2] < 0 < fractions.fraction[0]


@pytest.mark.parametrize("drift", [0.5, 1.0])
def test_the_interval_covers_the_share_in_the_expected_step(drift: float) -> None:
    runs, width = 200, 40
    draws = make_vectors(runs, 8, 2, width, drift=0)
    draws[:, :, 0] += drift
    draws[:, :, 1] += drift / 2
    fractions = [estimate_signal_fractions(compute_fold_gram([x])) for x in draws]
    coverage = sum(bool(fraction.low[1] <= 1 / 3 <= fraction.high[1]) for fraction in fractions) / runs
    assert coverage >= 0.9
    assert sum((fraction.high[1] - fraction.low[1]).item() for fraction in fractions) / runs < 0.5 / drift


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 1)])
def test_parts_of_the_signal_are_unbiased_over_all_draws_of_a_bandit(sizes: tuple[int, ...]) -> None:
    mean_products = torch.zeros(3, dtype=torch.float64)
    for probability, gradients in oracle.iterate_component_draws(sum(sizes)):
        means = torch.stack([fold.mean(dim=0) for fold in torch.split(gradients, list(sizes))])
        fractions = estimate_signal_fractions(compute_fold_gram([means]), torch.tensor(sizes))
        mean_products += probability * fractions.products
    torch.testing.assert_close(mean_products, oracle.compute_bandit_products(), rtol=1e-9, atol=1e-12)


def test_shares_without_a_signal_are_nan() -> None:
    x = make_vectors(4, 1, 50)
    assert estimate_signal_fractions(compute_fold_gram([torch.cat([x, -x], dim=1)])).fraction.isnan().all()
    one_fold = estimate_signal_fractions(compute_fold_gram([x[:1]]))
    assert one_fold.products.isnan().all()
    assert one_fold.fraction.isnan().all()
    two_folds = estimate_signal_fractions(compute_fold_gram([torch.cat([x[:2], x[:2]], dim=1)]))
    assert two_folds.fraction.tolist() == pytest.approx([0.5, 0.5])
    assert two_folds.low.isnan().all()
    x = torch.tensor([6.0, 1.0, -1.0, 1.0, -1.0, 1.0], dtype=torch.float64)[:, None, None].repeat(1, 2, 1)
    fractions = estimate_signal_fractions(compute_fold_gram([x]))
    assert fractions.products.sum() > 0  # the sum is below 0 without the first fold
    assert fractions.fraction.isnan().all()
    assert fractions.low.isnan().all()
