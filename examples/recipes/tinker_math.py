"""Does the learning rate change the success of training on arithmetic word problems in tinker-cookbook?

tinker-cookbook 0.6.1, whose recipe has no KL to a reference. A run continues by itself, and logs the step of its last
checkpoint again, which counts once. The service needs TINKER_API_KEY in the environment of the study.
"""

from search_spaces.command_study import make_command_study

STUDY = make_command_study(
    name="tinker-math",
    question=__doc__,
    command="python -m tinker_cookbook.recipes.math_rl.train env=gsm8k model_name=Qwen/Qwen3.5-9B seed={seed}"
    " max_steps={steps} eval_every=10 save_every=10 log_path={output} behavior_if_log_dir_exists=resume {overrides}",
    settings={"learning_rate": 2e-5, "group_size": 16, "groups_per_batch": 64, "loss_fn": "ppo", "lora_rank": 32},
    vary={"learning_rate": (1e-5, 2e-5, 1e-4)},
    steps=100,
    logs="{output}/metrics.jsonl",
    columns={"val_success": "test/env/all/correct"},
    checkpoints="{output}/checkpoints.jsonl",
)
