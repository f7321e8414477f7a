"""Runs on their way to their ends: trained by one trainer, each row on disk before it is told and before its state."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from trainable.config.run_config import apply_overrides
from trainable.config.study_config import BaseRunConfig
from trainable.runs.checkpoint import CheckpointError
from trainable.runs.full_disk import call_with_retry
from trainable.runs.run import LinesByFile, Row, Run, TrainerState
from trainable.runs.stop_rules import StopDecision


@dataclass(frozen=True)
class StepResult:
    """What a training step gave, by seed.

    rows: columns of the runs that have a row of this step, `step` among them. lines: what goes into other files of a
    run. failed: why, of runs that cannot continue while the others can.
    """

    rows: Mapping[int, Row] = field(default_factory=dict)
    lines: Mapping[int, LinesByFile] = field(default_factory=dict)
    failures: Mapping[int, str] = field(default_factory=dict)


class Trainer(Protocol):
    """Trains the runs of one configuration, one for each seed. It knows nothing of files, studies and Ray."""

    @property
    def seeds(self) -> Sequence[int]:
        """Of the runs that continue."""
        ...

    @property
    def step_index(self) -> int:
        """Steps trained so far."""
        ...

    def step(self) -> StepResult:
        """Train one step."""
        ...

    def evaluate_final(self, seed: int, row: Row) -> tuple[Row, LinesByFile]:
        """The last `row` of a run with what is measured only once, at the end, and the lines of that."""
        ...

    def get_state(self, seed: int) -> TrainerState:
        """All that the run needs to continue; of a run that has ended, its last state."""
        ...

    def load_states(self, states: Sequence[TrainerState]) -> None:
        """Continue from states of one step, one for each seed.

        ValueError, and nothing is changed, where they do not fit.
        """
        ...

    def close(self) -> None:
        """Give back what is held beyond memory: engines, other processes."""
        ...


def never_stop(rows: Sequence[Row], settings: Any, rules: Sequence[str]) -> StopDecision | None:
    """No decision: the trainer applies its rules itself and writes them into its rows."""
    return None


def make_no_columns(settings: Any) -> Row:
    """No column: every row of the trainer has all of them."""
    return {}


@dataclass(frozen=True)
class TrainerFamily:
    """What runs of one kind are made of.

    config: the type of their settings. make: settings and seeds -> their trainer. decide: the rows of a run so far, its
    settings and the names of a study's stop rules -> why it stops here, or None. empty_row: settings -> a row in which
    every column stands without a value, for whoever needs all of them in the first row.
    """

    config_class: type[BaseRunConfig]
    make_trainer: Callable[[Any, Sequence[int]], Trainer]
    evaluate_stop_rules: Callable[[Sequence[Row], Any, Sequence[str]], StopDecision | None] = never_stop
    make_empty_row: Callable[[Any], Row] = make_no_columns


@dataclass(frozen=True)
class StepReport:
    """What is told of a step.

    rows: by run, complete with every column. failed: by run, why, of all that failed so far. step: the last that has a
    row. steps: number of steps of which there are rows. is_over: whether all runs have ended. note: what was met since
    the last report. is_saved: whether the states of all runs that continue are on disk. is_replayed: whether the rows
    were reported before.
    """

    rows: dict[str, Row]
    failures: dict[str, str]
    last_step: int
    step_count: int
    is_over: bool
    note: str
    is_saved: bool
    is_replayed: bool


class TrainingLoop:
    """Trains the runs of a trial from their newest common state on.

    given: study, arm; settings (dotted fields that differ from the defaults of the family's configuration); runs
    (run_id, seed, run_dir, checkpoint_dir each); finished (all have ended in an earlier start: their last rows are
    reported again, so that the experiment lists every run); stop_rules: names of those that the study applies;
    interrupt: a file whose existence means that this step is the last one for now, or None.

    Raises BusyError where another process trains one of the runs.
    """

    def __init__(self, family: TrainerFamily, trial_config: Mapping[str, Any]) -> None:
        self.family = family
        self.settings = apply_overrides(family.config_class.model_validate({}), trial_config["settings"])
        self.stop_rules: tuple[str, ...] = tuple(trial_config["stop_rules"])
        self._interrupt_path = Path(trial_config["interrupt"]) if trial_config.get("interrupt") else None
        self.notes: list[str] = []
        self.trainer: Trainer | None = None
        identity = {"study": trial_config["study"], "arm": trial_config["arm"]}
        self.runs = {int(place["seed"]): self._make_run(place, identity) for place in trial_config["runs"]}
        try:
            self._start_runs(bool(trial_config["finished"]))
        except BaseException:
            self.close()
            raise

    def _make_run(self, run_entry: Mapping[str, Any], identity: Mapping[str, Any]) -> Run:
        settings = apply_overrides(self.settings, {"seed": run_entry["seed"]})
        run_folders = Path(run_entry["run_dir"]), Path(run_entry["checkpoint_dir"])
        return Run(run_entry["run_id"], *run_folders, settings, identity, self._write_with_retry)

    def _start_runs(self, is_finished: bool) -> None:
        """Lock and read the runs, and continue those that have not ended."""
        for run in self.runs.values():
            if not is_finished:
                run.lock()
            run.load_rows()
        open_runs = {} if is_finished else self.runs
        unfinished_seeds = [seed for seed, run in open_runs.items() if not run.is_complete(self.notes.append)]
        self.is_over = not unfinished_seeds
        if unfinished_seeds:
            torch.set_num_threads(1)  # a trial has one core; more threads were slower on a shared machine
            self.trainer = self.family.make_trainer(self.settings, unfinished_seeds)
            self._resume(self.trainer)

    def _resume(self, trainer: Trainer) -> None:
        """Load the newest states of one step that are whole and the runs' own; those that are not are in the notes."""
        runs = [self.runs[seed] for seed in trainer.seeds]
        for step in sorted(set.intersection(*(run.list_checkpoint_steps() for run in runs)), reverse=True):
            try:
                states = [run.load_checkpoint(step, self.notes.append) for run in runs]
                trainer.load_states(states)
                break
            except CheckpointError:
                continue  # the notes have the reason
            except ValueError as error:
                self.notes.append(f"the states after step {step} are not used: {error}")
        if self.notes:
            # A run is a function of its settings and seed: whatever it goes back to, it writes the same rows again.
            self.notes.append(f"training continues after step {trainer.step_index}")
        elif not trainer.step_index and any(run.list_checkpoint_steps() for run in runs):
            self.notes.append("the runs of the arm are trained together, and some have no state: all begin at step 0")
        for run in runs:
            run.drop_rows_after(trainer.step_index)
        # The process may have died after the last row and before anybody recorded that the run had ended.
        self.is_over = all(run.is_over for run in runs)

    def close(self) -> None:
        """Let other processes train the runs."""
        if self.trainer is not None:
            self.trainer.close()
            self.trainer = None
        for run in self.runs.values():
            run.unlock()

    # ------------------------------------------------------------------ steps

    def step(self) -> StepReport:
        """Train to the next rows."""
        if self.is_over or self.trainer is None:
            last_rows = {run.run_id: run.rows[-1] for run in self.runs.values()}
            return self._make_report(last_rows, is_saved=True, is_replayed=True)
        while True:
            result = self.trainer.step()
            rows = self._record_rows(self.trainer, result)
            is_saved = self._save_checkpoints(self.trainer, result)
            self.is_over = all(run.is_over for run in self.runs.values())
            if rows or result.failures or self._is_interrupted():
                return self._make_report(rows, is_saved, is_replayed=False)

    def _record_rows(self, trainer: Trainer, result: StepResult) -> dict[str, Row]:
        """Write the rows of a step, the decision of a stop rule in them; those that are no failure, by run."""
        for seed, row in result.rows.items():
            run, lines = self.runs[seed], result.lines.get(seed, {})
            decision = self.family.evaluate_stop_rules([*run.rows, row], run.settings, self.stop_rules)
            if decision is not None:
                row = {**row, **decision.to_columns()}
            if run.is_final_row(row):
                row, final_lines = trainer.evaluate_final(seed, row)
                lines = {name: [*lines.get(name, ()), *final_lines.get(name, ())] for name in {**lines, **final_lines}}
            run.append_row(row, lines)
        for seed, reason in result.failures.items():
            self.runs[seed].append_row({"step": trainer.step_index - 1, "failure": reason}, {})
        return {self.runs[seed].run_id: self.runs[seed].rows[-1] for seed in result.rows}

    def _save_checkpoints(self, trainer: Trainer, result: StepResult) -> bool:
        """Write the states that are due after this step; whether those of the runs that continue were.

        They are when a run leaves, since from then on the sums of the others are over fewer runs.
        """
        trainer_settings, step = self.settings.trainer, trainer.step_index
        ended_seeds = [seed for seed in result.rows if self.runs[seed].is_over]
        is_due = (
            bool(ended_seeds or result.failures) or self._is_interrupted() or step % trainer_settings.resume_every == 0
        )
        is_permanent = trainer_settings.save_freq > 0 and step % trainer_settings.save_freq == 0
        for seed in ended_seeds:
            self.runs[seed].save_checkpoint(
                trainer.get_state(seed), is_rolling=True, is_permanent=trainer_settings.save_freq > 0
            )
        if is_due or is_permanent:
            for seed in trainer.seeds:
                if not self.runs[seed].is_over:
                    self.runs[seed].save_checkpoint(
                        trainer.get_state(seed), is_rolling=is_due, is_permanent=is_permanent
                    )
        return is_due

    def _make_report(self, rows: dict[str, Row], is_saved: bool, is_replayed: bool) -> StepReport:
        note, self.notes = "; ".join(self.notes), []
        steps = {row["step"] for run in self.runs.values() for row in run.rows}
        failures = {run.run_id: run.failure for run in self.runs.values() if run.failure}
        full_rows = {run_id: {**self.family.make_empty_row(self.settings), **row} for run_id, row in rows.items()}
        return StepReport(
            full_rows, failures, max(steps, default=0), len(steps), self.is_over, note, is_saved, is_replayed
        )

    def _write_with_retry(self, operation: Callable[[], None]) -> None:
        """Write, or wait for room on a full disk, unless the study is being interrupted."""
        call_with_retry(operation, self.settings.trainer.disk_patience, self.notes.append, self._is_interrupted)

    def _is_interrupted(self) -> bool:
        return self._interrupt_path is not None and self._interrupt_path.exists()
