"""Ray Tune's view of a run: setup, step, save. No maths."""

from pathlib import Path
from typing import Any

import torch
from ray import tune

from trainable.checkpoint import CheckpointError, has_checkpoint, read_checkpoint, write_checkpoint
from trainable.config import RunConfig, with_overrides
from trainable.records import empty_row
from trainable.run_files import METRICS, ROOMS, STATE, append_line, read_rows
from trainable.stop_rules import RULES, decide
from trainable.trainer import PPOTrainer

IDENTITY = ("run_id", "study", "arm", "seed")


class PPOTrainable(tune.Trainable):  # type: ignore[misc]  # Ray has no types
    """One run as a Tune trial.

    config: study, run_id, arm, seed; settings (dotted fields that differ from RunConfig's defaults); run_dir (where
    metrics, rooms and the rolling state go); checkpoint_dir (where global_step_<N> folders go); finished (the run has
    ended in an earlier start: its last row is reported again, so that the experiment lists every run). stop_rules:
    those of the study, all if it is left out.

    A run continues from its rolling state by itself, whoever starts it again: no pickle is read.
    """

    def setup(self, config: dict[str, Any]) -> None:
        """Build the trainer, and continue from the rolling state if there is one."""
        self.run_dir, self.checkpoint_dir = Path(config["run_dir"]), Path(config["checkpoint_dir"])
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self.identity = {key: config[key] for key in IDENTITY}
        self.settings = with_overrides(RunConfig(), {**config["settings"], "seed": config["seed"]})
        self.rows = read_rows(self.run_dir / METRICS)
        self.stop_rules = tuple(config.get("stop_rules", RULES))
        self.finished = bool(config["finished"])
        if self.finished:
            return
        torch.set_num_threads(1)  # a trial has one core; more threads were slower on a shared machine
        self.trainer = PPOTrainer(self.settings)
        self._continue()

    def _continue(self) -> None:
        state = self.run_dir / STATE
        if has_checkpoint(state):
            try:
                self.trainer.load_state(*read_checkpoint(state))
            except CheckpointError as error:
                # A run is a function of its settings and seed: starting over gives the same rows again.
                print(f"{self.identity['run_id']} starts over: {error}")
        self.rows = [row for row in self.rows if row["step"] <= self.trainer.step_index]
        # The process may have died after the last row and before anybody recorded that the run had ended.
        self.finished = self._ends_with(self.rows)

    def _ends_with(self, rows: list[dict[str, Any]]) -> bool:
        """Whether the last of `rows` is the run's last: all steps are trained, or a stop rule fires."""
        total = self.settings.trainer.total_training_steps
        return bool(rows) and (
            rows[-1]["step"] == total or decide(rows, self.settings.early_stop, self.stop_rules) is not None
        )

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Serve another run in this process: everything is built anew."""
        self.setup(new_config)
        return True

    def step(self) -> dict[str, Any]:
        """Train one step; the row is on disk before it is reported, and before the state that follows it."""
        if self.finished:
            return {**empty_row(), **self.rows[-1], "done": True}
        found, evaluations = self.trainer.step()
        row = {**empty_row(), **self.identity, "step": self.trainer.step_index, **found}
        last = self.trainer.step_index == self.settings.trainer.total_training_steps
        ends = self._ends_with([*self.rows, row])
        if ends:
            evaluations += self.trainer.close(row)
        for evaluation in evaluations:
            append_line(self.run_dir / ROOMS, evaluation.line())
        append_line(self.run_dir / METRICS, row)
        self.rows.append(row)
        self._save(ends)
        return {**row, "done": last}

    def _save(self, ends: bool) -> None:
        trainer, step = self.settings.trainer, self.trainer.step_index
        if trainer.save_freq > 0 and (ends or step % trainer.save_freq == 0):
            write_checkpoint(self.checkpoint_dir / f"global_step_{step}", *self.trainer.state())
        if ends or step % trainer.resume_every == 0:
            write_checkpoint(self.run_dir / STATE, *self.trainer.state())

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Write the whole state below `checkpoint_dir`, for whoever asks Tune for it."""
        write_checkpoint(Path(checkpoint_dir) / STATE, *self.trainer.state())

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        """Continue from what `save_checkpoint` wrote."""
        self.trainer.load_state(*read_checkpoint(Path(checkpoint_dir) / STATE))
        self.rows = [row for row in self.rows if row["step"] <= self.trainer.step_index]
