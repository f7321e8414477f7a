"""Tests of Kondo's screen: its threshold equals that of a root finder, its kept share, and its two special cases."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import brentq

from sandboxes.update_rules.rules.delight import compute_behavior_delight, find_threshold, screen_rollouts
from tests.strategies.update_rules import Case, cases, examples, make_config, make_random_case

shares = st.sampled_from([0.05, 0.5, 0.9])


def compute_literal_scores(case: Case, e: int) -> list[float]:
    """Compute the largest delight of each rollout with loops."""
    batch = case.rollouts
    scores = []
    for i, reward in enumerate(batch.rewards[e].tolist()):
        delights = []
        for t, log_p in enumerate(batch.behavior_log_probs[e, i].tolist()):
            expected_reward = batch.expected_reward
            baseline = float(batch.behavior_baseline[e, i, t] if expected_reward is None else expected_reward[e, i])
            delights.append((reward - baseline) * -log_p)
        scores.append(max(delights))
    return scores


def compute_excess(level: float, scores: list[float], share: float, eta: float) -> float:
    return sum(1 / (1 + math.exp((level - score) / eta)) for score in scores) / len(scores) - share


@given(case=cases(("Kondo",)), share=shares)
@examples
def test_threshold_is_the_root(case: Case, share: float) -> None:
    eta = case.config.eta
    thresholds = find_threshold(compute_behavior_delight(case.rollouts).amax(-1), case.rollouts.keep_mask, share, eta)
    for e, level in enumerate(thresholds.tolist()):
        pairs = zip(compute_literal_scores(case, e), case.rollouts.keep_mask[e].tolist(), strict=True)
        scores = [score for score, is_kept in pairs if is_kept]
        ends = min(scores) - 10 * eta, max(scores) + 10 * eta
        root = brentq(compute_excess, *ends, args=(scores, share, eta))
        assert level == pytest.approx(root, abs=(ends[1] - ends[0]) / 2**20)


@given(case=cases(("Kondo",)), share=shares, seed=st.integers(0, 99))
@examples
def test_a_rollout_is_kept_where_its_uniform_is_below_its_probability(case: Case, share: float, seed: int) -> None:
    uniforms = torch.rand(case.rollouts.rewards.shape, generator=torch.Generator().manual_seed(seed))
    config = make_config("Kondo", kondo_keep=share, eta=case.config.eta)
    screened, _ = screen_rollouts(case.rollouts, uniforms, config)
    assert not (screened.keep_mask & ~case.rollouts.keep_mask).any()
    scores = compute_behavior_delight(case.rollouts).amax(-1)
    thresholds = find_threshold(scores, case.rollouts.keep_mask, share, config.eta)
    for e, threshold in enumerate(thresholds.tolist()):
        margins = [(score - threshold) / config.eta for score in compute_literal_scores(case, e)]
        keep_probs = [1 / (1 + math.exp(-margin)) for margin in margins]
        is_kept = [k and u < p for k, u, p in zip(case.rollouts.keep_mask[e], uniforms[e], keep_probs, strict=True)]
        if any(is_kept):
            assert screened.keep_mask[e].tolist() == [bool(kept) for kept in is_kept]


def test_the_best_rollout_is_kept_where_none_would_be_and_keeping_all_changes_nothing() -> None:
    case = make_random_case(0, "Kondo", 3, 3, 2, kondo_keep=0.05)
    screened, _ = screen_rollouts(case.rollouts, torch.ones_like(case.rollouts.rewards), case.config)
    for e in range(3):
        scores = compute_literal_scores(case, e)
        candidates = [i for i, keep in enumerate(case.rollouts.keep_mask[e].tolist()) if keep]
        best = max(candidates, key=lambda i: scores[i])
        assert screened.keep_mask[e].nonzero().flatten().tolist() == [best]
    case = make_random_case(0, "Kondo", 2, 3, 2, kondo_keep=1)
    screened, metrics = screen_rollouts(case.rollouts, torch.ones_like(case.rollouts.rewards), case.config)
    assert screened is case.rollouts
    assert metrics["kept_frac"].tolist() == [1, 1]
