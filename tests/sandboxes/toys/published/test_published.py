"""Tests of the published numbers: their settings, expectations and spreads."""

import hashlib
import math
from collections import Counter
from pathlib import Path

import pytest

from sandboxes.toys.published import cells
from sandboxes.toys.published.cells import (
    DIFFERS,
    NEVER_REACHED,
    NO_EXPECTATION,
    NOT_DISTINGUISHABLE,
    PER_SEED,
    POOLED,
)
from sandboxes.toys.published.update_rule_sandbox import CELLS, STUDY_SETTINGS, make_conditions
from sandboxes.update_rules.config.settings import UpdateRuleConfig
from sandboxes.update_rules.records import STEP_COLUMNS, TRIAL_COLUMNS
from search_spaces.catalog import STUDIES
from trainable.config.run_config import apply_overrides

DIGESTS = {
    "distillation_sandbox": "68017a0ac62737f8c4e804e7c231fef4e94c26545b283942b5a0addb5be3ad84",
    "update_rule_sandbox": "0201499523e7390ca128e9267b13ae265379a48f1261c64a718d6b8c4c08b358",
}
"""SHA-256 of the recorded numbers when they were last compared with a second typing of the printed tables."""


@pytest.mark.parametrize("source", DIGESTS)
def test_recorded_numbers_stay_as_they_were_compared_with_the_printed_ones(source: str) -> None:
    content = (Path(cells.__file__).parent / f"{source}.csv").read_bytes()
    assert hashlib.sha256(content).hexdigest() == DIGESTS[source]


def test_cells_have_their_kinds_and_counts() -> None:
    assert Counter(cell.kind for cell in CELLS) == {PER_SEED: 55, POOLED: 23, NEVER_REACHED: 3}
    steps, trials = ({column.name for column in columns} for columns in (STEP_COLUMNS, TRIAL_COLUMNS))
    for cell in CELLS:
        assert cell.column in (steps if cell.kind == POOLED else trials)
        assert cell.n == (45 if cell.kind == POOLED else 3)
        assert all(cell.conditions == make_conditions(study, cell.arm) for study in cell.studies)
        assert math.isnan(cell.mean) == math.isnan(cell.std) == (cell.kind == NEVER_REACHED)


UNCOMPARED_SETTINGS = {"seed", "diagnostics", "entropy_diagnostics", "oracle_fit"}
"""Settings that differ between runs of an arm, or measure it."""
SETTINGS_OF_OTHER_TASKS = {"hidden", "mnist_folder", "model_name", "text_file", "context_len", "kl_weight"}


def test_every_setting_that_makes_a_run_what_it_is_has_a_published_value() -> None:
    field_names = set(UpdateRuleConfig.model_fields) - {"trainer"} - UNCOMPARED_SETTINGS - SETTINGS_OF_OTHER_TASKS
    trainer_settings = {"trainer.total_training_steps", "trainer.test_freq"}
    uncompared = {f"trainer.{name}" for name in (*UpdateRuleConfig.unhashed_settings["trainer"], "n_gpus_per_node")}
    trainer_fields = {f"trainer.{name}" for name in type(UpdateRuleConfig().trainer).model_fields}
    assert trainer_fields == trainer_settings | uncompared
    for cell in CELLS:
        assert cell.conditions.keys() == field_names | trainer_settings


@pytest.mark.parametrize("name", STUDY_SETTINGS)
def test_our_studies_are_the_published_ones(name: str) -> None:
    """Every arm of our study has published cells, and each of its settings has the published value."""
    study = STUDIES[name]
    published = {cell.arm: cell.conditions for cell in CELLS if name in cell.studies}
    assert set(published) == set(study.axis.named_settings)
    for arm, settings in study.axis.named_settings.items():
        config = apply_overrides(UpdateRuleConfig(), {**study.fixed_settings, **settings}).model_dump()
        our_settings = config | {f"trainer.{key}": value for key, value in config["trainer"].items()}
        for key, value in published[arm].items():
            assert our_settings[key] == value, f"{arm}: {key}"


def test_expected_differences_have_a_rationale() -> None:
    assert all(cell.rationale for cell in CELLS if cell.expected_verdict != NOT_DISTINGUISHABLE)
    differing = {(cell.studies[0], cell.arm) for cell in CELLS if cell.expected_verdict == DIFFERS}
    expected = {("replay", "ReplayDG-32"), ("replay", "FreshDG-32-decay0.5"), ("partial-credit", "TEMPO")}
    assert differing == expected
    open_rows = {cell.arm for cell in CELLS if cell.expected_verdict == NO_EXPECTATION and cell.kind == PER_SEED}
    assert open_rows == {"ASPO", "R2VPO", "CE", "SelfDistillDG", "SCOPELite", "GRPOToken", "FreshDG-32", "TEMPO"}
    assert {cell.expected_verdict for cell in CELLS if cell.kind == POOLED} == {NO_EXPECTATION}


def test_smallest_standard_deviations() -> None:
    by_column = {cell.column: cell.min_std for cell in CELLS}
    assert by_column["final_test_error"] == by_column["final_entropy"] == 0.01
    assert by_column["first_step_entropy_low"] == pytest.approx(5.7735, rel=1e-4)
    assert by_column["first_step_error_zero"] == pytest.approx(14.4338, rel=1e-4)
