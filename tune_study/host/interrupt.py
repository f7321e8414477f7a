"""Requests to stop: Ctrl-C, a time limit, and the command `stop`.

A request lets every run finish and save its step. The second Ctrl-C ends the study immediately.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NamedTuple
from urllib.parse import quote

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""A batch system's warning (SIGTERM) and a closed terminal (SIGHUP) are handled like Ctrl-C."""

_ONE_EVENT_S = 0.5
"""Signals within this many seconds count as one event: a wrapper may forward Ctrl-C, and at a hang-up both the shell
and the system send a signal."""

INTERRUPTED = "the study was interrupted"


class TimeLimit(NamedTuple):
    """The limit of --max-hours."""

    hours: float
    deadline: float
    """As of `time.monotonic`."""


def start_time_limit(hours: float | None) -> TimeLimit | None:
    """Start a time limit now; None without one."""
    return None if hours is None else TimeLimit(hours, time.monotonic() + 3600 * hours)


def make_interrupt(folder: Path) -> "Interrupt":
    """Make the `Interrupt` of the study in results/<run>."""
    return Interrupt(folder / ".interrupt")


class Interrupt:
    """A request to stop, stored as the file `path` so that the processes of the runs see it as well.

    The file exists from the request until the study is started again. A file beside it, named after an arm, requests
    that the runs of that arm stop.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.reason = INTERRUPTED
        """Why the study was stopped, as the beginning of a sentence."""
        self._is_requested = self._watches_files = False
        self._signal_time: float | None = None

    @property
    def is_requested(self) -> bool:
        """Whether the study is to stop. True from the request on, even if the file could not be written."""
        return self._is_requested or (self._watches_files and self.path.exists())

    def clear(self) -> None:
        """Remove the requests of an earlier start. From then on, a file of another process counts as a request."""
        for path in self.path.parent.glob(f"{self.path.name}*"):
            path.unlink(missing_ok=True)
        self._is_requested, self.reason = False, INTERRUPTED
        self._watches_files = True

    def request(self, reason: str = INTERRUPTED) -> None:
        """Ask every run to stop after its step."""
        self._is_requested, self.reason = True, reason
        with suppress(OSError):  # a full disk must not turn a graceful end into a crash: the driver then stops the runs
            self.path.touch()

    def get_arm_path(self, arm: str) -> Path:
        """Return the file that asks the runs of an arm to stop."""
        return self.path.with_name(f"{self.path.name}-{quote(arm, safe='')}")

    def is_arm_requested(self, arm: str) -> bool:
        """Check whether the runs of an arm are to stop."""
        return self._watches_files and self.get_arm_path(arm).exists()

    @property
    def is_any_arm_requested(self) -> bool:
        """Whether the runs of any arm are to stop."""
        return self._watches_files and any(self.path.parent.glob(f"{self.path.name}-*"))

    @contextmanager
    def limit_time(self, limit: TimeLimit | None, notify: Callable[[str], None]) -> Iterator[None]:
        """Request a stop if the body still runs at the deadline. notify: called with a message for the user."""
        if limit is None:
            yield
            return

        def on_deadline() -> None:
            if not self._is_requested:
                self.request(f"{INTERRUPTED} after the {limit.hours:g} hours of --max-hours")
                notify(f"--max-hours {limit.hours:g}: stopping after the current steps, which are finished and saved.")

        timer = threading.Timer(max(0.0, limit.deadline - time.monotonic()), on_deadline)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    @contextmanager
    def handle_signals(self, notify: Callable[[str], None]) -> Iterator[None]:
        """Handle signals during the body: the first one requests a stop, a later one raises KeyboardInterrupt.

        SIGHUP only ever requests a stop, since nobody is at the terminal who could want an immediate end. The earlier
        handlers are restored after the body. notify: called with a message for the user.
        """

        def on_signal(signal_number: int, frame: FrameType | None) -> None:
            if self._signal_time is not None:
                if signal_number != signal.SIGHUP and time.monotonic() - self._signal_time >= _ONE_EVENT_S:
                    raise KeyboardInterrupt
                return
            self._signal_time = time.monotonic()
            self.request()
            notify(
                f"{signal.Signals(signal_number).name}: stopping after the current steps, which are finished and "
                f"saved. Press Ctrl-C again to stop immediately."
            )

        old_handlers = {signal_number: signal.getsignal(signal_number) for signal_number in _SIGNALS}
        for signal_number, handler in old_handlers.items():
            if handler is not signal.SIG_IGN:  # nohup, for example, ignores SIGHUP on purpose
                signal.signal(signal_number, on_signal)
        try:
            yield
        finally:
            for signal_number, handler in old_handlers.items():
                if handler is not None:  # None: the handler was not installed from Python
                    signal.signal(signal_number, handler)
