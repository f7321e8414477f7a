"""The commands `alarms` and `replay-stoppers`: which alarm or stop rule would have announced recorded collapses."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from pydantic import ValidationError
from rich.console import Console

from analysis.data.frames import CONFIG_PREFIX, StudyFrames, to_records
from analysis.data.load import find_study_folders, load
from analysis.data.schemas import get_family
from analysis.sweep.alarms import (
    MAX_FALSE_ALARMS,
    compare_alarms,
    compare_detectors,
    find_distinct_ends,
    format_score,
    replay_rules,
    score_rules,
)
from analysis.sweep.collapse import find_run_ends
from analysis.sweep.detectors import COUNT_FACTORS, THRESHOLD_FACTORS
from search_spaces.catalog import STUDIES
from trainable.config.run_config import RunConfig, apply_overrides
from trainable.config.sections import EarlyStopConfig
from trainable.config.setting_types import format_value
from trainable.runs.history import COLLAPSE_DEFINITION
from tune_study.folder.study_file import read_study
from tune_study.host.console import print_line, print_table
from tune_study.plan.errors import PlanError, as_plan_error
from tune_study.plan.typed_settings import collect_overrides

_SECTION = "early_stop."
_SCORE_COLUMNS = ("announces", "95 %", "lead (steps)", "false alarms", "95 % of these")
_INTERVAL_COLUMNS = ("95 % of these", "95 %")
"""What a narrow terminal leaves out."""
_NOTES = (
    f"right: the run collapsed. {COLLAPSE_DEFINITION} false alarm: it did not. unknown: it has not ended, failed, or "
    "could not learn.",
    "announces: collapses with an alarm before them. false alarms: runs without collapse in which the rule fires. "
    "95 %: Wilson's interval.",
    "recovered: the last (up to 4) validations after the alarm average at least the success before training, and "
    "success_threshold.",
    "steps saved: rows after the alarm. fired live: runs that the rule really stopped, under their own thresholds.",
)


def read_studies(folders: Sequence[Path]) -> list[StudyFrames]:
    """Read all studies of language models in these folders. Raises PlanError if there is none, or only forks."""
    with as_plan_error(ValueError):
        paths = [path for folder in folders for path in find_study_folders(folder)]
        studies = [load(path) for path in dict.fromkeys(paths)]
    studies = [frames for frames in studies if frames.has_symptoms]
    if all(frames.studies[0].forks for frames in studies):
        names = ", ".join(format_value(folder, 1000) for folder in folders)
        problem = "are only forks, whose runs repeat others," if studies else "is no study of a language model"
        raise PlanError(
            f"There {problem} in {names}: type an output folder, or folders results/<run>, of other studies."
        )
    return studies


def score_alarms(studies: Sequence[StudyFrames], first_test_seed: int, with_others: bool = False) -> dict[str, Any]:
    """Count how many runs collapsed, and score each symptom's best threshold (`compare_alarms`).

    others: the scores of other tools' detectors (`compare_detectors`), empty unless `with_others`. forks: the folders
    of studies that were left out, since the runs of a fork repeat rows of those that they continue.
    """
    forks = [frames.folders[0].name for frames in studies if frames.studies[0].forks]
    studies = [frames for frames in studies if not frames.studies[0].forks]
    ends = find_distinct_ends(studies)
    num_runs = sum(map(len, ends))
    table, is_fresh = compare_alarms(studies, first_test_seed)
    return {
        "studies": len(studies),
        "forks": forks,
        "runs": num_runs,
        "repeated_runs": sum(len(find_run_ends(frames)) for frames in studies) - num_runs,
        "collapsed": sum(int(table["is_collapse"].sum()) for table in ends),
        "first_test_seed": first_test_seed,
        "scored_on_other_seeds": is_fresh,
        "alarms": to_records(table),
        "others": to_records(compare_detectors(studies, first_test_seed)) if with_others else [],
    }


def print_alarms(console: Console, scores: Mapping[str, Any]) -> None:
    """Print how many runs collapsed, and each symptom's best threshold with its score, from `score_alarms`.

    The detectors of other tools come after them, if there are any.
    """
    num_studies, num_repeated, first_test_seed = (
        scores[name] for name in ("studies", "repeated_runs", "first_test_seed")
    )
    repeats = f", without {num_repeated} that repeat another run" if num_repeated else ""
    studies_text = f"{num_studies} {'studies' if num_studies > 1 else 'study'}"
    print_line(console, f"{studies_text}, {scores['runs']} runs with rows{repeats}: {scores['collapsed']} collapsed.")
    if names := ", ".join(scores["forks"]):
        print_line(console, f"Left out: {names}. The runs of a fork repeat rows of the runs that they continue.")
    limit = f"false alarms in at most {MAX_FALSE_ALARMS:.0%} of the runs that did not collapse"
    if not scores["alarms"]:
        nothing = (
            f"No threshold announces a collapse with {limit}."
            if scores["collapsed"]
            else "There is nothing to announce."
        )
        print_line(console, nothing)
        return
    rows = [[row["rule"], *format_score(row)] for row in scores["alarms"]]
    print_table(console, ("alarm", *_SCORE_COLUMNS), rows, _INTERVAL_COLUMNS)
    runs, score = f"seeds below {first_test_seed}", "is scored on the other seeds"
    if not scores["scored_on_other_seeds"]:
        runs = "all runs"
        score = (
            f"scored on the same runs, so its numbers are too good: seeds below {first_test_seed} and from there on "
            "(--first-test-seed) do not both have a collapse"
        )
    print_line(
        console,
        f"Each alarm is the best of its symptom on {runs} with {limit}, and {score}. Intervals are over runs, as if "
        "all were independent.",
    )
    if others := scores["others"]:
        print_line(console, "")
        rows = [[row["detector"], row["thresholds"], *format_score(row), row["rule"]] for row in others]
        columns = ("detector", "thresholds", *_SCORE_COLUMNS, "rule")
        print_table(console, columns, rows, ("rule", *_INTERVAL_COLUMNS))
        low, high = (f"{factor:g}" for factor in (min(THRESHOLD_FACTORS), max(THRESHOLD_FACTORS)))
        print_line(
            console,
            "published: the numbers of the source, whose windows may be longer than a run. tuned: thresholds made "
            f"stricter {low} to {high} times, and windows multiplied by {min(COUNT_FACTORS):g} to "
            f"{max(COUNT_FACTORS):g}, chosen and scored as above; no row where none could be chosen.",
        )


def replay_folder(folder: Path, assignments: Sequence[str]) -> tuple[pd.DataFrame, dict[str, str]]:
    """Apply every rule separately to every run of the study in results/<run>, whichever rules the study used.

    Runs of every status are replayed with the rows that they have. Returns the alarms (see `replay_rules`), and why
    runs were not replayed, by run_id.

    assignments: the `key=value` of each --set, which replaces a threshold in the section early_stop of every run.

    Raises PlanError if the folder contains no study, or for a key that is not a field of early_stop or is given twice,
    and ConfigError for an unknown key or an invalid value.
    """
    study = read_study(folder)
    if not get_family(study).has_symptoms:
        raise PlanError(
            f"The stop rules of study {format_value(study.name)} count batches, not rows, so they cannot be "
            f"replayed: type the folder of a study that fine-tunes a language model."
        )
    overrides = collect_overrides(STUDIES["kl"], {}, assignments, is_axis_free=True)
    if others := [name for name in overrides if not name.startswith(_SECTION)]:
        allowed = ", ".join(f"{_SECTION}{name}" for name in EarlyStopConfig.model_fields)
        raise PlanError(f"`{others[0]}` is not a threshold of a stop rule: --set takes one of {allowed}.")
    apply_overrides(RunConfig(), overrides)  # checks the values also if no run has rows
    with as_plan_error(ValueError):
        frames = load(folder)
    # Thresholds are read from each run, since a threshold may be the axis of the study. Imported runs have none.
    default_settings: dict[str, object] | None = None if study.stop_rules else {}
    thresholds: dict[str, EarlyStopConfig] = {}
    skipped_runs: dict[str, str] = {}
    for run in to_records(frames.trials):
        prefix = CONFIG_PREFIX + _SECTION
        texts = {name.removeprefix(prefix): value for name, value in run.items() if name.startswith(prefix)}
        settings = {name: value for name, value in texts.items() if pd.notna(value) and value != ""}
        if frames.get_run_steps(run["run_id"]).empty:
            reasons = ": ".join(format_value(word) for word in (run["status"], run["reason"]) if word)
            skipped_runs[run["run_id"]] = f"no rows ({reasons})"
            continue
        try:
            own_config = RunConfig(early_stop=EarlyStopConfig.model_validate(settings or default_settings))
            thresholds[run["run_id"]] = apply_overrides(own_config, overrides).early_stop
        except ValidationError:
            skipped_runs[run["run_id"]] = "its run.json has no valid early_stop settings"
    return replay_rules(frames, thresholds), skipped_runs


def print_replay(console: Console, folder: Path, assignments: Sequence[str]) -> None:
    """Print the alarms of every run, every rule over all runs, and what the columns mean (see `replay_folder`)."""
    alarms, skipped_runs = replay_folder(folder, assignments)
    changes = f", with {', '.join(assignments)}" if assignments else ""
    print_line(console, f"thresholds: those of each run{changes}")
    for run_id, reason in skipped_runs.items():
        print_line(console, f"not replayed: {run_id}: {reason}")
    if alarms.empty:
        print_line(console, "No run of this study has rows yet: there is nothing to replay.")
        return
    columns = ("run", "arm", "seed", "rule", "fires at step", "value", "threshold", "outcome", "recovered")
    fired = to_records(alarms[alarms["outcome"] != ""])
    print_table(console, (*columns, "steps saved"), [_format_alarm(row) for row in fired])
    print_line(console, "")
    titles = ("rule", "fires in", "right", "unknown", *_SCORE_COLUMNS, "recovered", "steps saved", "fired live")
    print_table(console, titles, [_format_rule(rows) for _, rows in alarms.groupby("rule", sort=False)])
    for note in _NOTES:
        print_line(console, note)


def _format_alarm(row: Mapping[str, Any]) -> list[str]:
    recovered = "-" if row["recovered"] is None else "yes" if row["recovered"] else "no"
    numbers = (f"{row[name]:.4g}" for name in ("alarm_step", "value", "threshold"))
    names = (row["run_id"], row["arm"], str(row["seed"]), row["rule"])
    return [*names, *numbers, row["outcome"], recovered, str(row["steps_saved"])]


def _format_rule(alarms: pd.DataFrame) -> list[str]:
    """Format the alarms of one rule in all runs."""
    rule, counts = alarms["rule"].iloc[0], alarms["outcome"].value_counts()
    fires = f"{(alarms['outcome'] != '').sum()} of {len(alarms)}"
    scores = to_records(score_rules(alarms[alarms["is_known"]]))
    num_saved = alarms["steps_saved"].sum()
    return [
        *(rule, fires, str(counts.get("right", 0)), str(counts.get("unknown", 0))),
        *(format_score(scores[0]) if scores else "-----"),
        str(sum(alarms["recovered"].eq(True))),
        f"{num_saved} ({num_saved / alarms['steps'].sum():.1%})",
        str(sum(alarms["stop_rule"] == rule)),
    ]
