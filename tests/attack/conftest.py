"""What the attack shares: the order in which its cells are drawn, its time, the sample study and undisturbed studies.

The modules of the attack have no `test_` in their names, so that only `make attack` collects them.
"""

import os
import random
import time
from collections import Counter
from collections.abc import Callable
from functools import cache

import pytest

from tests.attack.sample_study import SampleStudy, preload_modules, write_sample_study
from tests.faults.kills import InterruptedStudy, Recipe, run_uninterrupted

SEED = os.environ.get("ATTACK_SEED", "0")
MINUTES = float(os.environ.get("ATTACK_MINUTES", "0"))
"""0: every cell."""
DEADLINE = time.monotonic() + 60 * MINUTES
SECONDS = {
    "test_damaged_files": 5.0,
    "test_hostile_folders": 10.0,
    "test_inputs": 20.0,
    "test_kills": 150.0,
    "test_sandbox_kills": 150.0,
    "test_starts": 90.0,
}
"""What a cell of a kind takes, roughly."""
REFERENCE_PATIENCE_S = 300.0

RunReference = Callable[[int, Recipe], InterruptedStudy]


def get_seconds(item: pytest.Item) -> float:
    return SECONDS[item.name.partition("[")[0]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Shuffle the cells of an attack that may end before all of them, and give all kinds the same time."""
    if not MINUTES:
        return
    random.Random(SEED).shuffle(items)
    elapsed: Counter[float] = Counter()
    places = {}
    for item in items:
        places[item] = elapsed[item.path]
        elapsed[item.path] += get_seconds(item)
    items.sort(key=places.__getitem__)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if MINUTES and time.monotonic() + get_seconds(item) > DEADLINE:
        pytest.skip("not drawn in time")


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    """The random numbers of a cell, which depend on nothing that was tried before it."""
    return random.Random(f"{SEED}/{request.node.name}")


@pytest.fixture(scope="session")
def sample(tmp_path_factory: pytest.TempPathFactory) -> SampleStudy:
    study = write_sample_study(tmp_path_factory.mktemp("attack"), with_ray=True)
    preload_modules(study)
    return study


@pytest.fixture(scope="session")
def run_reference(tmp_path_factory: pytest.TempPathFactory) -> RunReference:
    """Return a function that runs a study which is never disturbed, once for all cells."""

    @cache
    def run(steps: int, recipe: Recipe) -> InterruptedStudy:
        return run_uninterrupted(tmp_path_factory.mktemp("straight"), steps, (), recipe, REFERENCE_PATIENCE_S)

    return run
