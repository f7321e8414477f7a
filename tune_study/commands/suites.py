"""Run several studies one after another in one Ray instance, and write an index of them at the end."""

from collections.abc import Callable, Sequence

from rich.console import Console

from tune_study.commands.describe import PreparedStudy, describe_signal
from tune_study.folder import outputs
from tune_study.host.console import print_error, print_line
from tune_study.host.interrupt import TimeLimit, make_interrupt
from tune_study.plan.remarks import find_remarks
from tune_study.plan.study_plan import StudyPlan
from tune_study.tune.local_ray import LocalRay
from tune_study.tune.run import execute_study
from tune_study.tune.session import SuiteContext

_INTERRUPTED_EXIT_CODE = 130
"""Exit code after Ctrl-C, as in a shell: 128 plus the number of SIGINT."""


def run_prepared_study(
    study: PreparedStudy,
    console: Console,
    skipped_statuses: Sequence[str],
    time_limit: TimeLimit | None,
    suite: SuiteContext | None = None,
) -> int:
    """Run a prepared study and return its exit code (see `execute_study`)."""
    plan = study.plan
    print_line(console, f"Preset {plan.preset}: {plan.preset_reason}")
    print_line(console, study.space_line)
    for remark in (*find_remarks(plan), *describe_signal(plan)):
        print_line(console, remark)
    return execute_study(plan, study.resource_plan, console, skipped_statuses, time_limit, suite)


def run_suite(
    plans: Sequence[StudyPlan],
    prepare_study: Callable[[StudyPlan], PreparedStudy],
    console: Console,
    skipped_statuses: Sequence[str],
    time_limit: TimeLimit | None,
    is_local: bool,
) -> int:
    """Run `plans` one after another until all have run or one is interrupted; a failed study does not end the suite.

    prepare_study: checks a study's requirements again when its turn comes, since the studies before it have used disk
    space; raises PlanError. skipped_statuses: runs with one of them are not run again. is_local: False on a cluster.

    Returns the exit code: 0 if every study returned 0 and the index was written, 130 after Ctrl-C or the time limit,
    and else 1. Raises FolderLockedError, and writes nothing, while another suite runs in the output folder, since both
    would write its index.
    """
    exit_code, n_started, is_indexed = 0, 0, False

    def finish_suite() -> None:
        """Name the studies that were not started, and write the index. The watchdog calls this if Ray is lost."""
        nonlocal is_indexed
        if n_started < len(plans):
            names = ", ".join(plan.study.name for plan in plans[n_started:])
            print_line(console, f"Not started: {names}. Type the same command again to continue.")
        try:
            from analysis.report.pages import write_index  # imports pandas

            print_line(console, f"Index: {write_index(plans[0].output)}")
            is_indexed = True
        except (OSError, ValueError) as error:
            print_error(f"The index of the studies in {plans[0].output} could not be written: {error}")

    is_refused = False
    with (
        outputs.lock_folder(plans[0].folder.parent, "a suite"),
        LocalRay([plan.folder for plan in plans], console, is_local=is_local) as local_ray,
    ):
        try:
            for plan in plans:
                print_line(console, format_position(plans, n_started))
                suite = SuiteContext(local_ray, make_interrupt(plan.folder), finish_suite)
                # One interrupt covers training and all that follows, so that files being written are finished.
                with suite.interrupt.handle_signals(lambda text: print_line(console, text)):
                    prepared_study = prepare_study(plan)
                    n_started += 1  # not before: a study whose requirements are no longer met does not start
                    exit_code = max(
                        exit_code, run_prepared_study(prepared_study, console, skipped_statuses, time_limit, suite)
                    )
                # If an interrupt comes as the last runs of a study end, the study still returns 0.
                if n_started < len(plans) and suite.interrupt.is_requested:
                    exit_code = _INTERRUPTED_EXIT_CODE
                if exit_code == _INTERRUPTED_EXIT_CODE:
                    break
        except outputs.FolderLockedError:
            is_refused = n_started == 1  # nothing was run, so the index is not ours to write
            raise
        finally:
            # After an error, too, the index covers the studies that have ended.
            if not is_refused:
                finish_suite()
    return max(exit_code, int(not is_indexed))


def format_position(plans: Sequence[StudyPlan], index: int) -> str:
    """Format the position and name of a study within its suite."""
    return f"Study {index + 1} of {len(plans)}: {plans[index].study.name}"
