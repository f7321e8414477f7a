"""A run restored from its checkpoint, from Python: `probe.restore(RUN, trial=...)` gives its trainer."""

from tune_study.commands.probe import restore

__all__ = ["restore"]
