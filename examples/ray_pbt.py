"""Population-based training of the learning rate and the KL coefficient: losers continue from copies of winners."""

import sys

from ray import tune
from ray.tune.schedulers import PopulationBasedTraining

from tune_study import PPO, param_space

small = {"env.env_groups": 4, "env.val_env_groups": 64, "env.test_env_groups": 64}
settings = {"trainer.total_training_steps": 6, "trainer.test_freq": 2, **small}
space = param_space("kl", values=("0.1",), **settings)
scheduler = PopulationBasedTraining(
    time_attr="step",
    perturbation_interval=2,
    synch=True,
    hyperparam_mutations={"actor.lr": tune.loguniform(1e-4, 3e-3), "actor.kl_loss_coef": tune.loguniform(1e-3, 1)},
)
tuner = tune.Tuner(
    PPO,
    # An exploited trial also takes the seed of its donor, which is part of the configuration.
    param_space={**space, "actor.lr": tune.loguniform(1e-4, 3e-3), "seed": tune.grid_search([0, 1, 2, 3])},
    tune_config=tune.TuneConfig(metric="val_success", mode="max", scheduler=scheduler),
    run_config=tune.RunConfig(name="kl-pbt", storage_path=sys.argv[1] if len(sys.argv) > 1 else "~/ray_results"),
)
results = tuner.fit()
print(results.get_dataframe()[["config/actor.lr", "config/actor.kl_loss_coef", "step", "val_success"]])
