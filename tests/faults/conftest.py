import pytest

from tests.faults.kills import STEPS, Tormented, unbroken


@pytest.fixture(scope="session")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Tormented:
    """The study that was left alone."""
    return unbroken(tmp_path_factory.mktemp("straight"), STEPS)
