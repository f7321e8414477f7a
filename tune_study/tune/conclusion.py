"""Conclude a study, or a round of a search: statuses, summary, tables, report, and how to continue."""

import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from trainable.config.command_lines import format_command, quote_argument
from trainable.files.json_values import DamageWarning
from trainable.runs.failures import NON_FINITE
from trainable.runs.study_record import ENDED_STATUSES
from tune_study.folder import outputs
from tune_study.folder.statuses import StudyStatuses, find_finished_runs
from tune_study.folder.summary import write_summary
from tune_study.host.console import print_error, print_line, print_table, show_phases
from tune_study.plan.study_plan import StudyPlan
from tune_study.tune.session import StudySession

if TYPE_CHECKING:
    from tune_study.tune.wandb_logging import WandbLog


INTERRUPTED_TIMEOUT_S = 30.0
"""Seconds for which an interrupted study waits for W&B. `resume` sends what is left."""


def get_final_statuses(plan: StudyPlan) -> tuple[str, ...]:
    """Return the statuses of runs that are never trained again.

    In a search, a failed run is a result, since later points were drawn in view of it.
    """
    return ENDED_STATUSES if plan.search is None else (*ENDED_STATUSES, "failed")


def conclude_study(session: StudySession, problem: str, statuses: StudyStatuses) -> int:
    """Write summary, tables and report of the existing rows, print how to continue, and return the exit code.

    problem: error text of the training, empty without an error. Errors here, such as a full disk, are reported and
    never raised, so that the remaining outputs are still written.
    """
    plan, console = session.plan, session.console
    problems = [problem]
    try:
        print_line(console, f"Summary: {write_summary(plan, session.resource_plan, is_closing=True)}")
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
        if plan.search is None or spec.run_id not in session.finished_statuses:
            print_line(console, f"{spec.name} {status.display_text}: {status.reason}")
    final_statuses = get_final_statuses(plan)
    unfinished_statuses = [status for status in statuses.list_all() if status.status not in final_statuses]
    # Between rounds of a search there is no report, which would take longer than drawing the next points.
    is_lost = has_failed_round(session)
    is_round = plan.has_next_round and not unfinished_statuses and not session.interrupt.is_requested and not is_lost
    if not is_round:
        problems.append(write_results(plan.folder, console, own_sections=plan.study.sections))
    if session.storage is not None:  # after the tables and the report, so that the storage gets them too
        problems.append(session.storage.push())
    # After an interrupt the user does not wait for a service: `resume` sends what is missing.
    is_cut = session.interrupt.is_requested and plan.wandb.mode == "online"
    if session.wandb is not None and not is_round and not is_cut:
        _conclude_wandb(session.wandb, plan)
    if problem := " ".join(filter(None, problems)):
        print_error(problem)
    # An interrupted search can continue even if the runs of its round have ended.
    is_cut_short = session.interrupt.is_requested and plan.search is not None
    if unfinished_statuses or is_cut_short:
        # study.json records the study's storage but not its cluster, so the command must name the cluster.
        address = session.resource_plan.cluster_address
        options = plan.resume_options
        options += ("--address", address) if address else ()
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
    plan = session.plan
    new_ids = {spec.run_id for spec in plan.runs} - session.finished_statuses.keys()
    failed_runs = find_finished_runs(plan, ("failed",))
    return (
        plan.search is not None
        and bool(new_ids)
        and all(run_id in failed_runs and failed_runs[run_id].failure_class != NON_FINITE for run_id in new_ids)
    )


def print_next_commands(console: Console, commands: Iterable[str]) -> None:
    """Print that one can continue with the report, or with one of these commands."""
    print_line(console, "To continue, open the report in a browser, or type:")
    for command in commands:
        print_line(console, f"  {command}")


def list_reading_commands(plan: StudyPlan) -> list[str]:
    """List the commands that read a study's runs beyond its report; empty for studies without a language model."""
    if not plan.study.family.is_fine_tuning:
        return []
    trainer, commands = plan.ppo_config.trainer, [format_command("explain", plan.folder)]
    if trainer.log_val_generations or trainer.log_train_generations:
        options = () if trainer.log_val_generations else ("--trained",)
        commands.insert(0, format_command("transcripts", plan.folder, *options))
    return commands


def _conclude_wandb(log: "WandbLog", plan: StudyPlan) -> None:
    """Give every W&B run of a study its last rows and its summary, with the verdict of its arm.

    An error is printed, and leaves W&B incomplete.
    """
    from analysis.data.load import load  # imports pandas
    from analysis.report.pages import summarize_runs

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DamageWarning)  # shown when the tables were made
            log.conclude(summarize_runs(load(plan.folder)))
    except Exception as error:  # as in `write_results`
        print_error(f"The verdicts are not in W&B: {type(error).__name__}: {error}.")


def end_wandb(session: StudySession) -> None:
    """End the W&B runs of a session, wait until all is sent, and print where they are or what is missing."""
    log, plan, console = session.wandb, session.plan, session.console
    if log is None:
        return
    is_interrupted = session.interrupt.is_requested
    if plan.wandb.mode == "online" and not is_interrupted:
        print_line(console, f"W&B: sending what is left to project {plan.wandb_project}")
    try:
        is_complete = log.close(INTERRUPTED_TIMEOUT_S if is_interrupted else None)
    except KeyboardInterrupt:  # the user does not want to wait
        is_complete, log.problem = False, "it was interrupted"
    if not is_complete:
        print_error(f"W&B logging is incomplete: {log.problem}")
    folder = plan.output / "wandb"
    if plan.wandb.mode == "offline" and any(folder.glob("offline-run-*")):
        command = f"wandb sync {quote_argument(str(folder))}/offline-run-*"
        print_line(console, f"W&B: offline runs in {folder}; to upload them: {command}")


def write_last_results(session: StudySession) -> None:
    """Write tables and report, and copy them to the storage; print what went wrong."""
    problems = [write_results(session.plan.folder, session.console, own_sections=session.plan.study.sections)]
    if session.storage is not None:
        problems.append(session.storage.push())
    if session.wandb is not None:
        _conclude_wandb(session.wandb, session.plan)
    if problem := " ".join(filter(None, problems)):
        print_error(problem)


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
        with show_phases(console, "writing tables and report"):
            outputs.write_tables(folder)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DamageWarning)  # the tables have just warned of it
                report, conclusion = outputs.write_report(
                    folder, with_pictures=with_pictures, own_sections=own_sections
                )
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
