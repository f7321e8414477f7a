"""Tests of every update rule: its value and gradient equal those of loops, and members are independent."""

import inspect
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sandboxes.update_rules.config.rules import METHODS
from sandboxes.update_rules.family import RULE_COLUMNS
from sandboxes.update_rules.rules.rule import RuleLoss
from sandboxes.update_rules.training.make import UPDATE_RULES
from tests.oracles.update_rules import ORACLES, Table
from tests.strategies.update_rules import Case, cases, examples, make_member, make_random_case

AXES = ("influence", "granularity", "support", "reward uncertainty", "geometry")
AXES += ("privileged acquisition", "search coverage")
STEP = 1e-5


def compute_loss_and_gradient(case: Case) -> tuple[RuleLoss, Tensor]:
    """Compute the result of the rule, and the gradient [E, B, T, A] of the sum of its losses."""
    table = case.log_probs.clone().requires_grad_()
    rule_loss = UPDATE_RULES[case.config.method](case.rollouts, table, case.config)
    assert rule_loss.loss.shape == (table.shape[0],)
    (gradient,) = torch.autograd.grad(rule_loss.loss.sum(), table)
    return rule_loss, gradient


def test_every_method_has_a_rule_an_oracle_and_a_line_of_the_page() -> None:
    assert set(UPDATE_RULES) == set(METHODS)
    assert set(ORACLES) == set(METHODS)
    assert len(METHODS) == 31
    page = Path(__file__).parents[4] / "docs" / "update_rules.md"
    names = set(re.findall(r"^\| `(\w+)`", page.read_text(encoding="utf-8"), re.MULTILINE))
    assert names == set(METHODS)


@pytest.mark.parametrize("method", METHODS)
@given(data=st.data())
@examples
def test_loss_is_that_of_the_loops(method: str, data: st.DataObject) -> None:
    case = data.draw(cases((method,)))
    rule_loss, _ = compute_loss_and_gradient(case)
    for e, loss in enumerate(rule_loss.loss.tolist()):
        table = case.log_probs[e].tolist()
        expected = ORACLES[method](make_member(case.rollouts, e), table, table, case.config)
        assert loss == pytest.approx(expected, rel=1e-9, abs=1e-12)


def compute_finite_differences(case: Case, e: int) -> Tensor:
    """Compute central differences of the loss of the loops by each live log-probability of member `e`."""
    frozen_table: Table = case.log_probs[e].tolist()
    member, oracle = make_member(case.rollouts, e), ORACLES[case.config.method]
    gradient = torch.zeros_like(case.log_probs[e])
    for entry in torch.cartesian_prod(*(torch.arange(n) for n in gradient.shape)).tolist():
        live_table = [[list(row) for row in rows] for rows in frozen_table]
        i, t, a = entry
        losses = []
        for sign in (1, -1):
            live_table[i][t][a] = frozen_table[i][t][a] + sign * STEP
            losses.append(oracle(member, live_table, frozen_table, case.config))
        gradient[i, t, a] = (losses[0] - losses[1]) / (2 * STEP)
    return gradient


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("seed", range(2))
def test_gradient_is_that_of_the_loops(method: str, seed: int) -> None:
    case = make_random_case(seed, method, members=2, groups=2, length=2)
    _, gradient = compute_loss_and_gradient(case)
    for e in range(2):
        torch.testing.assert_close(gradient[e], compute_finite_differences(case, e), rtol=1e-6, atol=1e-8)


@given(case=cases(), seed=st.integers(0, 99))
@examples
def test_rollouts_that_are_not_kept_do_not_count(case: Case, seed: int) -> None:
    rule_loss, gradient = compute_loss_and_gradient(case)
    assert torch.equal(gradient[~case.rollouts.keep_mask], torch.zeros_like(gradient[~case.rollouts.keep_mask]))
    members, rollouts, length, _ = case.log_probs.shape
    is_grouped = case.rollouts.group_size is not None
    other_case = make_random_case(seed, case.config.method, members, rollouts // 3, length, grouped=is_grouped)
    mixed_loss, _ = compute_loss_and_gradient(mix_cases(case, other_case))
    torch.testing.assert_close(mixed_loss.loss, rule_loss.loss)
    for name, value in rule_loss.metrics.items():
        torch.testing.assert_close(mixed_loss.metrics[name], value)


def mix_cases(case: Case, other: Case) -> Case:
    """Take kept rollouts from `case` and the others from `other`. A field that one of them lacks stays as in `case`."""
    rollouts, other_rollouts, keep_mask = case.rollouts, other.rollouts, case.rollouts.keep_mask

    def mix(a: Tensor, b: Tensor) -> Tensor:
        return torch.where(keep_mask.reshape(*keep_mask.shape, *[1] * (a.dim() - 2)), a, b)

    names = ("actions", "labels", "rewards", "behavior_log_probs", "behavior_baseline")
    mixed_fields = {name: mix(getattr(rollouts, name), getattr(other_rollouts, name)) for name in names}
    if rollouts.candidates is not None and other_rollouts.candidates is not None:
        rewards = mix(rollouts.candidates.rewards, other_rollouts.candidates.rewards)
        mixed_fields["candidates"] = replace(rollouts.candidates, rewards=rewards)
    return case._replace(rollouts=replace(rollouts, **mixed_fields), log_probs=mix(case.log_probs, other.log_probs))


@given(case=cases())
@examples
def test_metrics_are_documented_finite_and_without_gradient(case: Case) -> None:
    rule_loss, _ = compute_loss_and_gradient(case)
    names = {column.name for column in RULE_COLUMNS}
    assert "reward" in rule_loss.metrics
    assert rule_loss.metrics.keys() <= names
    for value in rule_loss.metrics.values():
        assert value.shape == rule_loss.loss.shape
        assert value.isfinite().all()
        assert not value.requires_grad


def test_every_documented_column_is_reported_by_some_rule() -> None:
    reported_names = {"kept_frac", "gate_prob_mean"}  # Kondo's screen
    for method in METHODS:
        reported_names |= compute_loss_and_gradient(make_random_case(0, method, 1, 2, 2))[0].metrics.keys()
    assert reported_names == {column.name for column in RULE_COLUMNS}


@pytest.mark.parametrize("method", METHODS)
def test_docstring_says_source_reduction_and_axis(method: str) -> None:
    text = inspect.getdoc(UPDATE_RULES[method])
    assert {"Source:", "Reduces to:", "Axis:"} <= set(re.findall(r"^[A-Z][a-z ]*:", text, re.MULTILINE))
    (axis,) = re.findall(r"^Axis: ([a-z ]+)", text, re.MULTILINE)
    assert axis.startswith(AXES)
