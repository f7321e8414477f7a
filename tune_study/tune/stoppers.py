"""Ray Tune Stoppers for the stop rules, and for the request to stop that a user makes with Ctrl-C."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ray import tune

from trainable.config.alarm_rule import parse_alarm_rule
from trainable.config.own_parts import parse_part_name
from trainable.config.sections import EarlyStopConfig
from trainable.runs.stop_rules import ALARM, HISTORY_COLUMNS, RULES, evaluate_stop_rules
from tune_study.host.interrupt import Interrupt

DEFAULT_COLUMNS = MappingProxyType({name: name for name in HISTORY_COLUMNS})
"""For each column that the rules read, the key of a result that has the column."""


class RuleStopper(tune.Stopper):  # type: ignore[misc]  # Ray is untyped
    """Ends a trial when a stop rule fires.

    Args:
        rule: one of `trainable.runs.stop_rules.RULES`, such as "reward_variance_collapse".
        settings: thresholds of the rule; None for the defaults.
        columns: for each column that the rules read, the key of a result that has it, for a Trainable that uses other
            names.

    A run of this project applies its rules before it writes a row. Its results have the key `stop_rule`, and the
    Stopper follows that decision. A result without the key comes from another Trainable. The Stopper then applies the
    rule itself, to the results of the trial so far, with `training_iteration` as the step. A Trainable without a filter
    needs no `groups_kept`. Raises ValueError for an unknown rule.

    Example: the published rules for your own Trainable::

        from ray import tune
        from trainable.config.sections import EarlyStopConfig
        from tune_study.tune.stoppers import RuleStopper

        stop = tune.stopper.CombinedStopper(
            RuleStopper("reward_variance_collapse", EarlyStopConfig(variance_ratio=0.2)),
            RuleStopper("low_validation_success"),
        )
        tune.Tuner(MyTrainable, run_config=tune.RunConfig(stop=stop)).fit()
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
        """Whether the trial ends after this result."""
        if "stop_rule" in result:  # empty if no rule has fired
            return bool(result["stop_rule"] == self.rule)
        rows = self._rows.setdefault(trial_id, [])
        rows.append(self._make_row(result))
        should_stop = evaluate_stop_rules(rows, self.settings, (self.rule,)) is not None
        if should_stop or result.get("done"):
            del self._rows[trial_id]  # saves memory in an experiment of many trials
        return should_stop

    def _make_row(self, result: Mapping[str, Any]) -> dict[str, Any]:
        """The columns that the rules read, from a result."""
        rule_row = {name: result.get(column) for name, column in self.columns.items()}
        # A Trainable without a filter trains on every group. Without this column, the rules would take the step for one
        # in which the filter kept nothing.
        if self.columns["groups_kept"] not in result:
            rule_row["groups_kept"] = 1
        if self._alarm_column:
            rule_row[self._alarm_column] = result.get(self.columns.get(self._alarm_column, self._alarm_column))
        return {"step": result.get("training_iteration"), **rule_row}

    def stop_all(self) -> bool:
        """Never stop the experiment: other trials have their own rows."""
        return False


class OwnRuleStopper(tune.Stopper):  # type: ignore[misc]  # Ray is untyped
    """Ends a trial after a row in which a stop rule of the user has fired, which only its run can evaluate."""

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Whether the trial ends after this result."""
        return parse_part_name(result.get("stop_rule")) is not None

    def stop_all(self) -> bool:
        """Never stop the experiment: other trials have their own rows."""
        return False


class InterruptStopper(tune.Stopper):  # type: ignore[misc]  # Ray is untyped
    """Ends each trial at its next result once the user has asked the study, or the trial's arm, to stop.

    A result that was under way when the request came may have no checkpoint (its `saved` is False). The run then trains
    one more step, for which it writes a checkpoint. Only trials are stopped, never the whole experiment: Tune would
    mark the interrupted trials as complete without calling any callback, and their runs would have no status.
    """

    def __init__(self, interrupt: Interrupt) -> None:
        self._interrupt = interrupt

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Whether the trial ends after this result."""
        # A Trainable that does not report `saved` ends at once.
        is_saved = bool(result.get("saved", True))
        if not self._interrupt.is_requested:
            return is_saved and self._interrupt.is_arm_requested(str(result.get("config", {}).get("arm", "")))
        # If the file of the request could not be written (full disk), no run writes a checkpoint because of it. Waiting
        # for one would keep the runs training.
        return is_saved or not self._interrupt.is_visible

    def stop_all(self) -> bool:
        """Never stop the experiment: its runs would end without a status."""
        return False
