import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from search_spaces.declaration.presets import PRESETS
from tests.fakes.scripted import clone_tensors, make_small_config
from tests.fakes.trainers import check_resumption, drop_times, has_same_weights, make_quiet_trainer, run_steps
from trainable.config.run_config import RunConfig, apply_overrides
from trainable.envs.sokoban.generate import make_test_levels
from trainable.models.load import allow_for_engine, pick_device, prepare_device
from trainable.ppo.evaluation import Evaluation, summarize_validation
from trainable.ppo.phases import plan_step
from trainable.ppo.trainer import PPOTrainer
from trainable.runs.records import TIME_COLUMNS

# ---------------------------------------------------------------------------- evaluation


@pytest.mark.parametrize(("freq", "expected"), [(2, [2, 3]), (0, [])])
def test_when_validation_happens(freq: int, expected: list[int]) -> None:
    config = make_small_config(trainer__test_freq=freq)
    assert [step for step in (1, 2, 3) if plan_step(step, config).validation] == expected


def test_the_base_policy_is_validated_before_the_first_update_only() -> None:
    trainer = PPOTrainer(make_small_config())
    fresh_trainer = PPOTrainer(make_small_config())
    evaluations = [fresh_trainer.evaluate("val", mode) for mode in ("sampled", "greedy")]
    step = trainer.step()
    assert step.evaluations[:2] == evaluations
    assert {name: value for name, value in step.row.items() if name.startswith("base_")} == {
        "base_val_success": evaluations[0].success,
        "base_val_greedy_success": evaluations[1].success,
        "base_val_success_unseen": evaluations[0].compute_success_where(fresh_trainer.is_val_unseen),
        "base_val_reward": evaluations[0].score,
        "base_val_invalid_turns": evaluations[0].invalid_turns,
    }
    assert not any(name.startswith("base_") for name in trainer.step().row)
    assert PPOTrainer(make_small_config(trainer__val_before_train=False)).step()[1] == []


@pytest.mark.long
def test_validation_always_plays_the_same_levels_with_fresh_draws() -> None:
    trainer, evaluations = PPOTrainer(make_small_config(env__val_env_groups=64)), list[Evaluation]()
    for step in range(3):  # with the same policy
        trainer.step_index = step
        evaluations.append(trainer.evaluate("val", "sampled"))
    assert all(e.levels == tuple(range(123, 187)) for e in evaluations)
    assert len({e.clusters for e in evaluations}) == 1
    assert len({e.successes for e in evaluations}) == 3


def test_success_on_unseen_levels_leaves_out_levels_of_the_training_run() -> None:
    settings = {"env__val_env_groups": 64, "env__val_group_size": 2, "trainer__total_training_steps": 40}
    trainer = PPOTrainer(make_small_config(**settings))
    evaluation = trainer.evaluate("val", "sampled")
    row = summarize_validation([evaluation], trainer.is_val_unseen)
    training_keys = {level.key for levels in trainer.levels for level in levels}
    is_unseen = [level.key not in training_keys for level in trainer.val_levels for _ in range(2)]
    unseen_successes = np.array(evaluation.successes)[is_unseen]
    assert 0 < len(unseen_successes) < 128
    assert row["val_success_unseen"] == pytest.approx(np.mean(unseen_successes))
    assert row["val_success"] == pytest.approx(np.mean(evaluation.successes))
    assert evaluation.levels[:4] == (123, 123, 124, 124)


def test_closing_adds_greedy_and_test_success_and_their_time() -> None:
    trainer = PPOTrainer(make_small_config(trainer__total_training_steps=1))
    row_before = trainer.step().row
    row, evaluations = trainer.evaluate_final(row_before)
    expected = [(1, "val", "greedy"), (1, "test", "sampled"), (1, "test", "greedy")]
    assert [(e.step, e.split, e.mode) for e in evaluations] == expected
    columns = ("val_greedy_success", "test_success", "test_greedy_success")
    assert [row[name] for name in columns] == [e.success for e in evaluations]
    assert evaluations[1].levels == tuple(level.seed for level in make_test_levels(8))
    evaluation_seconds = row["seconds_validation"] - row_before["seconds_validation"]
    assert evaluation_seconds > 0
    assert row["cpu_seconds_step"] > row_before["cpu_seconds_step"]
    for name in ("seconds_step", "seconds_total"):
        assert row[name] == pytest.approx(row_before[name] + evaluation_seconds)
    assert trainer.seconds_total == pytest.approx(row["seconds_total"])
    assert {name: row[name] for name in row_before if name not in TIME_COLUMNS} == drop_times(row_before)


def test_without_test_levels_there_is_no_test() -> None:
    trainer = PPOTrainer(make_small_config(env__test_env_groups=0, trainer__total_training_steps=1))
    row, evaluations = trainer.evaluate_final()
    assert [evaluation.split for evaluation in evaluations] == ["val"]
    assert (row["test_success"], row["test_greedy_success"]) == (None, None)
    assert row["cpu_seconds_step"] > 0 < row["seconds_validation"] == row["seconds_step"] == row["seconds_total"]


# ---------------------------------------------------------------------------- reproducibility


SCRIPT = """
import json, sys, torch
from tests.fakes.trainers import make_quiet_trainer
torch.set_num_threads(1)
torch.manual_seed(1)  # global generators must not matter
trainer = make_quiet_trainer(actor__use_kl_loss=True, actor__entropy_coeff=0.01)
rows = [trainer.step().row for _ in range(2)]
tensors, values = trainer.get_state()
trainer.load_state(tensors, values)
print(json.dumps([rows, sorted({"sympy", "torch._dynamo", "peft"} & set(sys.modules))]))
"""


@pytest.mark.long
def test_another_process_writes_the_same_rows_and_imports_no_package_that_takes_seconds() -> None:
    root = Path(__file__).parents[3]
    process = subprocess.run([sys.executable, "-c", SCRIPT], cwd=root, capture_output=True, text=True, check=True)
    rows, slow_packages = json.loads(process.stdout)
    trainer = make_quiet_trainer(actor__use_kl_loss=True, actor__entropy_coeff=0.01)
    torch.manual_seed(2)
    assert [drop_times(row) for row in rows] == run_steps(trainer, 2)
    # torch's compiler, and adapters that the run does not have.
    assert slow_packages == []


RESUMED = {
    "gae": {},
    "adaptive kl in the reward": {
        "algorithm__use_kl_in_reward": True,
        "algorithm__kl_ctrl__type": "adaptive",
        "algorithm__kl_ctrl__kl_coef": 0.3,
        "algorithm__kl_ctrl__horizon": 50,
        "actor__use_kl_loss": True,
        "actor__kl_loss_type": "full",
    },
    "shared trunk": {"critic__shared_trunk": True, "actor__entropy_coeff": 0.01},
    "grpo and a filter": {
        "algorithm__adv_estimator": "grpo",
        "filter__rollout_filter_strategy": "top_k_abs",
        "filter__rollout_filter_value": 1,
        "actor__ppo_mini_batch_size": 8,
    },
}


@pytest.mark.long
@pytest.mark.parametrize("name", RESUMED)
def test_resumed_equals_straight_through(name: str, tmp_path: Path) -> None:
    settings = make_small_config(**RESUMED[name], env__val_env_groups=8)
    check_resumption(lambda: PPOTrainer(settings), tmp_path, stops=(1, 2) if name == "gae" else (2,))


@pytest.mark.long
def test_a_used_trainer_goes_back_to_a_state_it_loads() -> None:
    trainer = make_quiet_trainer()
    first_rows = run_steps(trainer, 1)
    tensors, values = clone_tensors(trainer.get_state()[0]), json.loads(json.dumps(trainer.get_state()[1]))
    later_rows = run_steps(trainer, 2)
    trainer.load_state(tensors, values)
    assert run_steps(trainer, 2) == later_rows
    fresh_trainer = make_quiet_trainer()
    trainer.load_state(*fresh_trainer.get_state())
    assert run_steps(trainer, 1) == first_rows


def test_the_state_holds_each_tensor_once_and_plain_values() -> None:
    trainer = make_quiet_trainer()
    run_steps(trainer, 1)
    tensors, values = trainer.get_state()
    assert "actor/lm_head.weight" not in tensors  # the head is the embedding
    places = [tensor.data_ptr() for tensor in tensors.values()]
    assert len(set(places)) == len(places)
    assert {name.split("/")[0] for name in tensors} == {"actor", "critic", "actor_optimizer", "critic_optimizer"}
    assert json.loads(json.dumps(values)) == values
    assert values["step"] == 1


def test_a_state_that_lacks_a_weight_is_refused() -> None:
    trainer = make_quiet_trainer()
    tensors, values = trainer.get_state()
    for missing in ("actor/model.norm.weight", "actor/model.embed_tokens.weight", "critic/score.bias"):
        with pytest.raises(ValueError, match=missing.split("/")[1]):
            trainer.load_state({name: tensor for name, tensor in tensors.items() if name != missing}, values)


# ---------------------------------------------------------------------------- seeds and levels


def test_seeds_change_levels_draws_and_critic_and_never_validation_levels() -> None:
    zero, one = PPOTrainer(make_small_config(seed=0)), PPOTrainer(make_small_config(seed=1))
    seeds = [[level.seed for levels in trainer.levels for level in levels] for trainer in (zero, one)]
    assert seeds == [list(range(10_000, 10_006)), list(range(1_010_000, 1_010_006))]
    assert zero.critic is not None
    assert one.critic is not None
    assert not torch.equal(zero.critic.score.weight, one.critic.score.weight)
    for trainer in (zero, one):
        assert [level.seed for level in trainer.val_levels] == list(range(123, 139))
    evaluations, other_evaluations = zero.step()[1], one.step()[1]
    assert [e.levels for e in evaluations] == [e.levels for e in other_evaluations]
    assert evaluations[0].successes != other_evaluations[0].successes  # sampled
    assert evaluations[1] == other_evaluations[1]  # greedy: no draw, the same policy


def test_arms_of_one_seed_start_alike() -> None:
    """Levels, random numbers and the base validation are paired across arms, which differ after the first update."""
    baseline, arm = PPOTrainer(make_small_config()), PPOTrainer(make_small_config(actor__entropy_coeff=0.5))
    baseline_step, arm_step = baseline.step(), arm.step()
    assert baseline_step[1] == arm_step[1]
    columns = ("train_reward", "sampled_tokens", "value_mean", "vf_loss", "pg_loss")
    assert [baseline_step.row[name] for name in columns[:-1]] == [arm_step.row[name] for name in columns[:-1]]
    assert not has_same_weights(baseline, arm)


def test_the_device_is_the_one_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pick_device("cpu", 1) == torch.device("cpu")
    assert pick_device("auto", 0) == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert pick_device("auto", 0.5).type == pick_device("cuda", 1).type == "cuda"
    # A torch for another CUDA than that of the driver: the run must not train on the CPU what was planned for a GPU.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("auto", "cuda"):
        with pytest.raises(ValueError, match=r"reserves 1 GPUs, and torch .* sees none"):
            pick_device(name, 1)


# ---------------------------------------------------------------------------- it learns


@pytest.mark.long
def test_it_learns() -> None:
    """Twenty steps of the laptop preset raise sampled success beyond the base's own greedy success.

    Measured on 128 levels, seeds 0 to 2: from .33 to .70 on average, the smallest gain .34; greedy before, .48.
    """
    settings = {
        **PRESETS["laptop"].settings,
        "trainer.total_training_steps": 20,
        "trainer.test_freq": 20,
        "env.val_env_groups": 128,
        "env.test_env_groups": 0,
    }
    trainer = PPOTrainer(apply_overrides(RunConfig(), settings))
    evaluations: list[Evaluation] = [e for _ in range(20) for e in trainer.step()[1]]
    assert [(e.step, e.mode) for e in evaluations] == [(0, "sampled"), (0, "greedy"), (20, "sampled")]
    success_before, greedy, success_after = (e.success for e in evaluations)
    assert success_after > success_before + 0.2
    assert success_after > greedy


@pytest.mark.parametrize(
    ("device", "gpus", "calls"),
    [("cuda", 1.0, [("cudnn", False)]), ("cuda", 0.5, [("cudnn", False), ("fraction", 0.5)]), ("cpu", 0.0, [])],
)
def test_a_run_on_a_gpu_takes_no_more_than_its_share(
    monkeypatch: pytest.MonkeyPatch, device: str, gpus: float, calls: list[tuple[str, float]]
) -> None:
    made: list[tuple[str, float]] = []
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", lambda value: made.append(("cudnn", value)))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda value: made.append(("fraction", value)))
    prepare_device(torch.device(device), gpus)
    assert made == calls


@pytest.mark.parametrize(
    ("gpus", "engine", "cap"),
    [
        # Adapters of 3B on half of 80 GiB: weights, cache and graphs of an engine that sleeps, and 21.5 of the trainer.
        (0.5, 23.0, 63.0),
        (0.5, 60.0, 80.0),
        (1.0, 23.0, None),
    ],
)
def test_an_engine_that_sleeps_takes_nothing_of_the_share(
    monkeypatch: pytest.MonkeyPatch, gpus: float, engine: float, cap: float | None
) -> None:
    """torch refuses what would exceed the cap, and counts all blocks of the engine, which sleep does not release."""
    gib, fractions = 2**30, []
    properties = SimpleNamespace(total_memory=80 * gib)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", fractions.append)
    allow_for_engine(torch.device("cuda"), gpus, int(engine * gib))
    assert [80 * fraction for fraction in fractions] == ([] if cap is None else [pytest.approx(cap)])
    allow_for_engine(torch.device("cpu"), 0.0, 0)
    assert len(fractions) == (cap is not None)
