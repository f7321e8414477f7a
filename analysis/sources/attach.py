"""Write the rows of another trainer as a run of a study while it trains: a callback for TRL, and a logger for verl."""

import atexit
import os
import re
import sys
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from transformers import TrainerCallback

from analysis.sources.importing import find_planned_steps, make_entry, make_study
from trainable.config.setting_types import SECRET_NAME
from trainable.files.json_lines import append_line, read_lines
from trainable.files.paths import make_folder
from trainable.runs.failures import classify_failure
from trainable.runs.history import make_final_status
from trainable.runs.run_files import METRICS_FILE, acquire_lock, read_rows
from trainable.runs.study_record import (
    RunEntry,
    RunRecord,
    StatusRecord,
    StudyRecord,
    find_record,
    read_record,
    write_record,
)
from trainable.sources.logs import flatten, make_log
from trainable.sources.names import parse_name, translate_rows

VERL_BACKEND = "tune_study"
"""The name of our logger in verl's `trainer.logger`."""
_OWN_NAMES: Mapping[str, str] = MappingProxyType({})
_STUDY_SECONDS, _RUN_SECONDS = 60.0, 5.0
"""How long to wait for other processes that add a run, and for one that trains this run and may be about to end."""
_SECRET_TEXT = re.compile(
    r"//[^/\s]+@|\b(hf_|sk-|gh[ps]_)\w{8}|(key|token|secret|passw\w*)['\"]?[\s=:,]", re.IGNORECASE
)
"""A password in an address, the beginnings of well-known keys, and the name of a secret before its value."""
_open_runs: list["AttachedRun"] = []
"""The run that this process trains, if any."""


class AttachedRun:
    """A run of a study whose trainer reports its measurements itself. It is `running` until `close`.

    folder, arm, seed, baseline, columns: see `StudyCallback`. trainer: its name in `names.csv`. settings: those of the
    trainer, nested or flat. Those that look like secrets are left out.

    Raises ValueError if the folder has a study of another kind, and RunLockedError if another process trains the run.
    """

    def __init__(
        self,
        folder: Path,
        arm: str,
        seed: int,
        baseline: str,
        columns: Mapping[str, str],
        trainer: str,
        settings: Mapping[str, Any],
    ) -> None:
        if not arm or type(seed) is not int or not 0 <= seed < 2**31:
            raise ValueError(f"arm={arm!r} and seed={seed!r} name no run: give a text and a whole number from 0.")
        end_open_runs()
        self._trainer, self._names = trainer, [parse_name(*names) for names in columns.items()]
        self._pid, self._known_error = os.getpid(), getattr(sys, "last_value", None)
        settings = {key: value for key, value in flatten(settings).items() if not _is_secret(key, value)}
        if total := find_planned_steps(settings):
            settings["trainer.total_training_steps"] = total
        self._total = total
        with closing(acquire_lock(make_folder(folder, "runs"), _STUDY_SECONDS)):
            study, entry = _add_run(folder, arm, seed, baseline, total)
            self._folder = make_folder(folder, "runs", entry.run_id)
            self._lock = acquire_lock(self._folder, _RUN_SECONDS)
            write_record(self._folder, RunRecord(**asdict(entry), config=settings))
            write_record(folder, study)
        earlier = find_record(StatusRecord, self._folder)
        started_at = (earlier and earlier.started_at) or datetime.now(UTC).isoformat()
        self._status = StatusRecord(entry.run_id, "running", started_at=started_at)
        write_record(self._folder, self._status)
        self._path = self._folder / METRICS_FILE
        self._end = read_lines(self._path).end
        self._earlier_rows = {row["step"]: row for row in read_rows(self._path)}
        self._entries: list[tuple[int, dict[str, Any]]] = []
        _open_runs.append(self)

    def log(self, data: Mapping[str, Any], step: int) -> None:
        """Take measurements of a step, which may come in several calls, such as those of training and validation."""
        if self._entries and self._entries[-1][1]["step"] != step:
            self.write_row()
        # A number of numpy or torch becomes one of Python.
        values = {key: value.item() if getattr(value, "ndim", None) == 0 else value for key, value in data.items()}
        self._entries.append((self._end.line_count + 1, {**values, "step": step}))

    def write_row(self) -> None:
        """Write what has been taken, unless it was measured before the first step and waits for the row of that."""
        log = make_log(self._path, f"{self._trainer}, attached", self._entries, {})
        if log is None or log.rows[-1].step < 1:
            return
        self._entries = []
        row = translate_rows(log, self._names, self._trainer)[-1]
        # A resumed trainer may validate at the step of its checkpoint, which has a row.
        if "train_reward" not in row:
            row = {**self._earlier_rows.get(row["step"], {}), **row}
        self._end = append_line(self._path, row, self._end)
        self._earlier_rows = {row["step"]: row}

    def close(self, error: BaseException | None = None) -> None:
        """Write the last row, and the status that follows from the rows, or `failed` after an error."""
        if self._lock.closed or self._pid != os.getpid():  # a process that was forked trains no run
            return
        self.write_row()
        rows = read_rows(self._path)
        status = make_final_status(self._status, rows, self._total)
        if isinstance(error, Exception) and error is not self._known_error:
            failure = classify_failure(error, bool(rows))
            status = replace(status, status="failed", reason=failure.message, failure_class=failure.kind)
        write_record(self._folder, replace(status, ended_at=datetime.now(UTC).isoformat()))
        self._lock.close()
        _open_runs.remove(self)


@atexit.register
def end_open_runs() -> None:
    """End the run whose trainer has not: when another one begins, and when the process ends, maybe with an error."""
    for run in tuple(_open_runs):
        run.close(sys.exc_info()[1] or getattr(sys, "last_value", None))


def _is_secret(key: str, value: object) -> bool:
    text, environ = str(value), os.environ.items()
    has_known_secret = any(SECRET_NAME.search(name) and len(known) >= 8 and known in text for name, known in environ)
    looks_like_secret = SECRET_NAME.search(key) or _SECRET_TEXT.search(text) or has_known_secret
    return isinstance(value, str | list) and bool(looks_like_secret)


def _add_run(folder: Path, arm: str, seed: int, baseline: str, total: int | None) -> tuple[StudyRecord, RunEntry]:
    """Return the study in `folder` with a further run, and the entry of the run."""
    try:
        study = read_record(StudyRecord, folder)
    except FileNotFoundError:
        study = make_study(folder.name, "arm", (), None)
    if study.family != "imported":
        raise ValueError(
            f"{folder} has a study that tune_study trains: name another folder for runs of other trainers."
        )
    entries = {(entry.arm, entry.seed): entry for entry in study.runs}
    entry = entries.setdefault((arm, seed), make_entry(study.name, arm, seed, study.runs))
    # The first arm is the baseline.
    ordered = sorted(entries.values(), key=lambda entry: entry.arm != baseline)
    extended = make_study(study.name, "arm", ordered, max(total or 0, study.total_steps or 0) or None)
    return replace(extended, created_at=study.created_at), entry


class StudyCallback(TrainerCallback):  # type: ignore[misc]
    """Writes the run of a Trainer of TRL or transformers into the folder of a study, from its main process.

    folder: the folder of the study, such as results/my_study, to which other processes may write other runs. arm, seed:
    which run it is; a training of an arm and a seed that the study has continues that run. baseline: the arm with which
    the others are compared; by default the first that began. columns: their names of measurements by ours, as --column
    of `import` takes them.

    Example:
        >>> callback = StudyCallback("results/my_study", arm="beta=0.04", seed=1, columns={"val_success": "eval_pass"})
    """

    def __init__(
        self, folder: Path | str, arm: str, seed: int, *, baseline: str = "", columns: Mapping[str, str] = _OWN_NAMES
    ) -> None:
        self._attach = partial(AttachedRun, Path(os.path.abspath(folder)), arm, seed, baseline, columns)
        self._run: AttachedRun | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin the run."""
        if state.is_world_process_zero:
            self._run = self._attach("trl", {**args.to_dict(), "max_steps": state.max_steps})

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any], **kwargs: Any) -> None:
        """Take what the trainer logs while it trains."""
        if self._run:
            self._run.log(logs, state.global_step)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the row of the step before."""
        if self._run:
            self._run.write_row()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the run."""
        if self._run:
            self._run.close()
        self._run = None


def add_verl_backend(
    folder: Path | str, arm: str, seed: int, *, baseline: str = "", columns: Mapping[str, str] = _OWN_NAMES
) -> None:
    """Add a logger `tune_study` to those that verl's `trainer.logger` may name. See `StudyCallback` for the arguments.

    verl has no registry of loggers, so the name `verl.utils.tracking.Tracking` gets a subclass as its value. Call this
    in a module that VERL_USE_EXTERNAL_MODULES names: verl imports it in each process, before its trainers. Only the
    process that logs writes.
    """
    from verl.utils import tracking

    attach = partial(AttachedRun, Path(os.path.abspath(folder)), arm, seed, baseline, columns)

    class StudyTracking(tracking.Tracking):  # type: ignore[misc]
        supported_backend = (*tracking.Tracking.supported_backend, VERL_BACKEND)

        def __init__(
            self, project_name: str, experiment_name: str, default_backend: Any = "console", config: Any = None
        ) -> None:
            super().__init__(project_name, experiment_name, default_backend, config)
            if VERL_BACKEND in default_backend:
                self.logger[VERL_BACKEND] = attach("verl", config or {})

        def finish(self, exit_code: int = 0) -> None:
            if run := getattr(self, "logger", {}).get(VERL_BACKEND):
                run.close(sys.exc_info()[1])
            super().finish(exit_code)

    tracking.Tracking = StudyTracking
