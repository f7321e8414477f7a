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


def test_cells_are_of_recorded_columns_and_expectations_have_reasons() -> None:
    columns = {column.name for column in TRIAL_COLUMNS}
    assert Counter(cell.kind for cell in CELLS) == {PER_SEED: 156, MEAN_ALONE: 35}
    for cell in CELLS:
        assert math.isnan(cell.std) == (cell.kind == MEAN_ALONE)
        assert cell.column in columns
        assert cell.n == 3
        assert cell.expected_verdict == (NO_EXPECTATION if cell.rationale else NOT_DISTINGUISHABLE)
        assert cell.conditions == make_conditions(cell.studies[0], cell.arm)
    arms = {"full_vocab_rkl", "T1.0_full", "T0.5_full", "k4_warm200", "k4_warm250"}
    arms |= {f"k8_warm{warmup}" for warmup in range(0, 300, 50)}
    assert {cell.arm for cell in CELLS if cell.rationale} == arms


@pytest.mark.parametrize("name", STUDY_SETTINGS)
def test_our_arms_have_the_settings_of_the_published_ones(name: str) -> None:
    """Our studies have further arms; of the published ones, every setting that changes a number is compared."""
    study, field_names = STUDIES[name], set(DistillationConfig.model_fields) - {"trainer", "seed"}
    published = {cell.arm: cell.conditions for cell in CELLS if cell.studies == (name,)}
    assert set(published) <= set(study.axis.named_settings)
    for arm, settings in published.items():
        assert settings.keys() == field_names | {"trainer.total_training_steps", "trainer.test_freq"}
        overrides = {**study.fixed_settings, **study.axis.named_settings[arm]}
        config = apply_overrides(DistillationConfig(), overrides).model_dump()
        ours = config | {f"trainer.{key}": value for key, value in config["trainer"].items()}
        assert {key: ours[key] for key in settings} == settings, arm
