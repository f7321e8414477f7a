"""The process of a command: started with its own session, watched, and ended with all that it started."""

import ctypes
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from trainable.config.setting_types import SECRET_NAME
from trainable.runs.orphans import MARK_ENV, terminate_orphans

_RAY_PREFIX = "RAY_"
_OWN_RAY: Mapping[str, str] = {"RAY_ADDRESS": "local"}
"""A command that starts Ray, as verl does, must not join the study's, whose variables have this prefix: its workers
would wait for the CPUs and GPUs that the run itself holds. Without an address it would join one that `ray start` has
started."""
_TAIL_BYTES = 16_384


_PR_SET_PDEATHSIG = 1


def _end_with_parent() -> None:
    """Ask Linux, in the process that becomes the command, for SIGTERM when the process of the run dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class CommandError(Exception):
    """Raised if a command ends without having trained all steps. The message has the last line that it printed."""


class CommandProcess:
    """A running command.

    words: the program and its arguments. folder: where it runs. variables: of its environment, besides those of this
    process. console: the file to which it prints.
    """

    def __init__(self, words: Sequence[str], folder: str, variables: Mapping[str, str], console: Path) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(_RAY_PREFIX)}
        console.parent.mkdir(parents=True, exist_ok=True)
        self.console = console
        with console.open("ab") as output:
            # A session of its own, so that signals reach all of its processes, and no terminal.
            self._process = subprocess.Popen(
                words,
                cwd=folder,
                env={**environment, **_OWN_RAY, **variables},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )

    @property
    def exit_code(self) -> int | None:
        """The exit code, minus the number of the signal that ended the process; None while it runs."""
        return self._process.poll()

    def explain_end(self, retry: str) -> Exception:
        """Make the error of a process that failed: a RuntimeError if repeating the run may help, else a CommandError.

        retry: a pattern of `exit code N` and the last lines of the console after which it may.
        """
        code, tail = self._process.wait(), self.read_tail()
        last_line = next((line.strip() for line in reversed(tail.splitlines()) if line.strip()), "it printed nothing")
        # A shell or a launcher reports the signal of a child as 128 + its number.
        number = -code if code < 0 else code - 128 if code > 128 else 0
        with suppress(ValueError):
            name = signal.Signals(number).name
            return RuntimeError(f"the command was ended by {name}; its last line: {last_line} ({self.console})")
        text = f"the command ended with exit code {code}: {last_line} ({self.console})"
        is_retried = retry and re.search(retry, f"exit code {code}\n{tail}")
        return RuntimeError(text) if is_retried else CommandError(text)

    def read_tail(self) -> str:
        """Read the last lines of the console, in which values of secret variables are replaced by their names."""
        with self.console.open("rb") as file:
            file.seek(max(0, self.console.stat().st_size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
        for name, value in os.environ.items():
            if SECRET_NAME.search(name) and len(value) >= 8:
                text = text.replace(value, f"<{name}>")
        return text

    def end(self, patience: float) -> None:
        """End the process and all that it started: SIGTERM, and SIGKILL after `patience` seconds."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=patience)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        # Servers and workers in other sessions have the mark of the run.
        if folder := os.environ.get(MARK_ENV):
            terminate_orphans(Path(folder))
