"""The command `demo`: show the recorded study with its statuses, verdicts, two episodes and its report."""

import os
from pathlib import Path

from rich.console import Console

from trainable.config.command_lines import format_command
from trainable.runs.study_record import StudyRecord, find_record
from tune_study.commands.describe import print_status, read_status
from tune_study.commands.reading.transcripts import (
    LEGEND,
    EpisodeChoice,
    print_episode,
    read_run_episodes,
    select_episodes,
)
from tune_study.demo.archive import read_recorded_study, unpack
from tune_study.folder.outputs import check_writable
from tune_study.host.console import print_line
from tune_study.plan.errors import PlanError
from tune_study.tune.session import write_results


def show_demo(console: Console, output: Path) -> str:
    """Unpack the recorded study below `output`, unless it is there already, and print its results.

    Returns what went wrong while tables and report were written, or an empty text. Raises PlanError if something else
    is in its place.
    """
    study = read_recorded_study()
    folder = output / "results" / study.run
    check_writable(output)
    if not os.path.lexists(folder):
        unpack(folder)
    content = find_record(StudyRecord, folder)
    # Another version may have recorded another study. A user may have continued this one, which changes its record.
    if content is None or (content.run, content.created_at) != (study.run, study.created_at):
        raise PlanError(f"{folder} holds something else: type another folder, as in `demo --output elsewhere`.")
    print_line(
        console, "This study was recorded earlier and comes with tune_study. Nothing is trained now. It was run by:"
    )
    print_line(console, f"  {study.recorded}")
    print_line(console, "")
    print_status(console, read_status(folder, str(folder), study, is_running=False))
    print_line(console, "")
    print_line(console, LEGEND)
    # The first failed episode at the end of a baseline run, and the first solved one at the end of another.
    runs = read_run_episodes(folder, study)
    for success, words in ((False, "A failed episode at the end"), (True, "A solved episode at the end")):
        for run in [run for run in runs if (run.arm == study.baseline) != success]:
            if episodes := select_episodes(run, EpisodeChoice(success=success)):
                print_line(console, "")
                print_line(console, f"{words} of arm {run.arm}, seed {run.seed}:")
                print_episode(console, episodes[0])
                break
    print_line(console, "")
    # Last, because it takes longest: the rest is on the terminal by then.
    print_line(console, "Making tables and report ...")
    # The page has all figures; `report` also writes them as files.
    problem = write_results(folder, console, with_pictures=False)
    print_line(
        console, "Three seeds are few: docs/collapse.md has ten of the same study, and says what holds over them."
    )
    print_line(console, "")
    print_line(console, "To continue, open the report in a browser, or type:")
    for name in ("transcripts", "explain", "watch"):
        print_line(console, f"  {format_command(name, folder)}")
    print_line(console, f"  {format_command('run', 'kl', '--preset', 'laptop', '--output', 'mine')}")
    return problem
