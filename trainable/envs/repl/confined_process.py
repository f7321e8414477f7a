"""The confined process: it runs model-written code, and is started as a script by `process.py`.

It imports the standard library only and everything that it needs before it gives up its rights: afterwards the kernel
refuses every system call but those of a computation (libseccomp, a list of what is allowed). Messages are lines of JSON
on standard input and output; the parent trusts none of them.

Messages from the parent have a number, which the reply repeats: {"kind": "start", "context": {...}, "may_query": bool},
{"kind": "execute", "code": "..."}, and after a query {"kind": "answers", "values": [...]} or
{"kind": "problem", "text": "..."}.
Replies: {"kind": "ready"}, {"kind": "query", "prompts": [...], "contexts": [...]} and
{"kind": "result", "stdout": "...", "stderr": "...", "final": "..." or null}.
"""

import ast
import builtins
import contextlib
import ctypes
import gc
import io
import itertools
import json
import math
import os
import re
import resource
import sys
import textwrap
import traceback
import warnings
from collections import Counter

ALLOWED_CALLS = (
    # Streams that are open already.
    "read", "write", "close", "lseek",
    # Memory, but no memory that can be executed: see `_add_rules`.
    "brk", "munmap", "mremap", "madvise",
    # Signals and waiting of this process alone.
    "rt_sigaction", "rt_sigprocmask", "rt_sigreturn", "sigaltstack", "futex", "restart_syscall", "rseq", "membarrier",
    # Time and random numbers.
    "clock_gettime", "clock_getres", "clock_nanosleep", "nanosleep", "gettimeofday", "getrandom", "sched_yield",
    # Its own end.
    "exit", "exit_group",
)  # fmt: skip
"""System calls that a computation needs. All others fail with EPERM: those of files, processes, sockets, signals."""
MAX_MESSAGE_CHARACTERS = 4_000_000
"""Characters of a message to the parent; the parent has a limit of its own, in bytes."""
SHOWN_TYPES = (str, int, float, bool, list, dict, tuple, set, type(None))
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
"""What the published REPL offers, without import, open, eval and exec. This is its language and no boundary."""


class FinalAnswer(BaseException):
    """Ends the execution with the final answer; a BaseException, so that `except Exception` does not catch it."""


def limit_resources(memory_bytes: int, cpu_seconds: int) -> None:
    """Limit memory, CPU time and the sizes of files, of which the process may write none."""
    for name, value in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 3),
        (resource.RLIMIT_STACK, 64 * 2**20),
    ):
        resource.setrlimit(name, (value, value))


def confine(library: ctypes.CDLL) -> None:
    """Give up every right but those of `ALLOWED_CALLS`, for good. Raise OSError if the kernel does not do it."""
    library.seccomp_init.restype = ctypes.c_void_p
    library.seccomp_init.argtypes = [ctypes.c_uint32]
    library.seccomp_syscall_resolve_name.argtypes = [ctypes.c_char_p]
    library.seccomp_load.argtypes = [ctypes.c_void_p]
    deny_with_eperm, allow = 0x00050000 | 1, 0x7FFF0000
    rules = library.seccomp_init(deny_with_eperm)
    if not rules:
        raise OSError("libseccomp could not start")
    _add_rules(library, ctypes.c_void_p(rules), allow)
    if error := library.seccomp_load(ctypes.c_void_p(rules)):
        raise OSError(-error, "the kernel does not filter system calls")


class _Comparison(ctypes.Structure):
    """struct scmp_arg_cmp of libseccomp."""

    _fields_ = (
        ("arg", ctypes.c_uint),
        ("op", ctypes.c_int),
        ("datum_a", ctypes.c_uint64),
        ("datum_b", ctypes.c_uint64),
    )


def _add_rules(library: ctypes.CDLL, rules: ctypes.c_void_p, allow: int) -> None:
    # With arguments by reference, which has a fixed number of parameters.
    library.seccomp_rule_add_array.argtypes = [
        ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int, ctypes.c_uint, ctypes.POINTER(_Comparison),
    ]  # fmt: skip
    executable, masked_equal = 4, 7
    not_executable = (_Comparison * 1)(_Comparison(2, masked_equal, executable, 0))
    unconditional = [(name, 0, None) for name in ALLOWED_CALLS]
    for name, count, comparison in [*unconditional, ("mmap", 1, not_executable), ("mprotect", 1, not_executable)]:
        number = library.seccomp_syscall_resolve_name(name.encode())
        if number < 0:  # this processor has no such call
            continue
        if error := library.seccomp_rule_add_array(rules, allow, number, count, comparison):
            raise OSError(-error, f"libseccomp refuses the rule for {name}")


class Channel:
    """Messages to and from the parent. Its streams are not those that code sees as sys.stdin and sys.stdout."""

    def __init__(self) -> None:
        self._input, self._output = os.fdopen(0, "rb", closefd=False), os.fdopen(1, "wb", buffering=0, closefd=False)
        self._number: object = None

    def receive(self) -> dict[str, object]:
        """The next message. The process ends if the parent has gone."""
        line = self._input.readline()
        if not line:
            os._exit(0)
        message: dict[str, object] = json.loads(line)
        self._number = message["number"]
        return message

    def send(self, message: dict[str, object]) -> None:
        """Send the reply to the last message."""
        text = memoryview(json.dumps({**message, "number": self._number}).encode() + b"\n")
        while text:
            text = text[self._output.write(text) :]


class Tools:
    """What the code may call. context: texts by id; channel: to the parent, which answers queries."""

    def __init__(self, context: dict[str, str], may_query: bool, channel: Channel) -> None:
        self.context, self._may_query, self._channel = context, may_query, channel
        self.namespace: dict[str, object] = {}

    def make_namespace(self) -> dict[str, object]:
        """The variables with which the code starts."""
        names = {name: getattr(builtins, name) for name in BUILTIN_NAMES}
        modules = {"re": re, "math": math, "json": json, "itertools": itertools, "Counter": Counter}
        tools = (self.list_papers, self.search, self.get_paper_abstract, self.extract_section, self.SHOW_VARS)
        queries = (self.rlm_query, self.rlm_query_batched) if self._may_query else ()
        self.namespace = {
            "__builtins__": names,
            "__name__": "repl",
            "context": self.context,
            **modules,
            **{tool.__name__: tool for tool in (*tools, *queries, self.FINAL, self.FINAL_VAR)},
        }
        self._first_names = set(self.namespace)
        return self.namespace

    def list_papers(self) -> list[str]:
        """The ids of all papers."""
        return list(self.context)

    def search(self, text: str, keyword: str, window: int = 300) -> list[str]:
        """The surroundings of every occurrence of `keyword` in `text`: `window` characters in all, case ignored."""
        half = max(int(window), 0) // 2
        places = (match.start() for match in re.finditer(re.escape(str(keyword)), str(text), re.IGNORECASE))
        return [str(text)[max(place - half, 0) : place + len(str(keyword)) + half] for place in places]

    def get_paper_abstract(self, paper_id: str) -> str:
        """The abstract of a paper: what stands between its heading `Abstract` and the next heading or empty line."""
        return self.extract_section(paper_id, "abstract") or self.context[paper_id].strip().partition("\n\n")[0]

    def extract_section(self, paper_id: str, section: str) -> str:
        """The text below the heading `section` of a paper, up to the next heading; empty if it has none.

        A heading is a line that begins with #, or one of at most eight words that ends in a colon or is `section`.
        """
        wanted, lines, is_inside = str(section).strip().lower(), list[str](), False
        for line in self.context[paper_id].splitlines():
            title = line.strip().strip("#").strip().removesuffix(":").lower()
            is_marked = line.lstrip().startswith("#") or line.rstrip().endswith(":")
            is_heading = bool(title) and len(title.split()) <= 8 and (is_marked or title == wanted)
            if is_heading and is_inside:
                break
            if is_inside:
                lines.append(line)
            is_inside = is_inside or (is_heading and title == wanted)
        return "\n".join(lines).strip()

    def SHOW_VARS(self) -> dict[str, str]:
        """The variables that the code has set, with their types."""
        return {
            name: type(value).__name__
            for name, value in self.namespace.items()
            if name not in self._first_names and not name.startswith("_")
        }

    def rlm_query(self, prompt: str, context: object = None) -> object:
        """The final answer of a child episode to `prompt`. context: what the child sees; None for all papers."""
        return self.rlm_query_batched([prompt], [context])[0]

    def rlm_query_batched(self, prompts: list[str], context_list: list[object] | None = None) -> list[object]:
        """The final answers of one child episode per prompt, in their order. A problem is raised as a ValueError."""
        prompt_list = [str(prompt) for prompt in prompts]
        contexts = list(context_list) if context_list is not None else [None] * len(prompt_list)
        if len(contexts) != len(prompt_list):
            raise ValueError(f"{len(prompt_list)} prompts and {len(contexts)} contexts: give one context per prompt")
        self._channel.send({"kind": "query", "prompts": prompt_list, "contexts": contexts})
        answer = self._channel.receive()
        if answer["kind"] == "problem":
            raise ValueError(answer["text"])
        values = answer["values"]
        assert isinstance(values, list)
        return [_parse_literal(value) for value in values]

    def FINAL(self, answer: object) -> None:
        """End the episode with an answer."""
        raise FinalAnswer(answer)

    def FINAL_VAR(self, name: str) -> None:
        """End the episode with the value of a variable."""
        if str(name) not in self.namespace:
            raise NameError(f"there is no variable {name!r}; SHOW_VARS() lists those that exist")
        raise FinalAnswer(self.namespace[str(name)])


def _parse_literal(text: object) -> object:
    try:
        return ast.literal_eval(str(text))
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def execute(code: str, namespace: dict[str, object]) -> dict[str, object]:
    """Run code as a REPL does: the value of a last line that is an expression is printed."""
    output, errors, final = io.StringIO(), io.StringIO(), None
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            tree = ast.parse(textwrap.dedent(code), "<repl>")
            last = tree.body[-1] if tree.body else None
            if isinstance(last, ast.Expr):
                tree.body.pop()
            exec(compile(tree, "<repl>", "exec"), namespace)
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), "<repl>", "eval"), namespace)
                if value is not None:
                    print(repr(value))
        except FinalAnswer as answer:
            final = _format(answer.args[0])
        except BaseException as error:  # whatever the code raises is an observation, SystemExit too
            errors.write(_describe(error))
    return {"kind": "result", "stdout": _cut(output), "stderr": _cut(errors), "final": final}


def _format(value: object) -> str:
    try:
        text = value if type(value) is str else repr(value) if isinstance(value, SHOWN_TYPES) else str(value)
    except BaseException as error:
        text = _describe(error)
    return str(text)[:MAX_MESSAGE_CHARACTERS]


def _describe(error: BaseException) -> str:
    """The last line of a traceback. The code may have defined the error, so that its text fails, too."""
    try:
        return "".join(traceback.format_exception_only(error))
    except BaseException:
        return type.__getattribute__(type(error), "__name__")


def _cut(stream: io.StringIO) -> str:
    return stream.getvalue()[: MAX_MESSAGE_CHARACTERS // 2]


def main() -> None:
    """Give up all rights, say so, and run what the parent sends."""
    library_path, memory_bytes, cpu_seconds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    warnings.simplefilter("ignore")
    channel = Channel()
    start = channel.receive()
    library = ctypes.CDLL(library_path)
    os.closerange(3, 4096)
    limit_resources(memory_bytes, cpu_seconds)
    confine(library)
    context, may_query = start["context"], bool(start["may_query"])
    assert isinstance(context, dict)
    tools = Tools(context, may_query, channel)
    namespace = tools.make_namespace()
    channel.send({"kind": "ready"})
    while True:
        message = channel.receive()
        try:
            result = execute(str(message["code"]), namespace)
            channel.send(result)
        except MemoryError:
            gc.collect()
            channel.send({"kind": "result", "stdout": "", "stderr": "MemoryError", "final": None})


if __name__ == "__main__":
    main()
