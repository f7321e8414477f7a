"""Hypothesis strategies for batches of the update rules: shapes, rewards with ties, keep masks and several members."""

from dataclasses import replace
from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from sandboxes.update_rules.config.rules import METHODS, RULES
from sandboxes.update_rules.config.settings import UpdateRuleConfig
from sandboxes.update_rules.rollouts import Candidates, Rollouts
from tests.oracles.update_rules import Member
from tests.strategies.examples import draw_examples

examples = draw_examples(25)

ONE_ACTION = ("LogGrowth", "TPOFullAction")
BINARY = ("LogGrowth", "MaxRL")
GROUP_SIZE, N_ACTIONS = 3, 3
REWARD_VALUES, BINARY_REWARD_VALUES = (0.0, 1 / 3, 0.7, 1.0), (0.0, 1.0)
OPTIONALLY_GROUPED = ("UncertaintyDG", "FilteredDG", "RewardVarianceDG")
REQUIRED_SETTINGS = {
    "ReplayDG": {"replay_capacity": 5},
    "FreshDG": {"delay": 4},
    "MaxRL": {"binary_reward": True},
    "LogGrowth": {"task": "mnist"},
    "TPOFullAction": {"task": "mnist"},
}
"""Settings without which a rule is refused."""


def make_config(method: str, **overrides: object) -> UpdateRuleConfig:
    return UpdateRuleConfig.model_validate(
        {"task": "token_reversal", "method": method, **REQUIRED_SETTINGS.get(method, {}), **overrides}
    )


class Case(NamedTuple):
    """A batch with log-probabilities [E, B, T, A] of the policy that learns, float64, and the settings of a rule."""

    rollouts: Rollouts
    log_probs: Tensor
    config: UpdateRuleConfig

    def to_on_policy(self) -> "Case":
        """Return the same samples with the log-probabilities of the policy that learns."""
        action_log_probs = self.log_probs.gather(-1, self.rollouts.actions.unsqueeze(-1)).squeeze(-1)
        candidates = self.rollouts.candidates
        if candidates is not None:
            candidates = replace(candidates, log_probs=self.log_probs.gather(-1, candidates.actions))
        return self._replace(
            rollouts=replace(self.rollouts, behavior_log_probs=action_log_probs, candidates=candidates)
        )


def make_random_case(
    seed: int, method: str, members: int, groups: int, length: int, grouped: bool = False, **overrides: object
) -> Case:
    """Make a case of seeded random numbers. Rewards have few values, so that groups have ties."""
    generator = torch.Generator().manual_seed(seed)
    shape = (members, groups * GROUP_SIZE, 1 if method in ONE_ACTION else length)
    log_probs = torch.log_softmax(1.5 * torch.randn(*shape, N_ACTIONS, generator=generator, dtype=torch.float64), -1)
    draw_integers = lambda below, *sizes: torch.randint(below, sizes, generator=generator)  # noqa: E731
    reward_values = torch.tensor(BINARY_REWARD_VALUES if method in BINARY else REWARD_VALUES, dtype=torch.float64)
    actions = draw_integers(N_ACTIONS, *shape)
    perturb = lambda logs: logs + 0.3 * torch.randn(logs.shape, generator=generator, dtype=torch.float64)  # noqa: E731
    keep = torch.rand(shape[:2], generator=generator) < 0.7
    keep[:, draw_integers(shape[1], 1)] = True
    candidate_actions = draw_integers(N_ACTIONS, *shape, GROUP_SIZE)
    candidates = Candidates(
        candidate_actions,
        perturb(log_probs.gather(-1, candidate_actions)),
        reward_values[draw_integers(len(reward_values), *shape, GROUP_SIZE)],
    )
    rollouts = Rollouts(
        observations=draw_integers(4, *shape[:2], 7),
        actions=actions,
        labels=draw_integers(N_ACTIONS, *shape),
        rewards=reward_values[draw_integers(len(reward_values), *shape[:2])],
        behavior_log_probs=perturb(log_probs.gather(-1, actions.unsqueeze(-1)).squeeze(-1)).clamp(max=0),
        behavior_baseline=log_probs.exp().square().sum(-1),
        keep_mask=keep,
        age=draw_integers(40, members),
        group_size=GROUP_SIZE if grouped or RULES[method].has_groups else None,
        score_mask=torch.rand(shape, generator=generator) < 0.6 if draw_integers(2, 1) else None,
        expected_reward=torch.rand(shape[:2], generator=generator, dtype=torch.float64)
        if draw_integers(3, 1) == 0
        else None,
        candidates=candidates if RULES[method].has_candidates else None,
    )
    return Case(rollouts, log_probs, make_config(method, **overrides))


rule_settings = st.fixed_dictionaries(
    {
        "baseline": st.sampled_from(["expected", "zero", "constant"]),
        "std_normalization": st.booleans(),
        "eta": st.sampled_from([0.3, 1.0, 4.0]),
        "tpo_eta": st.sampled_from([0.5, 1.0]),
        "grpo_beta": st.sampled_from([0.0, 0.04, 1.0]),
        "iw_cap": st.sampled_from([1.1, 10.0]),
        "clip_low": st.sampled_from([0.05, 0.2]),
        "clip_high": st.sampled_from([0.1, 0.28]),
        "guard_strength": st.sampled_from([0.0, 0.5]),
        "uncertainty_scale": st.sampled_from([0.0, 1.0]),
        "uncertainty_threshold": st.sampled_from([0.2, 0.35, 0.5]),
        "distill_alpha": st.sampled_from([0.0, 0.5]),
        "replay_age_decay": st.sampled_from([0.02, 0.5]),
    }
)


@st.composite
def cases(draw: st.DrawFn, methods: tuple[str, ...] = METHODS) -> Case:
    method = draw(st.sampled_from(methods))
    grouped = method in OPTIONALLY_GROUPED and draw(st.booleans())
    shape = [draw(st.integers(1, 3)) for _ in range(3)]
    return make_random_case(draw(st.integers(0, 2**20)), method, *shape, grouped=grouped, **draw(rule_settings))


def make_member(rollouts: Rollouts, e: int) -> Member:
    """Return member `e` of the batch as lists."""
    mask = rollouts.score_mask if rollouts.score_mask is not None else torch.ones_like(rollouts.actions).bool()
    candidates = rollouts.candidates
    return Member(
        actions=rollouts.actions[e].tolist(),
        labels=rollouts.labels[e].tolist(),
        rewards=rollouts.rewards[e].tolist(),
        old_log_probs=rollouts.behavior_log_probs[e].tolist(),
        keep=rollouts.keep_mask[e].tolist(),
        age=float(rollouts.age[e]),
        group_size=rollouts.group_size,
        score_mask=mask[e].tolist(),
        expected_reward=None if rollouts.expected_reward is None else rollouts.expected_reward[e].tolist(),
        candidate_actions=[] if candidates is None else candidates.actions[e].tolist(),
        candidate_log_probs=[] if candidates is None else candidates.log_probs[e].tolist(),
        candidate_rewards=[] if candidates is None else candidates.rewards[e].tolist(),
    )
