"""Log to W&B on request: one W&B run per run, written by a separate thread so that nothing waits for the service."""

import queue
import threading
from pathlib import Path
from typing import Any, NamedTuple

from ray import tune

from trainable.config.command_lines import format_command
from trainable.runs.run_files import GRADIENTS_FILE
from tune_study.folder.statuses import read_status
from tune_study.plan.run_spec import RunSpec
from tune_study.plan.study_plan import StudyPlan
from tune_study.tune.trials import list_run_ids, split_rows_by_run
from tune_study.tune.wandb_sync import WandbUploader

CLOSE_TIMEOUT_S = 30.0
"""Time limit in seconds of each of three waits: for the opening of a run, and at the end of a study for pending writes
and then for uploads.

W&B is a copy of rows that are on disk, so a study does not wait long for a service that does not answer.
"""


class _Event(NamedTuple):
    """An event of a run. kind: `start`, `row` (uses step and values) or `end` (uses exit_code, 0 for success)."""

    kind: str
    run_id: str
    step: int = 0
    values: dict[str, Any] | None = None
    exit_code: int = 0


class WandbCallback(tune.Callback):  # type: ignore[misc]  # Ray is untyped
    """Passes every row to a thread that writes it to W&B. An error in this thread ends the logging, never the study.

    plan: the study. mode: a mode of --wandb other than off. The attribute `problem` says why the logging is incomplete;
    it is empty if it is complete.
    """

    def __init__(self, plan: StudyPlan, mode: str) -> None:
        self.problem = ""
        self._plan = plan
        self._mode = mode
        self._specs: dict[str, RunSpec] = {spec.run_id: spec for spec in plan.runs}
        self._events: queue.SimpleQueue[_Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write_events, name="wandb", daemon=True)
        self._uploads = WandbUploader() if mode == "sync" else None

    def __getstate__(self) -> dict[str, Any]:
        """Nothing: Tune pickles its callbacks into the results, and a thread cannot be pickled."""
        return {}

    def setup(self, *_: Any, **__: Any) -> None:
        """Start the thread when the experiment starts."""
        self._thread.start()

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Queue the start of runs. A run that ended in an earlier start was logged then."""
        if not trial.config["finished"]:
            self._enqueue(*(_Event("start", run_id) for run_id in list_run_ids(trial.config)))

    def on_trial_result(self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **i: Any) -> None:
        """Queue the rows of a step."""
        if not trial.config["finished"]:
            rows = split_rows_by_run(trial.config, result).items()
            self._enqueue(
                *(_Event("row", run_id, int(row.get("step") or 0), select_loggable(row)) for run_id, row in rows)
            )

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Queue the end of runs. Some may have failed while others of the trial continued; their statuses say so."""
        for run_id in list_run_ids(trial.config):
            self._enqueue(_Event("end", run_id, exit_code=int(self._has_failed(run_id))))

    def on_trial_recover(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Queue the end of runs whose failure is final; the Recorder has already written their statuses."""
        failed_ids = [run_id for run_id in list_run_ids(trial.config) if self._has_failed(run_id)]
        self._enqueue(*(_Event("end", run_id, exit_code=1) for run_id in failed_ids))

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Queue the end of runs that failed."""
        self._enqueue(*(_Event("end", run_id, exit_code=1) for run_id in list_run_ids(trial.config)))

    def _has_failed(self, run_id: str) -> bool:
        status = read_status(self._plan.get_run_dir(run_id))
        return status is not None and status.status == "failed"

    def _enqueue(self, *events: _Event) -> None:
        for event in events:
            self._events.put(event)

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> bool:
        """End the open W&B runs; return whether everything was written, and uploaded if requested, in `timeout_s`."""
        if self._thread.is_alive():  # it never started if the experiment did not, and has ended after an error
            self._events.put(None)  # the end of the queue
            self._thread.join(timeout_s)
        if self._uploads is not None and not self._uploads.close(timeout_s):
            command = format_command("sync", *self._uploads.pending_folders, program="wandb")
            reason = self._uploads.problem or "the upload took too long"
            self.problem = self.problem or f"{reason}. Upload with: {command}"
        return not self._thread.is_alive() and not self.problem

    def _write_events(self) -> None:
        """Body of the thread: process events in order, until the end or the first error."""
        open_runs: dict[str, Any] = {}
        try:
            while (event := self._events.get()) is not None:
                self._apply_event(open_runs, event)
            for run in open_runs.values():
                self._finish_run(run)
        except Exception as error:  # no error of the service may affect the study
            self.problem = f"{type(error).__name__}: {error}"

    def _apply_event(self, open_runs: dict[str, Any], event: _Event) -> None:
        """Pass an event to W&B. open_runs: the open W&B runs, by run_id."""
        # A trial that is retried starts again while its W&B run is still open, and ends its runs once more.
        if event.kind == "start" and event.run_id not in open_runs:
            open_runs[event.run_id] = self._open_run(self._specs[event.run_id])
        elif event.kind == "row":
            values = event.values or {}
            open_runs[event.run_id].log(
                {**values, **self._read_gradient_analysis(event.run_id, event.step, values)}, step=event.step
            )
        elif event.kind == "end" and event.run_id in open_runs:
            self._finish_run(open_runs.pop(event.run_id), event.exit_code)

    def _finish_run(self, run: Any, exit_code: int = 0) -> None:
        """End a W&B run, and queue its upload if requested."""
        # Read before `finish`, after which W&B's run is closed.
        folder, service = Path(run.settings.sync_dir), str(run.settings.base_url)
        run.finish(exit_code=exit_code)
        if self._uploads is not None:
            self._uploads.add(folder, service)

    def _read_gradient_analysis(self, run_id: str, step: int, values: dict[str, Any]) -> dict[str, Any]:
        """The results of the step's gradient analysis under the published keys; empty if there was none."""
        if "seconds_gradient_analysis" not in values:  # only a step with an analysis has this column
            return {}
        import wandb

        from analysis.gradients.published_metrics import TABLE_COLUMNS, read_published_metrics

        analysis = read_published_metrics(self._plan.get_run_dir(run_id) / GRADIENTS_FILE, step)
        tables = {key: wandb.Table(columns=list(TABLE_COLUMNS), data=rows) for key, rows in analysis.tables.items()}
        return {**analysis.numbers, **tables, "timing_s/gradient_analysis": values["seconds_gradient_analysis"]}

    def _open_run(self, spec: RunSpec) -> Any:
        """Open a W&B run.

        Its id is made from the name and the settings of our run. A resumed run therefore continues its W&B run, and a
        run of the same name with other settings gets a new one.
        """
        import wandb

        return wandb.init(
            project=self._plan.wandb_project,
            group=self._plan.run,
            name=spec.run_id,
            # W&B documents a limit of 128 characters for project names; the same is assumed for ids. The end is kept
            # because it has the hash.
            id=f"{spec.run_id}-{spec.config.compute_hash()}"[-128:],
            config=spec.config.model_dump(mode="json"),
            dir=self._plan.output,
            # sync writes an offline run, which `WandbUploader` uploads when it has ended.
            mode="offline" if self._mode == "sync" else self._mode,  # type: ignore[arg-type]  # see choose_wandb_mode
            resume="allow",  # continue the W&B run of an earlier start, if there is one
            reinit="create_new",  # several runs are open in this process at once
            settings=wandb.Settings(silent=True, console="off", init_timeout=CLOSE_TIMEOUT_S),
        )


def select_loggable(row: dict[str, Any]) -> dict[str, Any]:
    """The numbers and texts of a row. Tune's config, lists, and values that were not measured are left out."""
    return {name: value for name, value in row.items() if isinstance(value, int | float | str)}
