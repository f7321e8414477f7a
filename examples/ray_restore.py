"""An experiment that was killed continues from its checkpoints, to the same rows: type the command again."""

import sys

from ray import tune

from tune_study import PPO, make_tuner

small = {"env.env_groups": 4, "env.val_env_groups": 64, "env.test_env_groups": 64}
folder = sys.argv[1] if len(sys.argv) > 1 else "~/ray_results"
path = f"{folder}/kl-restored"
if tune.Tuner.can_restore(path):
    tuner = tune.Tuner.restore(path, trainable=PPO, resume_errored=True)
else:
    tuner = make_tuner(
        "kl",
        values=("0.1",),
        settings={"trainer.total_training_steps": 12, "trainer.test_freq": 3, **small},
        name="kl-restored",
        storage_path=folder,
        checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=1, num_to_keep=2),
        failure_config=tune.FailureConfig(max_failures=3),
    )
results = tuner.fit()
print(results.get_dataframe()[["training_iteration", "step", "val_success"]])
