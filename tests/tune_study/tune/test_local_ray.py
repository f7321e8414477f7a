import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from trainable.backend.gpus import make_bundles
from trainable.runs.orphans import MARK_ENV, make_ray_mark
from tune_study.plan.study_plan import ResourcePlan
from tune_study.tune import local_ray, watchdog
from tune_study.tune.local_ray import LocalRay
from tune_study.tune.watchdog import Daemon

FIRST, SECOND, THIRD = (Path(name) for name in ("first", "second", "third"))


def make_resource_plan(cpus: int, *gpus: str) -> ResourcePlan:
    return ResourcePlan(make_bundles(0), cpus, gpus, (), 1, "")


def make_local_ray(*folders: Path) -> LocalRay:
    return LocalRay(folders, Console(quiet=True))


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The log of when Ray starts and ends. Ray is replaced by a fake, whose only process is this one."""
    event_log: list[str] = []

    @contextmanager
    def start_fake_ray(resource_plan: ResourcePlan, console: Console) -> Iterator[tuple[Daemon, ...]]:
        event_log.append(" ".join(["up with", str(resource_plan.cpus), *resource_plan.gpus]))
        yield (Daemon("raylet", psutil.Process()),)
        event_log.append("down")

    monkeypatch.setattr(local_ray, "start_local_ray", start_fake_ray)
    return event_log


def test_ray_stays_for_the_studies_that_wait_and_no_longer(events: list[str]) -> None:
    with make_local_ray(FIRST, SECOND) as ray:
        for folder in (FIRST, SECOND):
            with ray.acquire(folder, make_resource_plan(2)) as daemons:
                events.append(f"{folder} with {daemons[0].name}")
        assert events == ["up with 2", "first with raylet", "second with raylet", "down"]


@pytest.mark.parametrize(
    ("other_resources", "start_event"),
    [(make_resource_plan(4), "up with 4"), (make_resource_plan(2, "0"), "up with 2 0")],
    ids=["cpus", "gpus"],
)
def test_a_study_with_other_resources_has_a_ray_of_its_own(
    events: list[str], other_resources: ResourcePlan, start_event: str
) -> None:
    with make_local_ray(FIRST, SECOND, THIRD) as ray:
        for folder, resource_plan in (
            (FIRST, make_resource_plan(2)),
            (SECOND, other_resources),
            (THIRD, other_resources),
        ):
            with ray.acquire(folder, resource_plan):
                events.append(folder.name)
    assert events == ["up with 2", "first", "down", start_event, "second", "third", "down"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_ray_ends_with_a_study_that_fails_and_is_started_for_the_next(
    events: list[str], error: type[BaseException]
) -> None:
    """Otherwise its trials would continue to write while their statuses are set."""
    with make_local_ray(FIRST, SECOND) as ray:
        with pytest.raises(error), ray.acquire(FIRST, make_resource_plan(2)):
            raise error
        assert events == ["up with 2", "down"]
        with ray.acquire(SECOND, make_resource_plan(2)):
            pass
    assert events == ["up with 2", "down"] * 2


def test_a_ray_that_died_between_two_studies_is_started_again(
    events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_local_ray(FIRST, SECOND) as ray:
        with ray.acquire(FIRST, make_resource_plan(2)):
            pass
        monkeypatch.setattr(watchdog, "has_exited", lambda daemon: True)
        with ray.acquire(SECOND, make_resource_plan(2)):
            pass
    assert events == ["up with 2", "down"] * 2


def test_a_ray_that_could_not_be_ended_is_not_taken_for_one_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def start_fake_ray(resource_plan: ResourcePlan, console: Console) -> Iterator[tuple[Daemon, ...]]:
        started_plans.append(resource_plan)
        yield ()
        if len(started_plans) == 1:
            raise OSError("no answer")

    started_plans: list[ResourcePlan] = []
    monkeypatch.setattr(local_ray, "start_local_ray", start_fake_ray)
    ray = make_local_ray(FIRST, SECOND)
    with ray.acquire(FIRST, make_resource_plan(2)):
        pass
    with pytest.raises(OSError, match="no answer"):
        ray.close()
    with ray.acquire(SECOND, make_resource_plan(2)):
        pass
    assert len(started_plans) == 2


def test_ray_ends_with_the_suite_where_nothing_was_left_of_its_last_study(events: list[str]) -> None:
    with make_local_ray(FIRST, SECOND) as ray, ray.acquire(FIRST, make_resource_plan(2)):
        pass
    assert events == ["up with 2", "down"]


def test_what_ray_starts_inherits_the_folders_of_all_studies() -> None:
    with make_local_ray(FIRST, SECOND):
        assert os.environ[MARK_ENV] == make_ray_mark([FIRST, SECOND])
    assert MARK_ENV not in os.environ
    with LocalRay([FIRST], Console(quiet=True), is_local=False):
        assert MARK_ENV not in os.environ


def test_the_silenced_loggers_are_those_that_tune_writes_to() -> None:
    modules = [importlib.import_module(name) for name in local_ray.SILENCED_LOGGERS]
    assert tuple(module.logger.name for module in modules) == local_ray.SILENCED_LOGGERS
