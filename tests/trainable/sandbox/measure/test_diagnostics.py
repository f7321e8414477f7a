"""Measurements of an update against their definitions, token by token."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.trainable.sandbox.batches import drawn_batch, with_candidates
from trainable.sandbox.batch.rollouts import Rollouts
from trainable.sandbox.measure.diagnostics import (
    compute_entropy_statistics,
    compute_ratio_statistics,
    correlation,
    cosine,
    entropies,
)

SEEDS = st.integers(0, 200)


def logits(seed: int) -> Tensor:
    return torch.randn(2, 5, 3, 4, generator=torch.Generator().manual_seed(seed))


def tokens(batch: Rollouts, member: int) -> list[tuple[int, int]]:
    """(rollout, position) of the kept tokens of a member."""
    return [(b, t) for b in range(5) for t in range(3) if batch.keep_mask[member, b]]


def mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.nan


@settings(deadline=None, max_examples=20)
@given(SEEDS, st.booleans())
def test_ratios_and_their_clip_share(seed: int, has_candidates: bool) -> None:
    batch = with_candidates(drawn_batch(seed)) if has_candidates else drawn_batch(seed)
    log_probs = logits(seed).log_softmax(-1)
    found = compute_ratio_statistics(log_probs, batch, 0.2, 0.28)
    for member in range(2):
        ratios = []
        for b, t in tokens(batch, member):
            if batch.candidates is None:
                pairs = [(int(batch.actions[member, b, t]), float(batch.behavior_log_probs[member, b, t]))]
            else:
                parts = (batch.candidates.actions[member, b, t], batch.candidates.log_probs[member, b, t])
                pairs = list(zip(*(part.tolist() for part in parts), strict=True))
            ratios += [math.exp(float(log_probs[member, b, t, action]) - actor) for action, actor in pairs]
        assert float(found["importance_ratio_mean"][member]) == pytest.approx(mean(ratios), rel=1e-4)
        assert float(found["importance_ratio_std"][member]) == pytest.approx(float(np.std(ratios)), rel=1e-3)
        assert float(found["importance_ratio_max"][member]) == pytest.approx(max(ratios), rel=1e-4)
        outside = [float(ratio < 0.8 or ratio > 1.28) for ratio in ratios]
        assert float(found["clip_frac"][member]) == pytest.approx(mean(outside))


def literal(before: Tensor, after: Tensor, batch: Rollouts, member: int) -> dict[str, float]:
    """Entropy statistics of one member, from lists of numbers."""
    first, second = before.double().softmax(-1), after.double().softmax(-1)
    rows = []
    for b, t in tokens(batch, member):
        action = int(batch.actions[member, b, t])
        entropy = [-sum(float(p) * math.log(float(p)) for p in probs[member, b, t]) for probs in (first, second)]
        advantage = float(batch.rewards[member, b] - batch.behavior_baseline[member, b, t])
        surprisal = -math.log(float(first[member, b, t, action]))
        moved = float(after[member, b, t, action] - before[member, b, t, action])
        rows.append((*entropy, advantage, surprisal, moved))
    drops = [row[0] - row[1] for row in rows]
    found = {
        "batch_entropy_before": mean([row[0] for row in rows]),
        "batch_entropy_after": mean([row[1] for row in rows]),
        "batch_delta_entropy": -mean(drops),
        "cov_prob_delta_logit": float(
            np.cov([math.exp(-row[3]) for row in rows], [row[4] for row in rows], ddof=0)[0, 1]
        ),
        "entropy_drop_pos_adv": mean([drop for drop, row in zip(drops, rows, strict=True) if row[2] > 0]),
        "entropy_drop_neg_adv": mean([drop for drop, row in zip(drops, rows, strict=True) if row[2] < 0]),
    }
    measures: dict[str, Callable[[tuple[float, ...]], float]] = {
        "surprisal": lambda row: row[3],
        "delight": lambda row: row[2] * row[3],
    }
    for name, measure in measures.items():
        values = [measure(row) for row in rows]
        low, high = np.quantile(values, [1 / 3, 2 / 3])
        thirds: dict[str, list[float]] = {"low": [], "mid": [], "high": []}
        for value, drop in zip(values, drops, strict=True):
            # Float32 and float64 may put a token that is the quantile itself on different sides.
            thirds["low" if value <= low + 1e-6 else "mid" if value <= high + 1e-6 else "high"].append(drop)
        found |= {f"entropy_drop_{name}_{third}": mean(inside) for third, inside in thirds.items()}
    return found


@settings(deadline=None, max_examples=30)
@given(SEEDS)
def test_entropy_statistics(seed: int) -> None:
    batch, before, after = drawn_batch(seed), logits(seed), logits(seed + 1000)
    found = compute_entropy_statistics(before, after, batch)
    for member in range(2):
        for name, value in literal(before, after, batch, member).items():
            assert float(found[name][member]) == pytest.approx(value, rel=1e-3, abs=1e-5, nan_ok=True), name


def test_the_entropy_of_a_policy_that_is_sure_is_zero_and_of_one_that_knows_nothing_log_a() -> None:
    sure = torch.tensor([0.0, -torch.inf, -torch.inf])
    assert float(entropies(sure)) == 0.0
    assert float(entropies(torch.full((4,), 0.25).log())) == pytest.approx(math.log(4))


def test_a_kind_of_token_that_is_not_there_has_no_number() -> None:
    batch = drawn_batch(0)
    found = compute_entropy_statistics(logits(0), logits(1), Rollouts(**{**vars(batch), "rewards": batch.rewards + 9}))
    assert bool(found["entropy_drop_neg_adv"].isnan().all())
    assert bool(found["entropy_drop_pos_adv"].isfinite().all())


@settings(deadline=None, max_examples=20)
@given(SEEDS)
def test_cosine_and_correlation(seed: int) -> None:
    x, y = logits(seed).flatten(1), logits(seed + 1).flatten(1)
    kept = torch.rand(x.shape, generator=torch.Generator().manual_seed(seed)) < 0.6
    for member in range(2):
        one, other = x[member].numpy(), y[member].numpy()
        wanted = np.dot(one, other) / (np.linalg.norm(one) * np.linalg.norm(other))
        assert float(cosine(x, y)[member]) == pytest.approx(float(wanted), abs=1e-5)
        inside = kept[member].numpy()
        wanted = np.corrcoef(one[inside], other[inside])[0, 1]
        assert float(correlation(x, y, kept)[member]) == pytest.approx(float(wanted), abs=1e-5)


def test_what_does_not_vary_correlates_with_nothing() -> None:
    x = torch.tensor([[1.0, 2.0, 3.0]])
    assert bool(correlation(x, torch.ones_like(x), torch.ones_like(x, dtype=torch.bool)).isnan().all())
    assert bool(cosine(x, torch.zeros_like(x)).isnan().all())
