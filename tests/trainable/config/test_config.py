import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandboxes.update_rules.config.settings import UpdateRuleConfig
from trainable.config.aliases import ALIASES
from trainable.config.base_config import BaseRunConfig
from trainable.config.run_config import ConfigError, RunConfig, apply_overrides, list_field_names, resolve_key

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
    (
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
        "8",
        "rollout.ref_log_prob_micro_batch_size_per_gpu",
        8,
    ),
    (
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
        "8",
        "rollout.log_prob_micro_batch_size_per_gpu",
        8,
    ),
    ("actor_rollout_ref.rollout.rollout_filter_strategy", "top_p", "filter.rollout_filter_strategy", "top_p"),
    ("rollout_filter_strategy", "top_p", "filter.rollout_filter_strategy", "top_p"),
    ("actor_rollout_ref.rollout.rollout_filter_value", "1", "filter.rollout_filter_value", 1.0),
    ("rollout_filter_value", "1.0", "filter.rollout_filter_value", 1.0),
    ("actor_rollout_ref.rollout.rollout_filter_type", "largest", "filter.rollout_filter_type", "largest"),
    ("rollout_filter_type", "largest", "filter.rollout_filter_type", "largest"),
    (
        "actor_rollout_ref.rollout.rollout_filter_metric",
        "reward_variance",
        "filter.rollout_filter_metric",
        "reward_variance",
    ),
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
]


def read_field(config: RunConfig, field: str) -> object:
    value: object = config
    for name in field.split("."):
        value = getattr(value, name)
    return value


@pytest.mark.parametrize(("key", "text", "field", "value"), PUBLISHED, ids=[case[0] for case in PUBLISHED])
def test_a_published_key_sets_its_field(key: str, text: str, field: str, value: object) -> None:
    assert resolve_key(key) == field
    assert read_field(apply_overrides(RunConfig(), {key: text}), field) == value


@pytest.mark.parametrize("alias", ALIASES)
def test_an_alias_names_a_field(alias: str) -> None:
    assert ALIASES[alias] in list_field_names()


@pytest.mark.parametrize(("short", "name"), [("fp32", "float32"), ("bf16", "bfloat16"), ("fp16", "float16")])
def test_short_names_of_types_are_taken(short: str, name: str) -> None:
    assert apply_overrides(RunConfig(), {"model.dtype": short}).model.dtype == name
    with pytest.raises(ConfigError, match=r"model\.dtype=fp8: must be 'float32', 'bfloat16' or 'float16'"):
        apply_overrides(RunConfig(), {"model.dtype": "fp8"})


@pytest.mark.parametrize("field", list_field_names())
def test_every_field_is_its_own_name(field: str) -> None:
    assert resolve_key(field) == field


@given(st.sampled_from(list_field_names()))
def test_a_bare_key_is_accepted_where_one_section_has_it(field: str) -> None:
    bare = field.rsplit(".", 1)[-1]
    owners = [name for name in list_field_names() if name.rsplit(".", 1)[-1] == bare]
    if len(owners) == 1:
        assert resolve_key(bare) == field


def test_a_bare_key_of_several_sections_is_refused_with_their_names() -> None:
    with pytest.raises(ConfigError, match=r"`lr` is a setting of several sections: type one of actor\.lr, critic\.lr"):
        resolve_key("lr")


@pytest.mark.parametrize(
    ("typed", "nearest"),
    [
        ("kl_loss_coeff", "actor.kl_loss_coef"),
        ("actor.kl_loss_coeff", "actor.kl_loss_coef"),
        ("actor_rollout_ref.actor.kl_loss_coeff", "actor_rollout_ref.actor.kl_loss_coef"),
        ("trainer.total_steps", "trainer.total_training_steps"),
        ("env.groupsize", "env.group_size"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest(typed: str, nearest: str) -> None:
    with pytest.raises(ConfigError) as raised:
        apply_overrides(RunConfig(), {typed: 1})
    assert f"`{typed}`" in str(raised.value)
    assert nearest in str(raised.value)


def test_an_unknown_key_of_a_section_lists_the_section() -> None:
    with pytest.raises(ConfigError) as raised:
        resolve_key("early_stop.nonsense")
    names = [name for name in list_field_names() if name.startswith("early_stop.")]
    assert ", ".join(names) in str(raised.value)


@pytest.mark.parametrize(
    ("key", "value", "bound"),
    [
        ("kl_loss_coef", -0.1, "greater than or equal to 0"),
        ("kl_loss_coef", "nan", "finite"),
        ("actor.lr", 0, "greater than 0"),
        ("gamma", 1.5, "less than or equal to 1"),
        ("clip_ratio_low", 1, "less than 1"),
        ("group_size", "many", "valid integer"),
        ("rollout_filter_value", 1.5, "filter.rollout_filter_value=1.5: must be in (0, 1] for top_p (try --set"),
        ("rollout_filter_strategy", "best", "'top_p', 'top_k'"),
        ("actor.ppo_micro_batch_size_per_gpu", 5, "actor.ppo_micro_batch_size_per_gpu=5: does not divide"),
        ("trainer.zero_stage", 4, "3"),
        ("trainer.offload_parameters", True, "trainer.offload_parameters=True: needs zero_stage=3"),
        ("test_env_groups", 513, "less than or equal to 512"),
        ("rollout_filter_include_zero", "perhaps", "True or False"),
    ],
)
def test_a_value_out_of_bounds_is_refused_with_value_and_bound(key: str, value: object, bound: str) -> None:
    with pytest.raises(ConfigError) as raised:
        apply_overrides(RunConfig(), {key: value})
    assert bound in str(raised.value)
    assert str(value) in str(raised.value)


def test_betas_of_adamw_are_below_one() -> None:
    with pytest.raises(ConfigError, match=r"actor\.betas\.1=1.*less than 1"):
        apply_overrides(RunConfig(), {"actor.betas": (0.9, 1)})


@pytest.mark.parametrize("zero", [0, 0.0, "0", "0.0", "0.00"])
def test_a_zero_coefficient_switches_the_kl_loss_off(zero: object) -> None:
    assert not apply_overrides(RunConfig(), {"use_kl_loss": True, "kl_loss_coef": zero}).actor.use_kl_loss
    assert apply_overrides(RunConfig(), {"use_kl_loss": True, "kl_loss_coef": "0.001"}).actor.use_kl_loss


def test_the_hash_names_what_can_change_a_result() -> None:
    default = RunConfig()
    placement_overrides = (
        {"trainer.n_gpus_per_node": 4},
        {"trainer.zero_stage": 1},
        {"rollout.gpu_memory_utilization": 0.3},
    )
    for overrides in (
        {"trainer.save_freq": 50},
        {"trainer.resume_every": 1},
        {"trainer.ray_num_cpus": 2},
        *placement_overrides,
    ):
        assert apply_overrides(default, overrides).compute_hash() == default.compute_hash()
    assert default.model_copy(update={"seed": 7}).compute_hash() == default.compute_hash()
    for overrides in (
        {"actor.lr": 2e-6},
        {"collapse_detection.all_quantities": True},
        {"trainer.total_training_steps": 401},
        {"early_stop.variance_ratio": 0.2},
    ):
        assert apply_overrides(default, overrides).compute_hash() != default.compute_hash()


def test_the_settings_of_half_precision_are_hashed_where_they_are_read() -> None:
    def compute_hash(**settings: object) -> str:
        return apply_overrides(RunConfig(), {f"model.{name}": value for name, value in settings.items()}).compute_hash()

    assert compute_hash() == compute_hash(loss_scale=1024)
    assert compute_hash(dtype="float16") != compute_hash(dtype="float16", loss_scale=1024)
    assert compute_hash() != compute_hash(head_dtype="float32")
    assert compute_hash(dtype="float32") == compute_hash(dtype="float32", head_dtype="float32")


@pytest.mark.parametrize("scale", [1, 1024, 2.0**40])
def test_a_loss_scale_is_a_power_of_two(scale: float) -> None:
    assert apply_overrides(RunConfig(), {"model.loss_scale": scale}).model.loss_scale == scale
    with pytest.raises(ConfigError, match=r"model\.loss_scale=.*must be a power of two, such as [0-9e+.]+"):
        apply_overrides(RunConfig(), {"model.loss_scale": 3 * scale})


@pytest.mark.parametrize("overrides", [{"trainer.strategy": "deepspeed"}, {"trainer.n_gpus_per_node": 2}])
def test_float16_is_refused_where_deepspeed_updates(overrides: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"model\.dtype=float16: .*model\.dtype=bfloat16"):
        apply_overrides(RunConfig(), {"model.dtype": "float16", **overrides})
    assert apply_overrides(RunConfig(), {"model.dtype": "float16"}).model.dtype == "float16"


def test_a_config_survives_json() -> None:
    config = apply_overrides(RunConfig(), {"actor.betas": "[0.9, 0.95]", "trainer.logger": "['wandb']", "lam": "0.95"})
    assert RunConfig.model_validate(json.loads(config.model_dump_json())) == config


def test_a_config_is_frozen() -> None:
    config = RunConfig()
    with pytest.raises(ValueError, match="frozen"):
        config.actor.lr = 1.0  # type: ignore[misc]


@pytest.mark.parametrize("word", ["null", "None", " NULL "])
def test_null_is_a_word_where_a_setting_may_have_no_value(word: str) -> None:
    config = apply_overrides(RunConfig(), {"trainer.gradient_analysis_env_groups": "128"})
    assert apply_overrides(config, {"trainer.gradient_analysis_env_groups": word}).trainer == RunConfig().trainer
    with pytest.raises(ConfigError):
        apply_overrides(config, {"trainer.total_training_steps": word})


@pytest.mark.parametrize("config", [RunConfig(), UpdateRuleConfig()], ids=["language model", "update rules"])
def test_states_by_seconds_can_be_turned_off(config: BaseRunConfig) -> None:
    timed = apply_overrides(config, {"trainer.resume_seconds": "2.5"})
    assert timed.trainer.resume_seconds == 2.5
    assert apply_overrides(timed, {"trainer.resume_seconds": "null"}).trainer.resume_seconds is None
    # A study may go on with other values: they change no number.
    assert timed.compute_hash() == config.compute_hash()


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("actor_rollout_ref.rollout.tensor_model_parallel_size", "Tensor parallelism is missing: every GPU of a run"),
        ("trainer.nnodes", "A run is on one node: nothing places its ranks on several"),
        ("gradient_accumulation_steps", "Gradients are accumulated over the micro-batches of a mini-batch: type"),
        ("lr_scheduler_type", "The learning rate is constant, without warm-up and schedule"),
        ("data.train_batch_size", "A step samples env.env_groups prompts with env.group_size rollouts each"),
        ("epsilon", "The clip range has two sides: type --set actor.clip_ratio_low=0.2"),
    ],
)
def test_what_only_the_published_code_has_is_refused_with_what_is_missing(key: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"There is no setting `{key}`. {reason}"):
        apply_overrides(RunConfig(), {key: 2})
