"""The fields of the records of a step are declared columns."""

from dataclasses import fields, replace

import pytest
import torch

from trainable.ppo.phases import PhaseTimer
from trainable.ppo.step_record import (
    BatchSummary,
    Budget,
    EngineMismatch,
    FilterDecision,
    FinalEvaluation,
    RolloutSummary,
    StepRecord,
    StepTiming,
    Validation,
)
from trainable.runs.records import STEP_COLUMNS

COLUMNS = {column.name for column in STEP_COLUMNS}
RECORD_TYPES = (RolloutSummary, EngineMismatch, FilterDecision, BatchSummary, Budget, Validation)


def make_filled_record(record_type: type, value: float = 1.0) -> object:
    return record_type(**{field_definition.name: value for field_definition in fields(record_type)})


def make_record() -> StepRecord:
    collection, engine, decision, batch, budget, validation = (
        make_filled_record(record_type) for record_type in RECORD_TYPES
    )
    assert isinstance(validation, Validation)
    base_validation = replace(validation, val_kl_to_reference=None)  # the policy before training is the reference
    duration = StepTiming({"rollout": 2.0}, {"rollout": 0.5}, 1e9, 3.0, 4.0, 5.0)
    return StepRecord(
        collection,
        decision,
        0,
        budget,
        budget,
        duration,
        engine,
        batch,
        base_validation,
        validation,
        {"pg_loss": 1.0, "vf_loss": None},
        {"collapse_valid_thinking_rate": 1.0},
    )


@pytest.mark.parametrize("record_type", RECORD_TYPES)
def test_fields_are_columns(record_type: type) -> None:
    assert {field_definition.name for field_definition in fields(record_type)} <= COLUMNS


def test_the_columns_of_a_record_are_declared() -> None:
    row = make_record().to_row()
    assert set(row) <= COLUMNS
    assert {"pg_loss", "collapse_valid_thinking_rate", "base_val_success", "total_env_steps"} <= set(row)
    assert "vf_loss" not in row  # a value that was not measured
    assert row["tokens_per_second"] == 0.5


def test_values_that_were_not_measured_have_no_column() -> None:
    empty = replace(
        make_record(), batch=None, update={}, engine_mismatch=None, validation=None, base_validation=None, collapse={}
    )
    row = empty.to_row()
    names = {
        field_definition.name
        for record_type in (BatchSummary, EngineMismatch, Validation)
        for field_definition in fields(record_type)
    }
    assert names & set(row) == {"trained_tokens"}  # the budget has this column too
    assert not any(name.startswith(("base_", "collapse_")) for name in row)
    assert None not in replace(make_record(), batch=replace(make_record().batch, value_mean=None)).to_row().values()


def test_totals_add_up() -> None:
    assert Budget(1, 2, 3, 4).add(Budget(10, 20, 30, 40)) == Budget(11, 22, 33, 44)


def test_the_final_evaluation_adds_its_columns_and_its_time() -> None:
    row = {"seconds_step": 1.0, "seconds_total": 2.0, "cpu_seconds_step": 3.0, "val_success": 0.5}
    final_row = FinalEvaluation(0.25, 0.75, None, seconds=10.0, cpu_seconds=20.0).add_to_row(row)
    assert final_row == {
        "val_success": 0.5,
        "val_greedy_success": 0.25,
        "test_success": 0.75,
        "test_greedy_success": None,
        "seconds_validation": 10.0,
        "seconds_step": 11.0,
        "seconds_total": 12.0,
        "cpu_seconds_step": 23.0,
    }


def test_a_phase_that_comes_twice_adds_up_and_is_counted_when_it_fails() -> None:
    phases = PhaseTimer(torch.device("cpu"))
    with phases.measure("values"):
        pass
    first_seconds = phases.seconds["values"]
    with pytest.raises(ZeroDivisionError), phases.measure("values"):
        1 / 0  # noqa: B018 - raises on purpose
    assert phases.seconds["values"] > first_seconds > 0
    assert set(phases.seconds) == {"values"}
