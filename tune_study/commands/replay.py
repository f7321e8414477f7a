"""Stop rules applied again to the rows of finished runs: when each would have fired, and whether it was right to."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, Literal, NamedTuple

from pydantic import ValidationError
from rich.console import Console

from search_spaces.language_model.family import PPO
from trainable.config.run_config import ConfigError, RunConfig, canonical_key, explain, with_overrides
from trainable.config.sections import EarlyStopConfig
from trainable.config.setting_types import shown
from trainable.runs.run_files import METRICS, read_rows
from trainable.runs.stop_rules import RULES, Decision, History, Row, finite
from tune_study.folder.outputs import RunStatus, read_json, read_status
from tune_study.folder.study_file import read_study
from tune_study.host.console import print_table, say
from tune_study.plan.study_plan import PlanError

Outcome = Literal["false alarm", "right", "unknown"]

LAST_VALIDATIONS = 3
SECTION = "early_stop"
_ROUNDING = 1e-9  # Floats put the mean of 1, 6 and 11 of 120 levels below 6 of 120; real differences are larger.

_NOTES = (
    "false alarm: the run recovered: the mean of its last (up to 3) validations after the alarm is at least the "
    "val_success before training (where that was not measured, the best one up to the alarm) and at least "
    "success_threshold. right: it did not.",
    "unknown: the run ended at or before the first validation after the alarm, as a run that was really stopped "
    "there did, or there is nothing to compare with.",
    "steps saved: rows after the alarm. false alarms: of the alarms whose outcome is known, with Wilson's 95 % "
    "interval. fired live: runs that the rule really stopped, under their own thresholds.",
)


class Alarm(NamedTuple):
    """One rule on one run. decision, outcome: None where the rule never fires. steps_saved: rows after the alarm."""

    rule: str
    decision: Decision | None
    outcome: Outcome | None
    steps_saved: int


class RunReplay(NamedTuple):
    """One run. steps: its rows. own, used: thresholds as it ran, and as replayed. live_rule: what really stopped it.

    alarms: one entry a rule, in the order of RULES. live_rule is empty where no rule stopped the run.
    """

    run_id: str
    arm: str
    seed: int
    steps: int
    own: EarlyStopConfig
    used: EarlyStopConfig
    live_rule: str
    alarms: tuple[Alarm, ...]


class Skipped(NamedTuple):
    """A run that cannot be replayed, and why."""

    run_id: str
    reason: str


class RuleSummary(NamedTuple):
    """One rule over all replayed runs.

    fires: runs in which it fires; of these `known` have a known outcome, false_alarms of them recovered, and the
    others are `unknown`. low, high: Wilson's 95 % interval of false_alarms / known; (0, 1) where none is known.
    steps_saved: rows after its alarms, of all `steps` rows. live: runs that it really stopped, as status.json says.
    """

    rule: str
    runs: int
    fires: int
    false_alarms: int
    known: int
    low: float
    high: float
    unknown: int
    steps_saved: int
    steps: int
    live: int


class Replay(NamedTuple):
    """A study replayed. own, used: the distinct thresholds of its runs (of the study where no run has rows)."""

    own: tuple[EarlyStopConfig, ...]
    used: tuple[EarlyStopConfig, ...]
    runs: tuple[RunReplay, ...]
    skipped: tuple[Skipped, ...]
    rules: tuple[RuleSummary, ...]


def replay_folder(folder: Path, assignments: Sequence[str]) -> Replay:
    """Every rule on its own over every run of the study in results/<run>, whichever rules the study used.

    assignments: the `key=value` of each --set; they replace thresholds of the section early_stop, which are each
    run's own otherwise. Runs of every status take part with the rows they have; those without rows are `skipped`,
    with the reason. Nothing is written. PlanError where the folder holds no study, or for a key that is no field of
    early_stop or is given twice; ConfigError for a value that cannot be used. See `alarms_of` for what is decided.
    """
    study = read_study(folder)
    if study.get("family", PPO.name) != PPO.name:
        raise PlanError(
            f"The rules of study {shown(study['name'])} count batches, not rows, and cannot be applied again: type the "
            f"folder of a study that fine-tunes a language model."
        )
    overrides = _thresholds(assignments)
    try:
        own = RunConfig.model_validate({SECTION: study["settings"].get(SECTION)}).early_stop
    except ValidationError as error:
        raise PlanError(f"{folder}/study.json is damaged, or of another version: {explain(error)}") from None
    used = _replaced(own, overrides)  # Checks the values, also where no run is there to use them.
    found = [_replay_run(folder, entry, overrides) for entry in study["runs"]]
    runs = tuple(run for run in found if isinstance(run, RunReplay))
    return Replay(
        own=tuple(dict.fromkeys(run.own for run in runs)) or (own,),
        used=tuple(dict.fromkeys(run.used for run in runs)) or (used,),
        runs=runs,
        skipped=tuple(run for run in found if isinstance(run, Skipped)),
        rules=tuple(_summary(rule, runs) for rule in RULES),
    )


def alarms_of(rows: Sequence[Row], settings: EarlyStopConfig) -> tuple[Alarm, ...]:
    """What each rule alone would have done over `rows` of one run, one entry a rule in the order of RULES.

    Outcome: `false alarm` if the run recovered, `right` if not. Recovered: the mean of the last (up to 3) validations
    after the alarm's step is at least the success of the policy before training (base_val_success); where that is
    missing, at least the best val_success up to the alarm. A rule says that a run is dead; one that ends where it
    began was not, nor was one whose reward spread vanished because it solves every level. One that ends below
    success_threshold, where success counts as failure, was dead wherever it began. `unknown` where the run ended at
    or before the first validation after the alarm, or there is nothing to compare with.
    """
    history = History.from_rows(rows)
    measured = (finite(row.get("base_val_success")) for row in rows)
    base = next((success for success in measured if success is not None), None)
    alarms = []
    for rule, first_at in RULES.items():
        decision = first_at(history, settings)
        if decision is None:
            alarms.append(Alarm(rule, None, None, 0))
            continue
        saved = sum(step > decision.step for step in history.steps)
        outcome = _outcome(history, base, settings.success_threshold, decision.step)
        alarms.append(Alarm(rule, decision, outcome, saved))
    return tuple(alarms)


def _outcome(history: History, base: float | None, floor: float, alarm: int) -> Outcome:
    """See `alarms_of`. alarm: the step at which a rule fired. base: success before training, None: not measured.

    floor: success below which a run counts as failed.
    """
    pairs = zip(history.steps, history.val_success, strict=True)
    validations = [(step, success) for step, success in pairs if success is not None]
    after = [(step, success) for step, success in validations if step > alarm]
    if not after or history.steps[-1] <= after[0][0]:
        return "unknown"
    up_to_alarm = [success for step, success in validations if step <= alarm]
    began = base if base is not None else max(up_to_alarm, default=None)
    if began is None:
        return "unknown"
    ended = mean(success for _, success in after[-LAST_VALIDATIONS:])
    return "false alarm" if ended >= max(began, floor) - _ROUNDING else "right"


def _thresholds(assignments: Sequence[str]) -> dict[str, object]:
    """The early_stop fields that --set replaces, each once; PlanError for any other key."""
    allowed = ", ".join(f"{SECTION}.{name}" for name in EarlyStopConfig.model_fields)
    overrides: dict[str, object] = {}
    for assignment in assignments:
        key, sign, value = assignment.partition("=")
        if not sign:
            raise PlanError(
                f"--set '{shown(assignment)}' has no value: type --set key=value, "
                f"like --set early_stop.variance_ratio=0.2."
            )
        try:
            name = canonical_key(key.strip())
        except ConfigError:
            name = ""
        if not name.startswith(f"{SECTION}."):
            raise PlanError(f"`{shown(key.strip())}` is no threshold of a stop rule: --set takes here {allowed}.")
        if name in overrides:
            raise PlanError(f"`{name}` is given twice (`--set {shown(assignment)}` is the second): give it once.")
        overrides[name] = value.strip()
    return overrides


def _replaced(own: EarlyStopConfig, overrides: Mapping[str, object]) -> EarlyStopConfig:
    return with_overrides(RunConfig(early_stop=own), overrides).early_stop


def _replay_run(folder: Path, entry: Mapping[str, Any], overrides: Mapping[str, object]) -> RunReplay | Skipped:
    """One run of the study in `folder`. entry: its run_id, arm and seed, as study.json has them."""
    run_id, arm, seed = entry["run_id"], entry["arm"], entry["seed"]
    run_dir = folder / "runs" / run_id
    status = read_status(run_dir) or RunStatus(run_id, "never_ran")
    try:
        own = EarlyStopConfig.model_validate((read_json(run_dir / "run.json") or {})["config"][SECTION])
    except (KeyError, TypeError, ValidationError):
        return Skipped(run_id, f"its run.json does not tell its {SECTION} settings")
    try:
        rows: list[dict[str, Any]] = read_rows(run_dir / METRICS)
        steps = len(History.from_rows(rows).steps)
    except (AttributeError, KeyError, TypeError):
        return Skipped(run_id, f"its {METRICS} has a line that is no row of a run")
    if not steps:
        return Skipped(run_id, f"no rows ({': '.join(shown(word) for word in (status.status, status.reason) if word)})")
    used = _replaced(own, overrides)
    return RunReplay(run_id, arm, seed, steps, own, used, status.stop_rule, alarms_of(rows, used))


def _summary(rule: str, runs: Sequence[RunReplay]) -> RuleSummary:
    from analysis.stats.estimates import wilson

    alarms = [alarm for run in runs for alarm in run.alarms if alarm.rule == rule]
    outcomes = [alarm.outcome for alarm in alarms if alarm.outcome is not None]
    false_alarms, unknown = outcomes.count("false alarm"), outcomes.count("unknown")
    known = len(outcomes) - unknown
    interval = wilson(false_alarms, known)
    return RuleSummary(
        rule=rule,
        runs=len(runs),
        fires=len(outcomes),
        false_alarms=false_alarms,
        known=known,
        low=interval.low,
        high=interval.high,
        unknown=unknown,
        steps_saved=sum(alarm.steps_saved for alarm in alarms),
        steps=sum(run.steps for run in runs),
        live=sum(run.live_rule == rule for run in runs),
    )


def print_replay(console: Console, replay: Replay) -> None:
    """The thresholds, every run under every rule, every rule over the runs, and what the words mean."""
    say(console, thresholds_line(replay))
    columns = ("run", "arm", "seed", "rule", "fires at step", "value", "threshold", "outcome", "steps saved")
    print_table(console, columns, [_alarm_cells(run, alarm) for run in replay.runs for alarm in run.alarms])
    for skipped in replay.skipped:
        say(console, f"not replayed: {skipped.run_id}: {skipped.reason}")
    if not replay.runs:
        say(console, "No run of this study has rows: there is nothing to replay yet.")
    say(console, "")
    columns = ("rule", "runs", "fires in", "false alarms", "95 %", "unknown", "steps saved", "share", "fired live")
    print_table(console, columns, [_rule_cells(rule) for rule in replay.rules])
    for note in _NOTES:
        say(console, note)


def thresholds_line(replay: Replay) -> str:
    """The thresholds in use, and which of them differ from the study's own; `or` where arms differ among themselves."""
    words = []
    changed = 0
    for name in EarlyStopConfig.model_fields:
        used, own = (" or ".join(dict.fromkeys(str(getattr(one, name)) for one in settings))
                     for settings in (replay.used, replay.own))  # fmt: skip
        words.append(f"{name}={used}" + (f" (the study's own: {own})" if used != own else ""))
        changed += used != own
    verdict = f"{changed} differ{'s' if changed == 1 else ''} from the study's own" if changed else "the study's own"
    return f"thresholds ({verdict}): {', '.join(words)}"


def _alarm_cells(run: RunReplay, alarm: Alarm) -> list[str]:
    head = [run.run_id, run.arm, str(run.seed), alarm.rule]
    if alarm.decision is None:
        return [*head, f"not in {run.steps} steps", "-", "-", "-", "-"]
    numbers = (f"{number:.4g}" for number in (alarm.decision.value, alarm.decision.threshold))
    return [*head, str(alarm.decision.step), *numbers, alarm.outcome or "-", str(alarm.steps_saved)]


def _rule_cells(rule: RuleSummary) -> list[str]:
    share = f"{100 * rule.steps_saved / rule.steps:.1f} %" if rule.steps else "-"
    interval = f"{rule.low:.2f} to {rule.high:.2f}" if rule.known else "-"
    counts = [str(rule.runs), str(rule.fires), f"{rule.false_alarms} of {rule.known} known", interval]
    return [rule.rule, *counts, str(rule.unknown), str(rule.steps_saved), share, str(rule.live)]
