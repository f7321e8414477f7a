"""In which order runs start: first come, first served; and those that must not start any more."""

from collections.abc import Container
from typing import Any

from ray.tune.experiment import Trial
from ray.tune.schedulers import FIFOScheduler

from tune_study.host.interrupt import Interrupt


class FirstComeFirstServed(FIFOScheduler):  # type: ignore[misc]  # Ray is untyped
    """FIFO, which censors no arm. Tune asks it before it starts anything; two kinds of waiting trials are taken out.

    given_up: ids of trials whose failure is final: Tune counts failures but does not look at them, and would start
    them again. They end as errors. interrupt: once it is requested, what has not started never does.
    """

    def __init__(self, given_up_trials: Container[str], interrupt: Interrupt) -> None:
        super().__init__()
        self._given_up_trials = given_up_trials
        self._interrupt = interrupt

    def choose_trial_to_run(self, tune_controller: Any, **kwargs: Any) -> Any:
        """The next trial to start, or None (see TrialScheduler)."""
        for trial in [trial for trial in tune_controller.get_trials() if trial.status == Trial.PENDING]:
            is_given_up = trial.trial_id in self._given_up_trials
            if is_given_up or self._interrupt.is_requested:
                tune_controller.stop_trial(trial)  # closes its files
            if is_given_up:
                tune_controller._set_trial_status(trial, Trial.ERROR)
            if trial.status != Trial.PENDING:
                # Tune records a trial again only when its actor is stopped, and this one has none any more.
                tune_controller._tune_controller._mark_trial_to_checkpoint(trial)
        return super().choose_trial_to_run(tune_controller, **kwargs)
