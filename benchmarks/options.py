"""Command-line options shared by several benchmarks."""

import argparse


def parse_count(text: str) -> int:
    """Parse an integer of at least 1."""
    try:
        count = int(text)
    except ValueError:
        count = 0  # text that is no integer gets the error below too
    if count < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 1: type a number such as 5")
    return count


def make_parser(documentation: str | None) -> argparse.ArgumentParser:
    """A parser whose description is the first line of a script's docstring, and whose help shows all defaults."""
    return argparse.ArgumentParser(
        description=(documentation or "").partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
