"""Make the teachers that a study needs and this machine lacks, before Ray starts."""

import subprocess
import sys
from collections.abc import Mapping, Sequence

from rich.console import Console

from trainable.config.constants import TEACHERS
from trainable.models.teachers import find_teacher_folder, format_teacher_command, is_made
from tune_study.host.console import print_line
from tune_study.plan.errors import PlanError


def find_missing_teachers(paths: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Find the teachers among the models at `paths` that this machine has not made yet, each once."""
    names = [path for path in dict.fromkeys(paths) if path in TEACHERS]
    return [name for name in names if not is_made(find_teacher_folder(name, environ))]


def describe_teachers(paths: Sequence[str], environ: Mapping[str, str], is_local: bool) -> list[str]:
    """Describe the teachers among the models at `paths` for the plan: what is made first, or what every node needs.

    is_local: whether the study runs on this machine instead of a cluster.
    """
    if is_local:
        return [
            f"Teacher: {name} is made first, in about two CPU minutes, in {find_teacher_folder(name, environ)}"
            for name in find_missing_teachers(paths, environ)
        ]
    return [
        f"Teacher: every node needs {name}, and all nodes the same: make it once with "
        f"`{format_teacher_command(name)}`, and copy it to the folder that this prints"
        for name in dict.fromkeys(paths)
        if name in TEACHERS
    ]


def make_missing_teachers(paths: Sequence[str], environ: Mapping[str, str], console: Console) -> None:
    """Make every teacher among `paths` that this machine lacks by its command; raise PlanError if that fails."""
    for name in find_missing_teachers(paths, environ):
        print_line(console, f"Making the teacher {name}, once on this machine: about two CPU minutes.")
        command = ["-m", "trainable.tiny", "--policy", name]
        with subprocess.Popen(
            [sys.executable, *command], stdout=subprocess.PIPE, text=True, encoding="utf-8", env=dict(environ)
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                print_line(console, line.rstrip("\n"))
        if process.returncode != 0:
            raise PlanError(
                f"The teacher {name} could not be made: the command ended with code {process.returncode}. Its message "
                f"is above; try it with `python {' '.join(command)}`."
            )
