"""Attack the project for some minutes, and print a JSON line per kind of fault: `make attack MINUTES=10 SEED=0`.

Every cell of the tables is tried with MINUTES=0. The exit code is 1 if one failed. `--only KIND` or `--only KIND:CELL`,
which may be repeated, tries these cells alone. Ctrl-C prints the lines of the cells that were tried.
"""

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tests.attack.cells import (
    Cell,
    Kind,
    KindTally,
    Outcome,
    Workshop,
    attack,
    print_lines,
    print_progress,
    select_cells,
)
from tests.attack.children import call_in_background
from tests.attack.damaged_files import make_damaged_files
from tests.attack.extremes import make_extremes
from tests.attack.growth import make_growth
from tests.attack.hostile.folders import make_hostile_folders
from tests.attack.inputs import make_checkpoints, make_inputs
from tests.attack.kills import make_kills, make_sandbox_kills
from tests.attack.sample_study import SampleStudy, preload_modules, write_sample_study
from tests.attack.starts import make_starts
from tests.attack.surroundings import make_surroundings

MIN_SECONDS = 20.0
"""What remains for the last cells of a bounded attack, however long the sample study took."""


def make_kinds(sample: SampleStudy) -> list[Kind]:
    """Make all kinds of faults."""
    return [
        make_damaged_files(sample),
        make_hostile_folders(sample),
        make_extremes(),
        make_checkpoints(sample),
        make_inputs(),
        make_kills(),
        make_sandbox_kills(),
        make_starts(),
        make_surroundings(sample),
        make_growth(),
    ]


def run_attack(kinds: Sequence[Kind], workshop: Workshop, deadline: float | None) -> list[KindTally]:
    """Attack with kinds that start Ray in one process, and with the others in another at the same time."""
    quiet_kinds = [kind for kind in kinds if not kind.uses_ray]
    loud_kinds = [kind for kind in kinds if kind.uses_ray]
    if not quiet_kinds or not loud_kinds:
        return attack(kinds, workshop, deadline)

    def try_quiet_kinds() -> dict[str, tuple[list[Outcome], float]]:
        tallies = attack(quiet_kinds, workshop, deadline)
        # The fault of a cell may be a function that cannot be pickled, and the lines need only the cell's name.
        return {
            tally.kind.name: (
                [replace(outcome, cell=Cell(outcome.cell.name, None)) for outcome in tally.outcomes],
                tally.seconds,
            )
            for tally in tallies
        }

    with call_in_background(try_quiet_kinds) as wait:
        loud_tallies = attack(loud_kinds, workshop, deadline)
        try:
            quiet_results = wait()
        except KeyboardInterrupt:  # the other process has got it too, and sends what it has tried
            quiet_results = wait()
    return [*(KindTally(kind, *quiet_results[kind.name]) for kind in quiet_kinds), *loud_tallies]


def main(arguments: Sequence[str] | None = None) -> int:
    """Attack as the options say; return 1 if a cell failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.attack", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="0: every cell once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", default=[], metavar="KIND[:CELL]")
    parser.add_argument("--list", action="store_true", help="print the names of all cells")
    parser.add_argument("--without-ray", action="store_true", help="only kinds that start no Ray")
    options = parser.parse_args(arguments)
    # A shell starts background jobs with Ctrl-C ignored, and the studies would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="attack-", ignore_cleanup_errors=True) as name:
        workshop = Workshop(Path(name), options.seed)
        start = time.monotonic()
        deadline = None
        if options.minutes and not options.only:
            deadline = start + 60 * options.minutes
        print_progress("making the sample study")
        sample = write_sample_study(workshop.folder, with_ray=not options.without_ray)
        kinds = make_kinds(sample)
        if options.only:
            kinds = select_cells(kinds, options.only)
        if options.without_ray:
            kinds = [kind for kind in kinds if not kind.uses_ray]
        if options.list:
            print("\n".join(f"{kind.name}:{cell.name}" for kind in kinds for cell in kind.cells))
            return 0
        preload_modules(sample)
        if deadline is not None:
            deadline = max(deadline, time.monotonic() + MIN_SECONDS)
        tallies = run_attack(kinds, workshop, deadline)
        lines = [tally.make_line() for tally in tallies]
        print_lines(lines)
        return int(any(line["failed"] for line in lines))


if __name__ == "__main__":
    sys.exit(main())
