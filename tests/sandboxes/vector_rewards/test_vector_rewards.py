"""Tests of vector rewards: fronts and best sets by enumeration, scores against loops, and what each method learns."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate
from torch import Tensor

from sandboxes.vector_rewards import algorithm as fronts
from sandboxes.vector_rewards.algorithm import VectorRewardAlgorithm, make_trainer
from sandboxes.vector_rewards.settings import VectorRewardConfig
from tests.fakes.ensembles import run_ensemble


def make_config(steps: int = 4, test_freq: int = 2, **settings: Any) -> VectorRewardConfig:
    return VectorRewardConfig(
        **{"batch_size": 32, "trainer": {"total_training_steps": steps, "test_freq": test_freq}, **settings}
    )


def dominates(first: Tensor, second: Tensor) -> bool:
    return bool((first >= second).all() and (first > second).any())


@pytest.mark.parametrize(("task", "size"), [("pareto_front", 5), ("pareto_large", 20)])
def test_so_many_actions_are_dominated_by_no_other(task: str, size: int) -> None:
    rewards = fronts.make_front(task).rewards
    front = [reward for reward in rewards if not any(dominates(other, reward) for other in rewards)]
    assert len(front) == size
    assert ((rewards >= 0) & (rewards <= 1)).all()


def test_every_action_of_the_large_front_alone_is_the_best_for_some_weights() -> None:
    rewards = fronts.make_front("pareto_large").rewards
    best = (rewards.double() @ fronts.make_simplex_points(4).T).argmax(0)
    assert set(best.tolist()) == set(range(20))
    for task, count in (("pareto_front", 1), ("pareto_large", 5)):
        front = fronts.make_front(task)
        best_scores = (front.rewards @ front.deployment_weights.T).amax(0)
        # A single action reaches the best score at all deployment weights only on the published front.
        reaches = (front.rewards @ front.deployment_weights.T >= best_scores - 1e-6).all(1).any()
        assert len(front.deployment_weights) == count
        assert bool(reaches) == (count == 1)


def test_prompts_roll_the_actions_of_the_front_whose_best_sets_are_the_derived_ones() -> None:
    front = fronts.make_front("pareto_front")
    rewards = fronts.make_prompt_rewards(front, 9)
    assert torch.equal(rewards[2, 3], front.rewards[1])
    assert torch.equal(rewards[1, 1], front.rewards[0].flip(0))
    assert torch.equal(rewards[7, 0], front.rewards[0].flip(0))
    assert torch.equal(rewards[8, 1], front.rewards[0])
    rewards = fronts.make_front("pareto_front").rewards
    for size, value, actions in ((1, 0.6, [2]), (2, 0.75, [0, 4]), (3, 0.76, [0, 2, 4])):
        assert fronts.compute_best_score(rewards, size) == pytest.approx(value, abs=1e-5)
        assert fronts.compute_best_score(rewards[actions], size) == pytest.approx(value, abs=1e-5)
    assert math.isnan(fronts.compute_best_score(fronts.make_front("pareto_large").rewards, 7))


@pytest.mark.parametrize("actions", list(itertools.combinations(range(7), 2))[::4])
def test_a_mean_over_the_points_is_the_integral_over_the_simplex(actions: tuple[int, ...]) -> None:
    chosen = fronts.make_front("pareto_front").rewards[list(actions)].double()
    integral, _ = integrate.quad(
        lambda w: float((chosen @ torch.tensor([w, 1 - w], dtype=torch.float64)).max()), 0, 1, limit=200
    )
    points = fronts.make_simplex_points(2)
    assert float((chosen @ points.T).amax(0).mean()) == pytest.approx(integral, abs=1e-6)


@pytest.mark.parametrize("dimensions", [2, 4])
def test_the_points_have_the_moments_of_the_simplex(dimensions: int) -> None:
    points = fronts.make_simplex_points(dimensions).numpy()
    assert np.allclose(points.sum(1), 1)
    assert (points >= 0).all()
    assert np.allclose(points.mean(0), 1 / dimensions, atol=1e-3)
    # Of a uniform distribution: E[w_i w_j] = 1 / (D (D + 1)) for i != j.
    assert (points[:, 0] * points[:, 1]).mean() == pytest.approx(1 / (dimensions * (dimensions + 1)), rel=0.01)


@given(st.integers(0, 30), st.integers(1, 3))
def test_the_exact_score_of_a_policy_is_the_sum_over_its_sets(seed: int, slots: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    probabilities = torch.rand(slots, 7, generator=generator).double().softmax(-1)
    rewards = fronts.make_front("pareto_front").rewards
    values = rewards.double() @ fronts.make_simplex_points(2).T
    expected = sum(
        math.prod(float(probabilities[slot, action]) for slot, action in enumerate(actions))
        * float(values[list(actions)].amax(0).mean())
        for actions in itertools.product(range(7), repeat=slots)
    )
    assert float(fronts.compute_simplex_scores(probabilities, rewards)) == pytest.approx(expected, abs=1e-9)


@given(st.integers(0, 30))
def test_scores_are_those_of_loops(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.rand(2, 6, 3, 4, generator=generator)
    weights = torch.rand(2, 2, 5, 4, generator=generator)
    gold = torch.rand(4, generator=generator)
    scalar, over_weights = fronts.score_scalar(rewards, gold), fronts.score_over_weights(rewards, weights, 3)
    for member, index in itertools.product(range(2), range(6)):
        candidates = rewards[member, index]
        assert float(scalar[member, index]) == pytest.approx(max(float(r @ gold) for r in candidates))
        expected = np.mean([max(float(r @ w) for r in candidates) for w in weights[member, index // 3]])
        assert float(over_weights[member, index]) == pytest.approx(expected, rel=1e-5)


def test_the_sets_of_a_group_are_scored_with_the_same_weights_which_are_on_the_simplex() -> None:
    algorithm = VectorRewardAlgorithm(make_config(group_size=4), (0, 1))
    weights = algorithm._draw_weights(3, 8)
    assert weights.shape == (2, 8, 16, 2)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 8, 16))
    assert float(weights[..., 0].std()) == pytest.approx(12**-0.5, abs=0.03)  # uniform on [0, 1]
    batch = algorithm.sample(3)
    assert torch.equal(batch.prompts.view(2, 8, 4), batch.prompts.view(2, 8, 4)[..., :1].expand(2, 8, 4))
    vector_rewards = algorithm.rewards[batch.prompts[..., None], batch.actions]
    expected = fronts.score_over_weights(vector_rewards, weights, 4)
    assert torch.equal(batch.set_scores, expected)


@pytest.mark.parametrize("task", ["pareto_front", "pareto_large"])
def test_an_evaluation_is_that_of_loops_over_the_sampled_sets(task: str) -> None:
    config = make_config(task=task, num_prompts=3, eval_sets=4, num_candidates=3)
    algorithm = VectorRewardAlgorithm(config, (0, 1))
    columns, log_probs = algorithm.evaluate(5), algorithm.policies.compute_log_probs()
    uniforms = algorithm.rngs.uniform("sandbox_evaluation", 5, shape=(3, 4, 3))
    for member in range(2):
        means, diversities = [], []
        best: dict[int, list[float]] = {k: [] for k in (1, 3)}
        for prompt in range(3):
            # In the order in which they were drawn: all candidates of the first set, then those of the second.
            pool: list[list[float]] = []
            for drawn_set in uniforms[member, prompt]:
                cumulative = log_probs[member, prompt].exp().cumsum(-1)
                actions = [int((sums < number).sum()) for sums, number in zip(cumulative, drawn_set, strict=True)]
                candidates = [algorithm.rewards[prompt, action].tolist() for action in actions]
                pool += candidates
                pairs = list(itertools.combinations(candidates, 2))
                diversities.append(sum(sum(map(abs, map(float.__sub__, a, b))) for a, b in pairs))
                diversities[-1] /= len(pairs)
            weights = algorithm.front.deployment_weights.tolist()
            values = [[sum(map(float.__mul__, reward, weight)) for reward in pool] for weight in weights]
            gold = algorithm.front.gold_weights.tolist()
            means += [sum(map(float.__mul__, reward, gold)) for reward in pool]
            for k, scores_at_k in best.items():
                scores_at_k += [max(row[:k]) for row in values]
        assert float(columns["mean_scalar_reward"][member]) == pytest.approx(np.mean(means), abs=1e-5)
        assert float(columns["pool_diversity_l1"][member]) == pytest.approx(np.mean(diversities), abs=1e-5)
        for k, scores_at_k in best.items():
            assert float(columns[f"best_at_{k}"][member]) == pytest.approx(np.mean(scores_at_k), abs=1e-5)


@pytest.mark.slow
def test_only_scores_over_weights_teach_coverage() -> None:
    ends = {}
    for method, candidates in (("ScalarGRPO", 1), ("MultiRLVR", 3), ("VPOGRPO", 3)):
        config = make_config(120, 120, method=method, num_candidates=candidates, batch_size=128, task="pareto_large")
        rows = run_ensemble(make_trainer(config, (0, 1)))
        ends[method] = {name: np.mean([rows[seed][-1][name] for seed in rows]) for name in rows[0][-1]}
    assert ends["VPOGRPO"]["simplex_gap"] < 0.01
    assert min(ends[method]["simplex_gap"] for method in ("ScalarGRPO", "MultiRLVR")) > 0.05
    assert ends["VPOGRPO"]["best_at_3"] > ends["MultiRLVR"]["best_at_3"] + 0.05
    assert ends["VPOGRPO"]["mean_scalar_reward"] < ends["ScalarGRPO"]["mean_scalar_reward"]
    assert ends["ScalarGRPO"]["pool_diversity_l1"] == 0
