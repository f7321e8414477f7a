import random
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch

from tests.fakes.scripted import make_small_config
from tests.fakes.trainers import drop_times, make_quiet_trainer, replay_step
from tests.oracles import mutual_information as oracle
from tests.trainable.diagnostics.conftest import Rollout
from tests.trainable.diagnostics.test_cross_scores import score_naively
from trainable.config.sections import CollapseDetectionConfig
from trainable.diagnostics.collapse import (
    MovingAverages,
    ThoughtPairs,
    diagnose_episodes,
    is_due,
    read_turns,
    sample_first_turn_pairs,
    sample_trajectory_pairs,
)
from trainable.diagnostics.gradient_analysis import DIAGNOSTICS
from trainable.language_model import TRAINER as LANGUAGE_MODEL
from trainable.models.load import load_policy
from trainable.models.qwen2 import Qwen2
from trainable.ppo.trainer import PPOTrainer
from trainable.runs.records import DEFAULT_STEP_COLUMNS, STEP_COLUMNS, TIME_COLUMNS

SAMPLES = 12
COLUMNS = {column.name for column in STEP_COLUMNS if "collapse" in column.name}
REGULAR_COLUMNS = {column.name for column in DEFAULT_STEP_COLUMNS if "collapse" in column.name}
COVERAGE_COLUMNS = {"collapse_valid_thinking_rate"}
FIRST_TURN_COLUMNS = {name for name in COLUMNS if "collapse_first_turn_" in name}
FIRST_TURN_COUNTS = {f"collapse_first_turn_{name}" for name in ("num_total", "num_valid", "valid_rate")}
TRAJECTORY_COLUMNS = {name for name in COLUMNS if "collapse_trajectory_" in name}
TIME_NAMES = {"seconds_collapse_first_turn", "seconds_collapse_multi_turn"}


def diagnose(
    rollout: Rollout, seed: int = 0, averages: Mapping[str, Mapping[str, float]] | None = None, **settings: object
) -> tuple[dict[str, float], dict[str, MovingAverages]]:
    detection_config = CollapseDetectionConfig(**{"num_samples": SAMPLES, "all_quantities": True, **settings})
    model, codec, episodes = rollout
    return diagnose_episodes(model, codec, episodes, detection_config, averages or {}, np.random.default_rng(seed))


def draw_pairs(rollout: Rollout, seed: int = 0) -> dict[str, ThoughtPairs]:
    """Draw both samples from a seed, each with its own generator."""
    first, trajectory = np.random.default_rng(seed).spawn(2)
    turns = read_turns(rollout.episodes, rollout.codec)
    groups = [episode.group for episode in rollout.episodes]
    return {
        "first_turn": sample_first_turn_pairs(turns, groups, SAMPLES, first),
        "trajectory": sample_trajectory_pairs(turns, SAMPLES, trajectory),
    }


def score_pairs(model: Qwen2, pairs: ThoughtPairs) -> list[list[float]]:
    prompts, thoughts = ([tokens.tolist() for tokens in sequences] for sequences in (pairs.prompts, pairs.thoughts))
    scores: list[list[float]] = score_naively(model, prompts, thoughts).tolist()
    return scores


def compute_literal_quantities(model: Qwen2, pairs: ThoughtPairs) -> dict[str, float]:
    """Compute every quantity of a first diagnosis except the control, from full sequences and slow formulas."""
    sums, own_columns, classes = score_pairs(model, pairs), pairs.own_columns.tolist(), pairs.classes.tolist()
    quantities = oracle.mutual_information(sums, [len(thought) for thought in pairs.thoughts], own_columns)
    return {**quantities, **compute_smoothed([quantities]), **oracle.retrieval(sums, own_columns, classes)}


def compute_smoothed(diagnoses: Sequence[Mapping[str, float]]) -> dict[str, float]:
    averages = {}
    for suffix, information in (("", "mi_estimate"), ("_seq", "mi_seq_estimate"), ("_paper", "mi_estimate_paper")):
        std = oracle.moving_average([diagnosis[f"marginal_std{suffix}"] for diagnosis in diagnoses])[-1]
        averages[f"marginal_std_ema{suffix}"] = std
        averages[f"mi_zscore_ema{suffix}"] = diagnoses[-1][information] / (std + 1e-3)
    return averages


def select_sample(row: Mapping[str, float], sample: str) -> dict[str, float]:
    """Select the quantities of a sample under their published names, without the control and the counts."""
    return {
        name.removeprefix(f"collapse_{sample}_").replace("_at_", "@"): value
        for name, value in row.items()
        if name.startswith(f"collapse_{sample}_") and name not in FIRST_TURN_COUNTS and not name.endswith("_shuffled")
    }


# ---------------------------------------------------------------------------- quantities


@pytest.mark.parametrize("sample", ["first_turn", "trajectory"])
def test_every_quantity_is_that_of_whole_sequences(rollout: Rollout, sample: str) -> None:
    expected = compute_literal_quantities(rollout.model, draw_pairs(rollout, 5)[sample])
    quantities = select_sample(diagnose(rollout, 5)[0], sample)
    assert quantities.keys() == expected.keys()
    assert quantities == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_the_score_of_a_thought_is_that_of_the_sampler(rollout: Rollout) -> None:
    """H(Z|X) of first turns equals that of the log-probs from the sampling of the episodes."""
    entropies = []
    for episode, turns in zip(rollout.episodes, read_turns(rollout.episodes, rollout.codec), strict=True):
        if turns[0].is_valid:
            length, start = len(turns[0].thought), len(turns[0].prompt)
            while not np.array_equal(episode.tokens[start : start + length], turns[0].thought):
                start += 1  # skips a blank before the thought
            entropies.append(-float(episode.logprobs[start : start + length].sum(dtype=np.float64)))
    row, _ = diagnose(rollout, num_samples=64)
    assert row["collapse_first_turn_num_valid"] == len(entropies) > 10
    assert row["collapse_first_turn_conditional_entropy_seq_est"] == pytest.approx(np.mean(entropies), rel=1e-4)


@pytest.mark.parametrize(("sample", "episodes"), [("first_turn", 18), ("trajectory", 18), ("first_turn", 7)])
def test_the_shuffled_control_has_its_expected_accuracy(rollout: Rollout, sample: str, episodes: int) -> None:
    """Seven episodes are six of one group and one of another, so the control is high: one group has most thoughts."""
    partial_rollout = rollout._replace(episodes=rollout.episodes[:episodes])
    pairs = draw_pairs(partial_rollout)[sample]
    classes = pairs.classes.tolist()
    own_classes = [classes[column] for column in pairs.own_columns]
    predicted_classes = [classes[oracle.select_top_k(scores, 1)[0]] for scores in score_pairs(rollout.model, pairs)]
    matches = sum(predicted_classes.count(class_id) * own_classes.count(class_id) for class_id in set(classes))
    expected = matches / len(own_classes) ** 2
    row, _ = diagnose(partial_rollout)
    # The accuracy of one shuffle has a standard error of at most about 1 / sqrt(12), the mean of 100 a tenth of that.
    assert row[f"collapse_{sample}_retrieval_shuffled"] == pytest.approx(expected, abs=0.1)
    assert row[f"collapse_{sample}_retrieval_accuracy"] > expected + 0.2


def test_a_policy_without_attention_has_no_information_and_keeps_its_entropy(rollout: Rollout) -> None:
    """This is template collapse: all openings end in the same token, the only one that is seen without attention."""
    blind_model = load_policy("sokoban-tiny", torch.device("cpu")).model
    with torch.no_grad():
        for block in blind_model.model.blocks:
            block.self_attn.o_proj.weight.zero_()
    blind_quantities = select_sample(diagnose(rollout._replace(model=blind_model))[0], "first_turn")
    quantities = select_sample(diagnose(rollout)[0], "first_turn")
    for name in ("mi_estimate", "mi_seq_estimate", "mi_estimate_paper"):
        assert blind_quantities[name] == pytest.approx(0, abs=1e-5)
        assert quantities[name] > 0.1
    assert blind_quantities["reasoning_entropy_est"] > 1


# ---------------------------------------------------------------------------- moving averages


def test_averages_start_at_the_first_std_and_keep_nine_tenths(rollout: Rollout) -> None:
    first_row, first_averages = diagnose(rollout, 0)
    second_row, second_averages = diagnose(rollout, 1, first_averages)
    for sample in ("first_turn", "trajectory"):
        first_quantities, second_quantities = select_sample(first_row, sample), select_sample(second_row, sample)
        assert first_averages[sample] == {name: first_quantities[name] for name in first_averages[sample]}
        expected = compute_smoothed([first_quantities, second_quantities])
        assert {name: second_quantities[name] for name in expected} == pytest.approx(expected, rel=1e-12)
        average = second_averages[sample]["marginal_std"]
        assert average == second_quantities["marginal_std_ema"] != first_quantities["marginal_std"]


def test_a_sample_that_is_not_measured_leaves_its_average_as_it_was(rollout: Rollout) -> None:
    _, averages = diagnose(rollout)
    _, new_averages = diagnose(rollout, 1, averages, first_turn_enabled=False)
    assert new_averages["first_turn"] == averages["first_turn"]
    assert new_averages["trajectory"] != averages["trajectory"]
    assert diagnose(remove_thought_ends(rollout), 1, averages)[1] == averages


# ---------------------------------------------------------------------------- randomness and side effects


def test_switching_a_sample_off_leaves_the_other_as_it_is(rollout: Rollout) -> None:
    row_of_both = drop_times(diagnose(rollout)[0])
    first_turn_row = drop_times(diagnose(rollout, multi_turn_enabled=False)[0])
    trajectory_row = drop_times(diagnose(rollout, first_turn_enabled=False)[0])
    assert row_of_both == {**first_turn_row, **trajectory_row}
    assert first_turn_row.keys() == COVERAGE_COLUMNS | FIRST_TURN_COLUMNS - TIME_NAMES
    assert trajectory_row.keys() == COVERAGE_COLUMNS | TRAJECTORY_COLUMNS
    row, averages = diagnose(rollout, averages={"first_turn": {}}, first_turn_enabled=False, multi_turn_enabled=False)
    turns = [turn for episode in read_turns(rollout.episodes, rollout.codec) for turn in episode]
    assert row == {"collapse_valid_thinking_rate": sum(turn.is_valid for turn in turns) / len(turns)}
    assert averages == {"first_turn": {}}


@pytest.mark.parametrize("training", [True, False])
def test_model_gradients_and_global_randomness_are_left_alone(training: bool) -> None:
    trainer = make_quiet_trainer()
    model, episodes = trainer.model.train(training), replay_step(trainer, 1)
    for number, weight in enumerate(model.parameters()):
        weight.grad = torch.full_like(weight, number) if number % 2 else None
    weights_and_gradients = {name: (weight.clone(), weight.grad) for name, weight in model.named_parameters()}
    gradient_copies = {name: grad.clone() for name, (_, grad) in weights_and_gradients.items() if grad is not None}
    rng_states = torch.get_rng_state(), str(np.random.get_state()), random.getstate()  # noqa: NPY002
    diagnose(Rollout(model, trainer.codec, episodes))
    assert torch.equal(torch.get_rng_state(), rng_states[0])
    assert (str(np.random.get_state()), random.getstate()) == rng_states[1:]  # noqa: NPY002
    assert model.training == training
    for name, weight in model.named_parameters():
        assert torch.equal(weight, weights_and_gradients[name][0])
        assert weight.requires_grad
        assert weight.grad is weights_and_gradients[name][1]
        assert weight.grad is None or torch.equal(weight.grad, gradient_copies[name])


# ---------------------------------------------------------------------------- columns and steps


def test_a_row_has_the_columns_of_the_records(rollout: Rollout) -> None:
    row, averages = diagnose(rollout)
    assert row.keys() == COLUMNS
    assert all(type(value) in (int, float) and np.isfinite(value) for value in row.values())
    assert {name for name in row if name in TIME_COLUMNS} == TIME_NAMES
    assert len(COLUMNS) == 2 * 38 + 4 + 2
    # Without the setting, a row has fewer columns with the same numbers.
    (full_row, full_averages), (regular_row, regular_averages) = (
        diagnose(rollout, 1, averages, all_quantities=each) for each in (True, False)
    )
    assert regular_row.keys() == REGULAR_COLUMNS
    regular_row = drop_times(regular_row)
    assert regular_row == {name: full_row[name] for name in regular_row}
    assert regular_averages == full_averages
    assert len(REGULAR_COLUMNS) == 2 * 10 + 4 + 2


def test_a_run_writes_the_regular_columns_or_all_where_configured() -> None:
    for all_quantities, columns in ((False, REGULAR_COLUMNS), (True, COLUMNS)):
        settings = make_small_config(collapse_detection__all_quantities=all_quantities, trainer__total_training_steps=1)
        row = PPOTrainer(settings, diagnostics=DIAGNOSTICS).step().row
        assert {name for name in row if "collapse" in name} == columns
        assert columns <= LANGUAGE_MODEL.make_empty_row(settings).keys()
        assert (LANGUAGE_MODEL.make_empty_row(settings).keys() >= COLUMNS) == all_quantities


def test_published_keys_are_the_columns_in_the_published_spelling() -> None:
    for column in (column for column in STEP_COLUMNS if "collapse" in column.name):
        if column.name in TIME_NAMES:
            assert f"timing_s/{column.name.removeprefix('seconds_')}_step" == column.published_key
        elif column.name.endswith(("_paper", "_shuffled")):
            assert not column.published_key
        else:
            assert column.published_key.replace("_sample/", "_").replace("/", "_").replace("@", "_at_") == column.name


def test_one_group_has_no_first_turn_sample(rollout: Rollout) -> None:
    one_group = rollout._replace(episodes=[episode for episode in rollout.episodes if episode.group == 0])
    twins = [episode._replace(group=1) for episode in one_group.episodes]
    twin_groups = one_group._replace(episodes=[*one_group.episodes, *twins])
    for group_rollout in (one_group, twin_groups):
        row, averages = diagnose(group_rollout)
        assert row.keys() == COVERAGE_COLUMNS | FIRST_TURN_COUNTS | TRAJECTORY_COLUMNS | TIME_NAMES
        assert row["collapse_first_turn_num_total"] == len(group_rollout.episodes)
        assert averages.keys() == {"trajectory"}


def remove_thought_ends(rollout: Rollout) -> Rollout:
    """Replace the replies by ones that never end their thought."""
    token = rollout.codec.encode(["U"])[0][0]
    episodes = [episode._replace(tokens=np.where(episode.mask, token, episode.tokens)) for episode in rollout.episodes]
    return rollout._replace(episodes=episodes)


def test_without_a_thought_or_a_finite_score_there_is_only_coverage(rollout: Rollout) -> None:
    row, averages = diagnose(remove_thought_ends(rollout))
    assert row.keys() == COVERAGE_COLUMNS | FIRST_TURN_COUNTS | TIME_NAMES
    assert row["collapse_valid_thinking_rate"] == row["collapse_first_turn_num_valid"] == 0
    assert averages == {}
    broken_model = load_policy("sokoban-tiny", torch.device("cpu")).model
    with torch.no_grad():
        broken_model.model.norm.weight.mul_(3e38)
    row, averages = diagnose(rollout._replace(model=broken_model))
    assert row.keys() == COVERAGE_COLUMNS | FIRST_TURN_COUNTS | TIME_NAMES
    assert averages == {}


@pytest.mark.parametrize(
    ("freq", "first_turn", "multi_turn", "due"),
    [
        (5, True, True, [1, 5, 10]),
        (4, True, False, [1, 4, 8]),
        (20, False, True, [1]),
        (1, False, False, []),
        (1, True, True, list(range(1, 11))),
    ],
)
def test_step_1_and_every_so_many_are_due(freq: int, first_turn: bool, multi_turn: bool, due: list[int]) -> None:
    settings = CollapseDetectionConfig(compute_freq=freq, first_turn_enabled=first_turn, multi_turn_enabled=multi_turn)
    assert [step for step in range(1, 11) if is_due(step, settings)] == due
