"""Ctrl-C: once ends the study after the steps that are under way, twice ends it now."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""A batch system's warning and a closed terminal are answered as Ctrl-C is."""

_ONE_EVENT_S = 0.5
"""Signals this close together are one event: a wrapper that hands Ctrl-C on, a shell and the system at a hang-up."""


def make_interrupt(folder: Path) -> "Interrupt":
    """The request to stop the study in results/<run>."""
    return Interrupt(folder / ".interrupt")


class Interrupt:
    """A request to stop, as a file that the processes of the runs see too, wherever they are.

    path: the file; it is there from the request until the study is started again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_requested = False

    def clear(self) -> None:
        """Forget a request of an earlier start."""
        self.path.unlink(missing_ok=True)
        self.is_requested = False

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
            return  # a full disk must not turn a polite end into a crash; the driver stops the runs by itself

    @contextmanager
    def handle_signals(self, notify: Callable[[str], None]) -> Iterator[None]:
        """Within the body the first signal is a request and a later one a KeyboardInterrupt; then all is as before.

        A hang-up is never more than a request: nobody is there any more who could ask for haste.
        """
        request_time = [0.0]

        def on_signal(signal_number: int, frame: FrameType | None) -> None:
            if self.is_requested:
                if signal_number != signal.SIGHUP and time.monotonic() - request_time[0] >= _ONE_EVENT_S:
                    raise KeyboardInterrupt
                return
            request_time[0] = time.monotonic()
            self.request()
            notify(
                f"{signal.Signals(signal_number).name}: no new steps; the steps under way are finished and saved. "
                f"Once more to stop now."
            )

        old_handlers = {number: signal.getsignal(number) for number in _SIGNALS}
        for number, handler in old_handlers.items():
            if handler is not signal.SIG_IGN:  # nohup and the like
                signal.signal(number, on_signal)
        try:
            yield
        finally:
            for number, handler in old_handlers.items():
                if handler is not None:
                    signal.signal(number, handler)
