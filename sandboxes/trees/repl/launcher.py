"""Start confined processes in milliseconds, by forking a launcher that has already imported what they need."""

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

_SCRIPT = Path(__file__).with_name("confined_process.py")
_WITHOUT_RANDOM_ADDRESSES = (
    "import ctypes, os, resource, sys; limit = resource.getrlimit(resource.RLIMIT_STACK)[1]; "
    "size = 2**26 if limit == resource.RLIM_INFINITY else min(limit, 2**26); "
    "resource.setrlimit(resource.RLIMIT_STACK, (size, size)); "
    "ctypes.CDLL(None).personality(0x0040000); os.execv(sys.argv[1], sys.argv[1:])"
)
"""Executes a program with ADDR_NO_RANDOMIZE, if the kernel allows it, and with a stack of fixed size, since addresses
depend on this size."""
START_SECONDS = 60.0
"""Timeout for starting a process, even on a busy machine; a launcher takes a tenth of a second, others less."""


class LauncherError(RuntimeError):
    """No process can be started."""


class ConfinedChild:
    """A process started by a launcher. It is not a child of this process, so it is identified by a handle.

    stdin, stdout, stderr: non-blocking descriptors of our ends. pid: for reading only; after its end, another process
    may have it.
    """

    def __init__(self, handle: int, pid: int, streams: Sequence[int], launcher: "Launcher") -> None:
        self._handle, self.pid, self.launcher = handle, pid, launcher
        self.stdin, self.stdout, self.stderr = streams
        self._end = select.poll()
        self._end.register(handle, select.POLLIN)

    def read_cpu_seconds(self) -> float:
        """Return the CPU time of the process so far, in seconds; 0 if it has ended."""
        try:
            seconds = time.clock_gettime(~self.pid << 3 | 2)  # clock_getcpuclockid of the C library
        except OSError:
            return 0.0
        return 0.0 if self._end.poll(0) else seconds  # after its end, another process may have the id

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, unless the process has ended."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, number)

    def close(self) -> None:
        """Kill the process, wait for its end, and close its streams."""
        self.send_signal(signal.SIGKILL)
        self._end.poll(START_SECONDS * 1000)
        _close((self.stdin, self.stdout, self.stderr, self._handle))


class Launcher:
    """A process that starts confined ones, for all threads of this process.

    It ends when its socket is closed, at the latest with this process, even if this process has forks. Everything that
    it started ends with it.
    """

    def __init__(self, library: str) -> None:
        self._control, other_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(START_SECONDS)
        with other_end:
            python = sys.executable
            self._process = subprocess.Popen(
                # Without site-packages, whose modules the code could reach, and with the same hashes each time.
                [python, "-S", "-c", _WITHOUT_RANDOM_ADDRESSES, python, "-s", "-P", "-S", "-B", str(_SCRIPT), library],
                stdin=other_end.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={"PYTHONHASHSEED": "0"},
                cwd="/",
                start_new_session=True,
            )

    def start(self, numbers: Sequence[int]) -> ConfinedChild:
        """Start a process with these limits (`confined_process.main`). OSError if this fails now, or LauncherError."""
        inner_ends, outer_ends = _make_streams()
        handles: list[int] = []
        try:
            try:
                socket.send_fds(self._control, [json.dumps(numbers).encode()], inner_ends)
                reply, handles, _, _ = socket.recv_fds(self._control, 1024, 1)
            except OSError as error:
                raise LauncherError(str(error)) from None
            finally:
                _close(inner_ends)
            if not reply:
                raise LauncherError("the process that starts others has ended")
            if not handles:
                text = reply.decode("utf-8", "replace")
                raise OSError("no handle of the process arrived" if text.isdecimal() else text)
            return ConfinedChild(handles[0], int(reply), outer_ends, self)
        except BaseException as error:
            _close([*handles, *outer_ends])
            if not isinstance(error, OSError | LauncherError):
                self._control.close()  # or its unread reply would be taken for the next one
            raise

    @property
    def has_ended(self) -> bool:
        """Whether the launcher, and everything that it started, has ended."""
        poller = select.poll()
        poller.register(self._control, select.POLLIN)
        return any(event & (select.POLLHUP | select.POLLERR) for _, event in poller.poll(0))

    def close(self) -> None:
        """End the launcher and everything that it started."""
        self._control.close()
        self._process.kill()
        self._process.wait()


def _make_streams() -> tuple[list[int], list[int]]:
    """Open three pipes: the ends for the new process (input, output, error), and ours, which do not block."""
    ends: list[int] = []
    try:
        for _ in range(3):
            ends += os.pipe()
    except OSError:  # too many are open, and these would stay so
        _close(ends)
        raise
    input_inner, input_outer, output_outer, output_inner, error_outer, error_inner = ends
    outer_ends = [input_outer, output_outer, error_outer]
    for descriptor in outer_ends:
        os.set_blocking(descriptor, False)
    return [input_inner, output_inner, error_inner], outer_ends


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


_LOCK = threading.Lock()
_LAUNCHERS: dict[tuple[int, str], Launcher] = {}
"""The launchers of this process, by its id (a fork has none at first), and by their library."""


@atexit.register
def _close_launchers() -> None:
    for (process_id, _), launcher in _LAUNCHERS.items():
        if process_id == os.getpid():
            launcher.close()


def start_confined(library: str, numbers: Sequence[int]) -> ConfinedChild:
    """Start a confined process with the launcher of this process. One that has ended is replaced."""
    key = (os.getpid(), library)
    with _LOCK:
        if launcher := _LAUNCHERS.get(key):
            with suppress(LauncherError):
                return launcher.start(numbers)
            launcher.close()
        _LAUNCHERS[key] = launcher = Launcher(library)
        try:
            return launcher.start(numbers)
        except LauncherError:
            _LAUNCHERS.pop(key).close()
            raise
