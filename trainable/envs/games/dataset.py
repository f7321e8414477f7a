"""A data set as a game of one turn: each row is a prompt, and a rule scores the reply against the row's answer."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from trainable.config.games import DataScore
from trainable.config.setting_types import PromptStyle
from trainable.envs.data_rows import DataFileError, read_data_rows
from trainable.envs.environment import FIRST_TEST_SEED, Measure, TurnLimits, TurnOutcome

FIRST_TRAINING_SEED = 10_000
"""Smaller seeds are those of validation rows."""
MIN_ROWS = 30
_NUMBER = re.compile(r"(?:(?<!\w)-)?(?:\d[\d,]*/0*[1-9]\d*|(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,2}(?!\d))?)")
"""A fraction, or a decimal number. A hyphen after a digit or a letter is no sign."""
_SPLITS = ("test", "validation", *["training"] * 8)
"""The set of a row, by its hash modulo 10."""


class Row(NamedTuple):
    """A prompt with its answer, as texts."""

    prompt: str
    answer: str

    @property
    def key(self) -> bytes:
        """Equal for prompts that differ only in case and blanks."""
        return hashlib.sha256(" ".join(self.prompt.casefold().split()).encode()).digest()

    def make_level(self, seed: int) -> "DataLevel":
        """Make the level of this row."""
        return DataLevel(seed, self.prompt, self.answer, self.key)


@dataclass(frozen=True)
class DataLevel:
    """A level: a row of the data set. It is also the state of an episode."""

    seed: int
    prompt: str
    answer: str
    key: bytes


class DataRows(NamedTuple):
    """The rows of a file by set, and how many were left out because their prompt was there before."""

    sets: Mapping[str, Sequence[Row]]
    num_twins: int


@lru_cache(maxsize=4)
def read_rows(file: str, prompt: str, answer: str, score: DataScore = "exact", digest: str | None = None) -> DataRows:
    """Read the rows of a .jsonl or .parquet file and split them by the hash of their prompts.

    prompt, answer: names of the fields. A prompt is a text, or a list of messages, whose contents are joined. score:
    the rule for which the answers are. digest: what `compute_digest` must return for the file; None for any.

    Raises DataFileError if a row has no such field, or an answer that does not fit the rule, if the file has changed,
    or if it has too few rows.
    """
    path, rows = Path(file), dict[bytes, Row]()
    if digest is not None and compute_digest(path) != digest:
        raise DataFileError(
            f"{path} is not the file with which the study began (env.dataset.digest={digest}): restore it, or start a "
            f"new study with another --output."
        )
    count = 0
    for place, content in read_data_rows(path):
        row = Row(_read_field(path, place, content, prompt), _read_field(path, place, content, answer))
        if score == "number" and read_number(row.answer) is None:
            raise DataFileError(f"{path}, {place}: the answer {row.answer[:80]!r} has no number.")
        if score == "regex":
            try:
                _compile(row.answer)
            except re.error as error:
                text = f"the answer {row.answer[:80]!r} is no regular expression ({error})"
                raise DataFileError(f"{path}, {place}: {text}.") from None
        rows.setdefault(row.key, row)
        count += 1
    sets: dict[str, list[Row]] = {"training": [], "validation": [], "test": []}
    for key, row in rows.items():
        sets[_SPLITS[key[0] % len(_SPLITS)]].append(row)
    if len(rows) < MIN_ROWS or not all(sets.values()):
        raise DataFileError(f"{path} has {len(rows)} different prompts, and {MIN_ROWS} are the minimum.")
    return DataRows(sets, count - len(rows))


def compute_digest(path: Path) -> str:
    """Compute the first 16 hex digits of the SHA-256 of a file. Raises DataFileError if it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError as error:
        raise DataFileError(f"{path} cannot be read: {error}") from None


def _read_field(path: Path, place: str, content: Any, name: str) -> str:
    """Read a field as text, or raise DataFileError that names the fields there are."""
    value = content.get(name) if isinstance(content, dict) else None
    if isinstance(value, list) and value and all(map(_is_prompt_message, value)):
        value = "\n\n".join(item["content"] for item in value)
    if value is None or isinstance(value, list | dict):
        names = ", ".join(content) if isinstance(content, dict) else "none"
        raise DataFileError(
            f"{path}, {place} has no text, and no messages without a reply, in a field {name!r} (its fields: {names}): "
            f"type --set env.dataset.prompt=NAME and --set env.dataset.answer=NAME with the fields of both."
        )
    return str(value)


def _is_prompt_message(item: Any) -> bool:
    """Check whether an item is a message with a text. A reply in a prompt would tell the answer."""
    return isinstance(item, dict) and isinstance(item.get("content"), str) and item.get("role") != "assistant"


def read_number(text: str) -> Fraction | None:
    """Read the last number of a text, without the commas of thousands; None if there is none.

    >>> read_number("so 3 x 400 = 1,200.50 dollars"), read_number("3/4"), read_number("5-3")
    (Fraction(2401, 2), Fraction(3, 4), Fraction(3, 1))
    """
    numbers = _NUMBER.findall(text)
    return Fraction(numbers[-1].replace(",", "")) if numbers else None


@dataclass(frozen=True)
class DataSet:
    """A data set as a game. The parameters are the settings of `env.dataset`.

    The reward is 1 for a right reply, which is the success of the episode, and 0 for any other.
    """

    file: str | None
    digest: str | None
    prompt: str
    answer: str
    score: DataScore
    pattern: str | None
    instructions: str
    name: ClassVar[str] = "dataset"
    title: ClassVar[str] = "Data set"
    has_held_out_levels: ClassVar[bool] = True
    measures: ClassVar[Mapping[str, Measure]] = MappingProxyType({})

    @property
    def rows(self) -> DataRows:
        """The rows of the file. Raises DataFileError."""
        if self.file is None:
            raise DataFileError("the game needs a file of prompts and answers: type --env FILE.jsonl.")
        return read_rows(self.file, self.prompt, self.answer, self.score, self.digest)

    def compute_max_bytes(self) -> int:
        """Compute the bytes of the system message and the longest prompt. Raises DataFileError."""
        prompts = (row.prompt for rows in self.rows.sets.values() for row in rows)
        return len(self.instructions.encode()) + max(len(prompt.encode()) for prompt in prompts)

    def make_levels(self, seeds: Sequence[int]) -> list[DataLevel]:
        """Return the row of each seed: of validation below 10,000, else of training, in another order each epoch."""
        return [self._make_level(int(seed)) for seed in seeds]

    def _make_level(self, seed: int) -> DataLevel:
        sets = self.rows.sets
        if seed < FIRST_TRAINING_SEED:
            return sets["validation"][seed % len(sets["validation"])].make_level(seed)
        epoch, place = divmod(seed - FIRST_TRAINING_SEED, len(sets["training"]))
        return sets["training"][_shuffle(epoch, len(sets["training"]))[place]].make_level(seed)

    def make_test_levels(self, count: int) -> list[DataLevel]:
        """Return up to `count` test rows."""
        rows = self.rows.sets["test"][:count]
        return [row.make_level(FIRST_TEST_SEED + number) for number, row in enumerate(rows)]

    def start(self, levels: Sequence[DataLevel]) -> list[DataLevel]:
        """Return the levels, which are the states."""
        return list(levels)

    def step(
        self, states: Sequence[DataLevel], actions: Sequence[Sequence[str]], luck: npt.NDArray[np.float64]
    ) -> TurnOutcome:
        """Score the answer of each episode, which ends it."""
        counts = np.array([min(len(texts), 1) for texts in actions], dtype=np.int64)
        success = np.array(
            [
                bool(texts) and self.is_right(texts[0], state.answer)
                for state, texts in zip(states, actions, strict=True)
            ]
        )
        return TurnOutcome(list(states), success.astype(np.float64), counts, counts > 0, success)

    def is_right(self, reply: str, answer: str) -> bool:
        """Check a reply, of which `read_action` has extracted the answer."""
        if self.score == "format":
            return True
        if self.score == "number":
            return read_number(reply) is not None and read_number(reply) == read_number(answer)
        if self.score == "regex":
            return _compile(answer).search(reply) is not None
        return " ".join(reply.split()) == " ".join(answer.split())

    def read_action(self, word: str) -> str | None:
        """Extract the answer from a reply: the last match of `pattern`, its first group if it has one; None if none."""
        if self.pattern is None:
            return word.strip() or None
        matches = list(_compile(self.pattern).finditer(word))
        return (matches[-1][1 if matches[-1].re.groups else 0] or "").strip() if matches else None

    def format_instructions(self, max_actions: int) -> str:
        """Return the system message."""
        return self.instructions

    def format_state(self, state: DataLevel, style: PromptStyle) -> str:
        """Return the prompt."""
        return state.prompt

    def compute_chance(self, levels: Sequence[DataLevel], limits: TurnLimits) -> None:
        """Return None: there is no uniform distribution over texts."""
        return

    def compute_best(self, levels: Sequence[DataLevel], limits: TurnLimits) -> npt.NDArray[np.float64]:
        """Return 1 for each row, since each has a right answer."""
        return np.ones(len(levels))


@lru_cache(maxsize=8)
def _shuffle(epoch: int, count: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng(epoch).permutation(count)


@lru_cache(maxsize=1024)
def _compile(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.DOTALL)
