"""Countdown: the parser against Python's own, and the rewards."""

import ast
import operator
import re
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies.examples import draw_examples
from trainable.envs.environment import TurnLimits
from trainable.envs.games.countdown import MAX_LENGTH, Countdown, Puzzle, parse_expression
from trainable.envs.level_sets import collect_level_keys, make_validation_levels

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def compute_by_python(text: str) -> Fraction | None:
    """The exact value of an arithmetic text by Python's parser; ValueError for any other text."""

    def compute(node: ast.expr) -> Fraction:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return Fraction(node.value)
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](compute(node.left), compute(node.right))
        raise ValueError(text)

    try:
        return compute(ast.parse(text.strip(), mode="eval").body)
    except ZeroDivisionError:
        return None


numbers = st.integers(0, 999).map(str)
expressions = st.recursive(
    numbers,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(("+", "-", "*", "/", " + ", " / ")), inner).map("".join),
        inner.map(lambda text: f"({text})"),
        inner.map(lambda text: f"( {text} )"),
    ),
    max_leaves=8,
)


@given(expressions)
def test_expressions_have_the_value_that_python_computes(text: str) -> None:
    if len(text) > MAX_LENGTH:
        return
    expression = parse_expression(text)
    assert expression is not None
    assert expression.value == compute_by_python(text)
    assert "".join(text.split()) == expression.text
    assert parse_expression(expression.text) == expression


@draw_examples(500)
@given(st.text("0123456789+-*/() ._eE%^!~xlambda[]{}'\"\\,=:\n", max_size=24) | st.text(max_size=12))
def test_what_is_not_arithmetic_is_no_expression(text: str) -> None:
    expression = parse_expression(text)
    if expression is None:
        return
    assert set(expression.text) <= set("0123456789+-*/()")
    assert expression.text == "".join(text.split())
    # Python reads the same value, but refuses leading zeros.
    assert expression.value == compute_by_python(re.sub(r"[0-9]+", lambda match: str(int(match[0])), expression.text))


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "-1", "+1", "1 +", "1 2", "(1", "1)", "()", "2**3", "7//2", "1e3", "1.5", "0x10", "x", "1_000"),
        *("__import__('os')", "1 if 1 else 2", "1,2", "1;2", "٣", "1234567890"),
        "(" * 150 + "1" + ")" * 150,
    ],
)
def test_texts_that_are_no_expressions(text: str) -> None:
    assert parse_expression(text) is None


def test_values_are_exact() -> None:
    assert parse_expression("1/3*3").value == 1
    assert parse_expression("(5 - 1/5) * 5").value == 24
    assert parse_expression("10-2-3").value == 5
    assert parse_expression("8/4/2").value == 1
    assert parse_expression("1/(2-2)").value is None
    assert parse_expression("0*(1/0)").value is None
    assert parse_expression(f"{'(' * 60}7{')' * 60}").numbers == (7,)


def test_rewards() -> None:
    game = Countdown()
    state = Puzzle(0, 58, (3, 4, 7, 25))
    turns = [("(25-7)*3+4",), ("25+7+3+4",), ("58",), ("25+7+3",), ("25+7+3+4+4",), (), ("25/(7-7)+3+4",)]
    outcome = game.step([state] * len(turns), turns, np.zeros((len(turns), 1)))
    assert outcome.rewards.tolist() == [1.0, 0.1, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert outcome.success.tolist() == [True] + [False] * 6
    assert outcome.done.tolist() == [True] * 5 + [False, True]
    assert outcome.action_counts.tolist() == [1, 1, 1, 1, 1, 0, 1]
    assert game.step([Puzzle(0, 1, (1, 2))], [("1/0*2",)], np.zeros((1, 1))).rewards.tolist() == [0.0]
    assert game.step([Puzzle(0, 9, (2, 3))], [("2/3",)], np.zeros((1, 1))).rewards.tolist() == [0.1]


def test_problems_have_solutions_with_plus_and_minus() -> None:
    for level in make_validation_levels(Countdown(), 64):
        sums = {0}
        for number in level.numbers:
            sums = {value + sign * number for value in sums for sign in (-1, 1)}
        assert level.target in sums
        assert level.target > 0
        assert all(1 <= number <= 99 for number in level.numbers)
        assert len(level.numbers) == 4


@pytest.mark.long
def test_sets_and_texts() -> None:
    game = Countdown()
    test_levels = game.make_test_levels(16)
    assert len(collect_level_keys(test_levels)) == 16
    assert not collect_level_keys(test_levels) & collect_level_keys(make_validation_levels(game))
    assert game.format_state(Puzzle(0, 5, (2, 3)), "full") == "Target: 5, nums: [2, 3]"
    assert game.read_action(" 2 + 3 ") == "2+3"
    assert game.read_action("two + 3") is None
    limits = TurnLimits(1, 1, 1)
    assert game.has_held_out_levels
    assert not Countdown(2, 9).has_held_out_levels
    assert [level.seed for level in Countdown(2, 9).make_test_levels(2)] == [900_000_000, 900_000_001]
    assert game.compute_best(test_levels, limits).tolist() == [1.0] * 16
    assert game.compute_chance(test_levels, limits) is None
