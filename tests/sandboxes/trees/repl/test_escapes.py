"""Known ways out of a Python sandbox, tried by code that has everything that the confined process has.

The restricted builtins of the REPL are no boundary, so every attempt first takes what they hide: the modules of the
process, by a walk over the subclasses of `object`. What stops it is the kernel, a limit, or the parent.
"""

import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from sandboxes.trees.repl.confined_process import __file__ as SCRIPT_FILE
from sandboxes.trees.repl.process import Execution, Query, ReplLimits, ReplProcess, find_obstacle

pytestmark = pytest.mark.skipif(bool(find_obstacle()), reason=find_obstacle())

WALK = """
classes = ().__class__.__base__.__subclasses__()
posix = [c for c in classes if c.__name__ == '_wrap_close'][0].__init__.__globals__
modules = posix['sys'].modules
os, sys, ctypes = modules['os'], modules['sys'], modules['ctypes']
libc = ctypes.CDLL(None, use_errno=True)
opener = modules['builtins'].open
importer = modules['builtins'].__import__
"""
SCRIPT = Path(SCRIPT_FILE)
SECRET = "the secret of this test"
LIMITS = ReplLimits(seconds=1, memory_bytes=400 * 2**20, message_bytes=4 * 2**20, wall_factor=5)

FILE = {
    "open a file by its path": "opener({secret!r}).read()",
    "open with os.open": "os.read(os.open({secret!r}, 0), 100)",
    "open with a raw system call": "path = {secret!r}.encode()\n"
    "print(libc.syscall(2, path, 0), libc.syscall(257, -100, path, 0))",
    "write a file": "opener({canary!r}, 'w').write('x')",
    "make a folder": "os.mkdir({canary!r})",
    "make a link": "os.symlink({secret!r}, {canary!r})",
    "delete a file": "os.unlink({secret!r})",
    "rename a file": "os.rename({secret!r}, {canary!r})",
    "list a folder": "os.listdir({folder!r})",
    "ask for the size of a file": "os.stat({secret!r}).st_size",
    "ask whether a file exists": "print(-1 if not os.path.exists({secret!r}) else 'there')",
    "ask with a raw system call": "path, room = {secret!r}.encode(), ctypes.create_string_buffer(256)\n"
    "print(libc.syscall(4, path, room), libc.syscall(262, -100, path, room, 0), libc.syscall(21, path, 0))",
    "ask for the working folder": "os.getcwd()",
    "read the environment of the parent": "opener('/proc/%d/environ' % os.getppid()).read()",
    "change the working folder": "os.chdir({folder!r})",
    "open with io_uring": "print(libc.syscall(425, 4, ctypes.create_string_buffer(256)))",
}
PROCESS = {
    "a shell": "os.system('echo x > {canary}')",
    "popen": "os.popen('echo x > {canary}').read()",
    "fork": "pid = os.fork()\nif pid == 0:\n    opener({canary!r}, 'w')",
    "fork with a raw system call": "print(libc.syscall(57), libc.syscall(58), libc.syscall(56, 17, 0, 0, 0, 0))",
    "exec": "os.execv('/bin/sh', ['sh', '-c', 'echo x > {canary}'])",
    "posix_spawn": "os.posix_spawn('/bin/sh', ['sh', '-c', 'echo x > {canary}'], {{}})",
    "import subprocess": "importer('subprocess').run(['touch', {canary!r}])",
    "a thread": "importer('_thread').start_new_thread(print, ())",
    "a fork bomb": "while True:\n    os.fork()",
    "run code that it wrote to memory": "code = ctypes.create_string_buffer(b'\\xc3')\n"
    "ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(code))()",
    "make memory executable": "import_ = importer('mmap')\nimport_.mmap(-1, 4096, prot=7)",
    "new namespaces": "print(libc.unshare(0x10000000))",
}
NETWORK = {
    "a socket": "importer('_socket').socket()",
    "a socket by a raw system call": "print(libc.syscall(41, 2, 1, 0))",
    "a connection": "importer('socket').create_connection(('127.0.0.1', {port}))",
    "a local socket": "print(libc.syscall(41, 1, 1, 0), libc.syscall(53, 1, 1, 0, ctypes.create_string_buffer(8)))",
    "a name": "importer('socket').getaddrinfo('example.com', 80)",
    "urllib": "importer('urllib.request').request.urlopen('http://127.0.0.1:{port}/')",
}
SIGNALS = {
    "end the parent": "os.kill(os.getppid(), 15)",
    "end all processes": "os.kill(-1, 9)",
    "end the group": "os.killpg(0, 9)",
    "signal a thread by a raw system call": "print(libc.syscall(234, {pid}, {pid}, 10))\n"
    "print(libc.syscall(129, {pid}, 10, 0))",
    "trace the parent": "print(libc.ptrace(16, {pid}, 0, 0))",
    "read the memory of the parent": "print(libc.syscall(310, {pid}, 0, 1, 0, 1, 0))",
    "write the memory of the parent": "print(libc.syscall(311, {pid}, 0, 1, 0, 1, 0))",
    "limit the parent": "print(libc.syscall(302, {pid}, 7, ctypes.create_string_buffer(16), 0))",
    "ask the clock of the parent": "room = ctypes.create_string_buffer(16)\n"
    "print(libc.syscall(228, (~{pid} << 3) | 2, room), libc.syscall(229, (~{pid} << 3) | 2, room))",
    "ask for a process by a lock": "word = ctypes.c_uint32({pid})\n"
    "print(*(libc.syscall(202, ctypes.byref(word), call, 0, 0, 0, 0) for call in (6, 13)))",
    "take memory from the host": "print(libc.madvise(ctypes.c_void_p(0), 4096, 100), libc.mlockall(3))",
    "huge pages, and memory at a place of its choice": "libc.mmap.restype = ctypes.c_ssize_t\n"
    "place = ctypes.c_void_p(libc.mmap(None, 2**22, 3, 0x22, -1, 0))\n"
    "print(*(libc.madvise(place, 4096, advice) for advice in (8, 14, 21)))\n"
    "libc.mremap.restype = ctypes.c_ssize_t\n"
    "print(libc.mremap(place, 4096, 4096, 3, ctypes.c_void_p(place.value + 2**21)), libc.mremap(place, 0, 4096, 5))",
    "share memory": "libc.mmap.restype = ctypes.c_ssize_t\n"
    "print(libc.mmap(None, 4096, 3, 0x21, -1, 0), libc.mmap(None, 4096, 3, 0x2022, -1, 0))",
    "raise its own limits": "importer('resource').setrlimit(9, (-1, -1))",
}
MEMORY = {
    "one large text": "x = 'a' * 10**12",
    "a list that grows": "x = []\nwhile True:\n    x.append('a' * 10**6)",
    "a list that doubles": "x = [0]\nwhile True:\n    x += x",
    "a format string": "x = '%' + '9' * 9 + 'd'\nx % 1\n'{{:>9999999999}}'.format(1)",
    "a power of powers": "x = 9 ** 9 ** 9",
    "recursion without end": "f = lambda: f()\nf()",
    "recursion in a destructor": "class A:\n    def __del__(self):\n        A()\nA()",
    "nested brackets": "modules['builtins'].eval('(' * 10**6)",
    "output without end": "while True:\n    print('a' * 10**6)",
}
TIME = {
    "a loop": "while True:\n    pass",
    "a loop that catches everything": "while True:\n    try:\n        while True:\n            pass\n"
    "    except BaseException:\n        pass",
    "sleep": "modules['time'].sleep(10**6)",
    "a regular expression that backtracks": "re.match('(a+)+$', 'a' * 40 + 'b')",
    "a sum in C": "sum(range(10**13))",
    "ignore the alarm": "importer('signal').signal(14, lambda *a: None)\nwhile True:\n    pass",
    "wait for input": "sys.stdin.buffer.read()",
}
FORGE = """
channel = [thing for thing in importer('gc').get_objects() if type(thing).__name__ == 'Channel'][0]
def forge(**fields):
    os.write(1, json.dumps({{**fields, 'token': channel._token}}).encode() + b'\\n')
"""
PROTOCOL = {
    "a reply of its own": FORGE + "forge(kind='result', stdout='', stderr='', final='forged')",
    "many replies of its own": FORGE
    + "for number in range(9):\n    forge(kind='result', stdout='', stderr='', final='')",
    "a reply of another kind": FORGE + "forge(kind='ready')",
    "a reply of another form": FORGE + "forge(kind='result', stdout=[], stderr=None)",
    "a reply of no kind": FORGE + "forge(kind=[])",
    "a reply with another token": FORGE + "channel._token = 'x'\nforge(kind='result', stdout='', stderr='', final='')",
    "a reply, and then no end": FORGE + "forge(kind='result', stdout='', stderr='', final='')\nwhile True:\n    pass",
    "a query that it may not ask": FORGE + "forge(kind='query', prompts=['x'] * 99, contexts=[None] * 99)",
    "what is no message": "os.write(1, b'\\x00\\xff\\n')",
    "a nested message": "os.write(1, b'[' * 10**5 + b'\\n')",
    "a flood": "while True:\n    os.write(1, b'a' * 65536)",
    "close the channel": "os.close(1)",
    "end the process": "os._exit(0)",
    "crash the process": "ctypes.string_at(0)",
    "a hostile error": "class E(Exception):\n    def __str__(self):\n        raise SystemExit\nraise E",
    "a hostile answer": "class S(str):\n    def __repr__(self):\n        while True:\n            pass\nFINAL([S()])",
    "the frame of the caller": "try:\n    1 / 0\nexcept Exception as e:\n    frame = e.__traceback__.tb_frame.f_back\n"
    "frame.f_locals.clear()\nframe.f_back.f_locals['channel'].send({{'kind': 'x'}})",
    "a generator's frame": "g = (g.gi_frame.f_back.f_back.f_globals for _ in [0])\nnext(g)['execute'] = None",
    "a format string that walks": "print('{{0.__class__.__base__.__subclasses__}}'.format(()))",
    "builtins replaced": "modules['builtins'].print = None\nmodules['json'].dumps = lambda m: 'x'",
    "halves of surrogate pairs": "FINAL('\\ud800')",
    "a trace function": "sys.settrace(lambda *a: 1 / 0)",
    "an exit handler": "importer('atexit').register(print, 'x')\nmodules['builtins'].exit()",
}
CLASSES = {
    "file": FILE, "process": PROCESS, "network": NETWORK, "signals": SIGNALS, "memory": MEMORY, "time": TIME,
    "protocol": PROTOCOL,
}  # fmt: skip
ESCAPES = [(kind, name, code) for kind, escapes in CLASSES.items() for name, code in escapes.items()]


class Surroundings(NamedTuple):
    """What an escape would reach: a secret file, a path that must stay free, a server at a port."""

    secret: Path
    canary: Path
    server: socket.socket

    def fill(self, code: str) -> str:
        """The code with the places of this machine."""
        places = {"secret": str(self.secret), "canary": str(self.canary), "folder": str(self.secret.parent)}
        return WALK + code.format(**places, port=self.server.getsockname()[1], pid=os.getpid())

    def is_visited(self) -> bool:
        """Whether somebody has connected to the server."""
        return bool(select.select([self.server], [], [], 0)[0])


@pytest.fixture
def surroundings(tmp_path: Path) -> Iterator[Surroundings]:
    (tmp_path / "secret").write_text(SECRET)
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield Surroundings(tmp_path / "secret", tmp_path / "canary", server)


@pytest.fixture
def signals() -> Iterator[list[int]]:
    """The signals that this process gets."""
    received: list[int] = []
    numbers = (signal.SIGTERM, signal.SIGUSR1)
    handlers = [signal.signal(number, lambda number, frame: received.append(number)) for number in numbers]
    yield received
    for number, handler in zip(numbers, handlers, strict=True):
        signal.signal(number, handler)


def wait_until(has_happened: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 30
    while not has_happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return True


def has_ended(process: psutil.Process) -> bool:
    """Whether a process has ended, even if its parent has not waited for it yet."""
    with suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_ZOMBIE
    return True


def get_process(repl: ReplProcess) -> psutil.Process:
    # Not the only child of this process: where tests run in parallel, others have left theirs.
    return psutil.Process(repl._process.pid)


def list_live_children() -> set[int]:
    """The ids of all processes below this one that have not ended."""
    return {process.pid for process in psutil.Process().children(recursive=True) if not has_ended(process)}


def iter_cases() -> Iterator[Any]:
    """Every escape; of those that run until a limit ends them, the first of each class in every CI."""
    seen_kinds = set()
    for kind, name, code in ESCAPES:
        is_slow = kind in ("memory", "time") and kind in seen_kinds
        seen_kinds.add(kind)
        yield pytest.param(kind, name, code, id=f"{kind}: {name}", marks=[pytest.mark.slow] * is_slow)


@pytest.mark.long
@pytest.mark.parametrize(("kind", "name", "code"), list(iter_cases()))
def test_an_escape_ends_in_an_observation(
    surroundings: Surroundings, signals: list[int], kind: str, name: str, code: str
) -> None:
    with ReplProcess({"a": "one"}):  # the process that starts the others exists from here on
        pass
    processes = list_live_children()
    limits_before = psutil.Process().rlimit(psutil.RLIMIT_NOFILE)
    with ReplProcess({"a": "one"}, limits=LIMITS) as repl:
        started_at = time.monotonic()
        outcome = repl.execute(surroundings.fill(code))
        after = repl.execute("1 + 1")
        # Whatever it did to its own process, the REPL goes on, at once or in a new process.
        after = repl.execute("1 + 1") if isinstance(after, Execution) and after.is_lost else after
        seconds = time.monotonic() - started_at
        new_processes = list_live_children() - processes
    if kind in ("file", "process", "network", "signals"):
        # It raised an error, or a raw call returned -1, or a shell could not be started.
        assert outcome.is_lost or outcome.stderr or set(outcome.stdout.split()) <= {"-1", "32512"}, outcome
    assert SECRET not in outcome.stdout + outcome.stderr + str(outcome.final)
    assert len(new_processes) == 1  # the REPL itself
    assert surroundings.secret.read_text() == SECRET
    assert sorted(path.name for path in surroundings.secret.parent.iterdir()) == ["secret"]
    assert not surroundings.is_visited()
    assert signals == []
    assert psutil.Process().rlimit(psutil.RLIMIT_NOFILE) == limits_before
    assert seconds < 60
    if name not in ("builtins replaced", "a generator's frame", "a trace function"):  # these hurt their own REPL
        assert after == Execution("2\n", "", None)


CONTROLS = {
    "read": ("print(opener({secret!r}).read())", lambda text, place: SECRET in text),
    "write": (FILE["write a file"], lambda text, place: place.canary.exists()),
    "shell": (PROCESS["a shell"], lambda text, place: place.canary.exists()),
    "connect": (NETWORK["a connection"], lambda text, place: place.is_visited()),
}


@pytest.mark.parametrize("name", CONTROLS)
def test_without_the_confinement_an_escape_succeeds(surroundings: Surroundings, name: str) -> None:
    """Otherwise the tests above would pass because the code does nothing."""
    code, has_escaped = CONTROLS[name]
    script = f"import re, json, subprocess, os, ctypes\n{surroundings.fill(code)}"
    process = subprocess.run([sys.executable, "-I", "-S", "-c", script], capture_output=True, text=True)
    assert has_escaped(process.stdout, surroundings), process.stderr


FORGE_CODE = (WALK + FORGE).replace("{{", "{").replace("}}", "}")


def test_queries_and_values_cross_as_data() -> None:
    with ReplProcess({}, may_query=True) as repl:
        assert repl.execute("rlm_query('\\ud800', {'a': '\\ud800'})") == Query(("?",), ({"a": "?"},))
        assert repl.refuse("no") == Execution("", "ValueError: no\n", None)
        for context in ("print", "[1]", "{'a': [1, None]}", "{1: 'a'}", "1.5"):
            stderr = repl.execute(f"rlm_query('x', {context})").stderr
            assert "a context is None for all papers, a text, or a dictionary of texts by id" in stderr
        for prompts, contexts in (("['x']", "[[1]]"), ("['x'] * 99", "[None] * 99"), ("[]", "[]")):
            forged = f"forge(kind='query', prompts={prompts}, contexts={contexts})"
            assert repl.execute(FORGE_CODE + forged).is_lost
    # Nothing that comes from the process is unpickled, imported or called: an answer is a text.
    with ReplProcess({}) as repl:
        final = repl.execute("class A:\n    def __reduce__(self):\n        return (print, ('x',))\nFINAL(A())").final
        assert type(final) is str
        assert "A object at" in final


def test_the_parent_waits_for_nobody() -> None:
    """The code reads away the answer to a query that it has forged: what the parent writes finds no reader."""
    code = "forge(kind='query', prompts=['x'], contexts=[None])\nos.read(0, 4096)\nmodules['time'].sleep(10**6)"
    with ReplProcess({}, may_query=True, limits=LIMITS._replace(seconds=0.3, wall_factor=1)) as repl:
        assert isinstance(repl.execute(FORGE_CODE + code), Query)
        outcome = repl.answer(["x" * 3_000_000])
        assert "TimeoutError" in outcome.stderr


def test_code_does_not_run_between_executions_and_gives_no_reply_in_advance() -> None:
    code = "forge(kind='result', stdout='', stderr='', final='claimed')\nwhile True:\n    pass"
    with ReplProcess({}, limits=LIMITS) as repl:
        # What an execution says of itself it may invent; it does not go on after that.
        claimed = repl.execute(FORGE_CODE + code)
        assert claimed == Execution("", "", "claimed")
        process = get_process(repl)
        wait_until(lambda: process.status() == psutil.STATUS_STOPPED)
        used = sum(process.cpu_times()[:2])
        time.sleep(0.1)
        assert sum(process.cpu_times()[:2]) == used
    code = "for final in ('first', 'second'):\n    forge(kind='result', stdout='', stderr='', final=final)"
    with ReplProcess({}, limits=LIMITS) as repl:
        repl.execute(FORGE_CODE + code)
        outcome = repl.execute("1 / 0")
        assert outcome.final is None
        assert outcome.is_lost or "ZeroDivisionError" in outcome.stderr


def test_the_process_has_no_variable_and_no_right_of_the_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "a key")
    with ReplProcess({}) as repl:
        stdout = repl.execute(WALK + "print(json.dumps(dict(os.environ)))").stdout
        environment = json.JSONDecoder().raw_decode(stdout)[0]
        assert set(environment) <= {"PYTHONHASHSEED", "LC_CTYPE"}
        status = Path(f"/proc/{get_process(repl).pid}/status").read_text()
        assert "Seccomp:\t2\n" in status
        assert "CapEff:\t0000000000000000\n" in status
        assert "a key" not in stdout
        # The kernel ends REPLs before the trial.
        process = get_process(repl)
        scores = [int(Path(f"/proc/{pid}/oom_score_adj").read_text()) for pid in (process.pid, process.ppid())]
    assert scores == [1000, 900]
    assert int(Path("/proc/self/oom_score_adj").read_text()) < 900


def test_without_the_filter_no_file_can_be_opened_either(tmp_path: Path) -> None:
    """Landlock is a second boundary, for a system call that the filter would allow by mistake."""
    if ctypes.CDLL(None).syscall(444, None, 0, 1) < 1:
        pytest.skip("this kernel has no Landlock, or it is switched off")
    (tmp_path / "secret").write_text(SECRET)
    attempts = ["open('secret').read()", "open('new', 'w')", "os.listdir('.')"]
    for rights in ("", "drop_rights()"):
        script = (
            f"import os, sys\nsys.path.insert(0, {str(SCRIPT.parent)!r})\n"
            f"from confined_process import drop_rights\n{rights}\n"
            f"for attempt in {attempts}:\n    try:\n        print(eval(attempt))\n"
            "    except PermissionError:\n        print('refused')"
        )
        process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path)
        assert (process.stdout.split("\n")[:-1] == ["refused"] * 3) is bool(rights), process.stderr
