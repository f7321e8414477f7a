"""Tests of what the update rules reduce to, of their closed-form gradients, and of the sign of their updates."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from torch import Tensor

from sandboxes.update_rules.config.rules import METHODS
from sandboxes.update_rules.rollouts import Candidates, Rollouts
from sandboxes.update_rules.training.make import UPDATE_RULES
from tests.oracles.update_rules import GROUPED
from tests.strategies.update_rules import Case, cases, examples, make_config, make_random_case

REINFORCE_AT_RATIO_1 = ("PG", "TrajPG", "ASPO", "R2VPO")


def compute_gradient(case: Case, method: str | None = None, **settings: object) -> Tensor:
    """Compute the gradient [E, B, T, A] of `method`, or of the case's method, with `settings` changed."""
    config = case.config.model_copy(update={"method": method or case.config.method, **settings})
    table = case.log_probs.clone().requires_grad_()
    loss = UPDATE_RULES[config.method](case.rollouts, table, config).loss
    (gradient,) = torch.autograd.grad(loss.sum(), table)
    return gradient


def replace_rollouts(case: Case, **batch: object) -> Case:
    return case._replace(rollouts=replace(case.rollouts, **batch))


def gather_taken(case: Case, gradient: Tensor) -> Tensor:
    """Return the entries [E, B, T] at the taken actions, and check that all others are 0."""
    taken_entries = gradient.gather(-1, case.rollouts.actions.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(gradient.abs().sum(-1), taken_entries.abs())
    return taken_entries


def keep_all(case: Case) -> Case:
    return replace_rollouts(case, keep_mask=torch.ones_like(case.rollouts.keep_mask))


def sum_old_log_probs(case: Case) -> Tensor:
    """Sum the log-probabilities of rollouts under the sampling policy, as [E, P, K]."""
    return case.rollouts.behavior_log_probs.sum(-1).unflatten(1, (-1, 3))


def standardize_rewards(case: Case) -> Tensor:
    """Return rewards [E, P, K] divided by the standard deviation of their group (divisor K), or 0 if all are equal."""
    rewards = case.rollouts.rewards.unflatten(1, (-1, 3))
    centerd = rewards - rewards.mean(-1, keepdim=True)
    std = rewards.std(-1, keepdim=True, correction=0)
    return torch.where(std > 1e-6, centerd / std.clamp(min=1e-6), 0)


@given(case=cases(("REINFORCE",)))
@examples
def test_on_policy_five_rules_are_reinforce(case: Case) -> None:
    case = case.to_on_policy()
    expected = compute_gradient(case)
    for method in REINFORCE_AT_RATIO_1:
        torch.testing.assert_close(compute_gradient(case, method), expected)


@given(case=cases(("DG",)))
@examples
def test_reductions_of_the_delight_family(case: Case) -> None:
    dg_gradient = compute_gradient(case)
    for method in ("ReplayDG", "Kondo"):
        torch.testing.assert_close(compute_gradient(case, method), dg_gradient, rtol=0, atol=0)
    for threshold in (0.5, 7.0):
        torch.testing.assert_close(compute_gradient(case, "FilteredDG", uncertainty_threshold=threshold), dg_gradient)
    torch.testing.assert_close(compute_gradient(case, "DGEntropyGuard", guard_strength=0), dg_gradient)
    torch.testing.assert_close(compute_gradient(case, "SCOPELite", distill_alpha=0), dg_gradient)
    for method in ("UncertaintyDG", "RewardVarianceDG"):
        torch.testing.assert_close(compute_gradient(case, method, uncertainty_scale=0), dg_gradient)
    new_case = replace_rollouts(case, age=torch.zeros_like(case.rollouts.age))
    torch.testing.assert_close(compute_gradient(new_case, "FreshDG"), dg_gradient)
    old_case = replace_rollouts(case, age=torch.full_like(case.rollouts.age, 10))
    old_gradient = compute_gradient(old_case, "FreshDG", replay_age_decay=0.05)
    torch.testing.assert_close(old_gradient, math.exp(-0.5) * dg_gradient)
    torch.testing.assert_close(compute_gradient(case, eta=1e9), compute_gradient(case, "REINFORCE") / 2)


def test_a_cold_gate_passes_good_samples_only_and_equal_rewards_have_no_uncertainty() -> None:
    case = replace_rollouts(make_random_case(0, "DG", 2, 3, 2), expected_reward=None)
    gated = gather_taken(case, compute_gradient(case, eta=1e-9))
    reinforce = gather_taken(case, compute_gradient(case, "REINFORCE"))
    torch.testing.assert_close(gated, torch.where(reinforce < 0, reinforce, 0))
    case = make_random_case(0, "DG", 2, 3, 2)
    case = replace_rollouts(case, rewards=torch.full_like(case.rollouts.rewards, 0.7))
    for method in ("UncertaintyDG", "RewardVarianceDG"):
        torch.testing.assert_close(compute_gradient(case, method), compute_gradient(case))
    torch.testing.assert_close(compute_gradient(case, "FilteredDG", uncertainty_threshold=0), compute_gradient(case))


@given(case=cases(("GRPO",)))
@examples
def test_on_policy_grpo_is_group_baseline_policy_gradient(case: Case) -> None:
    case = keep_all(case.to_on_policy())
    rewards = case.rollouts.rewards.unflatten(1, (-1, 3))
    _, rollouts, length = case.rollouts.actions.shape
    share = 1 / (rollouts * length)
    centerd = (rewards - rewards.mean(-1, keepdim=True)).flatten(1).unsqueeze(-1).expand(-1, -1, length)
    for method in ("GRPO", "DAPO"):
        centerd_gradient = compute_gradient(case, method, std_normalization=False)
        torch.testing.assert_close(gather_taken(case, centerd_gradient), -share * centerd)
        scores = standardize_rewards(case).flatten(1).unsqueeze(-1).expand(-1, -1, length)
        standardized_gradient = compute_gradient(case, method, std_normalization=True)
        torch.testing.assert_close(gather_taken(case, standardized_gradient), -share * scores, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(gather_taken(case, compute_gradient(case, "DrGRPO")), -centerd / rollouts)


@given(case=cases(("GRPO",)))
@examples
def test_relations_of_clipped_rules_off_policy(case: Case) -> None:
    gradient_without_kl = compute_gradient(case, grpo_beta=0)
    torch.testing.assert_close(compute_gradient(case, "DAPO", clip_high=case.config.clip_low), gradient_without_kl)
    expected = case.rollouts.actions.shape[-1] * compute_gradient(case, std_normalization=False)
    torch.testing.assert_close(compute_gradient(case, "DrGRPO"), expected)


@given(case=cases(("TPO",)))
@examples
def test_gradient_of_tpo_is_p_minus_q(case: Case) -> None:
    case = keep_all(case)
    taken_log_probs = case.log_probs.gather(-1, case.rollouts.actions.unsqueeze(-1)).squeeze(-1)
    p = torch.softmax(taken_log_probs.sum(-1).unflatten(1, (-1, 3)), -1)
    z = standardize_rewards(case) / case.config.tpo_eta
    for method, anchor in (("TPO", sum_old_log_probs(case)), ("TPONoAnchor", torch.zeros_like(p))):
        q = torch.softmax(anchor + z, -1)
        expected = ((p - q) / p.shape[1]).flatten(1).unsqueeze(-1).expand_as(taken_log_probs)
        torch.testing.assert_close(gather_taken(case, compute_gradient(case, method)), expected)


@given(case=cases(("GroupPG",)))
@examples
def test_group_pg_is_reinforce_with_standardized_rewards_and_the_slope_of_tpo(case: Case) -> None:
    case = keep_all(case)
    _, rollouts, length = case.rollouts.actions.shape
    weights = standardize_rewards(case).flatten(1).unsqueeze(-1).expand(-1, -1, length)
    gradient = compute_gradient(case, tpo_eta=1)
    torch.testing.assert_close(gather_taken(case, gradient), -weights * 3 / rollouts)
    uniform_case = case._replace(log_probs=torch.zeros_like(case.log_probs)).to_on_policy()
    tpo_gradient = compute_gradient(uniform_case, "TPO", tpo_eta=1e4)
    torch.testing.assert_close(tpo_gradient * 1e4, gradient / 3, rtol=1e-3, atol=1e-4)


@given(case=cases(("TPOToken",)))
@examples
def test_prefixes_with_equal_rewards_have_no_gradient_on_policy(case: Case) -> None:
    case = keep_all(case.to_on_policy())
    gradient = compute_gradient(case)
    candidates = case.rollouts.candidates
    has_equal_rewards = candidates.rewards.amax(-1) == candidates.rewards.amin(-1)
    assert (gradient[has_equal_rewards].abs() <= 1e-15).all()
    p = torch.softmax(candidates.log_probs, -1)
    std = candidates.rewards.std(-1, keepdim=True, correction=0)
    z = torch.nan_to_num((candidates.rewards - candidates.rewards.mean(-1, keepdim=True)) / std)
    q = torch.softmax(candidates.log_probs + torch.where(has_equal_rewards[..., None], 0, z) / case.config.tpo_eta, -1)
    slopes = (p - q) / has_equal_rewards[0].numel()
    expected = torch.zeros_like(gradient).scatter_add(-1, candidates.actions, slopes)
    torch.testing.assert_close(gradient, expected)


@given(case=cases(("PMDMean",)))
@examples
def test_on_policy_pmd_is_reinforce_on_sequences(case: Case) -> None:
    case = keep_all(replace_rollouts(case.to_on_policy(), expected_reward=None))
    rewards = case.rollouts.rewards
    advantage = (rewards - rewards.mean(1, keepdim=True)).unsqueeze(-1).expand(case.rollouts.actions.shape)
    expected = -2 * case.config.eta * advantage / rewards.shape[1]
    torch.testing.assert_close(gather_taken(case, compute_gradient(case)), expected)


def test_the_mean_of_log_growth_over_actions_is_cross_entropy() -> None:
    """Σ_a π(a) ∇loss(a) over all actions of one prompt, with baseline 0, is the gradient of −log π(y)."""
    logits = torch.tensor([0.3, -1.0, 0.8], dtype=torch.float64, requires_grad=True)
    log_probs = torch.log_softmax(logits, -1)
    labels = torch.full((3, 1, 1), 2)
    actions = torch.arange(3).reshape(3, 1, 1)  # one member per action
    rewards = (actions == labels).double().squeeze(-1)
    rollouts = make_bandit_rollouts(actions, labels, rewards)
    config = make_config("LogGrowth", baseline="zero")
    loss = UPDATE_RULES["LogGrowth"](rollouts, log_probs.expand(3, 1, 1, 3), config).loss
    (gradient,) = torch.autograd.grad((log_probs.exp().detach() * loss).sum(), logits, retain_graph=True)
    (expected,) = torch.autograd.grad(-log_probs[2], logits)
    torch.testing.assert_close(gradient, expected)


def make_bandit_rollouts(actions: Tensor, labels: Tensor, rewards: Tensor, group_size: int | None = None) -> Rollouts:
    """Make a batch of a bandit, sampled by a policy under which all actions are equally likely."""
    return Rollouts(
        observations=actions,
        actions=actions,
        labels=labels,
        rewards=rewards,
        behavior_log_probs=torch.full(actions.shape, math.log(1 / 3), dtype=rewards.dtype),
        behavior_baseline=torch.full(actions.shape, 1 / 3, dtype=rewards.dtype),
        keep_mask=torch.ones(rewards.shape, dtype=torch.bool),
        age=torch.zeros(rewards.shape[0]),
        group_size=group_size,
    )


@pytest.mark.parametrize("method", GROUPED)
@pytest.mark.parametrize("reward", [0.7, 1 / 3])
def test_equal_rewards_of_a_group_have_no_advantage_in_float32(method: str, reward: float) -> None:
    """Seven float32 rewards of 0.7 must not have advantages because their mean is rounded."""
    actions = torch.zeros(1, 7, 1, dtype=torch.long)
    reward_value = 1.0 if method == "MaxRL" else reward
    rollouts = make_bandit_rollouts(actions, actions, torch.full((1, 7), reward_value), group_size=7)
    table = torch.full((1, 7, 1, 3), math.log(1 / 3), requires_grad=True)
    loss = UPDATE_RULES[method](rollouts, table, make_config(method, group_size=7, batch_size=7)).loss
    (gradient,) = torch.autograd.grad(loss.sum(), table)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-7)


@pytest.mark.parametrize("method", METHODS)
def test_a_step_makes_right_actions_likelier(method: str) -> None:
    """Right actions have reward 1 and wrong ones 0, so Σ log π(right) must rise."""
    logits = torch.zeros(2, 6, 1, 3, dtype=torch.float64, requires_grad=True)
    actions = torch.tensor([0, 1, 2, 0, 0, 2]).reshape(1, 6, 1).expand(2, 6, 1)
    labels = torch.zeros_like(actions)
    rollouts = make_bandit_rollouts(actions, labels, (actions == 0).double().squeeze(-1), group_size=3)
    candidates = torch.arange(3).expand(2, 6, 1, 3)
    candidate_log_probs = torch.full(candidates.shape, math.log(1 / 3), dtype=torch.float64)
    rollouts = replace(rollouts, candidates=Candidates(candidates, candidate_log_probs, (candidates == 0).double()))
    log_probs = torch.log_softmax(logits, -1)
    loss = UPDATE_RULES[method](rollouts, log_probs, make_config(method, group_size=3, batch_size=6)).loss
    (gradient,) = torch.autograd.grad(loss.sum(), logits, retain_graph=True)
    (ascent_direction,) = torch.autograd.grad(log_probs[..., 0].sum(), logits)
    for e in range(2):
        assert (-gradient[e] * ascent_direction[e]).sum() > 0


@pytest.mark.parametrize("method", [*GROUPED, "TPOToken", "GRPOToken"])
def test_a_batch_of_the_wrong_kind_is_refused(method: str) -> None:
    case = make_random_case(0, method, 1, 2, 1)
    ungrouped_case = make_random_case(0, "DG", 1, 2, 2)
    with pytest.raises(ValueError, match=r"groups|candidates"):
        UPDATE_RULES[method](ungrouped_case.rollouts, ungrouped_case.log_probs, case.config)
