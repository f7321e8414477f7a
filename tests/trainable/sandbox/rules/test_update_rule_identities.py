"""What the update rules reduce to, their closed-form gradients, and the direction that they push in."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from torch import Tensor

from tests.oracles.update_rules import GROUPED
from tests.strategies.update_rules import Case, cases, examples, make_config, make_random_case
from trainable.algo.advantages import group_skill
from trainable.algo.target_policy import target_policy_loss
from trainable.sandbox.batch.rollouts import Candidates, Rollouts
from trainable.sandbox.config.rules import METHODS
from trainable.sandbox.rules.catalog import UPDATE_RULES

AT_RATIO_1 = ("PG", "TrajPG", "ASPO", "R2VPO")
OF_THEIR_OWN = ("CE", "SelfDistillDG", "DGToken", "TPOToken", "GRPOToken", "TPOFullAction", "TPONoAnchor")
"""Rules that do not read sequence rewards, or whose push has another zero than the mean reward or 1/2."""


def gradient(case: Case, method: str | None = None, **settings: object) -> Tensor:
    """[E, B, T, A] gradient of `method`, or of the case's own, with the case's settings but for `settings`."""
    config = case.config.model_copy(update={"method": method or case.config.method, **settings})
    table = case.log_probs.clone().requires_grad_()
    loss = UPDATE_RULES[config.method](case.rollouts, table, config).loss
    (found,) = torch.autograd.grad(loss.sum(), table)
    return found


def changed(case: Case, **batch: object) -> Case:
    return case._replace(rollouts=replace(case.rollouts, **batch))


def of_taken(case: Case, found: Tensor) -> Tensor:
    """[E, B, T] its entries at the taken actions, the only ones that are not 0."""
    taken = found.gather(-1, case.rollouts.actions.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(found.abs().sum(-1), taken.abs())
    return taken


def all_kept(case: Case) -> Case:
    return changed(case, keep_mask=torch.ones_like(case.rollouts.keep_mask))


def old_sums(case: Case) -> Tensor:
    """[E, P, K] log-probabilities of whole rollouts under the sampling policy."""
    return case.rollouts.behavior_log_probs.sum(-1).unflatten(1, (-1, 3))


def standardized(case: Case) -> Tensor:
    """[E, P, K] rewards in units of their group's deviation (divisor K); 0 where all are equal."""
    rewards = case.rollouts.rewards.unflatten(1, (-1, 3))
    centred = rewards - rewards.mean(-1, keepdim=True)
    std = rewards.std(-1, keepdim=True, correction=0)
    return torch.where(std > 1e-6, centred / std.clamp(min=1e-6), 0)


@given(case=cases(("REINFORCE",)))
@examples
def test_on_policy_five_rules_are_reinforce(case: Case) -> None:
    case = case.to_on_policy()
    expected = gradient(case)
    for method in AT_RATIO_1:
        torch.testing.assert_close(gradient(case, method), expected)


@given(case=cases(("REINFORCE",)))
@examples
def test_off_policy_they_are_not(case: Case) -> None:
    """Their ratios matter once the policy has moved, so that the identity above is no accident of the formulas."""
    moved = all_kept(changed(case, behavior_log_probs=case.rollouts.behavior_log_probs - 0.7, expected_reward=None))
    moved = moved._replace(config=make_config("REINFORCE", baseline="zero"))
    if moved.rollouts.rewards.count_nonzero(1).all():
        for method in AT_RATIO_1:
            assert not torch.allclose(gradient(moved, method), gradient(moved))


@given(case=cases(("PG",)))
@examples
def test_relations_of_ratio_rules_off_policy(case: Case) -> None:
    torch.testing.assert_close(gradient(case, "R2VPO", eta=0), gradient(case, "PG", iw_cap=1e6))
    one = changed(case, **{name: getattr(case.rollouts, name)[..., :1] for name in ("actions", "behavior_log_probs")})
    one = one._replace(log_probs=case.log_probs[:, :, :1])
    torch.testing.assert_close(gradient(one, "TrajPG"), gradient(one))


@given(case=cases(("DG",)))
@examples
def test_what_the_delight_family_reduces_to(case: Case) -> None:
    dg = gradient(case)
    for method in ("ReplayDG", "Kondo"):
        torch.testing.assert_close(gradient(case, method), dg, rtol=0, atol=0)
    torch.testing.assert_close(gradient(case, "FilteredDG", uncertainty_threshold=0.5), dg)
    torch.testing.assert_close(gradient(case, "FilteredDG", uncertainty_threshold=7.0), dg)
    torch.testing.assert_close(gradient(case, "DGEntropyGuard", guard_strength=0), dg)
    torch.testing.assert_close(gradient(case, "SCOPELite", distill_alpha=0), dg)
    for method in ("UncertaintyDG", "RewardVarianceDG"):
        torch.testing.assert_close(gradient(case, method, uncertainty_scale=0), dg)
    new = changed(case, age=torch.zeros_like(case.rollouts.age))
    torch.testing.assert_close(gradient(new, "FreshDG"), dg)
    old = changed(case, age=torch.full_like(case.rollouts.age, 10))
    torch.testing.assert_close(gradient(old, "FreshDG", replay_age_decay=0.05), math.exp(-0.5) * dg)
    torch.testing.assert_close(gradient(case, eta=1e9), gradient(case, "REINFORCE") / 2)


def test_a_cold_gate_passes_good_samples_only() -> None:
    case = changed(make_random_case(0, "DG", 2, 3, 2), expected_reward=None)
    found, plain = of_taken(case, gradient(case, eta=1e-9)), of_taken(case, gradient(case, "REINFORCE"))
    torch.testing.assert_close(found, torch.where(plain < 0, plain, 0))


def test_the_doubt_of_equal_rewards_is_none() -> None:
    case = make_random_case(0, "DG", 2, 3, 2)
    case = changed(case, rewards=torch.full_like(case.rollouts.rewards, 0.7))
    for method in ("UncertaintyDG", "RewardVarianceDG"):
        torch.testing.assert_close(gradient(case, method), gradient(case))
    torch.testing.assert_close(gradient(case, "FilteredDG", uncertainty_threshold=0), gradient(case))


@given(case=cases(("GRPO",)))
@examples
def test_on_policy_grpo_is_group_baseline_policy_gradient(case: Case) -> None:
    case = all_kept(case.to_on_policy())
    rewards = case.rollouts.rewards.unflatten(1, (-1, 3))
    _, rollouts, length = case.rollouts.actions.shape
    share = 1 / (rollouts * length)
    centred = (rewards - rewards.mean(-1, keepdim=True)).flatten(1).unsqueeze(-1).expand(-1, -1, length)
    for method in ("GRPO", "DAPO"):
        plain = gradient(case, method, std_normalization=False)
        torch.testing.assert_close(of_taken(case, plain), -share * centred)
        scaled = standardized(case).flatten(1).unsqueeze(-1).expand(-1, -1, length)
        divided = gradient(case, method, std_normalization=True)
        torch.testing.assert_close(of_taken(case, divided), -share * scaled, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(of_taken(case, gradient(case, "DrGRPO")), -centred / rollouts)


@given(case=cases(("GRPO",)))
@examples
def test_relations_of_clipped_rules_off_policy(case: Case) -> None:
    free = gradient(case, grpo_beta=0)
    torch.testing.assert_close(gradient(case, "DAPO", clip_high=case.config.clip_low), free)
    length = case.rollouts.actions.shape[-1]
    torch.testing.assert_close(gradient(case, "DrGRPO"), length * gradient(case, std_normalization=False))


def test_beyond_the_clip_a_sample_pushes_no_further() -> None:
    case = all_kept(make_random_case(0, "GRPO", 1, 4, 2))
    likelier = changed(case, behavior_log_probs=case.to_on_policy().rollouts.behavior_log_probs - 0.25)  # r = 1.284
    scores = standardized(case).flatten(1).unsqueeze(-1).expand(-1, -1, 2)
    assert (scores > 0).any()
    grpo = of_taken(case, gradient(likelier, grpo_beta=0, clip_low=0.2))
    assert torch.equal(grpo[scores > 0], torch.zeros_like(grpo[scores > 0]))
    assert (grpo[scores < 0] > 0).all()
    dapo = of_taken(case, gradient(likelier, "DAPO", clip_low=0.2, clip_high=0.3))
    assert (dapo[scores > 0] < 0).all()


@given(case=cases(("TPO",)))
@examples
def test_gradient_of_tpo_is_p_minus_q(case: Case) -> None:
    case = all_kept(case)
    taken = case.log_probs.gather(-1, case.rollouts.actions.unsqueeze(-1)).squeeze(-1)
    p = torch.softmax(taken.sum(-1).unflatten(1, (-1, 3)), -1)
    z = standardized(case) / case.config.tpo_eta
    for method, anchor in (("TPO", old_sums(case)), ("TPONoAnchor", torch.zeros_like(p))):
        q = torch.softmax(anchor + z, -1)
        expected = ((p - q) / p.shape[1]).flatten(1).unsqueeze(-1).expand_as(taken)
        torch.testing.assert_close(of_taken(case, gradient(case, method)), expected)


@given(case=cases(("TPO",)))
@examples
def test_tpo_is_the_loss_that_fine_tunes_language_models(case: Case) -> None:
    """`trainable.algo` has it over whole groups named by number, the sandbox over rows of groups with some left out."""
    case = all_kept(case)
    ours = gradient(case)
    for member, own in enumerate(case.log_probs):
        table, rollouts = own.clone().requires_grad_(), case.rollouts
        sums = table.gather(-1, rollouts.actions[member].unsqueeze(-1)).sum((-2, -1))
        groups, mask = torch.arange(len(sums)) // 3, torch.ones(len(sums), 1, dtype=torch.bool)
        skills = group_skill(rollouts.rewards[member], groups, mask).squeeze(-1)
        old = rollouts.behavior_log_probs[member].sum(-1)
        found = target_policy_loss(sums, old, skills, groups, case.config.tpo_eta)
        (theirs,) = torch.autograd.grad(found.loss, table)
        torch.testing.assert_close(ours[member], theirs)
        rule = UPDATE_RULES["TPO"](rollouts, case.log_probs, case.config)
        torch.testing.assert_close(rule.loss[member], found.loss.detach())
        torch.testing.assert_close(rule.metrics["tpo_target_entropy"][member], found.entropy)


@given(case=cases(("GroupPG",)))
@examples
def test_group_pg_is_reinforce_with_standardized_rewards_and_the_slope_of_tpo(case: Case) -> None:
    case = all_kept(case)
    _, rollouts, length = case.rollouts.actions.shape
    weights = standardized(case).flatten(1).unsqueeze(-1).expand(-1, -1, length)
    found = gradient(case, tpo_eta=1)
    torch.testing.assert_close(of_taken(case, found), -weights * 3 / rollouts)
    even = case._replace(log_probs=torch.zeros_like(case.log_probs)).to_on_policy()
    tpo = gradient(even, "TPO", tpo_eta=1e4)
    torch.testing.assert_close(tpo * 1e4, found / 3, rtol=1e-3, atol=1e-4)


@given(case=cases(("TPOToken",)))
@examples
def test_prefixes_without_a_spread_do_not_move_on_policy(case: Case) -> None:
    case = all_kept(case.to_on_policy())
    found = gradient(case)
    candidates = case.rollouts.candidates
    assert candidates is not None
    even = candidates.rewards.amax(-1) == candidates.rewards.amin(-1)
    torch.testing.assert_close(found[even], torch.zeros_like(found[even]), rtol=0, atol=1e-15)
    p = torch.softmax(candidates.log_probs, -1)
    z = torch.nan_to_num((candidates.rewards - candidates.rewards.mean(-1, keepdim=True)) / deviation(candidates))
    q = torch.softmax(candidates.log_probs + torch.where(even[..., None], 0, z) / case.config.tpo_eta, -1)
    slopes = (p - q) / even[0].numel()
    expected = torch.zeros_like(found).scatter_add(-1, candidates.actions, slopes)
    torch.testing.assert_close(found, expected)


def deviation(candidates: Candidates) -> Tensor:
    return candidates.rewards.std(-1, keepdim=True, correction=0)


@given(case=cases(("TPOFullAction",)))
@examples
def test_tpo_over_all_actions_reads_the_sign_of_the_advantage(case: Case) -> None:
    mass = case.log_probs.exp().square().sum(-1).squeeze(-1)
    scaled = changed(case, rewards=mass + 7 * (case.rollouts.rewards - mass))
    torch.testing.assert_close(gradient(scaled), gradient(case))
    turned = changed(case, rewards=mass - 7 * (case.rollouts.rewards - mass))
    assert not torch.allclose(gradient(turned), gradient(case))


@given(case=cases(("MaxRL",)))
@examples
def test_weights_of_max_rl(case: Case) -> None:
    case = all_kept(case.to_on_policy())
    rewards = case.rollouts.rewards.unflatten(1, (-1, 3))
    right = rewards.sum(-1, keepdim=True)
    weight = torch.where(rewards == 1, 3 / right.clamp(min=1) - 1, torch.where(right > 0, -1.0, 0.0))
    expected = -weight.flatten(1).unsqueeze(-1).expand(case.rollouts.actions.shape) / case.rollouts.actions[0].numel()
    torch.testing.assert_close(of_taken(case, gradient(case)), expected.to(torch.float64), rtol=1e-6, atol=1e-7)


@given(case=cases(("PMDMean",)))
@examples
def test_on_policy_pmd_is_reinforce_on_sequences(case: Case) -> None:
    case = all_kept(changed(case.to_on_policy(), expected_reward=None))
    rewards = case.rollouts.rewards
    advantage = (rewards - rewards.mean(1, keepdim=True)).unsqueeze(-1).expand(case.rollouts.actions.shape)
    expected = -2 * case.config.eta * advantage / rewards.shape[1]
    torch.testing.assert_close(of_taken(case, gradient(case)), expected)


def test_pmd_is_at_rest_at_the_log_ratio_it_aims_at() -> None:
    case = make_random_case(0, "PMDMean", 2, 2, 1, eta=0.5)
    case = changed(case.to_on_policy(), expected_reward=torch.zeros_like(case.rollouts.rewards))
    goal = case.rollouts.rewards.unsqueeze(-1) / 0.5
    rested = changed(case, behavior_log_probs=case.rollouts.behavior_log_probs - goal)
    torch.testing.assert_close(gradient(rested), torch.zeros_like(case.log_probs), rtol=0, atol=1e-12)


def test_the_mean_of_log_growth_over_actions_is_cross_entropy() -> None:
    """Σ_a π(a) ∇loss(a) over all actions of one prompt, with baseline 0, is the gradient of −log π(y)."""
    logits = torch.tensor([0.3, -1.0, 0.8], dtype=torch.float64, requires_grad=True)
    log_probs = torch.log_softmax(logits, -1)
    labels = torch.full((3, 1, 1), 2)
    actions = torch.arange(3).reshape(3, 1, 1)  # One member an action.
    rewards = (actions == labels).double().squeeze(-1)
    rollouts = one_step(actions, labels, rewards)
    loss = UPDATE_RULES["LogGrowth"](
        rollouts, log_probs.expand(3, 1, 1, 3), make_config("LogGrowth", baseline="zero")
    ).loss
    (found,) = torch.autograd.grad((log_probs.exp().detach() * loss).sum(), logits, retain_graph=True)
    (expected,) = torch.autograd.grad(-log_probs[2], logits)
    torch.testing.assert_close(found, expected)


def one_step(actions: Tensor, labels: Tensor, rewards: Tensor, group_size: int | None = None) -> Rollouts:
    """A bandit's batch, sampled by a policy that finds all actions equally likely."""
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


def test_tempo_is_group_baseline_where_nothing_is_decided() -> None:
    case = all_kept(make_random_case(3, "TEMPO", 1, 1, 3).to_on_policy())
    # All share the first token, the second decides, the third is different but decides nothing.
    actions = torch.tensor([[[0, 0, 0], [0, 1, 1], [0, 2, 2]]])
    rewards = torch.tensor([[1.0, 0.0, 0.0]], dtype=torch.float64)
    case = changed(case, actions=actions, rewards=rewards).to_on_policy()
    z = standardized(case).reshape(1, 3, 1)
    found = of_taken(case, gradient(case))
    torch.testing.assert_close(found, -torch.cat([z, 2 * z, z], -1) / 9)
    loss = UPDATE_RULES["TEMPO"](case.rollouts, case.log_probs, case.config)
    torch.testing.assert_close(loss.metrics["td_nonzero_frac"], torch.tensor([1 / 3], dtype=torch.float64))


@pytest.mark.parametrize("method", GROUPED)
@pytest.mark.parametrize("reward", [0.1, 0.7, 1 / 3, 1.0])
def test_equal_rewards_of_a_group_have_no_advantage_in_float32(method: str, reward: float) -> None:
    """Seven float32 rewards of 0.7 must not become advantages by the rounding of their mean."""
    actions = torch.zeros(1, 7, 1, dtype=torch.long)
    level = 1.0 if method == "MaxRL" else reward
    rollouts = one_step(actions, actions, torch.full((1, 7), level), group_size=7)
    table = torch.full((1, 7, 1, 3), math.log(1 / 3), requires_grad=True)
    loss = UPDATE_RULES[method](rollouts, table, make_config(method, group_size=7, batch_size=7)).loss
    (found,) = torch.autograd.grad(loss.sum(), table)
    torch.testing.assert_close(found, torch.zeros_like(found), rtol=0, atol=1e-7)


def test_token_credit_of_dg_token() -> None:
    """Two positions, the first of which does not count: its credit is the share of right tokens after it, not 0."""
    actions, labels = torch.tensor([[[1, 0]], [[1, 2]]]), torch.tensor([[[0, 0]], [[0, 0]]])
    mask = torch.tensor([[[False, True]]]).expand(2, 1, 2)
    rollouts = replace(one_step(actions, labels, torch.zeros(2, 1, dtype=torch.float64)), score_mask=mask)
    table = torch.full((2, 1, 2, 3), math.log(1 / 3), dtype=torch.float64, requires_grad=True)
    config = make_config("DGToken", eta=1e9)
    (found,) = torch.autograd.grad(UPDATE_RULES["DGToken"](rollouts, table, config).loss.sum(), table)
    taken = found.gather(-1, actions.unsqueeze(-1)).squeeze(-1)[:, 0]
    expected = -0.25 * torch.tensor([[1, 1 - 1 / 3], [0, -1 / 3]], dtype=torch.float64)
    torch.testing.assert_close(taken, expected)


def test_on_one_position_dg_token_is_the_gated_term_of_self_distillation() -> None:
    for seed in range(4):  # With positions that count and without.
        case = make_random_case(seed, "DGToken", 2, 3, 1)
        torch.testing.assert_close(gradient(case), gradient(case, "SelfDistillDG", distill_alpha=0))


@pytest.mark.parametrize("method", METHODS)
def test_a_step_makes_right_actions_likelier(method: str) -> None:
    """The sign of every rule: right actions are rewarded with 1, wrong ones with 0, and Σ log π(right) must rise."""
    logits = torch.zeros(2, 6, 1, 3, dtype=torch.float64, requires_grad=True)
    actions = torch.tensor([0, 1, 2, 0, 0, 2]).reshape(1, 6, 1).expand(2, 6, 1)
    labels = torch.zeros_like(actions)
    rollouts = one_step(actions, labels, (actions == 0).double().squeeze(-1), group_size=3)
    options = torch.arange(3).expand(2, 6, 1, 3)
    old = torch.full(options.shape, math.log(1 / 3), dtype=torch.float64)
    rollouts = replace(rollouts, candidates=Candidates(options, old, (options == 0).double()))
    log_probs = torch.log_softmax(logits, -1)
    loss = UPDATE_RULES[method](rollouts, log_probs, make_config(method, group_size=3, batch_size=6)).loss
    (found,) = torch.autograd.grad(loss.sum(), logits, retain_graph=True)
    (uphill,) = torch.autograd.grad(log_probs[..., 0].sum(), logits)
    for e in range(2):
        assert (-found[e] * uphill[e]).sum() > 0


@pytest.mark.parametrize("method", [name for name in METHODS if name not in OF_THEIR_OWN])
def test_turning_rewards_over_turns_the_push_over(method: str) -> None:
    case = all_kept(changed(make_random_case(2, method, 1, 3, 2).to_on_policy(), expected_reward=None))
    turned = changed(case, rewards=1 - case.rollouts.rewards)
    fixed = {"baseline": "constant", "distill_alpha": 0.0}
    assert (gradient(case, **fixed) * gradient(turned, **fixed)).sum() < 0


@pytest.mark.parametrize("method", [*GROUPED, "TPOToken", "GRPOToken", "LogGrowth", "TPOFullAction"])
def test_a_batch_of_the_wrong_kind_is_refused(method: str) -> None:
    case = make_random_case(0, method, 1, 2, 1)
    sequences = make_random_case(0, "DG", 1, 2, 2)
    with pytest.raises(ValueError, match=r"groups|candidates|mnist"):
        UPDATE_RULES[method](sequences.rollouts, sequences.log_probs, case.config)


@pytest.mark.parametrize("method", ["LogGrowth", "MaxRL"])
def test_rewards_that_are_not_0_or_1_are_refused_where_they_are_kept(method: str) -> None:
    case = make_random_case(0, method, 1, 2, 1)
    rewards, keep = case.rollouts.rewards.clone(), torch.ones_like(case.rollouts.keep_mask)
    rewards[0, 0] = 0.5
    with pytest.raises(ValueError, match="rewards of 0 and 1"):
        UPDATE_RULES[method](replace(case.rollouts, rewards=rewards, keep_mask=keep), case.log_probs, case.config)
    keep[0, 0] = False
    UPDATE_RULES[method](replace(case.rollouts, rewards=rewards, keep_mask=keep), case.log_probs, case.config)
