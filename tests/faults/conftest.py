import fcntl
from collections.abc import Callable, Iterator

import pytest

from tests.faults.kills import RUN, STEPS, Tormented, unbroken

Watch = Callable[[Tormented], None]


@pytest.fixture(scope="session")
def straight(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Tormented:
    """The study that was left alone: of all processes of the tests, the first to ask for it makes it for all."""
    worker_folder = tmp_path_factory.getbasetemp()
    folder = (worker_folder if worker_id == "master" else worker_folder.parent) / "straight"
    folder.mkdir(exist_ok=True)
    with (folder.parent / "straight.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / RUN / "report.html").exists():
            unbroken(folder, STEPS)
    return Tormented(folder, STEPS)


@pytest.fixture(scope="session")
def must_lose_its_agents() -> Iterator[Watch]:
    """Names a killed study whose Ray agents must have ended when all tests have: they take a minute, others go on."""
    studies: list[Tormented] = []
    yield studies.append
    assert sum(study.agents_gone() for study in studies) == 0
