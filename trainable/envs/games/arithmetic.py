"""Parse and compute arithmetic expressions with a small grammar, without `eval`.

expression = term { ("+" | "-") term }
term       = factor { ("*" | "/") factor }
factor     = number | "(" expression ")"
number     = one to nine digits
"""

import re
from fractions import Fraction
from typing import NamedTuple

MAX_LENGTH = 200
"""Maximum number of characters of an expression, which bounds parsing time and nesting."""

_TEXT = re.compile(r"(?:\s*(?:[0-9]{1,9}(?![0-9])|[-+*/()]))*\s*")
_TOKEN = re.compile(r"[0-9]+|[-+*/()]")


class Expression(NamedTuple):
    """A parsed expression.

    text: its tokens without blanks. numbers: in the order of the text. value: the exact result; None after a division
    by zero.
    """

    text: str
    numbers: tuple[int, ...]
    value: Fraction | None


def parse_expression(text: str) -> Expression | None:
    """Parse a text as an expression; return None if it is not one.

    Example:
        >>> parse_expression("(1 + 2) * 3").value
        Fraction(9, 1)
    """
    tokens = _TOKEN.findall(text)
    if not tokens or len(text) > MAX_LENGTH or not _TEXT.fullmatch(text):
        return None
    parser = _Parser(tokens)
    try:
        value = parser.read_sum()
    except _SyntaxError:
        return None
    numbers = tuple(int(token) for token in tokens if token.isdigit())
    return Expression("".join(tokens), numbers, value) if parser.position == len(tokens) else None


class _SyntaxError(Exception):
    """The tokens are not an expression."""


class _Parser:
    """Read tokens from left to right and compute on the fly. None stands for the result of a division by zero."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens, self.position = tokens, 0

    def read_sum(self) -> Fraction | None:
        value = self._read_product()
        while self._peek() in ("+", "-"):
            is_sum = self._take() == "+"
            term = self._read_product()
            value = None if value is None or term is None else value + term if is_sum else value - term
        return value

    def _read_product(self) -> Fraction | None:
        value = self._read_factor()
        while self._peek() in ("*", "/"):
            is_product = self._take() == "*"
            factor = self._read_factor()
            if value is None or factor is None or (not is_product and factor == 0):
                value = None
            else:
                value = value * factor if is_product else value / factor
        return value

    def _read_factor(self) -> Fraction | None:
        token = self._take()
        if token.isdigit():
            return Fraction(int(token))
        if token != "(":
            raise _SyntaxError
        value = self.read_sum()
        if self._take() != ")":
            raise _SyntaxError
        return value

    def _peek(self) -> str:
        return self.tokens[self.position] if self.position < len(self.tokens) else ""

    def _take(self) -> str:
        token = self._peek()
        if not token:
            raise _SyntaxError
        self.position += 1
        return token
