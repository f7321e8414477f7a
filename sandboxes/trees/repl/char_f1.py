"""The reward `char_f1`: how well the passages quoted in an answer cover the evidence, in characters."""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trainable.files.json_values import parse_json

MAX_FREE_PREDICTIONS = 12
"""Number of passages that an answer may quote for free. Each further one costs `EXTRA_PREDICTION_COST` / 12."""
EXTRA_PREDICTION_COST = 0.05

_MIN_QUOTE_LENGTH, _MIN_LINE_LENGTH = 8, 16
_MAX_LITERAL_LENGTH = 200_000
_FINAL_TAG = re.compile(r"<final>(.*?)(?:</final>|\Z)", re.DOTALL | re.IGNORECASE)
_CODE_BLOCK = re.compile(r"```[\w-]*[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
_QUOTE = re.compile(r"\"([^\"\n]+)\"|“([^“”\n]+)”|(?<!\w)'([^'\n]+)'(?!\w)")
_BULLET = re.compile(r"^(?:[-*•]|\d+[.)])\s+")


def compute_char_f1(answer: str, papers: Mapping[str, str], evidence: Iterable[str]) -> float:
    """Compute the reward of an answer, in [0, 1]: its F1 in characters of the papers, minus a cost per excess passage.

    Each passage of the answer (see `parse_predictions`) and of the evidence marks its first exact occurrence in the
    papers, if any. An answer of more than 251 passages scores 0 whatever they mark. Source: rlm_grpo of
    deepakvijaykee/rl-experiments.
    """
    predictions = parse_predictions(answer)
    cost = EXTRA_PREDICTION_COST * max(0, len(predictions) - MAX_FREE_PREDICTIONS) / MAX_FREE_PREDICTIONS
    if cost >= 1:  # searching for a million passages would take minutes
        return 0.0
    text = "\n\n".join(papers.values())
    marks, gold_marks = _mark(text, predictions), _mark(text, evidence)
    both, marked, gold = (int(chars.sum()) for chars in (marks & gold_marks, marks, gold_marks))
    return min(max(2 * both / max(marked + gold, 1) - cost, 0.0), 1.0)


def _mark(text: str, passages: Iterable[str]) -> npt.NDArray[np.bool_]:
    """Mark the characters of the text (N,) that lie in the first occurrence of a passage."""
    marks = np.zeros(len(text), dtype=bool)
    for passage in passages:
        start = text.find(passage) if passage else -1
        if start >= 0:
            marks[start : start + len(passage)] = True
    return marks


def parse_predictions(answer: str) -> tuple[str, ...]:
    """Extract the passages that a final answer quotes, dropping those that differ only in case and spaces.

    Tries in this order, until one succeeds: JSON or a Python literal (also in <final> tags or in a code block), whose
    texts are the passages; quotations of at least 8 characters; lines of at least 16 characters without their bullets.
    """
    text = _unwrap(_unwrap(answer, _FINAL_TAG), _CODE_BLOCK).strip()
    passages = _parse_literal(text)
    if passages is None:
        quotes = [next(filter(None, match)) for match in _QUOTE.findall(text)]
        passages = [quote for quote in quotes if len(quote) >= _MIN_QUOTE_LENGTH]
    if not passages:
        lines = (_BULLET.sub("", line.strip()) for line in text.splitlines())
        passages = [line for line in lines if len(line) >= _MIN_LINE_LENGTH]
    by_words: dict[str, str] = {}
    for passage in passages:
        by_words.setdefault(" ".join(passage.lower().split()), passage)
    return tuple(passage for words, passage in by_words.items() if words)


def _unwrap(text: str, wrapping: re.Pattern[str]) -> str:
    """Extract the contents of the wrappings of a text, or the text if it has none."""
    contents = wrapping.findall(text)
    return "\n".join(contents) if contents else text


def _parse_literal(text: str) -> list[str] | None:
    """Parse the texts of a JSON value or Python literal; None if the answer is neither, or a bare number or null."""
    value: Any
    try:
        value = parse_json(text.encode())
    except ValueError:
        if len(text) > _MAX_LITERAL_LENGTH:
            return None
        try:
            value = ast.literal_eval(text)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            return None
    try:
        return list(_list_texts(value)) if isinstance(value, str | Mapping | Sequence | set) else None
    except RecursionError:
        return None


def _list_texts(value: object) -> Iterator[str]:
    """Yield all texts of nested lists and mappings, without keys."""
    if isinstance(value, str):
        yield value.strip()
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _list_texts(item)
    elif isinstance(value, set):  # in an order that does not depend on hashes
        yield from sorted(item.strip() for item in value if isinstance(item, str))
