"""Keys and values of settings: what is taken, what is refused with which words, and what the hash has."""

import json
from collections import Counter
from operator import attrgetter

import pytest

from trainable.config.aliases import ALIASES
from trainable.config.run_config import ConfigError, RunConfig, apply_overrides, list_field_names, resolve_key

VERL = "actor_rollout_ref"

# Every key of the two published documents in its original form, its value there, and the field that it sets here.
PUBLISHED = [
    ("model_path", "Qwen/Qwen2.5-3B", "model.path", "Qwen/Qwen2.5-3B"),
    ("algorithm.adv_estimator", "gae", "algorithm.adv_estimator", "gae"),
    ("trainer.total_training_steps", "400", "trainer.total_training_steps", 400),
    ("trainer.save_freq", "-1", "trainer.save_freq", -1),
    ("trainer.logger", "['console','wandb']", "trainer.logger", ("console", "wandb")),
    ("trainer.val_before_train", "True", "trainer.val_before_train", True),
    ("actor_rollout_ref.actor.kl_loss_coef", "0.001", "actor.kl_loss_coef", 0.001),
    ("kl_loss_coef", "0.001", "actor.kl_loss_coef", 0.001),
    ("actor_rollout_ref.actor.entropy_coeff", "0.0", "actor.entropy_coeff", 0.0),
    ("entropy_coeff", "0.001", "actor.entropy_coeff", 0.001),
    ("actor_rollout_ref.actor.use_kl_loss", "False", "actor.use_kl_loss", False),
    ("use_kl_loss", "True", "actor.use_kl_loss", True),
    ("entropy_from_logits_with_chunking", "True", "actor.entropy_from_logits_with_chunking", True),
    ("actor_rollout_ref.actor.filter_loss_scaling", "none", "actor.filter_loss_scaling", "none"),
    ("filter_loss_scaling", "none", "actor.filter_loss_scaling", "none"),
    ("actor_rollout_ref.actor.ppo_mini_batch_size", "32", "actor.ppo_mini_batch_size", 32),
    ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", "4", "actor.ppo_micro_batch_size_per_gpu", 4),
    ("critic.ppo_mini_batch_size", "32", "critic.ppo_mini_batch_size", 32),
    ("critic.ppo_micro_batch_size_per_gpu", "4", "critic.ppo_micro_batch_size_per_gpu", 4),
    ("ppo_mini_batch_size", "32", "actor.ppo_mini_batch_size", 32),
    (f"{VERL}.ref.log_prob_micro_batch_size_per_gpu", "8", "rollout.ref_log_prob_micro_batch_size_per_gpu", 8),
    (f"{VERL}.rollout.log_prob_micro_batch_size_per_gpu", "8", "rollout.log_prob_micro_batch_size_per_gpu", 8),
    ("actor_rollout_ref.rollout.rollout_filter_strategy", "top_p", "filter.rollout_filter_strategy", "top_p"),
    ("rollout_filter_strategy", "top_p", "filter.rollout_filter_strategy", "top_p"),
    ("actor_rollout_ref.rollout.rollout_filter_value", "1", "filter.rollout_filter_value", 1.0),
    ("rollout_filter_value", "1.0", "filter.rollout_filter_value", 1.0),
    ("actor_rollout_ref.rollout.rollout_filter_type", "largest", "filter.rollout_filter_type", "largest"),
    ("rollout_filter_type", "largest", "filter.rollout_filter_type", "largest"),
    (f"{VERL}.rollout.rollout_filter_metric", "reward_variance", "filter.rollout_filter_metric", "reward_variance"),
    ("rollout_filter_metric", "reward_variance", "filter.rollout_filter_metric", "reward_variance"),
    ("rollout_filter_include_zero", "False", "filter.rollout_filter_include_zero", False),
    ("rollout_filter_top_p_prob_mode", "softmax", "filter.rollout_filter_top_p_prob_mode", "softmax"),
    ("es_manager.train.env_groups", "8", "env.env_groups", 8),
    ("es_manager.train.group_size", "16", "env.group_size", 16),
    ("es_manager.train.env_configs.n_groups", "[8]", "env.env_groups", 8),
    ("es_manager.val.env_groups", "512", "env.val_env_groups", 512),
    ("es_manager.val.group_size", "1", "env.val_group_size", 1),
    ("es_manager.val.env_configs.n_groups", "[512]", "env.val_env_groups", 512),
    ("algorithm.kl_ctrl.kl_coef", "0.0", "algorithm.kl_ctrl.kl_coef", 0.0),
    ("scale_rewards", "batch", "algorithm.scale_rewards", "batch"),
    ("mask_truncated_completions", "True", "filter.mask_truncated_completions", True),
    ("actor_rollout_ref.actor.mask_void_turns", "True", "filter.mask_void_turns", True),
    ("algorithm.filter_groups.max_num_gen_batches", "10", "filter.max_num_gen_batches", 10),
    ("reward_model.overlong_buffer.len", "100", "env.overlong_buffer_len", 100),
    ("reward_model.overlong_buffer.penalty_factor", "0.5", "env.overlong_penalty_factor", 0.5),
]


@pytest.mark.parametrize(("key", "text", "field", "value"), PUBLISHED, ids=[case[0] for case in PUBLISHED])
def test_a_published_key_sets_its_field(key: str, text: str, field: str, value: object) -> None:
    assert resolve_key(key) == field
    assert attrgetter(field)(apply_overrides(RunConfig(), {key: text})) == value


def test_a_config_survives_json_and_is_frozen() -> None:
    config = apply_overrides(RunConfig(), {"actor.betas": "[0.9, 0.95]", "trainer.logger": "['wandb']", "lam": "0.95"})
    assert RunConfig.model_validate(json.loads(config.model_dump_json())) == config
    with pytest.raises(ValueError, match="frozen"):
        config.actor.lr = 1.0  # type: ignore[misc]


@pytest.mark.parametrize("word", ["null", "None", " NULL "])
def test_null_is_a_word_where_a_setting_may_have_no_value(word: str) -> None:
    config = apply_overrides(RunConfig(), {"trainer.gradient_analysis_env_groups": "128"})
    assert apply_overrides(config, {"trainer.gradient_analysis_env_groups": word}).trainer == RunConfig().trainer
    with pytest.raises(ConfigError):
        apply_overrides(config, {"trainer.total_training_steps": word})


def test_every_field_and_alias_names_a_field() -> None:
    fields = list_field_names()
    assert [resolve_key(field) for field in fields] == list(fields)
    assert set(ALIASES.values()) <= set(fields)
    bare_keys = Counter(field.rsplit(".", 1)[-1] for field in fields)
    unique_fields = [field for field in fields if bare_keys[field.rsplit(".", 1)[-1]] == 1]
    assert [resolve_key(field.rsplit(".", 1)[-1]) for field in unique_fields] == unique_fields
    # Inner sections may be left out.
    assert resolve_key("env.success_rate") == resolve_key("success_rate") == "env.frozenlake.success_rate"
    assert resolve_key("env.colors") == "env.mastermind.colors"
    assert resolve_key("algorithm.horizon") == "algorithm.kl_ctrl.horizon"


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("lr", r"`lr` is a setting of several sections: type one of actor\.lr, critic\.lr"),
        ("kl_loss_coeff", r"`kl_loss_coeff`\. Nearest: .*actor\.kl_loss_coef"),
        ("actor.kl_loss_coeff", r"Nearest: .*actor\.kl_loss_coef"),
        ("actor_rollout_ref.actor.kl_loss_coeff", r"Nearest: actor\.kl_loss_coef"),
        ("trainer.total_steps", r"Nearest: .*trainer\.total_training_steps"),
        ("env.groupsize", r"Nearest: .*env\.group_size"),
        ("actor.success_rate", r"There is no setting `actor.success_rate`.*env.frozenlake.success_rate"),
        ("early_stop.nonsense", r"The section has: early_stop\.variance_baseline_steps, .*early_stop\.alarm\."),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size", "_size`. Tensor parallelism is missing: every GPU"),
        ("trainer.nnodes", "There is no setting `trainer.nnodes`. A run is on one node: nothing places its ranks on"),
        ("gradient_accumulation_steps", "Gradients are accumulated over the micro-batches of a mini-batch: type"),
        ("lr_scheduler_type", "A schedule is written as the value of actor.lr"),
        ("data.train_batch_size", "A step samples env.env_groups prompts with env.group_size rollouts each"),
        ("algorithm.filter_groups.enable", "are dropped with --set filter.rollout_filter_include_zero=False"),
        ("algorithm.filter_groups.metric", "Groups of equal scores are dropped"),
        ("reward_model.overlong_buffer.enable", "The punishment of long replies is on with --set env.overlong_buffer"),
        ("epsilon", "The clip range has two sides: type --set actor.clip_ratio_low=0.2"),
    ],
)
def test_a_key_that_names_no_setting_is_refused_with_what_to_type(key: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        apply_overrides(RunConfig(), {key: 2})


FOUR_BITS = {"model.lora_rank": 4, "model.load_in_4bit": True}
MOVING = {"actor.use_kl_loss": True, "trainer.ref_model_sync_steps": 5}
TPO = {"actor.policy_loss": "tpo", "algorithm.adv_estimator": "group_skill"}
LORA_TARGETS = "must be all-linear, or a list of some of q_proj, k_proj"
REFUSED: list[tuple[dict[str, object], str]] = [
    ({"kl_loss_coef": -0.1}, r"actor\.kl_loss_coef=-0\.1: must be greater than or equal to 0"),
    ({"kl_loss_coef": "nan"}, "=nan: must be a finite number"),
    ({"gamma": 1.5}, r"gamma=1\.5: must be less than or equal to 1"),
    ({"actor.betas": (0.9, 1)}, r"actor\.betas\.1=1: must be less than 1"),
    ({"group_size": "many"}, "group_size=many: must be a valid integer"),
    ({"rollout_filter_value": 1.5}, r"filter\.rollout_filter_value=1\.5: must be in \(0, 1\] for top_p \(try --set"),
    ({"rollout_filter_strategy": "best"}, "=best: must be 'top_p', 'top_k'"),
    ({"rollout_filter_strategy": "top_k_abs", "rollout_filter_value": 0.5}, "a whole number of groups"),
    ({"rollout_filter_strategy": "min_p", "rollout_filter_value": 1.5}, r"in \(0, 1\] for min_p"),
    ({"bi_level_gae": True, "adv_estimator": "grpo"}, "needs adv_estimator=gae, not grpo"),
    ({"use_kl_in_reward": True, "kl_penalty": "full"}, "needs whole distributions; in the reward use kl"),
    ({"rollout_filter_include_zero": "perhaps"}, "=perhaps: must be True or False"),
    ({"actor.ppo_micro_batch_size_per_gpu": 5}, r"actor\.ppo_micro_batch_size_per_gpu=5: does not divide"),
    ({"trainer.offload_parameters": True}, r"trainer\.offload_parameters=True: needs zero_stage=3"),
    ({"test_env_groups": 513}, "test_env_groups=513: must be less than or equal to 512"),
    ({"env.frozenlake.success_rate": 1.5}, r"env\.frozenlake\.success_rate=1\.5: must be"),
    ({"env.name": "chess"}, r"env\.name=chess: must be 'sokoban', 'frozenlake'"),
    ({"model.path": "sokoban-tiny"}, "compact prompt only"),
    ({"model.path": "sokoban-tiny", "model.prompt_style": "compact", "env.name": "mastermind"}, "mastermind-tiny"),
    ({"critic.shared_trunk": True, "trainer.critic_warmup": 5}, "one update for policy and critic"),
    ({"model.dtype": "fp8"}, r"model\.dtype=fp8: must be 'float32', 'bfloat16' or 'float16'"),
    *(({"model.loss_scale": 3 * 2**exponent}, "must be a power of two, such as [0-9e+.]+") for exponent in (0, 10, 40)),
    *(
        ({"model.dtype": "float16", **overrides}, r"model\.dtype=float16: .*model\.dtype=bfloat16")
        for overrides in ({"trainer.strategy": "deepspeed"}, {"trainer.n_gpus_per_node": 2})
    ),
    ({"actor.tis_imp_ratio_cap": 2.0, "actor.tis_imp_ratio_floor": 0.5}, "needs tis_mode=token_mask or sequence_mask"),
    *(({"model.lora_target_modules": value}, LORA_TARGETS) for value in ("[q_proj,embed_tokens]", "[]", 3, None)),
    ({"model.load_in_4bit": True}, "a run without adapters has none: set model.lora_rank=64"),
    ({**FOUR_BITS, "trainer.strategy": "deepspeed"}, "updates in torch alone"),
    ({**FOUR_BITS, "trainer.n_gpus_per_node": 2, "trainer.device": "auto"}, "updates in torch alone"),
    (
        {**MOVING, "model.reference_path": "sokoban-tiny-teacher", "model.path": "sokoban-tiny"}
        | {"model.prompt_style": "compact"},
        "set one of them to null",
    ),
    ({**MOVING, "model.lora_rank": 4, "trainer.ref_model_mixup_alpha": 0.5}, "mixed adapters do not add"),
    (
        {**MOVING, "trainer.ref_model_reset_optimizer": True, "trainer.ref_model_mixup_alpha": 0.5},
        "resets the optimizer when the reference becomes a copy",
    ),
    ({**TPO, "actor.stapo_tau_p": 0.002}, r"of which no token can be left out.*set actor\.stapo_tau_p=null"),
    (
        {"rollout.recompute_logprobs": False, "actor.stapo_tau_p": 0.002},
        r"leaves the run without entropies.*set actor\.stapo_tau_p=null",
    ),
    ({"algorithm.adv_estimator": "tree"}, r"set rollout\.ts_n=1 or more, or algorithm\.adv_estimator=grpo"),
    (
        {"env.group_size": 16, "rollout.ts_n": 2},
        r"env\.group_size=16: must be a multiple of 3.* set env\.group_size=18",
    ),
    ({"env.group_size": 6, "rollout.ts_n": 2, "rollout.ts_l": 2}, r"multiple of 5.* set env\.group_size=10"),
    (
        {
            "env.group_size": 6,
            "rollout.ts_n": 2,
            "trainer.gradient_analysis_mode": True,
            "trainer.gradient_analysis_group_size": 16,
        },
        r"set trainer\.gradient_analysis_group_size=18",
    ),
    (
        {
            "env.name": "papers",
            "rollout.ts_n": 1,
            "algorithm.adv_estimator": "grpo",
            "collapse_detection.first_turn_enabled": False,
            "collapse_detection.multi_turn_enabled": False,
        },
        r"env\.name=papers is none: set rollout\.ts_n=0",
    ),
    ({"actor_rollout_ref.rollout.ts_m": 2}, r"rollout\.ts_l \* rollout\.ts_n\) prefix trees"),
    ({"tree_search": True}, "prefix trees"),
]


@pytest.mark.parametrize(("overrides", "message"), REFUSED, ids=str)
def test_settings_that_no_run_can_have_are_refused(overrides: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refusal:
        apply_overrides(RunConfig(), overrides)
    assert str(refusal.value).count(": must be ") <= 1


def test_forms_of_values() -> None:
    config = apply_overrides(RunConfig(), {"model.loss_scale": 2.0**40, "trainer.logger": "[console,wandb]"})
    assert (config.model.loss_scale, config.trainer.logger) == (2.0**40, ("console", "wandb"))


HALF, TOP_K, LAKE = {"model.dtype": "float16"}, {"rollout_filter_strategy": "top_k"}, {"env.name": "frozenlake"}
HASHED: list[tuple[dict[str, object], dict[str, object], bool]] = [
    *(
        ({}, change, False)
        for change in (
            {"seed": 7},
            {"trainer.save_freq": 50},
            {"trainer.log_val_generations": 4},
            {"trainer.resume_every": 1},
            {"trainer.resume_seconds": 2.5},
            {"trainer.ray_num_cpus": 2},
            {"trainer.n_gpus_per_node": 4},
            {"trainer.zero_stage": 1},
            {"rollout.gpu_memory_utilization": 0.3},
            # What the run does not read.
            {"model.loss_scale": 1024},
            {"model.lora_alpha": 32, "model.lora_target_modules": "q_proj"},
            {"actor.tpo_eta": 2.0},
            {"actor.tis_mode": "token_mask"},
            {"actor.stapo_entropy_quantile": 0.5},
            {"actor.cppo_delta": 0.2},
            {"env.success_rate": 0.5, "env.colors": 6},
        )
    ),
    *(
        ({}, change, True)
        for change in (
            {"actor.lr": 2e-6},
            {"actor.clip_ratio_low": 0.1},
            {"actor.clip_ratio_low": 1},
            {"actor.stapo_tau_p": 0.002},
            {"actor.policy_loss": "gspo"},
            {"collapse_detection.all_quantities": True},
            {"trainer.total_training_steps": 401},
            {"early_stop.variance_ratio": 0.2},
            {"filter.rollout_filter_selection_eps": 0.5},
            {"model.head_dtype": "float32"},
            {"model.lora_rank": 8},
            {"rollout.weight_noise": 0.1},
            {"rollout.ts_n": 1},
            LAKE,
        )
    ),
    (HALF, {"model.loss_scale": 1024}, True),
    # Where the engine shares the weights of the trainer, nothing is recomputed.
    ({"rollout.name": "torch"}, {"rollout.recompute_logprobs": False}, False),
    ({"rollout.name": "torch", "rollout.weight_noise": 0.1}, {"rollout.recompute_logprobs": False}, True),
    ({"actor.tis_imp_ratio_cap": 2.0}, {"actor.tis_mode": "token_mask"}, True),
    ({"actor.stapo_tau_p": 0.002}, {"actor.stapo_entropy_quantile": 0.5}, True),
    ({"actor.policy_loss": "cppo"}, {"actor.cppo_delta": 0.2}, True),
    ({"actor.policy_loss": "cppo"}, {"actor.clip_ratio_low": 0.1}, False),
    ({"actor.policy_loss": "tpo", "algorithm.adv_estimator": "group_skill"}, {"actor.tpo_eta": 2.0}, True),
    ({"use_kl_loss": True, "kl_loss_coef": 1.0}, {"model.reference_path": "sokoban-tiny-teacher"}, True),
    ({"trainer.measure_val_kl": False}, {"model.reference_path": "sokoban-tiny-teacher"}, False),
    ({"model.dtype": "float32"}, {"model.head_dtype": "float32"}, False),
    (TOP_K, {"filter.rollout_filter_selection_eps": 0.5}, False),
    ({}, {"trainer.ref_model_sync_steps": 5}, False),
    ({"use_kl_loss": True, "kl_loss_coef": 1.0}, {"trainer.ref_model_sync_steps": 5}, True),
    ({"model.lora_rank": 8}, {"model.lora_alpha": 32}, True),
    ({"model.lora_rank": 8}, {"model.load_in_4bit": True}, True),
    (LAKE, {"env.colors": 6}, False),
    ({}, {"rollout.ts_l": 3}, False),
    ({"rollout.ts_n": 1}, {"rollout.ts_l": 3}, True),
    ({}, {"algorithm.critic_lam": 0.9}, True),
    ({}, {"algorithm.scale_rewards": "batch"}, True),
    ({"algorithm.norm_adv_by_std_in_grpo": False}, {"algorithm.scale_rewards": "none"}, False),
    ({}, {"filter.max_num_gen_batches": 2}, False),
    ({"filter.rollout_filter_include_zero": False}, {"filter.max_num_gen_batches": 2}, True),
    ({}, {"filter.mask_void_turns": True}, True),
    ({}, {"filter.mask_truncated_completions": True}, True),
    ({}, {"env.overlong_penalty_factor": 2}, False),
    ({"env.overlong_buffer_len": 100}, {"env.overlong_penalty_factor": 2}, True),
    (LAKE, {"env.success_rate": 0.5}, True),
]


@pytest.mark.parametrize(("base", "change", "is_hashed"), HASHED, ids=str)
def test_the_hash_names_what_can_change_a_result(
    base: dict[str, object], change: dict[str, object], is_hashed: bool
) -> None:
    config = apply_overrides(RunConfig(), base)
    changed = apply_overrides(config, change)
    assert changed != config
    assert (changed.compute_hash() != config.compute_hash()) == is_hashed


def test_runs_keep_the_hash_from_before_adapters_existed() -> None:
    model = RunConfig().dump_for_hash()["model"]
    assert "prompt_style" in model
    assert not [name for name in model if name.startswith("lora") or name == "load_in_4bit"]


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("all-linear", "all-linear"),
        ("['all-linear']", "all-linear"),
        ("q_proj", ("q_proj",)),
        ("[v_proj,q_proj,v_proj]", ("q_proj", "v_proj")),
        (["down_proj", "o_proj"], ("o_proj", "down_proj")),
    ],
)
def test_layers_are_chosen_by_name(typed: object, expected: object) -> None:
    for key in ("model.lora_target_modules", "actor_rollout_ref.model.target_modules", "lora.target_modules"):
        assert apply_overrides(RunConfig(), {key: typed}).model.lora_target_modules == expected
