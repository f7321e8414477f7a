"""Tests of the process that starts confined ones."""

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

from sandboxes.trees.repl import launcher, process
from sandboxes.trees.repl.process import ConfinementError, Execution, ReplProcess, find_obstacle
from tests.sandboxes.trees.repl.test_escapes import WALK, get_process, has_ended, wait_until
from trainable.runs.orphans import MARK_ENV

pytestmark = pytest.mark.skipif(bool(find_obstacle()), reason=find_obstacle())


def test_processes_of_all_threads_come_from_one_launcher() -> None:
    with ThreadPoolExecutor(8) as pool:
        repls = list(pool.map(lambda number: ReplProcess({"n": str(number)}), range(24)))
        values = [repl.execute("context['n']") for repl in repls]
    assert [value.stdout for value in values] == [f"'{number}'\n" for number in range(24)]
    ids = {get_process(repl).pid for repl in repls}
    assert len({psutil.Process(pid).ppid() for pid in ids}) == 1
    assert len(ids) == 24
    assert all(os.getsid(pid) == pid for pid in ids)
    # The thread that made them has ended, and they have not.
    assert [repl.execute("1 + 1").stdout for repl in repls] == ["2\n"] * 24
    children = [get_process(repl) for repl in repls]
    for repl in repls:
        repl.close()
    wait_until(lambda: all(map(has_ended, children)))


def test_a_launcher_that_has_ended_is_started_again() -> None:
    with ReplProcess({}) as repl:
        child = get_process(repl)
        parent = psutil.Process(child.ppid())
        parent.send_signal(signal.SIGKILL)
        wait_until(lambda: has_ended(child))  # what it has started ends with it
        # What the code has lost is not its own doing, and is no observation.
        with pytest.raises(ConfinementError, match="has ended, and all of them with it"):
            repl.execute("1 + 1")
        assert repl.execute("1 + 1").stdout == "2\n"
        assert get_process(repl).ppid() != parent.pid


def test_a_process_sees_nothing_of_another_and_leaves_no_stream_open() -> None:
    with ReplProcess({"a": "the first"}) as first:
        first.execute("secret = 'a value of the first'")
        with ReplProcess({"b": "the second"}) as second:
            assert "NameError" in second.execute("secret").stderr
            assert second.execute("list(context)").stdout == "['b']\n"
    with ReplProcess({}):
        pass
    before = psutil.Process().num_fds()
    for _ in range(10):
        with ReplProcess({}) as repl:
            repl.execute("1")
    assert psutil.Process().num_fds() == before


def test_where_no_process_can_be_made_the_others_go_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    text = launcher._SCRIPT.read_text()
    refuse = "\nreal_fork, forks = os.fork, []\ndef refuse():\n    forks.append(1)\n    if len(forks) == 2:\n"
    refuse += "        raise OSError('no more processes')\n    return real_fork()\nos.fork = refuse\n"
    script.write_text(text.replace('if __name__ == "__main__":', refuse + 'if __name__ == "__main__":'))
    monkeypatch.setattr(launcher, "_SCRIPT", script)
    monkeypatch.setattr(launcher, "_LAUNCHERS", {})
    with ReplProcess({}) as first:
        with pytest.raises(ConfinementError, match="No code can be confined here: no more processes"):
            ReplProcess({})
        assert first.execute("1 + 1").stdout == "2\n"
        with ReplProcess({}) as third:
            assert third.execute("1 + 1").stdout == "2\n"
    launcher._close_launchers()
    script.write_text("raise SystemExit(1)")
    monkeypatch.setattr(launcher, "_LAUNCHERS", {})
    with pytest.raises(ConfinementError, match="No code can be confined here: "):
        ReplProcess({})


def test_a_process_is_confined_before_it_reads_a_text() -> None:
    library = process._find_library()
    assert library is not None
    child = launcher.start_confined(library, [2**28, 100, 2**20])
    status = Path(f"/proc/{child.pid}/status")
    # It has not been sent anything.
    wait_until(lambda: "Seccomp:\t2\n" in status.read_text())
    child.close()


def test_a_process_has_no_file_of_its_parent() -> None:
    code = WALK + (
        "sockets = [thing for thing in importer('gc').get_objects() if type(thing).__name__ == 'socket']\n"
        "print([thing.fileno() for thing in sockets if thing.fileno() >= 0])\n"
        "print([number for number in range(3, 9_000) if libc.close(number) == 0])"
    )
    with ReplProcess({}) as repl:
        assert repl.execute(code) == Execution("[]\n[]\n", "", None)


FORK = """
import os, sys, time
from sandboxes.trees.repl.process import *
repl = ReplProcess({}, limits=ReplLimits(seconds=600))
fork = os.fork()
if fork == 0:
    time.sleep(600)
print(fork, repl._process.pid, repl._process.launcher._process.pid, flush=True)
repl.execute('while True: pass')
"""


def start_trial(script: str, *arguments: str) -> tuple["subprocess.Popen[str]", list[psutil.Process]]:
    """A process, and those that it names in its first line."""
    command, environment = [sys.executable, "-c", script, *arguments], {**os.environ, MARK_ENV: "/some/study/runs/a"}
    trial = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path.cwd(), env=environment)
    return trial, [psutil.Process(int(number)) for number in trial.stdout.readline().split()]


def test_the_launcher_ends_with_its_trial_while_a_fork_of_it_lives() -> None:
    trial, (fork, *processes) = start_trial(FORK)
    with trial:
        trial.kill()
        wait_until(lambda: all(map(has_ended, processes)))
        assert fork.is_running()
        fork.kill()


SNIPPETS = (
    "hash(object()), hash(float('nan'))",
    "class A:\n    pass\ndef f():\n    return 1\nitems = [A() for _ in range(20)]\n[type(x) for x in {A(): 1, f: 2}]",
    "[items.index(x) for x in set(items)]",
    "functions = [(lambda k: lambda: k)(k) for k in range(20)]\n[function() for function in set(functions)]",
    "repr(object())[:25], repr(A()).split(' at ')[1], repr(items[3])[-9:-1]",
    "hash((A(), f)), hash(len), hash(None), hash(A), hash(A().__init__)",
    "list({print, len, min, max, sorted, sum, any, all})",
)
"""Code of which the output depends on addresses."""
PLAY = """
import json, sys
from sandboxes.trees.repl.process import ReplProcess
number, snippets = int(sys.argv[1]), json.loads(sys.argv[2])
for past in range(number):
    with ReplProcess({"p": "x" * (1 + 7919 * past)}) as repl:
        repl.execute("y = [object() for _ in range(%d)]\\nset(y), '' if len(y) > 2000 else 1 / 0" % (1000 * past))
with ReplProcess({"a": "one", "b": "two" * 40_000}) as repl:
    print(json.dumps([repl.execute(snippet) for snippet in snippets]))
"""


@pytest.mark.long
def test_addresses_do_not_depend_on_the_start(tmp_path: Path) -> None:
    """Two launchers, in parents with other folders, variables, limits and files, after other REPLs."""
    fix = "import ctypes; print(ctypes.CDLL(None).personality(0x0040000))"
    if subprocess.run([sys.executable, "-c", fix], capture_output=True).stdout == b"-1\n":
        pytest.skip("this container does not let a process have fixed addresses (personality)")
    outputs = []
    for number, folder, setting in ((0, Path.cwd(), "x"), (7, tmp_path, "y" * 2000)):
        environment = {**os.environ, "PYTHONPATH": str(Path.cwd()), "SOME_SETTING": setting, MARK_ENV: str(folder)}
        command = [sys.executable, "-c", PLAY, str(number), json.dumps(SNIPPETS)]
        play = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, check=True)
        outputs.append(json.loads(play.stdout))
    for snippet, first, second in zip(SNIPPETS, *outputs, strict=True):
        assert first == second, snippet
        assert first[0] or "E" in first[1]


def test_a_launcher_whose_reply_was_not_read_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the next REPL would be stopped and killed with the handle of the one before it."""
    monkeypatch.setattr(launcher, "_LAUNCHERS", {})
    with ReplProcess({}):
        (interrupted,) = launcher._LAUNCHERS.values()
    with monkeypatch.context() as context:
        context.setattr(launcher.socket, "recv_fds", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            ReplProcess({})
    with ReplProcess({}) as repl:
        assert repl.execute("1 + 1").stdout == "2\n"
        assert launcher._LAUNCHERS[next(iter(launcher._LAUNCHERS))] is not interrupted
    launcher._close_launchers()
