"""Ray Tune's view of a condition: all its seeds in one trial. No maths."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
from ray import tune

from trainable.config.run_config import with_overrides
from trainable.runs.checkpoint import CheckpointError, read_checkpoint, write_checkpoint
from trainable.runs.full_disk import until_written
from trainable.runs.run_files import hold
from trainable.sandbox.config.settings import UpdateRuleConfig
from trainable.sandbox.training.make import make_trainer
from trainable.sandbox.training.member_run import MemberRun
from trainable.sandbox.training.state import MemberState
from trainable.sandbox.training.trainer import Progress

_HOLD_PATIENCE_S = 60.0


class SandboxTrainable(tune.Trainable):  # type: ignore[misc]  # Ray has no types
    """One condition of the update-rule sandbox as a Tune trial, which carries a run a seed.

    config: study, arm; settings (dotted fields that differ from UpdateRuleConfig's defaults); members (run_id, seed,
    run_dir, checkpoint_dir each); finished (all have ended in an earlier start: their last rows are reported again);
    interrupt: a file whose existence means that this step is the last one for now; None or left out: no such file.

    A report has the rows by run_id, written before to each run's metrics.jsonl: those of an evaluation, or the last one
    of a run that a rule stopped while the others go on, or none where the trial was interrupted between evaluations.
    `failed` has the reason of every run that failed so far by run_id; the others are not the worse for it, and nothing
    is raised. `training_iteration` counts the steps of which there are rows, `note` tells what was met since the last
    report, `saved` whether the states of all runs that go on are on disk.
    """

    def setup(self, config: dict[str, Any]) -> None:
        """Build the trainer of the runs that have not ended, and continue from their newest common state."""
        self.settings = with_overrides(UpdateRuleConfig(), config["settings"])
        self.interrupt = Path(config["interrupt"]) if config.get("interrupt") else None
        identity = {"study": config["study"], "arm": config["arm"]}
        self.runs = {int(member["seed"]): MemberRun(member, identity, self.settings) for member in config["members"]}
        self.notes: list[str] = []
        self.held: list[BinaryIO] = []
        if not config["finished"]:
            self.held = [hold(run.run_dir, _HOLD_PATIENCE_S) for run in self.runs.values()]
        for run in self.runs.values():
            run.read()
        going_on = [] if config["finished"] else [seed for seed, run in self.runs.items() if not run.is_over]
        self.finished = not going_on
        if going_on:
            torch.set_num_threads(1)  # a trial has one core
            self.trainer = make_trainer(self.settings, going_on)
            self._continue()

    def _continue(self) -> None:
        """Load the newest states that are of one step, whole and the runs' own; those that are not are in the notes."""
        runs = [self.runs[seed] for seed in self.trainer.seeds]
        for step in sorted(set.intersection(*(run.steps() for run in runs)), reverse=True):
            try:
                self.trainer.load_states([run.state(step) for run in runs])
                break
            except (CheckpointError, ValueError, KeyError, TypeError, RuntimeError) as error:
                self.notes.append(f"states of step {step} are not used: {error}")
                self.trainer = make_trainer(self.settings, self.trainer.seeds)  # nothing of what was half read
        if self.notes:
            # A run is a function of its settings and seed: whatever it goes back to, it writes the same rows again.
            self.notes.append(f"the runs go on after step {self.trainer.step_index}")
        elif not self.trainer.step_index and any(run.steps() for run in runs):
            self.notes.append("the runs of the arm go on together, and some have no state: all begin again at step 0")
        for run in runs:
            run.rows = [row for row in run.rows if row["step"] < self.trainer.step_index]

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Serve another condition in this process: everything is built anew."""
        self.cleanup()
        self.setup(new_config)
        return True

    def cleanup(self) -> None:
        """Let other processes train the runs."""
        for handle in self.held:
            handle.close()
        self.held = []

    def step(self) -> dict[str, Any]:
        """Train to the next rows; they are on disk before they are reported, and before the states that follow them."""
        if self.finished:
            return self._report({run.run_id: run.rows[-1] for run in self.runs.values()}, True)
        while True:
            progress = self.trainer.step()
            rows = self._write_rows(progress)
            is_saved = self._save(progress)
            if rows or progress.failed or self._is_interrupted():
                self.finished = not self.trainer.seeds
                return self._report(rows, is_saved)

    def _write_rows(self, progress: Progress) -> dict[str, dict[str, Any]]:
        """Append every row to its run's file; those that are no failure, by run_id."""
        lines: dict[int, Mapping[str, Any]] = dict(progress.rows)
        lines |= {seed: {"step": self.trainer.step_index - 1, "failure": why} for seed, why in progress.failed.items()}
        for seed, row in lines.items():
            self._write(partial(self.runs[seed].add, row))
        return {self.runs[seed].run_id: self.runs[seed].rows[-1] for seed in progress.rows}

    def _save(self, progress: Progress) -> bool:
        """Write the states that this step is due; whether those of the runs that go on were.

        They are when a run leaves, since from then on the sums of the others are over fewer members.
        """
        trainer, step = self.settings.trainer, self.trainer.step_index
        ended = {seed: self.trainer.left[seed] for seed in progress.rows if seed in self.trainer.left}
        is_due = bool(ended or progress.failed) or self._is_interrupted() or step % trainer.resume_every == 0
        is_kept = trainer.save_freq > 0 and (step % trainer.save_freq == 0)
        for seed, state in ended.items():
            self._write_states(seed, state, True, trainer.save_freq > 0, True)
        for seed in self.trainer.seeds if is_due or is_kept else ():
            self._write_states(seed, self.trainer.state(seed), is_due, is_kept, False)
        return is_due

    def _write_states(self, seed: int, state: MemberState, is_rolling: bool, is_kept: bool, has_ended: bool) -> None:
        if is_kept:
            self._write(partial(self.runs[seed].keep, state))
        if is_rolling:
            self._write(partial(self.runs[seed].save, state, has_ended))

    def _report(self, rows: dict[str, dict[str, Any]], is_saved: bool) -> dict[str, Any]:
        note, self.notes = "; ".join(self.notes), []
        steps = {row["step"] for run in self.runs.values() for row in run.rows}
        failed = {run.run_id: run.failure for run in self.runs.values() if run.failure}
        return {
            "step": max(steps, default=0), "rows": rows, "failed": failed, "training_iteration": len(steps),
            "done": self.finished, "note": note, "saved": is_saved,
        }  # fmt: skip

    def _write(self, write: Callable[[], None]) -> None:
        """Write, or wait for room on a full disk, unless the study is being interrupted."""
        until_written(write, self.settings.trainer.disk_patience, self.notes.append, self._is_interrupted)

    def _is_interrupted(self) -> bool:
        return self.interrupt is not None and self.interrupt.exists()

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Write the state of every run that goes on below `checkpoint_dir`, for whoever asks Tune for it."""
        for seed in self.trainer.seeds:
            state = self.trainer.state(seed)
            write_checkpoint(Path(checkpoint_dir) / self.runs[seed].run_id, state.tensors, state.values)

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        """Continue from what `save_checkpoint` wrote."""
        paths = [Path(checkpoint_dir) / self.runs[seed].run_id for seed in self.trainer.seeds]
        self.trainer.load_states([MemberState(*read_checkpoint(path)) for path in paths])
        for seed in self.trainer.seeds:
            run = self.runs[seed]
            run.rows = [row for row in run.rows if row["step"] < self.trainer.step_index]
