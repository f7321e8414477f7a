"""The commands for RAGEN have the words of the published scripts, run_kl_sweep.sh and run_top_p_sweep.sh."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from search_spaces.catalog import get_declaration
from tests.fakes.command_line import assert_refused, get_output, type_in
from trainable.config.command_lines import split_words

PUBLISHED: Mapping[str, str] = {
    "model_path": "Qwen/Qwen2.5-3B",
    "trainer.total_training_steps": "400",
    "trainer.save_freq": "-1",
    "trainer.logger": "['console','wandb']",
    "trainer.val_before_train": "True",
    "trainer.n_gpus_per_node": "1",
    "ray_kwargs.ray_init.num_cpus": "16",
    "system.CUDA_VISIBLE_DEVICES": "'{gpu_ids}'",
    "algorithm.adv_estimator": "gae",
    "actor_rollout_ref.actor.entropy_from_logits_with_chunking": "True",
    "actor_rollout_ref.actor.filter_loss_scaling": "none",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "32",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "4",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": "8",
    "critic.ppo_mini_batch_size": "32",
    "critic.ppo_micro_batch_size_per_gpu": "4",
    "ppo_mini_batch_size": "32",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": "8",
    "actor_rollout_ref.rollout.rollout_filter_strategy": "top_p",
    "actor_rollout_ref.rollout.rollout_filter_top_p_prob_mode": "softmax",
    "actor_rollout_ref.rollout.rollout_filter_type": "largest",
    "actor_rollout_ref.rollout.rollout_filter_metric": "reward_variance",
    "actor_rollout_ref.rollout.gpu_memory_utilization": "0.5",
    "es_manager.train.env_groups": "8",
    "es_manager.train.group_size": "16",
    "es_manager.train.env_configs.n_groups": "[8]",
    "es_manager.val.env_groups": "512",
    "es_manager.val.group_size": "1",
    "es_manager.val.env_configs.n_groups": "[512]",
}
"""The words of both scripts, in the form of Hydra."""
ACTOR, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.rollout_filter_"
KL: Mapping[str, str] = {
    "trainer.project_name": "ragen_release_kl_sweep",
    f"{ACTOR}entropy_coeff": "0.0",
    f"{ROLLOUT}value": "1.0",
    f"{ROLLOUT}include_zero": "True",
}
TOP_P: Mapping[str, str] = {
    "trainer.project_name": "ragen_release_top_p_sweep",
    f"{ACTOR}use_kl_loss": "True",
    f"{ACTOR}kl_loss_coef": "0.001",
    f"{ACTOR}entropy_coeff": "0.001",
}
FURTHER = {"seed.train", "trainer.experiment_name", "trainer.default_local_dir", "trainer.resume_mode", "hydra.run.dir"}
"""Words with the folders, the name and the seed of a run; the scripts make the first three themselves."""


def read_commands(study: str) -> tuple[dict[str, dict[str, str]], dict[str, Any]]:
    """The settings of the command of each arm, and the plan."""
    answer = get_output(f"run {study} --trainer ragen --dry-run --gpus 0,1 --json")
    (plan,) = json.loads(answer)["plans"]
    commands = {}
    for arm, text in plan["commands"].items():
        program, *words = split_words(text)
        assert (program, words[:3]) == ("python", ["train.py", "--config-name", "_2_sokoban"])
        pairs = [tuple(word.split("=", 1)) for word in words[3:]]
        assert len(dict(pairs)) == len(pairs), "a key twice"
        commands[arm] = dict(pairs)
    return commands, plan


def expect(words: Mapping[str, str], arm_words: Mapping[str, str]) -> dict[str, str]:
    return {**PUBLISHED, **words, **arm_words}


def test_the_kl_sweep() -> None:
    commands, plan = read_commands("kl")
    assert list(commands) == ["0", "0.001", "0.003", "0.01", "0.03", "0.1"]
    for arm, settings in commands.items():
        coefficient = "0.0" if arm == "0" else arm
        expected = expect(KL, {f"{ACTOR}use_kl_loss": str(arm != "0"), f"{ACTOR}kl_loss_coef": coefficient})
        assert {key: value for key, value in settings.items() if key not in FURTHER} == expected
        assert settings.keys() - expected.keys() == FURTHER
    assert plan["runs"][1]["run"] == "sokoban_kl_sweep_nofilter_0001-Qwen2.5-3B"
    assert plan["seeds"] == [0, 1, 2]


def test_the_top_p_sweep() -> None:
    commands, plan = read_commands("top-p")
    assert list(commands) == ["1.0", "0.98", "0.95", "0.9", "0.8", "0.6", "0.4", "nofilter"]
    for arm, settings in commands.items():
        value, include_zero = ("1.0", "True") if arm == "nofilter" else (arm, "False")
        expected = expect(TOP_P, {f"{ROLLOUT}value": value, f"{ROLLOUT}include_zero": include_zero})
        assert {key: value for key, value in settings.items() if key not in FURTHER} == expected
    assert plan["runs"][1]["run"] == "sokoban_top_p_098-Qwen2.5-3B"


def test_seeds_are_those_of_our_runs() -> None:
    study = get_declaration("kl-ragen")
    assert study is not None
    config = study.family.config_class.model_validate({"seed": 2})
    assert config.fill_word("seed.train={seed*1000000+10000}", {}) == "seed.train=2010000"  # type: ignore[attr-defined]


@pytest.mark.parametrize("line", ["run entropy --trainer ragen", "run kl --trainer verl"])
def test_a_study_without_such_a_trainer_is_refused(line: str) -> None:
    assert_refused(type_in(f"{line} --dry-run"), "type one of kl --trainer ragen, top-p --trainer ragen")


def test_values_of_your_own() -> None:
    line = "run kl --trainer ragen --kl-values 0,0.05 --dry-run --gpus 0 --set python=/opt/ragen/bin/python"
    answer = get_output(line)
    assert f"Arm 0.05 differs in: {ACTOR}use_kl_loss=True {ACTOR}kl_loss_coef=0.05" in answer
    assert "Command of arm 0: /opt/ragen/bin/python train.py" in answer
