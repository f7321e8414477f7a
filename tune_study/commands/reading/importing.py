"""The command `import`: logs of other trainers become a study that every reading command reads."""

from collections.abc import Sequence
from pathlib import Path

from analysis.sources.importing import describe_runs, import_logs, name_runs, read_runs_file
from trainable.config.command_lines import format_command
from trainable.config.setting_types import format_value
from trainable.sources.logs import LogError, Roles
from trainable.sources.names import Name, parse_name
from trainable.sources.reading import read_runs
from tune_study.plan.errors import PlanError, as_plan_error


def parse_columns(texts: Sequence[str], files: Sequence[Path]) -> tuple[list[Name], str]:
    """Parse OURS=THEIRS of the command line and, per line, of files, where `#` begins a comment.

    Returns the names of measurements, and the name of the step, which is empty if none was typed.
    """
    lines = list(texts)
    for path in files:
        try:
            lines += [line for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(f"{format_value(str(path), 1000)} cannot be read ({error}).") from None
    names, step = list[Name](), ""
    for line in lines:
        column, separator, key = (word.strip() for word in line.partition("="))
        if not (separator and column and key):
            raise PlanError(
                f"{format_value(line)} names no column: type OURS=THEIRS, such as --column val_success=eval/accuracy."
            )
        if column == "step":
            step = key
        else:
            names.append(parse_name(column, key))
    return names, step


def import_study(
    paths: Sequence[Path],
    folder: Path,
    arms: Sequence[str],
    seed: str | None,
    columns: Sequence[Name],
    step: str = "",
    runs_file: Path | None = None,
) -> list[str]:
    """Write the logs as a study to `folder`, and return what a reader must know about them, in sentences.

    columns, step: see `parse_columns`. runs_file: a table of logs, arms and seeds, in place of `paths`, or of the runs
    in them if they are charts of W&B. Raises PlanError, before anything is written, if the folder exists, or if the
    logs cannot be read or told apart.
    """
    if folder.exists():
        raise PlanError(f"{format_value(str(folder), 1000)} exists: type another --study or --output.")
    if runs_file and (arms or seed):
        raise PlanError("--runs names arms and seeds: type neither --arm nor --seed with it.")
    if not (runs_file or paths):
        raise PlanError("There is nothing to import: type the logs, or --runs FILE with their names.")
    typed = (*paths, *(("--runs", runs_file) if runs_file else ()))
    command = format_command("import", *typed, "--output", folder.parent.parent, "--study", folder.name)
    roles = Roles((*arms, *([seed] if seed else [])), step)
    with as_plan_error(LogError):
        logs = read_runs(paths, roles)
        if runs_file:
            if not all(log.run for log in logs):
                raise PlanError("--runs names the logs: type no LOGS with it, except charts of W&B.")
            logs, names = read_runs_file(runs_file, logs, roles)
        else:
            names = name_runs(logs, arms, seed)
        import_logs(logs, names, folder, columns, command)
    # The runs of a table share its path.
    told = [*describe_runs(logs, names, columns), *names.notes]
    return list(dict.fromkeys([*told, *(f"{log.path}: {note}" for log in logs for note in log.notes)]))
