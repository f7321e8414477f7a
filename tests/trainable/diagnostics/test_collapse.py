import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from tests.fakes.scripted import make_small_config
from tests.fakes.trainers import drop_times, make_quiet_trainer, replay_step, run_steps
from tests.oracles import mutual_information as oracle
from trainable.config.sections import CollapseDetectionConfig
from trainable.diagnostics.collapse import Diagnosis, diagnose_episodes, is_due
from trainable.diagnostics.standard import DIAGNOSTICS
from trainable.diagnostics.thoughts import ThoughtPairs, read_turns, sample_first_turn_pairs, sample_trajectory_pairs
from trainable.envs.sokoban.level_sets import make_training_levels
from trainable.envs.sokoban.prompt import make_prompt_template
from trainable.families import LANGUAGE_MODEL
from trainable.models.codec import Codec
from trainable.models.load import load_policy, make_codec
from trainable.models.qwen2 import Qwen2
from trainable.ppo.trainer import PPOTrainer
from trainable.rollout.episode import Episode
from trainable.rollout.episode_loop import EpisodeLimits, roll_out_episodes
from trainable.rollout.sampler import SamplingParams
from trainable.rollout.torch_sampler import TorchSampler
from trainable.runs.collapse_quantities import EXTRA_QUANTITIES, QUANTITIES
from trainable.runs.records import DEFAULT_STEP_COLUMNS, STEP_COLUMNS, TIME_COLUMNS

SAMPLES = 12
COLUMNS = {column.name for column in STEP_COLUMNS if "collapse" in column.name}
REGULAR = {column.name for column in DEFAULT_STEP_COLUMNS if "collapse" in column.name}
COVERAGE = {"collapse_valid_thinking_rate"}
FIRST = {name for name in COLUMNS if "collapse_first_turn_" in name}
FIRST_COUNTS = {f"collapse_first_turn_{name}" for name in ("num_total", "num_valid", "valid_rate")}
TRAJECTORY = {name for name in COLUMNS if "collapse_trajectory_" in name}
TIMES = {"seconds_collapse_first_turn", "seconds_collapse_multi_turn"}


class Rollout(NamedTuple):
    """A policy and what it played."""

    model: Qwen2
    codec: Codec
    episodes: list[Episode]


@pytest.fixture(scope="module")
def rollout() -> Rollout:
    policy = load_policy("sokoban-tiny", torch.device("cpu"))
    codec = make_codec(policy.tokenizer)
    rules = EpisodeLimits(max_turn=3, max_actions_per_turn=2, max_actions=10, format_penalty=-0.1, context_length=512)
    episodes = roll_out_episodes(
        make_training_levels(0, 1, 3, 10_000),
        6,
        TorchSampler(policy.model),
        make_prompt_template("compact", "grid", 10),
        codec,
        rules,
        SamplingParams(1.0, 24, policy.stop_token),
        np.random.default_rng(0),
    )
    return Rollout(policy.model, codec, episodes)


def diagnosed(
    rollout: Rollout, seed: int = 0, averages: Mapping[str, Mapping[str, float]] | None = None, **settings: object
) -> Diagnosis:
    chosen = CollapseDetectionConfig.model_validate({"num_samples": SAMPLES, "all_quantities": True, **settings})
    model, codec, episodes = rollout
    return diagnose_episodes(model, codec, episodes, chosen, averages or {}, np.random.default_rng(seed))


def drawn(rollout: Rollout, seed: int = 0) -> dict[str, ThoughtPairs]:
    """What the two samples draw from a seed: each has a stream of its own."""
    first, trajectory = np.random.default_rng(seed).spawn(2)
    turns = read_turns(rollout.episodes, rollout.codec)
    groups = [episode.group for episode in rollout.episodes]
    return {
        "first_turn": sample_first_turn_pairs(turns, groups, SAMPLES, first),
        "trajectory": sample_trajectory_pairs(turns, SAMPLES, trajectory),
    }


def whole_sequences(model: Qwen2, pairs: ThoughtPairs) -> list[list[float]]:
    """Log-prob of every thought after every prompt, each pair by itself as one sequence."""
    return [[_score(model, prompt, thought) for prompt in pairs.prompts] for thought in pairs.thoughts]


def _score(model: Qwen2, prompt: np.ndarray, thought: np.ndarray) -> float:
    whole = torch.from_numpy(np.concatenate((prompt, thought)))[None]
    with torch.no_grad():
        states = model.model.compute_hidden_states(whole, torch.arange(len(prompt) - 1, whole.shape[1] - 1))
        logs = model.lm_head(states).log_softmax(-1).double()
    return float(logs.gather(-1, torch.from_numpy(thought)[:, None]).sum())


def literal(model: Qwen2, pairs: ThoughtPairs) -> dict[str, float]:
    """Every quantity of a first diagnosis but the control, by whole sequences and the slow formulas."""
    sums, own, classes = whole_sequences(model, pairs), pairs.own_columns.tolist(), pairs.classes.tolist()
    found = oracle.mutual_information(sums, [len(thought) for thought in pairs.thoughts], own)
    return {**found, **smoothed([found]), **oracle.retrieval(sums, own, classes)}


def smoothed(diagnoses: Sequence[Mapping[str, float]]) -> dict[str, float]:
    found = {}
    for end, information in (("", "mi_estimate"), ("_seq", "mi_seq_estimate"), ("_paper", "mi_estimate_paper")):
        std = oracle.moving_average([one[f"marginal_std{end}"] for one in diagnoses])[-1]
        found[f"marginal_std_ema{end}"] = std
        found[f"mi_zscore_ema{end}"] = diagnoses[-1][information] / (std + 1e-3)
    return found


def of_sample(row: Mapping[str, float], sample: str) -> dict[str, float]:
    """A sample's quantities under their published names, the control and the counts left out."""
    return {
        name.removeprefix(f"collapse_{sample}_").replace("_at_", "@"): value
        for name, value in row.items()
        if name.startswith(f"collapse_{sample}_") and name not in FIRST_COUNTS and not name.endswith("_shuffled")
    }


def close(found: Mapping[str, float], wanted: Mapping[str, float]) -> None:
    assert found.keys() == wanted.keys()
    assert found == pytest.approx(wanted, rel=1e-4, abs=1e-5)


# ---------------------------------------------------------------------------- the numbers


@pytest.mark.parametrize("sample", ["first_turn", "trajectory"])
def test_every_quantity_is_that_of_whole_sequences(rollout: Rollout, sample: str) -> None:
    close(of_sample(diagnosed(rollout, 5).row, sample), literal(rollout.model, drawn(rollout, 5)[sample]))


def test_a_thoughts_own_score_is_what_the_sampler_said(rollout: Rollout) -> None:
    """H(Z|X) of first turns, from the log-probs that were noted while the episodes were played."""
    entropies = []
    for episode, turns in zip(rollout.episodes, read_turns(rollout.episodes, rollout.codec), strict=True):
        if turns[0].is_valid:
            length, start = len(turns[0].thought), len(turns[0].prompt)
            while not np.array_equal(episode.tokens[start : start + length], turns[0].thought):
                start += 1  # a blank before the thought
            entropies.append(-float(episode.logprobs[start : start + length].sum(dtype=np.float64)))
    row = diagnosed(rollout, num_samples=64).row
    assert row["collapse_first_turn_num_valid"] == len(entropies) > 10
    assert row["collapse_first_turn_conditional_entropy_seq_est"] == pytest.approx(np.mean(entropies), rel=1e-4)


@pytest.mark.parametrize(("sample", "episodes"), [("first_turn", 18), ("trajectory", 18), ("first_turn", 7)])
def test_the_control_sits_at_what_dealing_prompts_out_must_give(rollout: Rollout, sample: str, episodes: int) -> None:
    """Seven episodes are six of one group and one of another: the control is high where one group has most thoughts."""
    part = rollout._replace(episodes=rollout.episodes[:episodes])
    pairs = drawn(part)[sample]
    classes = pairs.classes.tolist()
    right = [classes[column] for column in pairs.own_columns]
    told = [classes[oracle.select_top_k(scores, 1)[0]] for scores in whole_sequences(rollout.model, pairs)]
    expected = sum(told.count(one) * right.count(one) for one in set(classes)) / len(right) ** 2
    row = diagnosed(part).row
    # A deal's share has a standard error of at most about 1 / sqrt(12), the mean of 100 a tenth of that.
    assert row[f"collapse_{sample}_retrieval_shuffled"] == pytest.approx(expected, abs=0.1)
    assert row[f"collapse_{sample}_retrieval_accuracy"] > expected + 0.2


def test_a_policy_that_cannot_look_back_tells_nothing_and_keeps_its_entropy(rollout: Rollout) -> None:
    """Template collapse: all openings end in the same token, and without attention that is all that is seen."""
    deaf = load_policy("sokoban-tiny", torch.device("cpu")).model
    with torch.no_grad():
        for block in deaf.model.blocks:
            block.self_attn.o_proj.weight.zero_()
    found, reads = (of_sample(diagnosed(one).row, "first_turn") for one in (rollout._replace(model=deaf), rollout))
    for name in ("mi_estimate", "mi_seq_estimate", "mi_estimate_paper"):
        assert found[name] == pytest.approx(0, abs=1e-5)
        assert reads[name] > 0.1
    assert found["reasoning_entropy_est"] > 1


def test_information_stays_below_its_bounds(rollout: Rollout) -> None:
    for seed in range(3):
        row = diagnosed(rollout, seed).row
        for sample in ("first_turn", "trajectory"):
            found = of_sample(row, sample)
            assert found["mi_estimate_paper"] <= found["mi_estimate"] <= found["mi_upper_bound"]
            assert found["mi_seq_estimate"] <= found["mi_upper_bound"]
            assert found["mi_estimate_paper"] <= found["mi_upper_bound_paper"]


# ---------------------------------------------------------------------------- moving averages


def test_averages_start_at_the_first_std_and_keep_nine_tenths(rollout: Rollout) -> None:
    first = diagnosed(rollout, 0)
    second = diagnosed(rollout, 1, first.averages)
    for sample in ("first_turn", "trajectory"):
        one, two = of_sample(first.row, sample), of_sample(second.row, sample)
        assert first.averages[sample] == {name: one[name] for name in first.averages[sample]}
        assert {name: two[name] for name in smoothed([one])} == pytest.approx(smoothed([one, two]), rel=1e-12)
        assert second.averages[sample]["marginal_std"] == two["marginal_std_ema"] != one["marginal_std"]


def test_averages_are_given_back_and_not_changed(rollout: Rollout) -> None:
    first = diagnosed(rollout, 0)
    kept = json.loads(json.dumps(first.averages))
    again = [diagnosed(rollout, 1, averages) for averages in (first.averages, kept)]
    assert drop_times(again[0].row) == drop_times(again[1].row)
    assert first.averages == kept != again[0].averages
    assert again[0].averages == again[1].averages
    assert all(len(state) == 3 for state in kept.values())


def test_a_sample_that_is_not_measured_leaves_its_average_as_it_was(rollout: Rollout) -> None:
    averages = diagnosed(rollout).averages
    found = diagnosed(rollout, 1, averages, first_turn_enabled=False).averages
    assert found["first_turn"] == averages["first_turn"]
    assert found["trajectory"] != averages["trajectory"]
    assert diagnosed(unclosed(rollout), 1, averages).averages == averages


# ---------------------------------------------------------------------------- randomness, and what is left alone


def test_one_seed_gives_one_row_and_another_another(rollout: Rollout) -> None:
    first, again, other = (diagnosed(rollout, seed) for seed in (3, 3, 4))
    assert drop_times(first.row) == drop_times(again.row)
    assert first.averages == again.averages
    for sample in ("first_turn", "trajectory"):
        name = f"collapse_{sample}_marginal_std"
        assert first.row[name] != other.row[name]


def test_switching_a_sample_off_leaves_the_other_as_it_is(rollout: Rollout) -> None:
    both = drop_times(diagnosed(rollout).row)
    one = drop_times(diagnosed(rollout, multi_turn_enabled=False).row)
    other = drop_times(diagnosed(rollout, first_turn_enabled=False).row)
    assert both == {**one, **other}
    assert one.keys() == COVERAGE | FIRST - TIMES
    assert other.keys() == COVERAGE | TRAJECTORY


@pytest.mark.parametrize("training", [True, False])
def test_model_gradients_and_global_randomness_are_left_alone(training: bool) -> None:
    trainer = make_quiet_trainer()
    model, episodes = trainer.model.train(training), replay_step(trainer, 1)
    for number, weight in enumerate(model.parameters()):
        weight.grad = torch.full_like(weight, number) if number % 2 else None
    before = {name: (weight.clone(), weight.grad) for name, weight in model.named_parameters()}
    copies = {name: grad.clone() for name, (_, grad) in before.items() if grad is not None}
    streams = torch.get_rng_state(), str(np.random.get_state()), random.getstate()  # noqa: NPY002
    diagnosed(Rollout(model, trainer.codec, episodes))
    assert torch.equal(torch.get_rng_state(), streams[0])
    assert (str(np.random.get_state()), random.getstate()) == streams[1:]  # noqa: NPY002
    assert model.training == training
    for name, weight in model.named_parameters():
        assert torch.equal(weight, before[name][0])
        assert weight.requires_grad
        assert weight.grad is before[name][1]
        assert weight.grad is None or torch.equal(weight.grad, copies[name])


def test_a_run_that_is_looked_at_trains_as_one_that_is_not() -> None:
    trainer, other = make_quiet_trainer(), make_quiet_trainer()
    diagnosed(Rollout(trainer.model, trainer.codec, replay_step(trainer, 1)))
    assert run_steps(trainer, 2) == run_steps(other, 2)


# ---------------------------------------------------------------------------- what is there, and when


def test_a_row_has_the_columns_of_the_records(rollout: Rollout) -> None:
    row = diagnosed(rollout).row
    assert row.keys() == COLUMNS
    assert all(type(value) in (int, float) and np.isfinite(value) for value in row.values())
    assert {name for name in row if name in TIME_COLUMNS} == TIMES
    assert len(COLUMNS) == 2 * 38 + 4 + 2


def test_without_the_setting_a_row_has_fewer_columns_with_the_same_numbers(rollout: Rollout) -> None:
    averages = diagnosed(rollout).averages
    full, regular = (diagnosed(rollout, 1, averages, all_quantities=told) for told in (True, False))
    assert regular.row.keys() == REGULAR
    assert drop_times(regular.row) == {name: value for name, value in drop_times(full.row).items() if name in REGULAR}
    assert regular.averages == full.averages
    assert len(REGULAR) == 2 * 10 + 4 + 2


def test_a_run_writes_the_regular_columns_and_all_where_they_are_asked_for() -> None:
    for told, columns in ((False, REGULAR), (True, COLUMNS)):
        settings = make_small_config(collapse_detection__all_quantities=told, trainer__total_training_steps=1)
        row = PPOTrainer(settings, diagnostics=DIAGNOSTICS).step().row
        assert {name for name in row if "collapse" in name} == columns
        assert columns <= LANGUAGE_MODEL.make_empty_row(settings).keys()
        assert (LANGUAGE_MODEL.make_empty_row(settings).keys() >= COLUMNS) == told


def test_the_page_teaches_the_regular_quantities_and_no_other() -> None:
    """Its paragraph on extra quantities is left out."""
    page = (Path(__file__).parents[3] / "docs" / "collapse_diagnostics.md").read_text(encoding="utf-8")
    before, _, rest = page.partition("**Extra quantities.**")
    extra, _, after = rest.partition("**Departures")
    taught = before + after
    named = {*re.findall(r"`([a-z_]+)`", taught)}
    assert {quantity.name for quantity in QUANTITIES} <= named
    assert not {quantity.name for quantity in EXTRA_QUANTITIES} & named
    assert "collapse_detection.all_quantities=True" in extra


def test_published_keys_are_the_columns_in_the_published_spelling() -> None:
    for column in (column for column in STEP_COLUMNS if "collapse" in column.name):
        if column.name in TIMES:
            assert f"timing_s/{column.name.removeprefix('seconds_')}_step" == column.published_key
        elif column.name.endswith(("_paper", "_shuffled")):
            assert not column.published_key
        else:
            assert column.published_key.replace("_sample/", "_").replace("/", "_").replace("@", "_at_") == column.name


def test_nothing_is_diagnosed_with_both_samples_off_but_coverage(rollout: Rollout) -> None:
    found = diagnosed(rollout, averages={"first_turn": {}}, first_turn_enabled=False, multi_turn_enabled=False)
    turns = [turn for episode in read_turns(rollout.episodes, rollout.codec) for turn in episode]
    assert found.row == {"collapse_valid_thinking_rate": sum(turn.is_valid for turn in turns) / len(turns)}
    assert found.averages == {"first_turn": {}}


def test_one_group_has_no_first_turn_sample(rollout: Rollout) -> None:
    alone = rollout._replace(episodes=[episode for episode in rollout.episodes if episode.group == 0])
    twins = alone._replace(episodes=[*alone.episodes, *(episode._replace(group=1) for episode in alone.episodes)])
    for one in (alone, twins):
        found = diagnosed(one)
        assert found.row.keys() == COVERAGE | FIRST_COUNTS | TRAJECTORY | TIMES
        assert found.row["collapse_first_turn_num_total"] == len(one.episodes)
        assert found.averages.keys() == {"trajectory"}


def unclosed(rollout: Rollout) -> Rollout:
    """The rollout with replies that never end their thought."""
    said = rollout.codec.encode(["U"])[0][0]
    episodes = [one._replace(tokens=np.where(one.mask, said, one.tokens)) for one in rollout.episodes]
    return rollout._replace(episodes=episodes)


def test_without_a_thought_only_coverage_is_told(rollout: Rollout) -> None:
    found = diagnosed(unclosed(rollout))
    assert found.row.keys() == COVERAGE | FIRST_COUNTS | TIMES
    assert found.row["collapse_valid_thinking_rate"] == found.row["collapse_first_turn_num_valid"] == 0
    assert found.averages == {}


def test_scores_that_are_not_finite_are_left_out(rollout: Rollout) -> None:
    broken = load_policy("sokoban-tiny", torch.device("cpu")).model
    with torch.no_grad():
        broken.model.norm.weight.mul_(3e38)
    found = diagnosed(rollout._replace(model=broken))
    assert found.row.keys() == COVERAGE | FIRST_COUNTS | TIMES
    assert found.averages == {}


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


# ---------------------------------------------------------------------------- the model's context


def with_context(rollout: Rollout, tokens: int) -> Rollout:
    """The rollout beside its own policy with a context of `tokens`."""
    model = Qwen2(replace(rollout.model.shape, max_position_embeddings=tokens))
    model.load_state_dict(rollout.model.state_dict())
    return rollout._replace(model=model)


def lengthened(episode: Episode, count: int) -> Episode:
    """The episode with its first token given `count` times more."""
    return episode._replace(
        tokens=np.concatenate((np.repeat(episode.tokens[:1], count), episode.tokens)),
        mask=np.concatenate((np.zeros(count, dtype=bool), episode.mask)),
        turns=np.concatenate((np.zeros(count, dtype=np.int64), episode.turns)),
    )


def kept(pairs: ThoughtPairs, context: int) -> ThoughtPairs:
    """The pairs whose prompt leaves room for the longest thought, one by one."""
    longest = max(len(thought) for thought in pairs.thoughts)
    columns = [number for number, prompt in enumerate(pairs.prompts) if len(prompt) + longest <= context]
    rows = [row for row, column in enumerate(pairs.own_columns.tolist()) if column in columns]
    return ThoughtPairs(
        tuple(pairs.prompts[column] for column in columns),
        tuple(pairs.thoughts[row] for row in rows),
        np.array([columns.index(pairs.own_columns[row]) for row in rows]),
        pairs.classes[columns],
    )


def test_prompts_without_room_for_the_longest_thought_are_left_out_with_their_own(rollout: Rollout) -> None:
    longer = rollout._replace(episodes=[lengthened(one, 60 * (one.group == 1)) for one in rollout.episodes])
    for sample, pairs in drawn(longer).items():
        longest = max(len(thought) for thought in pairs.thoughts)
        sizes = sorted({len(prompt) + longest for prompt in pairs.prompts})
        fits, fits_not = sizes[-2:]
        wanted = literal(longer.model, kept(pairs, fits))
        assert 2 <= len(kept(pairs, fits).prompts) < len(pairs.prompts)
        for context in (fits, fits_not - 1):
            close(of_sample(diagnosed(with_context(longer, context)).row, sample), wanted)
        close(of_sample(diagnosed(with_context(longer, fits_not)).row, sample), literal(longer.model, pairs))


def test_a_context_without_room_for_any_prompt_gives_no_quantities(rollout: Rollout) -> None:
    assert diagnosed(with_context(rollout, 8)).row.keys() == COVERAGE | FIRST_COUNTS | TIMES
