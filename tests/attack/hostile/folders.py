"""Study folders from somebody who means harm: no command may follow, run, print or write what they ask for."""

import os
import resource
import sys
import tempfile
from functools import partial
from pathlib import Path

import pytest

from tests.attack.children import call_in_child
from tests.attack.damaged_files import load_frames, read_tree, write_home
from tests.attack.hostile.contents import CONTENTS, MARKER, Change, HostileCopy
from tests.attack.hostile.links import LINKS
from tests.attack.hostile.trace import USER_FOLDERS, Trace
from tests.attack.sample_study import ENDED_ARM, PROBE_OPTIONS, SampleStudy, run_command
from trainable.files.paths import UnsafePathError

TIME_LIMIT_S = 180.0
MAX_GROWTH_KB = 1_500_000
"""What a command may take in addition to what this process has: far more than a real study of this size needs."""
MAX_BYTES = 24 << 30
"""A limit that protects this machine from a command that takes more."""

COMMANDS: dict[str, tuple[str, ...]] = {
    "status": ("status",),
    "replay-stoppers": ("replay-stoppers",),
    "explain": ("explain",),
    "resume": ("resume", "--dry-run"),
    "report": ("report",),
    "probe": ("probe", "--trial", ENDED_ARM, *PROBE_OPTIONS),
}
"""The commands that are run on each folder, after `analysis.load`. For the folder, see `_run_words`."""


def run_commands(copy: HostileCopy) -> list[str]:
    """Run all commands in this process, and return what is wrong. The process is observed, and of no use afterwards."""
    temp_folder = copy.home.parent / "tmp"
    os.environ.update(HOME=str(copy.home), TMPDIR=str(temp_folder))
    tempfile.tempdir = None
    current_folder = copy.home.parent / "current"
    os.chdir(current_folder)
    # As with `python -m tune_study`: the current folder is the first on the path of imports.
    sys.path.insert(0, "")
    trace = Trace([copy.output, current_folder], [copy.output, temp_folder], copy.home)
    trace.start()
    peak_before, problems = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, list[str]()
    try:
        load_frames(copy.folder)
    except (ValueError, UnsafePathError):
        pass  # refused
    except Exception as error:
        problems.append(f"load: {type(error).__name__}: {str(error)[:300]}")
    for name, words in COMMANDS.items():
        try:
            answer = run_command([words[0], str(copy.folder), *words[1:]], current_folder, copy.home)
        except Exception as error:
            problems.append(f"{name}: {type(error).__name__}: {str(error)[:400]}")
            continue
        if answer.code not in (0, 1, 2):
            problems.append(f"{name}: exit code {answer.code}")
        if controls := sorted({ascii(char) for char in answer.out + answer.err if not _is_harmless(char)}):
            problems.append(f"{name}: prints {', '.join(controls[:5])}")
        if "Traceback" in answer.err:
            problems.append(f"{name}: prints a traceback")
    growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak_before
    if growth > MAX_GROWTH_KB:
        problems.append(f"took {growth / 1e6:.1f} GB of memory")
    return [*problems, *trace.list_problems()]


def _is_harmless(char: str) -> bool:
    """Whether a terminal shows a character and does nothing else."""
    is_bidirectional_control = char in "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
    is_control = ord(char) < 32 or 127 <= ord(char) < 160
    return char == "\n" or not (is_control or is_bidirectional_control)


def find_markup(output: Path) -> str:
    """Return how a page contains the marker as markup; empty if it does not."""
    for path in output.rglob("*.html"):
        if path.is_symlink() or not path.is_file():
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        if any(f"<{tag}{MARKER}" in text for tag in ("script>", "img src=x onerror=", "svg onload=")):
            return f"{path.name} has markup of the folder"
    return ""


def change_folder(copy: HostileCopy, change: Change) -> str:
    """Change the copy, in a process that may take memory for it; return why that is not possible."""
    try:
        change(copy)
    except OSError as error:
        return f"{type(error).__name__}: {error}"
    except pytest.skip.Exception as error:
        return str(error)
    return ""


CHANGES = {**LINKS, **CONTENTS}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_hostile_folders(sample: SampleStudy, tmp_path: Path, change: Change) -> None:
    """Make the folder, run the commands in a child process, and check what they did."""
    home = tmp_path / "home"
    write_home(home)
    for name in ("tmp", "current"):
        (tmp_path / name).mkdir()
    copy = HostileCopy(sample.copy(tmp_path), home, sample.run_ids)
    if obstacle := call_in_child(partial(change_folder, copy, change)):
        pytest.skip(obstacle)
    report = copy.folder / "report.html"
    if not report.is_symlink() and report.is_file():
        report.unlink()  # so that what is looked at is what was written now
    home_before = read_tree(home)
    assert call_in_child(partial(run_commands, copy), TIME_LIMIT_S, MAX_BYTES) == []
    assert {path: text for path, text in read_tree(home).items() if not path.startswith(USER_FOLDERS)} == home_before
    assert not (home / "ran").exists()
    assert not (tmp_path / "ran").exists()
    assert find_markup(tmp_path / "out") == ""
