"""The command `demo`: the recorded study with its statuses, its verdicts, two episodes and its report."""

import os
from pathlib import Path

from rich.console import Console

from trainable.config.command_lines import format_command
from trainable.runs.study_record import StudyRecord, find_record
from tune_study.commands.describe import print_status
from tune_study.commands.reading.transcripts import LEGEND, RunEpisodes, print_episode, read_run_episodes
from tune_study.demo.archive import read_recorded_study, unpack
from tune_study.host.console import print_line
from tune_study.plan.errors import PlanError
from tune_study.tune.conclusion import print_next_commands, write_results


def show_demo(console: Console, output: Path) -> str:
    """Unpack the recorded study below `output`, unless it is there already, and print what it came to.

    Returns what went wrong while tables and report were written, or an empty text. Raises PlanError if there is
    something else at its place.
    """
    study = read_recorded_study()
    folder = output / "results" / study.run
    try:
        if not os.path.lexists(folder):
            unpack(folder)
    except OSError as error:
        raise PlanError(f"--output {output} cannot be written ({error.strerror}): type another folder.") from None
    content = find_record(StudyRecord, folder)
    # Another version may have recorded another study.
    if content is None or any(
        getattr(content, name) != getattr(study, name) for name in ("recorded", "run", "created_at")
    ):
        raise PlanError(f"{folder} holds something else: type another folder, as in `demo --output elsewhere`.")
    print_line(
        console, "This study was recorded earlier and comes with tune_study. Nothing is trained now. It was run by:"
    )
    print_line(console, f"  {study.recorded}")
    print_line(console, "")
    print_status(console, folder, str(folder), study, is_running=False)
    print_line(console, "")
    print_line(console, LEGEND)
    for run, success, words in _choose_episodes(read_run_episodes(folder, study), study.baseline):
        step = max(episode.step for episode in run.episodes)
        episode = next(item for item in run.episodes if item.step == step and item.success == success)
        print_line(console, "")
        print_line(console, f"{words} of arm {run.arm}, seed {run.seed}:")
        print_episode(console, episode)
    print_line(console, "")
    # Last, because it takes longest: what comes before is on the terminal in the meantime.
    print_line(console, "Making tables and report ...")
    # The page has all figures; who wants them as files types `report`.
    problem = write_results(folder, console, with_pictures=False)
    print_line(
        console, "Three seeds are few: docs/collapse.md has ten of the same study, and says what holds over them."
    )
    print_line(console, "")
    print_next_commands(
        console,
        (
            *(format_command(name, folder) for name in ("transcripts", "explain", "watch")),
            format_command("run", "kl", "--preset", "laptop", "--output", "mine"),
        ),
    )
    return problem


def _choose_episodes(runs: list[RunEpisodes], baseline: str) -> list[tuple[RunEpisodes, bool, str]]:
    """A run of the baseline with a failed episode at its end, and one of another arm with a solved one."""

    def find_run(is_baseline: bool, success: bool) -> RunEpisodes | None:
        for run in runs:
            last_step = max((episode.step for episode in run.episodes), default=0)
            ends = [episode.success for episode in run.episodes if episode.step == last_step]
            if (run.arm == baseline) == is_baseline and success in ends:
                return run
        return None

    choices = ((True, False, "A failed episode at the end"), (False, True, "A solved episode at the end"))
    return [(run, success, words) for is_baseline, success, words in choices if (run := find_run(is_baseline, success))]
