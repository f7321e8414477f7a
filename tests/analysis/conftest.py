"""Fixtures of the tests of reports."""

from collections.abc import Iterator

import pytest

from analysis.data import replicates


@pytest.fixture(scope="module", autouse=True)
def no_recorded_runs() -> Iterator[None]:
    """Leave out the shipped replicates, which would be noise of the fake studies too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replicates, "read_replicates", lambda: ())
        yield
