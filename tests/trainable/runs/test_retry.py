import errno
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from trainable.runs import failures
from trainable.runs.checkpoint import iter_checkpoints, read_checkpoint, write_rolling_checkpoint
from trainable.runs.failures import call_with_retry


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "_RETRY_INTERVAL_S", 0.001)


@pytest.fixture
def limit_file_size() -> Iterator[Callable[[int], None]]:
    """Limit the size of the files of this process: the system refuses a larger write as it does on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def make_failing_writer(times: int, error: Exception) -> Callable[[], str]:
    remaining = [times]

    def write() -> str:
        if remaining[0]:
            remaining[0] -= 1
            raise error
        return "written"

    return write


def test_a_writer_waits_for_a_full_disk_or_a_silent_storage_and_reports_it_once() -> None:
    for error, place, words in (
        (OSError(errno.ENOSPC, "No space left on device"), "", "disk space"),
        (OSError("AWS Error NETWORK_CONNECTION"), "the storage", "the storage"),
    ):
        messages: list[str] = []
        assert call_with_retry(make_failing_writer(5, error), 60, messages.append, place=place) == "written"
        assert messages == [f"waiting up to 60 s for {words}: {error}", f"{words} is available again"]


def test_without_patience_or_when_interrupted_a_writer_fails_and_names_the_setting() -> None:
    messages: list[str] = []
    with pytest.raises(OSError, match="No space left") as raised:
        call_with_retry(make_failing_writer(9, OSError(errno.ENOSPC, "No space left")), 0, messages.append)
    assert raised.value.__notes__ == ["Waited 0 s for disk space (trainer.disk_patience)."]
    assert messages == []
    answers, write = iter([False, False, True]), make_failing_writer(99, OSError(errno.ENOSPC, "No space left"))
    with pytest.raises(OSError, match="No space left"):
        call_with_retry(write, 60, print, lambda: next(answers))


@pytest.mark.parametrize("place", ["", "the storage"])
def test_an_error_that_waiting_cannot_fix_is_raised_at_once(place: str) -> None:
    messages: list[str] = []
    for error in (PermissionError(errno.EACCES, "x"), ValueError("x")):
        with pytest.raises(type(error)):
            call_with_retry(make_failing_writer(1, error), 60, messages.append, place=place)
    assert messages == []


def test_a_checkpoint_that_does_not_fit_keeps_the_previous_one_and_leaves_no_partial_files(
    tmp_path: Path, limit_file_size: Callable[[int], None]
) -> None:
    tensors = {"w": torch.arange(5000.0)}
    write_rolling_checkpoint(tmp_path, 1, tensors, {"step": 1}, max_to_keep=2)
    limit_file_size(4096)
    with pytest.raises(OSError, match="File too large") as raised:
        write_rolling_checkpoint(tmp_path, 2, tensors, {"step": 2}, max_to_keep=2)
    assert raised.value.errno == errno.EFBIG
    limit_file_size(resource.RLIM_INFINITY)
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]
    assert read_checkpoint(tmp_path / "step_1")[1] == {"step": 1}
    write_rolling_checkpoint(tmp_path, 2, tensors, {"step": 2}, max_to_keep=2)
    assert [step for step, _ in iter_checkpoints(tmp_path)] == [2, 1]
