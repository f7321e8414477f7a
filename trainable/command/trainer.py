"""Train a run with a command: start it, and report the rows of its logs as the steps of the run."""

import glob
import json
import os
import re
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from trainable.command.config import CONSOLE, CommandConfig
from trainable.command.process import CommandError, CommandProcess
from trainable.command.tail import LogTail
from trainable.config.run_config import apply_overrides
from trainable.files.paths import write_text
from trainable.files.step_phase import STEP_PHASE
from trainable.runs.run import LinesByFile, TrainerState
from trainable.runs.run_files import Row
from trainable.runs.stop_rules import ALARM, StopDecision, evaluate_stop_rules
from trainable.runs.training import StepResult, TrainerFamily
from trainable.sources.names import parse_name

_POLL_SECONDS = 0.2
_REPORT_SECONDS = 5.0
"""Seconds without a row after which a step returns, so that the loop sees whether the study is being interrupted."""
_STEP_FIELD = "{step}"


class CommandTrainer:
    """A run of one seed, trained by a command. folder: where the command and its console write.

    The command begins with the first step. Each row of its logs is a step, reported when a later row shows that it is
    complete, or when the command has ended.
    """

    def __init__(self, config: CommandConfig, seeds: Sequence[int], folder: Path) -> None:
        (self._seed,) = seeds
        self.seeds = list(seeds)
        self.step_index = 0
        self._config: CommandConfig = apply_overrides(config, {"seed": self._seed})
        self._folder, self._output = folder, folder / "output"
        self._checkpoint = ""
        self._process: CommandProcess | None = None
        self._tail: LogTail | None = None
        self._row_time = self._seconds = 0.0
        self._rows: list[dict[str, Any]] = []
        self._interval, self._counts_from_zero = 1, False
        # The columns that the study names and no row has had so far, of this start or an earlier one.
        self._missing = {assignment.partition("=")[0] for assignment in config.command.columns}

    def step(self, before_update: Callable[[], None] = lambda: None) -> StepResult:
        """Wait for the next row of the logs, for a few seconds. The result has none if there was none.

        Raises RuntimeError or CommandError if the command has failed, or ended before the last step.
        """
        if self._process is None:
            self._start()
        STEP_PHASE.enter("the command runs")
        deadline = time.monotonic() + _REPORT_SECONDS
        while (row := self._take_row()) is None:
            if time.monotonic() > deadline:
                return StepResult()
            time.sleep(_POLL_SECONDS)
        self._missing -= row.keys()
        if self._missing and row["step"] == self._config.trainer.total_training_steps:
            raise CommandError(f"no row has {min(self._missing)}, and the last one has {', '.join(row)}")
        now = time.monotonic()
        self._seconds += now - self._row_time
        self._row_time, self.step_index = now, row["step"]
        return StepResult({self._seed: {**row, "seconds_total": self._seconds}})

    def _take_row(self) -> Row | None:
        """Take the next complete row, or the row that ends the run; None if there is none yet."""
        assert self._process is not None
        assert self._tail is not None
        total = self._config.trainer.total_training_steps
        exit_code = self._process.exit_code  # before reading, so that all rows of an ended command are read
        rows = self._tail.read(at_once=exit_code is not None)
        if rows is not None:
            self._counts_from_zero = self._tail.counts_from_zero
            self._rows = [row for row in rows if row["step"] > self.step_index]
            self._interval = max((later["step"] - row["step"] for row, later in pairwise(rows)), default=1)
        is_complete = len(self._rows) > 1 or exit_code is not None
        if self._rows and self._rows[0]["step"] <= total and is_complete:
            return self._rows.pop(0)
        # The log has no row of the last step itself: the row that ends the run has no measurements.
        if self._rows and self._rows[0]["step"] > total:
            return {"step": total}
        if exit_code is None:
            return None
        if exit_code != 0:
            raise self._process.explain_end(self._config.command.retry)
        if 0 < total - self.step_index < self._interval:
            return {"step": total}
        end = f"the command ended with exit code 0 after step {self.step_index} of {total}"
        if not self.step_index:
            raise CommandError(f"{end}: {self._tail.problem}")
        raise CommandError(f"{end}: if this is its length, set steps={self.step_index} in the file of the study")

    def _start(self) -> None:
        command, config = self._config.command, self._config
        self._output.mkdir(parents=True, exist_ok=True)
        settings_file = self._output / "settings.json"
        write_text(settings_file, json.dumps(config.nested_settings, indent=1))
        attempt = len(list(self._folder.glob("console_*.log"))) + 1
        console = self._folder / f"console_{attempt}.log"
        fields = {
            "output": self._output,
            "console": console,
            "settings_file": settings_file,
            "run": self._folder.name,
            "attempt": attempt,
            "gpu_ids": os.environ.get("CUDA_VISIBLE_DEVICES", ""),
            "checkpoint": self._checkpoint,
            "step": self.step_index,
        }
        words = config.fill_words(command.run, fields)
        if self._checkpoint and _STEP_FIELD in command.checkpoints:
            words += config.fill_words(command.resume, fields)
        variables = [config.fill_word(assignment, fields) for assignment in command.environment]
        pattern = glob.escape(str(console))
        if command.logs != CONSOLE:
            escaped = {name: glob.escape(str(value)) for name, value in fields.items()}
            pattern = config.fill_word(command.logs, escaped)
        names = [parse_name(*assignment.split("=", 1)) for assignment in command.columns]
        self._tail = LogTail(pattern, names, self._counts_from_zero)
        environment = dict(variable.split("=", 1) for variable in variables)
        self._row_time = time.monotonic()
        self._process = CommandProcess(words, command.folder, environment, console)

    def evaluate_final(self, seed: int, row: Row) -> tuple[Row, LinesByFile]:
        """Return the last row as it is: the command has made its own evaluations."""
        return row, {}

    def get_state(self, seed: int) -> TrainerState:
        """Return the step, and the folder of the command, in which its checkpoints are."""
        values = {"step": self.step_index, "output": str(self._output), "seconds": self._seconds}
        shown = {"counts_from_zero": self._counts_from_zero, "missing": sorted(self._missing)}
        return TrainerState({}, {**values, **shown})

    def load_states(self, states: Sequence[TrainerState]) -> None:
        """Continue from the newest checkpoint of the command that is not after the step of the state.

        Raises ValueError if there is none.
        """
        (state,) = states
        values = state.values
        template, step = self._config.command.checkpoints, int(values["step"])
        pattern = template.replace("{output}", glob.escape(str(values["output"])))
        if _STEP_FIELD in template:
            matcher = re.compile(
                re.escape(template)
                .replace(re.escape("{output}"), re.escape(str(values["output"])))
                .replace(re.escape(_STEP_FIELD), r"0*(\d+)")
            )
            matches = map(matcher.fullmatch, glob.glob(pattern.replace(_STEP_FIELD, "*")))
            checkpoints = {int(match[1]): match[0] for match in matches if match and int(match[1]) <= step}
        else:  # the command continues by itself, and rows that are recorded stay
            paths = glob.glob(pattern)
            checkpoints = {step: min(paths)} if paths else {}
        if not checkpoints:
            raise ValueError(f"the command has no checkpoint up to this step ({template or 'none is declared'})")
        self.step_index = max(checkpoints)
        self._checkpoint = checkpoints[self.step_index]
        self._seconds, self._counts_from_zero = values["seconds"], values["counts_from_zero"]
        self._missing = {*values["missing"]}

    def close(self) -> None:
        """End the command and all that it started."""
        if self._process is not None:
            self._process.end(self._config.command.stop_seconds)
            self._process = None


def _decide(rows: Sequence[Row], config: CommandConfig, rules: Sequence[str]) -> StopDecision | None:
    return evaluate_stop_rules(rows, config.early_stop, (*rules, ALARM))


def make_family(folder: Path) -> TrainerFamily:
    """Make the parts of a run whose command writes below a folder."""
    return TrainerFamily(partial(CommandTrainer, folder=folder), _decide, best_column="val_success")
