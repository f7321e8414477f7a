"""The step of the sandbox on a task small enough to follow: order, rhythm, ends, states."""

import math
from typing import Any

import pytest
import torch

from tests.trainable.sandbox.tabular import TabularTask, next_rows
from trainable.runs.run import TrainerState
from trainable.sandbox.config.settings import UpdateRuleConfig
from trainable.sandbox.measure.records import STEP_COLUMNS, TIME_COLUMNS
from trainable.sandbox.rules.catalog import UPDATE_RULES
from trainable.sandbox.training.trainer import UpdateRuleTrainer

Rows = dict[int, list[dict[str, Any]]]
TIMES = {column.name for column in TIME_COLUMNS}
ALL_MEASURES = {"diagnostics": True, "entropy_diagnostics": True, "oracle_fit": True}


def config(steps: int = 12, test_freq: int = 5, **settings: Any) -> UpdateRuleConfig:
    runner = {"total_training_steps": steps, "test_freq": test_freq}
    return UpdateRuleConfig(**{"batch_size": 16, "lr": 0.05, "trainer": runner, **settings})


def trainer(settings: UpdateRuleConfig, seeds: tuple[int, ...] = (0, 1, 2), **task: Any) -> UpdateRuleTrainer:
    return UpdateRuleTrainer(settings, seeds, TabularTask(settings, **task), UPDATE_RULES[settings.method])


def timeless(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in TIMES}


def run(one: UpdateRuleTrainer) -> Rows:
    """The rows of every member to its end, without times."""
    rows: Rows = {seed: [] for seed in one.seeds}
    while one.seeds:
        for seed, row in next_rows(one).rows.items():
            rows[seed].append(timeless(row))
    return rows


def weights(one: UpdateRuleTrainer, seed: int) -> torch.Tensor:
    state = one.final_states[seed] if seed in one.final_states else one.get_state(seed)
    return state.tensors["adam/weights"]


def test_rows_are_the_evaluations_before_the_update_of_their_step_and_one_at_the_end() -> None:
    one = trainer(config(**ALL_MEASURES))
    rows = run(one)
    assert all([row["step"] for row in rows[seed]] == [0, 5, 10, 12] for seed in (0, 1, 2))
    columns = {column.name for column in STEP_COLUMNS}
    for row in rows[0]:
        assert set(row) <= columns | {"step"}
    first, *_, last = rows[0]
    assert first["importance_ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert {
        "loss",
        "reward",
        "gate_mean",
        "cos_method_ce",
        "batch_delta_entropy",
        "oracle_fit_gate_correlation",
    } <= set(first)
    assert "cos_method_ce" not in rows[0][1]
    assert set(last) == {"step", "test_error", "entropy"}
    fresh = trainer(config())
    untrained = fresh.task.evaluate(fresh.learner.models, fresh.rngs, 0)
    assert first["entropy"] == pytest.approx(untrained["entropy"].tolist()[0])


def test_two_runs_of_one_configuration_are_one() -> None:
    settings = config(delay=1, replay_capacity=4, method="FreshDG", **ALL_MEASURES)
    assert run(trainer(settings)) == run(trainer(settings))


def test_it_learns() -> None:
    for method in ("CE", "DG", "REINFORCE"):
        rows = run(trainer(config(steps=150, test_freq=150, method=method, batch_size=32)))
        assert [rows[seed][-1]["test_error"] for seed in (0, 1, 2)] == [0, 0, 0], method


@pytest.mark.parametrize("measures", [ALL_MEASURES, {"trainer": {"total_training_steps": 12, "test_freq": 1}}])
def test_measuring_does_not_change_training(measures: dict[str, Any]) -> None:
    plain, measured = trainer(config()), trainer(config(**measures))
    run(plain)
    run(measured)
    assert all(torch.equal(weights(plain, seed), weights(measured, seed)) for seed in (0, 1, 2))


@pytest.mark.parametrize("method", ["DG", "REINFORCE", "GRPO", "TEMPO", "Kondo", "PG", "CE"])
def test_a_member_is_what_it_is_alone(method: str) -> None:
    settings = config(method=method, inner_epochs=2, delay=1)
    together = trainer(settings)
    run(together)
    for seed in (0, 1, 2):
        alone = trainer(settings, (seed,))
        run(alone)
        torch.testing.assert_close(weights(alone, seed), weights(together, seed), rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------------------- delay and replay


def test_replay_of_capacity_delay_plus_one_is_delay() -> None:
    delayed = trainer(config(delay=3))
    replayed = trainer(config(delay=3, replay_capacity=4, method="ReplayDG"))
    rows, others = run(delayed), run(replayed)
    assert all(torch.equal(weights(delayed, seed), weights(replayed, seed)) for seed in (0, 1, 2))
    assert [row["step"] for row in rows[0]] == [3, 8, 12]
    assert [row["age_mean"] for row in others[0]] == [pytest.approx(0.75), 3, 3]
    assert (others[0][0]["replay_age"], others[0][0]["replay_size"]) == (3, 4)
    assert "replay_age" not in rows[0][0]


def test_a_delayed_update_is_of_the_batch_that_was_sampled_before() -> None:
    """Two updates on fresh batches, and from step 2 on one with the batch of the first step: written out with Adam."""
    settings = config(steps=3, delay=2, method="REINFORCE")
    one = trainer(settings, (5,))
    sampled = []
    for step in range(3):
        sampled.append(one.task.sample(one.learner.models, one.rngs, step))
        before = weights(one, 5)
        other = trainer(settings, (5,))
        other.load_states([one.get_state(5)])
        one.step()
        trained_on = sampled[0] if step == 2 else sampled[step]
        log_probs = other.task.compute_log_probs(other.learner.models, trained_on)
        gradient = other.learner.optimizer.compute_gradient(other.objective(trained_on, log_probs, settings).loss)
        other.learner.optimizer.step(gradient * (1 / (gradient.norm() + 1e-6)).clamp(max=1))
        assert torch.equal(weights(one, 5), weights(other, 5))
        assert not torch.equal(weights(one, 5), before)


def test_members_draw_batches_of_their_own_ages() -> None:
    rows = run(trainer(config(steps=30, replay_capacity=8, method="ReplayDG", replay_priority="uniform")))
    ages = [tuple(rows[seed][place]["replay_age"] for seed in (0, 1, 2)) for place in range(3, 6)]
    assert any(len(set(three)) > 1 for three in ages)


def test_effective_age_counts_a_batch_as_much_as_the_loss_does() -> None:
    settings = {
        "replay_capacity": 8,
        "replay_priority": "uniform",
        "replay_age_decay": 0.5,
        "steps": 30,
        "test_freq": 10,
    }
    plain, fresh = (run(trainer(config(method=method, **settings))) for method in ("ReplayDG", "FreshDG"))
    for row in plain[0]:
        assert row["effective_age"] == pytest.approx(row["age_mean"])
    assert fresh[0][1]["effective_age"] < fresh[0][1]["age_mean"]
    assert [row["age_mean"] for row in plain[0]] == [row["age_mean"] for row in fresh[0]]


# ---------------------------------------------------------------------------- ends


def grouped(**settings: Any) -> UpdateRuleConfig:
    return config(method="GRPO", group_size=4, fallback_patience=3, **settings)


def test_a_member_without_mixed_groups_ends_and_the_others_go_on_as_without_it() -> None:
    one = trainer(grouped(), uniform_from={1: 4})
    rows = run(one)
    assert [row["step"] for row in rows[1]] == [0, 5, 6]
    stop = {name: rows[1][-1][name] for name in ("stop_rule", "stop_value", "stop_threshold", "stop_step")}
    assert stop == {"stop_rule": "uniform_groups", "stop_value": 3.0, "stop_threshold": 3.0, "stop_step": 6}
    assert "loss" not in rows[1][-1]
    assert [row["step"] for row in rows[0]] == [0, 5, 10, 12]
    assert (one.final_states[1].values["step"], one.final_states[0].values["step"]) == (6, 12)
    others = trainer(grouped(), (0, 2))
    wanted = run(others)
    for seed in (0, 2):
        torch.testing.assert_close(weights(one, seed), weights(others, seed), rtol=1e-5, atol=1e-5)
        assert [row.keys() for row in rows[seed]] == [row.keys() for row in wanted[seed]]


def test_the_ages_of_the_others_are_counted_through_the_end_of_one() -> None:
    settings = grouped(replay_capacity=8, replay_priority="uniform")
    rows = run(trainer(settings, uniform_from={1: 0}))
    assert [row["step"] for row in rows[1]] == [0, 2]
    wanted = run(trainer(settings, (0, 2)))
    for name in ("age_mean", "age_std", "effective_age"):
        for seed in (0, 2):
            assert [row[name] for row in rows[seed]] == [row[name] for row in wanted[seed]]


def test_a_member_that_ended_has_the_weights_of_its_last_update() -> None:
    one = trainer(grouped(), uniform_from={1: 4})
    run(one)
    six = trainer(grouped(steps=6), uniform_from={1: 4})
    while six.step_index < 6:
        six.step()
    assert torch.equal(weights(one, 1), weights(six, 1))


def test_an_end_at_an_evaluation_writes_one_row() -> None:
    rows = run(trainer(grouped(), uniform_from={1: 3}))
    assert [row["step"] for row in rows[1]] == [0, 5]
    assert rows[1][-1]["stop_rule"] == "uniform_groups"


def test_mixed_batches_in_between_start_the_count_again() -> None:
    class Alternating(TabularTask):
        def _grouped(self, batch: Any, seeds: Any, step: int, each: int) -> Any:
            self.uniform_from = {} if step % 3 == 0 else {1: 0}
            return super()._grouped(batch, seeds, step, each)

    settings = grouped()
    one = UpdateRuleTrainer(settings, (0, 1), Alternating(settings), UPDATE_RULES["GRPO"])
    rows = run(one)
    assert "stop_rule" not in rows[1][-1]
    assert rows[1][1]["group_fallback"] == 1


def test_all_members_may_end_at_once() -> None:
    one = trainer(grouped(), uniform_from={0: 0, 1: 0, 2: 0})
    rows = run(one)
    assert all(rows[seed][-1]["stop_step"] == 2 for seed in (0, 1, 2))
    assert next_rows(one).rows == {}


def test_a_member_whose_numbers_are_not_finite_leaves_and_harms_nobody() -> None:
    one = trainer(config(), broken_at={1: 5})
    next_rows(one)
    progress = next_rows(one)
    assert progress.failures == {1: "loss or gradient of step 5 was not finite"}
    assert set(progress.rows) == {0, 2}
    assert one.seeds == (0, 2)
    rows = run(one)
    whole = trainer(config(), (0, 2))
    run(whole)
    assert [row["step"] for row in rows[0]] == [10, 12]
    assert 1 not in one.final_states
    for seed in (0, 2):
        assert all(math.isfinite(value) for value in rows[seed][-1].values())
        torch.testing.assert_close(weights(one, seed), weights(whole, seed), rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------------------- states


@pytest.mark.parametrize(
    ("settings", "uniform_from"),
    [
        ({"method": "FreshDG", "replay_capacity": 5, "delay": 2}, {}),
        ({"method": "GRPO", "inner_epochs": 2}, {}),
        ({"delay": 3}, {}),
        ({"method": "GRPO", "fallback_patience": 3, "replay_capacity": 2}, {1: 4}),
    ],
)
def test_a_run_that_was_taken_up_again_is_the_one_that_went_through(
    settings: dict[str, Any], uniform_from: dict[int, int]
) -> None:
    straight = trainer(config(**settings), uniform_from=uniform_from)
    rows = run(straight)
    for cut in (1, 4, 7, 12):
        first = trainer(config(**settings), uniform_from=uniform_from)
        written: Rows = {0: [], 1: [], 2: []}
        while first.step_index < cut:
            for seed, row in first.step().rows.items():
                written[seed].append(timeless(row))
        again = trainer(config(**settings), uniform_from=uniform_from)
        again.load_states([first.get_state(seed) for seed in first.seeds])
        later = run(again)
        assert {seed: [*written[seed], *later.get(seed, [])] for seed in rows} == rows
        assert all(torch.equal(weights(again, seed), weights(straight, seed)) for seed in again.final_states)


def test_members_that_were_trained_apart_can_go_on_together() -> None:
    states: list[TrainerState] = []
    for seed in (2, 0):
        alone = trainer(config(delay=2), (seed,))
        while alone.step_index < 6:
            alone.step()
        states.append(alone.get_state(seed))
    together = trainer(config(delay=2), (0, 2))
    together.load_states(states)
    assert together.seeds == (2, 0)
    run(together)
    wanted = trainer(config(delay=2))
    run(wanted)
    for seed in (0, 2):
        torch.testing.assert_close(weights(together, seed), weights(wanted, seed), rtol=1e-5, atol=1e-5)


def test_states_of_different_steps_do_not_go_together() -> None:
    one = trainer(config())
    first = one.get_state(0)
    one.step()
    with pytest.raises(ValueError, match=r"from the steps \[0, 1\], but members"):
        one.load_states([first, one.get_state(1)])


def test_seeds_are_different_ones() -> None:
    with pytest.raises(ValueError, match="different"):
        trainer(config(), (1, 1))
