"""One start of a study: what its components share while it runs, and the seeds to add after its results."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console

from trainable.runs.study_record import StatusRecord
from tune_study.host.interrupt import Interrupt
from tune_study.plan.study_plan import ResourcePlan, StudyPlan, add_seeds
from tune_study.tune.local_ray import LocalRay
from tune_study.tune.progress import Progress

if TYPE_CHECKING:
    from tune_study.folder.storage import StoredStudy
    from tune_study.tune.wandb_logging import WandbLog


@dataclass(frozen=True)
class SuiteContext:
    """The objects that the studies of a suite share. A study outside a suite has its own context."""

    ray: LocalRay
    interrupt: Interrupt
    """The request to stop, which ends the whole suite."""


@dataclass(frozen=True)
class StudySession:
    """One start of a study: its plan, its resources and its outputs."""

    plan: StudyPlan
    resource_plan: ResourcePlan
    console: Console
    suite: SuiteContext
    finished_statuses: Mapping[str, StatusRecord]
    """By run_id, of the runs that are not run again."""
    progress: Progress
    storage: "StoredStudy | None" = None
    wandb: "WandbLog | None" = None

    @property
    def interrupt(self) -> Interrupt:
        """The request to stop."""
        return self.suite.interrupt


def plan_next_look(plan: StudyPlan, max_concurrent: int) -> tuple[StudyPlan | None, str]:
    """Plan more seeds for the open arms and the baseline, and say in a line why, or why there are none.

    The plan is None if no arm is open, or if the open arms have `max_seeds` seeds. Arms get as many seeds as can be
    trained at once, since fewer would leave slots empty, and at least as many as the test needs for any verdict. plan:
    has `max_seeds`, and all its runs have ended and are in the tables.
    """
    from analysis.data.load import load  # imports pandas
    from analysis.report.pages import list_open_arms  # imports Altair
    from analysis.stats.sequential import find_fewest_seeds

    # `set_max_seeds` has checked both.
    assert plan.max_seeds is not None
    assert plan.baseline is not None
    open_arms = list_open_arms(load(plan.folder))
    if not open_arms:
        return None, "No compared arm is open: no seed is added."
    counts = {arm: len(plan.seeds) + len(plan.extra_seeds.get(arm, ())) for arm in open_arms}
    target = max(
        max(counts.values()) + max(max_concurrent // (len(open_arms) + 1), 1), find_fewest_seeds(len(plan.values) - 1)
    )
    target = min(target, plan.max_seeds)
    arms_text = f"Open: {', '.join(open_arms)}"
    if min(counts.values()) >= target:
        return None, f"{arms_text}, after {target} seeds per arm, the maximum (--max-seeds)."
    subject = "This arm" if len(open_arms) == 1 else "These arms"
    next_plan = add_seeds(plan, dict.fromkeys([*open_arms, plan.baseline], range(target)))
    return next_plan, f"{arms_text}. {subject} and the baseline get the seeds 0 to {target - 1}."
