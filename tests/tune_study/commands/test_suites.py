"""Suites: the checks before the first study, and how a suite ends. The studies do not train here."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from tests.fakes.command_line import read_files
from tests.fakes.plans import plan_study
from tune_study.commands import preflight
from tune_study.commands.requests import LaunchRequest
from tune_study.folder import outputs
from tune_study.host.interrupt import make_interrupt
from tune_study.placement import disk
from tune_study.plan.errors import PlanError
from tune_study.plan.study_plan import StudyPlan
from tune_study.tune.session import SuiteContext

NOT_STARTED = "Not started: replay. Type the same command again to continue."


@pytest.fixture
def two_plans(tmp_path: Path) -> list[StudyPlan]:
    return [plan_study(tmp_path, None, study=name) for name in ("influence", "replay")]


class Suite:
    """A suite whose studies are replaced by a function; it records which were started, and what was printed."""

    def __init__(self, plans: list[StudyPlan], monkeypatch: pytest.MonkeyPatch) -> None:
        self.plans, self.started_names, self.output = plans, list[str](), ""
        self._monkeypatch = monkeypatch

    def run(self, run_one: Callable[[StudyPlan, SuiteContext], int]) -> int:
        def fake_execute(plan: StudyPlan, *arguments: object) -> int:
            self.started_names.append(plan.study.name)
            suite = arguments[-1]
            assert isinstance(suite, SuiteContext)
            outputs.write_study(plan)
            return run_one(plan, suite)

        self._monkeypatch.setattr(preflight, "execute_study", fake_execute)
        console = Console(record=True, width=300)
        code = preflight.start_studies(self.plans, LaunchRequest(), False, console)
        self.output = console.export_text()
        return code


@pytest.fixture
def suite(two_plans: list[StudyPlan], monkeypatch: pytest.MonkeyPatch) -> Suite:
    return Suite(two_plans, monkeypatch)


def test_the_code_is_that_of_the_worst_and_there_is_an_index(suite: Suite) -> None:
    code = suite.run(lambda plan, _: int(plan == suite.plans[0]))
    assert (code, suite.started_names) == (1, ["influence", "replay"])
    assert "Study 2 of 2: replay" in suite.output
    assert "Not started" not in suite.output
    assert suite.output.count(f"Index: {suite.plans[0].output}/index.html") == 1


@pytest.mark.parametrize(("number", "expected_code"), [(1, 130), (2, 0)])
def test_an_interrupt_as_the_last_runs_of_a_study_end_is_one_for_its_suite_unless_it_is_the_last_study(
    suite: Suite, number: int, expected_code: int
) -> None:
    """The study has no runs left, so its own exit code is 0."""

    def interrupt_at_end(plan: StudyPlan, context: SuiteContext) -> int:
        if plan == suite.plans[number - 1]:
            context.interrupt.request()
        return 0

    assert suite.run(interrupt_at_end) == expected_code
    assert suite.started_names == ["influence", "replay"][:number]
    assert (NOT_STARTED in suite.output) == (number == 1)
    assert "Index:" in suite.output


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_a_report_is_written_lets_it_be_finished_and_ends_the_suite(
    suite: Suite, signal_number: signal.Signals
) -> None:
    old_handler = signal.getsignal(signal_number)
    written_reports = []

    def write_report(plan: StudyPlan, _: SuiteContext) -> int:
        os.kill(os.getpid(), signal_number)
        written_reports.append(plan.study.name)
        return 0

    assert suite.run(write_report) == 130
    assert suite.started_names == written_reports == ["influence"]
    assert NOT_STARTED in suite.output
    assert signal.getsignal(signal_number) is old_handler


@pytest.mark.parametrize("error", [KeyboardInterrupt(), PlanError("it cannot be written"), SystemExit(15)])
def test_whatever_ends_a_suite_its_rest_is_named_and_what_is_there_has_an_index(
    suite: Suite, capsys: pytest.CaptureFixture[str], error: BaseException
) -> None:
    def raise_error(*_: object) -> int:
        raise error

    with pytest.raises(type(error)):
        suite.run(raise_error)
    output = capsys.readouterr().out
    assert NOT_STARTED in output
    assert "Index:" in output


def test_an_index_that_cannot_be_written_is_told(suite: Suite, capsys: pytest.CaptureFixture[str]) -> None:
    (suite.plans[0].output / "index.html").mkdir()
    assert suite.run(lambda *_: 0) == 1
    assert f"The index of the studies in {suite.plans[0].output} could not be written" in capsys.readouterr().err


def test_a_suite_does_not_begin_where_a_later_study_lacks_something(
    suite: Suite, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse_second(plan: StudyPlan) -> list[tuple[str, str]]:
        if plan == suite.plans[1]:
            raise PlanError("lacks something")
        return []

    monkeypatch.setattr(preflight, "_list_models", refuse_second)
    with pytest.raises(PlanError, match="lacks something"):
        suite.run(lambda *_: pytest.fail("it began"))
    assert not suite.plans[0].output.joinpath("results").exists()


def test_a_study_that_has_come_to_lack_something_by_its_turn_does_not_begin(
    suite: Suite, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fill_disk(*_: object) -> int:
        def raise_no_room(*_: object) -> None:
            raise PlanError("no room")

        monkeypatch.setattr(disk, "check_budgets", raise_no_room)
        return 0

    with pytest.raises(PlanError, match="no room"):
        suite.run(fill_disk)
    assert NOT_STARTED in capsys.readouterr().out
    assert not make_interrupt(suite.plans[1].folder).path.parent.joinpath("study.json").exists()


def test_studies_that_fit_one_by_one_and_not_together_are_refused(
    suite: Suite, monkeypatch: pytest.MonkeyPatch
) -> None:
    original_estimate = disk.estimate_disk_budget
    needed_bytes = 0

    def estimate_tight_budget(*arguments: object) -> disk.DiskBudget:
        return original_estimate(*arguments)._replace(free_bytes=needed_bytes)

    for plan in suite.plans:
        resource_plan = preflight.resources.preflight(plan, None, (), 2, None, is_real=True)
        needed_bytes += original_estimate(plan, resource_plan, {}).needed_bytes or 0
    monkeypatch.setattr(disk, "estimate_disk_budget", estimate_tight_budget)
    needed_bytes -= 1
    with pytest.raises(PlanError, match=r"The 2 studies together need up to .* free, 1 byte too little: type --output"):
        suite.run(lambda *_: 0)
    needed_bytes += 1
    assert suite.run(lambda *_: 0) == 0


def test_gpus_are_for_the_studies_of_a_suite_that_take_some(tmp_path: Path, two_plans: list[StudyPlan]) -> None:
    console = Console(record=True, width=300)
    options = LaunchRequest(gpus="0")
    overrides = {"trainer.n_gpus_per_node": 1.0, "trainer.device": "cuda"}
    gpu_plan = plan_study(tmp_path, ("0",), **overrides)
    assert preflight.start_studies([*two_plans, gpu_plan], options, True, console) == 0
    with pytest.raises(PlanError, match="--gpus 0 is given but a run takes no GPU: leave --gpus out"):
        preflight.start_studies(two_plans, options, True, console)


@pytest.mark.parametrize("what", ["a suite", "the study"])
def test_a_refused_suite_changes_nothing_of_the_suite_or_study_that_runs(
    two_plans: list[StudyPlan], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """The first study of the suite is real here up to its lock."""
    first_plan = two_plans[0]
    first_plan.folder.mkdir(parents=True)
    (first_plan.output / "index.html").write_text("written by the process that runs")
    locked_folder = {"a suite": first_plan.folder.parent, "the study": first_plan.folder}[what]
    with outputs.lock_folder(locked_folder):
        files = read_files(first_plan.output)
        with pytest.raises(PlanError, match=f"Another process is running {what} in {locked_folder}: wait for it"):
            preflight.start_studies(two_plans, LaunchRequest(), False, Console(quiet=True))
        (first_plan.folder.parent / ".lock").unlink()
        files.pop("results/.lock", None)
        assert read_files(first_plan.output) == files
