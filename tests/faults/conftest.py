from collections.abc import Callable, Iterator

import pytest

from tests.faults.kills import STEPS, Tormented, unbroken

Watch = Callable[[Tormented], None]


@pytest.fixture(scope="session")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Tormented:
    """The study that was left alone."""
    return unbroken(tmp_path_factory.mktemp("straight"), STEPS)


@pytest.fixture(scope="session")
def must_lose_its_agents() -> Iterator[Watch]:
    """Names a killed study whose Ray agents must have ended when all tests have: they take a minute, others go on."""
    studies: list[Tormented] = []
    yield studies.append
    assert sum(study.agents_gone() for study in studies) == 0
