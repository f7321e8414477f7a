"""Read what verl, and trainers that are built on it, print to the console."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from trainable.sources.logs import LogRow, RunLog, flatten, merge_rows, to_number

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_PREFIX = re.compile(r"(\((?:[\w.:-]+ ){0,2}pid=\d+(?:, ip=[\d.]+)?\)) ?")
"""Ray begins the lines of a worker so. Two processes may write into one line."""
_STEP = re.compile(r"\bstep:(\d+) - (.*)")
_VALIDATION = re.compile(r"(?:Initial|Final) validation metrics: (\{.*\})", re.DOTALL)
_SCALED = re.compile(r"(.*)\((\d+e-?\d+)\)")
"""Names such as `actor/lr(1e-4)`, whose values are in this unit."""
_NUMPY = re.compile(r"np\.(?:float|int)\d+\(([^()]*)\)")
_ROUNDED_ZERO = re.compile(r"-?0\.00+")
_MAX_JOINED_LINES = 5_000


class _Line(NamedTuple):
    number: int
    worker: str
    """The process that wrote the line, as Ray names it; empty for the driver."""
    text: str


def _parse_wrapped(lines: list[_Line], start: int) -> Any:
    """Parse a Python literal that begins in a line and continues in the next ones of the same process; else None."""
    worker, pieces, depth = lines[start].worker, [], 0
    for line in lines[start : start + _MAX_JOINED_LINES]:
        if line.worker != worker:
            continue
        pieces.append(line.text)
        depth += sum(map(line.text.count, "{([")) - sum(map(line.text.count, "})]"))
        if depth <= 0:
            break
    try:
        return ast.literal_eval(_NUMPY.sub(r"\1", "\n".join(pieces)).strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None


def _parse_values(pairs: Iterator[tuple[str, str]]) -> tuple[dict[str, float], frozenset[str]]:
    """Parse names and numbers as printed. Return the values, and the names of those that were rounded to 0."""
    values: dict[str, float] = {}
    zeros: set[str] = set()
    for name, text in pairs:
        scaled = _SCALED.fullmatch(name)
        name, unit = (scaled[1], float(scaled[2])) if scaled else (name, 1.0)
        try:
            number = to_number(float(_NUMPY.sub(r"\1", text)))
        except ValueError:  # no number, such as the name of a checkpoint
            continue
        if number is not None:
            values[name] = number * unit
            if _ROUNDED_ZERO.fullmatch(text):
                zeros.add(name)
    return values, frozenset(zeros)


def read_verl_console(path: Path, content: bytes) -> RunLog | None:
    """Read the log of a console; None if no line begins a step as verl prints it.

    Validations before and after training, and those in lines of their own, belong to the last step before them. Logs of
    2024 count training steps from 0, and all others from 1; here, step 0 is before training.
    """
    lines: list[_Line] = []
    text = _ANSI.sub("", content.replace(b"\0", b"").decode(errors="replace"))
    for number, line_text in enumerate(text.split("\n"), 1):
        shown = line_text.rstrip("\r").rpartition("\r")[2]  # what a progress bar overwrote
        driver_text, *pieces = _PREFIX.split(shown)
        if driver_text or not pieces:
            lines.append(_Line(number, "", driver_text))
        lines += [_Line(number, *piece) for piece in zip(pieces[::2], pieces[1::2], strict=True)]
    settings: dict[str, Any] = {}
    rows: list[LogRow] = []
    trained_steps: list[int] = []
    for index, line in enumerate(lines):
        if step_match := _STEP.search(line.text):
            pairs = (pair.rpartition(":")[::2] for pair in step_match[2].split(" - "))
            values, zeros = _parse_values(pairs)
            if not all(name.startswith(("val", "test_score")) for name in values):
                trained_steps.append(int(step_match[1]))
            # A validation that has its own line has the step of the training line before it, or is before training.
            step = int(step_match[1]) if trained_steps else -1
            rows.append(LogRow(step, values, line.number, zeros))
        elif "validation metrics: {" in line.text:
            message = _parse_wrapped(lines, index)
            match = _VALIDATION.search(message if isinstance(message, str) else line.text)
            try:
                metrics = ast.literal_eval(_NUMPY.sub(r"\1", match[1])) if match else {}
            except (ValueError, SyntaxError):
                metrics = {}
            values, zeros = _parse_values((str(name), str(value)) for name, value in metrics.items())
            if values:
                rows.append(LogRow(trained_steps[-1] if trained_steps else -1, values, line.number, zeros))
        elif not settings and line.text.startswith("{'"):
            literal = _parse_wrapped(lines, index)
            settings = flatten(literal) if isinstance(literal, dict) and len(literal) > 1 else {}
    if not trained_steps:
        return None
    offset = 1 if min(trained_steps) == 0 else 0
    merged, notes = merge_rows(
        LogRow(max(row.step + offset, 0) if row.step >= 0 else 0, row.values, row.line, row.rounded_zeros)
        for row in rows
    )
    if offset:
        notes.append("The log counts steps from 0, and these rows from 1.")
    return RunLog(path, "verl console", merged, settings, notes)
