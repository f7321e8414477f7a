"""Asynchronous successive halving (ASHA) of the runs of a search, from the rows on disk.

Source: Li et al. 2020, "A System for Massively Parallel Hyperparameter Tuning", algorithm 2,
https://arxiv.org/abs/1810.05934, in the variant that stops runs instead of pausing them.
"""

from collections.abc import Mapping
from typing import Any

from trainable.files.json_values import parse_finite
from trainable.runs.records import drop_carried
from trainable.runs.run_files import METRICS_FILE, read_rows
from trainable.runs.study_record import CENSORED, StatusRecord
from tune_study.plan.search import DEFAULT_POINT
from tune_study.plan.study_plan import StudyPlan

REDUCTION_FACTOR = 3
"""One of this many runs continues at each rung."""

SIBLING_REASON = "another run of its point was stopped by successive halving; a censored run, not a failed one"


class Rungs:
    """The measurements of a search's runs at the rungs, and the points that did not get past one.

    A run reaches a rung with its first measurement at or after a step: grace_steps, 3 x grace_steps, and so on. It
    continues if the measurement is among the best third of all runs that have reached the rung so far, and always while
    there are fewer than three. If it does not, its point is censored, and no other run of the point continues, since
    the mean of the others would be too good. Runs of the default point always continue, because all others are compared
    with them.

    Rungs are read from the rows, so that a resumed search knows them. If the search was killed as a run had reached a
    rung, the run is judged at its next row.
    """

    def __init__(self, plan: StudyPlan, is_higher_better: bool, ended_runs: Mapping[str, StatusRecord]) -> None:
        """Read the rows of `plan`. ended_runs: the statuses, by run_id, of the runs that are not trained again."""
        assert plan.search is not None
        assert plan.search.grace_steps is not None
        self._column = plan.study.family.primary_metric
        self._sign = 1 if is_higher_better else -1
        self._arms = {spec.run_id: spec.arm for spec in plan.runs}
        self._censored_arms = {self._arms[run_id] for run_id, status in ended_runs.items() if status.status == CENSORED}
        # grace_steps times powers of the factor, below the last step.
        step, self.steps = plan.search.grace_steps, list[int]()
        while step < max(spec.steps for spec in plan.runs):
            self.steps.append(step)
            step *= REDUCTION_FACTOR
        self._values: dict[int, dict[str, float]] = {step: {} for step in self.steps}
        self._judged: dict[int, set[str]] = {step: {*ended_runs} for step in self.steps}
        self.reasons: dict[str, str] = {}
        """Why each stopped run was stopped, by run_id."""
        for spec in plan.runs:
            for row in read_rows(plan.get_run_dir(spec.run_id) / METRICS_FILE):
                self.record(spec.run_id, row)

    def record(self, run_id: str, row: Mapping[str, Any]) -> None:
        """Record the measurement of a row at each rung that the run reaches with it."""
        value = parse_finite(row.get(self._column))
        if value is None:
            return
        for step in self.steps:
            if row["step"] >= step:
                self._values[step].setdefault(run_id, value)

    def is_censored(self, arm: str) -> bool:
        """Check whether a run of the arm did not get past a rung, so that no other one starts."""
        return arm in self._censored_arms

    def decide(self, run_id: str, row: Mapping[str, Any]) -> str:
        """Record a row, and say why the run ends with it; empty if it continues."""
        self.record(run_id, row)
        arm = self._arms[run_id]
        if arm in self._censored_arms:
            self.reasons[run_id] = SIBLING_REASON
            return SIBLING_REASON
        for step in self.steps:
            if run_id not in self._values[step] or run_id in self._judged[step]:
                continue
            self._judged[step].add(run_id)
            values = self._values[step]
            num_better = sum(self._sign * value > self._sign * values[run_id] for value in values.values())
            num_promoted = len(values) // REDUCTION_FACTOR  # of all runs so far, including this one
            if arm != DEFAULT_POINT and len(values) >= REDUCTION_FACTOR and num_better >= num_promoted:
                self._censored_arms.add(arm)
                self.reasons[run_id] = (
                    f"successive halving at step {step}: {num_better} of {len(values)} runs were better, and the best "
                    f"{num_promoted} continue; a censored run, not a failed one"
                )
                return self.reasons[run_id]
        return ""

    def ends_trial(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Decide, for Tune's FunctionStopper, whether a trial ends after a result."""
        row = drop_carried(result)
        if row.get("failure_class"):
            return False
        if row.get("stop_rule"):  # the run ends in any case, but others are compared with it
            self.record(row["run_id"], row)
            return False
        return bool(self.decide(row["run_id"], row))
