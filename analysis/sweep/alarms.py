"""Alarms: how early a threshold on a symptom announces a collapse, and how often it is wrong.

A rule fires when the last measurements of a symptom are all beyond a threshold, like the published rule on the spread
of rewards. It is right before a collapse, and a false alarm in a run that did not collapse. Whether runs that the rule
would have stopped recover is answered by the command `replay-stoppers`. Rules are chosen on the runs of some seeds and
scored on other seeds: the best of hundreds of rules looks better than it is on the runs on which it was chosen.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd

from analysis.data.compare import SCORED_STATUSES, make_estimate_columns
from analysis.data.frames import StudyFrames, to_records
from analysis.stats.estimates import NAN, wilson_interval
from analysis.sweep.collapse import find_run_ends
from analysis.sweep.symptoms import SYMPTOMS, Symptom, estimate_median_lead
from trainable.config.alarm_rule import AlarmRule
from trainable.runs.stop_rules import find_alarm

WINDOWS = (1, 3, 5, 10)
"""Numbers of consecutive measurements that must be beyond the threshold."""
MAX_FALSE_ALARMS = 0.1
"""A rule may fire in at most this fraction of the runs that did not collapse."""


def list_rules(symptoms: Iterable[Symptom] = SYMPTOMS) -> list[AlarmRule]:
    """List every threshold of every symptom, with every window."""
    return [
        AlarmRule(symptom.column, threshold, symptom.is_relative, is_upper, window)
        for symptom in symptoms
        for is_upper, thresholds in ((False, symptom.lows), (True, symptom.highs))
        for threshold in thresholds
        for window in WINDOWS
    ]


def find_distinct_ends(studies: Sequence[StudyFrames]) -> list[pd.DataFrame]:
    """Find the run ends of each study (`find_run_ends`) without runs that could not learn or repeat an earlier run.

    KL 0 in one study and entropy 0 in another may be the same training: the seed and all symptoms at all steps agree.
    """
    columns = ["step", *(symptom.column for symptom in SYMPTOMS)]
    seen_runs: set[tuple[int, bytes]] = set()
    tables = []
    for frames in studies:
        ends = find_run_ends(frames)
        ends = ends[ends["signal_problem"] == ""]
        symptoms = [frames.get_run_steps(run_id).reindex(columns=columns).astype(float) for run_id in ends["run_id"]]
        keys = [(seed, rows.to_numpy().tobytes()) for seed, rows in zip(ends["seed"], symptoms, strict=True)]
        is_new = [key not in seen_runs for key in keys]
        seen_runs.update(keys)
        tables.append(ends[np.array(is_new, dtype=bool)])  # an empty list would select columns
    return tables


def find_alarms(studies: Sequence[StudyFrames], rules: Sequence[AlarmRule]) -> pd.DataFrame:
    """Apply rules to the scored runs of all studies (each run once): a row per rule and run with its symptom.

    Columns: rule (index in `rules`), study, run_id, arm, seed, is_collapse, end_step (see `collapse.find_run_ends`),
    alarm_step (NaN if the rule does not fire by end_step).
    """
    rows = []
    for frames, ends in zip(studies, find_distinct_ends(studies), strict=True):
        for run in to_records(ends[ends["status"].isin(SCORED_STATUSES)]):
            steps = frames.get_run_steps(run["run_id"])
            steps = steps[steps["step"] <= run["end_step"]]
            for index, rule in enumerate(rules):
                if rule.column in steps and steps[rule.column].notna().any():
                    decision = find_alarm(steps["step"], steps[rule.column].astype(float), rule)
                    alarm = {"rule": index, "study": frames.studies[0].name}
                    rows.append({**run, **alarm, "alarm_step": decision.step if decision else NAN})
    names = ["rule", "study", "run_id", "arm", "seed", "is_collapse", "end_step", "alarm_step"]
    return pd.DataFrame(rows, columns=names)


def score_rules(alarms: pd.DataFrame, rules: Sequence[AlarmRule]) -> pd.DataFrame:
    """Score each rule that could be applied: how many collapses it announced, how early, and its false alarms.

    Columns: rule, text, collapsed (runs), detected (of these, with an alarm before the collapse), detected_fraction
    with its Wilson interval (`_low`, `_high`), healthy (runs without collapse), false_alarms, false_fraction with its
    interval, lead (median steps from the alarm to the collapse, over the detected runs) with an interval if there are
    at least 6. An alarm at the step of the collapse does not count as detected. Intervals treat all runs as
    independent.
    """
    rows = []
    for index, rule_rows in alarms.groupby("rule", sort=True):
        collapsed, healthy = rule_rows[rule_rows["is_collapse"]], rule_rows[~rule_rows["is_collapse"]]
        leads = (collapsed["end_step"] - collapsed["alarm_step"]).dropna()
        leads = leads[leads > 0]
        num_false = int(healthy["alarm_step"].notna().sum())
        detected, false = wilson_interval(len(leads), len(collapsed)), wilson_interval(num_false, len(healthy))
        rows.append(
            {
                "rule": index,
                "text": rules[int(str(index))].text,
                "collapsed": len(collapsed),
                "detected": len(leads),
                "detected_fraction": detected.value,
                "detected_low": detected.low,
                "detected_high": detected.high,
                "healthy": len(healthy),
                "false_alarms": num_false,
                "false_fraction": false.value,
                "false_low": false.low,
                "false_high": false.high,
                **make_estimate_columns("lead", estimate_median_lead(leads)),
            }
        )
    return pd.DataFrame(rows)


def choose_rules(scores: pd.DataFrame, rules: Sequence[AlarmRule]) -> list[int]:
    """Choose the best rule of each symptom by `scores` (from `score_rules`): indices of `rules`, in symptom order.

    Among the rules with at most `MAX_FALSE_ALARMS` false alarms, it is the one that announces the most collapses; among
    ties the one with the longest median lead, then with the fewest false alarms. A symptom whose rules announce no
    collapse gets none.
    """
    allowed = scores[(scores["false_fraction"] <= MAX_FALSE_ALARMS) & (scores["detected"] > 0)]
    order = allowed.sort_values(
        ["detected_fraction", "lead", "false_fraction"], ascending=[False, False, True], kind="stable"
    )
    best_rules: dict[str, int] = {}
    for index in order["rule"]:
        best_rules.setdefault(rules[index].column, int(index))
    return [best_rules[symptom.column] for symptom in SYMPTOMS if symptom.column in best_rules]


def compare_alarms(studies: Sequence[StudyFrames], first_test_seed: int) -> pd.DataFrame:
    """Choose the best rule of each symptom on the runs of lower seeds, and score it on the other seeds.

    Returns `score_rules` over the runs with seed >= `first_test_seed`, best detector first.
    """
    rules = list_rules()
    alarms = find_alarms(studies, rules)
    is_test = alarms["seed"] >= first_test_seed
    scores = score_rules(alarms[~is_test], rules)
    if len(scores):
        is_chosen = alarms["rule"].isin(choose_rules(scores, rules))
        scores = score_rules(alarms[is_test & is_chosen], rules)
    order = ["detected_fraction", "lead"]
    return scores.sort_values(order, ascending=False, kind="stable", ignore_index=True) if len(scores) else scores
