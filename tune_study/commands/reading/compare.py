"""The command `compare`: which settings of several studies differ, and how their common arms compare."""

import json
import string
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console

from analysis.data.frames import StudyFrames, to_records
from analysis.data.load import load
from analysis.report.comparison import SECTIONS, Comparison, compare, write_comparison
from analysis.report.page import format_plain_table
from analysis.report.section import Table
from trainable.config.command_lines import format_command
from trainable.config.setting_types import format_value
from tune_study.folder import locate
from tune_study.host.console import print_line, print_table
from tune_study.plan.errors import PlanError, as_plan_error

LABELS = string.ascii_uppercase
"""Studies are called A, B, ... in the order in which they were typed, since two may share a name."""


def read_comparison(runs: Sequence[str]) -> Comparison:
    """Read and compare the studies that the arguments RUN name. Raises PlanError if they cannot be compared."""
    if not 2 <= len(runs) <= len(LABELS):
        count = f"{len(runs)} {'was' if len(runs) == 1 else 'were'} typed"
        example = format_command("compare", "results/kl_sweep_sokoban-tiny", "other/results/kl_sweep_sokoban-tiny")
        raise PlanError(f"`compare` takes from 2 to {len(LABELS)} studies, and {count}: type for example `{example}`.")
    folders = dict(zip(LABELS, runs, strict=False))
    studies: dict[str, StudyFrames] = {}
    with ExitStack() as stack:
        for label, run in folders.items():
            folder, is_running = stack.enter_context(locate.open_for_reading(run))
            with as_plan_error(ValueError):
                studies[label] = load(folder, live=is_running)
    with as_plan_error(ValueError):
        return compare(studies, folders)


def write_page(comparison: Comparison, path: Path) -> Path:
    """Write the page of a comparison and return its path. Raises PlanError if it cannot be written."""
    try:
        return write_comparison(comparison, path)
    except OSError as error:
        reason = error.strerror or error
        raise PlanError(
            f"The page cannot be written to {format_value(path, 1000)} ({reason}): type another --to."
        ) from None


def summarize_comparison(comparison: Comparison, page: Path) -> dict[str, Any]:
    """Summarize a comparison for other programs. A setting that a study lacks is missing in its values."""
    numbers = ("reference", "other", "difference", "difference_low", "difference_high", "p", "p_holm", "p_equal_holm")
    return {
        "reference": comparison.reference,
        "outcome": comparison.outcome.name,
        "studies": comparison.describe_studies(),
        "settings": [
            {
                "setting": row["setting"],
                "values": {label: json.loads(row[label]) for label in comparison.studies if row[label]},
            }
            for row in to_records(comparison.settings)
        ],
        "arms": [
            {
                **{name: row[name] for name in ("study", "arm", "other_arm", "verdict")},
                **{name.removeprefix("difference_"): row[name] for name in numbers},
            }
            for row in to_records(comparison.arms)
        ],
        "arms_of_one_study": comparison.other_arms,
        "page": str(page),
    }


def print_comparison(console: Console, comparison: Comparison, page: Path) -> None:
    """Print the sections of the page, its conclusion, and its path."""
    for section in SECTIONS:
        for sentence in section.sentences(comparison):
            print_line(console, sentence)
        for table in section.tables(comparison):
            if isinstance(table, Table) and table.rows:
                headings, *rows = format_plain_table(table)
                print_table(console, headings, rows, optional=headings[:6:-1])
                print_line(console, "")
    for sentence in comparison.describe():
        print_line(console, sentence)
    print_line(console, f"Page: {page}")
