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
from pathlib import Path

from tests.attack.cells import Kind, Workshop, attack, print_lines, print_progress, select_cells
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
        tallies = attack(kinds, workshop, deadline)
        lines = [tally.make_line() for tally in tallies]
        print_lines(lines)
        return int(any(line["failed"] for line in lines))


if __name__ == "__main__":
    sys.exit(main())
