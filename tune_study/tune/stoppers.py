"""Ray Tune Stoppers for the stop rules, and for a user's request to stop (Ctrl-C or `stop`)."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ray import tune

from search_spaces.declaration.study import Study
from trainable.config.run_config import apply_overrides
from trainable.config.sections import EarlyStopConfig
from trainable.config.setting_types import parse_alarm_rule
from trainable.files.json_values import parse_finite
from trainable.runs.records import drop_carried
from trainable.runs.stop_rules import ALARM, HISTORY_COLUMNS, RULES, evaluate_stop_rules
from tune_study.host.interrupt import Interrupt
from tune_study.plan.typed_settings import find_study

DEFAULT_COLUMNS = MappingProxyType({name: name for name in HISTORY_COLUMNS})
"""For each column that the rules read, its key in a result."""


class RuleStopper(tune.Stopper):  # type: ignore[misc]  # Ray is untyped
    """A Stopper that ends a trial when a stop rule fires.

    Args:
        rule: one of `trainable.runs.stop_rules.RULES`, such as "reward_variance_collapse".
        settings: thresholds of the rule; None for the defaults.
        columns: for each column that the rules read, its key in a result, for a Trainable that uses other names.

    A run of a study applies its rules before it writes a row. Its results have the key `stop_rule`, and the Stopper
    follows that decision. Without the key, the Stopper applies the rule to the results of the trial so far, with
    `training_iteration` as the step. If the rule fires, it adds the `stop_...` columns to the result, so that the last
    row says why the trial ended. A Trainable without a filter needs no `groups_kept`. Raises ValueError for an unknown
    rule. See examples/ray_stoppers.py.
    """

    def __init__(
        self, rule: str, settings: EarlyStopConfig | None = None, columns: Mapping[str, str] = DEFAULT_COLUMNS
    ) -> None:
        if rule not in RULES:
            raise ValueError(f"Unknown stop rule `{rule}`: choose from {', '.join(RULES)}.")
        self.rule, self.settings, self.columns = rule, settings or EarlyStopConfig(), {**DEFAULT_COLUMNS, **columns}
        alarm = self.settings.alarm
        self._alarm_column = parse_alarm_rule(alarm).column if rule == ALARM and alarm else ""
        self._rows: dict[str, list[dict[str, Any]]] = {}

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Decide whether the trial ends after this result."""
        if "stop_rule" in result:  # empty if no rule has fired
            return bool(result["stop_rule"] == self.rule)
        rows = self._rows.setdefault(trial_id, [])
        row = self._make_row(result)
        step = parse_finite(row["step"])
        # A trial that was restored from a checkpoint repeats steps.
        while rows and step is not None and (parse_finite(rows[-1]["step"]) or 0) >= step:
            rows.pop()
        rows.append(row)
        decision = evaluate_stop_rules(rows, self.settings, (self.rule,))
        if decision is not None:
            result |= decision.to_columns()
        if decision is not None or result.get("done"):
            del self._rows[trial_id]  # saves memory in an experiment of many trials
        return decision is not None

    def _make_row(self, result: Mapping[str, Any]) -> dict[str, Any]:
        """Extract the columns that the rules read from a result."""
        # A value that is carried over from an earlier step was not measured at this one.
        measured = drop_carried(result)
        rule_row = {name: measured.get(column) for name, column in self.columns.items()}
        # A Trainable without a filter trains on every group. Without this column, the rules would assume that the
        # filter kept nothing.
        if self.columns["groups_kept"] not in result:
            rule_row["groups_kept"] = 1
        if self._alarm_column:
            rule_row[self._alarm_column] = measured.get(self.columns.get(self._alarm_column, self._alarm_column))
        return {"step": result.get("training_iteration"), **rule_row}

    def stop_all(self) -> bool:
        """Never stop the experiment: other trials have their own rows."""
        return False


def resolve_study(study: str | Study) -> Study:
    """Find a study by its name; return a declared study as it is."""
    return find_study(study) if isinstance(study, str) else study


def rules(study: str | Study, preset: str = "laptop") -> tune.stopper.CombinedStopper:
    """Make one Stopper of the stop rules of a study, with its thresholds under a preset.

    study: a study, or the name of one in this package. Raises PlanError for another name.
    """
    declared = resolve_study(study)
    config = apply_overrides(declared.family.config_class.model_validate({}), declared.make_preset_settings(preset))
    settings = getattr(config, "early_stop", None)
    # Studies of update rules have other rules than RULES, since a trial has several runs, which end one by one.
    names = [name for name in (*declared.stop_rules, ALARM) if name in RULES]
    return tune.stopper.CombinedStopper(*(RuleStopper(name, settings) for name in names))


def make_interrupt_stopper(interrupt: Interrupt) -> tune.stopper.FunctionStopper:
    """Make a Stopper that ends each trial at its next result once the user has asked the study, or its arm, to stop.

    A result that was under way when the request came may have no checkpoint (its `saved` is False). The run then trains
    one more step, for which it writes a checkpoint. Only trials are stopped, never the whole experiment: Tune would
    mark the interrupted trials as complete without calling any callback, and their runs would have no status.
    """

    def ends_trial(trial_id: str, result: dict[str, Any]) -> bool:
        # A Trainable ends at once if it does not report `saved`. With a storage, it uploads its state when it ends.
        is_saved = bool(result.get("saved", True)) or "uploaded" in result
        if not interrupt.is_requested:
            arm = str(result.get("config", {}).get("run", {}).get("arm", ""))
            return is_saved and interrupt.is_arm_requested(arm)
        # If the file of the request could not be written (full disk), runs do not see it and write no checkpoint, so
        # waiting for one would keep them training.
        return is_saved or not interrupt.path.exists()

    return tune.stopper.FunctionStopper(ends_trial)
