"""Tests of what is computed in a copy of a process, in processes without torch and other threads."""

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from analysis.data.load import load
from analysis.report import pages, processes
from tests.fakes.run_folders import FakeRun, FakeStudy, write_study

TWO_CORES = "import os; os.sched_getaffinity = lambda pid: {0, 1}\n"

RESULTS = """
import json, sys, threading
from multiprocessing import current_process
from types import ModuleType
from analysis.report import processes
from analysis.report.processes import compute_beside

here = os.getpid()

def compute(function):
    try:
        with compute_beside(function) as get_result:
            return get_result()
    except ValueError as error:
        return str(error)

def fail():
    raise ValueError("here" if os.getpid() == here else "there")

def die():
    return "computed here" if os.getpid() == here else os._exit(9)

def is_here():
    return compute(os.getpid) == here

def refuse(process):
    raise BlockingIOError

results = {"plain": is_here(), "dead": compute(die), "failed": compute(fail)}
results["large"] = compute(lambda: (os.getpid() != here, "x" * 3_000_000)) == (True, "x" * 3_000_000)
end = threading.Event()
thread = threading.Thread(target=end.wait)
thread.start()
results["thread"] = is_here()
end.set()
thread.join()
for name in ("ray", "torch"):
    sys.modules[name] = ModuleType(name)
    results[name] = is_here()
    del sys.modules[name]
current_process()._config["daemon"] = True
results["daemon"] = is_here()
current_process()._config["daemon"] = False
start, processes.ForkProcess.start = processes.ForkProcess.start, refuse
results["no process"] = is_here()
processes.ForkProcess.start = start
os.sched_getaffinity = lambda pid: {0}
results["one core"] = is_here()
print(json.dumps(results))
"""

UNUSED = """
import threading
from analysis.report.processes import _start_copy, compute_beside

try:
    with compute_beside(threading.Event().wait):
        import multiprocessing
        (copy,) = multiprocessing.active_children()
        raise KeyboardInterrupt
except KeyboardInterrupt:
    print(copy.is_alive(), flush=True)
slow, _ = _start_copy(threading.Event().wait)
done, _ = _start_copy(lambda: "x" * 3_000_000)  # which nobody reads
print(slow.pid, done.pid, flush=True)
threading.Event().wait()
"""


def run_script(script: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-c", TWO_CORES + script], capture_output=True, text=True, timeout=120)


@pytest.mark.long
def test_a_copy_computes_and_this_process_does_where_it_cannot() -> None:
    process = run_script(RESULTS)
    assert (process.returncode, process.stderr) == (0, "")
    assert json.loads(process.stdout) == {
        "plain": False,
        "dead": "computed here",
        "failed": "here",
        "large": True,
        **dict.fromkeys(("thread", "ray", "torch", "daemon", "no process", "one core"), True),
    }


@pytest.mark.long
def test_a_copy_ends_with_its_use_and_with_its_process() -> None:
    command = [sys.executable, "-c", TWO_CORES + UNUSED]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "False\n"
        copies = [psutil.Process(int(pid)) for pid in process.stdout.readline().split()]
        process.kill()
    _, living_copies = psutil.wait_procs(copies, timeout=60)
    assert living_copies == []


@pytest.mark.long
def test_the_report_of_two_processes_is_that_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [FakeRun(arm, steps=10) for arm in ("0", "0.1")]
    folder = write_study(tmp_path, runs, FakeStudy(levels=8, total_steps=10))
    monkeypatch.setattr(processes, "can_fork", lambda: False)
    page = pages.write_frames_report(load(folder), folder, with_pictures=False).read_text()
    # Whoever draws in the first process ends it.
    process = run_script(
        "import sys\n"
        "from pathlib import Path\n"
        "from analysis.html import figures\n"
        "from analysis.report.pages import write_report\n"
        "here, render_svg = os.getpid(), figures.render_svg\n"
        "figures.render_svg = lambda *figure: sys.exit(3) if os.getpid() == here else render_svg(*figure)\n"
        f"write_report(Path({str(folder)!r}))\n"
    )
    assert (process.returncode, process.stderr) == (0, "")
    assert (folder / "report.html").read_text() == page
    assert "dose_response.png" in {path.name for path in (folder / "figures").iterdir()}


@pytest.mark.long
def test_an_error_beside_the_figures_ends_their_process_and_leaves_no_picture(tmp_path: Path) -> None:
    folder = write_study(tmp_path, [FakeRun("0", steps=3)], FakeStudy(levels=8, total_steps=3))
    process = run_script(
        "import multiprocessing\n"
        "from pathlib import Path\n"
        "import pandas as pd\n"
        "from analysis.report.pages import write_report\n"
        "copies = []\n"
        "def fail(*args, **options):\n"
        "    copies.extend(multiprocessing.active_children())\n"
        "    raise OSError(28, 'No space left on device')\n"
        "pd.DataFrame.to_csv = fail\n"
        "try:\n"
        f"    write_report(Path({str(folder)!r}))\n"
        "except OSError as error:\n"
        "    print(error.strerror, [copy.is_alive() for copy in copies])\n"
    )
    assert (process.stdout, process.stderr) == ("No space left on device [False]\n", "")
    assert list((folder / "figures").iterdir()) == []
