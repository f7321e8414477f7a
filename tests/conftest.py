"""Settings and fixtures that all tests share."""

import atexit
import gc
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.fakes.s3_server import start_s3_server

# The duration of an example depends on the machine.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")
# The same examples on every machine, and a sixth of them: `make test` and `make test-ci`.
settings.register_profile("quick", settings.get_profile("ci"), max_examples=16)


TEMPORARY_ROOT_ENV = "PYTEST_DEBUG_TEMPROOT"
MEMORY_FOLDER = Path("/dev/shm")
MEMORY_ROOM_BYTES = 6 * 2**30
"""With less room in memory, temporary folders stay on disk."""


def pytest_configure(config: pytest.Config) -> None:
    """Keep temporary folders in memory where there is room, and restore the handlers of Ctrl-C and a closed terminal.

    Every row and checkpoint of a study waits until the disk has it, which in memory takes no time.

    A shell starts background jobs with SIGINT ignored, and nohup starts a command with SIGHUP ignored.

    Look for no garbage until all tests are collected, in a process that collects tests.
    """
    if not config.getoption("numprocesses", default=None):
        gc.disable()
    if MEMORY_FOLDER.is_dir() and shutil.disk_usage(MEMORY_FOLDER).free > MEMORY_ROOM_BYTES:
        os.environ.setdefault(TEMPORARY_ROOT_ENV, str(MEMORY_FOLDER))
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


def pytest_collection_finish() -> None:
    """Look for garbage less often: imported modules and collected tests are none, and take long to look through."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 50, 100)
    gc.enable()
    # The interpreter would look through all objects as it ends, which takes a second.
    atexit.register(gc.freeze)


LONGEST_FILES = (
    "test_endings.py",
    "test_kills.py",
    "test_run.py",
    "test_docs.py",
    "test_sandbox_run.py",
    "test_probe.py",
    "test_report.py",
    "test_disk.py",
    "test_storage.py",
    "test_malformed.py",
    "test_benchmarks.py",
)


FILES_WITH_PROCESSES = (
    "tests/test_benchmarks.py",
    "tests/test_docs.py",
    "tests/tune_study/commands/test_doctor.py",
    "tests/tune_study/placement/test_samplers.py",
    "tests/tune_study/studies/",
    "tests/tune_study/tune/test_ray_access.py",
    "tests/tune_study/tune/test_wandb_service.py",
)
"""Files and folders whose tests take long because they start Ray, the command line or a benchmark."""


def find_places_of_processes() -> tuple[str, ...]:
    """The files and folders in which `make test-processes` looks for such tests."""
    text = Path(__file__).parents[1].joinpath("Makefile").read_text(encoding="utf-8")
    (names,) = re.findall(r"^PROCESS_TESTS := ((?:.*\\\n)*.*)$", text, re.MULTILINE)
    return tuple(names.replace("\\", " ").split())


def is_below(nodeid: str, places: Sequence[str]) -> bool:
    """Whether a test is in one of the files, or in a file of one of the folders."""
    path = nodeid.partition("::")[0]
    return any(path == place or path.startswith(f"{place}/") for place in places)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that start processes, and run the longest files first.

    With the longest files first, workers that take whole files finish at about the same time.
    """
    places = find_places_of_processes()
    for item in items:
        if item.nodeid.startswith(FILES_WITH_PROCESSES) or "ray_session" in getattr(item, "fixturenames", ()):
            item.add_marker("processes")
        markers = {mark.name for mark in item.iter_markers()}
        if markers & {"processes", "faults"} and "slow" not in markers and not is_below(item.nodeid, places):
            raise pytest.UsageError(f"{item.nodeid} starts processes: add its file to PROCESS_TESTS in the Makefile")
    rank = {name: index for index, name in enumerate(LONGEST_FILES)}
    items.sort(key=lambda item: rank.get(item.path.name, len(LONGEST_FILES)))


@pytest.fixture(scope="session", autouse=True)
def state_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Record the studies of tests in a folder of their own, and not in that of the user."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    """Start a local S3-compatible server and yield the query of its URIs, as in s3://shelf/folder?<query>."""
    with start_s3_server() as query:
        yield query


@pytest.fixture
def make_in_folder(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Return a function that makes a trial of a class in a folder of this test, and close all trials at its end."""
    trials: list[Any] = []

    def make(family: type, name: str, config: dict[str, Any]) -> Any:
        trials.append(type("Here", (family,), {"logdir": str(tmp_path / name)})(config))
        return trials[-1]

    yield make
    for trial in trials:
        trial.cleanup()


@pytest.fixture(params=["s3", "path"])
def uri(request: pytest.FixtureRequest, tmp_path: Path, s3: str) -> str:
    """The URI of a new storage, in S3 and in a folder."""
    name = request.node.name.replace("[", "-").replace("]", "")
    return f"s3://shelf/{name}?{s3}" if request.param == "s3" else (tmp_path / "shared").as_uri()
