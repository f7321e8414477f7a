"""Frames of a `ResultGrid` that no study.json describes, from files as Tune writes them."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyarrow.fs import LocalFileSystem

import analysis
from tests.fakes.lines import append_record
from trainable.runs.run_files import LEVELS_FILE

STEPS = {"trainer.total_training_steps": 3}


def make_result(
    folder: Path, config: Mapping[str, Any], reports: list[dict[str, Any]], error: Exception | None = None
) -> SimpleNamespace:
    """What Ray makes of a trial whose result.json has these reports."""
    folder.mkdir()
    if reports:
        (folder / "result.json").write_text("".join(f"{json.dumps(report)}\n" for report in reports))
    known = (dict(config), reports[-1]) if reports else (None, None)
    places = {"path": str(folder), "filesystem": LocalFileSystem(), "checkpoint": None}
    return SimpleNamespace(**places, config=known[0], metrics=known[1], error=error)


def make_reports(seed: int, last_step: int, **last: Any) -> list[dict[str, Any]]:
    """Reports of a run with a validation at step 2, whose value later steps carry."""
    reports = []
    for step in range(1, last_step + 1):
        report = {"run_id": f"r{seed}", "seed": seed, "step": step, "val_success": 0.25 * min(step, 2)}
        reports.append(report | {"carried": "" if step == 2 else "val_success", "finished": step == 3, "trial_id": "t"})
    reports[-1] |= last
    return reports


class Grid(list[Any]):
    """A list of results with the path of their experiment."""

    experiment_path = "/nowhere"


def describe(frames: Any) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in frames.trials[["arm", "seed", "status"]].itertuples(index=False)]


def test_each_end_has_its_status(tmp_path: Path) -> None:
    stop = {"stop_rule": "low_validation_success", "stop_value": 0.1, "stop_threshold": 0.2, "stop_step": 2}
    failure = {"failure": "KeyError: 'x'", "failure_class": "error", "carried": "val_success step"}
    reports = [make_reports(0, 3), make_reports(1, 2), make_reports(0, 2, **stop, finished=True)]
    reports.append([*make_reports(1, 2), {"run_id": "r1", **failure}])
    results = [
        make_result(tmp_path / str(number), {**STEPS, "actor.lr": 1 + number // 2, "seed": number % 2}, lines)
        for number, lines in enumerate(reports)
    ]
    lost = make_result(tmp_path / "lost", {}, [], error=RuntimeError("the node has gone"))
    frames = analysis.load(Grid([*results, lost]), baseline="1")
    assert describe(frames) == [
        ("1", 0, "completed"),
        ("1", 1, "censored"),  # nobody knows what it would have reached
        ("2", 0, "early_stopped"),
        ("2", 1, "failed"),
        ("all", 0, "failed"),
    ]
    reasons = frames.trials["reason"].tolist()
    assert "0.1 is below the threshold 0.2" in reasons[2]
    assert reasons[3:] == ["KeyError: 'x'", "the node has gone"]
    assert frames.study.baseline == "1"
    assert frames.trials["steps_done"].tolist() == [3, 2, 2, 2, 0]


def test_a_carried_value_is_no_measurement_and_a_restored_trial_has_each_step_once(tmp_path: Path) -> None:
    frames = analysis.load(Grid([make_result(tmp_path / "a", STEPS, make_reports(0, 3))]))
    assert frames.steps["val_success"].notna().tolist() == [False, True, False]
    reports = [*make_reports(0, 2), *make_reports(0, 3)]
    frames = analysis.load(Grid([make_result(tmp_path / "b", STEPS, reports)]))
    assert frames.steps["step"].tolist() == [1, 2, 3]


def test_the_repetitions_of_tune_are_seeds_of_an_arm(tmp_path: Path) -> None:
    configs = [{**STEPS, "actor.lr": 1, "seed": 0, "__trial_index__": index} for index in (0, 1)]
    results = [make_result(tmp_path / f"{index}", configs[index], make_reports(index, 3)) for index in (0, 1)]
    assert describe(analysis.load(Grid(results))) == [("all", 0, "completed"), ("all", 1, "completed")]


def make_toy_reports(rows: dict[int, int], failed: dict[int, str]) -> Iterator[dict[str, Any]]:
    """One report per step. rows: by seed, the last step with a row. failed: by seed."""
    for step in range(1, 4):
        by_run = {
            f"t-s{seed}": {"seed": seed, "step": step, "test_error": 0.5} for seed, end in rows.items() if step <= end
        }
        yield {"step": step, "rows": by_run, "failed": {f"t-s{seed}": words for seed, words in failed.items()}}


def test_a_seed_that_failed_alone_is_failed_with_its_reason(tmp_path: Path) -> None:
    run = {"family": "update_rules", "study": "influence"}
    config = {**STEPS, "task": "token_reversal", "seed": [0, 1, 2], "run": run}
    reports = list(make_toy_reports({0: 3, 1: 1}, {1: "the loss is nan", 2: "the loss is inf"}))
    frames = analysis.load(Grid([make_result(tmp_path / "a", config, reports)]))
    assert describe(frames) == [("all", 0, "completed"), ("all", 1, "failed"), ("all", 2, "failed")]
    assert frames.trials["reason"].tolist()[1:] == ["the loss is nan", "the loss is inf"]
    # A failure of the whole trial is none of the seeds that had ended before.
    failure = {"failure": "KeyError: 'x'", "failure_class": "error", "failed": {}}
    reports = [*make_toy_reports({0: 3, 1: 1}, {}), failure]
    frames = analysis.load(Grid([make_result(tmp_path / "b", config, reports)]))
    assert describe(frames) == [("all", 0, "completed"), ("all", 1, "failed")]


def test_evaluations_come_from_the_last_checkpoint_without_its_state(tmp_path: Path) -> None:
    line = {"step": 2, "split": "val", "mode": "sampled", "levels": [7], "clusters": [7], "success": "1"}
    (tmp_path / "checkpoint" / "4").mkdir(parents=True)
    append_record(tmp_path / "checkpoint" / "4" / LEVELS_FILE, line)
    result = make_result(tmp_path / "a", {**STEPS, "seed": 4}, make_reports(4, 3))
    result.checkpoint = SimpleNamespace(path=str(tmp_path / "checkpoint"), filesystem=LocalFileSystem())
    frames = analysis.load(Grid([result]))
    assert frames.levels[["step", "level", "success"]].values.tolist() == [[2, 7, 1]]


def test_a_grid_of_the_command_line_is_read_as_its_folder(tmp_path: Path) -> None:
    grid = Grid()
    grid.experiment_path = str(tmp_path)
    (tmp_path / "study.json").write_text("{}")
    with pytest.raises(ValueError, match="study"):
        analysis.load(grid)
