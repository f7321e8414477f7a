"""Tests of the published numbers of distillation. They are typed here a second time, in the layout of their tables."""

import math

import pytest

from sandboxes.distillation.family import TRIAL_COLUMNS
from sandboxes.distillation.settings import DistillationConfig
from sandboxes.toys.published.cells import MEAN_ALONE, NO_EXPECTATION, NOT_DISTINGUISHABLE, PER_SEED
from sandboxes.toys.published.distillation_sandbox import CELLS, STUDY_SETTINGS, make_conditions
from search_spaces.catalog import STUDIES
from tests.fakes.printed_tables import read_printed_tables
from trainable.config.run_config import apply_overrides

PRINTED_TABLES = """
opd-topk-stability | final_test_error | final_entropy
full_vocab_rkl 0.0045 +/- 0.0069 0.0868 +/- 0.0494
sampled_pg 0.6350 +/- 0.0057 1.6018 +/- 0.0297
topk_rkl_k1 0.8619 +/- 0.0065 2.1971 +/- 0.0000
topk_rkl_k2 0.8538 +/- 0.0051 2.1972 +/- 0.0000
topk_rkl_k4 0.8491 +/- 0.0367 2.1972 +/- 0.0000

opd-topk-stability | last_reverse_kl | last_top1_agreement | last_overlap_at_k | last_reward
full_vocab_rkl 0.7436 +/- 0.6037 0.9212 +/- 0.0684 0.5301 +/- 0.0270 0.8939 +/- 0.0835
sampled_pg 4.9129 +/- 0.0184 0.3613 +/- 0.0170 0.4899 +/- 0.0398 0.2578 +/- 0.0167
topk_rkl_k1 5.7917 +/- 0.0010 0.1419 +/- 0.0285 0.3913 +/- 0.0020 0.1087 +/- 0.0141
topk_rkl_k2 5.7913 +/- 0.0007 0.1276 +/- 0.0439 0.4365 +/- 0.1227 0.1087 +/- 0.0141
topk_rkl_k4 5.7902 +/- 0.0005 0.1517 +/- 0.0130 0.5145 +/- 0.0384 0.1074 +/- 0.0137

opd-topk-stability | last_student_topk_mass | last_teacher_topk_mass
topk_rkl_k1 0.1130 +/- 0.0003 0.1419 +/- 0.0284
topk_rkl_k2 0.2242 +/- 0.0002 0.2552 +/- 0.0517
topk_rkl_k4 0.4469 +/- 0.0002 0.5299 +/- 0.0417

opd-cold-start | final_test_error | final_entropy
full_vocab_rkl 0.0010 +/- 0.0012 0.0608 +/- 0.0227
cold_topk_k1 0.8670 +/- 0.0136 2.1971 +/- 0.0001
cold_topk_k2 0.8666 +/- 0.0190 2.1972 +/- 0.0001
cold_topk_k4 0.8448 +/- 0.0230 2.1972 +/- 0.0000
warm_topk_k1 0.7981 +/- 0.0166 2.1969 +/- 0.0001
warm_topk_k2 0.7749 +/- 0.0440 2.1971 +/- 0.0001
warm_topk_k4 0.6963 +/- 0.0166 1.9873 +/- 0.0185

opd-cold-start | last_reverse_kl | last_top1_agreement | last_overlap_at_k | last_reward
full_vocab_rkl 0.6645 +/- 0.5742 0.9355 +/- 0.0609 0.5415 +/- 0.0299 0.8971 +/- 0.0827
cold_topk_k1 5.7899 +/- 0.0014 0.1432 +/- 0.0158 0.4508 +/- 0.0456 0.1094 +/- 0.0220
cold_topk_k2 5.7906 +/- 0.0006 0.1491 +/- 0.0079 0.4316 +/- 0.0220 0.1107 +/- 0.0209
cold_topk_k4 5.7904 +/- 0.0002 0.1549 +/- 0.0041 0.4740 +/- 0.0421 0.1100 +/- 0.0214
warm_topk_k1 5.7837 +/- 0.0013 0.1940 +/- 0.0502 0.5099 +/- 0.0698 0.1107 +/- 0.0209
warm_topk_k2 5.7832 +/- 0.0025 0.2389 +/- 0.0127 0.4468 +/- 0.0630 0.1113 +/- 0.0220
warm_topk_k4 5.1169 +/- 0.0304 0.2747 +/- 0.0285 0.5535 +/- 0.0249 0.2083 +/- 0.0108

opd-warmup | final_test_error | final_entropy
full_vocab_rkl 0.0022 +/- 0.0020 0.0682 +/- 0.0298
k4_warm0 0.8484 +/- 0.0142 2.1972 +/- 0.0000
k4_warm50 0.7760 +/- 0.0122 2.1972 +/- 0.0000
k4_warm100 0.7068 +/- 0.0435 1.9846 +/- 0.0153
k4_warm150 0.7148 +/- 0.0318 2.0090 +/- 0.0510
k4_warm200 0.6131 +/- 0.0688 1.9049 +/- 0.0580
k4_warm250 0.0079 +/- 0.0064 0.1808 +/- 0.1172
k8_warm0 0.3322 +/- 0.0259 0.9376 +/- 0.0476
k8_warm50 0.3029 +/- 0.0492 0.8470 +/- 0.1497
k8_warm100 0.1643 +/- 0.1480 0.5225 +/- 0.3742
k8_warm150 0.0279 +/- 0.0369 0.1882 +/- 0.1468
k8_warm200 0.0022 +/- 0.0023 0.0779 +/- 0.0342
k8_warm250 0.0011 +/- 0.0010 0.0692 +/- 0.0327

opd-soft-teacher | final_test_error | final_entropy
T1.0_full 0.5112 +/- 0.0993 1.9169 +/- 0.0676
T1.0_student_warm0 0.8351 +/- 0.0151 2.1972 +/- 0.0000
T1.0_student_warm100 0.7288 +/- 0.0245 2.1972 +/- 0.0000
T1.0_student_warm200 0.6945 +/- 0.0058 2.1968 +/- 0.0000
T1.0_student_warm250 0.7160 +/- 0.0100 2.1945 +/- 0.0008
T1.0_teacher_warm0 1.0000 +/- 0.0000 1.8517 +/- 0.0075
T1.0_teacher_warm100 0.9999 +/- 0.0002 1.8601 +/- 0.0114
T1.0_teacher_warm200 1.0000 +/- 0.0000 1.8572 +/- 0.0282
T1.0_teacher_warm250 0.9173 +/- 0.0639 2.0375 +/- 0.0306
T1.0_intersection_warm0 1.0000 +/- 0.0000 1.7644 +/- 0.0462
T1.0_intersection_warm100 1.0000 +/- 0.0000 2.0131 +/- 0.0192
T1.0_intersection_warm200 0.8585 +/- 0.0135 2.1413 +/- 0.0410
T1.0_intersection_warm250 0.7424 +/- 0.0143 2.1577 +/- 0.0195
T0.5_full 0.2658 +/- 0.0476 1.3172 +/- 0.0428
T0.5_student_warm0 0.8471 +/- 0.0236 2.1972 +/- 0.0000
T0.5_student_warm100 0.7292 +/- 0.0079 2.1971 +/- 0.0000
T0.5_student_warm200 0.7085 +/- 0.0329 2.1666 +/- 0.0301
T0.5_student_warm250 0.6773 +/- 0.0204 2.1519 +/- 0.0133
T0.5_teacher_warm0 0.6768 +/- 0.0022 1.9047 +/- 0.0052
T0.5_teacher_warm100 0.6836 +/- 0.0098 1.9455 +/- 0.0061
T0.5_teacher_warm200 0.6651 +/- 0.0337 1.9887 +/- 0.0102
T0.5_teacher_warm250 0.7358 +/- 0.0270 2.0624 +/- 0.0168
T0.5_intersection_warm0 0.6631 +/- 0.0109 2.1002 +/- 0.0091
T0.5_intersection_warm100 0.6358 +/- 0.0043 2.1744 +/- 0.0009
T0.5_intersection_warm200 0.6394 +/- 0.0380 2.1768 +/- 0.0104
T0.5_intersection_warm250 0.7131 +/- 0.0435 2.1792 +/- 0.0106
"""
PRINTED_VARIANCES = """
4 1.19e-4 5.44e-4 4.73e-2
8 5.36e-5 2.32e-4 2.24e-1
16 2.91e-5 1.11e-4 1.75e+0
32 1.27e-5 5.64e-5 1.42e+1
64 6.93e-6 2.50e-5 8.89e+1
"""
PRINTED_SWITCHES = {
    "k4_warm50": (0.7495, +0.0265),
    "k4_warm100": (0.6160, +0.0907),
    "k4_warm150": (0.5830, +0.1318),
    "k4_warm200": (0.5144, +0.0988),
    "k4_warm250": (0.2620, -0.2541),
    "k8_warm50": (0.7495, -0.4466),
    "k8_warm100": (0.6160, -0.4518),
    "k8_warm150": (0.5830, -0.5551),
    "k8_warm200": (0.5144, -0.5122),
    "k8_warm250": (0.2620, -0.2609),
}
NUMBERS = {(cell.studies[0], cell.arm, cell.column): (cell.mean, cell.std) for cell in CELLS}


def test_every_printed_number_with_a_spread_is_recorded_once() -> None:
    spread_numbers = {
        (cell.studies[0], cell.arm, cell.column): (cell.mean, cell.std) for cell in CELLS if cell.kind == PER_SEED
    }
    assert spread_numbers == read_printed_tables(PRINTED_TABLES)
    assert len(CELLS) == len(NUMBERS)


def test_every_printed_mean_alone_is_recorded_once() -> None:
    printed_means = {
        ("opd-variance", f"{estimator}-h{horizon}", "gradient_variance"): float(number)
        for horizon, *row in map(str.split, PRINTED_VARIANCES.strip().splitlines())
        for estimator, number in zip(("full_vocab_rkl", "token_pg", "sequence_pg"), row, strict=True)
    }
    for arm, (error, change) in PRINTED_SWITCHES.items():
        printed_means |= {
            ("opd-warmup", arm, "switch_test_error"): error,
            ("opd-warmup", arm, "error_since_switch"): change,
        }
    cells = [cell for cell in CELLS if cell.kind == MEAN_ALONE]
    assert {(cell.studies[0], cell.arm, cell.column): cell.mean for cell in cells} == printed_means
    assert all(math.isnan(cell.std) for cell in cells)


def test_a_change_since_the_switch_is_the_difference_of_two_printed_errors() -> None:
    for arm, (switch_error, change) in PRINTED_SWITCHES.items():
        final_error, _ = NUMBERS["opd-warmup", arm, "final_test_error"]
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
