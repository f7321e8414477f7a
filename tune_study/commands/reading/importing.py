"""The command `import`: logs of other trainers become a study that every reading command reads."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from analysis.sources.importing import import_logs
from analysis.sources.logs import LogError
from analysis.sources.names import Name, parse_name
from trainable.config.setting_types import format_value
from tune_study.plan.errors import PlanError, as_plan_error


def parse_columns(texts: Sequence[str], files: Sequence[Path]) -> list[Name]:
    """Parse OURS=THEIRS of the command line and, per line, of files, where `#` begins a comment."""
    lines = list(texts)
    for path in files:
        try:
            lines += [line for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(f"{format_value(str(path), 1000)} cannot be read ({error}).") from None
    names = []
    for line in lines:
        column, separator, key = (word.strip() for word in line.partition("="))
        if not (separator and column and key):
            raise PlanError(
                f"{format_value(line)} names no column: type OURS=THEIRS, such as --column val_success=eval/accuracy."
            )
        names.append(parse_name(column, key))
    return names


def import_study(
    logs: Sequence[Path],
    output: Path,
    name: str,
    arms: Sequence[str],
    seed: str | None,
    names: Sequence[Name],
    command: str,
) -> tuple[Path, list[str]]:
    """Write the study to OUTPUT/results/NAME. Return the folder, and what a reader of its logs must know."""
    folder = output / "results" / name
    if folder.exists():
        raise PlanError(f"{format_value(str(folder), 1000)} exists: type another --study or --output.")
    with as_plan_error(LogError):
        return folder, import_logs(logs, folder, name, arms, seed, names, command, datetime.now(UTC).isoformat())
