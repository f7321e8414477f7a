"""Every estimator equals the loops of tests.oracles.algo on batches of episodes."""

import pytest
import torch
from torch import Tensor

from tests.fakes.scripted import make_random_episodes
from tests.oracles import algo as oracle
from trainable.config.choices import ADVANTAGE_ESTIMATORS
from trainable.config.sections import AlgorithmConfig, KLControl
from trainable.ppo.targets import make_targets
from trainable.ppo.update import Targets
from trainable.rollout.episode import Batch, collate

BATCH = collate(make_random_episodes(12, 4, seed=3))
MASK = BATCH.mask.tolist()
VALUES = torch.randn(BATCH.mask.shape, generator=torch.Generator().manual_seed(1)) * BATCH.mask
REFERENCE = BATCH.logprobs + 0.3 * torch.randn(BATCH.mask.shape, generator=torch.Generator().manual_seed(2))


def compute_targets(scale: float = 1.0, kl_coef: float = 0.0, batch: Batch = BATCH, **settings: object) -> Targets:
    return make_targets(batch, VALUES, REFERENCE, AlgorithmConfig(**settings), kl_coef, scale)


def place_scores_at_the_end() -> list[list[float]]:
    """Place the whole score on the last trained token, as the published code does."""
    rows = []
    for mask, score in zip(MASK, BATCH.scores.tolist(), strict=True):
        last = max(t for t, m in enumerate(mask) if m)
        rows.append([score if t == last else 0.0 for t in range(len(mask))])
    return rows


def whiten(rows: list[list[float]]) -> Tensor:
    width = len(rows[0])
    flat_rows = oracle.whiten([x for row in rows for x in row], [m for row in MASK for m in row])
    return torch.tensor([flat_rows[start : start + width] for start in range(0, len(flat_rows), width)])


def broadcast_per_sequence(advantages: list[float]) -> Tensor:
    return torch.tensor(advantages)[:, None] * BATCH.mask


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual[BATCH.mask], expected[BATCH.mask], rtol=1e-4, atol=1e-5)
    assert not actual[~BATCH.mask].any()


def compute_gae_oracle(rewards: list[list[float]], gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    pairs = [oracle.gae(*row, gamma, lam) for row in zip(rewards, VALUES.tolist(), MASK, strict=True)]
    return whiten([advantages for advantages, _ in pairs]), torch.tensor([returns for _, returns in pairs])


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.97, 0.9)])
def test_gae_has_the_score_at_the_last_token_and_is_whitened(gamma: float, lam: float) -> None:
    actual = compute_targets(gamma=gamma, lam=lam)
    advantages, returns = compute_gae_oracle(place_scores_at_the_end(), gamma, lam)
    assert_close(actual.advantages, advantages)
    assert_close(actual.returns, returns)
    assert torch.equal(actual.values, VALUES)
    assert actual.ref_logprobs is REFERENCE


def test_bi_level_gae_has_each_turns_reward_at_its_end() -> None:
    actual = compute_targets(gamma=0.98, lam=0.9, bi_level_gae=True, high_level_gamma=0.8)
    rows = zip(BATCH.rewards.tolist(), VALUES.tolist(), MASK, BATCH.turns.tolist(), strict=True)
    pairs = [oracle.bi_level_gae(*row, 0.98, 0.9, 0.8) for row in rows]
    assert_close(actual.advantages, whiten([advantages for advantages, _ in pairs]))
    assert_close(actual.returns, torch.tensor([returns for _, returns in pairs]))


@pytest.mark.parametrize("has_turns", [False, True])
def test_the_critic_has_a_lambda_of_its_own(has_turns: bool) -> None:
    settings = {"gamma": 0.98, "bi_level_gae": has_turns, "high_level_gamma": 0.8}
    actor, critic, both = (
        compute_targets(lam=0.7, **settings),
        compute_targets(lam=1.0, **settings),
        compute_targets(lam=0.7, critic_lam=1.0, **settings),
    )
    assert torch.equal(both.advantages, actor.advantages)
    assert torch.equal(both.returns, critic.returns)
    assert not torch.allclose(both.returns, actor.returns)
    equal = compute_targets(lam=0.7, critic_lam=0.7, **settings)
    assert torch.equal(equal.returns, actor.returns)


SCORES, GROUPS = BATCH.scores.tolist(), BATCH.group_ids.tolist()


# Of each estimator without a critic: settings, and the advantages of the episodes.
CRITIC_FREE: dict[str, tuple[dict[str, object], list[float]]] = {
    "grpo": ({"adv_estimator": "grpo"}, oracle.grpo(SCORES, GROUPS, norm_by_std=True)),
    "unscaled": ({"adv_estimator": "grpo", "norm_adv_by_std_in_grpo": False}, oracle.grpo(SCORES, GROUPS, False)),
    "none": ({"adv_estimator": "grpo", "scale_rewards": "none"}, oracle.grpo(SCORES, GROUPS, norm_by_std=False)),
    "batch": ({"adv_estimator": "grpo", "scale_rewards": "batch"}, oracle.batch_grpo(SCORES, GROUPS)),
    "rloo": ({"adv_estimator": "rloo"}, oracle.rloo(SCORES, GROUPS)),
    "skill": ({"adv_estimator": "group_skill"}, oracle.group_skill(SCORES, GROUPS)),
}


@pytest.mark.parametrize("name", CRITIC_FREE)
def test_an_estimator_without_a_critic_compares_the_scores_of_a_group(name: str) -> None:
    settings, expected = CRITIC_FREE[name]
    actual = compute_targets(**settings)
    assert_close(actual.advantages, broadcast_per_sequence(expected))
    assert not actual.returns.any()


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reinforce_plus_plus(gamma: float) -> None:
    rows = zip(place_scores_at_the_end(), MASK, strict=True)
    to_go = [oracle.reward_to_go(rewards, mask, gamma) for rewards, mask in rows]
    assert_close(compute_targets(adv_estimator="reinforce_plus_plus", gamma=gamma).advantages, whiten(to_go))
    centered = broadcast_per_sequence(oracle.grpo(SCORES, GROUPS, norm_by_std=False)).tolist()
    assert_close(compute_targets(adv_estimator="reinforce_plus_plus_baseline").advantages, whiten(centered))


ESTIMATORS = tuple(ADVANTAGE_ESTIMATORS)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_scale_and_zero_act_on_advantages_after_whitening_and_leave_returns(estimator: str) -> None:
    plain, scaled = compute_targets(adv_estimator=estimator), compute_targets(0.25, adv_estimator=estimator)
    zero = compute_targets(adv_estimator=estimator, zero_task_advantage=True)
    assert plain.advantages.abs().max() > 0.5
    torch.testing.assert_close(scaled.advantages, 0.25 * plain.advantages)
    assert not zero.advantages.any()
    for other in (scaled, zero):
        assert torch.equal(other.returns, plain.returns)
        assert torch.equal(other.values, plain.values)


def penalise_scores(kl_coef: float) -> list[list[float]]:
    """Scores at the end minus the coefficient times (log-prob - reference) at every trained token."""
    kl_rows = ((BATCH.logprobs - REFERENCE) * BATCH.mask).tolist()
    return [
        [reward - kl_coef * kl for reward, kl in zip(rewards, kl_row, strict=True)]
        for rewards, kl_row in zip(place_scores_at_the_end(), kl_rows, strict=True)
    ]


def test_kl_in_the_reward_is_taken_off_token_by_token() -> None:
    actual = compute_targets(kl_coef=0.7, use_kl_in_reward=True, gamma=0.9, lam=0.95)
    advantages, returns = compute_gae_oracle(penalise_scores(0.7), 0.9, 0.95)
    assert_close(actual.advantages, advantages)
    assert_close(actual.returns, returns)
    # It also reaches estimators without a critic, and changes nothing at coefficient 0 or where it is off.
    actual = compute_targets(kl_coef=0.7, use_kl_in_reward=True, adv_estimator="rloo")
    penalised_scores = [sum(row) for row in penalise_scores(0.7)]
    assert_close(actual.advantages, broadcast_per_sequence(oracle.rloo(penalised_scores, GROUPS)))
    plain = compute_targets()
    assert torch.equal(compute_targets(kl_coef=0.7).advantages, plain.advantages)
    off = compute_targets(kl_coef=0.0, use_kl_in_reward=True, kl_ctrl=KLControl())
    torch.testing.assert_close(off.advantages, plain.advantages)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_all_tensors_are_on_the_device_of_the_batch(estimator: str) -> None:
    """As in test_qwen2, a tensor that is created without a device lands on `meta`."""
    settings = {"adv_estimator": estimator, "use_kl_in_reward": True, "bi_level_gae": estimator == "gae"}
    expected = compute_targets(kl_coef=0.5, **settings)
    with torch.device("meta"):
        actual = compute_targets(kl_coef=0.5, **settings)
    assert torch.equal(actual.advantages, expected.advantages)
    assert torch.equal(actual.returns, expected.returns)


def test_without_a_critic_values_are_zero() -> None:
    actual = make_targets(BATCH, None, None, AlgorithmConfig(adv_estimator="grpo"), 0.0, 1.0)
    assert not actual.values.any()
    assert actual.ref_logprobs is None
