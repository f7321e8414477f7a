"""Asynchronous successive halving (ASHA) of the runs of a search, from the rows on disk.

Source: Li et al. 2020, "A System for Massively Parallel Hyperparameter Tuning", algorithm 2,
https://arxiv.org/abs/1810.05934, in the form that stops runs and never pauses them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ray import tune

from trainable.runs.run_files import METRICS_FILE, read_rows
from trainable.runs.stop_rules import parse_finite
from tune_study.plan.search import DEFAULT_POINT
from tune_study.plan.study_plan import StudyPlan

REDUCTION_FACTOR = 3
"""One of this many runs goes on at each rung."""


class Rungs:
    """The measurements of a study's runs at the rungs, and the runs that did not get past one.

    A rung is the first row with a measurement from a step on: grace_steps, 3 x grace_steps, and so on. A run goes on if
    its measurement is among the best third of all runs that have reached the rung so far, and always while there are
    fewer than three. The runs of the default point are recorded and always go on, since all others are compared with
    them.

    The measurements of runs that have ended are read from their rows, so that a resumed search decides in the same way.

    Attributes:
        reasons: for each run that was stopped, by run_id, why, as a sentence.
    """

    def __init__(self, plan: StudyPlan, is_higher_better: bool) -> None:
        assert plan.search is not None
        assert plan.search.grace_steps is not None
        self._column = plan.study.family.primary_metric
        self._sign = 1 if is_higher_better else -1
        self._arms = {spec.run_id: spec.arm for spec in plan.runs}
        self.steps = _list_rungs(plan.search.grace_steps, max(spec.steps for spec in plan.runs))
        self._values: dict[int, dict[str, float]] = {step: {} for step in self.steps}
        self.reasons: dict[str, str] = {}
        for spec in plan.runs:
            for row in read_rows(plan.get_run_dir(spec.run_id) / METRICS_FILE, first_step=0):
                self._record(spec.run_id, row)

    def _record(self, run_id: str, row: Mapping[str, Any]) -> int | None:
        """Record the measurement of a row; return the rung that the run has reached with it, None without a new one."""
        value = parse_finite(row.get(self._column))
        if value is None:
            return None
        reached = None
        for step in self.steps:
            if row["step"] >= step and run_id not in self._values[step]:
                self._values[step][run_id] = value
                reached = step
        return reached

    def decide(self, run_id: str, row: Mapping[str, Any]) -> str:
        """Why the run ends with this row; empty if it goes on."""
        step = self._record(run_id, row)
        if step is None or self._arms[run_id] == DEFAULT_POINT:
            return ""
        values = self._values[step]
        num_better = sum(self._sign * value > self._sign * values[run_id] for value in values.values())
        # The run itself counts as well.
        num_promoted = len(values) // REDUCTION_FACTOR
        if len(values) < REDUCTION_FACTOR or num_better < num_promoted:
            return ""
        self.reasons[run_id] = (
            f"successive halving at step {row['step']}: {num_better} of {len(values)} runs were better, and the best "
            f"{num_promoted} go on; a censored run, not a failed one"
        )
        return self.reasons[run_id]


def _list_rungs(grace_steps: int, total_steps: int) -> Sequence[int]:
    """The steps of the rungs: grace_steps and its multiples by powers of the factor, below the last step."""
    steps = []
    step = grace_steps
    while step < total_steps:
        steps.append(step)
        step *= REDUCTION_FACTOR
    return steps


class HalvingStopper(tune.Stopper):  # type: ignore[misc]  # Ray is untyped
    """Ends a trial whose run does not get past a rung."""

    def __init__(self, rungs: Rungs) -> None:
        self._rungs = rungs

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Whether the trial ends after this result."""
        if result["config"]["finished"] or result.get("stop_rule"):
            return False
        return bool(self._rungs.decide(result["config"]["run_id"], result))

    def stop_all(self) -> bool:
        """Never stop the experiment: other runs may get past the rung."""
        return False
