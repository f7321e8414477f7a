"""Execute a study: run its plan as a Tune experiment, and write statuses, tables and the report."""

import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.console import Console

from trainable.config.command_lines import format_command
from trainable.runs.orphans import terminate_orphans
from trainable.runs.run_files import MAX_ROLLING_CHECKPOINTS
from trainable.runs.study_record import ENDED_STATUSES
from trainable.versions import read_driver_versions
from tune_study.folder import outputs
from tune_study.host.console import print_line
from tune_study.host.interrupt import TimeLimit, make_interrupt
from tune_study.host.machine_checks import find_ray_folder
from tune_study.host.terminal import finish_output
from tune_study.plan.errors import PlanError
from tune_study.plan.study_plan import ResourcePlan, StudyPlan
from tune_study.tune.local_ray import LocalRay, kill_children, prepare_environment, watch_daemons
from tune_study.tune.search.halving import SIBLING_REASON, Rungs
from tune_study.tune.search.rounds import plan_next_round
from tune_study.tune.session import (
    StudySession,
    SuiteContext,
    conclude_study,
    end_wandb,
    has_failed_round,
    plan_next_look,
    write_outputs,
)
from tune_study.tune.trials import list_run_ids, make_trial_configs

if TYPE_CHECKING:
    from tune_study.tune.callbacks import Recorder


def execute_study(
    plan: StudyPlan,
    resource_plan: ResourcePlan,
    console: Console,
    skipped_statuses: Sequence[str] = ENDED_STATUSES,
    time_limit: TimeLimit | None = None,
    suite: SuiteContext | None = None,
) -> int:
    """Run the remaining runs of `plan`, then write tables and the report.

    skipped_statuses: runs with one of these statuses are not run again. time_limit: when to stop the study as after
    Ctrl-C. suite: given if the study is part of a suite.
    Returns the exit code: 0 if every run has ended well, 1 for a failure, or 130 for Ctrl-C. Raises UnsafePathError if
    the study's files are behind links, and PlanError if they cannot be written, or if another driver runs the study.
    """
    is_local, is_alone = not resource_plan.cluster_address, suite is None
    outputs.check_study_links(plan)
    # The lock comes first: while this driver holds it, marked processes of the study can only be orphans.
    with outputs.lock_folder(plan.folder), ExitStack() as stack:
        # On a cluster, orphans are on other nodes, where each run terminates its own when it starts again.
        for orphan in terminate_orphans(plan.folder) if is_local else []:
            print_line(console, f"Terminated process {orphan}, an orphan of an earlier start of this study")
        if suite is None:
            ray = stack.enter_context(LocalRay([plan.folder], console, is_local=is_local))
            suite = SuiteContext(ray, make_interrupt(plan.folder))
        stack.enter_context(suite.interrupt.limit_time(time_limit, partial(print_line, console)))
        storage = None
        if plan.storage is not None:
            from tune_study.folder.storage import StoredStudy  # imports pyarrow's file systems, which few studies need

            storage = StoredStudy(plan)
            stack.enter_context(storage.keep_synced())
        wandb_log = None
        if plan.wandb.mode != "off":
            # This must not import Ray, which reads its environment on import: `prepare_environment` has not run yet.
            from tune_study.tune.wandb_logging import WandbLog

            wandb_log = WandbLog(plan)
        session = StudySession(plan, resource_plan, console, suite, storage, wandb_log)
        exit_code = _run_session(session, skipped_statuses)
        end_wandb(session)
    # A suite ends with an index of its studies.
    if not exit_code and is_alone and plan.study.family.is_fine_tuning:
        print_line(console, f"What changed in each run, and when: {format_command('explain', plan.folder)}")
    return exit_code


def _run_session(session: StudySession, skipped_statuses: Sequence[str]) -> int:
    """Run the plan, and the plans that follow from its results, in a locked folder; return the exit code.

    Raises PlanError if the study's files cannot be written.
    """
    _prepare_runs(session, skipped_statuses)
    for spec in session.plan.runs:
        if status := session.statuses.finished.get(spec.run_id):
            print_line(session.console, f"{spec.name} is {status.status} and is not run again")
    while True:
        exit_code = _run_planned_seeds(session)
        next_plan = None if session.interrupt.is_requested else _plan_next(session, exit_code)
        if next_plan is None:
            return exit_code
        session.plan = next_plan
        if session.storage is not None:
            session.storage.plan = next_plan
        if session.wandb is not None:
            session.wandb.plan = next_plan
        _prepare_runs(session)  # all earlier runs have ended


def _plan_next(session: StudySession, exit_code: int) -> StudyPlan | None:
    """Plan the runs that follow from the results, and print a line about them; None if there are none."""
    plan = session.plan
    if plan.search is not None:
        if session.statuses.list_unfinished():
            print_line(session.console, "No point is drawn, because not every run has ended.")
            return None
        if has_failed_round(session):
            print_line(session.console, "No point is drawn, because every run of this round failed.")
            return None
        next_plan, line = plan_next_round(plan)
        if next_plan is None and plan.has_next_round:  # an unexpected end: the report was left out
            print_line(session.console, line)
            write_outputs(session)
            return None
    elif plan.max_seeds is not None:
        if exit_code:
            print_line(session.console, "No seed is added, because not every run has ended well.")
            return None
        next_plan, line = plan_next_look(plan, session.resource_plan.max_concurrent)
    else:
        return None
    print_line(session.console, line)
    return next_plan


def _prepare_runs(session: StudySession, skipped_statuses: Sequence[str] = ()) -> None:
    """Write the files of the plan before its runs start. Raises PlanError if they cannot be written."""
    plan = session.plan
    try:
        # In a suite, Ctrl-C may be pressed before this study starts, and that request must not be cleared.
        if not session.interrupt.is_requested:
            session.interrupt.clear()
        changes = outputs.write_study(plan)
    except OSError as error:
        raise PlanError(
            f"{plan.folder} cannot be written ({error}): free disk space there, or type another --output."
        ) from None
    # The storage needs study.json before runs write rows there, because `resume` reads the study from it.
    if session.storage is not None and (problem := session.storage.push()):
        raise PlanError(problem)
    for change in changes:
        text = f"Continuing with a different {change}: earlier and later rows may differ because of it"
        print_line(session.console, text)
    session.begin(skipped_statuses)


def _run_planned_seeds(session: StudySession) -> int:
    """Train the runs of the plan, write tables and report, and return the exit code."""
    plan, console, num_finished = session.plan, session.console, len(session.statuses.finished)
    if num_finished:
        print_line(console, f"{len(plan.runs) - num_finished} of {len(plan.runs)} runs remain")
    problem = _train_runs(session) if num_finished < len(plan.runs) else ""
    try:
        return conclude_study(session, problem)
    except KeyboardInterrupt:  # the user does not want to wait for tables and report
        print_line(console, f"The rows are saved. For tables and report: {format_command('report', plan.folder)}")
        return 130


def _train_runs(session: StudySession) -> str:
    """Train the remaining runs until all have a final status; return an error text, or ""."""
    resource_plan = session.resource_plan
    prepare_environment(
        resource_plan.gpus, bool(resource_plan.cluster_address), has_storage=session.plan.storage is not None
    )
    from tune_study.tune.callbacks import Recorder  # imports Ray, which reads the environment prepared above

    plan, rungs, problem = session.plan, None, ""
    if plan.search is not None and plan.search.grace_steps is not None:
        rungs = Rungs(plan, plan.study.family.is_higher_better, session.statuses.finished)
    try:
        _fit_tuner(session, Recorder(session, rungs))
    except KeyboardInterrupt:
        session.interrupt.request()  # before Ray has started, even the first Ctrl-C raises KeyboardInterrupt
        print_line(session.console, "Stopped.")
    except Exception as error:
        # Errors of Ray or Tune end the training but not the driver, which still writes statuses and tables. If all runs
        # have ended, only Tune's record is affected.
        is_over = not any(view.is_open for view in session.progress.views.values())
        summary = "Ray Tune could not complete its own record of the study" if is_over else "The study ended early"
        # The last line names the cause in Tune's errors. `KeyError: 'x'` says more than `'x'`.
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
        problem = f"{summary}: {lines[-1] if len(lines) > 1 else f'{type(error).__name__}: {lines[0]}'}."
    if rungs is not None:
        session.statuses.censor_waiting(rungs.is_censored, SIBLING_REASON)
    return _close_statuses(session, problem)


def _close_statuses(session: StudySession, problem: str) -> str:
    """Give every run a final status after the training; return an error text, or "". problem: the error so far."""
    # The runs' files must be here before their rows and statuses are read.
    if session.storage is not None:
        try:
            session.storage.pull()
        except OSError as error:
            problem = f"{problem} Rows could not be copied from {session.storage.uri}: {error}.".strip()
    # Tune can end without an error while runs are open, after `stop --arm` or if Ray is lost. The reason begins a
    # sentence, so it has no full stop.
    reason = problem.rstrip(".") or "the study ended early"
    if session.interrupt.is_requested:
        reason = session.interrupt.reason
    elif session.interrupt.is_any_arm_requested and not problem:
        reason = "the arm was stopped by `stop --arm`"
    return " ".join(filter(None, (problem, session.statuses.close(reason))))


def _fit_tuner(session: StudySession, recorder: "Recorder") -> None:
    """Start Ray if necessary, and train all remaining runs."""
    # Ray installs a SIGTERM handler when it starts, so our handlers are installed afterwards.
    with (
        session.suite.ray.acquire(session.resource_plan) as daemons,
        session.interrupt.handle_signals(partial(print_line, session.console)),
    ):
        tuner = make_study_tuner(session, recorder)
        with session.progress.show_live(), watch_daemons(daemons, partial(_end_without_ray, session)):
            tuner.fit()


def _end_without_ray(session: StudySession, reason: str) -> None:
    """End the study and this process after Ray's daemons are lost, because every further call to Ray would hang."""
    kill_children()  # first, so that no run writes rows while statuses and tables are written
    # A batch system and `timeout` signal all processes at once, and Ray's processes then end by themselves.
    problem = "" if session.interrupt.is_requested else f"The study ended early: {reason}."
    exit_code = conclude_study(session, _close_statuses(session, problem))
    end_wandb(session)
    session.suite.on_ray_lost()
    # This is the watchdog's thread, and the main thread is stuck in a call to Ray. os._exit does not flush streams.
    os._exit(finish_output(exit_code))


def make_study_tuner(session: StudySession, recorder: "Recorder") -> Any:
    """Make the Tune experiment of the plan's remaining runs."""
    import_tensorboard()
    from ray import tune

    from tune_study.tune.callbacks import FirstComeFirstServed
    from tune_study.tune.tuner import make_tuner

    plan, resource_plan, interrupt = session.plan, session.resource_plan, session.interrupt
    names = {spec.run_id: plan.get_trial_name(spec) for spec in plan.runs}

    def make_name(trial: Any) -> str:
        return names[list_run_ids(trial.config)[0]]

    configs = list(make_trial_configs(plan, session.statuses.finished, interrupt, resource_plan.placement_settings))
    if resource_plan.cluster_address:
        versions = read_driver_versions()
        for config in configs:
            config["run"] |= {"versions": versions, "avoided_nodes": sorted(resource_plan.avoided_nodes)}
    return make_tuner(
        plan.study,
        space=tune.grid_search(configs),
        tune_config=tune.TuneConfig(
            # On a cluster, trials wait in Ray, so that its autoscaler sees them and nodes that join are used.
            max_concurrent_trials=None if resource_plan.is_elastic else resource_plan.max_concurrent,
            scheduler=FirstComeFirstServed(recorder, interrupt),
            # Without a GPU, a process also trains the next run, which saves importing torch and transformers. On a GPU,
            # a run gets a new process, because only the end of a process frees its CUDA context. On a cluster, a
            # process that was kept would keep its node from the autoscaler and from runs that avoid it.
            reuse_actors=not (resource_plan.gpus or resource_plan.gpu_slots or resource_plan.cluster_address),
            trial_name_creator=make_name,
            trial_dirname_creator=make_name,
        ),
        **make_run_options(session, recorder),
    )


def import_tensorboard() -> None:
    """Import tensorboardX, which Tune uses for its event files, without torch: two seconds and 200 MB for no tensor."""
    if "torch" in sys.modules:
        return
    sys.modules["torch"] = None  # type: ignore[assignment]  # makes its import an ImportError
    try:
        import tensorboardX  # noqa: F401
    finally:
        del sys.modules["torch"]


def make_run_options(session: StudySession, recorder: "Recorder") -> dict[str, Any]:
    """Make the arguments of Tune's RunConfig: where it writes, its callbacks, and its stoppers."""
    from ray import tune

    from tune_study.tune.callbacks import DiskSpaceGuard, SilentReporter
    from tune_study.tune.stoppers import make_interrupt_stopper, rules

    plan = session.plan
    # First, because Tune asks no further stopper after one that ends the run, and the rungs need every row.
    halving_stoppers = [] if recorder.rungs is None else [tune.stopper.FunctionStopper(recorder.rungs.ends_trial)]
    # Ray keeps logs and sockets in a separate folder, often on another disk than the results.
    folders, patience = (plan.folder, find_ray_folder(os.environ)), plan.base_config.trainer.disk_patience
    disk_space = DiskSpaceGuard(folders, patience, session.interrupt, partial(print_line, session.console))
    place: dict[str, Any] = {"storage_path": str(plan.folder.parent)}
    if plan.storage is not None:
        from tune_study.folder.storage import StoredFolder

        folder = StoredFolder(plan.storage)
        place = {"storage_path": folder.path, "storage_filesystem": folder.filesystem}
    return {
        "name": plan.folder.name,
        **place,
        "stop": tune.stopper.CombinedStopper(
            *halving_stoppers, rules(plan.study, plan.preset), make_interrupt_stopper(session.interrupt)
        ),
        "callbacks": [SilentReporter(), recorder, disk_space],
        "failure_config": tune.FailureConfig(max_failures=-1),  # the Recorder limits failures without progress
        # A run writes its state once, into its folder on this machine, or uploads it. Tune's checkpoint only names it.
        "checkpoint_config": tune.CheckpointConfig(num_to_keep=MAX_ROLLING_CHECKPOINTS, checkpoint_at_end=True),
        "verbose": 0,  # `Progress` prints instead
    }
