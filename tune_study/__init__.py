"""Run: the only package that starts Ray."""

from typing import Any


def __getattr__(name: str) -> Any:
    """`tune_study.run`, which is imported at its first use: the command line needs a fraction of a second to start."""
    if name == "run":
        from tune_study.api import run

        return run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
