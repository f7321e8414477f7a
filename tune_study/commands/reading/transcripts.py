"""The command `transcripts`: what the policy saw and wrote in the recorded episodes of a run."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from rich.console import Console

from analysis.data.episodes import format_turns, read_episodes_of_run
from trainable.config.command_lines import format_command
from trainable.config.setting_types import format_value
from trainable.runs.episode_lines import RecordedEpisode
from trainable.runs.study_record import StudyRecord
from tune_study.host.console import print_line, print_table
from tune_study.plan.errors import PlanError

_HOW_TO_RECORD = (
    "A study that fine-tunes a language model records some of each validation with --set trainer.log_val_generations=4."
)
_HOW_TO_RECORD_TRAINED = (
    "A study that fine-tunes a language model records some of those that it trains on with --set "
    "trainer.log_train_generations=4, at each validation."
)

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
    """Read the episodes of every run of the study in `folder`, results/<run>. study: content of study.json.

    Raises UnsafePathError if the folder of a run is a symbolic link.
    """
    return [
        RunEpisodes(entry.run_id, entry.arm, entry.seed, tuple(read_episodes_of_run(folder, entry.run_id)))
        for entry in study.runs
    ]


def print_transcripts(console: Console, runs: Sequence[RunEpisodes], choice: EpisodeChoice, location: str) -> None:
    """Print the chosen episodes, or a table of all that there are if none were chosen.

    location: the study as it was typed, for the commands to type next. Raises PlanError, before anything is printed, if
    the chosen runs have no recorded episode, or none of the chosen step.
    """
    selected_runs = _select_runs(runs, choice)
    steps = sorted({episode.step for run in selected_runs for episode in run.episodes})
    if not steps:
        _refuse(runs, choice, location)
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
        episodes = select_episodes(run, choice)
        print_line(console, f"Arm {run.arm}, seed {run.seed}: {_describe_selection(run, choice, episodes)}")
        for episode in episodes:
            print_line(console, "")
            print_episode(console, episode)
        print_line(console, "")


def _refuse(runs: Sequence[RunEpisodes], choice: EpisodeChoice, location: str) -> NoReturn:
    """Raise the error for runs that have recorded no episode of the chosen kind."""
    other_runs = _select_runs(runs, choice._replace(is_trained=not choice.is_trained))
    has_others = any(run.episodes for run in other_runs)
    of_these = "No run" if len(other_runs) == len(runs) else "No such run"
    kind, advice, other_advice = (
        ("that it trained on", _HOW_TO_RECORD_TRAINED, "Those of validations are shown without --trained.")
        if choice.is_trained
        else ("of a validation", _HOW_TO_RECORD, "Type --trained for those that it trained on.")
    )
    raise PlanError(
        f"{of_these} in {format_value(location, 1000)} has recorded an episode {kind}. "
        f"{other_advice if has_others else advice}"
    )


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
    # The example is a run with failed episodes, if there is one.
    failing = next((run for run in runs if any(not episode.success for episode in select_episodes(run, choice))), None)
    example = failing or next(run for run in runs if run.episodes)
    options = [*kind_options, "--arm", example.arm, "--seed", str(example.seed), *["--failed"] * bool(failing)]
    command = format_command("transcripts", location, *options)
    print_line(console, f"To read those {'that failed ' if failing else ''}{event} of a run: {command}")


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


def _describe_selection(run: RunEpisodes, choice: EpisodeChoice, episodes: Sequence[RecordedEpisode]) -> str:
    """Describe the selection: `2 episodes after step 60, 1 solved`, or `1 of 2 episodes of step 60 failed`."""
    if not episodes:
        return "no recorded episode of this kind"
    step = episodes[0].step
    time = f"{'of' if choice.is_trained else 'after'} step {step}"
    total = sum(episode.step == step for episode in run.episodes)
    noun = "episode" if total == 1 else "episodes"
    if choice.success is None:
        return f"{total} {noun} {time}, {sum(episode.success for episode in episodes)} solved"
    verb = "was" if len(episodes) == 1 else "were"
    return f"{len(episodes)} of {total} {noun} {time} {f'{verb} solved' if choice.success else 'failed'}"
