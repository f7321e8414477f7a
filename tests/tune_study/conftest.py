from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from tune_study.placement.resources import make_bundles
from tune_study.plan.resource_plan import ResourcePlan
from tune_study.tune.local_ray import start_local_ray
from tune_study.tune.run import prepare_environment

HERE = Path(__file__).parent
THIRD_PARTY = (
    # Tune closes the files of its loggers when a trial ends, which after Ctrl-C it does not.
    "unclosed file .*driver_artifacts:ResourceWarning",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What Ray and its loggers warn of is theirs; each is named, and every other warning is an error."""
    for item in items:
        if HERE in item.path.parents:
            for warning in THIRD_PARTY:
                item.add_marker(pytest.mark.filterwarnings(f"ignore:{warning}"))


@pytest.fixture
def work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to type commands in, on a machine without GPUs and without fetched models."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "no-such-cache"))
    return tmp_path


@pytest.fixture(scope="package")
def ray_session() -> Iterator[None]:
    """One Ray for all tests: four CPUs and two GPUs that are declared, which is all that placement looks at."""
    prepare_environment(())
    with start_local_ray(ResourcePlan(make_bundles(0), 4, ("0", "1"), (), 1, ""), Console(quiet=True)):
        yield
