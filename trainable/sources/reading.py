"""Read the logs of other trainers, in the format that their contents show."""

from collections.abc import Sequence
from pathlib import Path

from trainable.files.paths import read_bytes
from trainable.sources.csv_files import read_csv
from trainable.sources.event_files import read_event_files
from trainable.sources.json_files import read_json_lines, read_trainer_state
from trainable.sources.log_files import list_runs
from trainable.sources.logs import ROLES_BY_NAME, LogError, Roles, RunLog, merge_rows
from trainable.sources.verl_console import read_verl_console
from trainable.sources.wandb_files import read_wandb_files

MAX_LOG_BYTES = 2**30


def read_runs(paths: Sequence[Path], roles: Roles) -> list[RunLog]:
    """Read the logs of all runs in `paths`. What several charts of W&B show of a run is one log.

    Raises LogError if a file is no log of an RL run.
    """
    logs = [log for files in list_runs(paths) for log in read_logs(files, roles)]
    charts: dict[str, list[RunLog]] = {}
    for log in logs:
        if log.run:
            charts.setdefault(log.run, []).append(log)
    return [log for log in logs if not log.run] + list(map(merge_logs, charts.values()))


def read_logs(paths: Sequence[Path], roles: Roles = ROLES_BY_NAME) -> list[RunLog]:
    """Read the files of a run, or a table of several, whatever their format.

    Raises LogError if the files are no log of an RL run.
    """
    files: list[tuple[Path, bytes]] = []
    for path in paths:
        try:
            files.append((path, read_bytes(path.resolve(), MAX_LOG_BYTES)))
        except (OSError, ValueError) as error:
            raise LogError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from None
    return parse_logs(files, roles)


def parse_logs(files: Sequence[tuple[Path, bytes]], roles: Roles = ROLES_BY_NAME) -> list[RunLog]:
    """Parse the contents of the files of a run, or of a table of several; see `read_logs`."""
    # First the formats of which a run has several files, in which the order of time counts.
    if log := read_wandb_files(files) or read_event_files(files):
        return [log]
    logs = [log for path, content in files for log in _read_file(path, content, roles)]
    return logs if len(files) == 1 else [merge_logs(logs)]


def merge_logs(logs: Sequence[RunLog]) -> RunLog:
    """Merge the logs of one run, of which each has some of the measurements."""
    rows, notes = merge_rows(row for log in logs for row in log.rows)
    settings = {key: value for log in logs for key, value in log.settings.items()}
    # The gaps of a log may be filled by another one.
    file_notes = [note for log in logs for note in log.notes if note not in merge_rows(log.rows)[1]]
    return RunLog(logs[0].path, logs[0].format, rows, settings, [*file_notes, *notes], logs[0].run)


def _read_file(path: Path, content: bytes, roles: Roles) -> list[RunLog]:
    if log := read_trainer_state(path, content):
        return [log]
    if logs := read_json_lines(path, content, roles):
        return logs
    if log := read_verl_console(path, content):
        return [log]
    if logs := read_csv(path, content, roles):
        return logs
    raise LogError(
        f"{path} has no training step in any format that is known here: the console of verl, JSON lines or a table "
        "with a `step`, the trainer_state.json of TRL, an event file of TensorBoard, or a .wandb file. Give the file "
        "with the numbers of each step."
    )
