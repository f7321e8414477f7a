"""Studies in unusual or poor surroundings: home folders, paths, locales, limits, full devices."""

import os
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO

import pytest

from tests.attack.conftest import RunReference
from tests.attack.sample_study import SampleStudy
from tests.faults.kills import KL_RECIPE, InterruptedStudy, compare, restore_signal_handlers

STEPS = 24
PATIENCE_S = 240.0


@dataclass(frozen=True)
class Surrounding:
    """What is unusual about a place in which a study is run.

    environment: variables that are set, or unset (None); `{}` in a value is the folder of the cell. output: name of the
    output folder. limits: resource limits. prefix: a command that runs another. codes: the exit codes that are right;
    after any but 0 nothing is compared. stdout: where the output goes instead of a log.
    """

    environment: Mapping[str, str | None] = field(default_factory=dict)
    output: str = "out"
    limits: Mapping[int, int] = field(default_factory=dict)
    prefix: Sequence[str] = ()
    codes: tuple[int, ...] = (0,)
    stdout: str = ""


LONG_PATH = "/".join(f"{'folder-' * 6}{number}" for number in range(7))
MOUNT_SMALL = 'mount -t tmpfs -o size=%s tmpfs "$0" && exec "$@"'


def _use_small_disk(mount: str, size: str) -> tuple[str, ...]:
    return ("unshare", "--map-root-user", "--mount", "sh", "-c", MOUNT_SMALL % size, mount)


SURROUNDINGS: dict[str, Surrounding] = {
    "home-that-no-folder-can-be": Surrounding({"HOME": "/proc/no-such-home"}),
    "home-that-is-a-file": Surrounding({"HOME": "{}/file"}),
    "no-home": Surrounding({"HOME": None}),
    "home-of-another-user": Surrounding({"HOME": "{}/forbidden"}),
    "unicode-path": Surrounding(output="Übung 実験 🙂 é"),
    "path-with-quotes-and-spaces": Surrounding(output='it\'s a "study" $(touch ran) ; #1'),
    "path-of-300-characters": Surrounding(output=LONG_PATH),
    "name-of-300-characters": Surrounding(output="x" * 300, codes=(2,)),
    "path-that-is-no-text": Surrounding(output=os.fsdecode(b"out-\xff"), codes=(0, 2)),
    "path-with-line-feed": Surrounding(output="a\nb", codes=(0, 2)),
    "output-that-is-a-file": Surrounding(output="file", codes=(2,)),
    # 3: /proc has no free byte, and a study that does not fit is refused first.
    "output-that-no-folder-can-be": Surrounding(output="/proc/no-such-output", codes=(2, 3)),
    "ascii-locale": Surrounding({"LC_ALL": "C", "LANG": "C", "PYTHONIOENCODING": "ascii"}),
    "dumb-terminal": Surrounding({"TERM": "dumb", "COLUMNS": "20", "LINES": "3"}),
    "other-time-zone": Surrounding({"TZ": "Pacific/Kiritimati"}),
    "four-threads": Surrounding({"OMP_NUM_THREADS": "4", "MKL_NUM_THREADS": "4"}),
    "temporary-folder-that-is-missing": Surrounding({"TMPDIR": "{}/no-such-folder"}, codes=(0, 2)),
    "temporary-folder-with-a-long-name": Surrounding({"TMPDIR": "{}/" + "t" * 120}, codes=(0, 2)),
    "small-temporary-folder": Surrounding(
        {"TMPDIR": "{}/small"}, prefix=_use_small_disk("{}/small", "2m"), codes=(0, 1, 2)
    ),
    "small-shared-memory": Surrounding(prefix=_use_small_disk("/dev/shm", "8m")),
    "256-open-files": Surrounding(limits={resource.RLIMIT_NOFILE: 256}),
    "64-open-files": Surrounding(limits={resource.RLIMIT_NOFILE: 64}, codes=(0, 1, 2)),
    "no-core-files": Surrounding(limits={resource.RLIMIT_CORE: 0}),
    "output-to-a-full-device": Surrounding(stdout="/dev/full", codes=(0, 1, 120)),
    "closed-output": Surrounding(prefix=("sh", "-c", 'exec "$@" >&- 2>&-', "sh"), codes=(0, 1, 120)),
    "proxy-that-does-not-answer": Surrounding(
        dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    ),
}


def _make_environment(study: InterruptedStudy, surrounding: Surrounding, folder: Path) -> dict[str, str]:
    environment = dict(study.environment)
    for name, value in surrounding.environment.items():
        environment.pop(name, None)
        if value is not None:
            environment[name] = value.replace("{}", str(folder))
    return environment


def _set_limits(limits: Mapping[int, int]) -> None:
    restore_signal_handlers()
    for kind, limit in limits.items():
        resource.setrlimit(kind, (limit, limit))


def run_words(
    study: InterruptedStudy, surrounding: Surrounding, folder: Path, words: Sequence[str], log: IO[str]
) -> int:
    """Run a command in the surroundings; return its exit code. TimeoutError if it does not end."""
    prefix = [word.replace("{}", str(folder)) for word in surrounding.prefix]
    process = subprocess.Popen(
        [*prefix, sys.executable, "-m", "tune_study", *words],
        stdout=log,
        stderr=subprocess.STDOUT,
        env=_make_environment(study, surrounding, folder),
        start_new_session=True,
        preexec_fn=partial(_set_limits, surrounding.limits),
    )
    study.drivers.append(process.pid)
    try:
        return process.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise TimeoutError(f"`{words[0]}` did not end within {PATIENCE_S:.0f} s") from None


def _run_study(surrounding: Surrounding, run_reference: RunReference, folder: Path) -> str:
    """Run a study in the surroundings, ask for its status and report there, and compare its tables."""
    (folder / "file").write_text("a file")
    (folder / "small").mkdir()
    (folder / "forbidden").mkdir(mode=0)
    (folder / ("t" * 120)).mkdir()
    study = InterruptedStudy(folder / surrounding.output, STEPS)
    log_path = Path(surrounding.stdout or folder / "command.log")
    words = ["run", "kl", *KL_RECIPE.options, f"--steps={STEPS}", f"--output={folder / surrounding.output}"]
    try:
        with log_path.open("a") as log:
            code = run_words(study, surrounding, folder, words, log)
            codes = [code]
            if code == 0:
                codes += [
                    run_words(study, surrounding, folder, [command, str(study.folder)], log)
                    for command in ("status", "report")
                ]
    except TimeoutError as error:
        return f"{error}: {_read_end(log_path)}"
    finally:
        left = study.wait_and_count_orphans()
    text = _read_end(log_path)
    if "unshare" in surrounding.prefix and "unshare failed" in text.lower() + text:
        pytest.skip("no mount namespace is allowed here")
    if set(codes) - set(surrounding.codes):
        return f"exit codes {codes} of run, status and report: {text}"
    if "Traceback" in text:
        return f"a traceback: {text}"
    if left:
        return f"{left} processes were left behind"
    if (folder / "ran").exists() or Path("ran").exists():
        return "a shell ran the path"
    if code != 0:
        return ""
    (study.output / "command.log").touch()
    return "; ".join(compare(study, run_reference(STEPS, KL_RECIPE))[:4])


def _read_end(path: Path) -> str:
    return path.read_text(errors="replace")[-1200:] if path.is_file() else ""


@pytest.mark.parametrize("surrounding", SURROUNDINGS.values(), ids=SURROUNDINGS)
def test_surroundings(tmp_path: Path, run_reference: RunReference, surrounding: Surrounding) -> None:
    assert _run_study(surrounding, run_reference, tmp_path) == ""


# A folder on a disk that can only be read.

READ_ONLY = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"'


def test_surroundings_read_only_disk(sample: SampleStudy, tmp_path: Path) -> None:
    """What only reads answers, what writes says that it cannot."""
    run = str(sample.copy(tmp_path))
    commands = {
        ("status",): (0,),
        ("replay-stoppers",): (0,),
        ("explain",): (0,),
        ("report",): (1, 2),
        ("resume",): (2,),
        ("probe",): (2,),
    }
    for words, codes in commands.items():
        prefix = ["unshare", "--map-root-user", "--mount", "sh", "-c", READ_ONLY, str(tmp_path / "out")]
        process = subprocess.run(
            [*prefix, sys.executable, "-m", "tune_study", words[0], run], capture_output=True, text=True
        )
        text = process.stdout + process.stderr
        if "unshare" in process.stderr or "mount:" in process.stderr:
            pytest.skip("no mount namespace is allowed here")
        assert process.returncode in codes, f"`{words[0]}`: exit code {process.returncode}: {text[-500:]}"
        assert "Traceback" not in text, text[-500:]
