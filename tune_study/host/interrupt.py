"""Handle Ctrl-C: the first one ends the study after the current steps, the second one ends it immediately."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The warning of a batch system (SIGTERM) and a closed terminal (SIGHUP) are handled like Ctrl-C."""

_ONE_EVENT_S = 0.5
"""Signals within this time count as one event.

A wrapper may forward Ctrl-C, and at a hang-up both the shell and the system send a signal.
"""


def make_interrupt(folder: Path) -> "Interrupt":
    """The request to stop the study in results/<run>."""
    return Interrupt(folder / ".interrupt")


class Interrupt:
    """A request to stop, in the form of a file that the processes of the runs can see as well.

    path: the file. It exists from the request until the study is started again. The attribute `is_requested` is true
    from the request on, whether or not the file could be written. `signal_name` is the name of the signal that made the
    request, such as SIGTERM, or empty.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_requested = False
        self.signal_name = ""

    def clear(self) -> None:
        """Remove the request of an earlier start."""
        self.path.unlink(missing_ok=True)
        self.is_requested, self.signal_name = False, ""

    @property
    def is_visible(self) -> bool:
        """Whether the processes of the runs can see the request."""
        return self.path.exists()

    def request(self) -> None:
        """Ask every run to stop after its step."""
        self.is_requested = True
        try:
            self.path.touch()
        except OSError:
            return  # a full disk must not turn a graceful end into a crash; without the file the driver stops the runs

    @contextmanager
    def handle_signals(self, notify: Callable[[str], None]) -> Iterator[None]:
        """During the body, the first signal requests a stop and a later one raises KeyboardInterrupt.

        A SIGHUP is never more than a request: after it, nobody is at the terminal who could want an immediate end. The
        earlier handlers are installed again after the body. notify: called with a message for the user.
        """
        request_time = [0.0]  # a list, so that the handler can change it

        def on_signal(signal_number: int, frame: FrameType | None) -> None:
            if self.is_requested:
                if signal_number != signal.SIGHUP and time.monotonic() - request_time[0] >= _ONE_EVENT_S:
                    raise KeyboardInterrupt
                return
            request_time[0] = time.monotonic()
            self.signal_name = signal.Signals(signal_number).name
            self.request()
            notify(
                f"{self.signal_name}: stopping after the current steps, which are finished and "
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
