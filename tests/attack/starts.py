"""Several commands on one folder at the same moment: one wins, the others say so, and the tables are those of one."""

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.attack.conftest import RunReference
from tests.faults.kills import KL_RECIPE, InterruptedStudy, compare, restore_signal_handlers, wait_for

STEPS = 40
PATIENCE_S = 300.0
EXTENDED_VALUES = "--kl-values=0,0.1"
FIRST_VALUE = "--kl-values=0"

Words = Sequence[str]
Check = Callable[[InterruptedStudy, InterruptedStudy], str]


def start_command(study: InterruptedStudy, words: Words, number: int) -> "subprocess.Popen[str]":
    """Start a command with a log of its own."""
    with (study.log_folder / f"command-{number}.log").open("w") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "tune_study", *words],
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
            env=study.environment,
            start_new_session=True,
            preexec_fn=restore_signal_handlers,
        )


def make_run_words(study: InterruptedStudy, *more_words: str) -> list[str]:
    """The words of `run`; a later --kl-values replaces that of the recipe."""
    options = [word for word in KL_RECIPE.options if not word.startswith("--kl-values")]
    values = [] if any(word.startswith("--kl-values") for word in more_words) else [EXTENDED_VALUES]
    return ["run", "kl", *options, *values, f"--steps={STEPS}", f"--output={study.output}", *more_words]


def wait_for_codes(study: InterruptedStudy, commands: Sequence["subprocess.Popen[str]"]) -> list[int]:
    """Wait for commands to end; return their exit codes, -99 for one that did not end."""
    codes = []
    for command in commands:
        try:
            codes.append(command.wait(PATIENCE_S))
        except subprocess.TimeoutExpired:
            command.kill()
            command.wait()
            codes.append(-99)
    return codes


def read_logs(study: InterruptedStudy) -> str:
    """What all commands have printed."""
    return "\n".join(path.read_text(errors="replace") for path in sorted(study.log_folder.glob("command*.log")))


def check_end(
    study: InterruptedStudy, reference: InterruptedStudy, codes: Sequence[int], allowed: Sequence[int]
) -> str:
    """Return what is wrong: an exit code, a traceback, a process that is left, or a difference in the tables."""
    logs = read_logs(study)
    if set(codes) - set(allowed):
        return f"exit codes {list(codes)}: {logs[-400:]}"
    if "Traceback" in logs:
        return f"a traceback: {logs[logs.index('Traceback') :][:400]}"
    if left := study.wait_and_count_orphans():
        return f"{left} processes were left behind"
    (study.output / "command.log").touch()
    return "; ".join(compare(study, reference)[:4])


def start_four_runs(study: InterruptedStudy, reference: InterruptedStudy) -> str:
    """Four `run`s in one new folder: one trains, the others are refused or wait for nothing."""
    commands = [start_command(study, make_run_words(study), number) for number in range(4)]
    codes = wait_for_codes(study, commands)
    if codes.count(0) < 1:
        return f"exit codes {codes}: {read_logs(study)[-400:]}"
    return check_end(study, reference, codes, (0, 2))


def start_run_and_resumes(study: InterruptedStudy, reference: InterruptedStudy) -> str:
    """A `run` and, as soon as it is in the folder, two `resume`s of it."""
    commands = [start_command(study, make_run_words(study), 0)]
    wait_for_study_file(study, commands[0])
    commands += [start_command(study, ["resume", str(study.folder)], number) for number in (1, 2)]
    return check_end(study, reference, wait_for_codes(study, commands), (0, 2))


def wait_for_study_file(study: InterruptedStudy, command: "subprocess.Popen[str]") -> None:
    """Wait until the study can be resumed."""
    wait_for((study.folder / "study.json").exists, command, PATIENCE_S)


def wait_for_rows(study: InterruptedStudy, command: "subprocess.Popen[str]", count: int) -> None:
    """Wait until so many rows are on disk."""
    wait_for(lambda: study.count_rows() >= count, command, PATIENCE_S)


def extend_while_running(study: InterruptedStudy, reference: InterruptedStudy) -> str:
    """`run --extend` of a study that runs is refused; after its end it adds the new arm."""
    commands = [start_command(study, make_run_words(study, FIRST_VALUE), 0)]
    wait_for_rows(study, commands[0], 3)
    early = start_command(study, make_run_words(study, "--extend"), 1)
    early_code = early.wait(PATIENCE_S)
    codes = wait_for_codes(study, commands)
    if codes != [0] or early_code not in (0, 2):
        return f"exit codes {codes}, of --extend {early_code}: {read_logs(study)[-400:]}"
    late = start_command(study, make_run_words(study, "--extend"), 2)
    return check_end(study, reference, wait_for_codes(study, [late]), (0,))


def read_while_running(words: Callable[[InterruptedStudy], Words]) -> Check:
    """Run a command in a loop while the study runs."""

    def check(study: InterruptedStudy, reference: InterruptedStudy) -> str:
        commands = [start_command(study, make_run_words(study), 0)]
        wait_for_study_file(study, commands[0])
        codes: list[int] = []
        while commands[0].poll() is None:
            codes.append(start_command(study, words(study), len(codes) + 1).wait(PATIENCE_S))
        # A report of a study that has not one row yet may have nothing to show.
        return check_end(study, reference, [*wait_for_codes(study, commands), *codes], (0,))

    return check


def kill_and_start_at_once(study: InterruptedStudy, reference: InterruptedStudy) -> str:
    """The driver is killed, and two `resume`s start while its processes still end."""
    command = start_command(study, make_run_words(study), 0)
    wait_for_rows(study, command, 4)
    command.kill()
    command.wait()
    commands = [start_command(study, ["resume", str(study.folder)], number) for number in (1, 2)]
    codes = wait_for_codes(study, commands)
    if codes.count(0) < 1:
        return f"exit codes {codes}: {read_logs(study)[-400:]}"
    return check_end(study, reference, codes, (0, 2))


CHECKS: dict[str, Check] = {
    "four-runs": start_four_runs,
    "run-and-two-resumes": start_run_and_resumes,
    "extend-while-running": extend_while_running,
    "status-while-running": read_while_running(lambda study: ["status", str(study.folder)]),
    "report-while-running": read_while_running(lambda study: ["report", str(study.folder)]),
    "replay-while-running": read_while_running(lambda study: ["replay-stoppers", str(study.folder)]),
    "explain-while-running": read_while_running(lambda study: ["explain", str(study.folder)]),
    "killed-and-two-resumes": kill_and_start_at_once,
}


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_starts(tmp_path: Path, run_reference: RunReference, check: Check) -> None:
    study = InterruptedStudy(tmp_path, STEPS)
    try:
        assert check(study, run_reference(STEPS, KL_RECIPE)) == ""
    finally:
        for process in study.find_processes():
            process.kill()
