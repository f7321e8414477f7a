"""Several studies one after another: in one Ray, until one is interrupted, with an index of what there is then."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from tune_study.folder import outputs
from tune_study.host.console import say
from tune_study.host.interrupt import interrupt_of
from tune_study.placement.disk import DiskBudget
from tune_study.plan.allotment import Allotment
from tune_study.plan.study_plan import StudyPlan
from tune_study.tune.local_ray import RayHere
from tune_study.tune.run import Suite, execute

_INTERRUPTED = 130


class Ready(NamedTuple):
    """A study that may start: everything that it needs was found. room: what it takes on disk; room_line: in words."""

    plan: StudyPlan
    allotment: Allotment
    wandb_mode: str
    room: DiskBudget
    room_line: str


def run_ready(study: Ready, console: Console, skipped: Sequence[str], suite: Suite | None = None) -> int:
    """Run a study that is ready; the exit code. skipped: statuses of runs that are not run again."""
    plan = study.plan
    say(console, f"preset {plan.preset}: {plan.preset_reason}")
    say(console, study.room_line)
    return execute(plan, study.allotment, study.wandb_mode, console, skipped, suite)


def run_suite(
    plans: Sequence[StudyPlan],
    ready: Callable[[StudyPlan], Ready],
    console: Console,
    skipped: Sequence[str],
    here: bool,
) -> int:
    """Run `plans` one after another, an interrupt being the end; the exit code: 0 if that of all is.

    ready: looks at its turn whether what a study needs is still there; PlanError. here: not on a cluster.
    """
    code, begun, is_indexed = 0, 0, False

    def farewell() -> None:
        nonlocal is_indexed
        if begun < len(plans):
            names = ", ".join(plan.study.name for plan in plans[begun:])
            say(console, f"Not started: {names}. The same command goes on with all of them.")
        is_indexed = _indexed(plans[0].output, console)

    with RayHere([plan.folder for plan in plans], console, here=here) as ray:
        try:
            for plan in plans:
                say(console, of_several(plans, begun))
                suite = Suite(ray, interrupt_of(plan.folder), farewell)
                # One request for training and all that comes after: what is being written then is finished.
                with suite.interrupt.handled(lambda text: say(console, text)):
                    study = ready(plan)
                    begun += 1
                    code = max(code, run_ready(study, console, skipped, suite))
                # Also where it came as the last runs of the study ended, whose own code is then 0.
                if begun < len(plans) and suite.interrupt.is_requested:
                    code = _INTERRUPTED
                if code == _INTERRUPTED:
                    break
        finally:
            farewell()
    return max(code, int(not is_indexed))


def of_several(plans: Sequence[StudyPlan], number: int) -> str:
    """Which of the suite's studies comes, in words."""
    return f"Study {number + 1} of {len(plans)}: {plans[number].study.name}"


def _indexed(output: Path, console: Console) -> bool:
    """Whether an index of all studies in the output folder could be written."""
    try:
        say(console, f"Index: {outputs.write_index(output)}")
    except (OSError, ValueError) as error:
        print(f"No index of the studies in {output} could be written: {error}", file=sys.stderr)
        return False
    return True
