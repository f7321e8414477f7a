import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from trainable.algo.losses import compute_importance_weights
from trainable.rollout.engine import EngineMismatchError, check_mismatch, measure_mismatch
from trainable.runs.failures import classify_failure

LOGPROBS = st.floats(-20, 0)
PAIRS = st.lists(st.tuples(LOGPROBS, LOGPROBS), min_size=1, max_size=30)


def make_tensors(pairs: list[tuple[float, float]]) -> tuple[torch.Tensor, torch.Tensor]:
    columns = torch.tensor(pairs, dtype=torch.float64)
    return columns[:, 0], columns[:, 1]


@given(PAIRS)
def test_the_columns_are_their_formulas_and_keep_their_bounds(pairs: list[tuple[float, float]]) -> None:
    actual = measure_mismatch(*make_tensors(pairs), step=1)
    differences = [trainer - engine for trainer, engine in pairs]
    weights = [math.exp(difference) for difference in differences]
    assert actual.mean_abs == pytest.approx(sum(map(abs, differences)) / len(pairs))
    assert actual.max_abs == pytest.approx(max(map(abs, differences)))
    k3 = [weight - 1 - difference for weight, difference in zip(weights, differences, strict=True)]
    assert actual.kl == pytest.approx(sum(k3) / len(pairs), rel=1e-6, abs=1e-9)
    squares = sum(weight**2 for weight in weights)
    assert actual.ess_fraction == pytest.approx(sum(weights) ** 2 / (len(pairs) * squares))
    assert 0 <= actual.mean_abs <= actual.max_abs + 1e-12
    assert actual.kl >= 0
    assert 1 / len(pairs) - 1e-12 <= actual.ess_fraction <= 1 + 1e-12


def test_kl_and_weights_estimate_over_the_engines_tokens() -> None:
    """Over tokens of the engine's distribution q: E k3 = KL(q || p) and E w f = E_p f, both computed by hand."""
    q, p = np.array([0.5, 0.3, 0.15, 0.05]), np.array([0.4, 0.25, 0.2, 0.15])
    tokens = np.repeat(np.arange(4), (1000 * q).round().astype(int))  # the exact distribution q, not a sample of it
    trainer, engine = torch.from_numpy(np.log(p)[tokens]), torch.from_numpy(np.log(q)[tokens])
    assert measure_mismatch(trainer, engine, step=1).kl == pytest.approx(stats.entropy(q, p))
    assert stats.entropy(q, p) != pytest.approx(stats.entropy(p, q), rel=1e-2)
    values = np.array([1.0, -2.0, 3.0, 7.0])
    mask = torch.ones(1, len(tokens), dtype=torch.bool)
    weights, _ = compute_importance_weights(trainer[None], engine[None], mask, 5.0)
    weighted = weights[0].numpy() * values[tokens]
    assert weighted.mean() == pytest.approx((p * values).sum())


@pytest.mark.parametrize("mean", [0.0501, 0.7])
def test_a_mismatch_ends_the_run_without_retry(mean: float) -> None:
    with pytest.raises(EngineMismatchError, match=r"After the sync of step 7 .* samples from other weights") as raised:
        check_mismatch(mean, 0.05, step=7)
    assert "0.05 is allowed" in str(raised.value)
    failure = classify_failure(raised.value, has_rows=True)
    assert (failure.kind, failure.is_retried) == ("error", False)
    assert not classify_failure(raised.value, has_rows=False).is_retried


def test_a_mismatch_within_the_tolerance_passes_and_another_names_a_limit_that_would() -> None:
    for mean in (0.0, 0.01, 0.05):
        check_mismatch(mean, 0.05, step=1)
    with pytest.raises(EngineMismatchError, match=r"rollout.logprob_tolerance=0.2,") as raised:
        check_mismatch(0.08, 0.05, step=1)
    assert "model.dtype=float32" in str(raised.value)
