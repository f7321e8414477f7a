"""Read the results of a script that uses Ray Tune with our Trainables, which writes no study.json."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from analysis.data.frames import StudyFrames
from analysis.data.load import RunFiles, make_frames
from analysis.data.run_files import flatten_config, get_analysis_key, get_evaluation_key, parse_step_row
from analysis.data.schemas import Row
from trainable.families import Family
from trainable.families import get_family as get_named_family
from trainable.files.json_lines import Lines, read_lines
from trainable.files.paths import atomic_write
from trainable.runs.history import RunEnd, describe_end
from trainable.runs.records import STOP_COLUMNS, drop_carried
from trainable.runs.run_files import GRADIENTS_FILE, LEVELS_FILE, select_lines, select_rows
from trainable.runs.study_record import CENSORED, AxisRecord, RunRecord, StatusRecord, StudyRecord, find_total_steps

_NO_SETTINGS = ("run", "seed", "__trial_index__")
"""Keys of a configuration that are not settings of an arm; the last one comes from Tune's Repeater."""
_SCHEDULER_REASON = "Ray Tune ended the trial before its run had, such as by a scheduler"


def read_results(results: Any, baseline: str | None = None) -> StudyFrames:
    """Convert a `ray.tune.ResultGrid` to frames.

    results: the grid; its files are read in place. baseline: the arm with which the others are compared, if any. A
    trial is a run, but a trial of several seeds has one run per seed. Runs whose settings differ only in the seed form
    an arm, named by `run` / `arm` of the parameter space, or by the values of the settings that vary.

    A run that a stop rule ended is early_stopped, a run with a failure is failed, and a run that Tune ended before its
    last step is censored: what it would have reached is unknown.
    """
    trials: list[tuple[Any, Row]] = []
    for result in results:
        entries = flatten_config(result.config or {}).items()
        trials.append((result, {name: value for name, value in entries if name.split(".")[0] not in _NO_SETTINGS}))
    names = dict.fromkeys(name for _, settings in trials for name in settings)
    varying = [name for name in names if len({str(settings.get(name)) for _, settings in trials if settings}) > 1]
    options: dict[str, Any] = next((result.config.get("run", {}) for result, _ in trials if result.config), {})
    study_name, family = str(options.get("study", "tune")), get_named_family(options.get("family", "ppo"))
    runs: list[RunFiles] = []
    for result, settings in trials:
        values = ",".join(str(settings.get(name)) for name in varying)
        arm = str((result.config or {}).get("run", {}).get("arm") or (values if settings else "") or "all")
        for run_id, seed, rows, failure in _split_rows(result, family):
            header = RunRecord(run_id, arm, seed, study_name, config=settings)
            runs.append(_make_run(result, header, rows, failure, family))
    axis = AxisRecord(" x ".join(varying), values=tuple(dict.fromkeys(run.header.arm for run in runs)))
    seeds = tuple(sorted({run.header.seed for run in runs}))
    study = StudyRecord(study_name, "", axis, seeds, (), {}, family=family.name, baseline=baseline or "")
    return make_frames(study, runs, ())


def _split_rows(result: Any, family: Family) -> Iterator[tuple[str, int, list[Row], str]]:
    """Yield (run_id, seed, rows, failure) for each run of a trial; failure is empty if the run did not fail."""
    config = result.config or {}
    try:
        content = result.filesystem.open_input_stream(f"{result.path}/result.json").readall()
    except FileNotFoundError:  # the trial failed before its first result
        content = b""
    reported = [json.loads(line) for line in content.splitlines() if line.strip()]
    last = reported[-1] if reported else {}
    failure = str(last.get("failure") or result.error or "")
    if isinstance(config.get("seed"), list | tuple):
        rows_by_run: dict[str, list[Row]] = {}
        for report in reported:
            for run_id, row in report.get("rows", {}).items():
                rows_by_run.setdefault(run_id, []).append(row)
        failed = last.get("failed") or {}
        for run_id in dict.fromkeys((*rows_by_run, *failed)):
            rows = select_rows(rows_by_run.get(run_id, []))
            seed = int(rows[-1]["seed"]) if rows else int(run_id.rpartition("-s")[2])
            is_open = not rows or describe_end(rows, find_total_steps(config)).status == "interrupted"
            yield run_id, seed, rows, str(failed.get(run_id, "")) or (failure if is_open else "")
        return
    rows = [drop_carried(report) for report in reported if not report.get("failure_class")]
    seed = rows[-1]["seed"] if rows else last.get("seed", config.get("seed", 0))
    run_id = str(last.get("run_id") or result.path.rpartition("/")[2])
    yield run_id, int(seed), select_rows(rows), failure


def _make_run(result: Any, header: RunRecord, rows: list[Row], failure: str, family: Family) -> RunFiles:
    """Collect what a run wrote. failure: why it failed; empty if it did not."""
    # Of the trial's last checkpoint only evaluations and gradient analyses are read.
    lines, checkpoint = dict.fromkeys((LEVELS_FILE, GRADIENTS_FILE), Lines(())), result.checkpoint
    with tempfile.TemporaryDirectory() as folder:
        for name in lines if checkpoint is not None else ():
            with suppress(FileNotFoundError), atomic_write(Path(folder, name)) as temp_path:
                content = checkpoint.filesystem.open_input_stream(f"{checkpoint.path}/{header.seed}/{name}").readall()
                temp_path.write_bytes(content)
            lines[name] = read_lines(Path(folder, name))
    last, metrics, total = rows[-1] if rows else {}, result.metrics or {}, find_total_steps(header.config)
    end = describe_end(rows, total if total is not None or not metrics.get("finished") else last.get("step"))
    if failure:
        end = RunEnd("failed", failure)
    elif end.status == "interrupted":
        end = RunEnd(CENSORED, _SCHEDULER_REASON)
    stop: dict[str, Any] = {column.name: last.get(column.name) for column in STOP_COLUMNS if last.get("stop_rule")}
    status = StatusRecord(
        run_id=header.run_id,
        status=end.status,
        reason=end.reason,
        failure_class=metrics.get("failure_class") or ("error" if failure else ""),
        trial_id=str(metrics.get("trial_id") or ""),
        **stop,
    )
    return RunFiles(
        header=header,
        rows=[parse_step_row(row, family) for row in rows],
        evaluations=select_lines(lines[LEVELS_FILE].records, get_evaluation_key),
        analyses=select_lines(lines[GRADIENTS_FILE].records, get_analysis_key),
        status=status,
        steps_total=total,
    )
