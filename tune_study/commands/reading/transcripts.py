"""The command `transcripts`: what the policy saw and wrote in the recorded episodes of a run."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from analysis.data.episodes import format_turns, read_episodes_of_run
from trainable.config.command_lines import format_command
from trainable.config.setting_types import format_value
from trainable.runs.episode_lines import RecordedEpisode
from trainable.runs.study_record import StudyRecord
from tune_study.folder.study_file import read_study
from tune_study.host.console import print_line, print_table
from tune_study.plan.errors import PlanError
from tune_study.plan.typed_settings import find_arm

LEGEND = (
    "Lines with | are what the policy saw, lines with > what it wrote, and the line after that is what it did. Rewards "
    "are those used for training: they include the penalty of an invalid reply, which the policy is not shown."
)


class EpisodeChoice(NamedTuple):
    """Which episodes are wanted. None means all, or for `step` the last validation with recorded episodes.

    success: True for solved episodes, False for failed ones. is_trained: choose episodes that were trained on, instead
    of validation episodes; `step` is then the training step.
    """

    arm: str | None = None
    seed: int | None = None
    step: int | None = None
    success: bool | None = None
    is_trained: bool = False


class RunEpisodes(NamedTuple):
    """The recorded episodes of one run, of validations and of training."""

    run_id: str
    arm: str
    seed: int
    episodes: tuple[RecordedEpisode, ...]


def read_run_episodes(folder: Path, study: StudyRecord) -> list[RunEpisodes]:
    """Read the episodes of every run of the study in `folder`. Raises UnsafePathError if a run's folder is a link."""
    return [
        RunEpisodes(entry.run_id, entry.arm, entry.seed, tuple(read_episodes_of_run(folder, entry.run_id)))
        for entry in study.runs
    ]


def print_transcripts(console: Console, folder: Path, choice: EpisodeChoice, location: str) -> None:
    """Print the chosen episodes of the study in `folder`, or a table of all that there are if none were chosen.

    location: the study as it was typed, for the commands to type next. Raises PlanError, before anything is printed, if
    the chosen runs have no recorded episode, or none of the chosen step.
    """
    study = read_study(folder)
    if choice.arm is not None:
        choice = choice._replace(arm=find_arm(choice.arm, study.axis.values))
    runs = read_run_episodes(folder, study)
    selected_runs = _select_runs(runs, choice)
    steps = sorted({episode.step for run in selected_runs for episode in run.episodes})
    if not steps:
        kind, option = ("the training", "train") if choice.is_trained else ("a validation", "val")
        raise PlanError(
            f"No such run in {format_value(location, 1000)} has recorded an episode of {kind}: a study that fine-tunes "
            f"a language model records some with --set trainer.log_{option}_generations=4. Type --trained for episodes "
            "of the training, and leave it out for those of validations."
        )
    if choice.step is not None and choice.step not in steps:
        raise PlanError(
            f"There is no recorded episode of step {choice.step}: type --step with one of {', '.join(map(str, steps))}."
        )
    if choice == EpisodeChoice(is_trained=choice.is_trained):
        _print_overview(console, selected_runs, choice, location)
        if not choice.is_trained and any(episode.is_trained for run in runs for episode in run.episodes):
            command = format_command("transcripts", location, "--trained")
            print_line(console, f"Episodes that were trained on, with their advantages: {command}")
        return
    print_line(console, LEGEND)
    print_line(console, "")
    for run in selected_runs:
        episodes, selection = select_episodes(run, choice), "no recorded episode of this kind"
        if episodes:
            step, num_solved = episodes[0].step, sum(episode.success for episode in episodes)
            total = sum(episode.step == step for episode in run.episodes)
            time = f"{'of' if choice.is_trained else 'after'} step {step}"
            selection = f"{len(episodes)} of {total} episodes {time}, {num_solved} solved"
        print_line(console, f"Arm {run.arm}, seed {run.seed}: {selection}")
        for episode in episodes:
            print_line(console, "")
            print_episode(console, episode)
        print_line(console, "")


def print_episode(console: Console, episode: RecordedEpisode) -> None:
    """Print what the policy saw (|) and wrote (>) in each turn."""
    origin = f"Level {episode.level} after step {episode.step}"
    if episode.is_trained:
        origin = f"Level {episode.level}, rollout {episode.rollout}, trained in step {episode.step}"
    print_line(console, f"{origin}: {episode.stop_reason}, score {episode.score:.3g}")
    for line in format_turns(episode):
        print_line(console, f"  {line}")


def _print_overview(console: Console, runs: Sequence[RunEpisodes], choice: EpisodeChoice, location: str) -> None:
    rows = []
    for run in runs:
        steps = sorted({episode.step for episode in run.episodes})
        span = f"{steps[0]} to {steps[-1]}" if steps else "-"
        solved = [sum(episode.success for episode in run.episodes if episode.step == step) for step in steps]
        ends = [f"{solved[index]}" for index in (0, -1)] if steps else ["-", "-"]
        rows.append([run.arm, str(run.seed), str(len(run.episodes)), str(len(steps)), span, *ends])
    events = "training steps" if choice.is_trained else "validations"
    print_table(console, ("arm", "seed", "episodes", events, "steps", "solved at first", "solved at last"), rows)
    kind_options = ["--trained"] if choice.is_trained else []
    event = "in the last of these steps" if choice.is_trained else "at the last validation"
    example = next(run for run in runs if run.episodes)
    command = format_command("transcripts", location, *kind_options, "--arm", example.arm, "--seed", str(example.seed))
    print_line(console, f"To read those {event} of a run: {command}")


def _select_runs(runs: Sequence[RunEpisodes], choice: EpisodeChoice) -> list[RunEpisodes]:
    of_arm = [run for run in runs if choice.arm in (None, run.arm)]
    seeds = sorted({run.seed for run in of_arm})
    if choice.seed is not None and choice.seed not in seeds:
        names = ", ".join(map(str, seeds))
        raise PlanError(f"There is no run with seed {choice.seed}: type --seed with one of {names}.")
    return [
        run._replace(episodes=tuple(episode for episode in run.episodes if episode.is_trained == choice.is_trained))
        for run in of_arm
        if choice.seed in (None, run.seed)
    ]


def select_episodes(run: RunEpisodes, choice: EpisodeChoice) -> list[RecordedEpisode]:
    """Select a run's episodes of the chosen step (or the last that has some) with the chosen success."""
    step = choice.step if choice.step is not None else max((episode.step for episode in run.episodes), default=None)
    return [episode for episode in run.episodes if episode.step == step and choice.success in (None, episode.success)]
