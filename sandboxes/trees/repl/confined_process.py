"""Confined processes that run model-written code, and the process that forks them: a script started by `process.py`.

The script imports only the standard library, and everything that a confined process needs before it is confined:
afterwards the kernel refuses all system calls except those of a computation (libseccomp with an allow-list). Messages
are JSON on standard input, each preceded by its length, and lines of JSON on standard output; the parent trusts none of
them.

Messages from the parent have a random token, which the reply repeats: {"kind": "start", "context": {...}, "may_query":
bool}, {"kind": "execute", "code": "..."}, and after a query {"kind": "answers", "values": [...]} or
{"kind": "problem", "text": "..."}.
Replies: {"kind": "ready"}, {"kind": "query", "prompts": [...], "contexts": [...]} and
{"kind": "result", "stdout": "...", "stderr": "...", "final": "..." or null}.
"""

import ast
import builtins
import contextlib
import ctypes
import errno
import gc
import io
import itertools
import json
import math
import os
import re
import resource
import select
import signal
import socket
import sys
import textwrap
import traceback
import warnings
from collections import Counter

ALLOWED_CALLS = (
    # Streams that are already open.
    "read", "write", "close", "lseek",
    # Memory, but not executable memory: see `list_conditions`.
    "brk", "munmap",
    # Signals of this process only.
    "rt_sigaction", "rt_sigprocmask", "rt_sigreturn", "sigaltstack", "restart_syscall", "rseq",
    # Random numbers, scheduling, time.
    "getrandom", "sched_yield", "gettimeofday",
    # Ending itself.
    "exit", "exit_group",
)  # fmt: skip
"""System calls that a computation needs. All others, for files, processes, sockets or signals, fail with EPERM."""
MAX_PROMPTS = 64
"""Maximum number of prompts of one query; the limits of an episode are lower."""
LENGTH_DIGITS = 10
"""Number of digits of the length in bytes that precedes each message from the parent."""
_MAX_FILES = 64
"""Limit on open files of the process that forks the others, which needs ten."""
BUILTIN_NAMES = (
    "__build_class__",
    "abs", "all", "any", "ascii", "bin", "bool", "bytearray", "bytes", "callable", "chr", "complex", "dict", "dir",
    "divmod", "enumerate", "filter", "float", "format", "frozenset", "getattr", "hasattr", "hash", "hex", "id", "int",
    "isinstance", "issubclass", "iter", "len", "list", "map", "max", "min", "next", "object", "oct", "ord", "pow",
    "print", "range", "repr", "reversed", "round", "set", "slice", "sorted", "str", "sum", "tuple", "type", "zip",
    "ArithmeticError", "AssertionError", "AttributeError", "BaseException", "Exception", "IndexError", "KeyError",
    "LookupError", "NameError", "NotImplementedError", "OverflowError", "RuntimeError", "StopIteration", "TypeError",
    "ValueError", "ZeroDivisionError",
)  # fmt: skip
"""What the published REPL offers, without import, open, eval and exec. This is a language, not a security boundary."""


class FinalAnswer(BaseException):
    """Ends the execution; a BaseException, so that `except Exception` does not catch it. `Tools` keeps the answer."""


def limit_resources(memory_bytes: int, cpu_seconds: int) -> None:
    """Limit memory, CPU time and processes, and forbid writing to files."""
    limits = {"AS": memory_bytes, "CPU": cpu_seconds, "FSIZE": 0, "CORE": 0, "NOFILE": 3, "NPROC": 0}
    for name, value in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))


def end_with_parent(parent_id: int) -> None:
    """Make the kernel kill this process when its parent ends."""
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_id:  # it has already ended
        os._exit(0)


def rank_for_killing(score: int) -> None:
    """Set the score by which the kernel chooses processes to kill when memory is short: 1000 before 0."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write(str(score))


def drop_rights() -> None:
    """Drop the capabilities of root, for users who run studies as root, and deny all files with Landlock.

    The system-call filter alone already denies files; this guards against a call that it should not have allowed. Other
    processes of the same user cannot read this one's memory.
    """
    header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()  # _LINUX_CAPABILITY_VERSION_3
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.capset(header, sets):
        raise OSError(ctypes.get_errno(), "the capabilities of this process cannot be dropped")
    set_dumpable, set_no_new_privileges = 4, 38
    libc.prctl(set_dumpable, 0, 0, 0, 0)
    libc.prctl(set_no_new_privileges, 1, 0, 0, 0)  # otherwise Landlock takes no rules
    create_ruleset, restrict_self = 444, 446  # on every processor
    all_accesses = ctypes.c_uint64(0x1FFF)
    rules = libc.syscall(create_ruleset, ctypes.byref(all_accesses), 8, 0)
    if rules >= 0:  # Linux 5.13 or newer, where Landlock is enabled
        libc.syscall(restrict_self, rules, 0)
        os.close(rules)


def confine(library: ctypes.CDLL) -> None:
    """Restrict the process permanently to the system calls of a computation. Raise OSError if the kernel cannot."""
    pointer, number, size = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint
    library.seccomp_init.restype, library.seccomp_init.argtypes = pointer, [number]
    library.seccomp_syscall_resolve_name.argtypes = [ctypes.c_char_p]
    library.seccomp_load.argtypes = [pointer]
    # Takes the comparisons as an array: the other variant is variadic.
    library.seccomp_rule_add_array.argtypes = [pointer, number, ctypes.c_int, size, ctypes.POINTER(_Comparison)]
    deny_with_eperm, allow = 0x00050000 | errno.EPERM, 0x7FFF0000
    rules = ctypes.c_void_p(library.seccomp_init(deny_with_eperm))
    if not rules:
        raise OSError(errno.ENOSYS, "libseccomp could not start")
    for name, comparisons in [*((name, ()) for name in ALLOWED_CALLS), *list_conditions()]:
        call = library.seccomp_syscall_resolve_name(name.encode())
        if call < 0:  # this processor does not have the call
            continue
        array = (_Comparison * len(comparisons))(*comparisons) if comparisons else None
        if error := library.seccomp_rule_add_array(rules, allow, call, len(comparisons), array):
            raise OSError(-error, f"libseccomp refuses the rule for {name}")
    if error := library.seccomp_load(rules):
        raise OSError(-error, "the kernel does not filter system calls")
    with contextlib.suppress(PermissionError):  # a library that only pretends must not run code
        os.stat("/")
        raise OSError(errno.ENOSYS, "the filter of system calls is loaded and refuses nothing")


class _Comparison(ctypes.Structure):
    """struct scmp_arg_cmp of libseccomp."""

    _fields_ = (("arg", ctypes.c_uint), ("op", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64))


def list_conditions() -> list[tuple[str, tuple[_Comparison, ...]]]:
    """List the calls that are allowed with certain arguments only, one entry per alternative."""
    less_or_equal, equal, masked_equal = 3, 4, 7
    not_executable = _Comparison(2, masked_equal, 4, 0)  # PROT_EXEC
    # Neither locked in memory nor shared: leaves MAP_PRIVATE, ANONYMOUS, NORESERVE, STACK and FIXED.
    private = _Comparison(3, masked_equal, 0xFFFFFFFF & ~(0x02 | 0x10 | 0x20 | 0x4000 | 0x20000), 0)
    own_clock = _Comparison(0, less_or_equal, 11, 0)  # the clocks of other processes have larger numbers
    advice = (4, 15)  # DONTNEED, NOHUGEPAGE
    waits = (0, 1, 9, 10)  # WAIT, WAKE, and both with a bit set
    command_mask = 0xFFFFFFFF & ~(0x80 | 0x100)  # without PRIVATE and CLOCK_REALTIME
    return [
        ("mmap", (not_executable, private)),
        ("mprotect", (not_executable,)),
        ("mremap", (_Comparison(3, equal, 1, 0),)),  # MAYMOVE: what realloc asks for
        *(("madvise", (_Comparison(2, equal, number, 0),)) for number in advice),
        *(("futex", (_Comparison(1, masked_equal, command_mask, number),)) for number in waits),
        *((name, (own_clock,)) for name in ("clock_gettime", "clock_getres", "clock_nanosleep")),
        ("nanosleep", ()),
    ]


class Channel:
    """Messages to and from the parent, on streams other than the sys.stdin and sys.stdout that code sees."""

    def __init__(self) -> None:
        self._input, self._output = os.fdopen(0, "rb", closefd=False), os.fdopen(1, "wb", buffering=0, closefd=False)
        self._token: object = None

    def receive(self) -> dict[str, object]:
        """Receive the next message. The process ends if the parent is gone."""
        # Always read in two pieces: otherwise the addresses of later objects would depend on what arrives at once.
        length = self._input.read(LENGTH_DIGITS)
        if not length:
            os._exit(0)
        message: dict[str, object] = json.loads(self._input.read(int(length)))
        self._token = message["token"]
        return message

    def send(self, message: dict[str, object]) -> None:
        """Send the reply to the last message."""
        text = memoryview(json.dumps({**message, "token": self._token}).encode() + b"\n")
        while text:
            text = text[self._output.write(text) :]


class Tools:
    """What the code may call. message_bytes: maximum size of a message. namespace: the variables of the code."""

    def __init__(self, context: dict[str, str], may_query: bool, channel: Channel, message_bytes: int) -> None:
        self.context, self._channel, self._message_bytes = context, channel, message_bytes
        self._numbered_objects: dict[int, tuple[int, object]] = {}
        self.answers: list[str] = []
        names = {name: getattr(builtins, name) for name in BUILTIN_NAMES}
        names |= {"id": self._number_object, "hash": self._compute_hash}
        modules = {"re": re, "math": math, "json": json, "itertools": itertools, "Counter": Counter}
        tools = (self.list_papers, self.search, self.get_paper_abstract, self.extract_section, self.SHOW_VARS)
        queries = (self.rlm_query, self.rlm_query_batched) if may_query else ()
        self.namespace: dict[str, object] = {"__builtins__": names, "__name__": "repl", "context": self.context}
        self.namespace |= modules
        self.namespace |= {tool.__name__: tool for tool in (*tools, *queries, self.FINAL, self.FINAL_VAR)}
        self._first_values = dict(self.namespace)

    def _number_object(self, value: object, /) -> int:
        """Number each object, in place of `id`; that they are stored keeps others from getting their address."""
        return self._numbered_objects.setdefault(id(value), (len(self._numbered_objects) + 1, value))[0]

    def _compute_hash(self, value: object, /) -> int:
        """Compute `hash`, but number objects whose hash is their address."""
        is_nan = isinstance(value, float) and math.isnan(value)
        return self._number_object(value) if is_nan or type(value).__hash__ is object.__hash__ else hash(value)

    def list_papers(self) -> list[str]:
        """List the ids of all papers."""
        return list(self.context)

    def search(self, text: str, keyword: str, window: int = 300) -> list[str]:
        """Find each occurrence of `keyword` in `text`, ignoring case, with `window` characters around it."""
        half, words = max(int(window), 0) // 2, str(keyword)
        places = (match.start() for match in re.finditer(re.escape(words), str(text), re.IGNORECASE)) if words else ()
        return [str(text)[max(place - half, 0) : place + len(words) + half] for place in places]

    def get_paper_abstract(self, paper_id: str) -> str:
        """Return a paper's abstract, up to an empty line; without one, the first paragraph that is not a heading."""
        text = self.context[paper_id]
        if match := re.search(r"^[#\s]*abstract\s*[:.]?[ \t]*(.*?)(?:\n\s*\n|\Z)", text, re.I | re.M | re.S):
            return match[1].strip()
        paragraphs = (block.strip() for block in re.split(r"\n\s*\n", text))
        return next((block for block in paragraphs if block and not block.startswith("#")), "")

    def extract_section(self, paper_id: str, section: str) -> str:
        """Return the text of a paper's section with the heading `section`; empty if it has none.

        A heading is a line that begins with #, one that ends in a colon after an empty line, or one that equals
        `section`, each with or without a number. A section ends at the next heading of its level or above.
        """
        wanted, lines, level, is_after_gap = str(section).strip().lower(), list[str](), 0, True
        for line in self.context[paper_id].splitlines():
            marks = len(line) - len(line.lstrip("#"))
            title = re.sub(r"^[\d.]+\s+", "", line.strip("# \t").removesuffix(":")).lower()
            has_colon = is_after_gap and line.rstrip().endswith(":")
            is_heading = bool(title) and (marks > 0 or title == wanted or has_colon)
            is_after_gap = not line.strip()
            if is_heading and level and (marks or 1) <= level:
                break
            if level:
                lines.append(line)
            elif is_heading and title == wanted:
                level = marks or 1
        return "\n".join(lines).strip()

    def SHOW_VARS(self) -> dict[str, str]:
        """List the variables that the code has set, with their types."""
        return {
            name: type(value).__name__
            for name, value in self.namespace.items()
            if value is not self._first_values.get(name, self) and not name.startswith("_")
        }

    def rlm_query(self, prompt: str, context: object = None) -> object:
        """Ask a child episode and return its final answer. context: what the child sees; None for all papers."""
        return self.rlm_query_batched([prompt], [context])[0]

    def rlm_query_batched(self, prompts: list[str], context_list: list[object] | None = None) -> list[object]:
        """Ask one child episode per prompt and return their final answers in order. Problems raise ValueError."""
        prompt_list = [str(prompt) for prompt in prompts]
        contexts = list(context_list) if context_list is not None else [None] * len(prompt_list)
        if not prompt_list:
            return []
        if len(contexts) != len(prompt_list):
            raise ValueError(f"{len(prompt_list)} prompts and {len(contexts)} contexts: give one context per prompt")
        for context in contexts:
            texts = [*context, *context.values()] if isinstance(context, dict) else [context]
            if context is not None and not all(isinstance(text, str) for text in texts):
                raise ValueError("a context is None for all papers, a text, or a dictionary of texts by id")
        max_bytes = self._message_bytes // 2
        if len(prompt_list) > MAX_PROMPTS or len(json.dumps([prompt_list, contexts])) > max_bytes:
            raise ValueError(f"a call asks at most {MAX_PROMPTS} children, with {max_bytes} bytes of texts")
        self._channel.send({"kind": "query", "prompts": prompt_list, "contexts": contexts})
        answer = self._channel.receive()
        if answer["kind"] == "problem":
            raise ValueError(answer["text"])
        values = answer["values"]
        assert isinstance(values, list)
        return [_parse_literal(value) for value in values]

    def FINAL(self, answer: object) -> None:
        """End the episode with an answer."""
        self.answers.append(answer if type(answer) is str else repr(answer))
        raise FinalAnswer

    def FINAL_VAR(self, name: str) -> None:
        """End the episode with the value of a variable."""
        if str(name) not in self.namespace:
            raise NameError(f"there is no variable {name!r}; SHOW_VARS() lists those that exist")
        self.FINAL(self.namespace[str(name)])


def _parse_literal(text: object) -> object:
    try:
        return ast.literal_eval(str(text))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return text


def execute(code: str, tools: Tools, message_bytes: int) -> dict[str, object]:
    """Run code as a REPL does: if the last line is an expression, its value is printed."""
    output, errors, namespace = io.StringIO(), io.StringIO(), tools.namespace
    tools.answers.clear()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            try:
                tree = ast.parse(code, "<repl>")
            except IndentationError:  # a common indentation of all lines is ignored
                tree = ast.parse(textwrap.dedent(code), "<repl>")
            last = tree.body[-1] if tree.body else None
            if isinstance(last, ast.Expr):
                tree.body.pop()
            exec(compile(tree, "<repl>", "exec"), namespace)
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), "<repl>", "eval"), namespace)
                if value is not None:
                    print(repr(value))
        except FinalAnswer:
            pass
        except BaseException as error:  # whatever the code raises, even SystemExit, is an observation
            errors.write(_describe(error))
    # Also an answer whose exception the code caught.
    final = tools.answers[0] if tools.answers else None
    texts = {"stdout": output.getvalue(), "stderr": errors.getvalue(), "final": final}
    return {"kind": "result", **{name: text and _cut(text, message_bytes // 4) for name, text in texts.items()}}


def _cut(text: str, num_bytes: int) -> str:
    """Cut a text so that it takes at most `num_bytes` in a message."""
    if 12 * len(text) <= num_bytes:  # no character takes more than 12 bytes
        return text
    beginning = text[: num_bytes - 2]  # between quotes
    return beginning if len(json.dumps(beginning)) <= num_bytes else text[: num_bytes // 12]


def _describe(error: BaseException) -> str:
    """Format the last line of a traceback. The code may have defined the error, so formatting may fail, too."""
    try:
        return "".join(traceback.format_exception_only(error))
    except BaseException:
        return type.__getattribute__(type(error), "__name__")


def main() -> None:
    """Start a confined process for each request on the control socket (standard input), until the parent ends.

    A request is JSON, [memory in bytes, CPU seconds, bytes of a message], with three streams: the standard input,
    output and error of the new process, which itself reads the request. The reply is an id and a pidfd, or a problem.
    This process never holds anything that a model wrote, and always does the same, so that addresses of objects in the
    others do not depend on what it has started before.
    """
    library = ctypes.CDLL(sys.argv[1])
    warnings.simplefilter("ignore")
    os.environ.clear()
    resource.setrlimit(resource.RLIMIT_NOFILE, (_MAX_FILES, _MAX_FILES))
    rank_for_killing(900)  # before the trial, and after the processes that take the memory
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel then reaps processes that have ended
    process_id, poller = os.getpid(), select.poll()
    poller.register(0, select.POLLIN)
    # A fork of the parent may also hold the other end of the socket, and outlive the parent.
    poller.register(os.pidfd_open(os.getppid()), select.POLLIN)
    gc.collect()
    gc.freeze()
    gc.disable()
    while poller.poll() == [(0, select.POLLIN)]:
        is_read, reader = os.pipe()
        try:
            os.fork()
        except OSError as error:  # such as too many processes; existing ones are unaffected
            decline(error)
        if os.getpid() != process_id:
            try:
                run(library, process_id, reader)
            finally:  # a child never becomes a second parent
                os._exit(1)
        os.close(reader)
        os.read(is_read, 1)  # until the new process has read the request, and closed its end
        os.close(is_read)


def decline(error: OSError) -> None:
    """Answer a request with the reason why no process was started."""
    control = socket.socket(fileno=0)
    _, streams, _, _ = socket.recv_fds(control, 4096, 3)
    for stream in streams:
        os.close(stream)
    control.send(str(error).encode())
    control.detach()


def run(library: ctypes.CDLL, parent_id: int, reader: int) -> None:
    """Read a request, confine this process, and execute what the parent sends. reader: closed after reading."""
    control = socket.socket(fileno=0)
    content, streams, _, _ = socket.recv_fds(control, 4096, 3)
    os.close(reader)
    memory_bytes, cpu_seconds, message_bytes = json.loads(content)
    socket.send_fds(control, [str(os.getpid()).encode()], [os.pidfd_open(os.getpid())])
    control.detach()
    end_with_parent(parent_id)
    os.setsid()
    for number, stream in zip(range(3), streams, strict=True):
        os.dup2(stream, number)
    os.closerange(3, _MAX_FILES)
    try:
        rank_for_killing(1000)
        limit_resources(memory_bytes, cpu_seconds)
        drop_rights()
        confine(library)
    except Exception as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
        return
    gc.enable()
    channel = Channel()
    try:
        start = channel.receive()
    except MemoryError:
        os.write(2, b"its texts need more memory than it may use (env.papers.execution_mib)\n")
        return
    context, may_query = start["context"], bool(start["may_query"])
    assert isinstance(context, dict)
    tools = Tools(context, may_query, channel, message_bytes)
    channel.send({"kind": "ready"})
    while True:
        message = channel.receive()
        try:
            result = execute(str(message["code"]), tools, message_bytes)
        except MemoryError:
            gc.collect()
            result = {"kind": "result", "stdout": "", "stderr": "MemoryError", "final": None}
        channel.send(result)


if __name__ == "__main__":
    main()
