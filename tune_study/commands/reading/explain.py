"""The command `explain`: what changed in a run that collapsed, and since when."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rich.console import Console

from analysis.data.episodes import read_episodes
from analysis.data.frames import StudyFrames, to_records
from analysis.data.load import load
from analysis.stats.change_points import MIN_POINTS
from analysis.sweep import symptoms
from analysis.sweep.collapse import HALVED_SUCCESS, count_collapses, describe_signal_problems, find_run_ends
from analysis.sweep.findings import describe_collapses
from analysis.sweep.verdicts import format_number, format_p_value, format_status
from trainable.config.command_lines import format_command
from trainable.config.setting_types import format_value
from trainable.runs.episode_lines import RecordedEpisode
from tune_study.commands.reading.transcripts import print_episode
from tune_study.host.console import print_line, print_table
from tune_study.plan.errors import PlanError, as_plan_error
from tune_study.plan.typed_settings import find_arm

_TOO_SHORT = f"No change can be resolved in fewer than {MIN_POINTS} steps."


def read_frames(folder: Path, is_running: bool) -> StudyFrames:
    """Read the study in results/<run>. Raises PlanError if it trains no language model, or if a file is damaged."""
    with as_plan_error(ValueError):
        frames = load(folder, live=is_running)
    if not frames.has_symptoms:
        raise PlanError(
            f"{format_value(folder, 1000)} fine-tuned no language model: the symptoms of `explain` are those of "
            "language models. report.html has the curves of its runs."
        )
    return frames


def select_ends(frames: StudyFrames, arm: str | None, seed: int | None) -> pd.DataFrame:
    """Select the runs of one arm and seed (all, if None). Raises PlanError if no run with rows matches."""
    ends = find_run_ends(frames)
    if ends.empty:
        return ends
    if arm is not None:
        arm = find_arm(arm, list(dict.fromkeys(ends["arm"])))
        ends = ends[ends["arm"] == arm]
    if seed is not None and seed not in set(ends["seed"]):
        seeds = ", ".join(str(number) for number in sorted(set(ends["seed"])))
        of_arm = f" of arm {format_value(arm)}" if arm is not None else ""
        raise PlanError(f"There is no run{of_arm} with seed {seed}: type --seed with one of {seeds}.")
    return ends if seed is None else ends[ends["seed"] == seed]


def print_explanation(
    console: Console, folder: Path, run_name: str, frames: StudyFrames, arm: str | None, seed: int | None
) -> None:
    """Print what happened in the runs of one arm and seed (all, if None).

    For a single run, this is the onset of each symptom, and an episode from before, during and after the collapse. For
    several, it is the order of the symptoms over the collapsed runs, and a line per run.

    run_name: the study as it was typed, for the commands to type next. Without an arm and a seed, a sentence about all
    arms comes first.
    """
    ends = select_ends(frames, arm, seed)
    if ends.empty:
        print_line(console, "No run of this study has rows yet: there is nothing to explain.")
        return
    if arm is None and seed is None:
        for sentence in filter(None, (*describe_signal_problems(frames), describe_collapses(count_collapses(frames)))):
            print_line(console, sentence)
    if len(ends) == 1:
        _print_run(console, folder, frames, ends)
        return
    collapsed_ends = ends[ends["is_collapse"]]
    example = to_records((ends if collapsed_ends.empty else collapsed_ends).head(1))[0]
    command = format_command("explain", run_name, "--arm", example["arm"], "--seed", str(example["seed"]))
    if collapsed_ends.empty:
        is_short = all(len(symptoms.select_steps(frames, run)) < MIN_POINTS for run in to_records(ends))
        advice = f"To see what changed in a run that did not collapse, type: {command}"
        print_line(console, _TOO_SHORT if is_short else advice)
        return
    generator = np.random.default_rng(symptoms.PERMUTATION_SEED)
    onsets = symptoms.find_collapse_onsets(frames, generator, set(collapsed_ends["run_id"]))
    for sentence in symptoms.describe_order(onsets):
        print_line(console, sentence)
    print_line(console, "")
    columns = (
        *("symptom", "changed in", "of well runs", "first in", "median onset"),
        *("before success", "after", "not known", "lead"),
    )
    order_rows = []
    for row in to_records(symptoms.summarize_order(onsets)):
        interval = "" if np.isnan(row["lead_low"]) else f" [{row['lead_low']:g}, {row['lead_high']:g}]"
        counts = (
            f"{row[name]} of {row[f'{prefix}runs']}" for name, prefix in (("changed", ""), ("well_changed", "well_"))
        )
        order_rows.append(
            [
                *(row["label"], *counts, str(row["first"]), _format_step(row["median_onset"])),
                *(str(row[name]) for name in ("earlier", "later", "undecided")),
                "-" if np.isnan(row["lead"]) else f"{row['lead']:g}{interval}",
            ]
        )
    print_table(console, columns, order_rows, ("not known", "after", "before success", "first in"))
    print_line(console, "")
    first_labels = onsets[onsets["is_first"] & onsets["is_collapse"]].set_index("run_id")["label"].to_dict()
    rows = [
        [run["arm"], str(run["seed"]), _describe_end(run), first_labels.get(run["run_id"], "-")]
        for run in to_records(ends)
    ]
    print_table(console, ("arm", "seed", "end", "changed first"), rows)
    print_line(console, f"One run: {command}")


def _describe_end(run: dict[str, Any]) -> str:
    """Describe a run's end: `collapsed at step 38 (reward_variance_collapse)`, or `completed at step 60`."""
    if not run["is_collapse"]:
        return f"{format_status(run['status'])} at step {run['end_step']:g}"
    cause = "success below half of its maximum at two validations" if run["cause"] == HALVED_SUCCESS else run["cause"]
    return f"collapsed at step {run['end_step']:g} ({cause})"


def _print_run(console: Console, folder: Path, frames: StudyFrames, ends: pd.DataFrame) -> None:
    (run,) = to_records(ends)
    print_line(console, f"Arm {run['arm']}, seed {run['seed']}: {_describe_end(run)}.")
    onsets = symptoms.find_onsets(frames, ends, np.random.default_rng(symptoms.PERMUTATION_SEED))
    changes = onsets.dropna(subset="onset").sort_values(["onset", "p"], kind="stable")
    if changes.empty:
        is_short = len(symptoms.select_steps(frames, run)) < MIN_POINTS
        print_line(console, _TOO_SHORT if is_short else "No change is resolved.")
    else:
        columns = ("symptom", "begins after step", "95 %", "complete at", "before", "after", "corrected p")
        cells = [
            [
                *(row["label"], _format_step(row["onset"]), f"{row['low']:g} to {row['high']:g}"),
                *(_format_step(row["end"]), format_number(row["before"]), format_number(row["after"])),
                format_p_value(row["p_adjusted"]).removeprefix("p "),
            ]
            for row in to_records(changes)
        ]
        print_table(console, columns, cells)
        stable_labels = onsets.loc[onsets["onset"].isna(), "label"]
        print_line(console, f"No change for the worse is resolved in: {', '.join(stable_labels) or 'none'}.")
        if len(changes) > 1 and not changes["is_first"].any():
            print_line(console, "The intervals (95 %) overlap: which of these began first is not known.")
    episodes = [episode for episode in read_episodes(folder / "runs" / run["run_id"]) if not episode.is_trained]
    if not episodes:
        print_line(
            console,
            "No episode of a validation was recorded. To read some of each, train with --set "
            "trainer.log_val_generations=4.",
        )
    for episode in choose_episodes(episodes, onsets, run["end_step"]):
        print_line(console, "")
        print_episode(console, episode)


def choose_episodes(
    episodes: Sequence[RecordedEpisode], onsets: pd.DataFrame, end_step: float
) -> list[RecordedEpisode]:
    """Choose up to three episodes of one level that show what changed.

    They are from the last validation before the first onset (of `symptoms.find_onsets`), the last one before the change
    of success is complete, and the first one at or after `end_step`; without an onset, from the first and the last. A
    level that is solved in the first of them and not in the last is preferred.
    """
    if not episodes:
        return []
    steps = sorted({episode.step for episode in episodes})
    success = onsets[onsets["symptom"] == symptoms.SUCCESS.column]
    first_onset = float(onsets["onset"].min())
    limits = [first_onset, float(success["end"].iloc[0]) if len(success) else math.nan]
    chosen_steps = [
        max((step for step in steps if step <= limit), default=steps[0]) for limit in limits if not math.isnan(limit)
    ] or steps[:1]
    chosen_steps.append(min((step for step in steps if step >= end_step), default=steps[-1]))
    chosen_steps = sorted(set(chosen_steps))
    by_key = {(episode.level, episode.step): episode for episode in episodes}
    levels = list(dict.fromkeys(episode.level for episode in episodes))
    levels = [level for level in levels if all((level, step) in by_key for step in chosen_steps)]
    if not levels:
        return []
    first, last = chosen_steps[0], chosen_steps[-1]
    changed_levels = [level for level in levels if by_key[level, first].success and not by_key[level, last].success]
    level = (changed_levels or levels)[0]
    return [by_key[level, step] for step in chosen_steps]


def _format_step(step: float) -> str:
    return "-" if np.isnan(step) else f"{step:g}"
