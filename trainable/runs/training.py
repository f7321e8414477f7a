"""Runs on their way to their ends: trained by one trainer, each row on disk before it is told and before its state."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from trainable.config.run_config import with_overrides
from trainable.config.study_config import StudyConfig
from trainable.runs.checkpoint import CheckpointError
from trainable.runs.full_disk import until_written
from trainable.runs.run import Lines, Row, Run, State
from trainable.runs.stop_rules import Decision


@dataclass(frozen=True)
class StepResult:
    """What a training step gave, by seed.

    rows: columns of the runs that have a row of this step, `step` among them. lines: what goes into other files of a
    run. failed: why, of runs that cannot continue while the others can.
    """

    rows: Mapping[int, Row] = field(default_factory=dict)
    lines: Mapping[int, Lines] = field(default_factory=dict)
    failed: Mapping[int, str] = field(default_factory=dict)


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

    def close(self, seed: int, row: Row) -> tuple[Row, Lines]:
        """The last `row` of a run with what is measured only once, at the end, and the lines of that."""
        ...

    def state(self, seed: int) -> State:
        """All that the run needs to continue; of a run that has ended, its last state."""
        ...

    def load_states(self, states: Sequence[State]) -> None:
        """Continue from states of one step, one for each seed.

        ValueError, and nothing is changed, where they do not fit.
        """
        ...

    def release(self) -> None:
        """Give back what is held beyond memory: engines, other processes."""
        ...


def never_stop(rows: Sequence[Row], settings: Any, rules: Sequence[str]) -> Decision | None:
    """No decision: the trainer applies its rules itself and writes them into its rows."""
    return None


def make_row_of_nothing(settings: Any) -> Row:
    """No column: every row of the trainer has all of them."""
    return {}


@dataclass(frozen=True)
class TrainerFamily:
    """What runs of one kind are made of.

    config: the type of their settings. make: settings and seeds -> their trainer. decide: the rows of a run so far, its
    settings and the names of a study's stop rules -> why it stops here, or None. empty_row: settings -> a row in which
    every column stands without a value, for whoever needs all of them in the first row.
    """

    config: type[StudyConfig]
    make: Callable[[Any, Sequence[int]], Trainer]
    decide: Callable[[Sequence[Row], Any, Sequence[str]], Decision | None] = never_stop
    empty_row: Callable[[Any], Row] = make_row_of_nothing


@dataclass(frozen=True)
class Report:
    """What is told of a step.

    rows: by run, complete with every column. failed: by run, why, of all that failed so far. step: the last that has a
    row. steps: number of steps of which there are rows. is_over: whether all runs have ended. note: what was met since
    the last report. is_saved: whether the states of all runs that continue are on disk. is_replayed: whether the rows
    were reported before.
    """

    rows: dict[str, Row]
    failed: dict[str, str]
    step: int
    steps: int
    is_over: bool
    note: str
    is_saved: bool
    is_replayed: bool


class Training:
    """Trains the runs of a trial from their newest common state on.

    given: study, arm; settings (dotted fields that differ from the defaults of the family's configuration); runs
    (run_id, seed, run_dir, checkpoint_dir each); finished (all have ended in an earlier start: their last rows are
    reported again, so that the experiment lists every run); stop_rules: names of those that the study applies;
    interrupt: a file whose existence means that this step is the last one for now, or None.

    Raises BusyError where another process trains one of the runs.
    """

    def __init__(self, family: TrainerFamily, given: Mapping[str, Any]) -> None:
        self.family = family
        self.settings = with_overrides(family.config.model_validate({}), given["settings"])
        self.stop_rules: tuple[str, ...] = tuple(given["stop_rules"])
        self._interrupt = Path(given["interrupt"]) if given.get("interrupt") else None
        self.notes: list[str] = []
        self.trainer: Trainer | None = None
        identity = {"study": given["study"], "arm": given["arm"]}
        self.runs = {int(place["seed"]): self._make_run(place, identity) for place in given["runs"]}
        try:
            self._begin(bool(given["finished"]))
        except BaseException:
            self.close()
            raise

    def _make_run(self, place: Mapping[str, Any], identity: Mapping[str, Any]) -> Run:
        settings = with_overrides(self.settings, {"seed": place["seed"]})
        folders = Path(place["run_dir"]), Path(place["checkpoint_dir"])
        return Run(place["run_id"], *folders, settings, identity, self._write)

    def _begin(self, is_finished: bool) -> None:
        """Lock and read the runs, and continue those that have not ended."""
        for run in self.runs.values():
            if not is_finished:
                run.lock()
            run.read()
        runs = {} if is_finished else self.runs
        going_on = [seed for seed, run in runs.items() if not run.is_complete(self.notes.append)]
        self.is_over = not going_on
        if going_on:
            torch.set_num_threads(1)  # a trial has one core; more threads were slower on a shared machine
            self.trainer = self.family.make(self.settings, going_on)
            self._continue(self.trainer)

    def _continue(self, trainer: Trainer) -> None:
        """Load the newest states of one step that are whole and the runs' own; those that are not are in the notes."""
        runs = [self.runs[seed] for seed in trainer.seeds]
        for step in sorted(set.intersection(*(run.steps_of_states() for run in runs)), reverse=True):
            try:
                states = [run.read_state(step, self.notes.append) for run in runs]
                trainer.load_states(states)
                break
            except CheckpointError:
                continue  # the notes have the reason
            except ValueError as error:
                self.notes.append(f"the states after step {step} are not used: {error}")
        if self.notes:
            # A run is a function of its settings and seed: whatever it goes back to, it writes the same rows again.
            self.notes.append(f"training continues after step {trainer.step_index}")
        elif not trainer.step_index and any(run.steps_of_states() for run in runs):
            self.notes.append("the runs of the arm are trained together, and some have no state: all begin at step 0")
        for run in runs:
            run.drop_rows_after(trainer.step_index)
        # The process may have died after the last row and before anybody recorded that the run had ended.
        self.is_over = all(run.is_over for run in runs)

    def close(self) -> None:
        """Let other processes train the runs."""
        if self.trainer is not None:
            self.trainer.release()
            self.trainer = None
        for run in self.runs.values():
            run.unlock()

    # ------------------------------------------------------------------ steps

    def step(self) -> Report:
        """Train to the next rows."""
        if self.is_over or self.trainer is None:
            last = {run.run_id: run.rows[-1] for run in self.runs.values()}
            return self._report(last, is_saved=True, is_replayed=True)
        while True:
            result = self.trainer.step()
            rows = self._record(self.trainer, result)
            is_saved = self._save(self.trainer, result)
            self.is_over = all(run.is_over for run in self.runs.values())
            if rows or result.failed or self._is_interrupted():
                return self._report(rows, is_saved, is_replayed=False)

    def _record(self, trainer: Trainer, result: StepResult) -> dict[str, Row]:
        """Write the rows of a step, the decision of a stop rule in them; those that are no failure, by run."""
        for seed, row in result.rows.items():
            run, lines = self.runs[seed], result.lines.get(seed, {})
            decision = self.family.decide([*run.rows, row], run.settings, self.stop_rules)
            if decision is not None:
                row = {**row, **decision.columns()}
            if run.ends_with(row):
                row, more = trainer.close(seed, row)
                lines = {name: [*lines.get(name, ()), *more.get(name, ())] for name in {**lines, **more}}
            run.append(row, lines)
        for seed, reason in result.failed.items():
            self.runs[seed].append({"step": trainer.step_index - 1, "failure": reason}, {})
        return {self.runs[seed].run_id: self.runs[seed].rows[-1] for seed in result.rows}

    def _save(self, trainer: Trainer, result: StepResult) -> bool:
        """Write the states that are due after this step; whether those of the runs that continue were.

        They are when a run leaves, since from then on the sums of the others are over fewer runs.
        """
        rhythm, step = self.settings.trainer, trainer.step_index
        ended = [seed for seed in result.rows if self.runs[seed].is_over]
        is_due = bool(ended or result.failed) or self._is_interrupted() or step % rhythm.resume_every == 0
        is_kept = rhythm.save_freq > 0 and step % rhythm.save_freq == 0
        for seed in ended:
            self.runs[seed].write_state(trainer.state(seed), is_rolling=True, is_kept=rhythm.save_freq > 0)
        if is_due or is_kept:
            for seed in trainer.seeds:
                if not self.runs[seed].is_over:
                    self.runs[seed].write_state(trainer.state(seed), is_rolling=is_due, is_kept=is_kept)
        return is_due

    def _report(self, rows: dict[str, Row], is_saved: bool, is_replayed: bool) -> Report:
        note, self.notes = "; ".join(self.notes), []
        steps = {row["step"] for run in self.runs.values() for row in run.rows}
        failed = {run.run_id: run.failure for run in self.runs.values() if run.failure}
        whole = {run_id: {**self.family.empty_row(self.settings), **row} for run_id, row in rows.items()}
        return Report(whole, failed, max(steps, default=0), len(steps), self.is_over, note, is_saved, is_replayed)

    def _write(self, write: Callable[[], None]) -> None:
        """Write, or wait for room on a full disk, unless the study is being interrupted."""
        until_written(write, self.settings.trainer.disk_patience, self.notes.append, self._is_interrupted)

    def _is_interrupted(self) -> bool:
        return self._interrupt is not None and self._interrupt.exists()
