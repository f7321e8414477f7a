"""Alarms: how early a threshold, a stop rule or another tool's detector announces a collapse, and how often wrongly.

An alarm is right in a run that collapsed by the study's definition (`collapse.find_run_ends`), and false in a run that
did not. It announces the collapse if it comes before it. Thresholds are chosen on the runs of some seeds and scored on
other seeds: the best of hundreds looks better than it is on the runs on which it was chosen.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from analysis.data.compare import SCORED_STATUSES, make_estimate_columns
from analysis.data.frames import StudyFrames, to_records
from analysis.data.schemas import Row
from analysis.data.summaries import compute_late_mean
from analysis.stats.estimates import NAN, wilson_interval
from analysis.sweep.collapse import find_run_ends
from analysis.sweep.detectors import DETECTORS, Detector, list_variants, make_measures
from analysis.sweep.symptoms import SYMPTOMS, estimate_median_lead
from trainable.config.sections import EarlyStopConfig
from trainable.config.setting_types import AlarmRule
from trainable.runs.stop_rules import RULES, History, find_alarm, list_active_rules

WINDOWS = (1, 3, 5, 10)
"""Numbers of consecutive measurements that must be beyond the threshold."""
MAX_FALSE_ALARMS = 0.1
"""A threshold may fire in at most this fraction of the runs that did not collapse."""
_TOLERANCE = 1e-9
"""Tolerance for rounding: in floats the mean of 1, 6 and 11 of 120 levels is below 6 of 120. Real differences are much
larger, at least a third of a level."""


def list_rules() -> list[AlarmRule]:
    """List every threshold of every symptom, with every window."""
    return [
        AlarmRule(symptom.column, threshold, symptom.is_relative, is_upper, window)
        for symptom in SYMPTOMS
        for is_upper, thresholds in ((False, symptom.lows), (True, symptom.highs))
        for threshold in thresholds
        for window in WINDOWS
    ]


def find_distinct_ends(studies: Sequence[StudyFrames]) -> list[pd.DataFrame]:
    """Find the run ends of each study (`find_run_ends`) without runs that could not learn or repeat an earlier run.

    KL 0 in one study and entropy 0 in another may be the same training, and so may two arms of a study whose settings
    differ in nothing that trained: the seed, rewards, validations and all symptoms at all steps agree.
    """
    columns = ["step", "train_reward", "val_success", *(symptom.column for symptom in SYMPTOMS)]
    seen_runs: set[tuple[int, bytes]] = set()
    tables = []
    for frames in studies:
        ends = find_run_ends(frames)
        ends = ends[ends["signal_problem"] == ""]
        is_new = []
        for seed, run_id in zip(ends["seed"], ends["run_id"], strict=True):
            rows = frames.get_run_steps(run_id).reindex(columns=columns).astype(float)
            key = (seed, rows.to_numpy().tobytes())
            is_new.append(key not in seen_runs)
            seen_runs.add(key)
        tables.append(ends[np.array(is_new, dtype=bool)])  # an empty list would select columns
    return tables


def find_alarms(studies: Sequence[StudyFrames], rules: Sequence[AlarmRule | Detector]) -> pd.DataFrame:
    """Apply alarms to the scored runs of all studies (each run once): a row per alarm and run with its symptom.

    Columns: rule (its text), column (of an alarm; the name of a detector), run_id, arm, seed, is_collapse, end_step
    (see `collapse.find_run_ends`), alarm_step (NaN if the alarm does not fire).
    """
    rows = []
    columns = {rule.column for rule in rules if isinstance(rule, AlarmRule)}
    for frames, ends in zip(studies, find_distinct_ends(studies), strict=True):
        for run in to_records(ends[ends["status"].isin(SCORED_STATUSES)]):
            table = frames.get_run_steps(run["run_id"])
            measures, steps = make_measures(table), table["step"].to_list()
            series = {name: table[name].astype(float).to_list() for name in columns if name in table}
            for rule in rules:
                if isinstance(rule, Detector):
                    if not measures.keys() >= set(rule.measures):
                        continue
                    column, alarm_step = rule.name, rule.find_step(measures)
                elif not all(map(math.isnan, values := series.get(rule.column, ()))):
                    decision = find_alarm(steps, values, rule)
                    column, alarm_step = rule.column, decision.step if decision else None
                else:
                    continue
                step = NAN if alarm_step is None else float(alarm_step)
                rows.append({**run, "rule": rule.text, "column": column, "alarm_step": step})
    names = ["rule", "column", "run_id", "arm", "seed", "is_collapse", "end_step", "alarm_step"]
    return pd.DataFrame(rows, columns=names).astype({"is_collapse": bool})


def score_rules(alarms: pd.DataFrame) -> pd.DataFrame:
    """Score each rule: how many collapses it announced, how early, and its false alarms.

    Columns: rule, collapsed (runs), detected (of these, with an alarm before the step of the collapse), healthy (runs
    without collapse), false_alarms, the fractions detected_fraction and false_fraction with their Wilson intervals
    (`_low`, `_high`), and lead (median steps from the alarm to the collapse, over the detected runs) with an interval
    if there are at least 6. Intervals treat all runs as independent.
    """
    rows = []
    for rule, rule_rows in alarms.groupby("rule", sort=False):
        collapsed, healthy = rule_rows[rule_rows["is_collapse"]], rule_rows[~rule_rows["is_collapse"]]
        leads = (collapsed["end_step"] - collapsed["alarm_step"]).dropna()
        leads = leads[leads > 0]
        num_false = int(healthy["alarm_step"].notna().sum())
        row = {"rule": rule, "collapsed": len(collapsed), "detected": len(leads)}
        row |= {"healthy": len(healthy), "false_alarms": num_false}
        row |= make_estimate_columns("detected_fraction", wilson_interval(len(leads), len(collapsed)))
        row |= make_estimate_columns("false_fraction", wilson_interval(num_false, len(healthy)))
        rows.append(row | make_estimate_columns("lead", estimate_median_lead(leads)))
    return pd.DataFrame(rows)


def format_score(row: Row) -> list[str]:
    """Format a row of `score_rules`: announced collapses, their interval, lead, false alarms and their interval."""
    lead = "-" if math.isnan(row["lead"]) else f"{row['lead']:g}"
    interval = "" if math.isnan(row["lead_low"]) else f" [{row['lead_low']:g}, {row['lead_high']:g}]"
    return [
        f"{row['detected']} of {row['collapsed']}",
        f"{row['detected_fraction_low']:.2f} to {row['detected_fraction_high']:.2f}",
        lead + interval,
        f"{row['false_alarms']} of {row['healthy']}",
        f"{row['false_fraction_low']:.2f} to {row['false_fraction_high']:.2f}",
    ]


def choose_rules(alarms: pd.DataFrame) -> list[str]:
    """Choose the best rule of each symptom in `alarms` (from `find_alarms`) that announces a collapse.

    Among the rules with at most `MAX_FALSE_ALARMS` false alarms, it is the one that announces the most collapses; among
    ties the one with the longest median lead, then with the fewest false alarms.
    """
    scores = score_rules(alarms)
    if scores.empty:
        return []
    scores["column"] = scores["rule"].map(dict(zip(alarms["rule"], alarms["column"], strict=True)))
    allowed = scores[~(scores["false_fraction"] > MAX_FALSE_ALARMS) & (scores["detected"] > 0)]
    order = allowed.sort_values(
        ["detected_fraction", "lead", "false_fraction"], ascending=[False, False, True], kind="stable"
    )
    return order.drop_duplicates("column")["rule"].to_list()


def compare_alarms(studies: Sequence[StudyFrames], first_test_seed: int) -> tuple[pd.DataFrame, bool]:
    """Choose the best rule of each symptom on the runs of lower seeds, and score it on the other seeds.

    Returns `score_rules` over the runs with seed >= `first_test_seed`, best detector first, and whether it is over
    them: if no run collapsed on one of the two sides, rules are chosen and scored on all runs.
    """
    chosen_on, scored_on, is_fresh = split_runs(find_alarms(studies, list_rules()), first_test_seed)
    scores = score_rules(scored_on[scored_on["rule"].isin(choose_rules(chosen_on))])
    order = ["detected_fraction", "lead"] if len(scores) else []
    return scores.sort_values(order, ascending=False, kind="stable", ignore_index=True), is_fresh


def split_runs(alarms: pd.DataFrame, first_test_seed: int) -> tuple[pd.DataFrame, pd.DataFrame, bool]:
    """Split `alarms` into those on which rules are chosen (lower seeds), and those on which they are scored.

    If one side has no collapse, both are all alarms, and the third value is False.
    """
    is_test = alarms["seed"] >= first_test_seed
    if not all(alarms.loc[side, "is_collapse"].any() for side in (is_test, ~is_test)):
        return alarms, alarms, False
    return alarms[~is_test], alarms[is_test], True


def compare_detectors(studies: Sequence[StudyFrames], first_test_seed: int) -> pd.DataFrame:
    """Score the detectors of others on the runs on which `compare_alarms` scores: up to two rows per detector.

    Columns: detector (its name), source, thresholds and those of `score_rules`. thresholds is `published` with the
    numbers of the source, or `tuned` with the best of `list_variants` on the runs of lower seeds, by `choose_rules`.
    The first row is missing without published numbers, the second if no variant may be chosen.
    """
    chosen_on, scored_on, _ = split_runs(find_alarms(studies, list_variants()), first_test_seed)
    published, tuned = {detector.text for detector in DETECTORS if detector.is_published}, choose_rules(chosen_on)
    tables = [
        score_rules(scored_on[scored_on["rule"].isin(texts)]).assign(thresholds=name)
        for name, texts in (("published", published), ("tuned", tuned))
    ]
    scores = {(row["rule"], row["thresholds"]): row for table in tables for row in to_records(table)}
    return pd.DataFrame(
        {"detector": detector.name, "source": detector.source, **row, "rule": rule.removeprefix(f"{detector.name}: ")}
        for detector in DETECTORS
        for (rule, _), row in scores.items()
        if rule.startswith(f"{detector.name}: ")
    )


def replay_rules(frames: StudyFrames, thresholds: Mapping[str, EarlyStopConfig]) -> pd.DataFrame:
    """Apply every stop rule separately to the rows of each run: a row per run and rule of `list_active_rules`.

    thresholds: by run_id, of runs with rows.

    Columns: those of `find_alarms` but column, and stop_rule (which really stopped the run), steps (its rows), value
    and threshold of the alarm, steps_saved (rows after it), outcome and recovered (`has_recovered`). outcome is `right`
    if the run collapsed, `false alarm` if it did not, and `unknown` if it is not known (is_known is False): it has not
    ended, failed, or could not learn, so the report does not count it either. It is empty without an alarm.
    """
    ends = find_run_ends(frames).merge(frames.runs[["run_id", "stop_rule", "base_val_success"]], on="run_id")
    rows = []
    for run in to_records(ends[ends["run_id"].isin(thresholds)]):
        settings = thresholds[run["run_id"]]
        history = History.from_rows(to_records(frames.get_run_steps(run["run_id"])), settings)
        is_known = run["status"] in SCORED_STATUSES and not run["signal_problem"]
        outcome = ("right" if run["is_collapse"] else "false alarm") if is_known else "unknown"
        for rule in list_active_rules(settings):
            row = {**run, "rule": rule, "steps": len(history.steps), "is_known": is_known, "outcome": ""}
            row |= {"alarm_step": NAN, "value": NAN, "threshold": NAN, "recovered": None, "steps_saved": 0}
            if decision := RULES[rule](history, settings):
                row |= {"alarm_step": decision.step, "value": decision.value, "threshold": decision.threshold}
                row |= {"outcome": outcome, "steps_saved": sum(step > decision.step for step in history.steps)}
                row["recovered"] = has_recovered(
                    history, decision.step, run["base_val_success"], settings.success_threshold
                )
            rows.append(row)
    return pd.DataFrame(rows)


def has_recovered(history: History, alarm_step: int, base_success: float, success_threshold: float) -> bool | None:
    """Check whether a run did well after an alarm: its late success is at least both of the other numbers.

    Late success is the mean of the last validations after the alarm (`compute_late_mean`). None without such a
    validation, or if success before training was not measured (NaN).
    """
    validations = zip(history.steps, history.val_success, strict=True)
    later = [(step, success) for step, success in validations if step > alarm_step and success is not None]
    late_success = compute_late_mean(later, None)
    if late_success is None or math.isnan(base_success):
        return None
    return late_success >= max(base_success, success_threshold) - _TOLERANCE
