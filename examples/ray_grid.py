"""A study as a grid of Ray Tune: every arm and seed, first come, first served, and its statistics."""

import sys

import analysis
from tune_study import make_tuner

small = {"env.env_groups": 4, "env.val_env_groups": 64, "env.test_env_groups": 64}
tuner = make_tuner(
    "kl",
    "laptop",
    seeds=2,
    values=("0", "0.1"),
    settings={"trainer.total_training_steps": 6, "trainer.test_freq": 3, **small},
    storage_path=sys.argv[1] if len(sys.argv) > 1 else "~/ray_results",  # or s3://bucket/studies
)
results = tuner.fit()
print(results.get_dataframe()[["config/actor.kl_loss_coef", "config/seed", "step", "val_success"]])

frames = analysis.load(results, baseline="0")
print(frames.trials[["arm", "seed", "status", "final_val_success", "test_success"]])
