import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from operator import attrgetter
from string import Formatter

import numpy as np
import pytest

from analysis.sweep.contrasts import read_contrasts
from sandboxes.update_rules.studies.age_not_capacity import solve_decay
from search_spaces.catalog import STUDIES
from search_spaces.declaration.presets import PRESETS
from search_spaces.declaration.study import Study, make_value_label
from search_spaces.language_model import kl
from search_spaces.language_model.family import PPO, format_rate
from tests.fakes.run_folders import make_study_record
from trainable.config.base_config import BaseRunConfig
from trainable.config.run_config import ConfigError, RunConfig, apply_overrides, resolve_key
from trainable.config.setting_types import flatten_settings
from trainable.runs.stop_rules import RULES
from tune_study.placement.resources import uses_compiled_code

ALL_STUDIES = pytest.mark.parametrize("study", STUDIES.values(), ids=STUDIES)
SWEEPS = pytest.mark.parametrize("study", [STUDIES[name] for name in ("kl", "entropy", "top-p")], ids=lambda s: s.name)

# The settings that all three sweeps share in the published documents, under the names of this project.
SHARED_SETTINGS = {
    "algorithm.adv_estimator": "gae",
    "actor.filter_loss_scaling": "none",
    "actor.entropy_from_logits_with_chunking": True,
    "actor.ppo_mini_batch_size": 32,
    "actor.ppo_micro_batch_size_per_gpu": 4,
    "critic.ppo_mini_batch_size": 32,
    "critic.ppo_micro_batch_size_per_gpu": 4,
    "rollout.ref_log_prob_micro_batch_size_per_gpu": 8,
    "rollout.log_prob_micro_batch_size_per_gpu": 8,
    "env.env_groups": 8,
    "env.group_size": 16,
    "env.val_env_groups": 512,
    "env.val_group_size": 1,
    "filter.rollout_filter_strategy": "top_p",
    "filter.rollout_filter_top_p_prob_mode": "softmax",
    "filter.rollout_filter_type": "largest",
    "filter.rollout_filter_metric": "reward_variance",
    "trainer.total_training_steps": 400,
    "trainer.save_freq": -1,
    "trainer.val_before_train": True,
    "trainer.n_gpus_per_node": 1,
    "trainer.ray_num_cpus": 16,
    "algorithm.kl_ctrl.kl_coef": 0.0,
    "model.path": "Qwen/Qwen2.5-3B",
}

KL_FIELDS = ("actor.use_kl_loss", "actor.kl_loss_coef")
FILTER_FIELDS = ("filter.rollout_filter_value", "filter.rollout_filter_include_zero")

# Study -> value -> published use_kl_loss, kl_loss_coef, entropy_coeff, filter value and include_zero.
ARMS: dict[str, dict[str, tuple[bool, float, float, float, bool]]] = {
    "kl": {
        "0": (False, 0.0, 0.0, 1.0, True),
        **{value: (True, float(value), 0.0, 1.0, True) for value in ("0.001", "0.003", "0.01", "0.03", "0.1")},
    },
    "entropy": {
        value: (False, 0.0, float(value), 1.0, True) for value in ("0", "0.001", "0.003", "0.01", "0.03", "0.1")
    },
    "top-p": {
        **{
            value: (True, 0.001, 0.001, float(value), False)
            for value in ("1.0", "0.98", "0.95", "0.9", "0.8", "0.6", "0.4")
        },
        "nofilter": (True, 0.001, 0.001, 1.0, True),
    },
}


def get_fields(config: BaseRunConfig, fields: Iterable[str]) -> dict[str, object]:
    return {field: attrgetter(field)(config) for field in fields}


def list_differences(config: BaseRunConfig, other_config: BaseRunConfig) -> set[str]:
    """List the settings in which two configurations differ."""
    settings, others = flatten_settings(config.model_dump()), flatten_settings(other_config.model_dump())
    return {name for name, value in settings.items() if value != others[name]}


def make_base_config(study: Study, preset: str) -> BaseRunConfig:
    return apply_overrides(study.family.config_class.model_validate({}), study.make_preset_settings(preset))


def make_arm_config(study: Study, preset: str, value: str) -> BaseRunConfig:
    return make_cataloged_arm(study.name, preset, value)


@cache
def make_cataloged_base(study: str, preset: str) -> BaseRunConfig:
    return make_base_config(STUDIES[study], preset)


@cache
def make_cataloged_arm(study: str, preset: str, value: str) -> BaseRunConfig:
    base = make_cataloged_base(study, preset)
    return apply_overrides(base, STUDIES[study].axis.make_settings(value, base))


@SWEEPS
def test_the_published_grid_is_the_default_and_has_the_published_settings(study: Study) -> None:
    assert study.axis.grids["paper"] == tuple(ARMS[study.name])
    for value, expected in ARMS[study.name].items():
        config = make_arm_config(study, "paper", value)
        assert attrgetter(*KL_FIELDS, "actor.entropy_coeff", *FILTER_FIELDS)(config) == expected
        assert get_fields(config, SHARED_SETTINGS) == SHARED_SETTINGS


@ALL_STUDIES
def test_points_of_a_grid_are_configurations_and_labels_of_their_own(study: Study) -> None:
    for preset in study.family.presets:
        grid = study.get_grid(preset)
        assert len({make_arm_config(study, preset, value).compute_hash() for value in grid}) == len(grid)
        assert len({make_value_label(value) for value in grid}) == len(grid)
        base = make_base_config(study, preset)
        assert study.baseline.format(**study.family.make_template_values(base)) in grid


def test_a_variant_of_a_preset_differs_in_its_own_settings_alone() -> None:
    laptop, stress = (make_base_config(kl.STUDY, preset) for preset in ("laptop", "stress"))
    assert list_differences(laptop, stress) == {"actor.lr", "rollout.name", "model.compiled_passes"}
    assert stress.actor.lr == 2e-3
    # As it was accepted: compiled code rounds otherwise, and other runs collapse.
    assert not uses_compiled_code(stress)
    assert uses_compiled_code(laptop)
    assert kl.STUDY.get_grid("stress") == kl.STUDY.axis.grids["laptop"] != kl.STUDY.get_grid("paper")
    # A study's own grid and settings come first.
    own = replace(
        kl.STUDY,
        axis=replace(kl.STUDY.axis, grids={**kl.STUDY.axis.grids, "stress": ("0", "0.1")}),
        presets={"stress": {"actor.lr": 3e-3}, "laptop": {"actor.lr": 5e-3}},
    )
    assert own.get_grid("stress") == ("0", "0.1")
    assert make_base_config(own, "stress").actor.lr == 3e-3


@ALL_STUDIES
def test_the_arms_differ_in_the_axis_alone(study: Study) -> None:
    base = make_base_config(study, "paper")
    for value in study.axis.grids["paper"]:
        changes = list_differences(base, make_arm_config(study, "paper", value))
        assert changes <= study.axis.swept_fields | {"actor.use_kl_loss"}


PPO_TEMPLATE_NAMES = {
    *("env", "model", "size", "tag", "strategy", "kl_type", "collapse", "mass", "lr", "train", "analysis", "every")
}


@ALL_STUDIES
def test_a_study_names_only_what_there_is(study: Study) -> None:
    for key in (*study.axis.swept_fields, *study.fixed_settings, *study.axis.extra_settings, *study.smoke_settings):
        assert resolve_key(key, study.family.config_class) == key
    assert set(study.stop_rules) <= ({*RULES} if study.family is PPO else {"uniform_groups"})
    presets = study.family.presets
    assert set(study.axis.grids) <= set(presets) <= set(PRESETS)
    assert {preset.variant_of or name for name, preset in presets.items()} <= set(study.axis.grids)
    study_names = {"task", "method"} if study.family is not PPO else PPO_TEMPLATE_NAMES
    templates = study.name_templates
    study_templates = (templates.run, templates.summary_log, templates.wandb_project, study.baseline)
    assert {name for template in study_templates for name in list_template_names(template)} <= study_names | {"run"}
    run_templates = (templates.experiment, templates.log, templates.checkpoints)
    run_names = study_names | {"arm", "label", "run", "experiment", "seed"}
    assert {name for template in run_templates for name in list_template_names(template)} <= run_names
    assert list_template_names(templates.probe_log) <= run_names | {"step", "val"}
    assert study.question.strip().endswith("?")


@ALL_STUDIES
def test_the_pairs_of_a_contrast_differ_in_the_same_settings(study: Study) -> None:
    contrasts = [{"name": name, "pairs": pairs} for name, pairs in study.contrasts.items()]
    assert len(read_contrasts(make_study_record(contrasts=contrasts))) == len(study.contrasts)
    for name, pairs in study.contrasts.items():
        for pair in pairs:
            # Both arms belong to one grid. A study of another preset has no run of such a pair.
            assert any({*pair} <= set(grid) for grid in study.axis.grids.values())
        configs = [[make_arm_config(study, "laptop", arm) for arm in pair] for pair in pairs]
        differences = [list_differences(first, second) for first, second in configs]
        # Of two settings that a contrast changes, some pairs have one in common.
        assert max(differences, key=len) == set().union(*differences), name
        assert all(differences), name


def test_matched_arms_keep_their_optimizer_steps_in_a_study_of_another_length() -> None:
    study = STUDIES["matched-updates"]
    for steps, updates in ((300, 1200), (40, 160)):
        base = apply_overrides(make_base_config(study, "laptop"), {"trainer.total_training_steps": steps})
        for value in study.axis.grids["laptop"]:
            if value.endswith("updates1200"):
                config = apply_overrides(base, study.axis.make_settings(value, base))
                assert config.trainer.total_training_steps * config.inner_epochs == updates


def test_a_warmup_keeps_its_share_of_a_study_of_another_length() -> None:
    study = STUDIES["opd-warmup"]
    base = apply_overrides(make_base_config(study, "laptop"), {"trainer.total_training_steps": 30})
    settings = study.axis.make_settings("k4_warm250_equal", base)
    assert (settings["warmup_steps"], settings["trainer.total_training_steps"]) == (20, 50)
    # Also in a smoke form, which has fewer steps than an evaluation interval, the top-k loss has a step left.
    short_base = apply_overrides(make_base_config(study, "laptop"), study.smoke_settings)
    for value in study.axis.grids["laptop"]:
        config = apply_overrides(short_base, study.axis.make_settings(value, short_base))
        assert config.warmup_steps < config.trainer.total_training_steps
    full_base = make_base_config(study, "laptop")
    full_settings = study.axis.make_settings("k4_warm250_equal", full_base)
    assert (full_settings["warmup_steps"], full_settings["trainer.total_training_steps"]) == (250, 550)


@pytest.mark.parametrize("capacity", [8, 16, 32])
@pytest.mark.parametrize("age", [1.5, 3.5])
def test_the_decay_gives_the_requested_mean_age(capacity: int, age: float) -> None:
    decay = solve_decay(age, capacity)
    ages = np.arange(capacity)
    assert np.average(ages, weights=np.exp(-decay * ages)) == pytest.approx(age, rel=1e-3)


def list_template_names(template: str) -> set[str]:
    return {name for _, name, _, _ in Formatter().parse(template) if name}


def test_kl_and_entropy_share_the_arm_in_which_both_are_off() -> None:
    assert make_arm_config(STUDIES["kl"], "paper", "0") == make_arm_config(STUDIES["entropy"], "paper", "0")


@pytest.mark.parametrize(("value", "label"), [("1.0", "10"), ("0.001", "0001"), ("0", "0"), ("nofilter", "nofilter")])
def test_published_labels(value: str, label: str) -> None:
    assert make_value_label(value) == label


@pytest.mark.parametrize(("model", "game"), [("sokoban-tiny", "countdown"), ("frozenlake-tiny", "sokoban")])
def test_a_game_with_a_model_of_its_own_refuses_that_of_another_game(model: str, game: str) -> None:
    settings = {**PRESETS["laptop"].settings, "model.path": model, "env.name": game}
    with pytest.raises(ConfigError, match=f"knows the words of {model.removesuffix('-tiny')} only"):
        apply_overrides(RunConfig(), settings)


def test_declaring_a_study_loads_neither_torch_nor_ray() -> None:
    names = {"torch", "ray", "vllm", "transformers"}
    code = f"import sys, search_spaces.catalog; print(sorted({names} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


# The published settings of the gradient analysis, under the names of this project.
ANALYSIS_SETTINGS: dict[str, object] = {
    **SHARED_SETTINGS,
    "trainer.total_training_steps": 101,
    "trainer.save_freq": 100,
    "trainer.test_freq": 10,
    "trainer.gradient_analysis_mode": True,
    "trainer.gradient_analysis_every": 50,
    "trainer.gradient_analysis_env_groups": 128,
    "trainer.gradient_analysis_group_size": 16,
    "trainer.gradient_analysis_log_prefilter": True,
    "trainer.gradient_analysis_only": False,
    "trainer.exit_after_gradient_analysis": False,
    "rollout.gradient_analysis_num_buckets": 6,
    "rollout.gradient_analysis_bucket_mode": "quantile",
    "rollout.log_prob_micro_batch_size_per_gpu": 4,
    "rollout.ref_log_prob_micro_batch_size_per_gpu": 4,
    "filter.rollout_filter_value": 0.9,
    "filter.rollout_filter_top_p_prob_mode": "linear",
    "filter.rollout_filter_include_zero": False,
    "actor.use_kl_loss": False,
    "actor.kl_loss_type": "low_var_kl",
    "actor.kl_loss_coef": 0.001,
    "actor.entropy_coeff": 0.001,
}


def test_the_gradient_analysis_has_the_published_settings() -> None:
    study = STUDIES["gradient-analysis"]
    ppo, grpo = (make_arm_config(study, "paper", algo) for algo in ("PPO", "GRPO"))
    assert get_fields(ppo, ANALYSIS_SETTINGS) == ANALYSIS_SETTINGS
    assert ppo.actor.loss_agg_mode == "token-mean"
    assert grpo.algorithm.adv_estimator == "grpo"
    assert grpo.algorithm.norm_adv_by_std_in_grpo
    assert grpo.actor.loss_agg_mode == "seq-mean-token-mean"
    assert study.axis.grids["paper"] == ("PPO",)


@pytest.mark.parametrize(("rate", "text"), [(3e-4, "3e-4"), (1.7e-3, "1.7e-3"), (1e-6, "1e-6"), (0.5, "5e-1")])
def test_a_learning_rate_is_written_as_it_is_typed(rate: float, text: str) -> None:
    assert format_rate(rate) == text
    assert float(text) == rate


@ALL_STUDIES
def test_the_dose_is_a_numeric_setting_of_the_arms(study: Study) -> None:
    if study.axis.dose:
        assert study.axis.dose in study.axis.swept_fields
        for preset in study.family.presets:
            configs = [make_arm_config(study, preset, arm) for arm in study.get_grid(preset)]
            values = [attrgetter(study.axis.dose)(config) for config in configs]
            assert all(isinstance(value, float) and value > 0 for value in values)


@ALL_STUDIES
def test_outcomes_are_those_of_the_report_and_have_margins(study: Study) -> None:
    outcomes = [outcome.column for outcome in study.family.outcomes]
    columns = {column.name: column for column in study.family.trial_columns}
    for name, margin in {**study.family.margins, **study.margins}.items():
        assert name in outcomes
        assert columns[name].unit in ("fraction", "nats", "decades", "reward")
        assert 0 < margin < 1
