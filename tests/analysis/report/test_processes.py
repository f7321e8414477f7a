"""Tests of what is computed in a copy of a process."""

import json
from pathlib import Path

import pytest

from analysis.data.load import load
from analysis.report import pages
from tests.fakes.forked_python import run_python
from tests.fakes.run_folders import FakeRun, FakeStudy, write_study

SCRIPT = """
import json, os, sys, threading
from types import ModuleType
from pathlib import Path

import pytest
from analysis.report.processes import compute_beside

os.sched_getaffinity = lambda pid: {0, 1}  # also where the tests have one core
here = os.getpid()

def fail():
    raise ValueError("here" if os.getpid() == here else "there")

def get_error(compute):
    try:
        return compute()
    except ValueError as error:
        return str(error)

get_process = compute_beside(os.getpid)
get_nothing = compute_beside(lambda: os._exit(9) if os.getpid() != here else "computed here")
get_failure = compute_beside(fail)
get_unused = compute_beside(lambda: threading.Event().wait())
with_copies = [get_process() == here, get_nothing(), get_error(get_failure)]
end = threading.Event()
thread = threading.Thread(target=end.wait)
thread.start()
with_thread = compute_beside(os.getpid)() == here
end.set()
thread.join()
sys.modules["ray"] = ModuleType("ray")
with_ray = compute_beside(os.getpid)() == here
del sys.modules["ray"]
os.sched_getaffinity = lambda pid: {0}
print(json.dumps([*with_copies, with_thread, with_ray, compute_beside(os.getpid)() == here]))
"""


@pytest.mark.long
def test_a_copy_computes_and_this_process_does_where_it_cannot(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    process = run_python([str(tmp_path / "script.py")], tmp_path)
    assert (process.returncode, process.stderr) == (0, "")
    assert json.loads(process.stdout) == [False, "computed here", "here", True, True, True]


@pytest.mark.long
def test_the_report_of_two_processes_is_that_of_one(tmp_path: Path) -> None:
    runs = [FakeRun(arm, steps=10) for arm in ("0", "0.1")]
    folder = write_study(tmp_path, runs, FakeStudy(levels=8, total_steps=10))
    page = pages.write_frames_report(load(folder), folder, with_pictures=False).read_text()
    # Whoever draws in the first process ends it.
    (tmp_path / "script.py").write_text(
        "import os, sys\n"
        "from pathlib import Path\n"
        "from analysis.html import figures\n"
        "from analysis.report.pages import write_report\n"
        "os.sched_getaffinity = lambda pid: {0, 1}\n"
        "here, render_svg = os.getpid(), figures.render_svg\n"
        "figures.render_svg = lambda *figure: sys.exit(3) if os.getpid() == here else render_svg(*figure)\n"
        f"write_report(Path({str(folder)!r}))\n"
    )
    process = run_python([str(tmp_path / "script.py")], tmp_path)
    assert (process.returncode, process.stderr) == (0, "")
    assert (folder / "report.html").read_text() == page
    assert "dose_response.png" in {path.name for path in (folder / "figures").iterdir()}
