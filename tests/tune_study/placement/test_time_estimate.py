import math
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.fakes.plans import plan_study, read_shape
from tests.tune_study.placement.test_memory_plan import FOUR_GPUS, H100, NO_MODELS, make_study_plan
from trainable.config.run_config import RunConfig, apply_overrides
from trainable.models.qwen2_shape import estimate_forward_flops
from trainable.rollout.kv_cache_size import compute_max_tokens
from tune_study.placement import time_estimate
from tune_study.placement.memory import ModelShape
from tune_study.placement.memory_plan import plan_memory
from tune_study.placement.resources import TORCH_SETTINGS, preflight
from tune_study.placement.time_estimate import (
    GpuRates,
    estimate_cpu_run_seconds,
    estimate_run_seconds,
    estimate_sampling_seconds,
    estimate_update_flops,
    format_estimate,
    format_time_line,
)
from tune_study.plan.study_plan import ResourcePlan

SIZES = {"hidden_size": 4, "intermediate_size": 6, "num_attention_heads": 2, "num_key_value_heads": 1}
SMALL = ModelShape.model_validate({**SIZES, "vocab_size": 10, "num_hidden_layers": 2, "tie_word_embeddings": True})
H100_RATES = GpuRates(989e12, 3.35e12)


def test_every_weight_of_the_trunk_multiplies_every_token() -> None:
    # Two blocks with their projections, biases of queries, keys and values, and gains; and the gain of the final norm.
    block = 4 * 4 + 4 * 2 + 4 * 2 + 4 * 4 + 3 * 4 * 6 + (4 + 2 + 2) + (4 + 4)
    assert SMALL.block_weights == (block + 4 / 2, 0)
    assert SMALL.model_copy(update={"tie_word_embeddings": False}).block_weights == SMALL.block_weights


def estimate_pass_flops(rows: int, tokens: int, with_head: bool) -> float:
    return rows * estimate_forward_flops(SMALL, [tokens], tokens, SMALL.vocab_size if with_head else 0)


# Settings, and passes of policy and critic in an update, of which the published one has a pass for the log-probs of the
# tokens that vLLM sampled.
PASSES: list[tuple[Mapping[str, object], int, int]] = [
    ({}, 4 + 1, 5),
    ({"rollout.recompute_logprobs": False}, 4, 5),
    ({"rollout.name": "torch"}, 4, 5),
    ({"rollout.name": "torch", "rollout.weight_noise": 0.1}, 4 + 1, 5),
    ({"model.enable_gradient_checkpointing": False}, 3 + 1, 4),
    ({"actor.use_kl_loss": True}, 5 + 1, 5),
    ({"algorithm.adv_estimator": "grpo", "actor.ppo_epochs": 2}, 8 + 1, 0),
    ({"actor.policy_loss": "tpo", "algorithm.adv_estimator": "group_skill", "actor.ppo_epochs": 2}, 10 + 1, 0),
    ({"critic.shared_trunk": True}, 4 + 1, 1),
    ({"model.lora_rank": 8}, 3 + 1, 4),
]


@pytest.mark.parametrize(("settings", "policy_passes", "critic_passes"), PASSES)
def test_passes_of_an_update_by_hand(settings: Mapping[str, object], policy_passes: int, critic_passes: int) -> None:
    flops = policy_passes * estimate_pass_flops(128, 3600, True) + critic_passes * estimate_pass_flops(128, 3600, False)
    assert estimate_update_flops(SMALL, apply_overrides(RunConfig(), settings)) == pytest.approx(flops)


@pytest.mark.parametrize(("sampler", "weight_bytes", "waves"), [("vllm", 2, 3), ("torch", 4, 1)])
def test_sampling_by_hand(sampler: str, weight_bytes: int, waves: int) -> None:
    config = apply_overrides(RunConfig(), {"rollout.name": sampler})
    n_parameters, n_sequences = 2 * (16 + 8 + 8 + 16 + 72 + 8 + 8) + 4 + 40, 600
    cache_bytes = 2 * 2 * 1 * 2 * 2  # keys and values, blocks, key heads, channels, bytes
    read_bytes = waves * weight_bytes * n_parameters + n_sequences * 1800 * cache_bytes
    expected = 2000 * read_bytes / (0.5 * H100_RATES.memory_bandwidth)
    expected += estimate_pass_flops(n_sequences, 3600, True) / (0.4 * H100_RATES.peak_flops_per_s)
    assert estimate_sampling_seconds(SMALL, config, n_sequences, H100_RATES) == pytest.approx(expected)
    ranks = apply_overrides(config, {"trainer.n_gpus_per_node": 4})
    assert estimate_sampling_seconds(SMALL, ranks, 4 * n_sequences, H100_RATES) == pytest.approx(expected)


def test_each_round_of_branching_samples_after_the_one_before() -> None:
    changes = {"env.group_size": 10, "rollout.ts_n": 2, "rollout.ts_l": 2, "env.test_env_groups": 0}
    config = apply_overrides(RunConfig(), changes)
    plain = apply_overrides(config, {"rollout.ts_n": 0})
    # Eight levels with two trees each.
    difference = estimate_run_seconds(SMALL, config, H100_RATES) - estimate_run_seconds(SMALL, plain, H100_RATES)
    rounds = [estimate_sampling_seconds(SMALL, config, rows, H100_RATES) for rows in (16, 32, 32, 80)]
    assert difference == pytest.approx(400 * (sum(rounds[:3]) - rounds[3]))
    assert difference > 0


def test_a_run_is_its_steps_validations_and_tests() -> None:
    evaluation_seconds = estimate_sampling_seconds(SMALL, RunConfig(), 512, H100_RATES)
    update_seconds = estimate_update_flops(SMALL, RunConfig()) / (0.4 * H100_RATES.peak_flops_per_s)
    step_seconds = update_seconds + estimate_sampling_seconds(SMALL, RunConfig(), 128, H100_RATES)
    # Sampled and greedy before training, sampled every 10 of 400 steps, greedy at the end, and both on the test levels.
    seconds = estimate_run_seconds(SMALL, RunConfig(), H100_RATES)
    assert seconds == pytest.approx(400 * step_seconds + (2 + 40 + 1 + 2) * evaluation_seconds)
    # At most four batches per step.
    refill = apply_overrides(
        RunConfig(), {"filter.max_num_gen_batches": 4, "filter.rollout_filter_include_zero": False}
    )
    sampling_seconds = estimate_sampling_seconds(SMALL, RunConfig(), 128, H100_RATES)
    recomputing_seconds = (estimate_update_flops(SMALL, refill) - estimate_update_flops(SMALL, RunConfig())) / (
        0.4 * H100_RATES.peak_flops_per_s
    )
    assert recomputing_seconds > 0
    expected = seconds + 400 * (3 * sampling_seconds + recomputing_seconds)
    assert estimate_run_seconds(SMALL, refill, H100_RATES) == pytest.approx(expected)
    half = apply_overrides(RunConfig(), {"trainer.n_gpus_per_node": 0.5})
    assert estimate_run_seconds(SMALL, half, H100_RATES) == pytest.approx(2 * seconds)


def test_a_longer_name_comes_before_what_it_holds() -> None:
    names = list(time_estimate._GPU_RATES)
    assert not [
        (name, later_name) for i, name in enumerate(names) for later_name in names[i + 1 :] if name in later_name
    ]


@pytest.mark.parametrize(
    ("settings", "further_gpus", "has_line"),
    [
        ({}, [], True),
        ({}, ["Tesla T4"], False),
        ({"trainer.strategy": "deepspeed", "trainer.offload_optimizer": True}, [], False),
        ({"model.dtype": "float32"}, [], False),
    ],
)
def test_the_time_on_gpus_of_known_rates(
    settings: Mapping[str, object], further_gpus: list[str], has_line: bool
) -> None:
    plan = make_study_plan(settings)
    resource_plan = preflight(plan, None, FOUR_GPUS, 2, None, is_real=False)
    gpu_plan = plan_memory(plan, resource_plan, H100, NO_MODELS)
    assert gpu_plan is not None
    line = format_time_line(plan, resource_plan, gpu_plan, ["NVIDIA H100 80GB HBM3"] * 4 + further_gpus)
    seconds = estimate_run_seconds(gpu_plan.shape, gpu_plan.config, H100_RATES) * math.ceil(len(plan.runs) / 4)
    expected = f"Time: at most about {format_estimate(seconds)} for these 6 runs, with conversations of full length"
    assert line == (expected if has_line else "")
    assert format_time_line(plan, resource_plan, gpu_plan, []) == ""


@pytest.mark.parametrize("is_compiled", [True, False])
def test_a_run_on_a_core_is_its_steps_validations_and_tests(is_compiled: bool) -> None:
    settings = {"trainer.total_training_steps": 60, "trainer.test_freq": 20}
    plan = plan_study(Path("/out"), **settings, **({} if is_compiled else TORCH_SETTINGS))
    config, shape = plan.runs[0].ppo_config, read_shape("sokoban-tiny")
    tokens = round(time_estimate.TYPICAL_FILL * compute_max_tokens(config))
    # 60 steps of 8 x 16 episodes; validations twice before step 1, at 20, 40 and 60, and at the end; two tests.
    episodes = 60 * config.env.env_groups * config.env.group_size
    episodes += 6 * config.env.val_env_groups + 2 * config.env.test_env_groups
    sampling_flops = episodes * estimate_forward_flops(shape, [tokens], tokens, shape.vocab_size)
    expected = time_estimate.RUN_START_SECONDS + sampling_flops / time_estimate.SAMPLING_RATES[is_compiled]
    expected += 0.5 * 60 * estimate_update_flops(shape, config) / time_estimate.PASS_RATES[is_compiled]
    assert estimate_cpu_run_seconds(plan.runs[0], plan.study.family) == pytest.approx(expected)


def test_a_run_takes_less_time_with_threads_and_a_large_model_with_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    def estimate(**settings: object) -> float:
        plan = plan_study(Path("/out"), **TORCH_SETTINGS, **settings)
        return estimate_cpu_run_seconds(plan.runs[0], plan.study.family) - time_estimate.RUN_START_SECONDS

    assert estimate(trainer__num_threads=2) == pytest.approx(estimate() / 2)
    monkeypatch.setattr(time_estimate, "PASS_RATES", {False: time_estimate.LARGE_MODEL_RATE})
    monkeypatch.setattr(time_estimate, "SAMPLING_RATES", {False: time_estimate.LARGE_MODEL_RATE})
    seconds = estimate()
    monkeypatch.undo()
    monkeypatch.setattr(time_estimate, "LARGE_MODEL", 100_000)  # the policy has more parameters
    assert estimate() == pytest.approx(seconds)
    assert estimate(model__dtype="bfloat16") == pytest.approx(seconds / time_estimate.HALF_PRECISION_GAIN)


def format_cpu_line(resource_plan: ResourcePlan, seeds: int = 3, study: str = "kl", **settings: object) -> str:
    return format_time_line(plan_study(Path("/out"), None, seeds, study=study, **settings), resource_plan, None, [])


def read_minutes(line: str, runs: int) -> float:
    return float(line.removeprefix("Time: about ").split(f" min for these {runs} runs, estimated from measurements")[0])


def test_the_plan_of_a_laptop_study_has_an_estimate_of_time() -> None:
    """Eighteen runs took 479 seconds on two cores (benchmarks/RESULTS.md)."""
    resource_plan = preflight(plan_study(Path("/out"), None, 3), None, (), 2, None, is_real=False)
    minutes = read_minutes(format_cpu_line(resource_plan), 18)
    assert 0.5 * 479 < 60 * minutes < 2 * 479
    one_at_a_time = format_cpu_line(resource_plan._replace(max_concurrent=1))
    assert read_minutes(one_at_a_time, 18) == pytest.approx(2 * minutes, abs=1)
    # Three trials of three runs took 26, 68 and 70 s.
    assert 0.5 * 82 < 60 * read_minutes(format_cpu_line(resource_plan, study="influence"), 9) < 2 * 82
    assert format_cpu_line(resource_plan, 1, "sandbox", task="lm_bandit") == ""  # nothing was measured
    assert format_cpu_line(resource_plan, 1, model__path="nosuch") == ""
