"""Call a function in a child process that has a time limit, so that a fault can hang, crash or change nothing else."""

import multiprocessing
import os
import resource
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeVar

T = TypeVar("T")
FORKS = multiprocessing.get_context("fork")
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
    reader, writer = FORKS.Pipe(duplex=False)
    process = FORKS.Process(target=_serve, args=(function, writer, max_bytes))
    process.start()
    writer.close()
    try:
        if not reader.poll(seconds):
            raise ChildError(f"did not end within {seconds:.0f} s", is_timeout=True)
        value, problem = reader.recv()
    except EOFError:
        process.join()
        code = process.exitcode or 0
        raise ChildError(f"died of signal {-code}" if code < 0 else "ended without a word") from None
    finally:
        process.kill()  # it has sent everything, or takes too long
        process.join()
        reader.close()
    if problem:
        raise ChildError(problem)
    result: T = value
    return result


def _serve(function: Callable[[], object], writer: Connection, max_bytes: int | None) -> None:
    """Call the function, and send its value or error."""
    answer: tuple[Any, str]
    try:
        if max_bytes is not None:
            # Not of the address space, of which the engine of Vega only reserves much.
            resource.setrlimit(resource.RLIMIT_DATA, (max_bytes, max_bytes))
        answer = function(), ""
    except BaseException as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{os.path.basename(frame.filename)}:{frame.lineno}"
        answer = None, f"{type(error).__name__}: {str(error)[:600]} ({place})"
    writer.send(answer)
