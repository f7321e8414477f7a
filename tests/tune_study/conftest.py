from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from trainable.backend.gpus import make_bundles
from tune_study.plan.study_plan import ResourcePlan
from tune_study.tune.local_ray import prepare_environment, start_local_ray

HERE = Path(__file__).parent
THIRD_PARTY = (
    # Tune closes the files of its loggers when a trial ends, but not after Ctrl-C.
    "unclosed file .*driver_artifacts:ResourceWarning",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ignore the warnings of Ray and its loggers that are listed here; every other warning is an error."""
    for item in items:
        if HERE in item.path.parents:
            for warning in THIRD_PARTY:
                item.add_marker(pytest.mark.filterwarnings(f"ignore:{warning}"))


@pytest.fixture
def work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory on a machine without GPUs and without downloaded models."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "no-such-cache"))
    return tmp_path


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """One Ray for all tests of a process, with four CPUs, and two GPUs that are only declared: enough for placement."""
    prepare_environment(())
    with start_local_ray(ResourcePlan(make_bundles(0), 4, ("0", "1"), (), 1, ""), Console(quiet=True)):
        yield
