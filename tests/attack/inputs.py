"""Malformed command lines, settings and folders drawn by hypothesis."""

import random

import pytest

from tests.faults import malformed, malformed_folders


@pytest.mark.parametrize("number", range(8))
@pytest.mark.parametrize(
    ("check", "examples"),
    [
        (malformed.check_command_lines, 250),
        (malformed.check_configurations, 250),
        (malformed_folders.check_folders, 250),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_inputs(rng: random.Random, check: malformed.SeededCheck, examples: int, number: int) -> None:
    assert check(examples, seed=rng.getrandbits(32)).examples >= examples
