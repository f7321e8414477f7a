"""Does beta, the coefficient of the KL, change the success of GRPO in TRL?

TRL 1.16.0. `my_rewards.score` is a function of yours in the current folder. A learning rate of another value than the
checkpoint's is ignored when a run continues, so population-based training over it does nothing.
"""

from search_spaces.command_study import make_command_study

STUDY = make_command_study(
    name="trl-grpo",
    question=__doc__,
    command="python -m trl.scripts.grpo --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --dataset_name data"
    " --reward_funcs my_rewards.score --max_steps {steps} --seed {seed} --output_dir {output} --logging_steps 1"
    " --eval_strategy steps --eval_steps 10 --save_steps 50 --save_total_limit 2 --report_to tensorboard {flags}",
    settings={"beta": 0.0, "learning_rate": 1e-6, "lr_scheduler_type": "constant", "num_generations": 8},
    vary={"beta": (0, 0.001, 0.04)},
    steps=200,
    logs="{output}/tensorboard/events.out.tfevents.*",
    environment={"TENSORBOARD_LOGGING_DIR": "{output}/tensorboard"},
    columns={"val_success": "eval/rewards/score/mean"},
    checkpoints="{output}/checkpoint-{step}",
    resume="--resume_from_checkpoint {checkpoint}",
    gpus=1,
)
