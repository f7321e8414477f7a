"""Optuna proposes learning rates. Repeater trains each with two seeds, and tells Optuna their mean."""

import sys

from ray import tune
from ray.tune.search import ConcurrencyLimiter, Repeater
from ray.tune.search.optuna import OptunaSearch

from tune_study import PPO, param_space

small = {"env.env_groups": 4, "env.val_env_groups": 64, "env.test_env_groups": 64}
space = param_space("kl", values=("0",), **{"trainer.total_training_steps": 4, "trainer.test_freq": 2, **small})
space["actor.lr"] = tune.loguniform(1e-4, 3e-3)
searcher = Repeater(OptunaSearch(metric="val_success", mode="max", seed=1), repeat=2)
tuner = tune.Tuner(
    PPO,
    param_space=space,
    tune_config=tune.TuneConfig(search_alg=ConcurrencyLimiter(searcher, 2), num_samples=4),
    run_config=tune.RunConfig(name="lr-optuna", storage_path=sys.argv[1] if len(sys.argv) > 1 else "~/ray_results"),
)
print(tuner.fit().get_dataframe()[["config/actor.lr", "seed", "val_success"]])
