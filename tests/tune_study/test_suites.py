from pathlib import Path

import pytest
from rich.console import Console

from search_spaces import STUDIES
from tune_study import starting
from tune_study.interrupt import interrupt_of
from tune_study.plan import PlanError, StudyPlan, make_plan
from tune_study.ray_here import held

ASKED = starting.Asked(None, None, None, None, None)


@pytest.fixture
def two_plans(tmp_path: Path) -> list[StudyPlan]:
    return [make_plan(STUDIES[name], "laptop", "a test", {}, None, 1, tmp_path) for name in ("influence", "replay")]


def test_an_interrupt_as_the_last_runs_of_a_study_end_is_one_for_its_suite(
    two_plans: list[StudyPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is left of the first study, whose own exit code is then 0."""
    begun = []

    def ended(plan: StudyPlan, *_: object) -> int:
        begun.append(plan.study.name)
        interrupt_of(plan.folder).request()
        return 0

    monkeypatch.setattr(starting, "execute_held", ended)
    console = Console(record=True, width=200)
    assert starting.start(two_plans, ASKED, (), False, console) == 130
    assert begun == ["influence"]
    assert "Not started: replay. The same command goes on with all of them." in console.export_text()


def test_a_suite_does_not_begin_where_another_process_runs_one_of_its_studies(
    two_plans: list[StudyPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starting, "execute_held", lambda *_: pytest.fail("it began"))
    with (
        held([two_plans[1].folder], Console(quiet=True)),
        pytest.raises(PlanError, match=r"Another process is running the study in .*replay"),
    ):
        starting.start(two_plans, ASKED, (), False, Console(quiet=True))
    assert not (two_plans[0].folder / "study.json").exists()


def test_a_suite_does_not_begin_where_a_later_study_lacks_something(
    two_plans: list[StudyPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(plan: StudyPlan, *_: object) -> None:
        if plan is two_plans[1]:
            raise PlanError("lacks something")

    monkeypatch.setattr(starting, "_check_machine", refused)
    monkeypatch.setattr(starting, "execute_held", lambda *_: pytest.fail("it began"))
    with pytest.raises(PlanError, match="lacks something"):
        starting.start(two_plans, ASKED, (), False, Console(quiet=True))
    assert not two_plans[0].output.joinpath("results").exists()
