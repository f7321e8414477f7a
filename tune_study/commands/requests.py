"""The command `stop`: ask the process that runs a study to stop it, or one of its arms."""

from pathlib import Path

from trainable.config.command_lines import format_command
from trainable.config.setting_types import format_value
from tune_study.folder import outputs
from tune_study.folder.study_file import read_study
from tune_study.host.interrupt import make_interrupt
from tune_study.plan.errors import PlanError
from tune_study.plan.storage_uri import is_uri
from tune_study.plan.study_names import find_arm


def request_stop(run: str, arm: str | None) -> str:
    """Make the file that asks the study in results/<run>, or the runs of an arm, to stop; return what happens now.

    Raises PlanError if RUN is no local folder of a study, if no process runs it, or if it has no such arm.
    """
    if is_uri(run):
        raise PlanError(
            f"`stop` needs the folder in which the study runs, and {format_value(run, 1000)} is in a storage: type "
            "results/<run> on the machine where it was started."
        )
    folder = Path(run)
    study = read_study(folder)
    if not outputs.is_running(folder):
        raise PlanError(
            f"No process runs {format_value(folder, 1000)}: there is nothing to stop. "
            f"`{format_command('status', folder)}` shows its runs."
        )
    interrupt = make_interrupt(folder)
    if arm is not None:
        arm = find_arm(arm, study.axis.values, study.axis.setting)
    path = interrupt.path if arm is None else interrupt.get_arm_path(arm)
    try:
        path.touch()
    except OSError as error:
        raise PlanError(f"{format_value(folder, 1000)} cannot be written ({error.strerror}).") from None
    what = "The study stops" if arm is None else f"The runs of arm {arm} stop"
    return f"{what} after the steps under way, which are saved. To continue: {format_command('resume', folder)}"
