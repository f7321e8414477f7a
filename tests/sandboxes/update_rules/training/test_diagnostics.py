"""Tests of the measurements of an update: they equal their definitions, token by token, and gradients one at a time."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sandboxes.toys.optimizer import MemberAdam
from sandboxes.toys.rngs import MemberRngs
from sandboxes.update_rules.config.settings import UpdateRuleConfig
from sandboxes.update_rules.rollouts import Rollouts
from sandboxes.update_rules.rules.token_credit import cross_entropy
from sandboxes.update_rules.training.diagnostics import (
    compute_entropy_statistics,
    compute_fit_statistics,
    compute_ratio_statistics,
    correlation,
    cosine,
    entropies,
)
from tests.sandboxes.update_rules.batches import add_candidates, make_random_batch
from tests.sandboxes.update_rules.tabular import TabularTask
from tests.strategies.examples import draw_examples

SEEDS = st.integers(0, 200)


def make_logits(seed: int) -> Tensor:
    return torch.randn(2, 5, 3, 4, generator=torch.Generator().manual_seed(seed))


def list_kept_tokens(batch: Rollouts, member: int) -> list[tuple[int, int]]:
    """List the (rollout, position) of the kept tokens of a member."""
    return [(b, t) for b in range(5) for t in range(3) if batch.keep_mask[member, b]]


def mean_or_nan(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.nan


@draw_examples(20)
@given(SEEDS, st.booleans())
def test_ratios_and_their_clip_share(seed: int, has_candidates: bool) -> None:
    batch = add_candidates(make_random_batch(seed)) if has_candidates else make_random_batch(seed)
    log_probs = make_logits(seed).log_softmax(-1)
    statistics = compute_ratio_statistics(log_probs, batch, 0.2, 0.28)
    for member in range(2):
        ratios = []
        for b, t in list_kept_tokens(batch, member):
            if batch.candidates is None:
                pairs = [(int(batch.actions[member, b, t]), float(batch.behavior_log_probs[member, b, t]))]
            else:
                candidate_tensors = (batch.candidates.actions[member, b, t], batch.candidates.log_probs[member, b, t])
                pairs = list(zip(*(entries.tolist() for entries in candidate_tensors), strict=True))
            ratios += [math.exp(float(log_probs[member, b, t, action]) - actor) for action, actor in pairs]
        assert float(statistics["importance_ratio_mean"][member]) == pytest.approx(mean_or_nan(ratios), rel=1e-4)
        assert float(statistics["importance_ratio_std"][member]) == pytest.approx(float(np.std(ratios)), rel=1e-3)
        assert float(statistics["importance_ratio_max"][member]) == pytest.approx(max(ratios), rel=1e-4)
        is_clipped = [float(ratio < 0.8 or ratio > 1.28) for ratio in ratios]
        assert float(statistics["clip_frac"][member]) == pytest.approx(mean_or_nan(is_clipped))


def compute_literal_statistics(
    old_logits: Tensor, new_logits: Tensor, batch: Rollouts, member: int
) -> dict[str, float]:
    """Compute the entropy statistics of one member from lists of numbers."""
    old_probs, new_probs = old_logits.double().softmax(-1), new_logits.double().softmax(-1)
    rows = []
    for b, t in list_kept_tokens(batch, member):
        action = int(batch.actions[member, b, t])
        entropy = [-sum(float(p) * math.log(float(p)) for p in probs[member, b, t]) for probs in (old_probs, new_probs)]
        advantage = float(batch.rewards[member, b] - batch.behavior_baseline[member, b, t])
        surprisal = -math.log(float(old_probs[member, b, t, action]))
        logit_change = float(new_logits[member, b, t, action] - old_logits[member, b, t, action])
        rows.append((*entropy, advantage, surprisal, logit_change))
    drops = [row[0] - row[1] for row in rows]
    statistics = {
        "batch_entropy_before": mean_or_nan([row[0] for row in rows]),
        "batch_entropy_after": mean_or_nan([row[1] for row in rows]),
        "batch_delta_entropy": -mean_or_nan(drops),
        "cov_prob_delta_logit": float(
            np.cov([math.exp(-row[3]) for row in rows], [row[4] for row in rows], ddof=0)[0, 1]
        ),
        "entropy_drop_pos_adv": mean_or_nan([drop for drop, row in zip(drops, rows, strict=True) if row[2] > 0]),
        "entropy_drop_neg_adv": mean_or_nan([drop for drop, row in zip(drops, rows, strict=True) if row[2] < 0]),
    }
    delights = [row[2] * row[3] for row in rows]
    for name, values in (("surprisal", [row[3] for row in rows]), ("delight", delights)):
        low, high = np.quantile(values, [1 / 3, 2 / 3])
        thirds: dict[str, list[float]] = {"low": [], "mid": [], "high": []}
        for value, drop in zip(values, drops, strict=True):
            # A token that is the quantile itself may be on different sides in float32 and float64.
            thirds["low" if value <= low + 1e-6 else "mid" if value <= high + 1e-6 else "high"].append(drop)
        statistics |= {
            f"entropy_drop_{name}_{third}": mean_or_nan(third_drops) for third, third_drops in thirds.items()
        }
    return statistics


@draw_examples(30)
@given(SEEDS)
def test_entropy_statistics(seed: int) -> None:
    batch, old_logits, new_logits = make_random_batch(seed), make_logits(seed), make_logits(seed + 1000)
    statistics = compute_entropy_statistics(old_logits, new_logits, batch)
    for member in range(2):
        for name, value in compute_literal_statistics(old_logits, new_logits, batch, member).items():
            assert float(statistics[name][member]) == pytest.approx(value, rel=1e-3, abs=1e-5, nan_ok=True), name


def test_special_cases_of_entropies_and_of_statistics_that_are_missing() -> None:
    batch = make_random_batch(0)
    statistics = compute_entropy_statistics(
        make_logits(0), make_logits(1), Rollouts(**{**vars(batch), "rewards": batch.rewards + 9})
    )
    assert bool(statistics["entropy_drop_neg_adv"].isnan().all())
    assert bool(statistics["entropy_drop_pos_adv"].isfinite().all())
    x = torch.tensor([[1.0, 2.0, 3.0]])
    assert bool(correlation(x, torch.ones_like(x), torch.ones_like(x, dtype=torch.bool)).isnan().all())
    assert bool(cosine(x, torch.zeros_like(x)).isnan().all())
    certain = torch.tensor([0.0, -torch.inf, -torch.inf])
    assert float(entropies(certain)) == 0.0
    assert float(entropies(torch.full((4,), 0.25).log())) == pytest.approx(math.log(4))


@draw_examples(20)
@given(SEEDS)
def test_cosine_and_correlation(seed: int) -> None:
    x, y = make_logits(seed).flatten(1), make_logits(seed + 1).flatten(1)
    keep_mask = torch.rand(x.shape, generator=torch.Generator().manual_seed(seed)) < 0.6
    for member in range(2):
        member_x, member_y = x[member].numpy(), y[member].numpy()
        expected = np.dot(member_x, member_y) / (np.linalg.norm(member_x) * np.linalg.norm(member_y))
        assert float(cosine(x, y)[member]) == pytest.approx(float(expected), abs=1e-5)
        member_mask = keep_mask[member].numpy()
        expected = np.corrcoef(member_x[member_mask], member_y[member_mask])[0, 1]
        assert float(correlation(x, y, keep_mask)[member]) == pytest.approx(float(expected), abs=1e-5)


def test_the_fit_to_the_oracle_is_that_of_one_gradient_per_token() -> None:
    """Correlations over kept tokens have the sign of the projection: negative for what lowers the oracle's loss."""
    config = UpdateRuleConfig(batch_size=6, eta=0.5)
    task, rngs = TabularTask(config), MemberRngs((3, 4))
    models = task.make_models(rngs)
    optimizer = MemberAdam(models.weights, 0.1)
    batch = task.sample(models, rngs, 0)
    batch.keep_mask[:, 1] = False
    oracle_loss = cross_entropy(batch, task.compute_oracle_log_probs(models, batch), config).loss
    oracle_gradient = optimizer.compute_gradient(oracle_loss)
    projections = []
    for index in range(batch.actions[0].numel()):
        log_probs = task.compute_logits(models, batch).log_softmax(-1)
        taken_log_probs = log_probs.gather(-1, batch.actions.unsqueeze(-1)).flatten(1)
        projections.append((optimizer.compute_gradient(taken_log_probs[:, index]) * oracle_gradient).sum(1))
    advantage = (batch.rewards.unsqueeze(-1) - log_probs.detach().exp().square().sum(-1)).flatten(1)
    delight = advantage * -taken_log_probs.detach()
    quantities = {"advantage": advantage, "surprisal": -taken_log_probs.detach(), "delight": delight}
    quantities["gate"] = torch.sigmoid(delight / 0.5)
    directions = optimizer.split_by_parameter(oracle_gradient)
    statistics = compute_fit_statistics(task, models, batch, directions, config)
    is_kept = batch.keep_mask.repeat_interleave(batch.actions.shape[-1], dim=1)
    for name, values in quantities.items():
        for member, mask in enumerate(is_kept):
            pair = torch.stack(projections, dim=1)[member][mask], values[member][mask]
            expected = np.corrcoef(*(entry.numpy() for entry in pair))[0, 1]
            assert float(statistics[f"oracle_fit_{name}_correlation"][member]) == pytest.approx(expected, abs=1e-4)
