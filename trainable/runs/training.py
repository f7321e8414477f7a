"""Train the runs of a trial with one trainer.

Each row is on disk before it is reported, and before the checkpoint of its step is written.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from trainable.config.base_config import BaseRunConfig
from trainable.config.run_config import apply_overrides
from trainable.files.step_phase import STEP_PHASE, remove_phase, write_phase
from trainable.runs.failures import CheckpointError, call_with_retry
from trainable.runs.run import LinesByFile, Run, TrainerState
from trainable.runs.run_files import Row, list_states
from trainable.runs.stop_rules import StopDecision


@dataclass(frozen=True)
class StepResult:
    """Results of a training step, by seed.

    rows: the row of each run that has one for this step, including the column `step`. lines: lines for other files of
    the run. failures: the reason for each run that cannot continue, while the others can.
    """

    rows: Mapping[int, Row] = field(default_factory=dict)
    lines: Mapping[int, LinesByFile] = field(default_factory=dict)
    failures: Mapping[int, str] = field(default_factory=dict)


class Trainer(Protocol):
    """Trains the runs of one configuration, one run per seed, independently of files, studies and Ray."""

    @property
    def seeds(self) -> Sequence[int]:
        """The seeds of the runs that continue."""

    @property
    def step_index(self) -> int:
        """Number of steps trained so far."""

    def step(self, before_update: Callable[[], None]) -> StepResult:
        """Train one step. before_update: called before the step changes a tensor that `get_state` has returned."""

    def evaluate_final(self, seed: int, row: Row) -> tuple[Row, LinesByFile]:
        """Evaluate at the end of a run. Return its final `row` with the columns of the evaluation, and its lines."""

    def get_state(self, seed: int) -> TrainerState:
        """Return everything that the run needs to continue. For a run that is over, this is its last state."""

    def load_states(self, states: Sequence[TrainerState]) -> None:
        """Continue from these states, one per seed, all after the same step.

        Raises ValueError if a state does not fit. If so, the trainer is unchanged, so that older states can be tried.
        """

    def close(self) -> None:
        """Release resources other than memory: engines and other processes."""


@dataclass(frozen=True)
class TrainerFamily:
    """The parts from which runs of one kind are built."""

    make_trainer: Callable[[Any, Sequence[int]], Trainer]
    """Called with the settings and the seeds."""
    evaluate_stop_rules: Callable[[Sequence[Row], Any, Sequence[str]], StopDecision | None] = lambda *_: None
    """Called with the rows of a run so far, its settings and the names of the study's stop rules. Returns why the run
    stops here, or None. Not needed by trainers that write decisions into their rows."""
    make_empty_row: Callable[[Any], Row] = lambda settings: {}
    """Called with the settings. Returns a row with every column, without values, because Tune needs all columns in the
    first row. Not needed by trainers whose rows have every column."""
    best_column: str = ""
    """The column whose largest value marks the checkpoint that `trainer.keep_best` keeps."""


@dataclass(frozen=True)
class StepReport:
    """The report of a step to the driver.

    rows: rows with every column, by run id. failures: the reason of each failed run so far, by run id. last_step: the
    last step with a row. step_count: the number of steps with rows. is_over: whether all runs are over. note: events
    since the last report that a user should know. is_saved: whether all runs that continue have a checkpoint of this
    step on disk.
    """

    rows: dict[str, Row]
    failures: dict[str, str]
    last_step: int
    step_count: int
    is_over: bool
    note: str
    is_saved: bool


class TrainingLoop:
    """Trains the runs of a trial, starting from their newest common checkpoint.

    settings: the settings of all runs, except the seed. runs: run_id, seed, run_dir and checkpoint_dir of each run. A
        run may have a `parent`: run_dir and checkpoint_dir of another run with its seed, and the step after which it
        continues that run, possibly with other settings.
    options: study, arm, stop_rules and interrupts, as in `trainable.trial.PPO`.
    must_continue: whether the runs must not start from the beginning. allows_other_settings: whether their checkpoints
        may be from runs with other settings.
    read_clock: returns the time in seconds, to decide when a rolling checkpoint is due.

    Raises RunLockedError if another process trains one of the runs, and CheckpointError if runs that must continue, or
    their parents, have no usable checkpoint.
    """

    def __init__(
        self,
        family: TrainerFamily,
        settings: BaseRunConfig,
        runs: Iterable[Mapping[str, Any]],
        options: Mapping[str, Any],
        must_continue: bool = False,
        allows_other_settings: bool = False,
        read_clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.family, self.settings = family, settings
        self._must_continue, self._allows_other_settings = must_continue, allows_other_settings
        self._read_clock, self._longest_step_seconds, self._longest_write_seconds = read_clock, 0.0, 0.0
        self.stop_rules: tuple[str, ...] = tuple(options.get("stop_rules", ()))
        self._interrupt_paths = tuple(map(Path, options.get("interrupts", ())))
        has_writer = getattr(settings.trainer, "async_checkpoints", False)  # only language models have the setting
        self._writer = ThreadPoolExecutor(1) if has_writer else None
        self._pending_write: Future[None] | None = None
        self.notes: list[str] = []
        self.trainer: Trainer | None = None
        identity = {"study": options.get("study", ""), "arm": options.get("arm", "")}
        entries = {int(run_entry["seed"]): run_entry for run_entry in runs}
        self.runs = {seed: self._make_run(run_entry, identity) for seed, run_entry in entries.items()}
        self._parents = {
            seed: (self._make_run({**entry, **entry["parent"]}, identity, is_parent=True), int(entry["parent"]["step"]))
            for seed, entry in entries.items()
            if "parent" in entry
        }
        try:
            self._start_runs()
        except BaseException:
            self.close()  # otherwise, locks and the trainer's engine would outlive this object
            raise

    def _make_run(self, run_entry: Mapping[str, Any], identity: Mapping[str, Any], is_parent: bool = False) -> Run:
        settings = apply_overrides(self.settings, {"seed": run_entry["seed"]})
        return Run(
            run_entry["run_id"],
            Path(run_entry["run_dir"]),
            Path(run_entry["checkpoint_dir"]),
            settings,
            identity,
            # Wait while the disk is full, unless the study is being interrupted.
            write=lambda operation: call_with_retry(
                operation, self.settings.trainer.disk_patience, self.notes.append, self._is_interrupted
            ),
            best_column=self.family.best_column,
            allows_other_settings=self._allows_other_settings or is_parent,
        )

    def _start_runs(self) -> None:
        """Lock the runs, read their rows, and resume the runs that are not complete."""
        for run in self.runs.values():
            run.lock()
            remove_phase(run.run_dir)  # of a process that was killed
            run.load_rows()  # after locking, since another process may append rows until then
        unfinished_seeds = [seed for seed, run in self.runs.items() if not run.is_complete(self.notes.append)]
        for seed in self.runs.keys() - unfinished_seeds:
            self.runs[seed].remove_unwanted_state()  # an earlier process may have died before it did so
        self.is_over = not unfinished_seeds
        if unfinished_seeds:
            torch.set_num_threads(1)  # a trial reserves one core, and more threads were slower on a shared machine
            self.trainer = self.family.make_trainer(self.settings, unfinished_seeds)
            self._resume(self.trainer)
        self._saved_at = self._read_clock()  # everything so far is on disk

    def _resume(self, trainer: Trainer) -> None:
        """Load the newest step for which every run has a usable checkpoint, or start at step 0.

        Unusable checkpoints are named in `notes`.
        """
        runs = [self.runs[seed] for seed in trainer.seeds]
        # The runs of a trial are trained together, so all of them must start from the same step.
        for step in sorted(set.intersection(*(run.list_checkpoint_steps() for run in runs)), reverse=True):
            try:
                states = [run.load_checkpoint(step, self.notes.append) for run in runs]
                trainer.load_states(states)
                break
            except CheckpointError:
                continue  # `load_checkpoint` has added the reason to the notes
            except ValueError as error:  # `load_states`: a state does not fit, and the trainer is unchanged
                self.notes.append(f"the checkpoints after step {step} are not used: {error}")
        if self._parents and not trainer.step_index:
            self._begin_after_parents(trainer, runs)
        if self._must_continue and not trainer.step_index:
            raise CheckpointError(f"The checkpoint cannot be continued: {'; '.join(self.notes) or 'it has no state'}.")
        if self.notes or trainer.step_index:
            # A note and not an error: going back only costs time, because a run repeats the same rows.
            self.notes.append(f"training continues after step {trainer.step_index}")
        # Such as runs that are trained together, of which one is new.
        elif any(run.rows or run.list_checkpoint_steps() for run in runs):
            self.notes.append("no checkpoint is common to all runs: training starts from the beginning")
        for run in runs:
            run.drop_rows_after(trainer.step_index)
        # All runs may be over, if an earlier process died after their final rows but before the driver recorded this.
        self.is_over = all(run.is_over for run in runs)

    def _begin_after_parents(self, trainer: Trainer, runs: Sequence[Run]) -> None:
        """Begin runs with the rows and the states of their parents.

        The state is written last, so a run without one begins again, also after a process died here.
        """
        states = []
        for parent, step in (self._parents[run.seed] for run in runs):
            parent.load_rows()
            try:
                states.append(parent.load_checkpoint(step, self.notes.append))
            except CheckpointError as error:
                raise CheckpointError(f"The run that this one continues cannot be used: {error}") from None
        trainer.load_states(states)  # before anything is written: a ValueError says that a state does not fit
        for run in runs:
            run.begin_with(*self._parents[run.seed])
            run.prepare_checkpoint(trainer.get_state(run.seed), is_rolling=True, is_permanent=False)()

    def close(self) -> None:
        """Close the trainer, and allow other processes to train the runs."""
        # A checkpoint is pending here only after an error, which an error of writing must not hide, or if Tune ended
        # the trial. So errors of writing are ignored, and the earlier checkpoint is used.
        if self._writer is not None:
            self._writer.shutdown()
        if self.trainer is not None:
            self.trainer.close()
            self.trainer = None
        for run in self.runs.values():
            run.unlock()

    # ------------------------------------------------------------------ steps

    def step(self) -> StepReport:
        """Train until there is a new row, a failure or an interrupt of the study. Return the report of these steps."""
        if self.is_over or self.trainer is None:  # report the last rows again, so that the experiment lists the runs
            last_rows = {run.run_id: run.rows[-1] for run in self.runs.values()}
            return self._make_report(last_rows, is_saved=True)
        while True:  # not every step has a row: trainers of update rules have one per evaluation
            started_at = self._read_clock()
            with STEP_PHASE.reporting(partial(self._write_phase, self.trainer.step_index + 1)):
                result = self.trainer.step(self.finish_writing)
                rows = self._record_rows(self.trainer, result)
            self._longest_step_seconds = max(self._longest_step_seconds, self._read_clock() - started_at)
            is_saved = self._save_checkpoints(self.trainer, result)
            self.is_over = all(run.is_over for run in self.runs.values())
            if rows or result.failures or self._is_interrupted():
                for run in self.runs.values():
                    remove_phase(run.run_dir)
                return self._make_report(rows, is_saved)

    def _write_phase(self, step: int, phase: str) -> None:
        for run in self.runs.values():
            write_phase(run.run_dir, step, phase)

    def _record_rows(self, trainer: Trainer, result: StepResult) -> dict[str, Row]:
        """Write the rows of a step, including the decisions of stop rules. Return them by run id.

        Rows that stand for failures are written but not returned, since they have no measurements.
        """
        for seed, row in result.rows.items():
            run, lines = self.runs[seed], result.lines.get(seed, {})
            decision = self.family.evaluate_stop_rules([*run.rows, row], run.settings, self.stop_rules)
            if decision is not None:
                row = {**row, **decision.to_columns()}
            if run.is_final_row(row):  # before writing it, because the final evaluation adds columns to this row
                row, final_lines = trainer.evaluate_final(seed, row)
                lines = {name: [*lines.get(name, ()), *final_lines.get(name, ())] for name in {**lines, **final_lines}}
            run.append_row(row, lines)
        # A failed run gets a row with only the reason, so that a later start knows that it is over. Only trainers of
        # several seeds report failures. Their rows count steps from 0, so the last step is `step_index` - 1.
        for seed, reason in result.failures.items():
            self.runs[seed].append_row({"step": trainer.step_index - 1, "failure": reason}, lines={})
        return {self.runs[seed].run_id: self.runs[seed].rows[-1] for seed in result.rows}

    def _save_checkpoints(self, trainer: Trainer, result: StepResult) -> bool:
        """Write the checkpoints that are due after this step. Return whether rolling ones are on disk.

        Rolling checkpoints of all continuing runs are also due when a run ends or fails. From the next step on, the
        other runs are batched without it, and sums over a smaller batch round differently. Resuming from an older
        checkpoint would repeat earlier steps without the ended run, so the last digits of rows would differ. They are
        also due after the best row of a run so far, if its checkpoint is kept.

        A run that ends gets its last state as a rolling checkpoint, or loses its rolling checkpoints if the last state
        is not kept. With save_freq > 0, its last state is also saved permanently. A run that fails gets no checkpoint,
        since it never continues.
        """
        trainer_settings, step = self.settings.trainer, trainer.step_index
        ended_seeds = [seed for seed in result.rows if self.runs[seed].is_over]
        is_best = any(run.best_step is not None and run.best_step == step for run in self.runs.values())
        is_due = bool(ended_seeds or result.failures or is_best) or self._is_interrupted() or self._is_resume_due(step)
        is_permanent = trainer_settings.save_freq > 0 and step % trainer_settings.save_freq == 0
        if is_due or is_permanent:
            self.finish_writing()
        # Runs that have just ended may have left `trainer.seeds`, so they are saved separately.
        for seed in ended_seeds:
            run, is_saved = self.runs[seed], trainer_settings.save_freq > 0
            if run.keeps_final_state or is_saved:
                state = trainer.get_state(seed)
                run.prepare_checkpoint(state, is_rolling=run.keeps_final_state, is_permanent=is_saved)()
            run.remove_unwanted_state()
        writes = [
            run.prepare_checkpoint(trainer.get_state(run.seed), is_rolling=is_due, is_permanent=is_permanent)
            for run in (self.runs[seed] for seed in trainer.seeds)
            if not run.is_over and (is_due or is_permanent)
        ]
        # An interrupted study waits for this step, its last.
        is_waiting = bool(ended_seeds or result.failures) or self._is_interrupted()
        self._write_all(writes, in_background=not is_waiting)
        if is_due:
            self._saved_at = self._read_clock()
        return is_due and self._pending_write is None

    def write_states(self) -> None:
        """Write a rolling checkpoint of each run that continues, unless it has one for its last step."""
        self.finish_writing()
        if self.trainer is None:
            return
        for run in (self.runs[seed] for seed in self.trainer.seeds):
            # A saved checkpoint of the step is not enough, since only rolling ones are copied to other nodes.
            if not run.is_over and f"step_{self.trainer.step_index}" not in list_states(run.run_dir):
                run.prepare_checkpoint(self.trainer.get_state(run.seed), is_rolling=True, is_permanent=False)()

    def _write_all(self, writes: Sequence[Callable[[], None]], in_background: bool) -> None:
        """Call `writes` one after another, in the background if asked for and if there is a writer."""

        def write_all() -> None:
            started_at = self._read_clock()
            for write in writes:
                write()
            self._longest_write_seconds = max(self._longest_write_seconds, self._read_clock() - started_at)

        if in_background and writes and self._writer is not None:
            self._pending_write = self._writer.submit(write_all)
            return
        for write in writes:
            write()

    def finish_writing(self) -> None:
        """Wait until all checkpoints are written. Raise the error of writing if there was one."""
        if self._pending_write is not None:
            pending_write, self._pending_write = self._pending_write, None
            pending_write.result()

    def _is_resume_due(self, step: int) -> bool:
        """Check whether trainer.resume_every or trainer.resume_seconds asks for a rolling checkpoint after `step`.

        By seconds, it is due if one more step, and writing its state in the background, would end too late if both took
        as long as the longest so far. Until the state is written, a killed run continues from the previous one.
        """
        trainer_settings, seconds = self.settings.trainer, self._read_clock() - self._saved_at
        limit = trainer_settings.resume_seconds
        is_late = limit is not None and seconds + self._longest_step_seconds + self._longest_write_seconds > limit
        return is_late or step % trainer_settings.resume_every == 0  # the settings have resume_every >= 1

    def _make_report(self, rows: dict[str, Row], is_saved: bool) -> StepReport:
        # Report each event once. The list must stay the same object, since a background write may append to it.
        n_notes = len(self.notes)
        note = "; ".join(self.notes[:n_notes])
        del self.notes[:n_notes]
        steps = {row["step"] for run in self.runs.values() for row in run.rows}
        failures = {run.run_id: run.failure for run in self.runs.values() if run.failure}
        full_rows = {run_id: {**self.family.make_empty_row(self.settings), **row} for run_id, row in rows.items()}
        return StepReport(full_rows, failures, max(steps, default=0), len(steps), self.is_over, note, is_saved)

    def _is_interrupted(self) -> bool:
        return any(path.exists() for path in self._interrupt_paths)
