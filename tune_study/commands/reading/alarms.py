"""The command `alarms`: which threshold on which symptom would have announced the collapses of recorded studies."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from analysis.data.frames import StudyFrames, to_records
from analysis.data.load import find_study_folders, load
from analysis.sweep.alarms import MAX_FALSE_ALARMS, compare_alarms, find_distinct_ends
from analysis.sweep.collapse import find_run_ends
from trainable.config.setting_types import format_value
from tune_study.host.console import print_line, print_table
from tune_study.plan.errors import PlanError


def read_studies(folders: Sequence[Path]) -> list[StudyFrames]:
    """Read all studies of language models in these folders. Raises PlanError if there is none."""
    try:
        paths = [path for folder in folders for path in find_study_folders(folder)]
        studies = [load(path) for path in dict.fromkeys(paths)]
    except ValueError as error:
        raise PlanError(str(error)) from None
    studies = [frames for frames in studies if frames.is_fine_tuning]
    if not studies:
        names = ", ".join(format_value(folder, 1000) for folder in folders)
        raise PlanError(
            f"There is no study of a language model in {names}: type an output folder, or folders results/<run>."
        )
    return studies


def print_alarms(console: Console, studies: Sequence[StudyFrames], first_test_seed: int) -> None:
    """Print how many runs collapsed, and each symptom's best rule with its score on the test seeds."""
    ends = find_distinct_ends(studies)
    num_repeated = sum(len(find_run_ends(frames)) for frames in studies) - sum(map(len, ends))
    num_collapsed = sum(int(table["is_collapse"].sum()) for table in ends)
    num_runs = sum(len(table) for table in ends)
    repeats = f", without {num_repeated} that repeat a run of another study" if num_repeated else ""
    studies_text = f"{len(studies)} {'studies' if len(studies) > 1 else 'study'}"
    print_line(console, f"{studies_text}, {num_runs} runs with rows{repeats}: {num_collapsed} collapsed.")
    table = compare_alarms(studies, first_test_seed)
    if table.empty:
        print_line(
            console,
            f"An alarm is chosen on collapsed runs with seeds below {first_test_seed} and scored on runs with seeds "
            f"from {first_test_seed} on (--first-test-seed). These studies lack one of the two.",
        )
        return
    columns = ("alarm", "announces", "95 %", "lead (steps)", "false alarms", "95 %")
    print_table(console, columns, [_format_cells(row) for row in to_records(table)])
    print_line(
        console,
        f"Each alarm is the best of its symptom on seeds below {first_test_seed} with false alarms in at most "
        f"{MAX_FALSE_ALARMS:.0%} of the runs that did not collapse, and is scored on the other seeds. Intervals are "
        "over runs, as if all were independent.",
    )


def _format_cells(row: dict[str, Any]) -> list[str]:
    lead = "-" if math.isnan(row["lead"]) else f"{row['lead']:g}"
    interval = "" if math.isnan(row["lead_low"]) else f" [{row['lead_low']:g}, {row['lead_high']:g}]"
    return [
        row["text"],
        f"{row['detected']} of {row['collapsed']}",
        f"{row['detected_low']:.2f} to {row['detected_high']:.2f}",
        lead + interval,
        f"{row['false_alarms']} of {row['healthy']}",
        f"{row['false_low']:.2f} to {row['false_high']:.2f}",
    ]
