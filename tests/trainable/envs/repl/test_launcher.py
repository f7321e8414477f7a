"""Tests of the process that starts confined ones."""

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from trainable.envs.repl import launcher
from trainable.envs.repl.process import ConfinementError, ReplProcess, find_obstacle

pytestmark = pytest.mark.skipif(bool(find_obstacle()), reason=find_obstacle())


def get_pid(repl: ReplProcess) -> int:
    assert repl._process is not None
    return repl._process.pid


def test_processes_of_all_threads_come_from_one_launcher() -> None:
    with ThreadPoolExecutor(8) as pool:
        repls = list(pool.map(lambda number: ReplProcess({"n": str(number)}), range(24)))
        values = [repl.execute("context['n']") for repl in repls]
    assert [value.stdout for value in values] == [f"'{number}'\n" for number in range(24)]
    parents = {psutil.Process(get_pid(repl)).ppid() for repl in repls}
    assert len(parents) == 1
    assert len({get_pid(repl) for repl in repls}) == 24
    assert all(os.getsid(get_pid(repl)) == get_pid(repl) for repl in repls)
    # The thread that made them has ended, and they have not.
    assert [repl.execute("1 + 1").stdout for repl in repls] == ["2\n"] * 24
    children = [psutil.Process(get_pid(repl)) for repl in repls]
    for repl in repls:
        repl.close()
    _, alive = psutil.wait_procs(children, timeout=30)
    assert alive == []


def test_a_launcher_that_has_ended_is_started_again() -> None:
    with ReplProcess({}) as repl:
        (parent,) = [psutil.Process(get_pid(repl)).parent()]
        assert parent is not None
        child = psutil.Process(get_pid(repl))
        parent.send_signal(signal.SIGKILL)
        child.wait(timeout=30)  # what it has started ends with it
        # What the code has lost is not its own doing, and is no observation.
        with pytest.raises(ConfinementError, match="has ended, and all of them with it"):
            repl.execute("1 + 1")
        assert repl.execute("1 + 1").stdout == "2\n"
        assert psutil.Process(get_pid(repl)).ppid() != parent.pid


def test_a_process_sees_nothing_of_another() -> None:
    with ReplProcess({"a": "the first"}) as first:
        first.execute("secret = 'a value of the first'")
        with ReplProcess({"b": "the second"}) as second:
            assert "NameError" in second.execute("secret").stderr
            assert second.execute("list(context)").stdout == "['b']\n"


def test_no_stream_of_a_closed_process_stays_open() -> None:
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


def test_addresses_are_the_same_in_every_process() -> None:
    outputs = []
    for _ in range(2):
        with ReplProcess({}) as repl:
            outputs.append(repl.execute("print(list_papers, object(), map(str, []))\nFINAL(object())"))
    assert outputs[0] == outputs[1]
    assert " at 0x0" in outputs[0].stdout
    assert outputs[0].final is not None
    assert " at 0x0" in outputs[0].final


def test_a_launcher_that_cannot_start_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit(1)")
    monkeypatch.setattr(launcher, "_SCRIPT", script)
    monkeypatch.setattr(launcher, "_LAUNCHERS", {})
    with pytest.raises(ConfinementError, match="No code can be confined here: "):
        ReplProcess({})


def test_nothing_stays_after_the_end_of_the_parent() -> None:
    # The parent ends only when it is told to: until then its children are there to be looked up.
    script = (
        "from trainable.envs.repl.process import *\nimport psutil, sys\n"
        "repl = ReplProcess({}, limits=ReplLimits(seconds=600))\n"
        "print(repl._process.pid, psutil.Process(repl._process.pid).ppid(), flush=True)\n"
        "sys.stdin.readline()\n"
    )
    for ending in ("", "import os; os._exit(0)", "repl.execute('while True: pass')"):
        with subprocess.Popen(
            [sys.executable, "-c", script + ending],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path.cwd(),
        ) as parent:
            assert parent.stdin is not None
            assert parent.stdout is not None
            processes = [psutil.Process(int(number)) for number in parent.stdout.readline().split()]
            assert len(processes) == 2
            parent.stdin.write("\n")
            parent.stdin.flush()
            if "while" in ending:
                parent.kill()
        _, alive = psutil.wait_procs(processes, timeout=30)
        assert alive == []
