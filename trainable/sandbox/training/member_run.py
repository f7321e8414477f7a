"""One run of a condition on disk: its rows, its states, and whether it has ended."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainable.runs.checkpoint import CheckpointError, numbered, read_checkpoint, write_checkpoint, write_rolling
from trainable.runs.run_files import METRICS, STATE, append_line, read_rows
from trainable.sandbox.config.settings import UpdateRuleConfig
from trainable.sandbox.training.state import MemberState

KEPT_STATES = 2
"""Rolling states of a run that is under way: the newest, and the one before in case the newest is damaged."""


class MemberRun:
    """The run of one seed.

    member: run_id, seed, run_dir (rows and rolling states) and checkpoint_dir (global_step_<N> folders). identity:
    what else each row says of whose it is. settings: of the condition.
    """

    def __init__(self, member: Mapping[str, Any], identity: Mapping[str, Any], settings: UpdateRuleConfig) -> None:
        self.run_id, self.seed = str(member["run_id"]), int(member["seed"])
        self.run_dir, self.checkpoint_dir = Path(member["run_dir"]), Path(member["checkpoint_dir"])
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self.identity = {**identity, "run_id": self.run_id, "seed": self.seed}
        self.settings = settings
        self.rows: list[dict[str, Any]] = []

    def read(self) -> None:
        """Read the rows that are on disk."""
        self.rows = read_rows(self.run_dir / METRICS, first=0)

    @property
    def is_over(self) -> bool:
        """Whether the last row is the run's last: all batches are trained on, a rule stopped it, or it failed."""
        last = self.rows[-1] if self.rows else {}
        is_trained = last.get("step") == self.settings.trainer.total_training_steps
        return is_trained or bool(last.get("stop_rule") or last.get("failure"))

    @property
    def failure(self) -> str:
        """Why the run failed; empty where it did not."""
        return str(self.rows[-1].get("failure", "")) if self.rows else ""

    def add(self, row: Mapping[str, Any]) -> None:
        """Append a row to the file; it is on disk, and among `rows`, when this returns."""
        whole = {**self.identity, **row}
        append_line(self.run_dir / METRICS, whole)
        self.rows.append(whole)

    def steps(self) -> set[int]:
        """Steps of which there is a state, whole or not."""
        return {step for step, _ in self._found()}

    def _found(self) -> Sequence[tuple[int, Path]]:
        return [*numbered(self.run_dir / STATE), *numbered(self.checkpoint_dir)]  # of two of a step, the rolling one

    def state(self, step: int) -> MemberState:
        """The state after `step`; CheckpointError, naming its folder, where it is not whole or another run's."""
        path = next(path for found, path in self._found() if found == step)
        tensors, values = read_checkpoint(path)
        reason = self._reason_against(step, values)
        if reason:
            raise CheckpointError(f"{path}: {reason}.")
        return MemberState(tensors, values)

    def _reason_against(self, step: int, values: Mapping[str, Any]) -> str:
        theirs = UpdateRuleConfig.model_validate(values.get("settings"))
        if theirs.config_hash() != self.settings.config_hash() or values.get("seed") != self.seed:
            return "it was written with other settings or another seed"
        if values.get("step") != step:
            return f"its name says step {step} and it holds step {values.get('step')}"
        wanted = list(range(self.settings.delay, step, self.settings.trainer.test_freq))
        if [row["step"] for row in self.rows if row["step"] < step] != wanted:
            return f"rows before step {step} are missing in {METRICS}"
        return ""

    def save(self, state: MemberState, has_ended: bool) -> None:
        """Write the rolling state; that of a run that has ended is kept alone."""
        keep = 1 if has_ended else KEPT_STATES
        write_rolling(self.run_dir / STATE, state.values["step"], state.tensors, self._values(state), keep)

    def keep(self, state: MemberState) -> None:
        """Write a checkpoint that stays."""
        folder = self.checkpoint_dir / f"global_step_{state.values['step']}"
        write_checkpoint(folder, state.tensors, self._values(state))

    def _values(self, state: MemberState) -> dict[str, Any]:
        return {**state.values, "settings": self.settings.model_dump(mode="json")}
