import errno
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from trainable.runs import retry
from trainable.runs.checkpoint import iter_checkpoints, read_checkpoint, write_rolling_checkpoint
from trainable.runs.retry import call_with_retry
from trainable.runs.run_files import append_json_line, read_rows


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "_RETRY_INTERVAL_S", 0.001)


@pytest.fixture
def no_room() -> Iterator[Callable[[int], None]]:
    """Let this process write no file beyond a number of bytes: the system refuses it as it does on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def unlimited() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def failing(times: int, error: Exception) -> Callable[[], str]:
    left = [times]

    def write() -> str:
        if left[0]:
            left[0] -= 1
            raise error
        return "written"

    return write


def test_it_waits_while_the_disk_is_full_and_says_so_once() -> None:
    said: list[str] = []
    full = OSError(errno.ENOSPC, "No space left on device")
    assert call_with_retry(failing(5, full), 60, said.append) == "written"
    assert said == [
        "waiting up to 60 s for disk space: [Errno 28] No space left on device",
        "disk space is available again",
    ]


def test_without_patience_it_fails_at_once_with_what_was_tried() -> None:
    said: list[str] = []
    with pytest.raises(OSError, match="No space left") as caught:
        call_with_retry(failing(9, OSError(errno.ENOSPC, "No space left")), 0, said.append)
    assert caught.value.__notes__ == ["Disk still full after 0 s (trainer.disk_patience)."]
    assert said == []


def test_an_interruption_ends_the_waiting() -> None:
    asked = iter([False, False, True])
    with pytest.raises(OSError, match="No space left"):
        call_with_retry(failing(99, OSError(errno.ENOSPC, "No space left")), 60, print, lambda: next(asked))


def test_what_waiting_does_not_mend_is_raised_at_once() -> None:
    said: list[str] = []
    for error in (PermissionError(errno.EACCES, "x"), ValueError("x")):
        with pytest.raises(type(error)):
            call_with_retry(failing(1, error), 60, said.append)
    assert said == []


def test_nothing_is_said_where_all_is_well() -> None:
    said: list[str] = []
    assert call_with_retry(lambda: 3, 60, said.append) == 3
    assert said == []


def test_a_state_that_finds_no_room_leaves_the_one_before_and_no_rest(
    tmp_path: Path, no_room: Callable[[int], None]
) -> None:
    tensors = {"w": torch.arange(5000.0)}
    write_rolling_checkpoint(tmp_path, 1, tensors, {"step": 1}, max_to_keep=2)
    no_room(4096)
    with pytest.raises(OSError, match="File too large") as caught:
        write_rolling_checkpoint(tmp_path, 2, tensors, {"step": 2}, max_to_keep=2)
    assert caught.value.errno == errno.EFBIG
    unlimited()
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]
    assert read_checkpoint(tmp_path / "step_1")[1] == {"step": 1}
    write_rolling_checkpoint(tmp_path, 2, tensors, {"step": 2}, max_to_keep=2)
    assert [step for step, _ in iter_checkpoints(tmp_path)] == [2, 1]


def test_a_row_that_was_cut_by_a_full_disk_is_written_again(tmp_path: Path, no_room: Callable[[int], None]) -> None:
    path = tmp_path / "metrics.jsonl"
    append_json_line(path, {"step": 1, "text": "x" * 100})
    no_room(path.stat().st_size + 20)
    with pytest.raises(OSError, match="File too large"):
        append_json_line(path, {"step": 2, "text": "y" * 100})
    unlimited()
    assert [row["step"] for row in read_rows(path)] == [1]
    append_json_line(path, {"step": 2, "text": "y" * 100})
    assert [row["text"][0] for row in read_rows(path)] == ["x", "y"]
