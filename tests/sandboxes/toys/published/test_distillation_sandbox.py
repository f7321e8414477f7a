"""Tests of the published numbers of distillation; `test_published` tests that they stay as they were recorded."""

import math
from collections import Counter

import pytest

from sandboxes.distillation.family import TRIAL_COLUMNS
from sandboxes.distillation.settings import DistillationConfig
from sandboxes.toys.published.cells import MEAN_ALONE, NO_EXPECTATION, NOT_DISTINGUISHABLE, PER_SEED
from sandboxes.toys.published.distillation_sandbox import CELLS, STUDY_SETTINGS, make_conditions
from search_spaces.catalog import STUDIES
from trainable.config.run_config import apply_overrides

NUMBERS = {(cell.studies[0], cell.arm, cell.column): (cell.mean, cell.std) for cell in CELLS}


def test_every_number_is_recorded_once() -> None:
    assert len(CELLS) == len(NUMBERS)
    assert Counter(cell.kind for cell in CELLS) == {PER_SEED: 156, MEAN_ALONE: 35}
    assert all(math.isnan(cell.std) == (cell.kind == MEAN_ALONE) for cell in CELLS)


def test_a_change_since_the_switch_is_the_difference_of_two_printed_errors() -> None:
    arms = [arm for _, arm, column in NUMBERS if column == "switch_test_error"]
    assert len(arms) == 10
    for arm in arms:
        final_error, switch_error, change = (
            NUMBERS["opd-warmup", arm, column][0]
            for column in ("final_test_error", "switch_test_error", "error_since_switch")
        )
        assert final_error - switch_error == pytest.approx(change, abs=1.5e-4)


def test_cells_are_of_recorded_columns_and_expectations_have_reasons() -> None:
    columns = {column.name for column in TRIAL_COLUMNS}
    for cell in CELLS:
        assert cell.column in columns
        assert cell.n == 3
        assert cell.expected_verdict == (NO_EXPECTATION if cell.rationale else NOT_DISTINGUISHABLE)
        assert cell.conditions == make_conditions(cell.studies[0], cell.arm)
    assert {cell.arm for cell in CELLS if cell.rationale} == {
        "full_vocab_rkl",
        "T1.0_full",
        "T0.5_full",
        "k4_warm200",
        "k4_warm250",
        *(f"k8_warm{warmup}" for warmup in range(0, 300, 50)),
    }


@pytest.mark.parametrize("name", STUDY_SETTINGS)
def test_our_arms_have_the_settings_of_the_published_ones(name: str) -> None:
    """Our studies have further arms; of the published ones, every setting that changes a number is compared."""
    study, field_names = STUDIES[name], set(DistillationConfig.model_fields) - {"trainer", "seed"}
    published = {cell.arm: cell.conditions for cell in CELLS if cell.studies == (name,)}
    assert set(published) <= set(study.axis.named_settings)
    for arm, settings in published.items():
        assert settings.keys() == field_names | {"trainer.total_training_steps", "trainer.test_freq"}
        config = apply_overrides(
            DistillationConfig(), {**study.fixed_settings, **study.axis.named_settings[arm]}
        ).model_dump()
        ours = config | {f"trainer.{key}": value for key, value in config["trainer"].items()}
        assert {key: ours[key] for key in settings} == settings, arm
