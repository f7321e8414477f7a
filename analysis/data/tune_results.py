"""Frames of what a script with Ray Tune and our Trainables has left, which has no study.json."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from analysis.data.families import FAMILIES, Row, TableFamily
from analysis.data.frames import StudyFrames
from analysis.data.load import RunFiles, make_frames
from analysis.data.run_files import (
    flatten_config,
    get_analysis_key,
    get_evaluation_key,
    parse_step_row,
    select_lines,
    select_valid_values,
)
from trainable.files.json_lines import Lines
from trainable.runs.records import STOP_COLUMNS, drop_carried
from trainable.runs.run_ends import CENSORED, RunEnd, describe_end
from trainable.runs.run_files import GRADIENTS_FILE, LEVELS_FILE, RunLines, select_rows

_SCHEDULER_REASON = "Ray Tune ended the trial before its run had, such as by a scheduler"


def read_results(results: Any, baseline: str | None = None) -> StudyFrames:
    """The frames of a `ray.tune.ResultGrid`.

    results: the grid; its files are read where they are. baseline: the arm with which the others are compared; None if
    none is. A trial is a run, and a trial of several seeds has one run per seed. Runs whose settings differ in nothing
    but the seed are an arm, whose name is `run` / `arm` of the parameter space, or the values of the settings in which
    arms differ.

    A run that a stop rule ended is early_stopped, one with a failure is failed, and one that Tune ended before its last
    step is censored: nothing is known of what it would have reached.
    """
    trials = [(result, _read_settings(result.config)) for result in results if result.config]
    names = dict.fromkeys(name for _, settings in trials for name in settings)
    varying = [name for name in names if len({str(settings.get(name)) for _, settings in trials}) > 1]
    options = trials[0][0].config.get("run", {}) if trials else {}
    study_name, family = str(options.get("study", "tune")), FAMILIES[options.get("family", "ppo")]
    runs: list[RunFiles] = []
    for result, settings in trials:
        values = ",".join(str(settings.get(name)) for name in varying)
        arm = str(result.config.get("run", {}).get("arm") or values or "all")
        for run_id, seed, rows in _split_rows(result, family):
            header = {"run_id": run_id, "study": study_name, "arm": arm, "seed": seed, "config": settings}
            runs.append(_make_run(result, header, rows, family))
    axis = {"setting": " x ".join(varying), "values": list(dict.fromkeys(run.header["arm"] for run in runs))}
    study = {"name": study_name, "family": family.name, "axis": axis, "baseline": baseline}
    return make_frames(study, runs, ())


def _read_settings(config: Mapping[str, Any]) -> Row:
    """The settings in the configuration of a trial, without the seed."""
    return {name: value for name, value in flatten_config(config).items() if name.split(".")[0] not in ("run", "seed")}


def _split_rows(result: Any, family: TableFamily) -> Iterator[tuple[str, int, list[Row]]]:
    """(run_id, seed, rows) of each run of a trial. The last row may say nothing but that the run failed."""
    with result.filesystem.open_input_stream(f"{result.path}/result.json") as file:
        reported = [json.loads(line) for line in file.readall().splitlines() if line.strip()]
    seed = result.config.get("seed", 0)
    if isinstance(seed, list | tuple):
        by_run: dict[str, list[Row]] = {}
        for report in reported:
            for run_id, row in report.get("rows", {}).items():
                by_run.setdefault(run_id, []).append(row)
        for run_id, rows in by_run.items():
            yield run_id, int(rows[-1]["seed"]), select_rows(rows, family.first_step)
    elif reported:
        rows = [drop_carried(report) for report in reported if not report.get("failure_class")]
        yield str(reported[-1].get("run_id", result.path)), int(seed), select_rows(rows, family.first_step)


def _make_run(result: Any, header: Row, rows: list[Row], family: TableFamily) -> RunFiles:
    """What a run wrote. The lines of its evaluations and gradient analyses are in the last checkpoint of its trial."""
    lines = dict.fromkeys((LEVELS_FILE, GRADIENTS_FILE), Lines(()))
    if result.checkpoint is not None:
        with result.checkpoint.as_directory() as folder:
            lines |= RunLines.read(Path(folder, str(header["seed"]))).files
    last, metrics = (rows[-1] if rows else {}), result.metrics or {}
    is_finished = bool(metrics.get("finished"))
    total = header["config"].get("trainer.total_training_steps")
    end = describe_end(rows, total if total is not None or not is_finished else last.get("step"))
    if metrics.get("failure_class") or result.error is not None:
        end = RunEnd("failed", str(metrics.get("failure") or result.error))
    elif end.status == "interrupted":
        end = RunEnd(CENSORED, _SCHEDULER_REASON)
    status = {"status": end.status, "reason": end.reason, "trial_id": metrics.get("trial_id")}
    status |= {"failure_class": metrics.get("failure_class") or ""}
    status |= {column.name: last.get(column.name) for column in STOP_COLUMNS if last.get("stop_rule")}
    return RunFiles(
        header=header,
        rows=[parse_step_row(row, family) for row in rows],
        evaluations=select_lines(lines[LEVELS_FILE], get_evaluation_key),
        analyses=select_lines(lines[GRADIENTS_FILE], get_analysis_key),
        status=select_valid_values(status),
        steps_total=total,
        end=end,
        contradiction="",
    )
