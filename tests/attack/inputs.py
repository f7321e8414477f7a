"""Malformed command lines, settings and folders drawn by hypothesis, and checkpoints damaged at random."""

import random
import shutil
from collections.abc import Callable
from functools import partial

from tests.attack.cells import Cell, Kind, NotPossibleError, Workshop, make_kind
from tests.attack.children import ChildError, call_in_child
from tests.attack.sample_study import SampleStudy
from tests.faults import malformed, malformed_folders
from tests.faults.damage import DAMAGE_KINDS, FILES, damage, is_refused

EXAMPLES = 250
"""Examples of a cell. Each cell has a seed of its own, so that cells of a kind draw different ones."""
CELLS_PER_CHECK = 8
CHECKPOINTS_PER_CELL = 40

CHECKS: dict[str, Callable[..., malformed.Tally]] = {
    "malformed-lines": malformed.check_command_lines,
    "arbitrary-lines": malformed.check_arbitrary_lines,
    "configurations": malformed.check_configurations,
    "study-folders": malformed_folders.check_folders,
    "reports": malformed_folders.check_reports,
}
REPORT_EXAMPLES = 10
"""A report takes seconds."""


def _check_examples(workshop: Workshop, cell: Cell, rng: random.Random) -> str | None:
    name, _ = cell.fault
    examples = REPORT_EXAMPLES if name == "reports" else EXAMPLES
    try:
        call_in_child(partial(CHECKS[name], examples, seed=rng.getrandbits(32)), seconds=600)
    except ChildError as error:
        return str(error)
    return None


def make_inputs() -> Kind:
    """Make the kind of malformed inputs."""
    cells = [Cell(f"{name}/{number}", (name, number)) for name in CHECKS for number in range(CELLS_PER_CHECK)]
    return make_kind("inputs", cells, _check_examples, seconds=20.0)


def _damage_checkpoints(sample: SampleStudy, workshop: Workshop, cell: Cell, rng: random.Random) -> str | None:
    """Damage copies of a real checkpoint, one after the other; each must be refused."""
    source = next(sample.folder.glob("runs/*/state/step_*"))
    folder = workshop.make_folder("checkpoint")
    n_damaged = 0
    try:
        for _ in range(CHECKPOINTS_PER_CELL):
            shutil.copytree(source, folder / "copy")
            if damage(folder / "copy", cell.fault, rng):
                n_damaged += 1
                if not is_refused(folder / "copy"):
                    return f"number {n_damaged} was not refused"
            shutil.rmtree(folder / "copy")
    finally:
        shutil.rmtree(folder)
    if not n_damaged:
        raise NotPossibleError("this damage changed nothing")
    return None


def make_checkpoints(sample: SampleStudy) -> Kind:
    """Make the kind of checkpoints damaged at random."""
    cells = [Cell(f"{kind}/{number}", kind) for kind in DAMAGE_KINDS for number in range(len(FILES) * 2)]
    return make_kind("checkpoints", cells, partial(_damage_checkpoints, sample), seconds=2.0)
