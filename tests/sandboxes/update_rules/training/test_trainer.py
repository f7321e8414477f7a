"""Tests of the trainer of the sandbox, mostly on a small task: order of a step, evaluations, ends and states."""

import math
from typing import Any

import pytest
import torch

from sandboxes.toys.ensemble import EnsembleTrainer
from sandboxes.update_rules.config.settings import UpdateRuleConfig
from sandboxes.update_rules.family import STEP_COLUMNS
from sandboxes.update_rules.training.make import UPDATE_RULES, make_task_trainer
from sandboxes.update_rules.training.make import make_trainer as make_real_trainer
from tests.fakes.ensembles import Rows, drop_times, run_ensemble
from tests.sandboxes.update_rules.tabular import TabularTask, train_to_next_rows

ALL_MEASURES = {"diagnostics": True, "entropy_diagnostics": True, "oracle_fit": True}


def make_config(steps: int = 12, test_freq: int = 5, **settings: Any) -> UpdateRuleConfig:
    trainer_settings = {"total_training_steps": steps, "test_freq": test_freq}
    return UpdateRuleConfig(**{"batch_size": 16, "lr": 0.05, "trainer": trainer_settings, **settings})


def make_trainer(
    settings: UpdateRuleConfig, seeds: tuple[int, ...] = (0, 1, 2), **task_options: Any
) -> EnsembleTrainer:
    return make_task_trainer(settings, seeds, TabularTask(settings, **task_options), UPDATE_RULES[settings.method])


def get_weights(trainer: EnsembleTrainer, seed: int) -> torch.Tensor:
    state = trainer.final_states[seed] if seed in trainer.final_states else trainer.get_state(seed)
    return state.tensors["adam/weights"]


def test_rows_are_the_evaluations_before_the_update_of_their_step_and_one_at_the_end() -> None:
    trainer = make_trainer(make_config(**ALL_MEASURES))
    rows = run_ensemble(trainer)
    assert all([row["step"] for row in rows[seed]] == [0, 5, 10, 12] for seed in (0, 1, 2))
    columns = {column.name for column in STEP_COLUMNS}
    for row in rows[0]:
        assert set(row) <= columns | {"step"}
    first, *_, last = rows[0]
    assert first["importance_ratio_mean"] == pytest.approx(1, abs=1e-5)
    measures = {"cos_method_ce", "batch_delta_entropy", "oracle_fit_gate_correlation"}
    assert {"loss", "reward", "gate_mean"} | measures <= set(first)
    assert "cos_method_ce" not in rows[0][1]
    assert set(last) == {"step", "test_error", "entropy"}
    untrained = make_trainer(make_config()).algorithm
    metrics = untrained.task.evaluate(untrained.models, untrained.rngs, 0)
    assert first["entropy"] == pytest.approx(metrics["entropy"].tolist()[0])


@pytest.mark.long
def test_a_rule_learns_the_task_and_cross_entropy_learns_to_reverse() -> None:
    rows = run_ensemble(make_trainer(make_config(steps=150, test_freq=150, method="DG", batch_size=32)))
    assert [rows[seed][-1]["test_error"] for seed in (0, 1, 2)] == [0, 0, 0]
    settings = {**TINY, "task": "token_reversal", "method": "CE", "lr": 1e-2, "batch_size": 32, "seq_len": 3}
    for first, last in run_ensemble(make_real_trainer(make_config(60, 60, **settings), (0, 1))).values():
        assert first["test_error"] > 0.3
        assert last["test_error"] < 0.02


@pytest.mark.parametrize("measures", [ALL_MEASURES, {"trainer": {"total_training_steps": 12, "test_freq": 1}}])
def test_measuring_does_not_change_training(measures: dict[str, Any]) -> None:
    plain_trainer, measured_trainer = make_trainer(make_config()), make_trainer(make_config(**measures))
    run_ensemble(plain_trainer)
    run_ensemble(measured_trainer)
    assert all(torch.equal(get_weights(plain_trainer, seed), get_weights(measured_trainer, seed)) for seed in (0, 1, 2))


@pytest.mark.parametrize("method", ["DG", "GRPO", "Kondo", "CE"])
def test_a_member_has_the_weights_that_it_has_alone(method: str) -> None:
    settings = make_config(method=method, inner_epochs=2, delay=1)
    ensemble, single = make_trainer(settings), make_trainer(settings, (1,))
    run_ensemble(ensemble)
    run_ensemble(single)
    torch.testing.assert_close(get_weights(single, 1), get_weights(ensemble, 1), rtol=1e-5, atol=1e-5)


def test_replay_of_capacity_delay_plus_one_is_delay() -> None:
    delayed = make_trainer(make_config(delay=3))
    replayed = make_trainer(make_config(delay=3, replay_capacity=4, method="ReplayDG"))
    rows, replayed_rows = run_ensemble(delayed), run_ensemble(replayed)
    assert all(torch.equal(get_weights(delayed, seed), get_weights(replayed, seed)) for seed in (0, 1, 2))
    assert [row["step"] for row in rows[0]] == [3, 8, 12]
    assert [row["age_mean"] for row in replayed_rows[0]] == [pytest.approx(0.75), 3, 3]
    assert (replayed_rows[0][0]["replay_age"], replayed_rows[0][0]["replay_size"]) == (3, 4)
    assert "replay_age" not in rows[0][0]


def test_a_delayed_update_is_of_the_batch_that_was_sampled_before() -> None:
    """The first two updates use fresh batches, and step 2 uses the batch of step 0. The test calls Adam itself."""
    settings = make_config(steps=3, delay=2, method="REINFORCE")
    trainer = make_trainer(settings, (5,))
    batches = []
    for step in range(3):
        algorithm = trainer.algorithm
        batches.append(algorithm.task.sample(algorithm.models, algorithm.rngs, step))
        old_weights = get_weights(trainer, 5)
        reference_trainer = make_trainer(settings, (5,))
        reference_trainer.load_states([trainer.get_state(5)])
        trainer.step()
        batch = batches[0] if step == 2 else batches[step]
        reference = reference_trainer.algorithm
        log_probs = reference.task.compute_logits(reference.models, batch).log_softmax(-1)
        optimizer = reference.optimizer
        gradient = optimizer.compute_gradient(reference.objective(batch, log_probs, settings).loss)
        optimizer.step(gradient * (1 / (gradient.norm() + 1e-6)).clamp(max=1))
        assert torch.equal(get_weights(trainer, 5), get_weights(reference_trainer, 5))
        assert not torch.equal(get_weights(trainer, 5), old_weights)


def test_effective_age_counts_a_batch_as_much_as_the_loss_does() -> None:
    settings = {"replay_capacity": 8, "replay_priority": "uniform", "replay_age_decay": 0.5}
    replay_rows, fresh_rows = (
        run_ensemble(make_trainer(make_config(30, 10, method=method, **settings))) for method in ("ReplayDG", "FreshDG")
    )
    for row in replay_rows[0]:
        assert row["effective_age"] == pytest.approx(row["age_mean"])
    assert fresh_rows[0][1]["effective_age"] < fresh_rows[0][1]["age_mean"]
    assert [row["age_mean"] for row in replay_rows[0]] == [row["age_mean"] for row in fresh_rows[0]]


def make_grouped_config(**settings: Any) -> UpdateRuleConfig:
    return make_config(method="GRPO", group_size=4, fallback_patience=3, **settings)


def test_a_member_without_mixed_groups_ends_and_the_others_continue_unchanged() -> None:
    trainer = make_trainer(make_grouped_config(), uniform_from={1: 4})
    rows = run_ensemble(trainer)
    assert [row["step"] for row in rows[1]] == [0, 5, 6]
    stop = [rows[1][-1][f"stop_{name}"] for name in ("rule", "value", "threshold", "step")]
    assert stop == ["uniform_groups", 3.0, 3.0, 6]
    assert "loss" not in rows[1][-1]
    assert [row["step"] for row in rows[0]] == [0, 5, 10, 12]
    assert (trainer.final_states[1].values["step"], trainer.final_states[0].values["step"]) == (6, 12)
    short_trainer = make_trainer(make_grouped_config(steps=6), uniform_from={1: 4})
    while short_trainer.step_index < 6:
        short_trainer.step()
    assert torch.equal(get_weights(trainer, 1), get_weights(short_trainer, 1))
    other_trainer = make_trainer(make_grouped_config(), (0, 2))
    expected_rows = run_ensemble(other_trainer)
    for seed in (0, 2):
        torch.testing.assert_close(get_weights(trainer, seed), get_weights(other_trainer, seed), rtol=1e-5, atol=1e-5)
        assert [row.keys() for row in rows[seed]] == [row.keys() for row in expected_rows[seed]]


def test_an_end_at_an_evaluation_writes_one_row_and_all_members_may_end_at_once() -> None:
    rows = run_ensemble(make_trainer(make_grouped_config(), uniform_from={1: 3}))
    assert [row["step"] for row in rows[1]] == [0, 5]
    assert rows[1][-1]["stop_rule"] == "uniform_groups"
    trainer = make_trainer(make_grouped_config(), uniform_from={0: 0, 1: 0, 2: 0})
    rows = run_ensemble(trainer)
    assert all(rows[seed][-1]["stop_step"] == 2 for seed in (0, 1, 2))
    assert train_to_next_rows(trainer).rows == {}


def test_a_mixed_batch_resets_the_count_of_uniform_ones() -> None:
    class Alternating(TabularTask):
        def _set_groups(self, batch: Any, seeds: Any, step: int, group_size: int) -> Any:
            self.uniform_from = {} if step % 3 == 0 else {1: 0}
            return super()._set_groups(batch, seeds, step, group_size)

    settings = make_grouped_config()
    trainer = make_task_trainer(settings, (0, 1), Alternating(settings), UPDATE_RULES["GRPO"])
    rows = run_ensemble(trainer)
    assert "stop_rule" not in rows[1][-1]
    assert rows[1][1]["group_fallback"] == 1


def test_a_member_that_is_not_finite_fails_with_its_names_and_does_not_affect_the_others() -> None:
    trainer = make_trainer(make_config(), broken_at={1: 5})
    train_to_next_rows(trainer)
    progress = train_to_next_rows(trainer)
    assert progress.failures == {1: "values of step 5 were not finite: loss, gradient of logits, gradient of shift"}
    assert set(progress.rows) == {0, 2}
    assert trainer.seeds == (0, 2)
    rows = run_ensemble(trainer)
    reference_trainer = make_trainer(make_config(), (0, 2))
    run_ensemble(reference_trainer)
    assert [row["step"] for row in rows[0]] == [10, 12]
    assert 1 not in trainer.final_states
    for seed in (0, 2):
        assert all(math.isfinite(value) for value in rows[seed][-1].values())
        weights = get_weights(trainer, seed), get_weights(reference_trainer, seed)
        torch.testing.assert_close(*weights, rtol=1e-5, atol=1e-5)
    trainer = make_trainer(make_config(steps=1, test_freq=1, lr=3.4e38))
    message = "values of step 0 were not finite: weight logits, weight shift"
    assert trainer.step().failures == dict.fromkeys((0, 1, 2), message)
    assert trainer.final_states == {}


@pytest.mark.parametrize(
    ("settings", "uniform_from"),
    [
        ({"method": "FreshDG", "replay_capacity": 5, "delay": 2}, {}),
        ({"method": "GRPO", "inner_epochs": 2}, {}),
        ({"delay": 3}, {}),
        ({"method": "GRPO", "fallback_patience": 3, "replay_capacity": 2}, {1: 4}),
    ],
)
def test_a_resumed_run_equals_an_uninterrupted_one(settings: dict[str, Any], uniform_from: dict[int, int]) -> None:
    uninterrupted = make_trainer(make_config(**settings), uniform_from=uniform_from)
    rows = run_ensemble(uninterrupted)
    for stop_step in (1, 7, 12):
        first_trainer = make_trainer(make_config(**settings), uniform_from=uniform_from)
        early_rows: Rows = {0: [], 1: [], 2: []}
        while first_trainer.step_index < stop_step:
            for seed, row in first_trainer.step().rows.items():
                early_rows[seed].append(drop_times(row))
        resumed = make_trainer(make_config(**settings), uniform_from=uniform_from)
        resumed.load_states([first_trainer.get_state(seed) for seed in first_trainer.seeds])
        later_rows = run_ensemble(resumed)
        assert {seed: [*early_rows[seed], *later_rows.get(seed, [])] for seed in rows} == rows
        assert all(
            torch.equal(get_weights(resumed, seed), get_weights(uninterrupted, seed)) for seed in resumed.final_states
        )


def test_states_of_different_steps_and_equal_seeds_are_refused() -> None:
    trainer = make_trainer(make_config())
    state = trainer.get_state(0)
    trainer.step()
    with pytest.raises(ValueError, match=r"from the steps \[0, 1\], but members"):
        trainer.load_states([state, trainer.get_state(1)])
    with pytest.raises(ValueError, match="different"):
        make_trainer(make_config(), (1, 1))


TINY = {"d_model": 16, "seq_len": 4, "lr": 1e-3}


@pytest.mark.parametrize("task", ["token_reversal", "lm_bandit"])
def test_a_real_task_has_every_measure(task: str) -> None:
    config = make_config(6, 6, **TINY, **ALL_MEASURES, task=task, context_len=16)
    row = make_real_trainer(config, (0, 1)).step().rows[1]
    for name in ("cos_method_ce", "grad_norm", "batch_delta_entropy", "oracle_fit_delight_correlation"):
        assert isinstance(row[name], float), name
    assert row["importance_ratio_mean"] == pytest.approx(1, abs=1e-4)
    assert row["clip_frac"] == 0
