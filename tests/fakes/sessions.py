"""Studies in this process: their session without a start, a start with real Ray, and where their runs are placed."""

import json
from typing import Any

import ray
from rich.console import Console

from tests.fakes.trainer import Barrier
from tune_study.host.interrupt import make_interrupt
from tune_study.placement.resources import preflight
from tune_study.plan.study_plan import ResourcePlan, StudyPlan
from tune_study.tune.callbacks import Recorder
from tune_study.tune.local_ray import LocalRay
from tune_study.tune.run import execute_study, make_study_tuner
from tune_study.tune.session import StudySession, SuiteContext


def allocate(plan: StudyPlan, max_concurrent: int = 2) -> ResourcePlan:
    """Allocate CPUs of this machine."""
    return preflight(plan, None, (), max_concurrent, None, is_real=True)


def run_here(plan: StudyPlan, max_concurrent: int = 2) -> tuple[int, str]:
    """Run a study; return its exit code and its output."""
    console = Console(record=True, width=200, force_terminal=False)
    return execute_study(plan, allocate(plan, max_concurrent), console), console.export_text()


def make_session(plan: StudyPlan, resource_plan: ResourcePlan | None = None, storage: Any = None) -> StudySession:
    """Make the session of a study that prints nothing."""
    resource_plan, console = resource_plan or allocate(plan), Console(quiet=True)
    ray_context = LocalRay([], console, is_local=not resource_plan.cluster_address)
    suite = SuiteContext(ray_context, make_interrupt(plan.folder))
    session = StudySession(plan, resource_plan, console, suite, storage)
    session.begin()
    return session


def run_placed(plan: StudyPlan, resource_plan: ResourcePlan, num_parallel: int) -> list[dict[str, Any]]:
    """Run a study of the family "Placed", and return where each run was, as the runs report it."""
    for spec in plan.runs:
        plan.get_run_dir(spec.run_id).mkdir(parents=True)
    session = make_session(plan, resource_plan)
    barrier = Barrier.options(name="meeting").remote(num_parallel)
    grid = make_study_tuner(session, Recorder(session)).fit()
    ray.kill(barrier)
    assert not grid.errors
    return [json.loads(result.metrics["place"]) for result in grid]
