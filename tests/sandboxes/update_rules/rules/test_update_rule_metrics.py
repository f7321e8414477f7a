"""Tests of the metrics that rules report beside their loss, against loops over one member that keeps all rollouts."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from sandboxes.update_rules.config.rules import METHODS
from sandboxes.update_rules.config.settings import UpdateRuleConfig
from sandboxes.update_rules.training.make import UPDATE_RULES
from tests.oracles import update_rules as loops
from tests.oracles.update_rules import Member, Table, advantage, capped_ratio
from tests.strategies.update_rules import make_member, make_random_case

Term = Callable[[Member, Table, UpdateRuleConfig, int, int], float]
"""term(member, log-probabilities, settings, rollout, position): the mean over all of them is the metric."""


def ratio(m: Member, p: Table, c: UpdateRuleConfig, i: int, t: int) -> float:
    return loops.ratio(m, p, i, t)


def gate(m: Member, p: Table, c: UpdateRuleConfig, i: int, t: int) -> float:
    return loops.gate(p[i][t][m.actions[i][t]], advantage(m, p, c, i, t), c)


def self_gate(m: Member, p: Table, c: UpdateRuleConfig, i: int, t: int) -> float:
    return loops.gate(p[i][t][m.actions[i][t]], loops.token_advantage(m, p, c, i, t), c)


def abs_group_advantage(m: Member, p: Table, c: UpdateRuleConfig, i: int, t: int) -> float:
    group = m.find_group(i)
    return abs(loops.normalize([m.rewards[j] for j in group], c.std_normalization)[group.index(i)])


def kl(m: Member, p: Table, c: UpdateRuleConfig, i: int, t: int) -> float:
    x = math.log(loops.ratio(m, p, i, t))
    return math.exp(-x) + x - 1


def abs_skill(m: Member, p: Table, c: UpdateRuleConfig, i: int, t: int) -> float:
    group = m.find_group(i)
    return abs(loops.skills([m.rewards[j] for j in group])[group.index(i)])


def target_probs(m: Member, c: UpdateRuleConfig, i: int) -> list[float]:
    group = m.find_group(i)
    return loops.target([math.fsum(m.old_log_probs[j]) for j in group], loops.skills([m.rewards[j] for j in group]), c)


def entropy(q: list[float]) -> float:
    return -math.fsum(value * math.log(value) for value in q)


def token_target(m: Member, p: Table, c: UpdateRuleConfig, i: int, t: int) -> float:
    return entropy(loops.target(m.candidate_log_probs[i][t], loops.skills(m.candidate_rewards[i][t]), c))


TERMS: dict[tuple[str, str], Term] = {
    ("PG", "iw_mean"): capped_ratio,
    ("MaxRL", "iw_mean"): capped_ratio,
    ("TrajPG", "iw_mean"): loops.sequence_ratio,
    ("ASPO", "ratio_mean"): loops.flipped_ratio,
    ("ASPO", "weight_mean"): loops.aspo_weight,
    ("ASPO", "pos_frac"): lambda m, p, c, i, t: float(advantage(m, p, c, i, t) > 0),
    ("R2VPO", "ratio_mean"): ratio,
    ("R2VPO", "var_penalty_mean"): lambda m, p, c, i, t: c.eta * (ratio(m, p, c, i, t) - 1) ** 2,
    ("LogGrowth", "weight_mean"): loops.growth_weight,
    ("PMDMean", "log_ratio_mean"): lambda m, p, c, i, t: 2 * math.log(ratio(m, p, c, i, t)),
    ("DG", "gate_mean"): gate,
    ("FreshDG", "gate_mean"): gate,
    ("FreshDG", "freshness_weight"): lambda m, p, c, i, t: math.exp(-c.replay_age_decay * m.age),
    ("FreshDG", "batch_age"): lambda m, p, c, i, t: m.age,
    ("DGEntropyGuard", "entropy_guard_mean"): loops.entropy_guard,
    ("UncertaintyDG", "uncertainty_mean"): lambda m, p, c, i, t: loops.population_std(m.rewards),
    ("UncertaintyDG", "gate_mean"): lambda m, p, c, i, t: loops.sigmoid(
        (-advantage(m, p, c, i, t) * p[i][t][m.actions[i][t]] - c.uncertainty_scale * loops.population_std(m.rewards))
        / c.eta
    ),
    ("FilteredDG", "kept_frac"): lambda m, p, c, i, t: float(
        loops.population_std(m.rewards) <= c.uncertainty_threshold
    ),
    ("RewardVarianceDG", "uncertainty_mean"): lambda m, p, c, i, t: loops.population_std(m.rewards),
    ("DGToken", "rtg_mean"): loops.reward_to_go,
    ("SelfDistillDG", "gate_mean"): self_gate,
    ("SelfDistillDG", "distill_loss"): lambda m, p, c, i, t: -self_gate(m, p, c, i, t) * p[i][t][m.labels[i][t]],
    ("SCOPELite", "gate_mean"): gate,
    ("SCOPELite", "first_error_frac"): loops.is_after_error,
    ("GRPO", "ratio_mean"): ratio,
    ("GRPO", "adv_abs_mean"): abs_group_advantage,
    ("DAPO", "adv_abs_mean"): abs_group_advantage,
    ("GRPO", "reverse_kl_mean"): kl,
    ("GroupPG", "tpo_skill_abs_mean"): abs_skill,
    ("TPO", "tpo_target_entropy"): lambda m, p, c, i, t: entropy(target_probs(m, c, i)),
    ("TPO", "tpo_target_top_prob"): lambda m, p, c, i, t: max(target_probs(m, c, i)),
    ("TPOFullAction", "tpo_sample_adv_mean"): lambda m, p, c, i, t: m.rewards[i] - loops.sum_squared_probs(p[i][0]),
    ("TPOToken", "tpo_target_entropy"): token_target,
    ("TPOToken", "candidate_reward"): lambda m, p, c, i, t: loops.mean(m.candidate_rewards[i][t]),
    ("GRPOToken", "behavior_token_reward"): lambda m, p, c, i, t: m.candidate_rewards[i][t][0],
    ("TEMPO", "ratio_mean"): capped_ratio,
    ("TEMPO", "td_nonzero_frac"): lambda m, p, c, i, t: (
        abs(loops.prefix_value(m, i, t + 1) - loops.prefix_value(m, i, t)) > 1e-9
    ),
    **{(method, "reward"): lambda m, p, c, i, t: m.rewards[i] for method in METHODS},
}


@pytest.mark.parametrize(("method", "metric"), list(TERMS), ids=str)
@pytest.mark.parametrize("seed", range(2))
def test_metric_is_the_mean_of_its_terms(method: str, metric: str, seed: int) -> None:
    case = make_random_case(seed, method, 1, 3, 2)
    rollouts = replace(case.rollouts, keep_mask=torch.ones_like(case.rollouts.keep_mask))
    value = UPDATE_RULES[method](rollouts, case.log_probs, case.config).metrics[metric]
    member, table = make_member(rollouts, 0), case.log_probs[0].tolist()
    positions = [(i, t) for i in range(len(member.rewards)) for t in range(member.length)]
    term = TERMS[method, metric]
    expected = loops.mean([term(member, table, case.config, i, t) for i, t in positions])
    assert value.item() == pytest.approx(expected, rel=1e-7, abs=1e-12)


@pytest.mark.parametrize("seed", range(2))
def test_loss_of_the_correction_is_a_mean_over_corrected_positions(seed: int) -> None:
    case = make_random_case(seed, "SCOPELite", 1, 3, 2)
    corrected_loss = UPDATE_RULES["SCOPELite"](case.rollouts, case.log_probs, case.config)
    dg_loss = UPDATE_RULES["DG"](case.rollouts, case.log_probs, case.config)
    expected = (corrected_loss.loss - dg_loss.loss) / case.config.distill_alpha
    torch.testing.assert_close(corrected_loss.metrics["correction_loss"], expected)
