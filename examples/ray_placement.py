"""Resources of your own: by default a trial has a CPU, and the share of a GPU or the GPUs that its settings name."""

import sys

from ray import tune

from tune_study import PPO, param_space

small = {"env.env_groups": 4, "env.val_env_groups": 64, "env.test_env_groups": 64}
group = tune.PlacementGroupFactory([{"CPU": 2}], strategy="STRICT_PACK")
settings = {"trainer.total_training_steps": 2, "trainer.test_freq": 2, **small}
tuner = tune.Tuner(
    tune.with_resources(PPO, group),
    param_space=param_space("top-p", values=("0.9", "nofilter"), **settings),
    run_config=tune.RunConfig(name="top-p", storage_path=sys.argv[1] if len(sys.argv) > 1 else "~/ray_results"),
)
print(tuner.fit().get_dataframe()[["config/filter.rollout_filter_value", "step", "groups_kept"]])
