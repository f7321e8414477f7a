"""Tests of when gradients are analyzed, on which batch, with which lines, and that nothing else changes."""

import numpy as np
import pytest
import torch

from tests.fakes.scripted import make_small_config
from tests.fakes.trainers import copy_weights, drop_times, has_changed, has_same_weights, make_quiet_trainer
from tests.trainable.diagnostics.test_gradient_probe import (
    ANALYSIS,
    GROUPS,
    SIZE,
    make_trained_trainer,
    make_untrained_trainer,
)
from trainable.diagnostics.gradient_analysis import analyze_gradients
from trainable.runs.records import GRADIENT_COLUMNS

SMALL = {**ANALYSIS, "trainer__gradient_analysis_env_groups": 2, "trainer__gradient_analysis_group_size": 2}


@pytest.mark.long
def test_rows_say_what_was_measured_and_how() -> None:
    trainer = make_quiet_trainer(**SMALL, actor__kl_loss_type="mse", trainer__gradient_analysis_sketch=1024)
    rows = {row["component"]: row for row in analyze_gradients(trainer, [])[0]["rows"]}
    assert {name: (row["form"], row["coefficient"]) for name, row in rows.items()} == {
        "task": ("gae", 1.0),
        "entropy": (None, 0.1),
        "kl": ("mse", 0.5),
        "total": (None, None),
    }
    assert {(row["bucket_mode"], row["sketch"]) for row in rows.values()} == {("quantile", 1024)}


@pytest.mark.long
def test_an_analysis_leaves_weights_optimizers_gradients_and_streams_alone() -> None:
    trainer = make_trained_trainer(**{name: value for name, value in SMALL.items() if "mode" not in name})
    old_weights, old_budget = copy_weights(trainer), trainer.total_budget
    torch_state, numpy_state = torch.random.get_rng_state(), np.random.get_state()[1].copy()  # type: ignore[index,union-attr]  # noqa: NPY002
    analyze_gradients(trainer, [])
    assert not has_changed(trainer, old_weights, "")
    assert trainer.total_budget == old_budget
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
    assert torch.equal(torch.random.get_rng_state(), torch_state)
    assert np.array_equal(np.random.get_state()[1], numpy_state)  # type: ignore[index]  # noqa: NPY002


@pytest.mark.long
def test_training_is_the_same_with_and_without_analyses() -> None:
    analyzing_trainer, plain_trainer = make_quiet_trainer(**SMALL), make_untrained_trainer()
    for step in (1, 2, 3):
        analyzed_step, plain_step = analyzing_trainer.step(), plain_trainer.step()
        assert drop_times(analyzed_step.row) == drop_times(plain_step.row)
        assert bool(analyzed_step.gradients) == (step in (1, 3)) == ("seconds_gradient_analysis" in analyzed_step.row)
    assert has_same_weights(analyzing_trainer, plain_trainer)


@pytest.mark.long
def test_the_lines_have_the_columns_and_no_number_that_json_lacks() -> None:
    lines = make_quiet_trainer(**SMALL).step().gradients
    kinds = [(line["step"], line["source"], line["prefilter"]) for line in lines]
    assert kinds == [(1, "train", True), (1, "train", False)]
    columns = {column.name for column in GRADIENT_COLUMNS} - {"source", "prefilter"}
    for line in lines:
        for row in line["rows"]:
            assert set(row) <= columns
            assert columns - set(row) <= {"norm", "norm_per_sample", "norm_per_token"}
            assert all(np.isfinite(value) for value in row.values() if isinstance(value, float))
        assert {row["source_env_groups"] for row in line["rows"]} == {2}
        assert not any(row["uses_training_batch"] for row in line["rows"])
        assert len({row["group"] for row in line["groups"]}) == len(line["groups"])


@pytest.mark.long
@pytest.mark.parametrize("prefilter", [True, False])
def test_a_filter_that_keeps_nothing_has_a_row(prefilter: bool) -> None:
    settings = {"trainer__gradient_analysis_log_prefilter": prefilter, "filter__rollout_filter_include_zero": False}
    trainer = make_trained_trainer(**settings)
    episodes = trainer.roll_out((trainer.val_levels * GROUPS)[:GROUPS], SIZE, "gradient_sampling")
    equal_episodes = [episode._replace(turn_rewards=[0.0] * len(episode.turn_rewards)) for episode in episodes]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "roll_out", lambda *_: equal_episodes)
        *prefilter_lines, filtered_line = analyze_gradients(trainer, [])
    assert [line["prefilter"] for line in prefilter_lines] == [True] * prefilter
    (row,) = filtered_line["rows"]
    assert (row["empty_after_filter"], row["sample_count"], row["source_groups_kept"]) == (1, 0, 0)
    assert (row["source_zero_std_groups"], row["source_batch_size"]) == (GROUPS, GROUPS * SIZE)
    assert filtered_line["groups"] == []
    assert {row["empty_after_filter"] for line in prefilter_lines for row in line["rows"]} <= {0}


@pytest.mark.long
def test_the_training_batch_is_used_where_no_other_is_configured() -> None:
    lines = make_quiet_trainer(**{**ANALYSIS, "trainer__gradient_analysis_env_groups": None}).step().gradients
    for line in lines:
        assert all(row["uses_training_batch"] and row["source_env_groups"] == 2 for row in line["rows"])
    assert len(lines[0]["groups"]) == 2


@pytest.mark.parametrize(("every", "expected"), [(1, [1, 2, 3, 4]), (2, [1, 3]), (50, [1])])
def test_an_analysis_is_due_at_the_first_step_and_every_so_many(every: int, expected: list[int]) -> None:
    settings = make_small_config(**{**ANALYSIS, "trainer__gradient_analysis_every": every}).trainer
    assert [step for step in range(1, 5) if settings.is_gradient_analysis_step(step)] == expected


@pytest.mark.long
def test_a_run_that_only_analyzes_trains_nothing_and_ends_after_the_first_step() -> None:
    only = {"trainer__gradient_analysis_only": True, "trainer__exit_after_gradient_analysis": True}
    trainer = make_quiet_trainer(**SMALL, **only)
    assert trainer.config.trainer.total_training_steps == 1
    old_weights = copy_weights(trainer)
    result = trainer.step()
    assert result.gradients
    assert result.row["optimizer_steps"] == 0
    assert not has_changed(trainer, old_weights, "")
