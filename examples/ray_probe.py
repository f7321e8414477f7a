"""The trainer of the best checkpoint: evaluate it, sample from it, measure its gradients."""

import sys

from tune_study import PPO, make_tuner

small = {"env.env_groups": 4, "env.val_env_groups": 64, "env.test_env_groups": 64}
settings = {"trainer.total_training_steps": 4, "trainer.test_freq": 2, **small}
storage_path = sys.argv[1] if len(sys.argv) > 1 else "~/ray_results"
tuner = make_tuner("kl", values=("0", "0.1"), settings=settings, name="kl-probed", storage_path=storage_path)
results = tuner.fit()

checkpoint = results.get_best_result("val_success", "max").checkpoint
trainer = PPO.from_checkpoint(checkpoint, **{"trainer.total_training_steps": 5})
print("after step", trainer.step_index, "greedy success on test levels:", trainer.evaluate("test", "greedy").success)
record = trainer.step()  # trains in this process only, and writes nothing
print("gradient norm of the next step:", record.row["actor_grad_norm"])
trainer.close()
