"""A confined process as its parent sees it: start, execute, answer queries, and kill it if it exceeds a limit."""

import ctypes.util
import functools
import json
import os
import re
import secrets
import select
import signal
import sys
import time
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from sandboxes.trees.repl.confined_process import LENGTH_DIGITS, MAX_PROMPTS
from sandboxes.trees.repl.launcher import START_SECONDS, ConfinedChild, LauncherError, start_confined


class ReplLimits(NamedTuple):
    """What a REPL may use. If it exceeds a limit, its process is killed and its variables are lost."""

    seconds: float = 30.0
    """CPU time of one execution, which does not depend on the machine's load: of the process, plus what this process
    needs to read its replies and queries, without the episodes of children."""
    memory_bytes: int = 512 * 2**20
    """Address space of the process."""
    message_bytes: int = 4 * 2**20
    """Maximum size of one reply. Longer output is cut."""
    wall_factor: float = 30.0
    """An execution that sleeps ends after this many times `seconds`."""


_ADDRESS = re.compile(r"0x(?:(?<= at 0x)[0-9a-f]{6,}|(?<=\b0x)[0-9a-f]{12})\b")
"""Matches addresses: after " at", or of the length that all addresses have. Other hexadecimal numbers stay."""

Context = str | dict[str, str] | None
"""What a child sees: one text, texts by id, or None for the same as its root."""


class Query(NamedTuple):
    """What an execution asks of child episodes: one prompt and one context each."""

    prompts: tuple[str, ...]
    contexts: tuple[Context, ...]


class Execution(NamedTuple):
    """The end of an execution. final: the answer, if it gave one. is_lost: whether its process was killed."""

    stdout: str
    stderr: str
    final: str | None
    is_lost: bool = False


class _Reply(BaseModel):
    """A reply of the process, and the token of the message that it answers."""

    model_config = ConfigDict(strict=True, extra="forbid")

    token: str
    kind: str


class _ReadyReply(_Reply):
    kind: Literal["ready"]


class _ResultReply(_Reply):
    kind: Literal["result"]
    stdout: str
    stderr: str
    final: str | None


class _QueryReply(_Reply):
    kind: Literal["query"]
    prompts: list[str] = Field(min_length=1, max_length=MAX_PROMPTS)
    contexts: list[Context]


_REPLIES: TypeAdapter[Any] = TypeAdapter(
    Annotated[_ReadyReply | _ResultReply | _QueryReply, Field(discriminator="kind")]
)


class ConfinementError(RuntimeError):
    """This machine cannot confine a process."""


@functools.cache
def _find_library() -> str | None:
    return ctypes.util.find_library("seccomp")


def find_obstacle() -> str:
    """Explain why no code can be confined here, and what to do about it; empty if it can."""
    if not sys.platform.startswith("linux"):
        return "Model-written code is confined by Linux alone: use Linux, or a Linux container."
    if _find_library() is None:
        return "Model-written code is confined by libseccomp, which is missing: sudo apt-get install libseccomp2."
    return ""


class ReplProcess:
    """A Python REPL in a confined process. Its variables persist between executions until it is killed.

    The code is never trusted: every reply of the process is checked, an invalid one counts as exceeding a limit, and
    the process is stopped while no execution runs. What code says about its execution may still be untrue: it can claim
    any output and any final answer, just as it could print and return them. The process ends with this one at the
    latest. may_query: whether the code may call child episodes.

    Raises ConfinementError if this machine cannot confine the process, if the process that starts others has ended, or
    if the texts do not fit into the memory of the process.
    """

    def __init__(self, context: Mapping[str, str], may_query: bool = False, limits: ReplLimits | None = None) -> None:
        if obstacle := find_obstacle():
            raise ConfinementError(obstacle)
        self._context = dict(context)
        self._may_query, self._limits = may_query, limits or ReplLimits()
        self._process: ConfinedChild | None = None
        self._token = ""
        self._cpu_left = self._wall_left = 0.0
        self._start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the process."""
        process, self._process = self._process, None
        if process is not None:
            process.close()

    def execute(self, code: str) -> Execution | Query:
        """Run code until it ends, or until it calls child episodes, whose results `answer` passes back.

        Raises ConfinementError if a new process is needed and does not start.
        """
        if self._process is None:
            self._start()
        self._cpu_left = self._limits.seconds
        self._wall_left = self._limits.seconds * self._limits.wall_factor
        return self._exchange({"kind": "execute", "code": code})

    def answer(self, values: Sequence[str]) -> Execution | Query:
        """Pass back the final answers of the last query's children, one per prompt, and continue."""
        return self._exchange({"kind": "answers", "values": list(values)})

    def refuse(self, problem: str) -> Execution | Query:
        """Raise `problem` in the code as the result of its last query, and continue."""
        return self._exchange({"kind": "problem", "text": problem})

    def _start(self) -> None:
        limits = self._limits
        numbers = [limits.memory_bytes, max(int(min(limits.seconds, 1e6) * 100), 1), limits.message_bytes]
        library = _find_library()
        assert library is not None  # otherwise `find_obstacle` has said so
        try:
            self._process = start_confined(library, numbers)
        except (LauncherError, OSError) as error:
            raise ConfinementError(f"No code can be confined here: {error}") from None
        try:
            self._cpu_left = self._wall_left = START_SECONDS
            reply = self._ask({"kind": "start", "context": self._context, "may_query": self._may_query}, {"ready"})
            if isinstance(reply, str):
                last_line = _read_now(self._process.stderr).decode("utf-8", "replace").strip().rpartition("\n")[2]
                problem = last_line or f"a process did not start in {START_SECONDS:g} seconds"
                raise ConfinementError(f"No code can be confined here: {problem}")
            self._process.send_signal(signal.SIGSTOP)
        except BaseException:
            self.close()
            raise

    def _exchange(self, message: dict[str, Any]) -> Execution | Query:
        reply = self._ask(message, {"query", "result"} if self._may_query else {"result"})
        assert self._process is not None
        if isinstance(reply, str):
            launcher_has_ended = self._process.launcher.has_ended
            self.close()
            if launcher_has_ended:  # then the code is not to blame
                raise ConfinementError("The process that starts confined ones has ended, and all of them with it.")
            with suppress(ConfinementError, OSError):  # the next execution retries
                self._start()
            return Execution("", f"{reply} All variables are lost.", None, is_lost=True)
        # Stopped until the next message: code that forged a reply would continue to run.
        self._process.send_signal(signal.SIGSTOP)
        if isinstance(reply, _QueryReply):
            return Query(tuple(map(_clean, reply.prompts)), tuple(map(_clean, reply.contexts)))
        assert isinstance(reply, _ResultReply)
        return Execution(_clean(reply.stdout), _clean(reply.stderr), _clean(reply.final))

    def _ask(self, message: dict[str, Any], kinds: Container[str]) -> _Reply | str:
        """Send a message and receive a reply of one of these kinds, or describe in a sentence what went wrong."""
        process = self._process
        assert process is not None
        clock = _Clock(process, self._cpu_left, self._wall_left)
        try:
            if _read_now(process.stdout):  # an unsolicited message
                return "RuntimeError: an earlier execution sent what is no message and was ended."
            process.send_signal(signal.SIGCONT)
            self._token = secrets.token_hex(16)
            text = json.dumps({**message, "token": self._token}).encode()
            if not _write(process.stdin, b"%*d" % (LENGTH_DIGITS, len(text)) + text, clock):
                return self._describe_overrun()
            reply = self._receive(process.stdout, clock, kinds)
        except OSError:
            return "RuntimeError: the execution ended the REPL."
        self._cpu_left, self._wall_left = clock.measure_rest()
        # Checked even if it replied before anybody looked, which may take a while on a busy machine.
        return reply if self._cpu_left > 0 else self._describe_overrun()

    def _receive(self, stream: int, clock: "_Clock", kinds: Container[str]) -> _Reply | str:
        content = bytearray()
        while not content.endswith(b"\n"):
            if not clock.wait(stream, select.POLLIN):
                return self._describe_overrun()
            chunk = os.read(stream, 65536)
            if not chunk:
                return "RuntimeError: the execution ended the REPL."
            content += chunk
            if len(content) > self._limits.message_bytes:
                return "MemoryError: the execution sent more than the REPL may and was ended."
        reply = _parse_reply(bytes(content), self._token, kinds)
        return "RuntimeError: the execution sent what is no message and was ended." if reply is None else reply

    def _describe_overrun(self) -> str:
        return f"TimeoutError: the execution took more than {self._limits.seconds:g} seconds and was ended."


def _read_now(stream: int) -> bytes:
    """Read what a stream has available now."""
    with suppress(BlockingIOError):
        return os.read(stream, 65536)
    return b""


class _Clock:
    """Time left of an execution: CPU seconds of the process and of this thread on its behalf, and wall time."""

    def __init__(self, process: ConfinedChild, cpu_seconds: float, wall_seconds: float) -> None:
        self._process = process
        self._cpu_end = process.read_cpu_seconds() + time.thread_time() + cpu_seconds
        self._wall_end = time.monotonic() + wall_seconds

    def measure_rest(self) -> tuple[float, float]:
        """Return the seconds of CPU time and of wall time that are left."""
        cpu_rest = self._cpu_end - self._process.read_cpu_seconds() - time.thread_time()
        return cpu_rest, self._wall_end - time.monotonic()

    def wait(self, stream: int, event: int) -> bool:
        """Wait for an event of a stream, and return whether it came in time."""
        poller = select.poll()  # select cannot handle high descriptor numbers
        poller.register(stream, event)
        # A process of one thread needs no more CPU time than wall time.
        while (seconds := min(*self.measure_rest(), 1e6)) > 0:
            if poller.poll(seconds * 1000):
                return True
        return False


def _write(stream: int, text: bytes, clock: _Clock) -> bool:
    """Write a text to a non-blocking stream, and return whether all of it was accepted in time."""
    rest = memoryview(text)
    while rest:
        if not clock.wait(stream, select.POLLOUT):
            return False
        with suppress(BlockingIOError):
            rest = rest[os.write(stream, rest[:65536]) :]
    return True


def _clean(value: Any) -> Any:
    """Replace lone surrogates, which no tokenizer accepts, and addresses, which would differ from process to process.

    value: a text, texts by id, or None.
    """
    if isinstance(value, dict):
        return {_clean(name): _clean(text) for name, text in value.items()}
    return None if value is None else _ADDRESS.sub("0x0", value).encode("utf-8", "replace").decode("utf-8")


def _parse_reply(content: bytes, token: str, kinds: Container[str]) -> _Reply | None:
    """Parse the reply of the process to the message with `token`; None if invalid."""
    try:
        reply: _Reply = _REPLIES.validate_python(json.loads(content))
    except (ValueError, RecursionError):
        return None
    if reply.token != token or reply.kind not in kinds:
        return None
    return None if isinstance(reply, _QueryReply) and len(reply.prompts) != len(reply.contexts) else reply
