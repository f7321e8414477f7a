"""Log to W&B on request: one W&B run per run, written by a separate thread so that nothing waits for the service.

W&B gets the rows in the run's file, beginning with the first that it lacks. So no row is lost or sent twice, whenever
the process of the study was killed.
"""

import hashlib
import queue
import shutil
import threading
from collections.abc import Iterable, Mapping
from glob import escape
from typing import Any

from trainable.runs.run_files import GRADIENTS_FILE, METRICS_FILE, read_rows
from trainable.runs.study_record import StatusRecord
from tune_study.plan.study_plan import RunSpec, StudyPlan

OPEN_TIMEOUT_S = 30.0
"""Seconds to wait for opening a run, and at the end of a study, in addition to RUN_TIMEOUT_S per run. W&B has copies of
rows that are on disk, so a study does not wait long for a service that does not answer."""
RUN_TIMEOUT_S = 5.0
"""Seconds to wait for each run at the end of a study, when its summary is written and sent."""


class WandbLog:
    """Passes runs to a thread that writes them to W&B. An error in this thread ends the logging, never the study.

    In mode online, rows are sent as they come. Offline, a W&B run is a file, which is written as a whole when its run
    has ended, and again with its verdict when the study has. It replaces the file of an earlier start.

    plan: the study, whose W&B mode is not off; it may be replaced by the same study with more runs. problem: why the
    logging is incomplete; empty if it is complete.
    """

    def __init__(self, plan: StudyPlan) -> None:
        self.problem, self.plan = "", plan
        self._events: queue.SimpleQueue[tuple[str, Mapping[str, Any] | None] | None] = queue.SimpleQueue()
        """Runs to write, with the summary that ends a W&B run (None: the run is trained). None ends the queue."""
        self._open_runs: dict[str, Any] = {}
        """The open W&B runs, by run_id; only the thread uses them."""
        self._thread = threading.Thread(target=self._write_events, name="wandb", daemon=True)
        self._thread.start()

    @property
    def _specs(self) -> dict[str, RunSpec]:
        return {spec.run_id: spec for spec in self.plan.runs}

    def send_rows(self, run_ids: Iterable[str]) -> None:
        """Queue runs with new rows."""
        if self.plan.wandb.mode == "online":
            for run_id in run_ids:
                self._events.put((run_id, None))

    def end_run(self, status: StatusRecord) -> None:
        """Queue a run that has ended with this status."""
        self._events.put((status.run_id, {"status": status.status, "reason": status.reason}))

    def conclude(self, summaries: Mapping[str, Mapping[str, Any]]) -> None:
        """Queue all runs of the study. summaries: the final summary of each, by run_id."""
        for run_id, summary in summaries.items():
            if run_id in self._specs:  # the folder may have runs of another plan
                self._events.put((run_id, summary))

    def close(self) -> str:
        """End the open W&B runs; return `problem`, which is empty if all was written and, in mode online, sent."""
        self._events.put(None)
        self._thread.join(OPEN_TIMEOUT_S + RUN_TIMEOUT_S * len(self._specs))
        if self._thread.is_alive():
            self.problem = self.problem or "it took too long"
        return self.problem

    def _write_events(self) -> None:
        """Process events in order in the thread, until the end or the first error."""
        try:
            while (event := self._events.get()) is not None:
                self._write_run(*event)
            for run in self._open_runs.values():
                run.finish()
        except Exception as error:  # no error of the service may affect the study
            self.problem = f"{type(error).__name__}: {error}"

    def _write_run(self, run_id: str, summary: Mapping[str, Any] | None) -> None:
        """Send the rows of a run that W&B lacks, and end its W&B run if there is a summary."""
        rows = read_rows(self.plan.get_run_dir(run_id) / METRICS_FILE)
        # A run that failed before its first row is ended, too.
        if not rows and (summary is None or summary.get("status") == "never_ran"):
            return
        run = self._open_runs.get(run_id)
        if run is None:
            run = self._open_runs[run_id] = self._open_run(self._specs[run_id])
        for row in rows:
            # Begin with the first step that W&B lacks. `starting_step` covers rows that an earlier start has sent, of
            # which `step` does not know before the first row of this start.
            if row["step"] >= max(run.step, run.starting_step):
                values = select_loggable(row)
                analysis = self._read_gradient_analysis(run_id, row["step"], values)
                # The commit ends the step, so `step` is then the next one.
                run.log({**values, **analysis}, step=row["step"], commit=True)
        if summary is not None:
            run.summary.update(summary)
            self._open_runs.pop(run_id).finish(exit_code=int(summary.get("status") == "failed"))

    def _read_gradient_analysis(self, run_id: str, step: int, values: dict[str, Any]) -> dict[str, Any]:
        """Read the results of the step's gradient analysis under the published keys; empty if there was none."""
        if "seconds_gradient_analysis" not in values:  # only a step with an analysis has this column
            return {}
        import wandb

        from analysis.gradients.published_metrics import TABLE_COLUMNS, read_published_metrics

        numbers, rows_by_key = read_published_metrics(self.plan.get_run_dir(run_id) / GRADIENTS_FILE, step)
        tables = {key: wandb.Table(columns=list(TABLE_COLUMNS), data=rows) for key, rows in rows_by_key.items()}
        return {**numbers, **tables, "timing_s/gradient_analysis": values["seconds_gradient_analysis"]}

    def _open_run(self, spec: RunSpec) -> Any:
        """Open a W&B run.

        Its id is made from the names of run and study and from the settings that identify the run. So a run that is
        resumed or made longer continues its W&B run, and a run with other settings gets a new one.
        """
        import wandb

        plan, is_online = self.plan, self.plan.wandb.mode == "online"
        identity = hashlib.sha256(f"{plan.run} {spec.config.compute_run_hash()}".encode()).hexdigest()[:12]
        # W&B documents a limit of 128 characters for project names, which is assumed for ids. The end has the hash.
        wandb_id = f"{spec.run_id}-{identity}"[-128:]
        if not is_online:  # replace the file of an earlier start
            for folder in (plan.output / "wandb").glob(f"offline-run-*-{escape(wandb_id)}"):
                shutil.rmtree(folder)
        labels = {"study": plan.study.name, "arm": spec.arm, "seed": spec.seed, "group": plan.run}
        return wandb.init(
            project=plan.wandb_project,
            group=plan.run,
            job_type=spec.arm,
            name=spec.run_id,
            id=wandb_id,
            config={**spec.config.model_dump(mode="json"), **labels, "preset": plan.preset},
            dir=plan.output,
            mode="online" if is_online else "offline",
            # Online, continue the W&B run of an earlier start. Offline, the file has all rows, and its upload replaces
            # earlier ones.
            resume="allow" if is_online else None,
            reinit="create_new",  # several runs are open in this process at once
            settings=wandb.Settings(silent=True, console="off", init_timeout=OPEN_TIMEOUT_S),
        )


def select_loggable(row: dict[str, Any]) -> dict[str, Any]:
    """Select the numbers and texts of a row, without Tune's config, lists, and values that were not measured."""
    return {name: value for name, value in row.items() if isinstance(value, int | float | str)}
