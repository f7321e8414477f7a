"""Tests of the detectors of others: published numbers on series whose alarm is known by hand, and invariances."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from analysis.stats.estimates import Floats
from analysis.sweep.detectors import DETECTORS, MEASURES, Detector, list_variants, make_measures
from analysis.sweep.log_checks import fit_trend, project_crossing

BY_NAME = {detector.name: detector for detector in DETECTORS}
NAN = math.nan
Series = Mapping[str, Sequence[float] | Floats]


def make_series(**columns: Sequence[float] | Floats) -> dict[str, Floats]:
    """Measures at steps 1, 2, ..."""
    (length,) = {len(values) for values in columns.values()}
    return {"step": np.arange(1.0, length + 1)} | {name: np.array(values, float) for name, values in columns.items()}


def at_validations(values: Sequence[float], every: int = 5) -> Floats:
    """Values at steps `every`, 2 x `every`, ..., and NaN between them."""
    table = np.full((len(values), every), NAN)
    table[:, -1] = values
    return table.ravel()


WAVE = [1.0, 3.0] * 50
"""Mean 2 and standard deviation 1."""
LINE = np.arange(1.0, 101)
RAMP_DOWN = 2.0 - LINE / 100
CASES: tuple[tuple[str, float | None, Series], ...] = (
    ("RAGEN reward_variance_collapse", 20, {"reward_std": [2.0] * 10 + [0.19] * 10}),
    ("RAGEN reward_variance_collapse", None, {"reward_std": [2.0] * 10 + [0.19] * 9 + [0.2]}),
    ("RAGEN reward_variance_collapse", 21, {"reward_std": [9] + [2] * 10 + [0.1] * 10, "groups_kept": [0] + [8] * 20}),
    ("RAGEN empty_filtered_steps", 8, {"groups_kept": [8, 8, 8] + [0] * 9}),
    ("RAGEN empty_filtered_steps", None, {"groups_kept": [0] * 4 + [8] + [0] * 4}),
    ("RAGEN low_validation_success", 30, {"eval_score": at_validations([0.02] + [0.009] * 5)}),
    ("RAGEN low_validation_success", None, {"eval_score": at_validations([0.009] * 4 + [0.01] + [0.009] * 4)}),
    ("RAGEN-2 mutual information, first turns", 14, {"first_turn_mi": [2.0] * 10 + [1.5] * 5}),
    ("RAGEN-2 mutual information, first turns", None, {"first_turn_mi": [2.0] * 10 + [1.7] * 5}),
    ("RAGEN-2 mutual information, all turns", 24, {"trajectory_mi": [2.0] * 20 + [1.5] * 5}),
    ("rlwatch entropy_collapse", 44, {"entropy": [0.9] * 60}),
    ("rlwatch entropy_collapse", 55, {"entropy": [0.9] * 29 + [1.0] + [0.9] * 30}),
    ("rlwatch entropy_collapse", None, {"entropy": [1.0] * 60}),
    ("rlwatch kl_explosion", 21, {"kl": [*WAVE[:20], 5.01]}),
    ("rlwatch kl_explosion", None, {"kl": [*WAVE[:20], 4.99]}),
    ("rlwatch kl_explosion", None, {"kl": [*WAVE[:18], 9.0]}),  # in the warm-up
    ("rlwatch reward_hacking", 60, {"reward_std": [1.0] * 59 + [3.01**0.5]}),
    ("rlwatch reward_hacking", None, {"reward_std": [1.0] * 30 + [9.0] + [2.99**0.5] * 30}),
    ("rlwatch advantage_variance", 31, {"reward_std": [1.0] * 30 + [3.01]}),
    ("rlwatch advantage_variance", None, {"reward_std": [1.0] * 30 + [2.99]}),
    ("rlwatch loss_nan", 3, {"nonfinite_updates": [0, 0, 1]}),
    ("rlwatch loss_nan", None, {"nonfinite_updates": [0, 0, 0]}),
    ("rlwatch gradient_norm_spike", 21, {"grad_norm": [*WAVE[:20], 5.01]}),
    # The first hundred values stay the baseline, so the high level that follows does not hide the spike.
    ("rlwatch gradient_norm_spike", 141, {"grad_norm": WAVE + [4.9] * 40 + [5.01]}),
    ("rlwatch gradient_norm_spike", None, {"grad_norm": WAVE + [4.99] * 40}),
    ("rlwatch reward_mean_drift", 105, {"reward": [0.0] * 55 + [0.01 * n for n in range(1, 55)]}),
    ("rlwatch reward_mean_drift", 105, {"reward": [0.0] * 55 + [-0.01 * n for n in range(1, 55)]}),
    ("rlwatch reward_mean_drift", 99, {"reward": LINE}),  # the first difference that counts is at the 50th value
    ("rlwatch reward_mean_drift", None, {"reward": [0.0] * 55 + [0.001 * n for n in range(1, 90)]}),
    ("rlwatch reward_mean_drift", None, {"reward": [n if n % 40 else n - 2 for n in range(120)]}),
    ("rl-doctor advantage_collapse", 75, {"zero_spread": [0.5] * 100}),
    ("rl-doctor advantage_collapse", 100, {"zero_spread": [0.0] * 75 + [1.0] * 25}),
    ("rl-doctor advantage_collapse", None, {"zero_spread": [0.49] * 100}),
    ("rl-doctor entropy_collapse", 100, {"entropy": [1.0] * 80 + [0.1] * 20}),
    ("rl-doctor entropy_collapse", None, {"entropy": [1.0] * 80 + [0.2] * 20}),
    # A line from 2 would be at a tenth in step 180: further away than step 75 has come, but not further than step 100.
    ("rl-doctor entropy_collapse", 100, {"entropy": RAMP_DOWN, "reward": [1.0] * 100}),
    ("rl-doctor entropy_collapse", None, {"entropy": RAMP_DOWN, "reward": LINE}),
    ("rl-doctor reward_hacking", 75, {"reward": LINE, "eval_score": at_validations(LINE[:20][::-1])}),
    ("rl-doctor reward_hacking", None, {"reward": LINE, "eval_score": at_validations(LINE[:20])}),
    ("rl-doctor reward_hacking", 75, {"reward": WAVE, "eval_score": WAVE[1:] + WAVE[:1]}),  # no trend, opposite ranks
    ("rl-doctor reward_hacking", 75, {"reward": LINE, "eval_score": [0.5] * 100}),  # left behind
    ("rl-doctor reward_hacking", None, {"reward": [0.5] * 100, "eval_score": LINE}),
    # Fewer than eight evaluations have no trend, so they do not explain longer replies.
    (
        *("rl-doctor length_pathology", 100),
        {"response_length": 100 + LINE, "reward": LINE, "eval_score": at_validations(LINE[:5], 20)},
    ),
    ("rl-doctor length_pathology", 75, {"response_length": 100 + LINE, "reward": LINE, "eval_score": [0.5] * 100}),
    ("rl-doctor length_pathology", None, {"response_length": 100 + LINE, "reward": LINE, "eval_score": LINE}),
    ("rl-doctor length_pathology", None, {"response_length": 100 + LINE, "reward": -LINE, "eval_score": [0.5] * 100}),
    ("rl-doctor length_pathology", None, {"response_length": 200 + LINE, "reward": LINE, "eval_score": [0.5] * 100}),
    ("rl-doctor clip_saturation", 75, {"clip_fraction": [0.2] * 100}),
    ("rl-doctor clip_saturation", None, {"clip_fraction": [0.9] * 50 + [0.19] * 50}),
    ("rl-doctor kl_drift", 75, {"kl": [2.0] * 100}),
    ("rl-doctor kl_drift", 100, {"kl": (LINE / 100) ** 2 * 0.6}),  # above 0.5 at step 92, and accelerating
    ("rl-doctor kl_drift", None, {"kl": (LINE / 100) ** 0.5 * 0.6}),
    ("rl-doctor kl_drift", 75, {"kl": [1e-4] * 100}),
    ("rl-doctor kl_drift", None, {"kl": [0.0] * 100}),  # no KL is measured
    ("rl-doctor gradient_pathology", 75, {"grad_norm": [1.0, 0.0, 1.0, 0.0, 1.0] * 20}),
    ("rl-doctor gradient_pathology", None, {"grad_norm": [1.0, 0.0, 1.0] * 33}),
    ("rl-doctor gradient_pathology", 75, {"grad_norm": [1.0] * 60 + [0.05] * 40}),
    ("rl-doctor gradient_pathology", 75, {"grad_norm": WAVE[:70] + [30.0] * 3 + WAVE[:27]}),
    ("rl-doctor gradient_pathology", None, {"grad_norm": WAVE[:70] + [30.0] * 2 + WAVE[:28]}),
    ("rl-doctor plateau", 75, {"reward": np.minimum(LINE, 80 - LINE)}),
    ("rl-doctor plateau", 75, {"reward": LINE, "eval_score": at_validations([1, 2, 3, 4, 5, *range(4, -11, -1)])}),
    ("rl-doctor plateau", None, {"reward": LINE}),
    ("two-stage entropy, before training", 1, {"entropy": [0.17, 0.5]}),
    ("two-stage entropy, before training", None, {"entropy": [0.18, 0.1]}),
    ("two-stage entropy, early training", 30, {"entropy": [0.1] * 9 + [1.0] * 20 + [0.49] * 5}),
    ("two-stage entropy, early training", None, {"entropy": [1.0] * 150 + [0.1] * 50}),
    # The best so far may be that before training.
    ("first low evaluation", 5, {"eval_score": at_validations([0.2, 0.3]), "eval_score_before": [0.41] + [NAN] * 9}),
    (
        *("first low evaluation", 15),
        {"eval_score": at_validations([0.2, 0.6, 0.29, 0.1]), "eval_score_before": [0.4] + [NAN] * 19},
    ),
    ("first low evaluation", None, {"eval_score": at_validations([0.2, 0.2]), "eval_score_before": [0.4] + [NAN] * 9}),
    ("EvalStop", 25, {"eval_score": at_validations([0.5, 0.4, 0.3, 0.2, 0.1])}),
    ("EvalStop", None, {"eval_score": at_validations([0.5, 0.4, 0.3, 0.3, 0.2, 0.1, 0.0])}),
)  # fmt: skip


@pytest.mark.parametrize(("name", "step", "series"), CASES)
def test_a_detector_fires_where_its_rule_says(name: str, step: float | None, series: Series) -> None:
    detector = BY_NAME[name]
    measures = make_series(**series)
    assert measures.keys() >= set(detector.measures)
    assert detector.find_step(measures) == step


def test_every_detector_has_a_step_at_which_it_fires() -> None:
    assert {name for name, step, _ in CASES if step is not None} == BY_NAME.keys()
    assert {measure for detector in DETECTORS for measure in detector.measures} == MEASURES.keys()


UNIT_FREE = (
    *("RAGEN reward_variance_collapse", "RAGEN-2 mutual information, all turns", "rlwatch kl_explosion"),
    *("rlwatch reward_hacking", "rlwatch advantage_variance", "rlwatch gradient_norm_spike"),
    *("rl-doctor entropy_collapse", "rl-doctor gradient_pathology", "rl-doctor plateau", "rl-doctor reward_hacking"),
    *("two-stage entropy, early training", "EvalStop"),
)


def make_walks(seed: int) -> dict[str, Floats]:
    """Positive random walks of all measures with spikes, some of which fall."""
    generator = np.random.default_rng(seed)
    noise = generator.normal(size=(len(MEASURES), 80)) * 0.1 + generator.normal(size=(len(MEASURES), 1)) * 0.03
    walks = np.exp(noise.cumsum(axis=1)) * np.where(generator.random(noise.shape) < 0.03, 8, 1)
    return make_series(**dict(zip(MEASURES, walks, strict=True)))


@pytest.mark.parametrize("name", UNIT_FREE)
def test_a_relative_rule_does_not_depend_on_the_unit(name: str) -> None:
    steps = []
    for seed in range(12):
        measures = make_walks(seed)
        scaled = {key: values if key == "step" else 4 * values for key, values in measures.items()}
        variant = BY_NAME[name].scale(0.5, 0.25)
        steps.append(variant.find_step(measures))
        assert variant.find_step(scaled) == steps[-1]
    assert any(steps)  # the rule does fire


# A trend that is below a level does not go there, in the tool either; with a lower level, it may.
MONOTONE = [detector for detector in DETECTORS if detector.name != "rl-doctor entropy_collapse"]


@pytest.mark.parametrize("detector", MONOTONE, ids=lambda detector: detector.name)
def test_a_stricter_threshold_does_not_fire_sooner(detector: Detector) -> None:
    for seed in range(3):
        measures = make_walks(seed)
        steps = [detector.scale(factor, 0.25).find_step(measures) or math.inf for factor in (0.25, 0.5, 1, 2, 4)]
        assert steps == sorted(steps)


def test_variants_differ_and_include_the_published_numbers() -> None:
    texts = [variant.text for variant in list_variants()]
    assert len(set(texts)) == len(texts)
    assert {detector.text for detector in DETECTORS} <= set(texts)
    entropy = BY_NAME["rlwatch entropy_collapse"]
    assert entropy.text == "rlwatch entropy_collapse: entropy < 1, 25 in a row from the 20-th on"
    assert entropy.scale(4, 0.5).text == "rlwatch entropy_collapse: entropy < 0.25, 12 in a row from the 10-th on"
    assert BY_NAME["rlwatch kl_explosion"].scale(4, 1).highs == {"high": 12.0}


def test_measures_are_the_first_measured_column_and_a_fraction_of_the_groups() -> None:
    rows = pd.DataFrame(
        {
            "step": [1, 2],
            "kl_to_reference": [NAN, NAN],
            "val_kl_to_reference": [NAN, 0.5],
            "zero_std_groups": [2.0, 4.0],
            "groups": [8.0, 16.0],
            "entropy": [0.5, None],
        }
    )
    measures = make_measures(rows)
    assert measures.keys() == {"step", "kl", "zero_spread", "entropy"}
    np.testing.assert_array_equal(measures["kl"], [NAN, 0.5])
    np.testing.assert_array_equal(measures["zero_spread"], [0.25, 0.25])
    np.testing.assert_array_equal(measures["entropy"], [0.5, NAN])
    assert list(rows["zero_std_groups"]) == [2, 4]


def test_a_trend_has_the_line_of_theil_and_sen_and_the_test_of_mann_and_kendall() -> None:
    generator = np.random.default_rng(0)
    for length in (2, 9, 30):
        steps, values = np.sort(generator.permutation(50)[:length]).astype(float), generator.integers(0, 9, length) / 4
        slope, intercept, *_ = stats.theilslopes(values, steps)
        assert fit_trend(steps, values)[:2] == pytest.approx((slope, intercept))
    # Without ties, 8 values have a variance of 8 x 7 x 21 / 18 = 65.3: a surplus of 18 pairs is significant, 16 not.
    for values, direction in (
        ([0, 2, 1, 4, 3, 6, 5, 7], 1),
        ([2, 1, 0, 3, 6, 5, 4, 7], 0),
        ([2, 1, 0, 3, 5, 4, 7, 6], 1),
    ):
        surplus = sum(np.sign(later - earlier) for i, earlier in enumerate(values) for later in values[i + 1 :])
        assert (surplus >= 18) == bool(direction)
        line = np.arange(8.0)
        assert fit_trend(line, np.array(values, float)).direction == direction
        assert fit_trend(line, -np.array(values, float)).direction == -direction
    assert fit_trend(np.arange(7.0), np.arange(7.0)).direction == 0  # too few
    assert fit_trend(np.arange(20.0), np.ones(20)).direction == 0


def test_a_crossing_is_projected_along_a_line_or_an_exponential() -> None:
    steps = np.arange(1.0, 21)
    assert project_crossing(steps, 3 - steps / 10, 0.5) == pytest.approx(5)
    assert project_crossing(steps, np.exp(-steps / 10), math.exp(-3)) == pytest.approx(10)
    assert project_crossing(steps, steps, 0.5) is None
    assert project_crossing(steps, np.ones(20), 0.5) is None
