import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

BODY = """
import sys
from tune_study.host.terminal import protect_output
protect_output()
print("first", flush=True)
sys.stdin.readline()
for _ in range(3):
    print("x" * 100_000, flush=True)
    print("y" * 100_000, file=sys.stderr, flush=True)
sys.exit(7)
"""


def test_a_reader_that_is_gone_does_not_end_the_process() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", BODY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert child.stdout.readline() == "first\n"
    child.stdout.close()
    child.stdin.write("go\n")
    child.stdin.close()
    assert child.wait() == 7


PRINTING_BODY = """
import os, sys
from tune_study.host.terminal import finish_output, protect_output
protect_output()
with open("data", "w") as data:
    print("to standard output")
    print("to standard error", file=sys.stderr)
    os.system("echo from a child; echo and its errors >&2")
    data.write("data")
sys.stdin.read()
sys.exit(finish_output(int(sys.argv[1])))
"""


@pytest.mark.parametrize("redirections", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_output_to_a_closed_stream_goes_nowhere_and_never_into_a_file(tmp_path: Path, redirections: str) -> None:
    process = run_in_shell(PRINTING_BODY, redirections, tmp_path, exit_code=7)
    assert process.returncode == 7
    assert (tmp_path / "data").read_text() == "data"
    is_open = {stream: f"{stream}>&-" not in f"1{redirections.replace(' >', ' 1>')}" for stream in "12"}
    assert sorted(process.stdout.splitlines()) == (["from a child", "to standard output"] if is_open["1"] else [])
    assert sorted(process.stderr.splitlines()) == (["and its errors", "to standard error"] if is_open["2"] else [])


@pytest.mark.parametrize(("exit_code", "expected_code"), [(0, 1), (1, 1), (130, 130)])
def test_output_to_a_full_disk_is_an_error_that_is_told(tmp_path: Path, exit_code: int, expected_code: int) -> None:
    process = run_in_shell(PRINTING_BODY, ">/dev/full", tmp_path, exit_code)
    assert process.returncode == expected_code
    assert "standard output could not be written (No space left on device)" in process.stderr
    assert "Traceback" not in process.stderr
    assert (tmp_path / "data").read_text() == "data"


def run_in_shell(body: str, redirections: str, folder: Path, exit_code: int) -> "subprocess.CompletedProcess[str]":
    command = f"{shlex.join([sys.executable, '-c', body, str(exit_code)])} {redirections}"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    return subprocess.run(command, shell=True, cwd=folder, env=environment, input="", capture_output=True, text=True)


@pytest.mark.long
@pytest.mark.parametrize(("redirections", "expected_code"), [("<&- >&- 2>&-", 0), (">/dev/full 2>/dev/full", 1)])
def test_a_command_needs_no_output(tmp_path: Path, redirections: str, expected_code: int) -> None:
    command = f"{sys.executable} -m tune_study list {redirections}"
    process = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert (process.returncode, process.stdout, process.stderr) == (expected_code, "", "")
