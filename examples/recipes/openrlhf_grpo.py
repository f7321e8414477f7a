"""Does the coefficient of the KL loss change the success of GRPO in OpenRLHF?

OpenRLHF 0.11.2. It has no option for the number of steps, which is data.max_samples / rollout.batch_size * episodes,
and none to name a checkpoint: it continues from its newest one by itself.
"""

from search_spaces.command_study import make_command_study

STUDY = make_command_study(
    name="openrlhf-grpo",
    question=__doc__,
    command="python -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path Qwen/Qwen2.5-0.5B-Instruct"
    " --reward.remote_url reward.py --data.prompt_dataset data/train.jsonl --data.input_key input"
    " --data.label_key label --data.apply_chat_template --data.max_samples 12800 --train.num_episodes 1"
    " --rollout.batch_size 64"
    " --rollout.n_samples_per_prompt 8 --train.batch_size 512 --eval.dataset data/test.jsonl --eval.steps 10"
    " --algo.advantage.estimator group_norm --algo.kl.use_loss --algo.kl.estimator k3 --ckpt.path {output}/checkpoints"
    " --ckpt.output_dir {output}/final --ckpt.save_steps 25 --ckpt.best_metric_key none --ckpt.load_enable"
    " --logger.tensorboard_dir {output}/tensorboard --logger.wandb.run_name run --train.seed {seed}"
    " --actor.num_gpus_per_node {gpus} --ref.num_gpus_per_node {gpus} --reward.num_gpus_per_node {gpus}"
    " --vllm.num_engines {gpus} --train.colocate_all --vllm.enable_sleep --ds.enable_sleep {flags}",
    settings={"algo.kl.init_coef": 0.001, "actor.adam.lr": 1e-6},
    vary={"algo.kl.init_coef": (0, 0.001, 0.01)},
    steps=200,
    logs="{output}/tensorboard/run/events.out.tfevents.*",
    checkpoints="{output}/checkpoints/_actor/latest",
    gpus=1,
    stop_seconds=60,
)
