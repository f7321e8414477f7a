"""The table of read settings: each setting of a run is switched, and the rows change if and only if it is read."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import product, zip_longest
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from pydantic.fields import FieldInfo

from sandboxes.distillation.algorithm import make_trainer as make_distillation_trainer
from sandboxes.distillation.settings import DistillationConfig
from sandboxes.pedagogy.algorithm import make_trainer as make_pedagogy_trainer
from sandboxes.pedagogy.settings import PedagogyConfig
from sandboxes.toys.ensemble import EnsembleTrainer
from sandboxes.update_rules.config.rules import METHODS
from sandboxes.update_rules.config.settings import UpdateRuleConfig
from sandboxes.update_rules.training.make import make_trainer as make_update_rule_trainer
from sandboxes.vector_rewards.algorithm import make_trainer as make_vector_reward_trainer
from sandboxes.vector_rewards.settings import VectorRewardConfig
from search_spaces.catalog import STUDIES
from tests.fakes.scripted import SMALL_SETTINGS
from tests.fakes.trainers import drop_times
from tests.sandboxes.update_rules.tabular import train_to_next_rows
from trainable.config.base_config import BaseRunConfig
from trainable.config.run_config import ConfigError, RunConfig, apply_overrides, list_field_names
from trainable.config.setting_types import flatten_settings
from trainable.diagnostics.gradient_analysis import DIAGNOSTICS
from trainable.ppo.trainer import PPOTrainer
from trainable.runs.records import TOY_TIME_COLUMNS
from trainable.runs.stop_rules import RULES, evaluate_stop_rules
from tune_study.plan.study_plan import make_plan

C = TypeVar("C", bound=BaseRunConfig)
Settings = Mapping[str, object]
STEPS = 2
TINY: Settings = {
    **{name: value for name, value in SMALL_SETTINGS.items() if name not in RunConfig.aliases},
    "rollout.name": "torch",
    "model.compiled_passes": False,
    "env.env_groups": 4,
    "env.val_env_groups": 4,
    "env.test_env_groups": 2,
    "trainer.total_training_steps": STEPS,
    "trainer.test_freq": 1,
}
BASES: Mapping[str, Settings] = {
    "kl": {},
    # What the first one leaves out, as far as it goes together.
    "measured": {
        "actor.use_kl_loss": True,
        "actor.ppo_epochs": 2,
        "actor.lr": 3e-3,
        "actor.clip_ratio_c": 1.05,
        "actor.tis_imp_ratio_cap": 1.0,
        "actor.tis_mode": "token_mask",
        "actor.stapo_tau_p": 0.5,
        "algorithm.bi_level_gae": True,
        "algorithm.use_kl_in_reward": True,
        "algorithm.kl_penalty": "low_var_kl",
        "algorithm.kl_ctrl.kl_coef": 0.1,
        "algorithm.kl_ctrl.type": "adaptive",
        "critic.ppo_epochs": 2,
        "critic.lr": 0.1,
        "filter.rollout_filter_value": 0.7,
        "model.lora_rank": 4,
        "rollout.weight_noise": 0.002,
        "trainer.total_training_steps": 3,  # an adapted coefficient of the KL shows in the third step
        "trainer.gradient_analysis_mode": True,
        "trainer.gradient_analysis_every": 1,
        "trainer.gradient_analysis_env_groups": 3,
        "trainer.gradient_analysis_group_size": 4,
        "early_stop.variance_ratio": 10,
        "early_stop.success_threshold": 1,
        "early_stop.variance_baseline_steps": 1,
        "early_stop.variance_window": 1,
        "early_stop.success_patience": 1,
        "collapse_detection.compute_freq": 1,
    },
    "moving reference": {
        "actor.use_kl_loss": True,
        "trainer.ref_model_sync_steps": 1,
        "trainer.ref_model_mixup_alpha": 0.5,
    },
    "reset reference": {
        "actor.use_kl_loss": True,
        "actor.lr": 3e-3,
        "trainer.total_training_steps": 3,  # the first reset is after the second
        "trainer.ref_model_reset_kl": 1e-6,
        "trainer.ref_model_reset_optimizer": True,
    },
    "grpo": {
        "algorithm.adv_estimator": "grpo",
        "actor.ppo_mini_batch_size": 16,
        "critic.shared_trunk": True,
        "env.group_size": 2,  # some groups have equal scores
        "filter.rollout_filter_include_zero": False,
    },
    "shared trunk": {
        "critic.shared_trunk": True,
        "actor.ppo_mini_batch_size": 16,
        "env.overlong_buffer_len": 20,
    },
    "analysis": {"trainer.gradient_analysis_mode": True, "trainer.gradient_analysis_only": True},
    "branches": {"algorithm.adv_estimator": "tree", "rollout.ts_n": 1, "actor.ppo_mini_batch_size": 16},
    "no task": {"algorithm.adv_estimator": "grpo", "algorithm.zero_task_advantage": True, "actor.entropy_coeff": 0.1},
    "tpo": {"algorithm.adv_estimator": "group_skill", "actor.policy_loss": "tpo"},
    "gspo": {
        "actor.policy_loss": "gspo",
        "actor.clip_ratio_low": 3e-4,
        "actor.clip_ratio_high": 4e-4,
        "actor.ppo_epochs": 2,
        "actor.lr": 3e-3,
    },
    "cispo": {
        "actor.policy_loss": "cispo",
        "actor.clip_ratio_low": 3e-3,
        "actor.clip_ratio_high": 3e-3,
        "actor.ppo_epochs": 2,
        "actor.lr": 3e-3,
    },
    "cppo": {
        "actor.policy_loss": "cppo",
        "actor.cppo_delta": 0.02,
        "actor.cppo_delta_b": 2e-3,
        "actor.ppo_epochs": 3,
        "actor.lr": 3e-4,
    },
    "frozenlake": {
        "env.name": "frozenlake",
        "model.path": "frozenlake-tiny",
        "algorithm.adv_estimator": "reinforce_plus_plus",
        "filter.rollout_filter_strategy": "top_k_abs",
        "filter.rollout_filter_value": 4,
    },
    "papers": {
        "env.name": "papers",
        "env.group_size": 8,  # enough trees that some ask children
        "model.path": "papers-tiny",
        "env.max_turn": 3,
        "rollout.response_length": 32,
        "algorithm.adv_estimator": "grpo",
        "collapse_detection.first_turn_enabled": False,
        "collapse_detection.multi_turn_enabled": False,
    },
}

ALTERNATIVES: Mapping[str, Settings] = {
    # Where the first valid number or word is not the one to switch to, or other settings come along.
    "model.path": {"model.path": "frozenlake-tiny", "env.name": "frozenlake"},
    "env.name": {"model.path": "frozenlake-tiny", "env.name": "frozenlake"},
    "model.reference_path": {"model.reference_path": "sokoban-tiny"},
    "model.lora_target_modules": {"model.lora_target_modules": ["q_proj"]},
    "env.max_actions_per_turn": {"env.max_actions_per_turn": 1},
    "rollout.max_model_len": {"rollout.max_model_len": 140},
    "rollout.weight_noise": {"rollout.weight_noise": 0.001},
    "actor.clip_ratio_c": {"actor.clip_ratio_c": 1.01},
    "actor.policy_loss": {"actor.policy_loss": "tpo", "algorithm.adv_estimator": "group_skill"},
    "actor.stapo_tau_p": {"actor.stapo_tau_p": 0.5},
    "actor.tis_imp_ratio_floor": {"actor.tis_mode": "token_mask", "actor.tis_imp_ratio_floor": 1},
    "algorithm.adv_estimator": {"algorithm.adv_estimator": "rloo"},
    "algorithm.kl_penalty": {"algorithm.kl_penalty": "mse"},
    "algorithm.critic_lam": {"algorithm.critic_lam": 0.5},
    "env.overlong_buffer_len": {"env.overlong_buffer_len": 20},
    "algorithm.kl_ctrl.target_kl": {"algorithm.kl_ctrl.target_kl": 100},
    "collapse_detection.compute_freq": {"collapse_detection.compute_freq": 3},
    "rollout.gradient_analysis_num_buckets": {"rollout.gradient_analysis_num_buckets": 1},
    "filter.rollout_filter_metric": {"filter.rollout_filter_metric": "length"},
    "filter.rollout_filter_strategy": {"filter.rollout_filter_strategy": "min_p"},
    "filter.rollout_filter_value": {"filter.rollout_filter_value": 0.5},
    "collapse_detection.num_samples": {"collapse_detection.num_samples": 2},
    "trainer.critic_warmup": {"trainer.critic_warmup": 2},
    "trainer.ref_model_sync_steps": {"trainer.ref_model_sync_steps": 1},
    "trainer.ref_model_reset_kl": {"trainer.ref_model_reset_kl": 100},
    "trainer.device": {"trainer.device": "auto"},
    "trainer.logger": {"trainer.logger": ["console", "wandb"]},
    "early_stop.alarm": {"early_stop.alarm": "reward_std > 0"},
    "actor.betas": {"actor.betas": [0.5, 0.9]},
    "critic.betas": {"critic.betas": [0.5, 0.9]},
    "actor.tis_imp_ratio_cap": {"actor.tis_imp_ratio_cap": 2},
    "trainer.offload_parameters": {"trainer.offload_parameters": True, "trainer.zero_stage": 3},
    "trainer.resume_seconds": {"trainer.resume_seconds": 1},
    "trainer.gradient_analysis_env_groups": {"trainer.gradient_analysis_env_groups": 2},
    "trainer.gradient_analysis_group_size": {"trainer.gradient_analysis_group_size": 2},
    "trainer.gradient_analysis_sketch": {"trainer.gradient_analysis_sketch": 256},
    "rollout.gpu_memory_utilization": {"rollout.gpu_memory_utilization": 0.5},
    "rollout.kv_cache_gib": {"rollout.kv_cache_gib": 1},
    "env.dataset.file": {"env.dataset.file": "questions.jsonl"},
    "env.dataset.prompt": {"env.dataset.prompt": "question"},
    "env.dataset.answer": {"env.dataset.answer": "solution"},
    "env.dataset.instructions": {"env.dataset.instructions": "Answer."},
    "env.dataset.digest": {"env.dataset.digest": "0123456789abcdef"},
    "env.dataset.pattern": {"env.dataset.pattern": "[0-9]+"},
    "env.papers.max_children": {"env.papers.max_children": 0},
    "env.papers.max_children_per_call": {"env.papers.max_children_per_call": 1},
    "env.papers.observation_chars": {"env.papers.observation_chars": 16},
    "env.papers.file": {"env.papers.file": "questions.jsonl"},
    "env.papers.judge_url": {"env.papers.judge_url": "http://localhost:1/v1"},
    "env.papers.judge_model": {"env.papers.judge_model": "another"},
    "env.papers.judge_key_variable": {"env.papers.judge_key_variable": "MY_API_KEY"},
}
UNSWITCHED: Mapping[str, str] = {
    "env.reward": "names a file of the user",
    "trainer.own_stop_rules": "names a file of the user",
    "model.prompt_style": "the shipped policies know one style",
    "model.load_in_4bit": "needs an optional package",
    "model.compiled_passes": "takes half a minute to compile",
    "rollout.name": "takes half a minute to compile",
    "trainer.n_gpus_per_node": "needs a GPU",
    "trainer.num_threads": "rounds differently, as other GPUs do",
}
"""Settings that are not switched, and why."""
MEMORY = "changes memory and time alone"
UNSEEN: Mapping[str, str] = {
    "trainer.nonfinite_patience": "no update is skipped here",
    "model.enable_gradient_checkpointing": MEMORY,
    "rollout.ref_log_prob_micro_batch_size_per_gpu": MEMORY,
    "actor.entropy_from_logits_with_chunking": MEMORY,
}
"""Settings that are read and change no row of the first base, and why."""
EXECUTION = {f"{section}.{name}" for section, names in RunConfig.unhashed_settings.items() for name in names}
"""Settings of execution, logging and placement: they are read, and change no row by declaration."""
UNSEEN_ELSEWHERE: Mapping[str, Mapping[str, str]] = {
    "measured": {
        "rollout.logprob_tolerance": "ends a run, and changes no row",
        "rollout.gradient_analysis_num_buckets": "the filter leaves one group",
    },
    "papers": {
        "env.papers.file": "names a file of the user",
        "env.papers.score": "needs a judge",
        "env.papers.execution_seconds": "no code reaches the limit",
        "env.papers.execution_mib": "no code reaches the limit",
    },
}
"""As UNSEEN, for settings that only another base reads."""
COUNTS: Mapping[str, int] = {
    "read": 73,
    "not read": 82,
    "execution": 21,
    MEMORY: 3,
    "names a file of the user": 2,
    "takes half a minute to compile": 2,
    "no update is skipped here": 1,
    "the shipped policies know one style": 1,
    "needs an optional package": 1,
    "needs a GPU": 1,
    "rounds differently, as other GPUs do": 1,
}
SAMPLE = ("actor.lr",)


def make_base(name: str) -> RunConfig:
    return make_plan(STUDIES["kl"], "laptop", "a test", {**TINY, **BASES[name]}, None, 1, Path("out")).ppo_config


def find_field(section: Any, name: str) -> FieldInfo:
    *sections, last = name.split(".")
    for part in sections:
        section = section.model_fields[part].annotation
    return section.model_fields[last]


def list_words(config_class: type[BaseRunConfig], name: str) -> list[str]:
    """List the words of a setting's Literal."""
    annotation = str(find_field(config_class, name).annotation)
    return re.findall(r"'(\w+(?:-\w+)*)'", annotation) if "Literal" in annotation else []


def switch(base: C, name: str) -> C:
    """Give a setting another value: the first valid one of a few."""
    value = flatten_settings(base.model_dump())[name]
    is_bool = "bool" in str(find_field(type(base), name).annotation)
    candidates: list[object] = [True, False] if is_bool else [*list_words(type(base), name)]
    if isinstance(value, int | float) and not isinstance(value, bool):
        candidates += [value * 2, value + 1, value / 2, value - 0.1]
    for settings in (ALTERNATIVES[name],) if name in ALTERNATIVES else ({name: candidate} for candidate in candidates):
        with suppress(ConfigError):
            switched = apply_overrides(base, settings)
            if flatten_settings(switched.model_dump())[name] != value:
                return switched
    raise LookupError(f"{name}={value} has no valid alternative: add one to ALTERNATIVES")


def train(config: RunConfig) -> Iterator[str]:
    """Train a run, and give everything that it records but times and texts, one step at a time."""
    torch.set_num_threads(1)  # as in a trial
    trainer, rows = PPOTrainer(config, diagnostics=DIAGNOSTICS), []
    for step in range(1, config.trainer.total_training_steps + 1):
        output = trainer.step()
        rows.append({"step": step, **drop_times(output.row)})
        for column in ("tis_clipfrac", "stapo_silenced_fraction"):
            if rows[-1].get(column) == 0:  # it comes with a cap or a threshold, also with one that no token reaches
                del rows[-1][column]
        evaluations = [evaluation._replace(episodes=()) for evaluation in output.evaluations]
        decisions = [evaluate_stop_rules(rows, config.early_stop, (rule,)) for rule in RULES]
        yield repr((rows[-1], evaluations, output.gradients, decisions))
    yield repr([evaluation._replace(episodes=()) for evaluation in trainer.evaluate_final()[1]])
    trainer.close()


@cache
def train_base(name: str) -> tuple[str, ...]:
    return tuple(train(make_base(name)))


def has_equal_rows(base: str, config: RunConfig) -> bool:
    """Return whether a run records what the run of the base records; it ends at the first difference."""
    return all(one == other for one, other in zip_longest(train(config), train_base(base)))


def list_changes(base: BaseRunConfig, config: BaseRunConfig) -> dict[str, object]:
    """List the settings that differ from those of the base."""
    settings = flatten_settings(base.model_dump())
    return {name: value for name, value in flatten_settings(config.model_dump()).items() if value != settings[name]}


def reads_changes(base: BaseRunConfig, config: BaseRunConfig) -> bool:
    """Return whether one of two runs reads a setting in which they differ."""
    unread_settings = base.find_unread_settings().keys() & config.find_unread_settings().keys()
    return not list_changes(base, config).keys() <= unread_settings | EXECUTION


def iter_switched(base: C) -> Iterator[tuple[str, C]]:
    """Switch the settings one by one, where no other setting of the base refuses it."""
    for name in list_field_names(type(base)):
        if name not in UNSWITCHED:
            with suppress(LookupError):
                yield name, switch(base, name)


def switch_unread_settings(base: C) -> C:
    """Switch all settings that a run does not read, and that are not read together."""
    together = base
    for _, switched in iter_switched(base):
        with suppress(ConfigError):
            further = apply_overrides(base, {**list_changes(base, together), **list_changes(base, switched)})
            together = together if reads_changes(base, further) else further
    return together


SWITCHED = [name for name in list_field_names() if name not in UNSWITCHED]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in SAMPLE else pytest.mark.slow) for name in SWITCHED]
)
def test_a_setting_changes_rows_if_and_only_if_it_is_read(name: str) -> None:
    base = make_base("kl")
    switched = switch(base, name)
    assert has_equal_rows("kl", switched) == (name in UNSEEN or not reads_changes(base, switched))


@pytest.mark.long
def test_all_that_a_run_does_not_read_changes_none_of_its_rows() -> None:
    assert has_equal_rows("kl", switch_unread_settings(make_base("kl")))


def test_every_setting_is_switched_or_has_a_reason() -> None:
    base = make_base("kl")
    counts = Counter(
        UNSEEN.get(name)
        or ("execution" if name in EXECUTION else "read" if reads_changes(base, switch(base, name)) else "not read")
        for name in SWITCHED
    ) + Counter(UNSWITCHED.values())
    assert counts == COUNTS


@pytest.mark.slow
@pytest.mark.parametrize("name", list(BASES)[1:])
def test_rows_change_if_and_only_if_a_run_reads_a_setting_beyond_the_first(name: str) -> None:
    first, base = make_base("kl"), make_base(name)
    assert has_equal_rows(name, switch_unread_settings(base))
    changeless_settings = [
        setting
        for setting, switched in iter_switched(base)
        if setting in first.find_unread_settings()
        and setting not in EXECUTION | UNSEEN_ELSEWHERE.get(name, {}).keys()
        and reads_changes(base, switched)
        and has_equal_rows(name, switched)
    ]
    assert not changeless_settings


FAMILIES: Mapping[type[BaseRunConfig], Callable[[Any, Sequence[int]], EnsembleTrainer]] = {
    UpdateRuleConfig: make_update_rule_trainer,
    DistillationConfig: make_distillation_trainer,
    VectorRewardConfig: make_vector_reward_trainer,
    PedagogyConfig: make_pedagogy_trainer,
}
TINY_SANDBOX: Settings = {"num_steps": 2, "eval_every": 1, "batch_size": 16, "trainer.save_freq": 5}


def make_toy_bases(config_class: type[BaseRunConfig]) -> Iterator[BaseRunConfig]:
    """Make a configuration for each method and task of a family that go together."""
    config = apply_overrides(config_class.model_validate({}), TINY_SANDBOX)
    for method, task in product(list_words(config_class, "method") or METHODS, list_words(config_class, "task")):
        with suppress(ConfigError):
            yield apply_overrides(config, {"method": method, "task": task})


def train_ensemble(config: BaseRunConfig) -> list[str]:
    """Train a run of a toy study, and list its rows without times."""
    trainer, times = FAMILIES[type(config)](config, (0,)), {column.name for column in TOY_TIME_COLUMNS}
    rows = [row for _ in range(3) for row in train_to_next_rows(trainer).rows.values()]
    return [repr({name: value for name, value in row.items() if name not in times}) for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("config_class", FAMILIES)
def test_all_that_a_toy_run_does_not_read_changes_none_of_its_rows(config_class: type[BaseRunConfig]) -> None:
    # A fifth of the combinations, spread over methods and tasks.
    for base in list(make_toy_bases(config_class))[::5]:
        assert train_ensemble(switch_unread_settings(base)) == train_ensemble(base)


@pytest.mark.parametrize("config_class", [RunConfig, *FAMILIES])
def test_every_condition_is_about_settings_of_its_family(config_class: type[BaseRunConfig]) -> None:
    names = list_field_names(config_class)
    assert all(any(re.fullmatch(condition.settings, name) for name in names) for condition in config_class.conditions)
