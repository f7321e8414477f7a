"""Settings and fixtures that all tests share."""

import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.fakes.s3_server import start_s3_server

settings.register_profile("unhurried", deadline=None)  # the duration of an example depends on the machine
settings.load_profile("unhurried")


def pytest_configure() -> None:
    """Restore the handlers of Ctrl-C and a closed terminal.

    A shell starts background jobs with SIGINT ignored, and nohup starts a command with SIGHUP ignored.
    """
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


LONGEST_FILES = (
    "test_endings.py",
    "test_kills.py",
    "test_run.py",
    "test_docs.py",
    "test_sandbox_run.py",
    "test_end_to_end.py",
    "test_probe.py",
    "test_report.py",
    "test_disk.py",
    "test_storage.py",
    "test_malformed.py",
    "test_benchmarks.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest files first, so that workers that take whole files finish at about the same time."""
    rank = {name: index for index, name in enumerate(LONGEST_FILES)}
    items.sort(key=lambda item: rank.get(item.path.name, len(LONGEST_FILES)))


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    """Start a local S3-compatible server and yield the query of its URIs, as in s3://shelf/folder?<query>."""
    with start_s3_server() as query:
        yield query
