import errno
import pickle

import pytest
import torch

from trainable.config.run_config import ConfigError
from trainable.runs.failures import Failure, NonFiniteError, RunFailedError, classify_failure, is_disk_full
from trainable.runs.run_files import RunLockedError


def make_disk_full_error() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("error", "has_rows", "failure_kind", "is_retried"),
    [
        (NonFiniteError("x"), True, "non-finite", False),
        (ConfigError("x"), False, "configuration", False),
        (ValueError("x"), False, "configuration", False),
        (ValueError("x"), True, "error", False),
        (torch.OutOfMemoryError("CUDA out of memory"), False, "out of memory", False),
        (torch.OutOfMemoryError("CUDA out of memory"), True, "out of memory", True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), False, "out of memory", False),
        (MemoryError(), True, "out of memory", True),
        # What vLLM 0.32 raises when others use the GPU's memory at that moment.
        (AssertionError("Error in memory profiling. Initial free memory 9 GiB"), False, "out of memory", True),
        (
            ValueError("Free memory on device cuda:0 (9/80 GiB) is less than desired GPU memory utilization"),
            False,
            "out of memory",
            True,
        ),
        (ValueError("No available memory for the cache blocks. Try increasing"), True, "out of memory", True),
        (make_disk_full_error(), True, "storage", False),
        (PermissionError(errno.EACCES, "x"), False, "storage", False),
        (OSError(errno.EROFS, "x"), True, "storage", False),
        (OSError(errno.EIO, "x"), True, "error", True),
        (ConnectionResetError(errno.ECONNRESET, "x"), True, "error", True),
        (RuntimeError("CUDA error: unspecified launch failure"), True, "error", True),
        (RunLockedError("x"), False, "error", True),
        (NotImplementedError("x"), True, "error", False),
        (RecursionError("x"), True, "error", False),
        (KeyError("x"), True, "error", False),
        (TypeError("x"), False, "error", False),
        (AssertionError(), True, "error", False),
        (ImportError("x"), False, "error", False),
        (ZeroDivisionError("x"), True, "error", False),
    ],
)
def test_what_a_failure_is_and_whether_it_may_pass(
    error: Exception, has_rows: bool, failure_kind: str, is_retried: bool
) -> None:
    failure = classify_failure(error, has_rows)
    assert (failure.kind, failure.is_retried) == (failure_kind, is_retried)
    assert failure.message.startswith(type(error).__name__)


def test_the_message_is_one_line_and_the_trace_is_whole() -> None:
    try:
        raise RuntimeError("\n first\nsecond")
    except RuntimeError as error:
        failure = classify_failure(error, True)
    assert failure.message == "RuntimeError: first"
    assert "second" in failure.trace
    assert "raise RuntimeError" in failure.trace
    assert classify_failure(RuntimeError(), True).message == "RuntimeError: no message"
    error_with_note = make_disk_full_error()
    error_with_note.add_note("Disk still full after 1 s.")
    message = classify_failure(error_with_note, True).message
    assert message.endswith("No space left on device Disk still full after 1 s.")


def test_a_failure_survives_the_way_to_another_process() -> None:
    error = RunFailedError(Failure("storage", "OSError: x", is_retried=False, trace="a\nb"))
    assert pickle.loads(pickle.dumps(error)).failure == error.failure
    assert str(error) == "OSError: x"


def test_which_errors_say_that_there_is_no_room() -> None:
    assert is_disk_full(make_disk_full_error())
    assert is_disk_full(OSError(errno.EDQUOT, "x"))
    assert not is_disk_full(OSError(errno.EACCES, "x"))
    assert not is_disk_full(RuntimeError("No space left on device"))
