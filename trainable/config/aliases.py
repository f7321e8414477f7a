"""Names of settings: dotted names, names in the published documents (RAGEN, verl) and other trainers, short labels."""

VERL_PREFIX = "actor_rollout_ref."
"""In the published documents, sections of actor, rollout and model begin so."""
ALIASES: dict[str, str] = {
    "model_path": "model.path",
    "actor_rollout_ref.actor.optim.lr": "actor.lr",
    "actor_rollout_ref.actor.policy_loss.loss_mode": "actor.policy_loss",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": "rollout.ref_log_prob_micro_batch_size_per_gpu",
    "actor_rollout_ref.rollout.val_kwargs.temperature": "rollout.val_temperature",
    **{
        f"actor_rollout_ref.rollout.rollout_filter_{name}": f"filter.rollout_filter_{name}"
        for name in ("strategy", "value", "type", "metric", "include_zero", "top_p_prob_mode", "selection_eps")
    },
    "actor_rollout_ref.rollout.rollout_filter_empty_stop_steps": "early_stop.empty_stop_steps",
    "rollout_filter_empty_stop_steps": "early_stop.empty_stop_steps",
    "actor_rollout_ref.model.target_modules": "model.lora_target_modules",
    "lora.rank": "model.lora_rank",
    "lora.alpha": "model.lora_alpha",
    "lora.target_modules": "model.lora_target_modules",
    "critic.optim.lr": "critic.lr",
    "algorithm.filter_groups.max_num_gen_batches": "filter.max_num_gen_batches",
    "actor_rollout_ref.actor.mask_void_turns": "filter.mask_void_turns",
    **{
        f"{section}.{name}": setting
        for section in ("reward_model.overlong_buffer", "reward_model.reward_kwargs.overlong_buffer_cfg")
        for name, setting in (("len", "env.overlong_buffer_len"), ("penalty_factor", "env.overlong_penalty_factor"))
    },
    # The documents set one size for actor and critic. Here the bare key sets the actor's, and
    # critic.ppo_mini_batch_size the critic's.
    "ppo_mini_batch_size": "actor.ppo_mini_batch_size",
    "es_manager.train.env_groups": "env.env_groups",
    "es_manager.train.group_size": "env.group_size",
    "es_manager.train.env_configs.n_groups": "env.env_groups",
    "es_manager.val.env_groups": "env.val_env_groups",
    "es_manager.val.group_size": "env.val_group_size",
    "es_manager.val.env_configs.n_groups": "env.val_env_groups",
    "es_manager.format_penalty": "env.format_penalty",
    "seed.train": "env.seed_train",
    "seed.val": "env.seed_val",
    "agent_proxy.max_turn": "env.max_turn",
    "agent_proxy.max_actions_per_turn": "env.max_actions_per_turn",
    "ray_kwargs.ray_init.num_cpus": "trainer.ray_num_cpus",
}

SYNONYMS: dict[str, str] = {
    "learning_rate": "lr",
    "beta": "kl_loss_coef",
    "kl_coef": "kl_loss_coef",
    "entropy_coef": "entropy_coeff",
    "ent_coef": "entropy_coeff",
    "epsilon_high": "clip_ratio_high",
    "num_iterations": "ppo_epochs",
    "epochs": "ppo_epochs",
    "num_generations": "group_size",
    "max_completion_length": "response_length",
    "max_steps": "total_training_steps",
    "steps": "total_training_steps",
    "eval_steps": "test_freq",
    "save_steps": "save_freq",
    "max_grad_norm": "grad_clip",
    "loss_type": "loss_agg_mode",
    "loss_mode": "policy_loss",
    "importance_sampling_level": "policy_loss",
    "mask_ratio_high": "tis_imp_ratio_cap",
    "mask_ratio_low": "tis_imp_ratio_floor",
    "ratio_type": "tis_mode",
    "sync_ref_model": "ref_model_sync_steps",
}
"""Maps the names of settings in other trainers to the last part of their name here."""

MISSING_FEATURES: dict[str, str] = {
    "tensor_model_parallel_size": "Tensor parallelism is missing: every GPU of a run has a vLLM of its own, and each "
    "gets all weights of the policy. Leave it out, and choose a model of which one GPU holds a copy in bfloat16.",
    "gradient_accumulation_steps": "Gradients are accumulated over the micro-batches of a mini-batch: type "
    "actor.ppo_mini_batch_size for the sequences of an optimizer step. The size of a micro-batch changes the loss, "
    "unless actor.loss_agg_mode is token-mean-global.",
    **dict.fromkeys(
        ("lr_scheduler_type", "warmup_ratio", "warmup_steps", "lr_warmup_steps", "lr_warmup_steps_ratio"),
        "A schedule is written as the value of actor.lr, such as --set actor.lr='linear(1e-8, 1e-6@10)' for a warm-up.",
    ),
    **dict.fromkeys(
        ("cliprange", "epsilon", "clip_ratio"),
        "The clip range has two sides: type --set actor.clip_ratio_low=0.2 --set actor.clip_ratio_high=0.2.",
    ),
    **dict.fromkeys(
        ("tree_search", "ts_m", "ts_k"),
        "A group has env.group_size / (1 + rollout.ts_l * rollout.ts_n) prefix trees, and all of their episodes are "
        "trained: type, for example, --set env.group_size=6 --set rollout.ts_n=2.",
    ),
    "train_batch_size": "A step samples env.env_groups prompts with env.group_size rollouts each: type, for example, "
    "--set env.env_groups=8 --set env.group_size=16.",
    **dict.fromkeys(
        ("algorithm.filter_groups.enable", "algorithm.filter_groups.metric"),
        "Groups of equal scores are dropped with --set filter.rollout_filter_include_zero=False, and replaced "
        "by others with --set filter.max_num_gen_batches=10.",
    ),
    **dict.fromkeys(
        ("reward_model.overlong_buffer.enable", "reward_model.reward_kwargs.overlong_buffer_cfg.enable"),
        "The punishment of long replies is on with --set env.overlong_buffer_len above 0, such as 4096.",
    ),
    "nnodes": "A run is on one node: nothing places its ranks on several, and they share files of one machine. Leave "
    "it out, and type --gpus-per-exp with at most the GPUs of a node.",
}
"""Settings of the published code that do not exist here, by their key or its last part, and what to do instead."""

SHORT_NAMES: dict[str, str] = {
    "actor.lr": "learning rate",
    "algorithm.adv_estimator": "advantage",
    "actor.kl_loss_coef": "KL",
    "actor.entropy_coeff": "entropy",
    "actor.kl_loss_type": "loss",
    "filter.rollout_filter_value": "filter",
    "algorithm.zero_task_advantage": "zero task advantage",
}
"""Short names of settings for labels. Other settings use the last part of their name."""


def shorten_setting(setting: str) -> str:
    """Return the short name of a setting: its label in SHORT_NAMES, or else the last part of its dotted name."""
    return SHORT_NAMES.get(setting, setting.rpartition(".")[2])
