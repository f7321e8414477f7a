"""Compute something in a copy of this process while this process computes something else."""

import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from typing import TypeVar

Result = TypeVar("Result")

_THREADED_PACKAGES = frozenset({"ray", "torch"})
"""Their threads are unknown to Python. Those of Arrow, jemalloc and OpenBLAS are, too, but prepare for a fork."""
_SET_PARENT_DEATH_SIGNAL = 1
"""The number of this request to Linux: PR_SET_PDEATHSIG."""


@contextmanager
def compute_beside(compute: Callable[[], Result]) -> Iterator[Callable[[], Result]]:
    """Start `compute` in a copy of this process, and yield a function that waits for its result.

    The copy ends with the `with` statement at the latest, also by an error or Ctrl-C, and with this process. `compute`
    must not write files, since it may be ended at any time, and its result is pickled. Its warnings are printed by the
    copy.

    There is a copy only on Linux, with a second core, and where neither other Python threads, torch nor Ray are in this
    process: a copy has only the thread that made it, and locks that another one holds are never freed. Without a copy,
    and if it ends without a result, the function computes the result here, and raises what `compute` raises.

    Example:
        >>> with compute_beside(lambda: sum(range(10))) as get_sum:
        ...     product = 6 * 7
        ...     total = get_sum()
        >>> total
        45
    """
    copy = _start_copy(compute) if can_fork() else None
    if copy is None:
        yield compute
        return
    process, receiver = copy

    def get_result() -> Result:
        try:
            content = receiver.recv_bytes()
        except (EOFError, OSError):
            return compute()
        result: Result = pickle.loads(content)
        return result

    try:
        yield get_result
    finally:
        process.kill()
        process.join()
        receiver.close()


def _start_copy(compute: Callable[[], object]) -> tuple[ForkProcess, Connection] | None:
    """The process of a copy, and what its result comes from; None if this user may have no further process."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(compute, receiver, sender, os.getpid()), daemon=True)
    try:
        process.start()
    except OSError:
        receiver.close()
        return None
    finally:
        sender.close()
    return process, receiver


def can_fork() -> bool:
    """Whether `compute_beside` starts a process."""
    has_threads = threading.active_count() > 1 or not _THREADED_PACKAGES.isdisjoint(sys.modules)
    # A worker of multiprocessing.Pool may have no processes of its own.
    is_alone = not has_threads and not multiprocessing.current_process().daemon
    return sys.platform == "linux" and is_alone and len(os.sched_getaffinity(0)) > 1


def _send(compute: Callable[[], Result], receiver: Connection, sender: Connection, parent_id: int) -> None:
    """Be the copy."""
    # While the copy itself could still read, it would wait for a dead parent to read its result.
    receiver.close()
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_id:
        return
    # After an error or Ctrl-C, the parent computes the result, or reports it.
    try:
        sender.send_bytes(pickle.dumps(compute()))
    except BaseException:
        sender.close()
