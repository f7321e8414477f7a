"""Tests of the points of a search, of the Optuna study made from them, and of the section of the report."""

import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pandas as pd
import pytest

from analysis.charts import search as charts
from analysis.charts.chart import INK, POINT_COLOR, STOPPED_COLOR
from analysis.data.frames import StudyFrames
from analysis.data.load import load
from analysis.report.page import format_plain_cell
from analysis.report.pages import conclude, write_frames_report
from analysis.report.results import SweepResults
from analysis.report.search import SEARCH, describe_search, make_complete_points, make_files
from analysis.search.points import CENSORED_POINT, COMPLETE, FAILED, OPEN, find_best_point, make_points
from analysis.search.trials import CONSTRAINT, list_pareto_arms, make_optuna_study
from tests.analysis.charts.specs import read_layers
from tests.analysis.report.test_pages import parse_page
from tests.fakes.run_folders import FakeRun, FakeStudy, make_study_record, write_study

DEFAULTS: dict[str, Any] = {
    "low": 0.0, "high": 0.0, "is_log": False, "is_relative": False, "is_integer": False, "values": [], "condition": [],
}  # fmt: skip
SPACE: list[dict[str, Any]] = [
    {"setting": "actor.lr", "low": 1e-5, "high": 1e-2, "is_log": True},
    {"setting": "actor.use_kl_loss", "values": ["False", "True"]},
    {
        "setting": "actor.kl_loss_coef",
        "low": 1e-3,
        "high": 1.0,
        "is_log": True,
        "condition": ["actor.use_kl_loss", "True"],
    },
    {"setting": "actor.ppo_epochs", "low": 1.0, "high": 4.0, "is_integer": True},
]


def make_entry(objectives: tuple[str, ...] = ("success",), num_points: int = 5) -> dict[str, Any]:
    space = [{**DEFAULTS, **dimension} for dimension in SPACE]
    return {"space": space, "objectives": list(objectives), "num_points": num_points, "points_per_round": 4, "seed": 0}


POINTS = {
    "default": {},
    "point-1": {"actor.lr": "0.001", "actor.use_kl_loss": "False", "actor.ppo_epochs": "2"},
    "point-2": {"actor.lr": "0.01", "actor.use_kl_loss": "True", "actor.kl_loss_coef": "0.1", "actor.ppo_epochs": "1"},
    "point-3": {"actor.lr": "0.0001", "actor.use_kl_loss": "False", "actor.ppo_epochs": "3"},
    "point-4": {"actor.lr": "0.0002", "actor.use_kl_loss": "False", "actor.ppo_epochs": "4"},
}
STOP = ("low_validation_success", 0.001, 0.01)


def make_frames(
    folder: Path, runs: list[FakeRun], objectives: tuple[str, ...] = ("success",), **extra: Any
) -> StudyFrames:
    """Load a search. extra: entries of study.json, also such as no search writes."""
    extra = {"search": make_entry(objectives), "points": POINTS, **extra}
    study = FakeStudy(
        "kl", "search", "point", baseline="default", levels=40, total_steps=20, values=tuple(POINTS), extra=extra
    )
    return load(write_study(folder, runs, study))


def make_runs() -> list[FakeRun]:
    """Two seeds of each point: point-1 is best, a run of point-2 was stopped, point-3 failed once, point-4 waits."""
    limits = {"default": 0.5, "point-1": 0.8, "point-2": 0.9, "point-3": 0.6, "point-4": 0.7}
    runs = [
        FakeRun(arm, seed, steps=20, success=(0.3, limit), settings=POINTS[arm])
        for arm, limit in limits.items()
        for seed in (0, 1)
    ]
    runs[5] = replace(runs[5], status="early_stopped", steps=10, stop=STOP)
    runs[7] = replace(runs[7], status="failed", steps=5, reason="out of memory")
    runs[9] = replace(runs[9], status="interrupted", steps=5)
    return runs


@pytest.fixture(scope="module")
def frames(tmp_path_factory: pytest.TempPathFactory) -> StudyFrames:
    """The search of `make_runs`."""
    return make_frames(tmp_path_factory.mktemp("search"), make_runs(), ("success", "cost"))


def list_points(frames: StudyFrames) -> list[dict[str, str]]:
    """Return the rows of the table of the best points, by heading."""
    table = next(iter(SEARCH.tables(SweepResults(frames))))
    return [{column.heading: format_plain_cell(column, row) for column in table.columns} for row in table.rows]


def test_a_point_is_the_mean_of_its_seeds_and_the_best_is_one_without_a_collapse(frames: StudyFrames) -> None:
    table = make_points(frames).set_index("arm")
    runs = frames.trials
    for arm in ("default", "point-1", "point-2"):
        members = runs[(runs["arm"] == arm)]
        assert table.loc[arm, "success"] == pytest.approx(members["late_val_success"].mean())
        tokens = members["total_sampled_tokens"] + members["total_trained_tokens"]
        assert table.loc[arm, "cost"] == pytest.approx(tokens.mean())
        assert table.loc[arm, "low"] < table.loc[arm, "success"] < table.loc[arm, "high"]
    assert table["state"].to_list() == [COMPLETE, COMPLETE, COMPLETE, COMPLETE, OPEN]
    assert table["violations"].to_list() == [0, 0, 1, 1, 0]
    assert table["is_feasible"].to_list() == [True, True, False, False, False]
    assert table["seeds"].to_list() == [2, 2, 2, 1, 1]
    points = make_points(frames)
    best, worst = find_best_point(points, is_higher_better=True), find_best_point(points, is_higher_better=False)
    assert (best["arm"], worst["arm"]) == ("point-1", "default")  # point-2 has more success, but a run of it collapsed
    assert find_best_point(points.assign(is_feasible=False), is_higher_better=True) is None
    values = make_files(SweepResults(frames))["search_points"].set_index("arm")
    assert values.loc["default", "actor.lr"] == 3e-4
    assert values.loc["point-2", "actor.kl_loss_coef if actor.use_kl_loss=True"] == 0.1
    assert pd.isna(values.loc["point-1", "actor.kl_loss_coef if actor.use_kl_loss=True"])


def test_a_censored_or_failed_point_has_no_outcome(tmp_path: Path) -> None:
    runs = make_runs()
    runs[2] = replace(runs[2], status="censored", steps=10)
    frames = make_frames(tmp_path, runs)
    row = make_points(frames).set_index("arm").loc["point-1"]
    assert (row["state"], row["is_feasible"]) == (CENSORED_POINT, False)
    # The other run did well, or it would have been stopped too: its outcome is not that of the point.
    assert math.isnan(row["success"])
    assert math.isnan(row["cost"])
    leaders = {row["point"]: row for row in list_points(frames)}
    assert (leaders["point-1"]["outcome"], leaders["point-1"]["tokens"]) == ("–", "–")
    runs = [replace(run, status="failed", steps=5) if run.arm == "point-3" else run for run in make_runs()]
    row = make_points(make_frames(tmp_path / "failed", runs)).set_index("arm").loc["point-3"]
    assert (row["state"], row["seeds"], row["violations"]) == (FAILED, 0, 2)
    assert math.isnan(row["success"])


def test_a_study_of_chosen_arms_has_no_points(tmp_path: Path) -> None:
    plain = load(write_study(tmp_path, [FakeRun("0"), FakeRun("0.1")]))
    assert make_points(plain).empty
    assert SweepResults(plain).search is None
    assert "point" not in " ".join(conclude(plain).sentences)


def test_the_optuna_study_has_the_points_that_have_ended_and_logs_nothing(frames: StudyFrames) -> None:
    study = make_optuna_study(
        make_study_record(search=make_entry(("success", "cost"))).search, make_points(frames), is_higher_better=True
    )
    assert [trial.user_attrs["arm"] for trial in study.trials] == ["default", "point-1", "point-2", "point-3"]
    assert [direction.name for direction in study.directions] == ["MAXIMIZE", "MINIMIZE"]
    assert study.trials[2].constraints == {CONSTRAINT: 1.0}
    assert study.trials[1].constraints == {CONSTRAINT: 0.0}
    assert study.trials[1].params == {"actor.lr": 0.001, "actor.use_kl_loss": "False", "actor.ppo_epochs": 2}
    assert study.trials[2].params["actor.kl_loss_coef if actor.use_kl_loss=True"] == 0.1
    # The settings of the study, where the space contains them.
    assert study.trials[0].params == {"actor.lr": 3e-4, "actor.use_kl_loss": "False", "actor.ppo_epochs": 1}
    assert optuna.logging.get_verbosity() == optuna.logging.WARNING


@pytest.mark.parametrize(
    ("state", "optuna_state"), [(COMPLETE, "COMPLETE"), (CENSORED_POINT, "PRUNED"), (FAILED, "PRUNED")]
)
def test_the_state_of_a_point_is_that_of_its_trial(frames: StudyFrames, state: str, optuna_state: str) -> None:
    points = make_points(frames).iloc[:1].assign(state=state)
    (trial,) = make_optuna_study(make_study_record(search=make_entry()).search, points, is_higher_better=True).trials
    assert trial.state.name == optuna_state
    assert (trial.values is not None) == (state == COMPLETE)


def test_the_pareto_front_is_that_of_an_exhaustive_comparison() -> None:
    generator, count = np.random.default_rng(3), 40
    values = {"actor.lr": 1e-3, "actor.use_kl_loss": "False", "actor.ppo_epochs": 1}
    points = pd.DataFrame({"number": range(count), "success": generator.normal(size=count), "values": [values] * count})
    points["arm"] = [f"point-{number}" for number in range(count)]
    points["cost"] = generator.uniform(1, 2, count)
    points = points.assign(state=COMPLETE, seeds=2, violations=0, is_feasible=points["number"] % 5 != 0)
    feasible = points[points["is_feasible"]]
    front = [
        row.arm
        for row in feasible.itertuples()
        if not (
            (feasible["success"] >= row.success)
            & (feasible["cost"] <= row.cost)
            & ((feasible["success"] > row.success) | (feasible["cost"] < row.cost))
        ).any()
    ]
    assert list_pareto_arms(make_study_record(search=make_entry()).search, True, points) == front


@pytest.mark.long
def test_the_report_of_a_search_says_what_its_best_point_is_worth(frames: StudyFrames) -> None:
    results = SweepResults(frames)
    sentence = describe_search(results)
    assert sentence.startswith("4 of 5 points have ended; at 2 of them a run collapsed or failed. ")
    assert "The best of the others is point-1 (lr 0.001, use_kl_loss False, ppo_epochs 2)" in sentence
    location = os.path.relpath(frames.folders[0])  # a command that works where it is read
    assert f"only fresh seeds show by how much (python -m tune_study confirm {location} --arm" in sentence
    assert conclude(frames).sentences[0] == sentence
    rows = list_points(frames)
    assert [row["point"] for row in rows][:2] == ["point-1 (front)", "default"]
    settings = ("lr", "use_kl_loss", "kl_loss_coef", "ppo_epochs")
    assert [rows[1][name] for name in settings] == ["0.0003", "False", "–", "1"]
    page = parse_page(write_frames_report(frames, frames.folders[0], with_pictures=False).read_text())
    assert {"search_history-chart", "search_pareto-chart"} <= set(page.ids)
    short = conclude(replace(frames, study=replace(frames.studies[0], preset_steps=100_000))).sentences
    assert short[0].startswith("A short study: ")
    assert short[1] == sentence
    assert conclude(frames).verdicts == ()  # the points of a search are in its section


def test_the_history_has_every_point_and_the_best_so_far(frames: StudyFrames) -> None:
    table = make_complete_points(SweepResults(frames))
    for is_higher_better in (True, False):
        bounds, best, *points = read_layers(charts.draw_history(table, is_higher_better))
        assert bounds.rows["arm"].to_list() == ["default", "point-1", "point-2", "point-3"]
        assert (best.mark["type"], best.mark["interpolate"]) == ("line", "step-after")
        # Without the points at which a run collapsed or failed.
        assert best.rows["arm"].to_list() == ["default", "point-1"]
        successes = best.rows["success"].to_list()
        best_of = max if is_higher_better else min
        assert best.rows["best"].to_list() == [successes[0], best_of(successes)]
        assert [(layer.mark["color"], layer.rows["arm"].to_list()) for layer in points] == [
            (POINT_COLOR, ["point-1"]),
            (INK, ["default"]),
            (STOPPED_COLOR, ["point-2", "point-3"]),
        ]
        assert [layer.mark["shape"] for layer in points[1:]] == ["diamond", "cross"]


def test_the_front_is_a_line_over_costs(frames: StudyFrames) -> None:
    points = make_complete_points(SweepResults(frames))
    line, *marks, labels = read_layers(charts.draw_pareto(points))
    assert line.rows["arm"].to_list() == points.loc[points["is_front"], "arm"].to_list() == ["point-1"]
    assert labels.rows["label"].to_list() == ["1"]
    drawn = {arm: millions for layer in marks for arm, millions in layer.list("arm", "millions")}
    assert drawn == pytest.approx(dict(zip(points["arm"], points["cost"] / 1e6, strict=True)))


WRONG_SPACES: tuple[list[dict[str, Any]], ...] = (
    [{**DEFAULTS, "low": 0.0, "high": 1.0, "is_log": True}],
    [{**DEFAULTS, "low": 1.0, "high": 1.0}],
    [{**DEFAULTS, "low": "0", "high": 1.0}],
    [{**DEFAULTS, "values": ["1", "1"]}],
    [{**DEFAULTS, "low": 0.5, "high": 4.0, "is_integer": True}],
    [{**DEFAULTS, "low": 0.5, "high": 4.0}] * 2,
)


@pytest.mark.parametrize(
    "change",
    [
        {"space": []},
        {"space": [{"setting": "actor.lr"}]},
        *({"space": [{"name": "a", "setting": "a", **dimension} for dimension in space]} for space in WRONG_SPACES),
        {"objectives": ["time"]},
        {"num_points": "many"},
        *({"points": points} for points in ([], {"default": []}, {"default": {"actor.lr": 1}})),
    ],
)
def test_a_search_that_makes_no_sense_is_damage(tmp_path: Path, change: dict[str, Any]) -> None:
    entry = change if "points" in change else {"search": {**make_entry(), **change}}
    with pytest.raises(ValueError, match="damaged"):
        make_frames(tmp_path, [], **entry)
