"""A plan becomes a Tune experiment, and the experiment statuses, tables and a report."""

import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from trainable.config.setting_types import shown
from trainable.runs.orphans import end_leftovers
from trainable.runs.run_files import METRICS, read_rows
from trainable.runs.stop_rules import RULES, finite
from tune_study.folder import outputs
from tune_study.folder.outputs import RunStatus
from tune_study.folder.summary import finished_runs, write_summary
from tune_study.host.console import say
from tune_study.host.interrupt import Interrupt, interrupt_of
from tune_study.host.machine import ray_folder
from tune_study.placement.resources import placement
from tune_study.plan.allotment import Allotment
from tune_study.plan.study_plan import PlanError, StudyPlan
from tune_study.tune.local_ray import RayHere
from tune_study.tune.progress import Progress
from tune_study.tune.trials import trial_configs

if TYPE_CHECKING:
    from tune_study.folder.storage import StoredStudy
    from tune_study.tune.callbacks import Recorder

_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
    "TUNE_FORCE_TRIAL_CLEANUP_S": "60",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    # Trials start in workers of their own (Ray 2.60), so those that Ray starts in advance only cost CPU time.
    "RAY_prestart_worker_first_driver": "0",
}
"""Set before Ray is imported, where the user has not set them."""

_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Ray's switch for machines that are no part of a cluster: at 0 it listens on the loopback address alone."""

WANDB_MODES = ("offline", "sync", "online", "off")


@dataclass(frozen=True)
class Suite:
    """What a study shares with the others of its suite: Ray, the request to stop; and what is said if Ray is lost."""

    ray: RayHere
    interrupt: Interrupt
    farewell: Callable[[], object]


@dataclass(frozen=True)
class Session:
    """One start of a study: what is run, with what, and who is told.

    finished: the runs that had ended before. stored: the study's folder in its storage, if it has one.
    """

    plan: StudyPlan
    allotment: Allotment
    wandb_mode: str
    console: Console
    suite: Suite
    finished: Mapping[str, RunStatus]
    progress: Progress
    stored: "StoredStudy | None" = None

    @property
    def interrupt(self) -> Interrupt:
        """The request to stop."""
        return self.suite.interrupt


def execute(
    plan: StudyPlan,
    allotment: Allotment,
    wandb_mode: str,
    console: Console,
    skipped: Sequence[str] = outputs.ENDED,
    suite: Suite | None = None,
) -> int:
    """Run what is left of `plan`, then write tables and report. The exit code: 0, 1 for a failure, 130 for Ctrl-C.

    skipped: statuses of runs that are not run again. suite: what it shares with the others of its suite, if any.
    """
    here = not allotment.cluster
    outputs.refuse_links(plan)
    with outputs.locked(plan.folder), ExitStack() as own:
        for leftover in end_leftovers(plan.folder) if here else []:
            say(console, f"Ended process {leftover}, which an earlier start of this study had left behind")
        if suite is None:
            ray = own.enter_context(RayHere([plan.folder], console, here=here))
            suite = Suite(ray, interrupt_of(plan.folder), lambda: None)
        progress = Progress(plan, allotment.max_concurrent, console)
        stored = own.enter_context(_stored(plan, suite.interrupt, console))
        ended = finished_runs(plan, skipped)
        return _run(Session(plan, allotment, wandb_mode, console, suite, ended, progress, stored))


@contextmanager
def _stored(plan: StudyPlan, interrupt: Interrupt, console: Console) -> Iterator["StoredStudy | None"]:
    """The study's folder in its storage, kept up to date during the body; None where it has none."""
    if plan.storage is None:
        yield None
        return
    from tune_study.folder.storage import StoredStudy

    stored = StoredStudy(plan, interrupt, lambda text: say(console, text))
    with stored.kept_up():
        yield stored


def _run(session: Session) -> int:
    """`execute`, with the study's folders held."""
    plan, console = session.plan, session.console
    _write_start(session)
    _skip(plan, session.finished, session.progress, console)
    problem, unwritten = "", dict[str, RunStatus]()
    if len(session.finished) < len(plan.runs):
        problem, unwritten = _train(session)
    try:
        return _conclude(session, problem, unwritten)
    except KeyboardInterrupt:
        say(console, f"The rows are safe. Tables and report: python -m tune_study report {plan.folder}")
        return 130


def _write_start(session: Session) -> None:
    """What is on disk before anything starts; PlanError where it cannot be."""
    try:
        if not session.interrupt.is_requested:
            session.interrupt.clear()
        changes = outputs.write_study(session.plan)
    except OSError as error:
        raise PlanError(
            f"{session.plan.folder} cannot be written ({error}): make room there, or type another --output."
        ) from None
    if session.stored is not None and (problem := session.stored.push()):
        raise PlanError(problem)
    for change in changes:
        say(session.console, f"Going on with another {change}: rows before and after may differ for that")


def _train(session: Session) -> tuple[str, dict[str, RunStatus]]:
    """Train what is left until all have a status: what went wrong, and the statuses that a full disk did not take."""
    prepare_environment(session.allotment.gpus, joins=bool(session.allotment.cluster))
    from tune_study.tune.callbacks import Recorder

    recorder, problem = Recorder(session.plan, session.allotment, session.progress), ""
    try:
        _fit(session, recorder)
    except KeyboardInterrupt:
        session.interrupt.request()  # also where it came while Ray was starting, and is the first
        say(session.console, "Stopped now.")
    except Exception as error:
        is_over = not any(view.is_open for view in session.progress.views.values())
        what = "Ray Tune could not finish its own record of the study" if is_over else "The study ended early"
        problem = f"{what}: {_brief(error)}."
    if session.stored is not None:
        session.stored.pull()
    reason = "the study was interrupted" if session.interrupt.is_requested else problem or "the study ended early"
    recorder.settle()
    try:
        outputs.close_unfinished(session.plan, reason)
    except OSError as error:
        problem = f"{problem} The statuses could not be written: {error}.".strip()
    return problem, recorder.unwritten


def _brief(error: Exception) -> str:
    """The last line of an error's words, which in Tune's own errors is the cause; a full disk by its name."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    return lines[-1] if len(lines) > 1 else f"{type(error).__name__}: {lines[0]}"


def choose_wandb(asked: str | None, plan: StudyPlan) -> str:
    """--wandb, else offline where trainer.logger names wandb, else off. PlanError if it cannot be had."""
    mode = asked or ("offline" if "wandb" in plan.base.trainer.logger else "off")
    if mode not in WANDB_MODES:
        raise PlanError(f"--wandb {shown(mode)} is no mode: type --wandb {', --wandb '.join(WANDB_MODES)}.")
    if mode != "off" and find_spec("wandb") is None:
        raise PlanError(f"--wandb {mode} needs the package wandb: install it with `pip install wandb`.")
    return mode


def prepare_environment(gpus: tuple[str, ...], joins: bool = False) -> None:
    """Set what Ray reads from the environment when it is imported and started; a cluster has its own rules of entry."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if not joins:
        os.environ[_LOOPBACK] = "0"
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)


def _fit(session: Session, recorder: "Recorder") -> None:
    """Start Ray where it is not started, and train every run that is left."""
    from tune_study.tune.watchdog import DiskSpace, guarded

    plan, console = session.plan, session.console

    def tell(text: str) -> None:
        say(console, text)

    wandb_runs = _wandb(plan, session.wandb_mode)
    # Ray sets a handler of its own for SIGTERM when it starts, so ours come after it.
    with session.suite.ray.used(plan.folder, session.allotment) as daemons, session.interrupt.handled(tell):
        folders = (plan.folder, ray_folder(os.environ))
        disk_space = DiskSpace(folders, plan.base.trainer.disk_patience, session.interrupt, tell)
        tuner = make_tuner(session, recorder, [disk_space, *wandb_runs])
        try:
            with session.progress.shown(), guarded(daemons, lambda lost: _last_will(session, recorder, lost)):
                tuner.fit()
        finally:
            for runs in wandb_runs:
                if not runs.close():
                    print(f"W&B logging is not complete: {runs.problem or 'it took too long'}", file=sys.stderr)


def _last_will(session: Session, recorder: "Recorder", lost: str) -> None:
    """End the study without Ray, which cannot be asked any more: whoever waits for it waits for ever."""
    from tune_study.tune.watchdog import end_children

    end_children()
    recorder.settle()
    problem = f"The study ended early: {lost}."
    with suppress(OSError):
        outputs.close_unfinished(session.plan, problem)
    _conclude(session, problem, recorder.unwritten)
    session.suite.farewell()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(1)


def make_tuner(session: Session, recorder: "Recorder", more_callbacks: list[Any]) -> Any:
    """The Tune experiment of all runs of a plan; those that ended replay their last row, so that it lists them too.

    Tune's own checkpoints and its restore are not used: a run goes on from the rolling state in its folder (see
    docs/architecture.md).
    """
    from ray import tune

    from trainable.trial import Trial
    from tune_study.tune.scheduling import FirstComeFirstServed

    plan, allotment, interrupt = session.plan, session.allotment, session.interrupt
    return tune.Tuner(
        tune.with_resources(Trial, placement(plan.base.trainer.n_gpus_per_node)),
        param_space=tune.grid_search(list(trial_configs(plan, session.finished, interrupt.path))),
        tune_config=tune.TuneConfig(
            max_concurrent_trials=allotment.max_concurrent,
            scheduler=FirstComeFirstServed(recorder.given_up, interrupt),
            reuse_actors=not (allotment.gpus or allotment.slots),
            trial_name_creator=_trial_name,
            trial_dirname_creator=_trial_name,
        ),
        run_config=_tune_run(plan, interrupt, [*_fetching(session), recorder, *more_callbacks]),
    )


def _fetching(session: Session) -> list[Any]:
    """The callback that fetches rows from the study's storage in a list, or an empty one."""
    from tune_study.tune.callbacks import Fetching

    return [] if session.stored is None else [Fetching(session.stored.pull)]


def _tune_run(plan: StudyPlan, interrupt: Interrupt, callbacks: list[Any]) -> Any:
    """Where Tune writes, who is told, and what ends a trial."""
    from ray import tune
    from ray.tune.stopper import CombinedStopper

    from tune_study.tune.stoppers import InterruptStopper, RuleStopper

    rules = [RuleStopper(rule) for rule in plan.study.stop_rules if rule in RULES]
    return tune.RunConfig(
        name=plan.run,
        storage_path=str(plan.folder.parent),
        stop=CombinedStopper(*rules, InterruptStopper(interrupt)),
        callbacks=callbacks,
        failure_config=tune.FailureConfig(max_failures=-1),  # the recorder decides, by what failed
        checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=0, checkpoint_at_end=False),
        verbose=0,
    )


def _trial_name(trial: Any) -> str:
    return str(trial.config["run_id"])


def _wandb(plan: StudyPlan, mode: str) -> list[Any]:
    """The W&B callback in a list, or an empty one; wandb is imported only when it is asked for."""
    if mode == "off":
        return []
    from tune_study.tune.wandb_logging import WandbRuns

    return [WandbRuns(plan, mode)]


def _skip(plan: StudyPlan, finished: Mapping[str, RunStatus], progress: Progress, console: Console) -> None:
    """Name the runs that are not run again."""
    for run_id, status in finished.items():
        rows = read_rows(plan.run_dir(run_id) / METRICS, first=0)
        found = (row.get(plan.study.family.measure) for row in reversed(rows))
        progress.skip(run_id, status.status, rows[-1]["step"] if rows else 0, next(filter(_is_number, found), None))
        say(console, f"{run_id} is {status.status} and is not run again")
    if finished:
        say(console, f"{len(plan.runs) - len(finished)} of {len(plan.runs)} runs to go")


def _is_number(value: object) -> bool:
    return finite(value) is not None


def _conclude(session: Session, problem: str, unwritten: Mapping[str, RunStatus]) -> int:
    """Summary, tables and report of what there is, and what to type next. The exit code."""
    plan, console = session.plan, session.console
    try:
        say(console, f"Summary: {write_summary(plan, session.allotment, closing=True)}")
    except OSError as error:
        problem = f"{problem} The summary could not be written: {error}.".strip()
    statuses = [unwritten.get(spec.run_id) or outputs.read_status(plan.run_dir(spec.run_id)) for spec in plan.runs]
    known = [status for status in statuses if status is not None]
    for status in known:
        say(console, f"{status.run_id} {status.shown}: {status.reason}")
    left = [status for status in known if status.status not in outputs.ENDED]
    problem = " ".join(filter(None, (problem, write_results(plan.folder, console))))
    if session.stored is not None:
        problem = " ".join(filter(None, (problem, session.stored.push())))
    if problem:
        print(problem, file=sys.stderr)
    if left:
        cluster = f" --address {session.allotment.cluster}" if session.allotment.cluster else ""
        say(console, f"Go on with: python -m tune_study resume {plan.folder}{cluster}")
        if plan.stored is not None:
            say(console, f"From another machine: python -m tune_study resume {shlex.quote(plan.stored)}{cluster}")
    return 130 if session.interrupt.is_requested and left else int(bool(problem or left))


def write_results(folder: Path, console: Console) -> str:
    """Write tables and report of results/<run>, and print what they say; return what went wrong, or nothing.

    The rows are safe whatever happens here.
    """
    try:
        outputs.write_tables(folder)
        report, conclusion = outputs.write_report(folder)
    except Exception as error:
        return (
            f"The rows are safe in {folder}/runs, but the tables or the report could not be written: "
            f"{type(error).__name__}: {error}. Try again with: python -m tune_study report {folder}"
        )
    for line in (conclusion.headline, *(f"  {arm}" for arm in conclusion.arms)):
        say(console, line)
    say(console, f"Report: {report}")
    return ""
