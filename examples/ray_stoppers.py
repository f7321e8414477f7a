"""The shipped stop rules on a Trainable that is not of this project, by the names of its own metrics."""

import sys

from ray import tune

from trainable.config.sections import EarlyStopConfig
from tune_study import RuleStopper


class MyTrainable(tune.Trainable):
    """A training whose reward spread vanishes."""

    def step(self):
        """One iteration."""
        spread = 2.0 if self.iteration < 12 else 0.01
        return {"reward/std": spread, "eval/accuracy": 0.5}


thresholds = EarlyStopConfig(variance_ratio=0.2)
columns = {"reward_std": "reward/std", "val_success": "eval/accuracy"}
stop = [RuleStopper(rule, thresholds, columns) for rule in ("reward_variance_collapse", "low_validation_success")]
run_config = tune.RunConfig(
    name="stopped",
    checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),  # this Trainable cannot save itself
    storage_path=sys.argv[1] if len(sys.argv) > 1 else "~/ray_results",
    stop=tune.stopper.CombinedStopper(*stop, tune.stopper.MaximumIterationStopper(100)),
)
print(tune.Tuner(MyTrainable, run_config=run_config).fit().get_dataframe()[["training_iteration", "stop_rule"]])
