"""Successive halving of Ray Tune over the entropy bonus: trials that are behind at a rung end there."""

import sys

from ray import tune
from ray.tune.schedulers import ASHAScheduler

from tune_study import PPO, param_space, rules

small = {"env.env_groups": 4, "env.val_env_groups": 64, "env.test_env_groups": 64}
scheduler = ASHAScheduler(time_attr="step", max_t=6, grace_period=2, reduction_factor=2)
tuner = tune.Tuner(
    PPO,
    param_space=param_space("entropy", **{"trainer.total_training_steps": 6, "trainer.test_freq": 2, **small}),
    tune_config=tune.TuneConfig(metric="val_success", mode="max", scheduler=scheduler),
    run_config=tune.RunConfig(
        name="entropy-asha",
        storage_path=sys.argv[1] if len(sys.argv) > 1 else "~/ray_results",
        stop=rules("entropy"),
        failure_config=tune.FailureConfig(max_failures=3),
    ),
)
results = tuner.fit()
print(results.get_dataframe()[["config/actor.entropy_coeff", "step", "val_success", "finished"]])
