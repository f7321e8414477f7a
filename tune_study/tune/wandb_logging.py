"""W&B, when asked for: one W&B run a run, written by a thread of its own so that nothing waits for the service."""

import queue
import shlex
import threading
from pathlib import Path
from typing import Any, NamedTuple

from ray import tune

from trainable.runs.run_files import GRADIENTS_FILE
from tune_study.folder.outputs import read_status
from tune_study.plan.study_plan import RunSpec, StudyPlan
from tune_study.tune.trials import list_run_ids, split_rows_by_run
from tune_study.tune.wandb_sync import WandbUploader

CLOSE_TIMEOUT_S = 30.0
"""How long the end of a study waits for what is still to be written."""


class _Event(NamedTuple):
    """What happened to a run: `start`, `row` (with the numbers), or `end` (with an exit code)."""

    kind: str
    run_id: str
    step: int = 0
    values: dict[str, Any] | None = None
    exit_code: int = 0


class WandbCallback(tune.Callback):  # type: ignore[misc]  # Ray is untyped
    """Hands every row to a thread that writes it to W&B. Trouble there ends the logging, never the study."""

    def __init__(self, plan: StudyPlan, mode: str) -> None:
        self.problem = ""
        self._plan = plan
        self._mode = mode
        self._specs: dict[str, RunSpec] = {spec.run_id: spec for spec in plan.runs}
        self._events: queue.SimpleQueue[_Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write_events, name="wandb", daemon=True)
        self._uploads = WandbUploader() if mode == "sync" else None

    def __getstate__(self) -> dict[str, Any]:
        """Nothing: Tune stores its callbacks beside the results, and a thread cannot be stored."""
        return {}

    def setup(self, *_: Any, **__: Any) -> None:
        """The study starts."""
        self._thread.start()

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Runs start, or start again."""
        if not trial.config["finished"]:
            self._enqueue(*(_Event("start", run_id) for run_id in list_run_ids(trial.config)))

    def on_trial_result(self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **i: Any) -> None:
        """Training steps are done."""
        if not trial.config["finished"]:
            rows = split_rows_by_run(trial.config, result).items()
            self._enqueue(
                *(_Event("row", run_id, int(row.get("step") or 0), select_loggable(row)) for run_id, row in rows)
            )

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Runs have ended, all well but those whose status says that they failed beside others."""
        for run_id in list_run_ids(trial.config):
            self._enqueue(_Event("end", run_id, exit_code=int(self._has_failed(run_id))))

    def on_trial_recover(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Runs have failed; where that was final, their statuses say so by now."""
        failed_ids = [run_id for run_id in list_run_ids(trial.config) if self._has_failed(run_id)]
        self._enqueue(*(_Event("end", run_id, exit_code=1) for run_id in failed_ids))

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Runs have failed."""
        self._enqueue(*(_Event("end", run_id, exit_code=1) for run_id in list_run_ids(trial.config)))

    def _has_failed(self, run_id: str) -> bool:
        status = read_status(self._plan.get_run_dir(run_id))
        return status is not None and status.status == "failed"

    def _enqueue(self, *events: _Event) -> None:
        for event in events:
            self._events.put(event)

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> bool:
        """End what is open; whether all was written, and uploaded where that was asked for, in `patience` seconds."""
        if self._thread.is_alive():
            self._events.put(None)
            self._thread.join(timeout_s)
        if self._uploads is not None and not self._uploads.close(timeout_s):
            folders = " ".join(shlex.quote(str(folder)) for folder in self._uploads.pending_folders)
            reason = self._uploads.problem or "it took too long"
            self.problem = self.problem or f"{reason}. Upload it with: wandb sync {folders}"
        return not self._thread.is_alive() and not self.problem

    def _write_events(self) -> None:
        """The thread: events in order, until the end or the first trouble."""
        open_runs: dict[str, Any] = {}
        try:
            while (event := self._events.get()) is not None:
                self._apply_event(open_runs, event)
            for run in open_runs.values():
                self._finish_run(run)
        except Exception as error:  # whatever a service does must not reach the study
            self.problem = f"{type(error).__name__}: {error}"

    def _apply_event(self, open_runs: dict[str, Any], event: _Event) -> None:
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
        """End a W&B run, and hand it to the upload where that is asked for."""
        folder, service = Path(run.settings.sync_dir), str(run.settings.base_url)
        run.finish(exit_code=exit_code)
        if self._uploads is not None:
            self._uploads.add(folder, service)

    def _read_gradient_analysis(self, run_id: str, step: int, values: dict[str, Any]) -> dict[str, Any]:
        """What the step's gradient analysis found, under the published keys; nothing where there was none."""
        if "seconds_gradient_analysis" not in values:
            return {}
        import wandb

        from analysis.gradients.keys import TABLE_COLUMNS, read_published_metrics

        analysis = read_published_metrics(self._plan.get_run_dir(run_id) / GRADIENTS_FILE, step)
        tables = {key: wandb.Table(columns=list(TABLE_COLUMNS), data=rows) for key, rows in analysis.tables.items()}
        return {**analysis.numbers, **tables, "timing_s/gradient_analysis": values["seconds_gradient_analysis"]}

    def _open_run(self, spec: RunSpec) -> Any:
        """A W&B run whose id is the run's own, so that a continued run goes on in it."""
        import wandb

        return wandb.init(
            project=self._plan.wandb_project,
            group=self._plan.run,
            name=spec.run_id,
            id=f"{spec.run_id}-{spec.config.compute_hash()}"[-128:],
            config=spec.config.model_dump(mode="json"),
            dir=self._plan.output,
            mode="offline" if self._mode == "sync" else self._mode,  # type: ignore[arg-type]  # see choose_wandb
            resume="allow",
            reinit="create_new",
            settings=wandb.Settings(silent=True, console="off", init_timeout=CLOSE_TIMEOUT_S),
        )


def select_loggable(row: dict[str, Any]) -> dict[str, Any]:
    """The numbers and texts of a row; Tune's own config and what was not measured left out."""
    return {name: value for name, value in row.items() if isinstance(value, int | float | str)}
