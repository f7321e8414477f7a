"""Schedule trials first come, first served, and remove those that must no longer start."""

from collections.abc import Container
from typing import Any

from ray.tune.experiment import Trial
from ray.tune.schedulers import FIFOScheduler

from tune_study.host.interrupt import Interrupt
from tune_study.plan.storage_uri import split_uri
from tune_study.tune.search.halving import Rungs


class FirstComeFirstServed(FIFOScheduler):  # type: ignore[misc]  # Ray is untyped
    """A FIFO scheduler that also ends pending trials which must not start; Tune asks it before each start of a trial.

    Arms are compared after the same number of steps, so no scheduler that favors an arm is used.

    given_up_trials: ids of trials that Tune would start again after a failure, but which have failed too often.
    interrupt: once the study or an arm is asked to stop, none of its pending trials starts. rungs: those of successive
    halving, whose censored arms start no further trial; None without it.
    """

    def __init__(self, given_up_trials: Container[str], interrupt: Interrupt, rungs: Rungs | None = None) -> None:
        super().__init__()
        self._rungs = rungs
        self._given_up_trials = given_up_trials
        self._interrupt = interrupt

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        """Number the checkpoints of a trial after those that an earlier start has left in its folder.

        Tune begins at 0, and would write into them.
        """
        super().on_trial_add(tune_controller, trial)
        uris = trial.config["run"].get("checkpoints", ())
        numbers = [int(split_uri(uri)[1].removeprefix("checkpoint_")) for uri in uris]
        trial.storage.current_checkpoint_index = max(numbers, default=-1)

    def choose_trial_to_run(self, tune_controller: Any, **kwargs: Any) -> Any:
        """The next trial to start, or None (see ray.tune.schedulers.TrialScheduler)."""
        for trial in [trial for trial in tune_controller.get_trials() if trial.status == Trial.PENDING]:
            arm = trial.config["run"]["arm"]
            is_stopped = self._interrupt.is_requested or self._interrupt.is_arm_requested(arm)
            is_censored = self._rungs is not None and self._rungs.is_censored(arm)
            if is_stopped or is_censored or trial.trial_id in self._given_up_trials:
                # Tune lists the folder of every ended trial, and this one would have none if it has never started.
                trial.init_local_path()
                tune_controller.stop_trial(trial)  # closes its files
        return super().choose_trial_to_run(tune_controller, **kwargs)
