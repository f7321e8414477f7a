"""The stop rules as Stoppers of Ray Tune, and the request to stop that a user makes with Ctrl-C."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ray import tune

from trainable.config.sections import EarlyStopConfig
from trainable.runs.stop_rules import HISTORY_COLUMNS, RULES, evaluate_stop_rules
from tune_study.host.interrupt import Interrupt

DEFAULT_COLUMNS = MappingProxyType({name: name for name in HISTORY_COLUMNS})
"""What the rules read of a result -> the entry that has it."""


class RuleStopper(tune.Stopper):  # type: ignore[misc]  # Ray is untyped
    """Ends a trial where a stop rule says so.

    rule: one of `trainable.runs.stop_rules.RULES`, such as "reward_variance_collapse". settings: its numbers. columns:
    what the rules read -> the entry of a result that has it, where a Trainable calls it otherwise.

    A run of this project has decided before it wrote its row: the result's `stop_rule` is obeyed. A result without
    that entry is another Trainable's, and the rule is applied here to the trial's results so far, keyed by
    `training_iteration`; a Trainable without a filter needs no `groups_kept`. Raises ValueError for a rule that does
    not exist.

    Example: the published rules for a Trainable of one's own::

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
            raise ValueError(f"There is no stop rule `{rule}`: name one of {', '.join(RULES)}.")
        self.rule, self.settings, self.columns = rule, settings or EarlyStopConfig(), {**DEFAULT_COLUMNS, **columns}
        self._rows: dict[str, list[dict[str, Any]]] = {}

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Whether the trial ends with this result."""
        if "stop_rule" in result:
            return bool(result["stop_rule"] == self.rule)
        rows = self._rows.setdefault(trial_id, [])
        rows.append(self._make_row(result))
        should_stop = evaluate_stop_rules(rows, self.settings, (self.rule,)) is not None
        if should_stop or result.get("done"):
            del self._rows[trial_id]  # an experiment of many trials must not keep the rows of all that have ended
        return should_stop

    def _make_row(self, result: Mapping[str, Any]) -> dict[str, Any]:
        """What the rules read of a result; where nothing is filtered, every step trains."""
        rule_row = {name: result.get(column) for name, column in self.columns.items()}
        if self.columns["groups_kept"] not in result:
            rule_row["groups_kept"] = 1
        return {"step": result.get("training_iteration"), **rule_row}

    def stop_all(self) -> bool:
        """Never: the other trials have their own rows."""
        return False


class InterruptStopper(tune.Stopper):  # type: ignore[misc]  # Ray is untyped
    """Ends each trial at its next result once the user has asked the study to stop.

    A row that was on its way when the request came may have no state on disk (`saved` is False): its run makes one
    step more, which has. It never ends the experiment: Tune then calls what was cut complete, and tells nobody.
    """

    def __init__(self, interrupt: Interrupt) -> None:
        self._interrupt = interrupt

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Whether the trial ends with this result."""
        if not self._interrupt.is_requested:
            return False
        return bool(result.get("saved", True)) or not self._interrupt.is_visible

    def stop_all(self) -> bool:
        """Never: runs cut by it would end without a status."""
        return False
