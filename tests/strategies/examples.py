"""How many examples a property is tested with."""

from typing import Any

from hypothesis import settings

DEFAULT_EXAMPLES = 100
MIN_EXAMPLES = 5


def draw_examples(count: int, **options: Any) -> settings:
    """Make the settings of a property that is tested with `count` examples, or fewer under a profile with fewer.

    A profile with a quarter of Hypothesis' 100 examples draws a quarter of `count`.
    """
    share = settings().max_examples / DEFAULT_EXAMPLES
    return settings(max_examples=min(count, max(MIN_EXAMPLES, round(share * count))), **options)
