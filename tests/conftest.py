"""What all tests need of the process that runs them."""

import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.fakes.s3_server import start_s3_server

settings.register_profile("unhurried", deadline=None)  # how long an example takes is the machine's affair
settings.load_profile("unhurried")


def pytest_configure() -> None:
    """Ctrl-C and a closed terminal count: a shell starts background jobs with the first ignored, nohup the second."""
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


LONGEST_FILES = (
    "test_smoke_run.py",
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
    """The longest files first, so that processes that take whole files end together."""
    rank = {name: place for place, name in enumerate(LONGEST_FILES)}
    items.sort(key=lambda item: rank.get(item.path.name, len(LONGEST_FILES)))


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    """A local S3-compatible server: the query of URIs that lead to it, like s3://shelf/folder?<query>."""
    with start_s3_server() as query:
        yield query
