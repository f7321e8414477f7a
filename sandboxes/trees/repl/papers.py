"""The game `papers`: each level is a question about several papers, which a tree of rollouts answers."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from sandboxes.trees.repl.questions import Question, read_questions
from trainable.config.games import PapersConfig
from trainable.envs.environment import FIRST_TEST_SEED, Measure, TurnLimits
from trainable.envs.level_sets import find_test_levels

SUCCESS_SCORE = 0.9
"""Score from which an answer counts as a success: nearly all of the evidence, and little else."""
QUERY_ACTION, CODE_ACTION = "ask", "run"
"""The actions of a turn: one for each child that its code called, and one for its code."""

TEST_FRACTION = 0.1
"""Fraction of a file's rows that are never trained on."""
MIN_FILE_ROWS = 20

THINGS = (
    "bridge", "canal", "castle", "church", "factory", "garden", "harbor", "hotel", "library", "market",
    "mill", "museum", "palace", "school", "station", "temple", "theater", "tower", "tunnel", "wall",
)  # fmt: skip
PROPERTIES = ("deep", "high", "long", "wide")
MIN_NUMBER, MAX_NUMBER = 10, 99

ScoreAnswer = Callable[[Question, str], float]
"""Computes the reward, from 0 to 1, of the final answer to a question; an answer may be empty."""


@dataclass(frozen=True, eq=False)
class PaperLevel:
    """A level: its seed and its question."""

    seed: int
    question: Question

    @cached_property
    def key(self) -> bytes:
        """Key that is equal for equal questions about equal papers."""
        return hashlib.sha256(repr((self.question.text, dict(self.question.papers))).encode()).digest()


def make_question(seed: int, num_papers: int = 3, num_sentences: int = 4) -> Question:
    """Generate a question about a thing, whose evidence is every sentence that begins with it. Needs no data set.

    One or more of the papers have one sentence of evidence each. All other sentences (of at least two per paper) are
    about other things; some mention the thing, so that a search for its name finds too much.
    """
    rng = np.random.default_rng(seed)
    thing, *others = (THINGS[number] for number in rng.permutation(len(THINGS)))
    sentences = _draw_sentences(thing, num_papers, rng)
    num_evidence = int(rng.integers(1, num_papers + 1))
    with_evidence = set(rng.permutation(num_papers)[:num_evidence].tolist())
    with_mention = set(rng.permutation(num_papers)[: int(rng.integers(0, num_papers + 1))].tolist())
    papers, evidence = {}, []
    for number in range(num_papers):
        lines = []
        if number in with_evidence:
            lines.append(sentences[number])
            evidence.append(sentences[number])
        if number in with_mention:
            lines.append(f"The {others[number % len(others)]} stands near the {thing}.")
        while len(lines) < num_sentences:
            (line,) = _draw_sentences(others[int(rng.integers(len(others)))], 1, rng)
            lines.append(line)
        papers[f"p{number + 1}"] = "\n".join(lines[place] for place in rng.permutation(num_sentences))
    return Question(f"Quote every sentence about the {thing}.", papers, tuple(evidence))


def _draw_sentences(thing: str, count: int, rng: np.random.Generator) -> list[str]:
    """Draw distinct sentences about a thing."""
    numbers = MIN_NUMBER + rng.choice(MAX_NUMBER - MIN_NUMBER + 1, size=count, replace=False)
    return [f"The {thing} is {number} metres {PROPERTIES[rng.integers(len(PROPERTIES))]}." for number in numbers]


class _Papers:
    """What the levels of the game have in common, whatever the source of their questions."""

    name: str = "papers"
    title: str = "Papers"
    has_held_out_levels: bool = True
    measures: Mapping[str, Measure] = MappingProxyType(
        {"children": lambda level, actions: float(list(actions).count(QUERY_ACTION))}
    )
    """children: how many children the tree called."""

    def compute_chance(self, levels: Sequence[PaperLevel], limits: TurnLimits) -> npt.NDArray[np.float64] | None:
        """Return None: random text is not code, so chance success is unknown."""
        return None

    compute_best = compute_chance


@dataclass(frozen=True)
class GeneratedPapers(_Papers):
    """Generated questions (see `make_question`); every seed is a different question."""

    num_papers: int
    num_sentences: int

    def make_levels(self, seeds: Sequence[int]) -> list[PaperLevel]:
        """Make a question for each seed."""
        return [PaperLevel(int(seed), make_question(int(seed), self.num_papers, self.num_sentences)) for seed in seeds]

    def make_test_levels(self, count: int) -> list[PaperLevel]:
        """Make the first `count` test questions: all distinct and in no published set."""
        levels = find_test_levels(self, count)
        assert levels is not None  # two random numbers and an order of twenty things: questions hardly ever repeat
        return list(levels)


@dataclass(frozen=True)
class FilePapers(_Papers):
    """The questions of a file, without duplicates.

    A tenth of the rows, in a fixed random order, are the test questions. A seed draws one of the others, so training
    and validation may share rows. ValueError for fewer than 20 distinct rows.
    """

    questions: tuple[Question, ...]

    def __post_init__(self) -> None:
        count = len(self._levels)
        if count < MIN_FILE_ROWS:
            raise ValueError(f"the file has {count} different questions, and {MIN_FILE_ROWS} are the minimum")

    @cached_property
    def _levels(self) -> list[PaperLevel]:
        """A level for each distinct question; its seed is its place in the file."""
        levels = [PaperLevel(place, question) for place, question in enumerate(self.questions)]
        return list({level.key: level for level in reversed(levels)}.values())[::-1]

    @cached_property
    def _places(self) -> tuple[list[int], list[int]]:
        """The places of the test rows, and of the others."""
        order = np.random.default_rng(0).permutation(len(self._levels)).tolist()
        num_tests = int(TEST_FRACTION * len(order))
        return order[:num_tests], order[num_tests:]

    def make_levels(self, seeds: Sequence[int]) -> list[PaperLevel]:
        """Draw a random row for each seed."""
        _, places = self._places
        draws = [int(np.random.default_rng(int(seed)).integers(len(places))) for seed in seeds]
        return [
            PaperLevel(int(seed), self._levels[places[draw]].question) for seed, draw in zip(seeds, draws, strict=True)
        ]

    def make_test_levels(self, count: int) -> list[PaperLevel]:
        """Return up to `count` test questions."""
        places, _ = self._places
        return [
            PaperLevel(FIRST_TEST_SEED + number, self._levels[place].question)
            for number, place in enumerate(places[:count])
        ]


def make_papers(settings: PapersConfig) -> GeneratedPapers | FilePapers:
    """Read the questions of a file, or generate them. DataFileError, or ValueError if the file is too short."""
    if settings.file is None:
        return GeneratedPapers(settings.num_papers, settings.num_sentences)
    return FilePapers(tuple(read_questions(Path(settings.file))))
