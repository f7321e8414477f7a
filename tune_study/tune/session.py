"""One start of a study: what its parts share while it runs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console

from trainable.runs.study_record import StatusRecord
from tune_study.host.interrupt import Interrupt
from tune_study.plan.resource_plan import ResourcePlan
from tune_study.plan.study_plan import StudyPlan
from tune_study.tune.local_ray import LocalRay
from tune_study.tune.progress import Progress

if TYPE_CHECKING:
    from tune_study.folder.storage import StoredStudy
    from tune_study.tune.wandb_logging import WandbLog


@dataclass(frozen=True)
class SuiteContext:
    """The objects that the studies of a suite share. A study outside a suite has a context of its own.

    ray: keeps Ray running from one study to the next. interrupt: the request to stop, which ends the whole suite.
    on_ray_lost: called if Ray's daemons have exited, after the study was concluded and before the process ends.
    """

    ray: LocalRay
    interrupt: Interrupt
    on_ray_lost: Callable[[], object]


@dataclass(frozen=True)
class StudySession:
    """One start of a study: its plan, its resources and its outputs.

    finished_statuses: statuses, by run_id, of the runs that are not run again. storage: the study's folder in its
    storage, if it has one. wandb: what writes the W&B runs; None if W&B is off.
    """

    plan: StudyPlan
    resource_plan: ResourcePlan
    console: Console
    suite: SuiteContext
    finished_statuses: Mapping[str, StatusRecord]
    progress: Progress
    storage: "StoredStudy | None" = None
    wandb: "WandbLog | None" = None

    @property
    def interrupt(self) -> Interrupt:
        """The request to stop."""
        return self.suite.interrupt
