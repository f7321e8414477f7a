"""The table of an attack: kinds of faults and their cells, how cells are drawn, and what came of each."""

import json
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LONGEST_LIST = 12
"""The names of the cells that were never drawn are printed if there are at most so many of them."""


class NotPossibleError(Exception):
    """The fault cannot be made here; the message says why."""


@dataclass(frozen=True)
class Cell:
    """One fault to try. name: unique within its kind; fault: the data from which the fault is made."""

    name: str
    fault: Any


@dataclass(frozen=True)
class Outcome:
    """What came of a cell.

    failure: a sentence about what went wrong. obstacle: why it could not be tried here. figures: what was measured.
    """

    cell: Cell
    failure: str = ""
    obstacle: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Workshop:
    """A folder for what an attack writes, and the seed from which it draws."""

    folder: Path
    seed: int

    def make_folder(self, name: str) -> Path:
        """Make a new folder with a name of its own."""
        path = self.folder / "".join(letter if letter.isalnum() or letter in "-._" else "-" for letter in name)[:80]
        number = 0
        while True:
            numbered_path = path.with_name(f"{path.name}-{number}") if number else path
            try:
                numbered_path.mkdir(parents=True)
                return numbered_path
            except FileExistsError:
                number += 1

    def make_rng(self, kind: str, cell: Cell) -> random.Random:
        """The random numbers of a cell, which depend on nothing that was tried before it."""
        return random.Random(f"{self.seed}/{kind}/{cell.name}")


CellCheck = Callable[[Workshop, Cell, random.Random], str | None]


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    name: what `--only` takes. batches: its cells; those of a batch are tried together, in their order. try_batch: tries
    some cells of a batch and yields the outcome of each. uses_ray: whether its cells start Ray, so that two of them at
    a time would be slower than one after the other. seconds: what a batch takes, roughly. A bounded attack draws no
    batch that takes longer than what is left.
    """

    name: str
    batches: Sequence[Sequence[Cell]]
    try_batch: Callable[[Workshop, Sequence[Cell]], Iterable[Outcome]]
    uses_ray: bool = False
    seconds: float = 5.0

    @property
    def cells(self) -> list[Cell]:
        """All cells of the kind."""
        return [cell for batch in self.batches for cell in batch]


def make_kind(name: str, cells: Sequence[Cell], check: CellCheck, *, uses_ray: bool = False, seconds: float) -> Kind:
    """Make a kind whose cells are tried one by one. check: returns what failed, or None."""

    def try_batch(workshop: Workshop, batch: Sequence[Cell]) -> Iterator[Outcome]:
        for cell in batch:
            try:
                yield Outcome(cell, failure=check(workshop, cell, workshop.make_rng(name, cell)) or "")
            except NotPossibleError as error:
                yield Outcome(cell, obstacle=str(error))

    return Kind(name, [[cell] for cell in cells], try_batch, uses_ray, seconds)


@dataclass
class KindTally:
    """What came of the cells of a kind so far."""

    kind: Kind
    outcomes: list[Outcome] = field(default_factory=list)
    seconds: float = 0.0

    def make_line(self) -> dict[str, Any]:
        """The JSON line of the kind."""
        obstacles: dict[str, list[str]] = {}
        for outcome in self.outcomes:
            if outcome.obstacle:
                obstacles.setdefault(outcome.obstacle, []).append(outcome.cell.name)
        drawn_names = {outcome.cell.name for outcome in self.outcomes}
        undrawn_names = [cell.name for cell in self.kind.cells if cell.name not in drawn_names]
        line: dict[str, Any] = {
            "kind": self.kind.name,
            "cells": len(self.kind.cells),
            "tried": sum(not outcome.obstacle for outcome in self.outcomes),
            "failed": sum(bool(outcome.failure) for outcome in self.outcomes),
            "never_drawn": len(undrawn_names),
            "not_possible": dict(sorted(obstacles.items())),
            "seconds": round(self.seconds, 1),
        }
        if 0 < len(undrawn_names) <= LONGEST_LIST:
            line["never_drawn_cells"] = undrawn_names
        if figures := {outcome.cell.name: outcome.figures for outcome in self.outcomes if outcome.figures}:
            line["figures"] = figures
        failures = {outcome.cell.name: outcome.failure for outcome in self.outcomes if outcome.failure}
        return {**line, "failures": failures} if failures else line


def select_cells(kinds: Sequence[Kind], patterns: Sequence[str]) -> list[Kind]:
    """The kinds with only those cells that `patterns` name: KIND, or KIND:CELL. ValueError if one names nothing."""
    selected_kinds = []
    for kind in kinds:
        wanted_names = {pattern.partition(":")[2] for pattern in patterns if pattern.partition(":")[0] == kind.name}
        batches = [
            [cell for cell in batch if "" in wanted_names or cell.name in wanted_names] for batch in kind.batches
        ]
        if unknown := wanted_names - {""} - {cell.name for cell in kind.cells}:
            raise ValueError(f"{kind.name} has no cell {sorted(unknown)[0]}")
        if any(batches):
            selected_kinds.append(
                Kind(kind.name, [batch for batch in batches if batch], kind.try_batch, kind.uses_ray, kind.seconds)
            )
    if unknown := {pattern.partition(":")[0] for pattern in patterns} - {kind.name for kind in kinds}:
        raise ValueError(f"there is no kind {sorted(unknown)[0]}: {', '.join(kind.name for kind in kinds)}")
    return selected_kinds


def print_progress(line: str) -> None:
    """Print progress to stderr, separate from the JSON lines."""
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def attack(kinds: Sequence[Kind], workshop: Workshop, deadline: float | None) -> list[KindTally]:
    """Try batches of the kinds in a random order until the deadline, or all of them without one.

    Each next batch is of the kind that took the least time so far, so that a short attack draws from every kind. Ctrl-C
    ends it early. deadline: of `time.monotonic`.
    """
    tallies = [KindTally(kind) for kind in kinds]
    queues = {kind.name: list(kind.batches) for kind in kinds}
    for name, queue in queues.items():
        random.Random(f"{workshop.seed}/{name}").shuffle(queue)
    while True:
        remaining = float("inf") if deadline is None else deadline - time.monotonic()
        open_tallies = [tally for tally in tallies if queues[tally.kind.name] and tally.kind.seconds <= remaining]
        if not open_tallies:
            return tallies
        tally = min(open_tallies, key=lambda tally: tally.seconds)
        start = time.monotonic()
        try:
            for outcome in _try_batch(tally.kind, workshop, queues[tally.kind.name].pop()):
                tally.outcomes.append(outcome)
                if outcome.failure:
                    print_failure(tally.kind, outcome, workshop.seed)
        except KeyboardInterrupt:  # the cells that were tried count, and the others stand in the lines as never drawn
            print_progress("interrupted")
            return tallies
        finally:
            tally.seconds += time.monotonic() - start
        if len(tally.outcomes) % 20 == 0:
            print_progress(f"{tally.kind.name}: {len(tally.outcomes)} of {len(tally.kind.cells)} cells")


def _try_batch(kind: Kind, workshop: Workshop, batch: Sequence[Cell]) -> Iterator[Outcome]:
    """Try a batch. An error of the attack itself is a failure of the next cell, and does not end the attack."""
    outcomes: list[Outcome] = []
    try:
        for outcome in kind.try_batch(workshop, batch):
            outcomes.append(outcome)
            yield outcome
    except Exception as error:
        problem = f"the check raised {type(error).__name__}: {str(error)[:600]}"
        yield Outcome(batch[min(len(outcomes), len(batch) - 1)], failure=problem)


def print_failure(kind: Kind, outcome: Outcome, seed: int) -> None:
    """Print a failure, and the command that repeats it."""
    command = f"python -m tests.attack --seed {seed} --only '{kind.name}:{outcome.cell.name}'"
    print_progress(f"FAILED {kind.name}:{outcome.cell.name}: {outcome.failure}\n    {command}")


def print_lines(lines: Iterable[dict[str, Any]]) -> None:
    """Print JSON lines to stdout."""
    for line in lines:
        print(json.dumps(line), flush=True)
