"""Does the coefficient of the KL loss change the success of PPO in verl?

verl 0.9.1; the keys are those of 0.6.1, but for rollout.seed, which needs a + there. A run on several GPUs continues on
as many. Without the words of `resume`, it would be validated again at the step from which it continues.
"""

from search_spaces.command_study import make_command_study

STUDY = make_command_study(
    name="verl-ppo",
    question=__doc__,
    command="python -m verl.trainer.main_ppo algorithm.adv_estimator=gae actor_rollout_ref.actor.use_kl_loss=True"
    " actor_rollout_ref.model.path={model} critic.model.path={model} actor_rollout_ref.rollout.name=vllm"
    " actor_rollout_ref.rollout.gpu_memory_utilization=0.4 actor_rollout_ref.actor.ppo_mini_batch_size=64"
    " actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8 critic.ppo_micro_batch_size_per_gpu=4"
    " actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=8 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4"
    " data.train_files=data/train.parquet data.val_files=data/test.parquet data.train_batch_size=256 data.seed={seed}"
    " actor_rollout_ref.rollout.seed={seed} trainer.total_training_steps={steps} trainer.total_epochs=100000"
    " trainer.n_gpus_per_node={gpus} trainer.nnodes=1 trainer.test_freq=10 trainer.save_freq=50"
    " trainer.logger=[console] trainer.max_actor_ckpt_to_keep=2 trainer.max_critic_ckpt_to_keep=2"
    " trainer.experiment_name={run} trainer.default_local_dir={output}/checkpoints trainer.resume_mode=disable"
    " hydra.run.dir={output}/hydra {overrides}",
    settings={
        "model": "Qwen/Qwen2.5-0.5B-Instruct",
        "actor_rollout_ref.actor.kl_loss_coef": 0.001,
        "actor_rollout_ref.actor.optim.lr": 1e-6,
    },
    vary={"actor_rollout_ref.actor.kl_loss_coef": (0.001, 0.01, 0.1)},
    steps=200,
    checkpoints="{output}/checkpoints/global_step_{step}",
    resume="trainer.resume_mode=resume_path trainer.resume_from_path={checkpoint} trainer.val_before_train=False",
    gpus=2,
    retry="ActorDiedError|NCCL|EngineDeadError",
    stop_seconds=60,
)
