"""Tests of declared contrasts: computations by hand, a literal oracle, and the runs that the tables must name."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.data.compare import estimate_evaluation_variances
from analysis.data.frames import StudyFrames, cast_frame, make_empty_frame, to_records
from analysis.data.load import load
from analysis.data.schemas import get_schemas
from analysis.report.pages import draw_figures
from analysis.stats.noise import fit_noise
from analysis.sweep import contrasts as module
from analysis.sweep.contrasts import (
    compute_contrasts,
    compute_pair_differences,
    compute_seed_differences,
    read_contrasts,
)
from analysis.sweep.tables import summarize_arms
from sandboxes.update_rules.family import TRIAL_COLUMNS
from search_spaces.catalog import FAMILIES
from tests.analysis.charts.specs import read_layers
from tests.fakes import run_folders as language_model
from tests.fakes.run_folders import make_study_record
from tests.fakes.sandbox_folders import UNIFORM_STOP, FakeRun, FakeStudy, make_seed_runs, write_sandbox
from tests.oracles.analysis import compute_contrast, holm

ERROR = "late_test_error"
UNCONTRASTED_COLUMNS = {
    "final_test_error": "it is a single evaluation, and late_test_error is the mean over the last ones",
    "final_greedy_separator_rate": "it only identifies a collapse, whose error late_test_error has",
    "first_step_entropy_low": "runs that never reach the step have no value, so a mean over the others is biased",
    "first_step_error_zero": "runs that never reach the step have no value, so a mean over the others is biased",
    "mean_effective_age": "it equals mean_replay_age, except for FreshDG",
}
"""The trial columns of update-rule studies that are not contrasted, and why."""
A, B, C, D = (0.30, 0.34, 0.35), (0.20, 0.26, 0.29), (0.50, 0.45, 0.47), (0.44, 0.41, 0.45)
FOUR_ARMS = [run for arm, ends in zip("ABCD", (A, B, C, D), strict=True) for run in make_seed_runs(arm, ends)]


def make_study(*contrasts: tuple[str, list[list[str]]], **study_fields: Any) -> FakeStudy:
    extra = {"contrasts": [{"name": name, "pairs": pairs} for name, pairs in contrasts]}
    return FakeStudy("some-study", baseline="A", extra=extra, **study_fields)


def write_and_load(folder: Path, runs: list[FakeRun], *contrasts: tuple[str, list[list[str]]]) -> StudyFrames:
    return load(write_sandbox(folder, runs, make_study(*contrasts)))


def get_row(table: pd.DataFrame, contrast: str, column: str = ERROR) -> dict[str, Any]:
    (row,) = [row for row in to_records(table) if (row["contrast"], row["column"]) == (contrast, column)]
    return row


def test_a_contrast_has_its_counts_and_its_pairs(tmp_path: Path) -> None:
    frames = write_and_load(tmp_path, FOUR_ARMS, ("first up", [["A", "B"], ["C", "D"]]))
    row = get_row(compute_contrasts(frames), "first up")
    assert row["difference"] == pytest.approx(((0.10 + 0.06) / 2 + (0.08 + 0.04) / 2 + (0.06 + 0.02) / 2) / 3)
    assert (row["seeds"], row["pairs"], row["verdict"]) == (3, 2, "worse")  # the first arms have the higher error
    assert (row["excluded_runs"], row["early_stopped_runs"]) == ("", "")
    pair_row = to_records(compute_pair_differences(frames))[0]
    assert (pair_row["first"], pair_row["second"], pair_row["seeds"]) == ("A", "B", 3)
    assert (pair_row["first_mean"], pair_row["second_mean"]) == (pytest.approx(0.33), pytest.approx(0.25))
    assert pair_row["difference"] == pytest.approx(0.08)
    assert (pair_row["first_steps"], pair_row["second_steps"]) == ("300", "300")


def test_no_interval_is_narrower_than_that_of_the_evaluation(tmp_path: Path) -> None:
    """A contrast of two arms has the interval that the table of arms has for the same two."""
    runs = [language_model.FakeRun(arm, seed) for arm in ("0", "0.1", "0.3") for seed in range(3)]
    contrasts = {"some against none": [["0.1", "0"]], "both against none": [["0.1", "0"], ["0.3", "0"]]}
    extra = {"contrasts": [{"name": name, "pairs": pairs} for name, pairs in contrasts.items()]}
    study = language_model.FakeStudy(levels=120, extra=extra)
    frames = load(language_model.write_study(tmp_path, runs, study))
    # Runs whose outcomes differ less than 120 levels can show.
    late = frames.trials["seed"] * 1e-4 + frames.trials["arm"].eq("0.1") * 0.05 + 0.5
    frames = replace(frames, trials=frames.trials.assign(late_val_success=late))
    table = compute_contrasts(frames)
    row = get_row(table, "some against none", "late_val_success")
    arm_row = summarize_arms(frames).set_index("arm").loc["0.1"]
    variances = estimate_evaluation_variances(frames)
    assert row["se"] == pytest.approx(math.sqrt(2 * (variances["0"] + variances["0.1"]) / 2 / 3))
    assert (row["difference"], row["se"]) == (pytest.approx(0.05), pytest.approx(arm_row["se"]))
    # The arm that is in both pairs has twice the weight of the others.
    both = get_row(table, "both against none", "late_val_success")
    variance = variances["0"] + (variances["0.1"] + variances["0.3"]) / 4
    assert both["se"] == pytest.approx(math.sqrt(variance / 3))


EMPTY_FRAMES = {name: make_empty_frame(name) for name in ("steps", "levels", "gradients", "gradient_groups")}
"""Made once: a column of its type each takes longer than what is tested."""


def make_frames(cells: dict[tuple[str, int], tuple[str, float]], contrasts: list[dict[str, Any]]) -> StudyFrames:
    """Make frames in memory from `cells`, the status and the test error by arm and seed."""
    rows = [(f"{arm}-{seed}", arm, seed, status, value) for (arm, seed), (status, value) in cells.items()]
    table = pd.DataFrame(rows, columns=["run_id", "arm", "seed", "status", ERROR])
    table = table.assign(study="s", steps_done=40, steps_total=300)
    trials = cast_frame(table, get_schemas("update_rules")["trials"])
    study = make_study_record(family="update_rules", contrasts=contrasts)
    return StudyFrames(trials, study=study, **EMPTY_FRAMES)


ARMS = "ABCDE"
STATUSES = ("completed", "completed", "completed", "early_stopped", "failed", "interrupted", "never_ran")
VALUE_STRATEGY = st.floats(0, 1).map(lambda value: round(value, 3)) | st.just(math.nan)
CELL_STRATEGY = st.dictionaries(
    st.tuples(st.sampled_from(ARMS), st.integers(0, 5)),
    st.tuples(st.sampled_from(STATUSES), VALUE_STRATEGY),
    min_size=1,
)
ALL_PAIRS = [[first, second] for index, first in enumerate(ARMS) for second in ARMS[index + 1 :]]
CONTRASTS = st.lists(
    st.lists(st.sampled_from(ALL_PAIRS), min_size=1, max_size=4, unique_by=tuple), min_size=1, max_size=4
).map(lambda pair_lists: [{"name": f"contrast {index}", "pairs": pairs} for index, pairs in enumerate(pair_lists)])


@given(CELL_STRATEGY, CONTRASTS)
def test_contrasts_equal_a_literal_oracle(
    cells: dict[tuple[str, int], tuple[str, float]], contrasts: list[dict[str, Any]]
) -> None:
    table = compute_contrasts(make_frames(cells, contrasts))
    scored = {key: value for key, (status, value) in cells.items() if status in ("completed", "early_stopped")}
    if not any(value == value for value in scored.values()):
        assert table.empty
        return
    assert table["contrast"].to_list() == [contrast["name"] for contrast in contrasts]
    for row, contrast in zip(to_records(table), contrasts, strict=True):
        expected = compute_contrast(scored, contrast["pairs"], fit_noise(make_outcome_table(scored)))
        # A difference of two fractions is in [-1, 1].
        for name in ("difference_low", "difference_high"):
            expected[name] = float(np.clip(expected[name], -1, 1))
        for name, number in expected.items():
            assert row[name] == pytest.approx(number, abs=1e-9, nan_ok=True), name
    for name in ("p", "p_equal"):
        p_values = table[name].dropna()
        assert table[f"{name}_holm"].dropna().to_list() == pytest.approx(holm(p_values.to_list()))


def make_outcome_table(values: dict[tuple[str, int], float]) -> np.ndarray:
    """One row per arm and one column per seed, NaN where there is no value."""
    arms, seeds = sorted({arm for arm, _ in values}), sorted({seed for _, seed in values})
    return np.array([[values.get((arm, seed), math.nan) for seed in seeds] for arm in arms])


@pytest.mark.long
@given(CELL_STRATEGY, CONTRASTS)
def test_every_run_that_a_pair_lacks_is_named(
    cells: dict[tuple[str, int], tuple[str, float]], contrasts: list[dict[str, Any]]
) -> None:
    frames = make_frames(cells, contrasts)
    seed_differences = compute_seed_differences(frames)
    for row in to_records(compute_contrasts(frames)):
        run_pairs = seed_differences[(seed_differences["contrast"] == row["contrast"])]
        lacking = run_pairs[run_pairs["difference"].isna()]
        for cell in to_records(lacking):
            missing_arms = [cell[which] for which in ("first", "second") if math.isnan(cell[f"{which}_value"])]
            assert missing_arms
            for arm in missing_arms:
                named_seeds = [
                    phrase.split(": ")[1] for phrase in row["excluded_runs"].split("; ") if phrase.startswith(f"{arm} ")
                ]
                assert any(str(cell["seed"]) in seeds for seeds in named_seeds)
        assert bool(row["excluded_runs"]) == (len(lacking) > 0)


@pytest.mark.parametrize("num_seeds", [1, 2])
def test_two_seeds_have_an_interval_of_their_own_and_no_word_and_one_seed_has_none(
    tmp_path: Path, num_seeds: int
) -> None:
    runs = [run for run in FOUR_ARMS if run.seed < num_seeds]
    row = get_row(compute_contrasts(write_and_load(tmp_path, runs, ("up", [["A", "B"]]))), "up")
    assert row["difference"] == pytest.approx({1: 0.10, 2: 0.09}[num_seeds])
    assert (row["seeds"], row["verdict"], math.isnan(row["p_holm"])) == (num_seeds, "open", True)
    assert (row["difference_low"] < 0 < row["difference_high"]) == (row["df"] == 1) == (num_seeds == 2)
    assert np.isnan([row["difference_low"], row["difference_high"], row["p"]]).all() == (num_seeds == 1)


def test_the_contrasts_of_the_primary_outcome_are_one_family_and_all_others_another(tmp_path: Path) -> None:
    frames = write_and_load(tmp_path, FOUR_ARMS, ("one", [["A", "B"]]), ("two", [["C", "D"]]), ("three", [["C", "A"]]))
    table = compute_contrasts(frames)
    assert list(dict.fromkeys(table["column"])) == [ERROR, "final_entropy", "mean_entropy"]
    for rows in (table[table["column"] == ERROR], table[table["column"] != ERROR]):
        tested = rows.dropna(subset="p")
        assert tested["p_holm"].to_list() == pytest.approx(holm(tested["p"].to_list()))
    assert len(set(table.loc[table["column"] == ERROR, "p"])) == 3


def test_equal_arms_have_no_difference_and_no_interval_of_width_zero(tmp_path: Path) -> None:
    runs = [run for arm in "ABCD" for run in make_seed_runs(arm, (0.1 + 0.2, 0.3, 0.7))]
    # Rounding does not count: 0.1 + 0.2 is not 0.3.
    runs = [replace(run, error=(0.6, 0.3)) if (run.arm, run.seed) == ("B", 0) else run for run in runs]
    frames = write_and_load(tmp_path, runs, ("same", [["A", "B"], ["C", "D"]]))
    table = compute_contrasts(frames)
    row = get_row(table, "same")
    assert (row["difference"], row["verdict"]) == (0.0, "open")
    assert math.isnan(row["difference_low"])
    assert to_records(compute_pair_differences(frames))[0]["difference"] == 0.0


def test_columns_of_some_tasks_are_contrasted_where_all_runs_have_them(tmp_path: Path) -> None:
    aged_runs = [replace(run, rows={"age_mean": 3.0 + run.seed}) if run.arm in "AB" else run for run in FOUR_ARMS]
    table = compute_contrasts(
        write_and_load(tmp_path, aged_runs, ("all", [["A", "B"], ["C", "D"]]), ("aged", [["A", "B"]]))
    )
    age_rows = table[table["column"] == "mean_replay_age"]
    assert age_rows["contrast"].to_list() == ["aged"]
    assert age_rows["verdict"].to_list() == ["open"]
    runs = [replace(run, rows={"entropy": None}) if (run.arm, run.seed) == ("A", 1) else run for run in FOUR_ARMS]
    table = compute_contrasts(write_and_load(tmp_path / "one", runs, ("up", [["A", "B"]])))
    row = get_row(table, "up", "mean_entropy")
    assert row["excluded_runs"] == "A without a value: seed 1"


def test_every_trial_column_is_contrasted_or_left_out_with_a_reason() -> None:
    names = [column.name for column in TRIAL_COLUMNS]
    columns = FAMILIES["update_rules"].contrasted_columns
    assert sorted([*columns, *UNCONTRASTED_COLUMNS]) == sorted(names)
    assert all((*columns.values(), *UNCONTRASTED_COLUMNS.values()))
    for family in FAMILIES.values():
        assert set(family.common_columns) <= set(family.contrasted_columns)
        assert {family.primary_column} <= set(family.common_columns)
    family = FAMILIES["ppo"]
    assert set(family.contrasted_columns) == {family.primary_column, *family.secondary_columns}


@pytest.mark.parametrize(
    ("extra", "runs"),
    [
        ({}, FOUR_ARMS),
        ({"contrasts": []}, FOUR_ARMS),
        ({"contrasts": [{"name": "up", "pairs": [["A", "B"]]}]}, []),
        ({"contrasts": [{"name": "up", "pairs": [["A", "B"]]}]}, [FakeRun(arm, steps=None, status="") for arm in "AB"]),
    ],
)
def test_without_contrasts_or_runs_the_tables_are_empty(
    tmp_path: Path, extra: dict[str, Any], runs: list[FakeRun]
) -> None:
    frames = load(write_sandbox(tmp_path, runs, FakeStudy("some-study", extra=extra)))
    assert compute_contrasts(frames).empty
    assert compute_pair_differences(frames).empty
    assert list(compute_contrasts(frames)) == list(module._CONTRAST_COLUMNS)


@pytest.mark.parametrize(
    ("contrasts", "message"),
    [
        ([{"name": "x", "pairs": [["A", "A"]]}], "'x' of `s` pairs A with itself: list each pair"),
        ([{"name": "x", "pairs": [["A", "B"], ["C", "D"], ["B", "A"]]}], "'x' of `s` pairs A with B twice: list each"),
        ([{"name": "x", "pairs": [["A", "B"], ["B", "C"], ["C", "A"]]}], "'x' of `s` compares nothing: in its 3 pairs"),
        ([{"name": "x", "pairs": []}], "'x' of `s` compares nothing"),
        ([{"name": "x", "pairs": [["A", "B"]]}, {"name": "x", "pairs": [["C", "D"]]}], "two contrasts named 'x'"),
    ],
)
def test_an_invalid_contrast_is_refused_with_a_reason(contrasts: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_contrasts(make_study_record(contrasts=contrasts))


def test_the_words_of_every_verdict(tmp_path: Path) -> None:
    a, c = (0.30, 0.34, 0.35, 0.33), (0.50, 0.45, 0.47, 0.48)
    b, d = (0.20, 0.25, 0.24, 0.23), (0.45, 0.39, 0.42, 0.43)
    runs = [
        *(run for arm, ends in zip("ABCDF", (a, b, c, d, a), strict=True) for run in make_seed_runs(arm, ends)),
        *make_seed_runs("E", (0.36, 0.33, 0.34, 0.33)),
        *make_seed_runs("I", (0.26, 0.29, 0.34, 0.28)),
        *make_seed_runs("G", b[:2]),
        FakeRun("G", 2, status="failed", steps=40),
        *make_seed_runs("H", d[:3]),
        FakeRun("H", 3, error=(0.6, d[3]), status="early_stopped", steps=107, stop=UNIFORM_STOP),
    ]
    contrasts = {
        "worse": ([["A", "B"], ["C", "D"]], "worse", 0.07625, 0.06458, 0.08792),
        "better": ([["B", "A"]], "better", -0.1, -0.1359, -0.06413),
        "apart": ([["A", "E"]], "open", -0.01, -0.04587, 0.02587),
        "alone": ([["A", "I"]], "open", 0.0375, 0.007485, 0.06751),  # significant alone, but not with Holm's correction
        "same": ([["A", "F"]], "equal", 0, -0.03587, 0.03587),
        "few": ([["A", "G"]], "open", 0.095, 0.03147, 0.1585),
        "some": ([["A", "G"], ["C", "H"]], "worse", 0.0625, 0.04015, 0.08485),
        "none": ([["A", "Z"]], "no comparison", math.nan, math.nan, math.nan),
    }
    frames = write_and_load(tmp_path, runs, *((name, pairs) for name, (pairs, *_) in contrasts.items()))
    rows = {name: get_row(compute_contrasts(frames), name) for name in contrasts}
    for name, (_, verdict, *numbers) in contrasts.items():
        assert rows[name]["verdict"] == verdict
        interval = [rows[name][key] for key in ("difference", "difference_low", "difference_high")]
        assert interval == pytest.approx(numbers, rel=1e-3, abs=1e-9, nan_ok=True)
    some = rows["some"]
    assert (some["pairs_used"], some["pairs"]) == (2, 2)
    assert some["excluded_runs"] == "G failed: seed 2; G not run: seed 3"
    assert some["early_stopped_runs"] == "H: seed 3 at step 107"
    assert rows["none"]["excluded_runs"] == "Z not run: seeds 0, 1, 2, 3"


def test_the_figure_shows_the_numbers_of_the_tables(tmp_path: Path) -> None:
    frames = write_and_load(tmp_path, FOUR_ARMS, ("up", [["A", "B"], ["C", "D"]]), ("none", [["A", "nobody"]]))
    _, rings, intervals, points = read_layers(draw_figures(frames, ["contrasts"])["contrasts"])
    row, pair_rows = get_row(compute_contrasts(frames), "up"), compute_pair_differences(frames)
    numbers = [row[name] for name in ("difference", "difference_low", "difference_high")]
    assert points.rows["name"].to_list() == ["up", "none"]
    assert points.rows["difference"].iloc[0] == pytest.approx(numbers[0])
    assert intervals.list("difference", "difference_low", "difference_high") == [pytest.approx(numbers)]
    expected = pair_rows[(pair_rows["column"] == ERROR) & (pair_rows["contrast"] == "up")]["difference"]
    assert rings.rows.loc[rings.rows["name"] == "up", "difference"].to_list() == pytest.approx(expected.to_list())
    assert points.encoding["x"]["axis"]["title"] == f"{ERROR}, first minus second"
