"""The stop rules in Ray Tune: per run, decided in the driver from the rows, and written into the row that ends it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ray import tune

from trainable.config.sections import EarlyStopConfig
from trainable.runs.run_files import METRICS, read_rows
from trainable.runs.stop_rules import decide
from tune_study.host.interrupt import Interrupt


class Watched(NamedTuple):
    """A run that is watched: the folder of its rows, and the numbers of its rules."""

    run_dir: Path
    settings: EarlyStopConfig


class StopRules(tune.Stopper):  # type: ignore[misc]  # Ray is untyped
    """Ends each run at the first row that breaks one of `rules`, and at its next row once an interrupt is requested.

    A row that was on its way when the interrupt came may have no state on disk (`saved` is False): its run makes one
    step more, which has. It never ends the study: Tune then calls what was cut complete, and tells nobody.

    runs: run_id -> what is watched. Rows are kept by run and step. The rows that a run wrote before this object
    existed are read from its metrics.jsonl, so nothing is counted twice and nothing of this object need be stored.
    """

    def __init__(self, runs: Mapping[str, Watched], rules: tuple[str, ...], interrupt: Interrupt | None = None) -> None:
        self._runs = dict(runs)
        self._rules = rules
        self._interrupt = interrupt
        self._rows: dict[str, list[dict[str, Any]]] = {}

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Whether the run of this row ends here; the decision goes into the row's stop columns."""
        watched = self._runs.get(str(result.get("run_id")))
        if watched is None:  # a trial of several runs applies the rules itself, to each of them
            return self._is_interrupted(result)
        run_id = str(result["run_id"])
        if run_id not in self._rows:
            self._rows[run_id] = read_rows(watched.run_dir / METRICS)
        rows = self._rows[run_id]
        rows.append({name: result.get(name) for name in ("step", "reward_std", "groups_kept", "val_success")})
        decision = decide(rows, watched.settings, self._rules)
        if decision is not None:
            result["stop_rule"] = decision.rule
            result["stop_value"] = decision.value
            result["stop_threshold"] = decision.threshold
            result["stop_step"] = decision.step
        ends = decision is not None or self._is_interrupted(result)
        if ends or result.get("done"):
            del self._rows[run_id]  # a study of many runs must not keep the rows of all that have ended
        return ends

    def _is_interrupted(self, result: Mapping[str, Any]) -> bool:
        if self._interrupt is None or not self._interrupt.is_requested:
            return False
        return bool(result.get("saved", True)) or not self._interrupt.is_visible

    def stop_all(self) -> bool:
        """Never: runs cut by it would end without a status."""
        return False

    def __getstate__(self) -> dict[str, Any]:
        """Without the rows: they are read again from where they are kept."""
        return {**self.__dict__, "_rows": {}}
