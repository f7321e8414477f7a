import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console

from tune_study import ray_here
from tune_study.leftovers import MARK
from tune_study.ray_here import RayHere
from tune_study.resources import Allotment, bundles

FIRST, SECOND, THIRD = (Path(name) for name in ("first", "second", "third"))


def allotment(cpus: int) -> Allotment:
    return Allotment(bundles(0), cpus, (), (), 1, "")


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens to Ray, which is not started: when it starts and ends."""
    seen: list[str] = []

    @contextmanager
    def started_ray(given: Allotment, console: Console) -> Iterator[tuple[()]]:
        seen.append(f"up with {given.cpus}")
        yield ()
        seen.append("down")

    monkeypatch.setattr(ray_here, "started_ray", started_ray)
    return seen


def test_ray_stays_for_the_studies_that_wait_and_no_longer(events: list[str]) -> None:
    ray = RayHere([FIRST, SECOND], Console(quiet=True))
    with ray.used(FIRST, allotment(2)):
        events.append("first")
    with ray.used(SECOND, allotment(2)):
        events.append("second")
    assert events == ["up with 2", "first", "second", "down"]


def test_a_study_with_other_resources_has_a_ray_of_its_own(events: list[str]) -> None:
    ray = RayHere([FIRST, SECOND, THIRD], Console(quiet=True))
    for folder, cpus in ((FIRST, 2), (SECOND, 4), (THIRD, 4)):
        with ray.used(folder, allotment(cpus)):
            events.append(folder.name)
    assert events == ["up with 2", "first", "down", "up with 4", "second", "third", "down"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_ray_ends_with_a_study_that_fails_and_is_started_for_the_next(
    events: list[str], error: type[BaseException]
) -> None:
    """Its trials would write on while their statuses are being settled."""
    ray = RayHere([FIRST, SECOND], Console(quiet=True))
    with pytest.raises(error), ray.used(FIRST, allotment(2)):
        raise error
    assert events == ["up with 2", "down"]
    with ray.used(SECOND, allotment(2)):
        pass
    assert events == ["up with 2", "down"] * 2


def test_ray_ends_with_the_suite_where_nothing_was_left_of_its_last_study(events: list[str], tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    with ray_here.held(folders, Console(quiet=True)) as ray, ray.used(folders[0], allotment(2)):
        pass
    assert events == ["up with 2", "down"]


def test_what_is_started_while_studies_are_held_names_all_of_them(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    with ray_here.held(folders, Console(quiet=True)):
        assert os.environ[MARK].splitlines() == [str(folder) for folder in folders]
    assert MARK not in os.environ
    with ray_here.held(folders, Console(quiet=True), here=False):
        assert MARK not in os.environ
