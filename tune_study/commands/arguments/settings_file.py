"""Read a file of settings; each line acts as one --set option."""

from collections.abc import Iterable
from pathlib import Path

from trainable.config.setting_types import format_value
from trainable.files.paths import UnsafePathError, read_bytes
from tune_study.plan.errors import PlanError

_MAX_BYTES = 2**20


def read_assignments(path: Path) -> tuple[str, ...]:
    """Read the `key=value` lines of a file, in order. Empty lines and text after a `#` are ignored.

    Raises PlanError, naming file and line, if the file cannot be read or a line has another form.
    """
    name = f"--config {format_value(str(path), 1000)}"
    try:
        text = read_bytes(path, _MAX_BYTES).decode("utf-8-sig")
    except (OSError, ValueError, UnsafePathError) as error:
        problem = error.strerror or str(error) if isinstance(error, OSError) else str(error)
        raise PlanError(
            f"{name} cannot be read ({problem}): type a text file with a line key=value per setting."
        ) from None
    assignments = []
    for number, line in enumerate(text.splitlines(), 1):
        key, sign, value = (part.strip() for part in line.partition("#")[0].partition("="))
        if not sign and not key:
            continue
        if not key or not value:
            raise PlanError(
                f"{name}, line {number}: {format_value(line.strip())} is not key=value, such as actor.lr=1e-5."
            )
        assignments.append(f"{key}={value}")
    return tuple(assignments)


def merge_assignments(files: Iterable[Path], typed: Iterable[str]) -> tuple[str, ...]:
    """Merge the assignments of files with typed ones, which take precedence.

    Two spellings of one setting are refused later, as given twice. Raises PlanError if the files have a key twice.
    """
    typed = tuple(typed)
    typed_keys = {assignment.partition("=")[0].strip() for assignment in typed}
    assignments: dict[str, str] = {}
    for path in files:
        for assignment in read_assignments(path):
            key = assignment.partition("=")[0]
            if key in assignments:
                raise PlanError(
                    f"--config {format_value(str(path), 1000)} sets `{format_value(key)}` a second time "
                    f"({format_value(assignments[key])}, {format_value(assignment)}): set it once."
                )
            assignments[key] = assignment
    return (*(entry for key, entry in assignments.items() if key not in typed_keys), *typed)
