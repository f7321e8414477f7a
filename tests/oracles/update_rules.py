"""Slow, literal versions of the update rules: loops over the rollouts, tokens and actions of one member, in float64.

Each takes the log-probabilities twice. The loss is a function of `live`, and `frozen` are those inside the terms that
the formulas treat as constants. The gradient of a rule is the derivative by `live` alone.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sandboxes.update_rules.config.settings import UpdateRuleConfig
from tests.oracles.algo import softmax
from tests.oracles.mutual_information import mean, population_std

Table = list[list[list[float]]]
"""[B][T][A] log-probabilities."""


@dataclass
class Member:
    """The samples of one member as lists of B rollouts, T positions, and K candidates or rollouts of a group."""

    actions: list[list[int]]
    labels: list[list[int]]
    rewards: list[float]
    old_log_probs: list[list[float]]
    keep: list[bool]
    age: float
    group_size: int | None
    score_mask: list[list[bool]]
    expected_reward: list[float] | None
    candidate_actions: list[list[list[int]]]
    candidate_log_probs: Table
    candidate_rewards: Table

    @property
    def kept_rollouts(self) -> list[int]:
        return [i for i, is_kept in enumerate(self.keep) if is_kept]

    @property
    def length(self) -> int:
        return len(self.actions[0])

    def list_groups(self) -> list[list[int]]:
        """List the kept rollouts of each group that has any. An ungrouped batch is one group."""
        size = self.group_size or len(self.rewards)
        starts = range(0, len(self.rewards), size)
        groups = [[i for i in range(start, start + size) if self.keep[i]] for start in starts]
        return [group for group in groups if group]

    def find_group(self, i: int) -> list[int]:
        return next(group for group in self.list_groups() if i in group)


GROUPED = ("GRPO", "DrGRPO", "DAPO", "DAPOLite", "TPO", "TPONoAnchor", "GroupPG", "TEMPO", "MaxRL")
"""Rules that compare the rollouts of a prompt."""
CANDIDATE = ("TPOToken", "GRPOToken")
"""Rules that compare several next tokens at every prefix."""
DELIGHT = (
    "DG", "ReplayDG", "FreshDG", "DGEntropyGuard", "UncertaintyDG", "FilteredDG", "RewardVarianceDG", "Kondo",
    "DGToken", "SelfDistillDG", "SCOPELite",
)  # fmt: skip
"""Rules that divide delight by eta."""
TARGET = ("TPO", "TPONoAnchor", "GroupPG", "TPOFullAction", "TPOToken")
"""Rules that divide rewards by tpo_eta."""
SEQUENCE_ONLY = ("DGToken", "SelfDistillDG", "SCOPELite")
"""Rules that need the right token of every position."""
CLIPPED = ("ASPO", "GRPO", "DrGRPO", "DAPO", "DAPOLite", "GRPOToken")
"""Rules that bound ratios on both sides of 1."""

Oracle = Callable[[Member, Table, Table, UpdateRuleConfig], float]
Weight = Callable[[int, int], float]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def sum_squared_probs(row: Sequence[float]) -> float:
    return math.fsum(math.exp(value) ** 2 for value in row)


def baseline(m: Member, frozen: Table, c: UpdateRuleConfig, i: int, t: int) -> float:
    if m.expected_reward is not None:
        return m.expected_reward[i]
    return {"expected": sum_squared_probs(frozen[i][t]), "zero": 0.0, "constant": 0.5}[c.baseline]


def advantage(m: Member, p: Table, c: UpdateRuleConfig, i: int, t: int) -> float:
    return m.rewards[i] - baseline(m, p, c, i, t)


def gate(log_p: float, advantage: float, c: UpdateRuleConfig) -> float:
    return sigmoid(-advantage * log_p / c.eta)


def weighted_loss(m: Member, live: Table, weight: Weight) -> float:
    """−mean of l · w over kept rollouts and all positions."""
    terms = [live[i][t][m.actions[i][t]] * weight(i, t) for i in m.kept_rollouts for t in range(m.length)]
    return -mean(terms)


def ratio(m: Member, table: Table, i: int, t: int) -> float:
    return math.exp(table[i][t][m.actions[i][t]] - m.old_log_probs[i][t])


def capped_ratio(m: Member, p: Table, c: UpdateRuleConfig, i: int, t: int) -> float:
    return min(ratio(m, p, i, t), c.iw_cap)


def flipped_ratio(m: Member, p: Table, c: UpdateRuleConfig, i: int, t: int) -> float:
    r = ratio(m, p, i, t)
    return 1 / r if advantage(m, p, c, i, t) > 0 else r


def aspo_weight(m: Member, p: Table, c: UpdateRuleConfig, i: int, t: int) -> float:
    value = flipped_ratio(m, p, c, i, t)
    return min(value, 1 + c.clip_high) if advantage(m, p, c, i, t) > 0 else max(value, 1 - c.clip_low)


def sequence_ratio(m: Member, p: Table, c: UpdateRuleConfig, i: int, t: int) -> float:
    return min(math.prod(ratio(m, p, i, u) for u in range(m.length)), c.iw_cap)


def growth_weight(m: Member, p: Table, c: UpdateRuleConfig, i: int, t: int) -> float:
    action = m.actions[i][t]
    return 1 / math.exp(p[i][t][action]) if action == m.labels[i][t] else 1.0


def entropy_guard(m: Member, p: Table, c: UpdateRuleConfig, i: int, t: int) -> float:
    excess = min(max(math.exp(p[i][t][m.actions[i][t]]) - 1 / len(p[i][t]), 0), 1)
    return 1 - c.guard_strength * excess if advantage(m, p, c, i, t) > 0 else 1.0


def reward_to_go(m: Member, p: Table, c: UpdateRuleConfig, i: int, t: int) -> float:
    later_positions = [u for u in range(t, m.length) if m.score_mask[i][u]]
    return sum(m.actions[i][u] == m.labels[i][u] for u in later_positions) / max(1, len(later_positions))


def token_advantage(m: Member, p: Table, c: UpdateRuleConfig, i: int, t: int) -> float:
    return float(m.actions[i][t] == m.labels[i][t]) - sum_squared_probs(p[i][t]) if m.score_mask[i][t] else 0.0


def is_after_error(m: Member, p: Table, c: UpdateRuleConfig, i: int, t: int) -> bool:
    is_wrong = [m.score_mask[i][u] and m.actions[i][u] != m.labels[i][u] for u in range(t + 1)]
    return any(is_wrong) and m.score_mask[i][t]


def prefix_value(m: Member, i: int, t: int) -> float:
    return mean([m.rewards[j] for j in m.find_group(i) if m.actions[j][:t] == m.actions[i][:t]])


def ce(m: Member, live: Table, frozen: Table, c: UpdateRuleConfig) -> float:
    return mean([-live[i][t][m.labels[i][t]] for i in m.kept_rollouts for t in range(m.length)])


def reinforce(m: Member, live: Table, frozen: Table, c: UpdateRuleConfig) -> float:
    return weighted_loss(m, live, lambda i, t: advantage(m, frozen, c, i, t))


def pg(m: Member, live: Table, frozen: Table, c: UpdateRuleConfig) -> float:
    return weighted_loss(m, live, lambda i, t: advantage(m, frozen, c, i, t) * capped_ratio(m, frozen, c, i, t))


def traj_pg(m: Member, live: Table, frozen: Table, c: UpdateRuleConfig) -> float:
    return weighted_loss(m, live, lambda i, t: advantage(m, frozen, c, i, t) * sequence_ratio(m, frozen, c, i, t))


def aspo(m: Member, live: Table, frozen: Table, c: UpdateRuleConfig) -> float:
    return weighted_loss(m, live, lambda i, t: advantage(m, frozen, c, i, t) * aspo_weight(m, frozen, c, i, t))


def r2vpo(m: Member, live: Table, frozen: Table, c: UpdateRuleConfig) -> float:
    def weight(i: int, t: int) -> float:
        r = ratio(m, frozen, i, t)
        return r * (advantage(m, frozen, c, i, t) - 2 * c.eta * (r - 1))

    return weighted_loss(m, live, weight)


def log_growth(m: Member, live: Table, frozen: Table, c: UpdateRuleConfig) -> float:
    return weighted_loss(m, live, lambda i, t: advantage(m, frozen, c, i, t) * growth_weight(m, frozen, c, i, t))


def pmd_mean(m: Member, live: Table, frozen: Table, c: UpdateRuleConfig) -> float:
    mean_reward = mean([m.rewards[i] for i in m.kept_rollouts])
    terms = []
    for i in m.kept_rollouts:
        x = math.fsum(live[i][t][m.actions[i][t]] - m.old_log_probs[i][t] for t in range(m.length))
        expected_reward = mean_reward if m.expected_reward is None else m.expected_reward[i]
        terms.append((c.eta * x - m.rewards[i] + expected_reward) ** 2)
    return mean(terms)


def delight(m: Member, live: Table, frozen: Table, c: UpdateRuleConfig, form: Callable[..., float]) -> float:
    """−mean of l · form(advantage, surprisal, deviation of rewards)."""

    def weight(i: int, t: int) -> float:
        std = population_std([m.rewards[j] for j in m.find_group(i)])
        return form(advantage(m, frozen, c, i, t), -frozen[i][t][m.actions[i][t]], std)

    return weighted_loss(m, live, weight)


def dg(m: Member, live: Table, frozen: Table, c: UpdateRuleConfig) -> float:
    return delight(m, live, frozen, c, lambda a, s, u: a * sigmoid(a * s / c.eta))


def fresh_dg(m: Member, live: Table, frozen: Table, c: UpdateRuleConfig) -> float:
    return math.exp(-c.replay_age_decay * m.age) * dg(m, live, frozen, c)


def dg_entropy_guard(m: Member, live: Table, frozen: Table, c: UpdateRuleConfig) -> float:
    def weight(i: int, t: int) -> float:
        a = advantage(m, frozen, c, i, t)
        return entropy_guard(m, frozen, c, i, t) * a * gate(frozen[i][t][m.actions[i][t]], a, c)

    return weighted_loss(m, live, weight)


def uncertainty_dg(m: Member, live: Table, frozen: Table, c: UpdateRuleConfig) -> float:
    return delight(m, live, frozen, c, lambda a, s, u: a * sigmoid((a * s - c.uncertainty_scale * u) / c.eta))


def filtered_dg(m: Member, live: Table, frozen: Table, c: UpdateRuleConfig) -> float:
    is_trusted = lambda u: u <= c.uncertainty_threshold  # noqa: E731
    return delight(m, live, frozen, c, lambda a, s, u: a * sigmoid(a * s / c.eta) * is_trusted(u))


def reward_variance_dg(m: Member, live: Table, frozen: Table, c: UpdateRuleConfig) -> float:
    def form(a: float, s: float, u: float) -> float:
        shrunk_advantage = a / (1 + c.uncertainty_scale * u)
        return shrunk_advantage * sigmoid(shrunk_advantage * s / c.eta)

    return delight(m, live, frozen, c, form)


def dg_token(m: Member, live: Table, frozen: Table, c: UpdateRuleConfig) -> float:
    def weight(i: int, t: int) -> float:
        expected_reward = sum_squared_probs(frozen[i][t]) if m.score_mask[i][t] else 0
        a = reward_to_go(m, frozen, c, i, t) - expected_reward
        return a * gate(frozen[i][t][m.actions[i][t]], a, c)

    return weighted_loss(m, live, weight)


def self_distill_dg(m: Member, live: Table, frozen: Table, c: UpdateRuleConfig) -> float:
    terms = []
    for i in m.kept_rollouts:
        for t in range(m.length):
            action, label, a = m.actions[i][t], m.labels[i][t], token_advantage(m, frozen, c, i, t)
            g = gate(frozen[i][t][action], a, c)
            terms.append(-g * a * live[i][t][action] - c.distill_alpha * g * live[i][t][label])
    return mean(terms)


def scope_lite(m: Member, live: Table, frozen: Table, c: UpdateRuleConfig) -> float:
    places = [(i, t) for i in m.kept_rollouts for t in range(m.length) if is_after_error(m, frozen, c, i, t)]
    corrections = [-live[i][t][m.labels[i][t]] for i, t in places]
    correction = mean(corrections) if corrections else 0.0
    return dg(m, live, frozen, c) + c.distill_alpha * correction


def surrogate(log_p: float, old: float, advantage: float, low: float, high: float, beta: float) -> float:
    x = log_p - old
    r = math.exp(x)
    clipped_gain = min(r * advantage, min(max(r, 1 - low), 1 + high) * advantage)
    return -clipped_gain + beta * (math.exp(-x) + x - 1)


def normalize(values: Sequence[float], divide: bool = True) -> list[float]:
    std = population_std(values)
    if divide:
        return [(value - mean(values)) / (std + 1e-8) if std > 1e-8 else 0.0 for value in values]
    return [value - mean(values) for value in values]


def clipped_losses(m: Member, live: Table, divide: bool, high: float, low: float, beta: float) -> list[list[float]]:
    """Compute the loss of each token of each kept rollout."""
    rows = []
    for group in m.list_groups():
        for i, advantage in zip(group, normalize([m.rewards[j] for j in group], divide), strict=True):
            pairs = [(live[i][t][m.actions[i][t]], m.old_log_probs[i][t]) for t in range(m.length)]
            rows.append([surrogate(log_p, old, advantage, low, high, beta) for log_p, old in pairs])
    return rows


def grpo(m: Member, live: Table, frozen: Table, c: UpdateRuleConfig) -> float:
    rows = clipped_losses(m, live, c.std_normalization, c.clip_low, c.clip_low, c.grpo_beta)
    return mean([x for row in rows for x in row])


def dr_grpo(m: Member, live: Table, frozen: Table, c: UpdateRuleConfig) -> float:
    return mean([sum(row) for row in clipped_losses(m, live, False, c.clip_low, c.clip_low, c.grpo_beta)])


def dapo(m: Member, live: Table, frozen: Table, c: UpdateRuleConfig) -> float:
    rows = clipped_losses(m, live, c.std_normalization, c.clip_high, c.clip_low, 0.0)
    return mean([x for row in rows for x in row])


def skills(values: Sequence[float]) -> list[float]:
    std = population_std(values)
    return [(value - mean(values)) / (std if std > 1e-6 else 1) for value in values]


def cross_entropy(log_probs: Sequence[float], target: Sequence[float]) -> float:
    return -math.fsum(q * math.log(p) for q, p in zip(target, softmax(log_probs), strict=True))


def target(old: Sequence[float], z: Sequence[float], c: UpdateRuleConfig) -> list[float]:
    return softmax([o + value / c.tpo_eta for o, value in zip(old, z, strict=True)])


def tpo(m: Member, live: Table, frozen: Table, c: UpdateRuleConfig, anchor: float = 1.0) -> float:
    losses = []
    for group in m.list_groups():
        sequence_log_probs = [math.fsum(live[i][t][m.actions[i][t]] for t in range(m.length)) for i in group]
        z = skills([m.rewards[i] for i in group])
        q = target([anchor * math.fsum(m.old_log_probs[i]) for i in group], z, c)
        losses.append(cross_entropy(sequence_log_probs, q))
    return mean(losses)


def tpo_no_anchor(m: Member, live: Table, frozen: Table, c: UpdateRuleConfig) -> float:
    return tpo(m, live, frozen, c, anchor=0.0)


def group_pg(m: Member, live: Table, frozen: Table, c: UpdateRuleConfig) -> float:
    losses = []
    for group in m.list_groups():
        z = skills([m.rewards[i] for i in group])
        totals = [math.fsum(live[i][t][m.actions[i][t]] for t in range(m.length)) for i in group]
        losses.append(-math.fsum(z[k] / c.tpo_eta * totals[k] for k in range(len(group))))
    return mean(losses)


def tpo_full_action(m: Member, live: Table, frozen: Table, c: UpdateRuleConfig) -> float:
    losses = []
    for i in m.kept_rollouts:
        scores = [0.0 for _ in live[i][0]]
        scores[m.actions[i][0]] = m.rewards[i] - sum_squared_probs(frozen[i][0])
        z = skills(scores)
        q = target(frozen[i][0], z, c)
        losses.append(-math.fsum(share * log_p for share, log_p in zip(q, live[i][0], strict=True)))
    return mean(losses)


def tpo_token(m: Member, live: Table, frozen: Table, c: UpdateRuleConfig) -> float:
    losses = []
    for i in m.kept_rollouts:
        for t in range(m.length):
            q = target(m.candidate_log_probs[i][t], skills(m.candidate_rewards[i][t]), c)
            losses.append(cross_entropy([live[i][t][a] for a in m.candidate_actions[i][t]], q))
    return mean(losses)


def grpo_token(m: Member, live: Table, frozen: Table, c: UpdateRuleConfig) -> float:
    losses = []
    for i in m.kept_rollouts:
        for t in range(m.length):
            advantages, old = normalize(m.candidate_rewards[i][t]), m.candidate_log_probs[i][t]
            new_log_probs = [live[i][t][a] for a in m.candidate_actions[i][t]]
            triples = zip(new_log_probs, old, advantages, strict=True)
            losses.append(sum(surrogate(p, o, g, c.clip_low, c.clip_low, c.grpo_beta) for p, o, g in triples))
    return mean(losses)


def tempo(m: Member, live: Table, frozen: Table, c: UpdateRuleConfig) -> float:
    def weight(i: int, t: int) -> float:
        rewards = [m.rewards[j] for j in m.find_group(i)]
        std = population_std(rewards)
        if std < 1e-8:
            return 0.0
        credit = (m.rewards[i] - mean(rewards) + prefix_value(m, i, t + 1) - prefix_value(m, i, t)) / std
        return credit * capped_ratio(m, frozen, c, i, t)

    return weighted_loss(m, live, weight)


def max_rl(m: Member, live: Table, frozen: Table, c: UpdateRuleConfig) -> float:
    def weight(i: int, t: int) -> float:
        mean_reward = mean([m.rewards[j] for j in m.find_group(i)])
        return (m.rewards[i] - mean_reward) / (mean_reward + 1e-8) * capped_ratio(m, frozen, c, i, t)

    return weighted_loss(m, live, weight)


ORACLES: dict[str, Oracle] = {
    "CE": ce, "REINFORCE": reinforce, "PG": pg, "TrajPG": traj_pg, "ASPO": aspo, "R2VPO": r2vpo,
    "LogGrowth": log_growth, "PMDMean": pmd_mean, "DG": dg, "ReplayDG": dg, "FreshDG": fresh_dg,
    "DGEntropyGuard": dg_entropy_guard, "UncertaintyDG": uncertainty_dg, "FilteredDG": filtered_dg,
    "RewardVarianceDG": reward_variance_dg, "Kondo": dg, "DGToken": dg_token, "SelfDistillDG": self_distill_dg,
    "SCOPELite": scope_lite, "GRPO": grpo, "DrGRPO": dr_grpo, "DAPO": dapo, "DAPOLite": dapo, "TPO": tpo,
    "TPONoAnchor": tpo_no_anchor, "GroupPG": group_pg, "TEMPO": tempo, "MaxRL": max_rl,
    "TPOFullAction": tpo_full_action, "TPOToken": tpo_token, "GRPOToken": grpo_token,
}  # fmt: skip
