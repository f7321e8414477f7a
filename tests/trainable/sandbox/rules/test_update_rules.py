"""Every update rule: its value and gradient against loops, its independence of members, and what it leaves alone."""

import inspect
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.oracles.update_rules import ORACLES, Table
from tests.strategies.update_rules import (
    REQUIRED_SETTINGS,
    Case,
    cases,
    examples,
    make_member,
    make_random_case,
    slice_members,
)
from trainable.sandbox.config.names import TASKS
from trainable.sandbox.config.rules import METHODS
from trainable.sandbox.config.settings import UpdateRuleConfig
from trainable.sandbox.measure.records import RULE_COLUMNS
from trainable.sandbox.rules.catalog import UPDATE_RULES
from trainable.sandbox.rules.rule import RuleLoss

AXES = (
    "influence",
    "granularity",
    "support",
    "reward uncertainty",
    "geometry",
    "privileged acquisition",
    "search coverage",
)
STEP = 1e-5


def run(case: Case) -> tuple[RuleLoss, Tensor]:
    """What the rule gives, and the gradient [E, B, T, A] of the losses' sum."""
    table = case.log_probs.clone().requires_grad_()
    found = UPDATE_RULES[case.config.method](case.rollouts, table, case.config)
    assert found.loss.shape == (table.shape[0],)
    (gradient,) = torch.autograd.grad(found.loss.sum(), table)
    return found, gradient


def test_every_method_has_a_rule_and_an_oracle() -> None:
    assert set(UPDATE_RULES) == set(METHODS)
    assert set(ORACLES) == set(METHODS)
    assert len(METHODS) == 31


@pytest.mark.parametrize("method", METHODS)
@given(data=st.data())
@examples
def test_loss_is_that_of_the_loops(method: str, data: st.DataObject) -> None:
    case = data.draw(cases((method,)))
    found, _ = run(case)
    for e, loss in enumerate(found.loss.tolist()):
        table = case.log_probs[e].tolist()
        expected = ORACLES[method](make_member(case.rollouts, e), table, table, case.config)
        assert loss == pytest.approx(expected, rel=1e-9, abs=1e-12)


def finite_differences(case: Case, e: int) -> Tensor:
    """Central differences of the loops' loss, by each log-probability of member `e` outside the constants."""
    frozen: Table = case.log_probs[e].tolist()
    member, oracle = make_member(case.rollouts, e), ORACLES[case.config.method]
    found = torch.zeros_like(case.log_probs[e])
    for place in torch.cartesian_prod(*(torch.arange(n) for n in found.shape)).tolist():
        live = [[list(row) for row in rows] for rows in frozen]
        i, t, a = place
        sides = []
        for side in (1, -1):
            live[i][t][a] = frozen[i][t][a] + side * STEP
            sides.append(oracle(member, live, frozen, case.config))
        found[i, t, a] = (sides[0] - sides[1]) / (2 * STEP)
    return found


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("seed", range(3))
def test_gradient_is_that_of_the_loops(method: str, seed: int) -> None:
    case = make_random_case(seed, method, members=2, groups=2, length=2)
    _, gradient = run(case)
    for e in range(2):
        torch.testing.assert_close(gradient[e], finite_differences(case, e), rtol=1e-6, atol=1e-8)


@given(case=cases())
@examples
def test_a_member_is_what_it_is_alone(case: Case) -> None:
    found, gradient = run(case)
    for e in range(found.loss.shape[0]):
        pick = slice(e, e + 1)
        alone, own = run(case._replace(rollouts=slice_members(case.rollouts, pick), log_probs=case.log_probs[pick]))
        torch.testing.assert_close(alone.loss, found.loss[pick])
        torch.testing.assert_close(own, gradient[pick])
        for name, value in alone.metrics.items():
            torch.testing.assert_close(value, found.metrics[name][pick])


@given(case=cases(), seed=st.integers(0, 99))
@examples
def test_rollouts_that_are_not_kept_count_nowhere(case: Case, seed: int) -> None:
    found, gradient = run(case)
    assert torch.equal(gradient[~case.rollouts.keep_mask], torch.zeros_like(gradient[~case.rollouts.keep_mask]))
    other = make_random_case(seed, case.config.method, *shape_of(case), grouped=case.rollouts.group_size is not None)
    mixed = mixture(case, other)
    again, _ = run(mixed)
    torch.testing.assert_close(again.loss, found.loss)
    for name, value in found.metrics.items():
        torch.testing.assert_close(again.metrics[name], value)


def shape_of(case: Case) -> tuple[int, int, int]:
    members, rollouts, length, _ = case.log_probs.shape
    return members, rollouts // 3, length


def mixture(case: Case, other: Case) -> Case:
    """`case` where it keeps, `other` elsewhere; what one of them lacks stays as in `case`."""
    ours, theirs, keep = case.rollouts, other.rollouts, case.rollouts.keep_mask

    def mixed(a: Tensor, b: Tensor) -> Tensor:
        return torch.where(keep.reshape(*keep.shape, *[1] * (a.dim() - 2)), a, b)

    names = ("actions", "labels", "rewards", "behavior_log_probs", "behavior_baseline")
    changed = {name: mixed(getattr(ours, name), getattr(theirs, name)) for name in names}
    if ours.candidates is not None and theirs.candidates is not None:
        rewards = mixed(ours.candidates.rewards, theirs.candidates.rewards)
        changed["candidates"] = replace(ours.candidates, rewards=rewards)
    return case._replace(rollouts=replace(ours, **changed), log_probs=mixed(case.log_probs, other.log_probs))


@given(case=cases())
@examples
def test_metrics_are_documented_finite_and_without_gradient(case: Case) -> None:
    found, _ = run(case)
    names = {column.name for column in RULE_COLUMNS}
    assert "reward" in found.metrics
    assert found.metrics.keys() <= names
    for value in found.metrics.values():
        assert value.shape == found.loss.shape
        assert value.isfinite().all()
        assert not value.requires_grad


def test_every_documented_column_is_reported_by_some_rule() -> None:
    reported = {"kept_frac", "gate_prob_mean"}  # Kondo's screen
    for method in METHODS:
        reported |= run(make_random_case(0, method, 1, 2, 2))[0].metrics.keys()
    assert reported == {column.name for column in RULE_COLUMNS}


@pytest.mark.parametrize("method", METHODS)
def test_float32_agrees_with_float64(method: str) -> None:
    case = make_random_case(1, method, 2, 3, 4)
    narrow = {name: value.float() for name, value in vars(case.rollouts).items() if is_float(value)}
    candidates = case.rollouts.candidates
    if candidates is not None:
        logs, rewards = candidates.log_probs.float(), candidates.rewards.float()
        narrow["candidates"] = replace(candidates, log_probs=logs, rewards=rewards)
    small = case._replace(rollouts=replace(case.rollouts, **narrow), log_probs=case.log_probs.float())
    (wide, wide_gradient), (found, gradient) = run(case), run(small)
    assert found.loss.dtype == torch.float32
    torch.testing.assert_close(found.loss.double(), wide.loss, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(gradient.double(), wide_gradient, rtol=1e-4, atol=1e-6)


def is_float(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


@pytest.mark.parametrize("method", METHODS)
def test_docstring_says_source_reduction_and_axis(method: str) -> None:
    text = inspect.getdoc(UPDATE_RULES[method])
    assert text is not None
    assert {"Source:", "Reduces to:", "Axis:"} <= set(re.findall(r"^[A-Z][a-z ]*:", text, re.MULTILINE))
    (axis,) = re.findall(r"^Axis: ([a-z ]+)", text, re.MULTILINE)
    assert axis.startswith(AXES)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_can_be_run_on_some_task(method: str) -> None:
    settings = {key: value for key, value in REQUIRED_SETTINGS.get(method, {}).items() if key != "task"}
    accepted = []
    for task in TASKS:
        try:
            accepted.append(UpdateRuleConfig.model_validate({"method": method, "task": task, **settings}).task)
        except ValueError:
            continue
    assert accepted


def test_the_page_of_update_rules_has_every_name() -> None:
    page = Path(__file__).parents[4] / "docs" / "update_rules.md"
    named = set(re.findall(r"^\| `(\w+)`", page.read_text(encoding="utf-8"), re.MULTILINE))
    assert named == set(METHODS)
