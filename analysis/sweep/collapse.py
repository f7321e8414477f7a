"""Which runs of a study collapsed, and when."""

import math

import numpy as np
import pandas as pd

from analysis.data.compare import SCORED_STATUSES, find_failed_stops, require_single_study
from analysis.data.frames import StudyFrames, to_records
from analysis.data.schemas import Row
from analysis.stats.events import kaplan_meier
from analysis.sweep.series import make_curves
from trainable.runs.history import SIGNAL_COLUMNS, describe_missing_signal, find_collapse, format_signal_problems

HALVED_SUCCESS = "halved_success"
"""Cause of a collapse that no stop rule detected."""
_END_COLUMNS = ["run_id", "arm", "seed", "status", "end_step", "is_collapse", "cause", "signal_problem"]


def make_validations(frames: StudyFrames) -> pd.DataFrame:
    """Collect the sampled validations of all runs: arm, seed, run_id, status, step, value, episodes.

    Step 0 is before training. episodes: number of episodes of the validation; NaN if unknown.
    """
    table = make_curves(frames, "val_success")
    is_sampled = (frames.levels["split"] == "val") & (frames.levels["mode"] == "sampled")
    episodes = frames.levels[is_sampled].groupby(["run_id", "step"], observed=True, sort=False).size()
    keys = pd.MultiIndex.from_frame(table[["run_id", "step"]])
    return table.assign(episodes=episodes.reindex(keys).to_numpy(dtype=float))


def describe_signal_problems(frames: StudyFrames) -> list[str]:
    """Describe which runs could not learn in any step, and why; empty if all could."""
    return format_signal_problems((str(end["arm"]), end["signal_problem"]) for end in to_records(find_run_ends(frames)))


def find_run_ends(frames: StudyFrames) -> pd.DataFrame:
    """Find how each run with a training step ended, and whether it collapsed.

    Columns: run_id, arm, seed, status, end_step, is_collapse, cause, signal_problem. A run collapses when a rule stops
    it as a failure (`compare.find_failed_stops`), or when its success halves (`history.find_collapse`). A run that
    could not learn in any step had nothing to lose, and does not count as collapsed. end_step is the step of the
    collapse, or else the last step. cause is the name of the stop rule, `HALVED_SUCCESS`, or empty. signal_problem is
    why the run could not learn in any step, or empty.
    """
    signal_columns = [name for name in SIGNAL_COLUMNS if name in frames.steps]
    signals: dict[str, list[Row]] = {}
    for row in to_records(frames.steps[["run_id", *signal_columns]]):
        signals.setdefault(row["run_id"], []).append(row)
    validations = make_validations(frames)
    rows_by_run = dict(list(validations.groupby("run_id", sort=False)))
    rows = []
    runs = require_single_study(frames).runs
    for run in to_records(runs.assign(is_failed_stop=find_failed_stops(runs))):
        if not run["steps_done"] > 0:
            continue
        run_validations = rows_by_run.get(run["run_id"], validations.iloc[:0])
        stop_step = math.inf
        if run["is_failed_stop"]:
            stop_step = float(run["steps_done"] if pd.isna(run["stop_step"]) else run["stop_step"])
        signal_problem = describe_missing_signal(signals.get(run["run_id"], ()))
        end = {"end_step": run["steps_done"], "is_collapse": False, "cause": "", "signal_problem": signal_problem}
        columns = (run_validations[name] for name in ("step", "value", "episodes"))
        fork_step = frames.studies[0].get_fork_step(run["arm"])
        step = math.inf if signal_problem else find_collapse(zip(*columns, strict=True), stop_step, fork_step)
        if step < math.inf:
            cause = (run["stop_rule"] or "a rule") if stop_step == step else HALVED_SUCCESS
            end |= {"end_step": step, "is_collapse": True, "cause": cause}
        rows.append({**run, **end})
    table = pd.DataFrame(rows, columns=_END_COLUMNS)
    return table.astype({"end_step": "float64", "is_collapse": "bool"})


def compute_survival(frames: StudyFrames) -> pd.DataFrame:
    """Compute the fraction of each arm's runs that have not collapsed, by step (Kaplan-Meier).

    Columns: arm, step, surviving_fraction, runs, collapsed. A run that failed or was interrupted is censored at its
    last step. The last row of an arm is at the last step of its runs. Arms without a step are left out.
    """
    curve_frames = [pd.DataFrame(columns=["arm", "step", "surviving_fraction", "runs", "collapsed"])]
    for arm, runs in find_run_ends(frames).groupby("arm", sort=False):
        steps, fractions = kaplan_meier(runs["end_step"], runs["is_collapse"])
        # The curve ends at its last drop; continue it to the last step of the arm.
        if (last_step := runs["end_step"].max()) > steps[-1]:
            steps, fractions = np.append(steps, last_step), np.append(fractions, fractions[-1])
        table = pd.DataFrame({"arm": arm, "step": steps, "surviving_fraction": fractions})
        curve_frames.append(table.assign(runs=len(runs), collapsed=int(runs["is_collapse"].sum())))
    return pd.concat(curve_frames[1:] or curve_frames, ignore_index=True)


def count_collapses(frames: StudyFrames) -> pd.DataFrame:
    """Count the collapses of each arm among its scored runs that could learn: arm, runs, collapsed, steps, seeds.

    steps: of the collapses, ascending. seeds: of the runs that collapsed, in the order of these steps.
    """
    ends = find_run_ends(frames)
    ends = ends[ends["status"].isin(SCORED_STATUSES) & (ends["signal_problem"] == "")]
    rows = []
    for arm, runs in ends.groupby("arm", sort=False):
        collapsed = runs[runs["is_collapse"]].sort_values(["end_step", "seed"])
        rows.append((arm, len(runs), len(collapsed), tuple(collapsed["end_step"]), tuple(collapsed["seed"])))
    return pd.DataFrame(rows, columns=["arm", "runs", "collapsed", "steps", "seeds"])
