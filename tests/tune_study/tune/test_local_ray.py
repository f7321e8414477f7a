"""When Ray starts and ends for one study or several, and what happens if one of its processes exits."""

import importlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from trainable.backend.gpus import make_bundles
from trainable.runs.orphans import MARK_ENV, make_ray_mark
from tune_study.plan.study_plan import ResourcePlan
from tune_study.tune import local_ray
from tune_study.tune.local_ray import Daemons, LocalRay, has_exited, prepare_environment, watch_daemons

FOLDERS = (Path("first"), Path("second"))
STARTED_TWICE = ["up with 2", "down"] * 2


def make_resource_plan(cpus: int = 2, *gpus: str) -> ResourcePlan:
    return ResourcePlan(make_bundles(0), cpus, gpus, (), 1, "")


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The log of when Ray starts and ends. Ray is replaced by a fake, whose only process is this one."""
    event_log: list[str] = []

    @contextmanager
    def start_fake_ray(resource_plan: ResourcePlan, console: Console) -> Iterator[Daemons]:
        event_log.append(" ".join(["up with", str(resource_plan.cpus), *resource_plan.gpus]))
        yield {"raylet": psutil.Process()}
        event_log.append("down")

    monkeypatch.setattr(local_ray, "start_local_ray", start_fake_ray)
    return event_log


@pytest.fixture
def ray(events: list[str]) -> LocalRay:
    return LocalRay(FOLDERS, Console(quiet=True))


def test_ray_is_kept_for_studies_that_need_the_same(ray: LocalRay, events: list[str]) -> None:
    with ray:
        for plan in (make_resource_plan(2), make_resource_plan(2), make_resource_plan(4), make_resource_plan(4, "0")):
            with ray.acquire(plan) as daemons:
                events.append(*daemons)
    starts = [("up with 2", "raylet", "raylet"), ("up with 4", "raylet"), ("up with 4 0", "raylet")]
    assert events == [event for start in starts for event in (*start, "down")]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_ray_ends_with_a_study_that_fails_and_is_started_for_the_next(
    ray: LocalRay, events: list[str], error: type[BaseException]
) -> None:
    """Otherwise its trials would continue to write while their statuses are set."""
    with ray:
        with pytest.raises(error), ray.acquire(make_resource_plan()):
            raise error
        assert events == ["up with 2", "down"]
        with ray.acquire(make_resource_plan()):
            pass
    assert events == STARTED_TWICE


def test_a_ray_that_died_between_two_studies_is_started_again(
    ray: LocalRay, events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_ray, "has_exited", lambda process: True)
    with ray:
        for _ in range(2):
            with ray.acquire(make_resource_plan()):
                pass
    assert events == STARTED_TWICE


def test_a_ray_that_could_not_be_ended_is_not_taken_for_one_that_is_there(
    ray: LocalRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def start_fake_ray(resource_plan: ResourcePlan, console: Console) -> Iterator[Daemons]:
        started_plans.append(resource_plan)
        yield {}
        if len(started_plans) == 1:
            raise OSError("no answer")

    started_plans: list[ResourcePlan] = []
    monkeypatch.setattr(local_ray, "start_local_ray", start_fake_ray)
    with ray.acquire(make_resource_plan()):
        pass
    with pytest.raises(OSError, match="no answer"):
        ray.close()
    with ray.acquire(make_resource_plan()):
        pass
    assert len(started_plans) == 2


def test_what_ray_starts_inherits_the_folders_of_all_studies(ray: LocalRay) -> None:
    with ray:
        assert os.environ[MARK_ENV] == make_ray_mark(FOLDERS)
    assert MARK_ENV not in os.environ
    with LocalRay(FOLDERS, Console(quiet=True), is_local=False):
        assert MARK_ENV not in os.environ


@pytest.mark.parametrize(("gpus", "expected"), [(("2", "GPU-7f"), "2,GPU-7f"), ((), None)])
def test_gpus_are_those_of_the_study(
    monkeypatch: pytest.MonkeyPatch, gpus: tuple[str, ...], expected: str | None
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # so that the variable is restored even if it was not set
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    prepare_environment(gpus)
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == expected


def test_the_silenced_loggers_are_those_that_tune_writes_to() -> None:
    modules = [importlib.import_module(name) for name in local_ray.SILENCED_LOGGERS]
    assert tuple(module.logger.name for module in modules) == local_ray.SILENCED_LOGGERS


def test_the_last_will_is_called_once_a_daemon_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_ray, "_CHECK_INTERVAL_S", 0.01)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    process, messages, was_called = psutil.Process(child.pid), list[str](), threading.Event()

    def last_will(message: str) -> None:
        messages.append(message)
        was_called.set()

    with watch_daemons({"gcs_server": psutil.Process(), "raylet": process}, last_will):
        assert not was_called.wait(0.1)
        assert not has_exited(process)
        child.kill()
        assert was_called.wait(30)
    assert has_exited(process)
    child.wait()
    assert has_exited(process)
    assert messages == [f"Ray's process raylet ({child.pid}) has exited"]
