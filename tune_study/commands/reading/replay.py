"""Apply the stop rules to the rows of existing runs, to see when each would have fired and whether that was right."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Literal, NamedTuple

from pydantic import ValidationError
from rich.console import Console

from analysis.data.schemas import get_family
from trainable.config.run_config import ConfigError, RunConfig, apply_overrides, format_validation_error, resolve_key
from trainable.config.sections import EarlyStopConfig
from trainable.config.setting_types import format_value
from trainable.files.json_values import DamagedFileError
from trainable.runs.run_files import METRICS_FILE, read_rows
from trainable.runs.stop_rules import RULES, History, Row, StopDecision, list_active_rules, parse_finite
from trainable.runs.study_record import RunEntry, RunRecord, StatusRecord, find_record, read_record
from tune_study.folder.study_file import read_study
from tune_study.host.console import print_line, print_table
from tune_study.plan.errors import PlanError

Outcome = Literal["false alarm", "right", "unknown"]

LAST_VALIDATIONS = 3
"""Number of validations whose mean is the success with which a run ended."""
SECTION = "early_stop"
"""The section of the settings with the thresholds."""
_TOLERANCE = 1e-9
"""Tolerance for rounding: in floats the mean of 1, 6 and 11 of 120 levels is below 6 of 120. Real differences are much
larger, at least a third of a level."""

_NOTES = (
    "false alarm: the run recovered. The mean of its last (up to 3) validations after the alarm is at least the "
    "val_success before training (if that was not measured, the best one up to the alarm) and at least "
    "success_threshold. right: it did not recover.",
    "unknown: no validation followed the alarm, for example because the rule stopped the run there, or there is no "
    "success to compare with.",
    "steps saved: rows after the alarm. false alarms: among the alarms with a known outcome, with Wilson's 95 % "
    "interval. fired live: runs that the rule really stopped, under their original thresholds.",
)


class Alarm(NamedTuple):
    """One rule on one run.

    decision: when and why the rule fires. outcome: whether that was right (see `replay_rules`). Both are None if it
    never fires. steps_saved: number of rows after the alarm.
    """

    rule: str
    decision: StopDecision | None
    outcome: Outcome | None
    steps_saved: int


class RunReplay(NamedTuple):
    """One replayed run."""

    run_id: str
    arm: str
    seed: int
    steps: int
    """Number of rows of the run, with repeated steps counted once."""
    original_thresholds: EarlyStopConfig
    """Thresholds under which the run was trained."""
    replayed_thresholds: EarlyStopConfig
    """Thresholds of the replay."""
    live_rule: str
    """The rule that really stopped the run; empty if none did."""
    alarms: tuple[Alarm, ...]
    """One entry per rule of `list_active_rules`."""


class SkippedRun(NamedTuple):
    """A run that cannot be replayed, and why."""

    run_id: str
    reason: str


class RuleSummary(NamedTuple):
    """One rule over all replayed runs."""

    rule: str
    runs: int
    fires: int
    """Number of runs in which the rule fires."""
    false_alarms: int
    """Of these, the number of runs that recovered."""
    known_outcomes: int
    ci_low: float
    ci_high: float
    """`ci_low` and `ci_high`: Wilson's 95 % interval of false_alarms / known_outcomes; (0, 1) if no outcome is
    known."""
    unknown_outcomes: int
    steps_saved: int
    """Number of rows after the alarms of the rule."""
    steps: int
    """Number of rows of all runs."""
    live_stops: int
    """Number of runs that the rule really stopped, according to status.json."""


class Replay(NamedTuple):
    """A replayed study."""

    original_thresholds: tuple[EarlyStopConfig, ...]
    """The distinct thresholds under which the runs were trained, or the study's if no run has rows."""
    replayed_thresholds: tuple[EarlyStopConfig, ...]
    """The distinct thresholds of the replay."""
    runs: tuple[RunReplay, ...]
    skipped_runs: tuple[SkippedRun, ...]
    rules: tuple[RuleSummary, ...]
    """One entry per rule of `list_active_rules`."""


def replay_folder(folder: Path, assignments: Sequence[str]) -> Replay:
    """Apply every rule separately to every run of the study in results/<run>, whichever rules the study used.

    Runs of every status are replayed with the rows that they have. Runs without rows are skipped, with the reason. See
    `replay_rules` for the outcomes. Nothing is written.

    assignments: the `key=value` of each --set, which replaces a threshold in the section early_stop of every run.

    Raises PlanError if the folder contains no study, or for a key that is not a field of early_stop or is given twice,
    and ConfigError for an invalid value.
    """
    study = read_study(folder)
    if not get_family(study).is_fine_tuning:
        raise PlanError(
            f"The stop rules of study {format_value(study.name)} count batches, not rows, so they cannot be "
            f"replayed: type the folder of a study that fine-tunes a language model."
        )
    overrides = _parse_thresholds(assignments)
    try:
        original_thresholds = RunConfig.model_validate({SECTION: study.settings.get(SECTION)}).early_stop
    except ValidationError as error:
        raise PlanError(
            f"{folder}/study.json is damaged, or from another version: {format_validation_error(error)}"
        ) from None
    # This also checks the typed values if no run has rows and uses them.
    replayed_thresholds = _override_thresholds(original_thresholds, overrides)
    results = [_replay_run(folder, entry, overrides) for entry in study.runs]
    runs = tuple(run for run in results if isinstance(run, RunReplay))
    return Replay(
        original_thresholds=tuple(dict.fromkeys(run.original_thresholds for run in runs)) or (original_thresholds,),
        replayed_thresholds=tuple(dict.fromkeys(run.replayed_thresholds for run in runs)) or (replayed_thresholds,),
        runs=runs,
        skipped_runs=tuple(run for run in results if isinstance(run, SkippedRun)),
        rules=tuple(_summarize_rule(rule, runs) for rule in list_active_rules(replayed_thresholds)),
    )


def replay_rules(rows: Sequence[Row], settings: EarlyStopConfig) -> tuple[Alarm, ...]:
    """Apply each rule separately to the rows of one run; one entry per rule of `list_active_rules`.

    The outcome of an alarm is `false alarm` if the run recovered, and `right` if it did not. A run recovered if the
    mean of its last (up to 3) validations after the alarm is at least as high as both of these:

    * the success of the policy before training (base_val_success); if it was not measured, the best val_success up to
      the alarm;
    * success_threshold.

    An alarm claims that a run has failed. A run that ends at the success with which it began has not failed, and
    neither has a run whose reward spread vanished because it solves every level. A run that ends below
    success_threshold has failed, wherever it began. (`analysis.sweep.alarms` instead asks whether a collapse followed
    an alarm.)

    The outcome is `unknown` if the run ended at or before the first validation after the alarm, or if neither success
    was measured.
    """
    history = History.from_rows(rows, settings)
    base_successes = (parse_finite(row.get("base_val_success")) for row in rows)
    base_success = next((success for success in base_successes if success is not None), None)
    alarms = []
    for rule in list_active_rules(settings):
        decision = RULES[rule](history, settings)
        if decision is None:
            alarms.append(Alarm(rule, decision=None, outcome=None, steps_saved=0))
            continue
        steps_saved = sum(step > decision.step for step in history.steps)
        outcome = _classify_outcome(history, base_success, settings.success_threshold, decision.step)
        alarms.append(Alarm(rule, decision, outcome, steps_saved))
    return tuple(alarms)


def _classify_outcome(history: History, base_success: float | None, success_floor: float, alarm_step: int) -> Outcome:
    """Classify an alarm; see `replay_rules`.

    Args:
        history: the rows of the run.
        base_success: success before training; None if it was not measured.
        success_floor: success below which a run counts as failed.
        alarm_step: step at which the rule fired.
    """
    pairs = zip(history.steps, history.val_success, strict=True)
    validations = [(step, success) for step, success in pairs if success is not None]
    later_validations = [(step, success) for step, success in validations if step > alarm_step]
    # A run that ended at the alarm cannot show whether it would have recovered. Its final evaluation may count as a
    # validation after the alarm, so the run must have trained beyond the first one.
    if not later_validations or history.steps[-1] <= later_validations[0][0]:
        return "unknown"
    earlier_successes = [success for step, success in validations if step <= alarm_step]
    reference_success = base_success if base_success is not None else max(earlier_successes, default=None)
    if reference_success is None:
        return "unknown"
    # A run below the floor has failed, even if it is no worse than before the alarm.
    final_success = mean(success for _, success in later_validations[-LAST_VALIDATIONS:])
    return "false alarm" if final_success >= max(reference_success, success_floor) - _TOLERANCE else "right"


def _parse_thresholds(assignments: Sequence[str]) -> dict[str, object]:
    """Parse the typed values, by field of early_stop. Raises PlanError for keys of other sections or given twice."""
    allowed = ", ".join(f"{SECTION}.{name}" for name in EarlyStopConfig.model_fields)
    overrides: dict[str, object] = {}
    for assignment in assignments:
        key, sign, value = assignment.partition("=")
        if not sign:
            raise PlanError(
                f"--set '{format_value(assignment)}' has no value: type --set key=value, "
                f"like --set early_stop.variance_ratio=0.2."
            )
        # Unknown keys and settings of other sections get the same message, which lists all thresholds.
        try:
            name = resolve_key(key.strip())
        except ConfigError:
            name = ""
        if not name.startswith(f"{SECTION}."):
            raise PlanError(
                f"`{format_value(key.strip())}` is not a threshold of a stop rule: --set takes one of {allowed}."
            )
        if name in overrides:
            raise PlanError(
                f"`{name}` is given twice (`--set {format_value(assignment)}` is the second): give it once."
            )
        overrides[name] = value.strip()
    return overrides


def _override_thresholds(thresholds: EarlyStopConfig, overrides: Mapping[str, object]) -> EarlyStopConfig:
    return apply_overrides(RunConfig(early_stop=thresholds), overrides).early_stop


def _replay_run(folder: Path, entry: RunEntry, overrides: Mapping[str, object]) -> RunReplay | SkippedRun:
    """Replay one run of the study in `folder`. entry: its run_id, arm and seed, from study.json."""
    run_dir = folder / "runs" / entry.run_id
    status = find_record(StatusRecord, run_dir) or StatusRecord(entry.run_id, "never_ran")
    # Thresholds are read from each run, since a threshold may be the axis of the study.
    try:
        original_thresholds = EarlyStopConfig.model_validate(read_record(RunRecord, run_dir).config[SECTION])
    except (OSError, DamagedFileError, KeyError, ValidationError):
        return SkippedRun(entry.run_id, f"its run.json has no valid {SECTION} settings")
    rows = read_rows(run_dir / METRICS_FILE)
    if not rows:
        reasons = ": ".join(format_value(word) for word in (status.status, status.reason) if word)
        return SkippedRun(entry.run_id, f"no rows ({reasons})")
    replayed_thresholds = _override_thresholds(original_thresholds, overrides)
    return RunReplay(
        entry.run_id,
        entry.arm,
        entry.seed,
        len(rows),
        original_thresholds,
        replayed_thresholds,
        status.stop_rule,
        replay_rules(rows, replayed_thresholds),
    )


def _summarize_rule(rule: str, runs: Sequence[RunReplay]) -> RuleSummary:
    from analysis.stats.estimates import wilson_interval

    alarms = [alarm for run in runs for alarm in run.alarms if alarm.rule == rule and alarm.decision]
    outcomes = [alarm.outcome for alarm in alarms]
    false_alarms, unknown_outcomes = outcomes.count("false alarm"), outcomes.count("unknown")
    known_outcomes = len(outcomes) - unknown_outcomes
    interval = wilson_interval(false_alarms, known_outcomes)
    return RuleSummary(
        rule=rule,
        runs=len(runs),
        fires=len(outcomes),
        false_alarms=false_alarms,
        known_outcomes=known_outcomes,
        ci_low=interval.low,
        ci_high=interval.high,
        unknown_outcomes=unknown_outcomes,
        steps_saved=sum(alarm.steps_saved for alarm in alarms),
        steps=sum(run.steps for run in runs),
        live_stops=sum(run.live_rule == rule for run in runs),
    )


def print_replay(console: Console, replay: Replay) -> None:
    """Print the thresholds, every rule on every run, every rule over all runs, and what the columns mean."""
    print_line(console, format_thresholds(replay))
    columns = ("run", "arm", "seed", "rule", "fires at step", "value", "threshold", "outcome", "steps saved")
    print_table(console, columns, [_format_alarm_cells(run, alarm) for run in replay.runs for alarm in run.alarms])
    for skipped_run in replay.skipped_runs:
        print_line(console, f"not replayed: {skipped_run.run_id}: {skipped_run.reason}")
    if not replay.runs:
        print_line(console, "No run of this study has rows yet: there is nothing to replay.")
    print_line(console, "")
    columns = ("rule", "runs", "fires in", "false alarms", "95 %", "unknown", "steps saved", "saved", "fired live")
    print_table(console, columns, [_format_rule_cells(rule) for rule in replay.rules])
    for note in _NOTES:
        print_line(console, note)


def format_thresholds(replay: Replay) -> str:
    """Format the replay's thresholds as a line, with the study's where they differ; `or` joins the values of arms."""
    entries = []
    n_changed = 0
    for name in EarlyStopConfig.model_fields:
        replayed_text, original_text = (
            " or ".join(dict.fromkeys(str(getattr(thresholds, name)) or "none" for thresholds in versions))
            for versions in (replay.replayed_thresholds, replay.original_thresholds)
        )
        if replayed_text == original_text == "none":  # no alarm
            continue
        is_changed = replayed_text != original_text
        entries.append(f"{name}={replayed_text}" + (f" (in the study: {original_text})" if is_changed else ""))
        n_changed += is_changed
    verdict = f"{n_changed} changed" if n_changed else "those of the study"
    return f"thresholds ({verdict}): {', '.join(entries)}"


def _format_alarm_cells(run: RunReplay, alarm: Alarm) -> list[str]:
    run_cells = [run.run_id, run.arm, str(run.seed), alarm.rule]
    if alarm.decision is None:
        return [*run_cells, f"not in {run.steps} steps", "-", "-", "-", "-"]
    numbers = (f"{number:.4g}" for number in (alarm.decision.value, alarm.decision.threshold))
    return [*run_cells, str(alarm.decision.step), *numbers, alarm.outcome or "-", str(alarm.steps_saved)]


def _format_rule_cells(rule: RuleSummary) -> list[str]:
    saved_percent = f"{100 * rule.steps_saved / rule.steps:.1f} %" if rule.steps else "-"
    interval = f"{rule.ci_low:.2f} to {rule.ci_high:.2f}" if rule.known_outcomes else "-"
    counts = [str(rule.runs), str(rule.fires), f"{rule.false_alarms} of {rule.known_outcomes} known", interval]
    return [rule.rule, *counts, str(rule.unknown_outcomes), str(rule.steps_saved), saved_percent, str(rule.live_stops)]
