"""One start of a study: what its components share, and how it is concluded, or continued with more seeds."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from trainable.config.command_lines import format_command, quote_argument
from trainable.files.json_values import DamageWarning
from trainable.runs.failures import NON_FINITE
from tune_study.folder import outputs
from tune_study.folder.statuses import StudyStatuses, write_summary
from tune_study.host.console import print_error, print_line, print_table, show_phases
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
    on_ray_lost: Callable[[], object] = lambda: None
    """Ends the suite, called before the process ends without returning."""


@dataclass
class StudySession:
    """One start of a study: its plan, which may be replaced by one with more runs, its resources and its outputs."""

    plan: StudyPlan
    resource_plan: ResourcePlan
    console: Console
    suite: SuiteContext
    storage: "StoredStudy | None" = None
    wandb: "WandbLog | None" = None
    statuses: StudyStatuses = field(init=False)
    progress: Progress = field(init=False)

    def begin(self, skipped_statuses: Iterable[str] = ()) -> None:
        """Read the statuses and rows of the runs, all of which wait or are not run again; see `StudyStatuses`."""
        self.statuses = StudyStatuses(self.plan, skipped_statuses)
        self.progress = Progress(self.plan, self.resource_plan.max_concurrent, self.console, self.statuses.finished)

    @property
    def interrupt(self) -> Interrupt:
        """The request to stop."""
        return self.suite.interrupt


def conclude_study(session: StudySession, problem: str) -> int:
    """Write summary, tables and report of the existing rows, print how to continue, and return the exit code.

    problem: error text of the training, empty without an error. Errors here, such as a full disk, are reported and
    never raised, so that the remaining outputs are still written.
    """
    plan, statuses, console = session.plan, session.statuses, session.console
    problems = [problem]
    try:
        print_line(console, f"Summary: {write_summary(plan, session.resource_plan, statuses.list_all())}")
        outputs.record_look(plan, statuses.list_all())  # first: the report counts the looks
    except OSError as error:
        problems.append(f"The summary could not be written: {error}.")
    if plan.search is not None:
        try:
            print_line(console, f"Optuna storage: {outputs.write_search_store(plan)}")
        except Exception as error:  # nothing here reads this storage, so an error must not end the search
            problems.append(f"The Optuna storage could not be written: {type(error).__name__}: {error}.")
    for spec in plan.runs:
        status = statuses.get(spec.run_id)
        # Each round of a search lists only its runs.
        if plan.search is None or spec.run_id not in statuses.finished:
            print_line(console, f"{spec.name} {status.display_text}: {status.reason}")
    unfinished_statuses = statuses.list_unfinished()
    # Between rounds of a search there is no report, which would take longer than drawing the next points.
    is_lost = has_failed_round(session)
    is_round = plan.has_next_round and not unfinished_statuses and not session.interrupt.is_requested and not is_lost
    problem = write_outputs(session, " ".join(filter(None, problems)), has_report=not is_round)
    # An interrupted search can continue even if the runs of its round have ended.
    is_cut_short = session.interrupt.is_requested and plan.search is not None
    if unfinished_statuses or is_cut_short:
        # study.json records the study's storage but not its cluster, so the command must name the cluster.
        address = session.resource_plan.cluster_address
        options = plan.resume_options
        options += ("--address", address) if address else ()
        options += ("--wait-for-nodes",) if session.resource_plan.waits_for_nodes else ()
        print_line(console, f"Continue with: {format_command('resume', plan.folder, *options)}")
        if plan.study_uri is not None:
            print_line(console, f"From another machine: {format_command('resume', plan.study_uri, *options)}")
    # A Ctrl-C after the last run has ended interrupts only what follows in a search: further rounds, or the
    # confirmation of its best point.
    is_interrupted = session.interrupt.is_requested and bool(unfinished_statuses)
    return 130 if is_interrupted or is_cut_short else int(bool(problem or unfinished_statuses or is_lost))


def has_failed_round(session: StudySession) -> bool:
    """Check whether every run of a search's round failed, and none because its numbers diverged.

    The cause is then unlikely to be the settings of so many points.
    """
    statuses = [entry for entry in session.statuses.list_all() if entry.run_id not in session.statuses.finished]
    is_failed = all(status.status == "failed" and status.failure_class != NON_FINITE for status in statuses)
    return session.plan.search is not None and bool(statuses) and is_failed


def end_wandb(session: StudySession) -> None:
    """End the W&B runs of a session, wait until all is sent, and print where they are or what is missing."""
    log, plan, console = session.wandb, session.plan, session.console
    if log is None:
        return
    if plan.wandb.mode == "online":
        print_line(console, f"W&B: sending what is left to project {plan.wandb_project}")
    try:
        problem = log.close()
    except KeyboardInterrupt:  # the user does not want to wait
        problem = "it was interrupted"
    if problem:
        print_error(f"W&B logging is incomplete: {problem}")
    folder = plan.output / "wandb"
    if plan.wandb.mode == "offline" and any(folder.glob("offline-run-*")):
        command = f"wandb sync {quote_argument(str(folder))}/offline-run-*"
        print_line(console, f"W&B: offline runs in {folder}; to upload them: {command}")


def write_outputs(session: StudySession, problem: str = "", *, has_report: bool = True) -> str:
    """Write tables and report, copy all files to the storage, and complete W&B; print and return what went wrong.

    problem: what went wrong before. has_report: False to only copy the files.
    """
    plan, problems = session.plan, [problem]
    if has_report:
        problems.append(write_results(plan.folder, session.console, own_sections=plan.study.sections))
    if session.storage is not None:  # after the tables and the report, so that the storage gets them too
        problems.append(session.storage.push())
    # After an interrupt the user does not wait for a service: `resume` sends what is missing.
    is_cut = session.interrupt.is_requested and plan.wandb.mode == "online"
    if session.wandb is not None and has_report and not is_cut:
        from analysis.data.load import load  # imports pandas
        from analysis.report.pages import summarize_runs

        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DamageWarning)  # shown when the tables were made
                session.wandb.conclude(summarize_runs(load(plan.folder)))
        except Exception as error:  # as in `write_results`
            print_error(f"The verdicts are not in W&B: {type(error).__name__}: {error}.")
    if problem := " ".join(filter(None, problems)):
        print_error(problem)
    return problem


def write_results(
    folder: Path, console: Console, *, with_pictures: bool = True, own_sections: Sequence[Any] = ()
) -> str:
    """Write tables and report of results/<run>, and print the conclusion of the report.

    with_pictures: whether the figures of the report are also written as files. own_sections: sections that the study
    declares.
    Returns an error text, empty without an error. Any exception becomes such a text: the rows are saved, so the command
    ends in order and says how to try again.
    """
    try:
        from analysis.report.pages import conclude, write_frames_report  # imports pandas

        with show_phases(console, "writing tables and report"):
            frames = outputs.write_tables(folder)
            report = write_frames_report(frames, folder, with_pictures=with_pictures, own_sections=own_sections)
            conclusion = conclude(frames, own_sections)
    except Exception as error:
        return (
            f"The rows are saved in {folder}/runs, but the tables or the report could not be written: "
            f"{type(error).__name__}: {error}. Try again with: {format_command('report', folder)}"
        )
    headings, *rows = conclusion.verdicts or ((),)
    if rows:
        print_table(console, headings[:-1], [row[:-1] for row in rows], optional=headings[-2:3:-1])
    # The last column is sentences, which stand below the table.
    for note in dict.fromkeys(row[-1] for row in rows if row[-1] not in ("", "–")):
        print_line(console, f"  {', '.join(row[0] for row in rows if row[-1] == note)}: {note}")
    for sentence in conclusion.sentences:
        print_line(console, sentence)
    print_line(console, f"Report: {report}")
    return ""


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
