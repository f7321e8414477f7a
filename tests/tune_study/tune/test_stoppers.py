"""The stop rules as Stoppers: they follow the decision of a run, and decide themselves for a foreign Trainable."""

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainable.config.sections import EarlyStopConfig
from trainable.runs.records import make_empty_row
from trainable.runs.stop_rules import RULES
from tune_study.host.interrupt import Interrupt
from tune_study.tune.stoppers import RuleStopper, make_interrupt_stopper


def make_own_result(step: int, rule: str = "", **columns: Any) -> dict[str, Any]:
    """Make a result of a run of this project, which states whether a rule has stopped it."""
    return {**make_empty_row(), "run_id": "a", "step": step, "training_iteration": step, "stop_rule": rule, **columns}


def make_foreign_result(step: int, std: float, **columns: Any) -> dict[str, Any]:
    """Make a result of a foreign Trainable."""
    return {"training_iteration": step, "reward_std": std, **columns}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("decided_rule", ["", *RULES])
def test_what_a_run_has_decided_is_obeyed(rule: str, decided_rule: str) -> None:
    """The numbers do not matter, so that Ray Tune never disagrees with the row on disk."""
    assert RuleStopper(rule)("trial", make_own_result(20, decided_rule, reward_std=0.0, groups_kept=0)) == (
        decided_rule == rule
    )


@pytest.mark.parametrize("steps", [range(1, 21), [*range(1, 16), *range(12, 21)]], ids=["once", "repeated"])
def test_a_foreign_trial_ends_at_the_step_at_which_the_rule_fires(steps: Sequence[int]) -> None:
    """A step that is repeated counts once. Trials are watched apart, and the experiment goes on."""
    stopper = RuleStopper("reward_variance_collapse")
    for step in steps:
        assert stopper("a", make_foreign_result(step, 2.0 if step <= 10 else 0.1)) == (step == 20)
        assert not stopper("b", make_foreign_result(step, 2.0))
        assert not stopper.stop_all()


def test_a_filter_that_keeps_nothing_is_heeded() -> None:
    stopper = RuleStopper("empty_filtered_steps", EarlyStopConfig(empty_stop_steps=2))
    assert not stopper("trial", make_foreign_result(1, 2.0, groups_kept=0))
    assert not stopper("trial", make_foreign_result(2, 2.0))  # without this entry nothing is filtered
    assert not stopper("trial", make_foreign_result(3, 2.0, groups_kept=0))
    assert stopper("trial", make_foreign_result(4, 2.0, groups_kept=0))


def test_an_alarm_watches_any_of_its_columns_under_any_name() -> None:
    settings = EarlyStopConfig(alarm="entropy > 2, 2 times in a row")
    stopper = RuleStopper("alarm", settings)
    values = (3.0, 1.0, 3.0, 3.0)
    results = [{"training_iteration": step, "entropy": value} for step, value in enumerate(values, 1)]
    assert [stopper("trial", result) for result in results] == [False, False, False, True]
    stopper = RuleStopper("alarm", settings, {"entropy": "policy/entropy"})
    results = [
        {"training_iteration": step, "policy/entropy": value, "entropy": 0.0} for step, value in enumerate(values, 1)
    ]
    assert [stopper("trial", result) for result in results] == [False, False, False, True]
    assert not RuleStopper("alarm")("trial", {"training_iteration": 1, "entropy": 3.0})


def test_it_is_stored_with_the_rows_of_the_trials_that_go_on() -> None:
    stopper = RuleStopper("reward_variance_collapse")
    for step in range(1, 20):
        assert not stopper("a", make_foreign_result(step, 2.0 if step <= 10 else 0.1))
        assert not stopper("b", make_foreign_result(step, 2.0, done=step == 19))
    restored_stopper = pickle.loads(pickle.dumps(stopper))
    assert list(restored_stopper._rows) == ["a"]
    assert restored_stopper("a", make_foreign_result(20, 0.1))
    assert not restored_stopper._rows


def test_a_rule_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="Unknown stop rule `colapse`: choose from reward_variance_collapse"):
        RuleStopper("colapse")


@given(
    st.lists(
        st.dictionaries(
            st.sampled_from(["training_iteration", "reward_std", "groups_kept", "val_success", "done"]),
            st.one_of(st.none(), st.text(max_size=3), st.floats(), st.integers(), st.just([]), st.booleans()),
        ),
        max_size=12,
    )
)
def test_odd_results_never_raise(results: list[dict[str, Any]]) -> None:
    for rule in RULES:
        stopper = RuleStopper(rule, EarlyStopConfig(alarm="reward_std < 1 x"))
        for result in results:
            stopper("trial", result)


def test_an_interrupt_ends_a_run_at_its_next_row_with_a_state(tmp_path: Path) -> None:
    interrupt = Interrupt(tmp_path / ".interrupt")
    stopper = make_interrupt_stopper(interrupt)
    assert not stopper("trial", make_own_result(1, saved=False))
    interrupt.request()
    assert not stopper("trial", make_own_result(2, saved=False))  # this result was sent before the request
    assert stopper("trial", make_own_result(3, saved=True))
    assert stopper("trial", make_own_result(4))  # a Trainable that does not report checkpoints
    (tmp_path / ".interrupt").unlink()
    assert stopper("trial", make_own_result(5, saved=False))  # a run that cannot see the request would never end
    assert not stopper.stop_all()
