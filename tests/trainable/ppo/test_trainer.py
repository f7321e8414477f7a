import copy
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.fakes.scripted import clone_tensors, make_hub_twin, make_small_config
from tests.fakes.trainers import (
    Row,
    copy_weights,
    drop_times,
    has_changed,
    has_same_weights,
    is_finite,
    make_quiet_trainer,
    record_results,
    replay_step,
    run_steps,
)
from tests.oracles import update as oracle
from trainable.algo.batching import order_length_stratified
from trainable.config.choices import ADVANTAGE_ESTIMATORS
from trainable.config.own_parts import PartFile, register_file
from trainable.diagnostics.gradient_analysis import DIAGNOSTICS
from trainable.models.qwen2 import Qwen2
from trainable.ppo.evaluation import record_trained_episodes
from trainable.ppo.targets import PreparedBatch, make_targets
from trainable.ppo.trainer import PPOTrainer
from trainable.rollout.engine import recompute_logprobs
from trainable.rollout.episode import Episode, collate
from trainable.runs.records import DEFAULT_STEP_COLUMNS

ONE_GROUP = {"filter__rollout_filter_strategy": "top_k_abs", "filter__rollout_filter_value": 1}
VALIDATIONS = {"trainer__val_before_train": True, "env__val_env_groups": 3, "env__val_group_size": 2}

# ---------------------------------------------------------------------------- every setting takes a step

ESTIMATORS = tuple(ADVANTAGE_ESTIMATORS)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_every_estimator_takes_a_step(estimator: str) -> None:
    branches = int(ADVANTAGE_ESTIMATORS[estimator].compares_prefix_trees)
    trainer = make_quiet_trainer(algorithm__adv_estimator=estimator, rollout__ts_n=branches)
    old_weights = copy_weights(trainer)
    (row,) = run_steps(trainer, 1)
    assert is_finite(row)
    assert row["optimizer_steps"] == 2
    assert has_changed(trainer, old_weights, "actor/")
    assert ("vf_loss" in row) == ("value_mean" in row) == any(name.startswith("critic/") for name in old_weights)
    assert (trainer.critic is not None) == (estimator == "gae")


def test_the_coefficient_of_the_kl_in_the_reward_adapts_to_the_kl() -> None:
    trainer = make_quiet_trainer(
        algorithm__use_kl_in_reward=True,
        algorithm__kl_penalty="low_var_kl",
        algorithm__kl_ctrl__kl_coef=0.2,
        algorithm__kl_ctrl__type="adaptive",
        algorithm__kl_ctrl__horizon=80,
    )
    first, second = run_steps(trainer, 2)
    assert is_finite(second)
    assert abs(first["kl_to_reference"]) < 1e-6 < second["kl_to_reference"]  # at first, both are the same policy
    assert first["kl_in_reward_coef"] == 0.2
    # The KL is 0 with a target of 0.1: the error is clipped at -0.2, times 8 sequences over a horizon of 80.
    assert second["kl_in_reward_coef"] == pytest.approx(0.2 * (1 - 0.2 * 8 / 80))
    assert "kl_loss" not in first


FILTERS = [
    ({"strategy": "top_p", "value": 0.5, "top_p_prob_mode": "linear"}, {1}),
    ({"strategy": "top_f", "value": 0.5, "type": "smallest"}, {1}),
    ({"strategy": "top_k_abs", "value": 2, "metric": "length"}, {2}),
    ({"strategy": "min_p", "value": 0.99, "metric": "entropy_variance"}, {1}),
]


@pytest.mark.parametrize(("settings", "group_counts"), FILTERS, ids=str)
def test_a_filter_takes_a_step(settings: Row, group_counts: set[int]) -> None:
    trainer = make_quiet_trainer(**{f"filter__rollout_filter_{name}": value for name, value in settings.items()})
    (row,) = run_steps(trainer, 1)
    assert is_finite(row)
    assert row["groups_kept"] in group_counts
    assert row["kept_ratio"] == row["groups_kept"] / 2
    assert row["batch_size"] == 4 * row["groups_kept"]


def test_a_shared_trunk_trains_policy_and_value_head_together() -> None:
    trainer = make_quiet_trainer(critic__shared_trunk=True)
    old_weights = copy_weights(trainer)
    (row,) = run_steps(trainer, 1)
    assert {name.split("/")[0] for name in old_weights} == {"actor", "head"}
    assert has_changed(trainer, old_weights, "actor/")
    assert has_changed(trainer, old_weights, "head/")
    assert {"vf_loss", "pg_loss", "value_mean", "explained_variance"} <= set(row)
    assert "critic_grad_norm" not in row


# ---------------------------------------------------------------------------- what a step does


def test_the_row_has_known_columns_and_misses_only_what_was_not_measured() -> None:
    settings = make_small_config(actor__use_kl_loss=True, trainer__total_training_steps=1)
    trainer = PPOTrainer(settings, diagnostics=DIAGNOSTICS)
    row = trainer.step().row
    row = trainer.evaluate_final(row)[0]
    # The torch engine shares the weights of the trainer, so that there is no mismatch to measure.
    columns = {column.name for column in DEFAULT_STEP_COLUMNS}
    assert columns - set(row) == {
        "kl_in_reward_coef",
        "seconds_gradient_analysis",
        "tpo_target_entropy",
        "tpo_target_top_prob",
        "gen_batches",
        "masked_episodes",
        "reference_step",
        "stapo_silenced_fraction",
        "train_shared_tokens",
        "base_val_kl_to_reference",  # the reference is the policy before training
        # Measures of another game.
        *(f"{split}_{name}" for split in ("train", "val", "base_val") for name in ("children", "consistent_guesses")),
        *(name for name in columns if name.startswith(("engine_", "tis_"))),
    }
    assert set(row) <= columns


def test_the_accounts_of_a_step_are_those_of_its_episodes() -> None:
    trainer = make_quiet_trainer()
    episodes = replay_step(trainer, 1)
    trainer.consecutive_empty_steps = 3  # counted anew after a step that kept some groups
    (row,) = run_steps(trainer, 1)
    scores = np.array([episode.score for episode in episodes]).reshape(2, 4)
    solved = np.array([episode.success for episode in episodes]).reshape(2, 4)
    turns = sum(len(episode.texts) for episode in episodes)
    tokens = sum(episode.response_tokens for episode in episodes)
    expected = {
        "train_success": solved.mean(),
        "train_pass_at_group": solved.any(axis=1).mean(),
        "train_reward": scores.mean(),
        "train_actions": np.mean([episode.actions for episode in episodes]),
        "train_invalid_turns": sum(episode.invalid_turns for episode in episodes) / turns,
        "train_response_tokens": tokens / 8,
        "reward_std": scores.std(axis=1, ddof=1).mean(),
        "reward_std_max": scores.std(axis=1, ddof=1).max(),
        "env_steps": sum(episode.actions for episode in episodes),
        "sampled_tokens": tokens,
        "trained_tokens": tokens,
        "entropy": sum(episode.entropies.sum() for episode in episodes) / tokens,
        "groups": 2,
        "groups_kept": 2,
        "batch_size": 8,
        "consecutive_empty_steps": 0,
        "nonfinite_updates": 0,
    }
    assert {name: row[name] for name in expected} == pytest.approx(expected, rel=1e-5)


def test_step_matches_reference_implementation() -> None:
    """Losses and gradient norms of a step with tiny learning rates equal those of transformers on the same episodes."""
    kl_settings = {"actor__use_kl_loss": True, "actor__kl_loss_type": "kl"}
    rates = {"actor__lr": 1e-12, "critic__lr": 1e-12}
    trainer = make_quiet_trainer(**kl_settings, **rates, actor__entropy_coeff=0.1, rollout__temperature=0.8)
    config, critic = trainer.config, trainer.critic
    assert critic is not None
    batch = collate(replay_step(trainer, 1))
    trunk = Qwen2(critic.shape)
    trunk.model.load_state_dict(critic.model.state_dict())
    twin, critic_twin = make_hub_twin(trainer.model), make_hub_twin(trunk)
    with torch.no_grad():
        hidden = critic_twin.model(input_ids=batch.tokens).last_hidden_state
        values = torch.zeros(batch.tokens.shape)
        values[:, 1:] = critic.score(hidden)[:, :-1, 0]
    targets = make_targets(batch, values * batch.mask, batch.logprobs, config.algorithm, 0.0, 1.0)
    mini_batches = order_length_stratified(batch.lengths).split(4)
    actor_steps = [
        oracle.compute_actor_step(twin, twin, batch, targets, rows, config.actor, temperature=0.8)
        for rows in mini_batches
    ]
    head = copy.deepcopy(critic.score)
    critic_steps = [
        oracle.compute_critic_step(critic_twin, head, batch, targets, rows, config.critic) for rows in mini_batches
    ]
    expected = {
        name: np.mean([step.losses[name] for step in oracle_steps])
        for oracle_steps, names in ((actor_steps, ("pg_loss", "entropy_loss", "kl_loss")), (critic_steps, ("vf_loss",)))
        for name in names
    }
    expected["actor_grad_norm"] = np.mean([oracle.compute_norm(step) for step in actor_steps])
    expected["critic_grad_norm"] = np.mean([oracle.compute_norm(step) for step in critic_steps])
    expected["value_mean"] = float(values[batch.mask].mean())
    residual_fraction = (targets.returns - values)[batch.mask].var() / targets.returns[batch.mask].var()
    expected["explained_variance"] = 1 - float(residual_fraction)
    (row,) = run_steps(trainer, 1)
    assert {name: row[name] for name in expected} == pytest.approx(expected, rel=1e-3, abs=1e-5)


def test_totals_are_sums_of_the_steps() -> None:
    rows = run_steps(make_quiet_trainer(**ONE_GROUP), 3)
    for name in ("optimizer_steps", "env_steps", "sampled_tokens", "trained_tokens"):
        assert [row[f"total_{name}"] for row in rows] == np.cumsum([row[name] for row in rows]).tolist()
        assert all(row[name] > 0 for row in rows)
    assert all(row["trained_tokens"] < row["sampled_tokens"] for row in rows)


def test_copies_count_as_trained_tokens_and_the_batch_is_a_multiple_of_the_groups_too() -> None:
    trainer = make_quiet_trainer(**ONE_GROUP, actor__ppo_mini_batch_size=8, critic__ppo_mini_batch_size=8)
    episodes = replay_step(trainer, 1)
    (row,) = run_steps(trainer, 1)
    tokens = [sum(e.response_tokens for e in episodes if e.group == group) for group in range(2)]
    assert row["batch_size"] == 8  # four episodes, each trained on twice
    assert row["trained_tokens"] in (2 * tokens[0], 2 * tokens[1])
    assert row["optimizer_steps"] == 1
    trainer = make_quiet_trainer(**{**ONE_GROUP, "filter__rollout_filter_value": 2}, env__env_groups=3)
    (row,) = run_steps(trainer, 1)
    # Eight episodes of two groups are filled up to a multiple of lcm(3 groups, mini-batch 4).
    assert (row["groups_kept"], row["batch_size"], row["optimizer_steps"]) == (2, 12, 3)


def test_a_step_with_nothing_kept_trains_nothing_and_is_validated_where_that_is_due(random_folder: Path) -> None:
    # The random model never writes a valid answer: every score is -0.5.
    settings = {"model__path": str(random_folder), "filter__rollout_filter_include_zero": False}
    trainer = PPOTrainer(make_small_config(**settings, trainer__test_freq=2))
    old_weights = copy_weights(trainer)
    outputs = [trainer.step() for _ in range(3)]
    for number, (row, evaluations) in enumerate(((step.row, step.evaluations) for step in outputs), start=1):
        assert (row["groups_kept"], row["kept_ratio"], row["reward_std_kept"], row["zero_std_groups"]) == (0, 0, 0, 2)
        assert row["consecutive_empty_steps"] == number
        assert (row["optimizer_steps"], row["trained_tokens"], row["total_trained_tokens"]) == (0, 0, 0)
        assert row["sampled_tokens"] > 0
        assert not {"pg_loss", "vf_loss", "batch_size", "entropy"} & set(row)
        # The policy is judged by all planned validations, whether or not it could be trained.
        assert ("val_success" in row) == (number > 1)  # at the multiple of 2, and after the last step
        assert [evaluation.step for evaluation in evaluations] == {1: [0, 0], 2: [2], 3: [3]}[number]
    assert copy_weights(trainer).keys() == old_weights.keys()
    assert not has_changed(trainer, old_weights, "actor/")
    assert not has_changed(trainer, old_weights, "critic/")


def test_while_the_critic_warms_up_the_policy_stands_still() -> None:
    trainer = make_quiet_trainer(trainer__critic_warmup=2)
    old_weights = copy_weights(trainer)
    (row,) = run_steps(trainer, 1)
    assert has_changed(trainer, old_weights, "critic/")
    assert not has_changed(trainer, old_weights, "actor/")
    assert row["optimizer_steps"] == 0
    assert "pg_loss" not in row
    # As published, the policy moves from step critic_warmup on.
    assert run_steps(trainer, 1)[0]["optimizer_steps"] == 2
    assert has_changed(trainer, old_weights, "actor/")


def test_the_filters_share_scales_the_policys_gradient() -> None:
    norms = {
        mode: run_steps(make_quiet_trainer(**ONE_GROUP, actor__filter_loss_scaling=mode), 1)[0]["actor_grad_norm"]
        for mode in ("none", "linear", "sqrt")
    }
    assert norms["linear"] == pytest.approx(0.5 * norms["none"], rel=1e-4)
    assert norms["sqrt"] == pytest.approx(0.5**0.5 * norms["none"], rel=1e-4)


def test_a_reference_is_kept_only_where_one_is_needed_and_never_moves() -> None:
    assert make_quiet_trainer().reference is None
    trainer = make_quiet_trainer(actor__use_kl_loss=True, actor__kl_loss_coef=0.1)
    assert trainer.reference is not None
    old_weights = clone_tensors(trainer.reference.state_dict())
    run_steps(trainer, 1)
    assert all(torch.equal(weight, old_weights[name]) for name, weight in trainer.reference.state_dict().items())
    assert not any(weight.requires_grad for weight in trainer.reference.parameters())


@pytest.mark.long
def test_the_kl_at_validations_is_measured_without_a_kl_term_and_changes_nothing_else() -> None:
    settings = {**VALIDATIONS, "actor__lr": 1e-3, "rollout__val_temperature": 0.7, "trainer__test_freq": 2}
    trainer = make_quiet_trainer(**settings, trainer__measure_val_kl=True)
    calls: list[tuple[list[Episode], float]] = []
    recompute = trainer.engine.recompute_logprobs

    def record_call(episodes: list[Episode], temperature: float) -> list[Episode]:
        calls.append((list(episodes), temperature))
        return recompute(episodes, temperature)

    trainer.engine.recompute_logprobs = record_call  # type: ignore[method-assign]
    rows = run_steps(trainer, 2)

    assert [row.keys() & {"val_kl_to_reference", "kl_to_reference"} for row in rows] == [set(), {"val_kl_to_reference"}]
    # Two training batches, then the validation after step 2: that before training is not measured.
    assert [(len(episodes), temperature) for episodes, temperature in calls] == [(8, 1.0), (8, 1.0), (6, 0.7)]
    episodes = calls[-1][0]
    assert trainer.reference is not None
    ref_episodes = recompute_logprobs(trainer.reference, episodes, 0.7, 2, trainer.device)
    pairs = zip(episodes, ref_episodes, strict=True)
    log_ratios = np.concatenate([(one.logprobs.astype(float) - ref.logprobs)[one.mask] for one, ref in pairs])
    expected_kl = np.minimum(np.exp(-log_ratios) + log_ratios - 1, 10).mean()
    assert expected_kl > 1e-4
    assert rows[1].pop("val_kl_to_reference") == pytest.approx(expected_kl, rel=1e-4)

    other_trainer = make_quiet_trainer(**settings)
    assert run_steps(other_trainer, 2) == rows
    assert has_same_weights(trainer, other_trainer)


def test_greedy_validations_measure_no_kl_and_need_no_reference() -> None:
    trainer = make_quiet_trainer(trainer__measure_val_kl=True, rollout__val_temperature=0, trainer__test_freq=1)
    assert trainer.reference is None
    (row,) = run_steps(trainer, 1)
    assert "val_success" in row
    assert "val_kl_to_reference" not in row


@pytest.mark.long
def test_recorded_episodes_are_the_first_of_the_first_levels_and_change_nothing_else() -> None:
    lengths = {"trainer__test_freq": 1, "trainer__total_training_steps": 2, "env__test_env_groups": 2}
    settings = {**VALIDATIONS, **lengths}
    trainer = make_quiet_trainer(**settings, trainer__log_val_generations=2)
    outputs = [trainer.step() for _ in range(2)]
    evaluations = [*outputs[0].evaluations, *outputs[1].evaluations, *trainer.evaluate_final()[1]]

    episode_keys = [
        [(episode.step, episode.level) for episode in evaluation.episodes]
        for evaluation in evaluations
        if (evaluation.split, evaluation.mode) == ("val", "sampled")
    ]
    assert episode_keys == [[(step, 123), (step, 124)] for step in (0, 1, 2)]
    assert sum(len(evaluation.episodes) for evaluation in evaluations) == 6  # none of greedy validations and tests

    other_trainer = make_quiet_trainer(**settings, trainer__log_val_generations=0)
    other_outputs = [other_trainer.step() for _ in range(2)]
    assert [drop_times(output.row) for output in other_outputs] == [drop_times(output.row) for output in outputs]
    assert not any(evaluation.episodes for output in other_outputs for evaluation in output.evaluations)
    assert has_same_weights(trainer, other_trainer)
    assert trainer.config.compute_hash() == other_trainer.config.compute_hash()


@pytest.mark.long
def test_trained_episodes_are_recorded_with_the_mean_advantages_of_their_turns() -> None:
    settings = {"trainer__test_freq": 2, "trainer__total_training_steps": 3}
    trainer = make_quiet_trainer(**settings, trainer__log_train_generations=5)
    batches: list[PreparedBatch] = record_results(trainer, "prepare_batch")
    outputs = [trainer.step() for _ in range(3)]
    # At the validations: every second step, and the last.
    assert [len(output.trained_episodes) for output in outputs] == [0, 5, 5]
    group_size = trainer.config.env.group_size
    assert [episode.rollout for episode in outputs[1].trained_episodes] == [place % group_size for place in range(5)]
    batch, targets, _ = batches[1]
    for row, episode in enumerate(outputs[1].trained_episodes):
        text = "".join(turn.observation + turn.reply for turn in episode.turns)
        assert trainer.codec.decode([batch.tokens[row, : batch.lengths[row]].numpy()], skip_special_tokens=False) == [
            text
        ]
        for number, turn in enumerate(episode.turns):
            values = [
                float(targets.advantages[row, place])
                for place in range(int(batch.lengths[row]))
                if batch.mask[row, place] and batch.turns[row, place] == number
            ]
            assert turn.advantage == pytest.approx(sum(values) / len(values), abs=1e-6)
    # Nothing else depends on it.
    other_trainer = make_quiet_trainer(**settings)
    other_outputs = [other_trainer.step() for _ in range(3)]
    assert [drop_times(output.row) for output in other_outputs] == [drop_times(output.row) for output in outputs]
    assert trainer.config.compute_hash() == other_trainer.config.compute_hash()


def test_an_advantage_that_is_not_finite_is_left_out_of_the_record() -> None:
    trainer = make_quiet_trainer(trainer__test_freq=0)
    episodes = trainer.roll_out(trainer.levels[0], trainer.config.env.group_size, "sampling")
    prepared = trainer.prepare_batch(episodes, 2, 2, np.random.default_rng(0))
    prepared.targets.advantages[0] = math.inf
    first, second = record_trained_episodes(episodes, prepared, 2, 1, trainer.codec, None)
    assert {turn.advantage for turn in first.turns} == {None}
    assert all(isinstance(turn.advantage, float) for turn in second.turns)
    json.dumps([episode.to_line() for episode in (first, second)], allow_nan=False)


OWN_COPIES = """
from trainable.algo import advantages, losses

def reward(level, turns):
    return [turn.reward for turn in turns]

def keep(scores, value, largest):
    return scores >= scores.sort(descending=True).values[int(value) - 1]

def estimator(scores, group_ids, mask):
    return advantages.grpo(scores, group_ids, mask, norm_by_std=True)

def loss(logprobs, old_logprobs, advantages):
    return losses.ppo_clip_loss(logprobs, old_logprobs, advantages, 0.2, 0.28, 3.0).loss

def opposite(logprobs, old_logprobs, advantages):
    return -loss(logprobs, old_logprobs, advantages)

def cost(level, turns):
    return [-turn.reward for turn in turns]
"""


def make_own_trainer(**names: str) -> PPOTrainer:
    """A small trainer with parts of the user; names: of the parts in `OWN_COPIES`, by setting."""
    file = PartFile("copies.py", OWN_COPIES)
    register_file(file)
    settings = {setting: f"copies.py:{name}#{file.digest}" for setting, name in names.items()}
    common = {"algorithm__adv_estimator": "grpo", "filter__rollout_filter_value": 2, "actor__lr": 1e-3}
    return make_quiet_trainer(**{**common, "filter__rollout_filter_strategy": "top_k_abs", **settings})


@pytest.mark.long
def test_copies_of_the_packages_parts_make_the_same_steps() -> None:
    copies = {
        "env__reward": "reward",
        "filter__rollout_filter_strategy": "keep",
        "algorithm__adv_estimator": "estimator",
        "actor__policy_loss": "loss",
    }
    own_rows, rows = run_steps(make_own_trainer(**copies), 2), run_steps(make_own_trainer(), 2)
    clip_columns = {"pg_clipfrac", "pg_clipfrac_lower"}  # only ppo_clip knows what it clips
    assert [{name: row[name] for name in row if name not in clip_columns} for row in rows] == own_rows
    # Each part is in use: with another sign, the rows are others.
    for setting, name in (("actor__policy_loss", "opposite"), ("env__reward", "cost")):
        assert run_steps(make_own_trainer(**{**copies, setting: name}), 2) != own_rows
