"""Countdown: combine all numbers to the target, in one turn; the rewards of RAGEN, with a parser instead of `eval`."""

import ast
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from trainable.config.setting_types import PromptStyle
from trainable.envs.environment import Measure, TurnLimits, TurnOutcome
from trainable.envs.level_sets import find_test_levels, make_searched_test_levels

REWARD_TARGET = 1.0
REWARD_NUMBERS = 0.1
"""For an expression of exactly the given numbers that misses the target."""
MAX_LENGTH = 200
"""Maximum number of characters of an expression, which bounds parsing time and nesting."""

_TEXT = re.compile(r"(?:\s*(?:[0-9]{1,9}(?![0-9])|[-+*/()]))*\s*")
_TOKEN = re.compile(r"[0-9]+|[-+*/()]")
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


class Expression(NamedTuple):
    """A parsed expression.

    text: its tokens without blanks. numbers: in the order of the text. value: the exact result; None after a division
    by zero.
    """

    text: str
    numbers: tuple[int, ...]
    value: Fraction | None


def parse_expression(text: str) -> Expression | None:
    """Parse numbers of up to nine digits, joined by +, -, *, / and parentheses; return None for any other text.

    Example:
        >>> parse_expression("(1 + 2) * 3").value
        Fraction(9, 1)
    """
    tokens = _TOKEN.findall(text)
    if not tokens or len(text) > MAX_LENGTH or not _TEXT.fullmatch(text):
        return None
    # Blanks between the tokens, so that Python sees no ** or //. It refuses leading zeros.
    source = " ".join(str(int(token)) if token.isdigit() else token for token in tokens)
    try:
        tree = ast.parse(source, mode="eval").body
    except SyntaxError:
        return None
    if not all(isinstance(node, ast.BinOp | ast.Constant | ast.operator) for node in ast.walk(tree)):
        return None  # a sign, a call or an empty tuple
    try:
        value = _compute(tree)
    except ZeroDivisionError:
        value = None
    return Expression("".join(tokens), tuple(int(token) for token in tokens if token.isdigit()), value)


def _compute(node: ast.expr) -> Fraction:
    if isinstance(node, ast.BinOp):
        return _OPERATORS[type(node.op)](_compute(node.left), _compute(node.right))
    return Fraction(ast.literal_eval(node))


@dataclass(frozen=True, eq=False)
class Puzzle:
    """A level: its seed, target and numbers. It is also the state of an episode, since actions do not change it."""

    seed: int
    target: int
    numbers: tuple[int, ...]

    @property
    def key(self) -> bytes:
        """The target and the sorted numbers, since the order of numbers does not matter."""
        return repr((self.target, sorted(self.numbers))).encode()


@dataclass(frozen=True)
class Countdown:
    """Countdown with `count` numbers from 1 to `max_number`. Every problem can be solved with + and - alone.

    The reward is 1 for an expression that uses each number once and gives the target, 0.1 for one that uses each number
    once and gives another result, and 0 otherwise. The first expression ends the episode.
    """

    count: int = 4
    max_number: int = 99
    name = "countdown"
    title = "Countdown"
    measures: ClassVar[Mapping[str, Measure]] = MappingProxyType({})

    @property
    def has_held_out_levels(self) -> bool:
        """Whether there are enough problems for separate sets. A few small numbers give too few."""
        return find_test_levels(self) is not None

    def make_levels(self, seeds: Sequence[int]) -> list[Puzzle]:
        """Draw random numbers for each seed, with a random positive result of + and - between them as the target."""
        return [_draw_problem(int(seed), self.count, self.max_number) for seed in seeds]

    def make_test_levels(self, count: int) -> list[Puzzle]:
        """Make the first `count` test problems, all different and in no published set if there are enough."""
        return make_searched_test_levels(self, count)

    def start(self, levels: Sequence[Puzzle]) -> list[Puzzle]:
        """Return the problems."""
        return list(levels)

    def step(
        self, states: Sequence[Puzzle], actions: Sequence[Sequence[str]], luck: npt.NDArray[np.float64]
    ) -> TurnOutcome:
        """Reward the first expression of each episode, which ends it."""
        counts = np.array([min(len(texts), 1) for texts in actions], dtype=np.int64)
        rewards = np.array(
            [
                _reward_expression(state, texts[0]) if texts else 0.0
                for state, texts in zip(states, actions, strict=True)
            ]
        )
        done = counts > 0
        return TurnOutcome(list(states), rewards, counts, done, done & (rewards == REWARD_TARGET))

    def read_action(self, word: str) -> str | None:
        """Parse an expression and remove its blanks; return None if it is not arithmetic."""
        expression = parse_expression(word)
        return None if expression is None else expression.text

    def format_instructions(self, max_actions: int) -> str:
        """Write the rules and an example of an answer."""
        return (
            "You are a helpful assistant. You are solving Countdown: write an arithmetic expression whose result is "
            "the target. Use each of the given numbers exactly once, and only +, -, *, / and parentheses. Your answer "
            "is the expression, for example <answer>(25 - 7) * 3 + 4</answer> for the target 58 and the numbers 3, 4, "
            "7 and 25."
        )

    def format_state(self, state: Puzzle, style: PromptStyle) -> str:
        """Format the target and the numbers."""
        return f"Target: {state.target}, nums: {list(state.numbers)}"

    def compute_chance(self, levels: Sequence[Puzzle], limits: TurnLimits) -> None:
        """Return None: there is no uniform distribution over expressions."""
        return

    def compute_best(self, levels: Sequence[Puzzle], limits: TurnLimits) -> npt.NDArray[np.float64]:
        """Return 1 for each problem, since all have solutions."""
        return np.ones(len(levels))


def _reward_expression(state: Puzzle, text: str) -> float:
    expression = parse_expression(text)
    if expression is None or sorted(expression.numbers) != sorted(state.numbers):
        return 0.0
    return REWARD_TARGET if expression.value == state.target else REWARD_NUMBERS


def _draw_problem(seed: int, count: int, max_number: int) -> Puzzle:
    rng = np.random.Generator(np.random.PCG64(seed))
    while True:
        numbers = rng.integers(1, max_number + 1, size=count)
        signs = np.where(rng.random(count) < 0.5, -1, 1)
        # With parentheses and any order of the numbers, all signs are possible except all negative.
        target = int(numbers @ signs)
        if target > 0:
            return Puzzle(seed, target, tuple(numbers.tolist()))
