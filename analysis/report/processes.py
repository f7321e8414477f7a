"""Compute one half of a report in a process beside the one that computes the other half."""

import multiprocessing
import os
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TypeVar

Result = TypeVar("Result")


def compute_beside(compute: Callable[[], Result]) -> Callable[[], Result]:
    """Start `compute` in a copy of this process, and return a function that waits for its result.

    Without a second core there is nothing to gain. A copy has only the thread that made it: other threads of this
    process may hold locks then, which nobody would free. A process with other threads therefore makes no copy, nor does
    one with Ray, whose threads Python does not know, nor one on macOS, whose libraries do not allow it. In these cases,
    and if the copy fails, the returned function computes the result itself, and raises what `compute` raises.

    Example:
        >>> get_sum = compute_beside(lambda: sum(range(10)))
        >>> get_sum()
        45
    """
    if not can_fork():
        return compute
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(compute, sender), daemon=True)  # it ends with this process
    process.start()
    sender.close()

    def get_result() -> Result:
        try:
            result: Result = receiver.recv()
        except EOFError:
            return compute()
        finally:  # also after Ctrl-C, when the copy may still compute, or wait until somebody reads its result
            process.kill()
            process.join()
            receiver.close()
        return result

    return get_result


def can_fork() -> bool:
    """Whether `compute_beside` starts a process."""
    has_threads = threading.active_count() > 1 or "ray" in sys.modules
    return sys.platform == "linux" and not has_threads and len(os.sched_getaffinity(0)) > 1


def _send(compute: Callable[[], Result], sender: Connection) -> None:
    # After an error or Ctrl-C, the other process reports it.
    try:
        sender.send(compute())
    except BaseException:
        sender.close()
