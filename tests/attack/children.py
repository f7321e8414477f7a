"""Call a function in a child process that has a time limit, so that a fault can hang, crash or change nothing else."""

import io
import os
import pickle
import resource
import select
import signal
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")
TIME_LIMIT_S = 60.0
"""Far more than any command here takes, so that what exceeds it hangs."""


class ChildError(Exception):
    """The child raised, crashed, or did not end in time. is_timeout: whether it was the last."""

    def __init__(self, text: str, is_timeout: bool = False) -> None:
        super().__init__(text)
        self.is_timeout = is_timeout


def call_in_child(function: Callable[[], T], seconds: float = TIME_LIMIT_S, max_bytes: int | None = None) -> T:
    """Call `function` in a forked process and return its value, which must be picklable.

    max_bytes: limit of the child's memory. Raises ChildError.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        _serve(function, writer, max_bytes)
    os.close(writer)
    try:
        content = _read_until(reader, time.monotonic() + seconds)
    finally:
        os.close(reader)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)  # it has sent everything, or takes too long
        status = os.waitpid(pid, 0)[1]
    if content is None:
        raise ChildError(f"did not end within {seconds:.0f} s", is_timeout=True)
    if not content:
        raise ChildError(f"died of signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else "ended without a word")
    value: Any = pickle.loads(content)
    if isinstance(value, _Raised):
        raise ChildError(value.text)
    return value


class _Raised:
    """An error that a child raised, as text."""

    def __init__(self, error: BaseException) -> None:
        frames = traceback.extract_tb(error.__traceback__)
        place = f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else "?"
        self.text = f"{type(error).__name__}: {str(error)[:600]} ({place})"


def _serve(function: Callable[[], object], writer: int, max_bytes: int | None) -> None:
    """Call the function, send its value or error, and end this process."""
    try:
        if max_bytes is not None:
            # Not of the address space, of which the engine of Vega only reserves much.
            resource.setrlimit(resource.RLIMIT_DATA, (max_bytes, max_bytes))
        content = pickle.dumps(function())
    except BaseException as error:
        content = pickle.dumps(_Raised(error))
    with io.FileIO(writer, "w") as file, suppress(OSError):
        view = memoryview(content)
        while view:
            view = view[file.write(view) :]
    os._exit(0)


def _read_until(reader: int, deadline: float) -> bytes | None:
    """Read until the other end is closed; None if it is not by then."""
    chunks: list[bytes] = []
    while True:
        patience = max(0.0, deadline - time.monotonic())
        ready, _, _ = select.select([reader], [], [], patience)
        if not ready:
            return None
        chunk = os.read(reader, 1 << 16)
        if not chunk:
            return b"".join(chunks)
        chunks.append(chunk)
