"""How many examples a property is tested with."""

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings

DEFAULT_EXAMPLES = 100
MIN_EXAMPLES = 5


def draw_examples(count: int, **options: Any) -> settings:
    """Make the settings of a property that is tested with `count` examples, or fewer under a profile with fewer.

    A profile with a quarter of Hypothesis' 100 examples draws a quarter of `count`.
    """
    share = settings().max_examples / DEFAULT_EXAMPLES
    return settings(max_examples=min(count, max(MIN_EXAMPLES, round(share * count))), **options)


def thin_out(values: Iterable[Any], every: int = 3) -> list[Any]:
    """Parameters of a test of which CI takes the first and each n-th after it; the others are in the slow tier."""
    return [pytest.param(value, marks=[pytest.mark.slow] * bool(index % every)) for index, value in enumerate(values)]
