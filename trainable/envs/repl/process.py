"""A confined process as the parent sees it: start, execute, answer queries, and kill on any overrun."""

import ctypes.util
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

_START_SECONDS = 60.0
"""Patience with a new process, on a busy machine too; it takes a tenth of a second."""
_SCRIPT = Path(__file__).with_name("confined_process.py")


class ReplLimits(NamedTuple):
    """What a REPL may use. Beyond any of these, its process is killed and its variables are lost.

    Attributes:
        seconds: wall time of one execution, without the time that its queries take.
        memory_bytes: address space of the process.
        message_bytes: size of one message to the parent.
    """

    seconds: float = 30.0
    memory_bytes: int = 512 * 2**20
    message_bytes: int = 16 * 2**20


class Query(NamedTuple):
    """What an execution asks of child episodes: one prompt and one context for each; a context of None is the own."""

    prompts: tuple[str, ...]
    contexts: tuple[Any, ...]


class Execution(NamedTuple):
    """The end of an execution.

    stdout, stderr: what it printed, and its error. final: the final answer, if it gave one. is_lost: whether the
    process was killed, so that variables are gone.
    """

    stdout: str
    stderr: str
    final: str | None
    is_lost: bool = False


class ConfinementError(RuntimeError):
    """This machine cannot confine a process."""


def find_obstacle() -> str:
    """Why no code can be confined here, as a sentence that says what to do; empty if it can be."""
    if not sys.platform.startswith("linux"):
        return "Model-written code is confined by Linux alone: use Linux, or a Linux container."
    if ctypes.util.find_library("seccomp") is None:
        return "Model-written code is confined by libseccomp, which is missing: sudo apt-get install libseccomp2."
    return ""


class ReplProcess:
    """A Python REPL in a confined process. Its variables persist between executions until it is killed.

    The code is never trusted: every message of the process is checked, and an answer that is none counts as an overrun.

    Args:
        context: texts by id, which the code sees as `context`.
        may_query: whether the code may ask child episodes.
        limits: what the process may use.

    Raises ConfinementError if this machine cannot confine the process.

    Example:
        >>> with ReplProcess({"a": "one two"}) as repl:
        ...     repl.execute("n = len(context['a'].split())")
        ...     repl.execute("n + 1").stdout
        Execution(stdout='', stderr='', final=None, is_lost=False)
        '3\\n'
    """

    def __init__(self, context: Mapping[str, str], may_query: bool = False, limits: ReplLimits | None = None) -> None:
        if obstacle := find_obstacle():
            raise ConfinementError(obstacle)
        self._context, self._may_query, self._limits = dict(context), may_query, limits or ReplLimits()
        self._deadline, self._number = 0.0, 0
        self._start()

    def __enter__(self) -> "ReplProcess":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()

    def execute(self, code: str) -> Execution | Query:
        """Run code until it ends, or until it asks child episodes, whose answers `answer` hands over."""
        self._deadline = time.monotonic() + self._limits.seconds
        return self._exchange({"kind": "execute", "code": code})

    def answer(self, values: Sequence[str]) -> Execution | Query:
        """Hand over the final answers of the children of the last query, and go on."""
        self._deadline = time.monotonic() + self._limits.seconds
        return self._exchange({"kind": "answers", "values": list(values)})

    def refuse(self, problem: str) -> Execution | Query:
        """Raise `problem` in the code as the answer to its last query, and go on."""
        self._deadline = time.monotonic() + self._limits.seconds
        return self._exchange({"kind": "problem", "text": problem})

    def _start(self) -> None:
        cpu_seconds = max(int(self._limits.seconds * 100), 1)
        arguments = (ctypes.util.find_library("seccomp"), self._limits.memory_bytes, cpu_seconds)
        self._process = subprocess.Popen(
            # Isolated from the environment and from site-packages, whose modules would be open to the code.
            [sys.executable, "-I", "-S", "-B", str(_SCRIPT), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env={"PYTHONHASHSEED": "0"},
            cwd="/",
            start_new_session=True,
        )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._deadline = time.monotonic() + _START_SECONDS
        self._send({"kind": "start", "context": self._context, "may_query": self._may_query})
        if isinstance(self._receive({"ready"}), str):
            self.close()
            raise ConfinementError(
                "The kernel of this machine does not filter system calls (seccomp), so nothing confines model-written "
                "code."
            )

    def _exchange(self, message: dict[str, Any]) -> Execution | Query:
        self._send(message)
        reply = self._receive({"query", "result"} if self._may_query else {"result"})
        if isinstance(reply, str):
            self.close()
            self._start()
            return Execution("", f"{reply} All variables are lost.", None, is_lost=True)
        if reply["kind"] == "query":
            return Query(tuple(map(_clean, reply["prompts"])), tuple(reply["contexts"]))
        final = reply["final"]
        return Execution(_clean(reply["stdout"]), _clean(reply["stderr"]), None if final is None else _clean(final))

    def _send(self, message: dict[str, Any]) -> None:
        """Send a message; if the process has gone, `_receive` finds out."""
        assert self._process.stdin is not None
        self._number += 1
        text = memoryview(json.dumps({**message, "number": self._number}).encode() + b"\n")
        try:
            while text:
                _, writable, _ = select.select([], [self._process.stdin], [], max(self._deadline - time.monotonic(), 0))
                if not writable:
                    return
                text = text[os.write(self._process.stdin.fileno(), text[:65536]) :]
        except OSError:
            return

    def _receive(self, kinds: Container[str]) -> dict[str, Any] | str:
        """The reply of the process, of one of these kinds, or what was wrong with it, as a sentence."""
        assert self._process.stdout is not None
        content = bytearray()
        while not content.endswith(b"\n"):
            seconds = self._deadline - time.monotonic()
            if seconds <= 0 or not select.select([self._process.stdout], [], [], seconds)[0]:
                return f"TimeoutError: the execution took more than {self._limits.seconds:g} seconds and was ended."
            chunk = os.read(self._process.stdout.fileno(), 65536)
            if not chunk:
                return "RuntimeError: the execution ended the REPL."
            content += chunk
            if len(content) > self._limits.message_bytes:
                return "MemoryError: the execution sent more than the REPL may and was ended."
        # A reply to an earlier message is what was left behind one that the code had forged.
        message = _parse_message(bytes(content), self._number, kinds)
        return message if message is not None else "RuntimeError: the execution sent what is no message and was ended."


def _clean(text: str) -> str:
    """Text without halves of surrogate pairs, which no file and no tokenizer takes."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _parse_message(content: bytes, number: int, kinds: Container[str]) -> dict[str, Any] | None:
    """The reply of the process to message `number`, checked in all its fields; None if it is none."""
    try:
        message = json.loads(content)
    except (ValueError, RecursionError):
        return None
    if not isinstance(message, dict) or message.pop("number", None) != number:
        return None
    kind = message.get("kind")
    return message if isinstance(kind, str) and kind in kinds and _is_valid(message) else None


def _is_valid(message: Mapping[str, Any]) -> bool:
    if message["kind"] == "ready":
        return message.keys() == {"kind"}
    if message["kind"] == "query":
        prompts, contexts = message.get("prompts"), message.get("contexts")
        return (
            message.keys() == {"kind", "prompts", "contexts"}
            and isinstance(prompts, list)
            and isinstance(contexts, list)
            and len(prompts) == len(contexts) > 0
            and all(isinstance(prompt, str) for prompt in prompts)
        )
    return (
        message.keys() == {"kind", "stdout", "stderr", "final"}
        and isinstance(message["stdout"], str)
        and isinstance(message["stderr"], str)
        and isinstance(message["final"], str | None)
    )
