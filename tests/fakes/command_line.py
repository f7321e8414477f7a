"""Commands typed in this process, and checks of their answers."""

import shlex
from pathlib import Path
from typing import NamedTuple

from typer.testing import CliRunner

from trainable.config.command_lines import PROGRAM
from tune_study.commands.cli import app


class Answer(NamedTuple):
    code: int
    out: str
    err: str


def type_in(line: str, **environment: str) -> Answer:
    return type_words(*shlex.split(line), **environment)


def type_words(*words: object, **environment: str) -> Answer:
    """Type words that contain paths or spaces."""
    result = CliRunner(env=environment).invoke(app, [str(word) for word in words], prog_name=PROGRAM)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Answer(result.exit_code, result.stdout, result.stderr)


def assert_refused(answer: str | Answer, *messages: str) -> str:
    """Assert exit code 2, nothing on standard output, and what the message names; return the message on one line.

    answer: that of a command, or the line to type.
    """
    answer = type_in(answer) if isinstance(answer, str) else answer
    text = " ".join(answer.err.split())
    assert (answer.code, answer.out) == (2, ""), answer
    assert [message for message in messages if message not in text] == [], text
    return text


def get_output(answer: str | Answer) -> str:
    """Return what a command printed that must have succeeded. answer: its answer, or the line to type."""
    answer = type_in(answer) if isinstance(answer, str) else answer
    assert answer.code == 0, answer.err
    return answer.out


def read_files(folder: Path) -> dict[str, bytes]:
    """Read every file below a folder, by its path from there."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
