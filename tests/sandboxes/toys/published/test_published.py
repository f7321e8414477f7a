"""Tests of the published numbers. They are typed here a second time, in the layout of the printed tables."""

import math
import statistics
from collections import Counter

import pytest

from sandboxes.toys.published.cells import (
    DIFFERS,
    NEVER_REACHED,
    NO_EXPECTATION,
    NOT_DISTINGUISHABLE,
    PER_SEED,
    POOLED,
    Cell,
)
from sandboxes.toys.published.update_rule_sandbox import CELLS, STUDY_SETTINGS, make_conditions
from sandboxes.update_rules.config.settings import UpdateRuleConfig
from sandboxes.update_rules.records import STEP_COLUMNS, TRIAL_COLUMNS
from search_spaces.catalog import STUDIES
from tests.fakes.printed_tables import read_printed_tables
from trainable.config.run_config import apply_overrides

PRINTED_TABLES = """
influence | final_test_error
DG 0.3345 +/- 0.0043
GRPO 0.3536 +/- 0.0106
TPO 0.2399 +/- 0.0573

reward-noise | final_test_error | final_entropy
DG 0.3778 +/- 0.0034 0.9599 +/- 0.0510
UncertaintyDG 0.4013 +/- 0.0286 1.0052 +/- 0.0643
FilteredDG 0.3778 +/- 0.0034 0.9599 +/- 0.0510
FilteredDG-0.2 0.6536 +/- 0.1260 1.0322 +/- 0.0297
FilteredDG-0.3 0.3810 +/- 0.0129 0.9883 +/- 0.0647
RewardVarianceDG 0.3921 +/- 0.0209 0.7879 +/- 0.0360
ASPO 0.3708 +/- 0.0095 0.1531 +/- 0.0589
R2VPO 0.3787 +/- 0.0042 0.1811 +/- 0.0428

dense-correction | final_test_error | first_step_error_zero
CE 0.0000 +/- 0.0000 733.3333 +/- 57.7350
SelfDistillDG 0.0000 +/- 0.0000 466.6667 +/- 125.8306
SCOPELite 0.0000 +/- 0.0000 533.3333 +/- 104.0833

replay | final_test_error | replay_age
DG 0.5032 +/- 0.0080 n/a
ReplayDG-5 0.5032 +/- 0.0080 4.0000 +/- 0.0000
FreshDG-5 0.4902 +/- 0.0049 4.0000 +/- 0.0000
ReplayDG-32 0.9997 +/- 0.0006 18.0667 +/- 9.5237
FreshDG-32 0.5946 +/- 0.1391 16.4667 +/- 7.9418
FreshDG-32-decay0.5 0.5048 +/- 0.0082 7.4444 +/- 5.5496

partial-credit | final_test_error | final_test_error_unscored
CE 0.2738 +/- 0.0612 0.2793 +/- 0.0087
DG 0.3260 +/- 0.0132 0.4711 +/- 0.0149
DGToken 0.2851 +/- 0.0234 0.6286 +/- 0.0392
TEMPO 0.4975 +/- 0.0098 0.5018 +/- 0.0049
TPOToken 0.0000 +/- 0.0000 0.4910 +/- 0.0133
GRPOToken 0.1229 +/- 0.2126 0.4525 +/- 0.0560

grpo-entropy | final_test_error | final_entropy | first_step_entropy_low
DG 0.3345 +/- 0.0043 0.4695 +/- 0.0243 n/a
DGEntropyGuard 0.3358 +/- 0.0064 0.4847 +/- 0.0219 n/a
ASPO 0.3742 +/- 0.0040 0.0174 +/- 0.0020 113.3333 +/- 11.5470
R2VPO 0.3754 +/- 0.0023 0.0244 +/- 0.0087 106.6667 +/- 11.5470
GRPO 0.3536 +/- 0.0106 0.0488 +/- 0.0305 53.3333 +/- 11.5470
TPO 0.2399 +/- 0.0573 0.4057 +/- 0.0824 n/a

grpo-entropy | batch_delta_entropy | batch_delta_entropy, early | entropy_drop_pos_adv
DG -0.0020 +/- 0.0069 -0.0041 +/- 0.0096 0.0034 +/- 0.0075
DGEntropyGuard -0.0020 +/- 0.0080 -0.0037 +/- 0.0107 0.0027 +/- 0.0069
ASPO -0.0029 +/- 0.0092 -0.0073 +/- 0.0120 0.1067 +/- 0.1761
R2VPO -0.0029 +/- 0.0104 -0.0067 +/- 0.0141 0.0983 +/- 0.1682
GRPO -0.0070 +/- 0.0234 -0.0090 +/- 0.0263 0.0593 +/- 0.0957
TPO 0.0026 +/- 0.0208 -0.0011 +/- 0.0215 0.0049 +/- 0.0187
"""
SEED_TRIPLES = (
    ((40, 60, 60), "53.3333 11.5470"),
    ((100, 120, 120), "113.3333 11.5470"),
    ((100, 100, 120), "106.6667 11.5470"),
    ((700, 700, 800), "733.3333 57.7350"),
    ((350, 450, 600), "466.6667 125.8306"),
    ((450, 500, 650), "533.3333 104.0833"),
)


def list_keys(cell: Cell) -> list[tuple[str, str, str]]:
    early = ", early" if cell.section.endswith("early steps") else ""
    return [(study, cell.arm, cell.column + early) for study in cell.studies]


def test_every_printed_number_is_recorded_once() -> None:
    printed_cells = read_printed_tables(PRINTED_TABLES)
    printed_cells.pop(("replay", "DG", "replay_age"))  # without a buffer no batch has an age
    cells = {key: cell for cell in CELLS for key in list_keys(cell)}
    assert cells.keys() == printed_cells.keys()
    for key, numbers in printed_cells.items():
        if numbers is None:
            assert cells[key].kind == NEVER_REACHED
            assert math.isnan(cells[key].mean)
            assert math.isnan(cells[key].std)
        else:
            assert (cells[key].mean, cells[key].std) == numbers
    assert (
        len(CELLS) == len({list_keys(cell)[0] for cell in CELLS}) == len(printed_cells) - 3
    )  # three cells are printed twice


def test_cells_have_their_kinds_and_counts() -> None:
    assert Counter(cell.kind for cell in CELLS) == {PER_SEED: 55, POOLED: 23, NEVER_REACHED: 3}
    steps, trials = ({column.name for column in columns} for columns in (STEP_COLUMNS, TRIAL_COLUMNS))
    for cell in CELLS:
        assert cell.column in (steps if cell.kind == POOLED else trials)
        assert cell.n == (45 if cell.kind == POOLED else 3)
        assert all(cell.conditions == make_conditions(study, cell.arm) for study in cell.studies)


UNCOMPARED_SETTINGS = {"seed", "diagnostics", "entropy_diagnostics", "oracle_fit"}
"""Settings that differ between runs of an arm, or measure it."""
SETTINGS_OF_OTHER_TASKS = {"hidden", "mnist_folder", "model_name", "text_file", "context_len", "kl_weight"}


def test_every_setting_that_makes_a_run_what_it_is_has_a_published_value() -> None:
    field_names = set(UpdateRuleConfig.model_fields) - {"trainer"} - UNCOMPARED_SETTINGS - SETTINGS_OF_OTHER_TASKS
    trainer_settings = {"trainer.total_training_steps", "trainer.test_freq"}
    uncompared_trainer_settings = {f"trainer.{name}" for name in UpdateRuleConfig.unhashed_settings["trainer"]} | {
        "trainer.n_gpus_per_node"
    }
    assert {
        f"trainer.{name}" for name in type(UpdateRuleConfig().trainer).model_fields
    } == trainer_settings | uncompared_trainer_settings
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
    assert {(cell.studies[0], cell.arm) for cell in CELLS if cell.expected_verdict == DIFFERS} == {
        ("replay", "ReplayDG-32"),
        ("replay", "FreshDG-32-decay0.5"),
        ("partial-credit", "TEMPO"),
    }
    open_rows = {cell.arm for cell in CELLS if cell.expected_verdict == NO_EXPECTATION and cell.kind == PER_SEED}
    assert open_rows == {"ASPO", "R2VPO", "CE", "SelfDistillDG", "SCOPELite", "GRPOToken", "FreshDG-32", "TEMPO"}
    assert {cell.expected_verdict for cell in CELLS if cell.kind == POOLED} == {NO_EXPECTATION}


@pytest.mark.parametrize(("seeds", "numbers"), SEED_TRIPLES)
def test_spreads_are_standard_deviations_of_three_evaluated_steps(seeds: tuple[int, ...], numbers: str) -> None:
    assert f"{statistics.mean(seeds):.4f} {statistics.stdev(seeds):.4f}" == numbers
    cell = next(cell for cell in CELLS if f"{cell.mean:.4f} {cell.std:.4f}" == numbers)
    assert all(step % cell.margin == 0 for step in seeds)


def test_two_seeds_at_0_and_one_above_give_the_spread_of_grpo_token() -> None:
    seeds = (0.0, 0.0, 3 * 0.1229)
    assert statistics.stdev(seeds) == pytest.approx(0.2126, abs=5e-4)


@pytest.mark.parametrize("mean_age", [18.0667, 16.4667, 7.4444])
def test_ages_are_means_of_whole_numbers_over_45_rows(mean_age: float) -> None:
    assert round(45 * mean_age) / 45 == pytest.approx(mean_age, abs=5e-5)
    assert any(cell.mean == mean_age and cell.kind == POOLED for cell in CELLS)


def test_smallest_standard_deviations() -> None:
    by_column = {cell.column: cell.min_std for cell in CELLS}
    assert by_column["final_test_error"] == by_column["final_entropy"] == 0.01
    assert by_column["first_step_entropy_low"] == pytest.approx(5.7735, rel=1e-4)
    assert by_column["first_step_error_zero"] == pytest.approx(14.4338, rel=1e-4)
