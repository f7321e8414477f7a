"""Commands that are printed, pasted into a real shell."""

import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainable.config.command_lines import PROGRAM, format_command, quote_argument

SHOW_ARGUMENTS = r"printf '%s\0'"


def paste(command: str) -> list[bytes]:
    """The arguments that a shell passes to the program of a command."""
    return subprocess.run(["bash", "-c", command], capture_output=True, check=True).stdout.split(b"\0")[:-1]


TEXTS = st.text(st.characters().filter(str.isprintable))


@given(st.lists(TEXTS, min_size=1, max_size=20))
def test_a_shell_reads_the_arguments_that_were_formatted(texts: list[str]) -> None:
    # As the arguments of one command, because every shell takes a few milliseconds to start.
    command = format_command(*texts, program=SHOW_ARGUMENTS)
    assert command.isprintable()
    assert paste(command) == [text.encode() for text in texts]


@pytest.mark.parametrize("name", ["-x", "--dry-run", "a b", "it's", "$HOME", "`ls`", "résultats", "!"])
def test_a_path_is_no_option_and_names_its_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    command = f"cd {quote_argument(str(tmp_path))} && {format_command('-d', Path(name), program='ls')}"
    assert subprocess.run(["bash", "-c", command], capture_output=True, check=True).stdout
    assert command.isprintable()


def test_a_plain_command_is_as_one_would_type_it_and_no_control_character_is_printed() -> None:
    assert format_command("resume", Path("out/results/kl"), "--address", "auto") == (
        f"{PROGRAM} resume out/results/kl --address auto"
    )
    assert format_command("\x1b[2J\udcff").isprintable()
