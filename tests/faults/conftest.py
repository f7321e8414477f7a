import fcntl
from collections.abc import Callable, Iterator

import pytest

from tests.faults.kills import ONE_PROCESS, RUN, STEPS, InterruptedStudy, run_uninterrupted

StudyRegistration = Callable[[InterruptedStudy], None]


@pytest.fixture(scope="session")
def uninterrupted_study(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> InterruptedStudy:
    """A study that was not interrupted. The first test process that needs it runs it for all of them."""
    worker_folder = tmp_path_factory.getbasetemp()
    folder = (worker_folder if worker_id == "master" else worker_folder.parent) / "straight"
    folder.mkdir(exist_ok=True)
    with (folder.parent / "straight.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / RUN / "report.html").exists():
            run_uninterrupted(folder, STEPS, [ONE_PROCESS])
    return InterruptedStudy(folder, STEPS)


@pytest.fixture(scope="session")
def expect_agents_to_end() -> Iterator[StudyRegistration]:
    """Register a killed study whose Ray agents must have ended at the end of the session.

    The agents take a minute to end, during which the other tests run.
    """
    studies: list[InterruptedStudy] = []
    yield studies.append
    assert sum(study.wait_and_count_orphan_agents() for study in studies) == 0
