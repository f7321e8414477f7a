"""Ray Tune's view of a run: setup, step, save. No maths."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch
from ray import tune

from trainable.config.run_config import RunConfig, with_overrides
from trainable.diagnostics.standard import DIAGNOSTICS
from trainable.ppo.ranks import make_trainer
from trainable.runs.checkpoint import CheckpointError, numbered, read_checkpoint, write_checkpoint, write_rolling
from trainable.runs.full_disk import until_written
from trainable.runs.records import empty_row
from trainable.runs.run_files import GRADIENTS, METRICS, ROOMS, STATE, append_line, hold, read_lines, read_rows
from trainable.runs.stop_rules import RULES, decide

IDENTITY = ("run_id", "study", "arm", "seed")

KEPT_STATES = 2
"""Rolling states of a run that is under way: the newest, and the one before in case the newest is damaged."""

_HOLD_PATIENCE_S = 60.0


class PPOTrainable(tune.Trainable):  # type: ignore[misc]  # Ray has no types
    """One run as a Tune trial.

    config: study, run_id, arm, seed; settings (dotted fields that differ from RunConfig's defaults); run_dir (where
    metrics, rooms and the rolling states go); checkpoint_dir (where global_step_<N> folders go); finished (the run has
    ended in an earlier start: its last row is reported again, so that the experiment lists every run). stop_rules:
    those of the study, all if it is left out. interrupt: a file whose existence means that this step is the last one
    for now; none if it is left out.

    A run continues from its newest whole state by itself, whoever starts it again: no pickle is read. Two entries of a
    reported row are not in the file of rows: `note` tells the study what the run met since its last row, `saved`
    whether the state after this step is on disk.
    """

    def setup(self, config: dict[str, Any]) -> None:
        """Build the trainer, and continue from the newest whole state if there is one."""
        self.run_dir, self.checkpoint_dir = Path(config["run_dir"]), Path(config["checkpoint_dir"])
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self.identity = {key: config[key] for key in IDENTITY}
        self.settings = with_overrides(RunConfig(), {**config["settings"], "seed": config["seed"]})
        self.stop_rules = tuple(config.get("stop_rules", RULES))
        self.interrupt = Path(config["interrupt"]) if config.get("interrupt") else None
        self.finished = bool(config["finished"])
        self.notes: list[str] = []
        self.held: BinaryIO | None = None
        if self.finished:
            self.rows = read_rows(self.run_dir / METRICS)
            return
        self.held = hold(self.run_dir, _HOLD_PATIENCE_S)
        self.rows = read_rows(self.run_dir / METRICS)
        torch.set_num_threads(1)  # a trial has one core; more threads were slower on a shared machine
        self.trainer = make_trainer(self.settings, DIAGNOSTICS)
        self._continue()

    def _continue(self) -> None:
        """Load the newest state that is whole and this run's; each one that is not is named in the notes."""
        found = [*numbered(self.run_dir / STATE), *numbered(self.checkpoint_dir)]
        for step, path in sorted(found, key=lambda pair: -pair[0]):  # of two with one step, the rolling one
            try:
                tensors, values = read_checkpoint(path)
                self._check_own(step, values)
                self.trainer.load_state(tensors, values)
                break
            except (CheckpointError, ValueError) as error:
                self.notes.append(f"{path} is not used: {error}")
        if self.notes:
            # A run is a function of its settings and seed: whatever it goes back to, it writes the same rows again.
            self.notes.append(f"the run goes on after step {self.trainer.step_index}")
        self.rows = [row for row in self.rows if row["step"] <= self.trainer.step_index]
        # The process may have died after the last row and before anybody recorded that the run had ended.
        self.finished = self._ends_with(self.rows)

    def _check_own(self, step: int, values: dict[str, Any]) -> None:
        """ValueError unless a state was written by this run, and the rows up to it are there."""
        theirs = RunConfig.model_validate(values.get("settings"))
        if theirs.config_hash() != self.settings.config_hash() or theirs.seed != self.settings.seed:
            raise ValueError("it was written with other settings.")
        if values.get("step") != step:
            raise ValueError(f"its name says step {step} and it holds step {values.get('step')}.")
        if [row["step"] for row in self.rows[:step]] != list(range(1, step + 1)):
            raise ValueError(f"rows of the steps 1 to {step} are missing in {METRICS}.")
        validated = {row["step"] for row in self.rows[:step] if row.get("val_success") is not None}
        if not validated <= {line.get("step") for line in read_lines(self.run_dir / ROOMS)}:
            raise ValueError(f"evaluations up to step {step} are missing in {ROOMS}.")

    def _ends_with(self, rows: list[dict[str, Any]]) -> bool:
        """Whether the last of `rows` is the run's last: all steps are trained, or a stop rule fires."""
        total = self.settings.trainer.total_training_steps
        return bool(rows) and (
            rows[-1]["step"] == total or decide(rows, self.settings.early_stop, self.stop_rules) is not None
        )

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Serve another run in this process: everything is built anew."""
        self.cleanup()
        self.setup(new_config)
        return True

    def cleanup(self) -> None:
        """Let another process train the run."""
        trainer = getattr(self, "trainer", None)
        if trainer is not None:  # a run that had ended needs none
            trainer.release()
        if self.held is not None:
            self.held.close()
            self.held = None

    def step(self) -> dict[str, Any]:
        """Train one step; the row is on disk before it is reported, and before the state that follows it."""
        if self.finished:
            return {**empty_row(), **self.rows[-1], "done": True, "note": self._note(), "saved": True}
        found, evaluations, gradients = self.trainer.step()
        row = {**empty_row(), **self.identity, "step": self.trainer.step_index, **found}
        last = self.trainer.step_index == self.settings.trainer.total_training_steps
        ends = self._ends_with([*self.rows, row])
        if ends:
            evaluations += self.trainer.close(row)
        for evaluation in evaluations:
            self._append(ROOMS, evaluation.line())
        for line in gradients:
            self._append(GRADIENTS, line)
        self._append(METRICS, {name: value for name, value in row.items() if value is not None})
        self.rows.append(row)
        is_saved = self._save(ends)
        return {**row, "done": last, "note": self._note(), "saved": is_saved}

    def _note(self) -> str:
        note, self.notes = "; ".join(self.notes), []
        return note

    def _append(self, name: str, line: dict[str, Any]) -> None:
        self._write(lambda: append_line(self.run_dir / name, line))

    def _write(self, write: Callable[[], None]) -> None:
        """Write, or wait for room on a full disk, unless the study is being interrupted."""
        until_written(write, self.settings.trainer.disk_patience, self.notes.append, self._is_interrupted)

    def _is_interrupted(self) -> bool:
        return self.interrupt is not None and self.interrupt.exists()

    def _save(self, ends: bool) -> bool:
        """Write what this step is due: a checkpoint to keep, and the rolling state; the last state is kept alone.

        Whether the rolling state was due.
        """
        trainer, step = self.settings.trainer, self.trainer.step_index
        is_kept = trainer.save_freq > 0 and (ends or step % trainer.save_freq == 0)
        is_due = ends or self._is_interrupted() or step % trainer.resume_every == 0
        if not (is_kept or is_due):
            return False
        tensors, values = self._state()  # ranks have to collect it
        if is_kept:
            target = self.checkpoint_dir / f"global_step_{step}"
            self._write(lambda: write_checkpoint(target, tensors, values))
        if is_due:
            keep = 1 if ends else KEPT_STATES
            self._write(lambda: write_rolling(self.run_dir / STATE, step, tensors, values, keep))
        return is_due

    def _state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """The trainer's state, and whose it is."""
        tensors, values = self.trainer.state()
        return tensors, {**values, "settings": self.settings.model_dump(mode="json")}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Write the whole state below `checkpoint_dir`, for whoever asks Tune for it."""
        write_checkpoint(Path(checkpoint_dir) / STATE, *self._state())

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        """Continue from what `save_checkpoint` wrote."""
        self.trainer.load_state(*read_checkpoint(Path(checkpoint_dir) / STATE))
        self.rows = [row for row in self.rows if row["step"] <= self.trainer.step_index]
