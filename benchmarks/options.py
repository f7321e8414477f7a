"""What the command lines of several benchmarks have in common."""

import argparse


def parse_count(text: str) -> int:
    """A whole number of at least 1."""
    try:
        count = int(text)
    except ValueError:
        count = 0
    if count < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return count


def make_parser(documentation: str | None) -> argparse.ArgumentParser:
    """A parser that is described by the first line of a script's docstring and shows every default."""
    return argparse.ArgumentParser(
        description=(documentation or "").partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
