from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from search_spaces.catalog import STUDIES
from search_spaces.declaration.presets import PRESETS
from tests.strategies.examples import draw_examples
from tests.tune_study.placement.test_memory_plan import FOUR_GPUS, H100, NO_MODELS, make_study_plan
from trainable.config.run_config import RunConfig, apply_overrides
from trainable.rollout.kv_cache_size import compute_max_tokens
from tune_study.placement import time_estimate
from tune_study.placement.memory_plan import plan_memory
from tune_study.placement.model_size import ModelShape, read_model_shape
from tune_study.placement.resources import preflight
from tune_study.placement.samplers import TORCH_SETTINGS
from tune_study.placement.time_estimate import (
    GpuRates,
    estimate_cpu_run_seconds,
    estimate_forward_flops,
    estimate_offload_seconds,
    estimate_run_seconds,
    estimate_step_seconds,
    estimate_update_flops,
    find_rates,
)
from tune_study.plan.study_plan import make_plan

LAPTOP = PRESETS["laptop"].settings

SMALL = ModelShape(
    vocab_size=10,
    hidden_size=4,
    intermediate_size=6,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    tie_word_embeddings=True,
)
H100_RATES = GpuRates(989e12, 3.35e12)


def count_flops(tokens: int, with_head: bool) -> int:
    """Count the multiplications and additions of one sequence term by term; biases and gains as in the formula."""
    total = 0
    for _ in range(SMALL.num_hidden_layers):
        projections = 4 * 4 + 4 * 2 + 4 * 2 + 4 * 4 + 3 * 4 * 6 + (4 + 2 + 2) + (4 + 4)
        total += 2 * tokens * projections
        for query in range(tokens):
            total += 2 * 2 * (query + 1) * 4  # attention scores and weighted values, 4 channels in total
    total += 2 * tokens * 4  # the gain of the final norm
    return total + (2 * tokens * 4 * 10 if with_head else 0)


@pytest.mark.parametrize("with_head", [True, False])
@pytest.mark.parametrize("tokens", [1, 2, 7])
def test_operations_of_a_forward_pass_by_counting(tokens: int, with_head: bool) -> None:
    assert estimate_forward_flops(SMALL, 3, tokens, with_head) == 3 * count_flops(tokens, with_head)
    untied = SMALL.model_copy(update={"tie_word_embeddings": False})
    assert estimate_forward_flops(untied, 3, tokens, with_head) == 3 * count_flops(tokens, with_head)


def test_passes_of_an_update_by_hand() -> None:
    def estimate_flops(**changes: object) -> float:
        return estimate_update_flops(
            SMALL, apply_overrides(RunConfig(), {key.replace("__", "."): value for key, value in changes.items()})
        )

    policy, critic = estimate_forward_flops(SMALL, 128, 3600, True), estimate_forward_flops(SMALL, 128, 3600, False)
    # The update, and the log-probs of the tokens that vLLM sampled.
    assert estimate_flops() == pytest.approx((4 + 1) * policy + 5 * critic)
    assert estimate_flops(rollout__recompute_logprobs=False) == pytest.approx(4 * policy + 5 * critic)
    assert estimate_flops(rollout__name="torch") == pytest.approx(4 * policy + 5 * critic)
    assert estimate_flops(rollout__name="torch", rollout__weight_noise=0.1) == estimate_flops()
    assert estimate_flops(model__enable_gradient_checkpointing=False) == pytest.approx((3 + 1) * policy + 4 * critic)
    assert estimate_flops(actor__use_kl_loss=True) == pytest.approx((5 + 1) * policy + 5 * critic)
    assert estimate_flops(algorithm__adv_estimator="grpo", actor__ppo_epochs=2) == pytest.approx((8 + 1) * policy)
    tpo = {"actor__policy_loss": "tpo", "algorithm__adv_estimator": "group_skill", "actor__ppo_epochs": 2}
    assert estimate_flops(**tpo) == pytest.approx((10 + 1) * policy)
    assert estimate_flops(critic__shared_trunk=True) == pytest.approx((4 + 1) * policy + critic)
    assert estimate_flops(model__lora_rank=8) == pytest.approx((3 + 1) * policy + 4 * critic)


@pytest.mark.parametrize(("sampler", "weight_bytes", "waves"), [("vllm", 2, 3), ("torch", 4, 1)])
def test_sampling_by_hand(sampler: str, weight_bytes: int, waves: int) -> None:
    config = apply_overrides(RunConfig(), {"rollout.name": sampler})
    n_parameters, n_sequences = 2 * (16 + 8 + 8 + 16 + 72 + 8 + 8) + 4 + 40, 600
    cache_bytes = 2 * 2 * 1 * 2 * 2  # keys and values, blocks, key heads, channels, bytes
    read_bytes = waves * weight_bytes * n_parameters + n_sequences * 1800 * cache_bytes
    expected = 2000 * read_bytes / (0.5 * H100_RATES.memory_bandwidth) + estimate_forward_flops(
        SMALL, n_sequences, 3600, True
    ) / (0.4 * H100_RATES.peak_flops_per_s)
    assert time_estimate.estimate_sampling_seconds(SMALL, config, n_sequences, H100_RATES) == pytest.approx(expected)


def test_a_run_is_its_steps_validations_and_tests() -> None:
    evaluation_seconds = time_estimate.estimate_sampling_seconds(SMALL, RunConfig(), 512, H100_RATES)
    update_seconds = estimate_update_flops(SMALL, RunConfig()) / (0.4 * H100_RATES.peak_flops_per_s)
    step_seconds = update_seconds + time_estimate.estimate_sampling_seconds(SMALL, RunConfig(), 128, H100_RATES)
    assert estimate_step_seconds(SMALL, RunConfig(), H100_RATES) == pytest.approx(step_seconds)
    # Sampled and greedy before training, sampled every 10 of 400 steps, greedy at the end, and both on the test levels.
    assert estimate_run_seconds(SMALL, RunConfig(), H100_RATES) == pytest.approx(
        400 * step_seconds + (2 + 40 + 1 + 2) * evaluation_seconds
    )


@pytest.mark.parametrize(
    ("name", "tera"),
    [("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA H200", 989), ("NVIDIA A100-SXM4-40GB", 312)],
)
def test_cards_are_known_by_their_names(name: str, tera: float) -> None:
    rates = find_rates(name)
    assert rates is not None
    assert rates.peak_flops_per_s == tera * 1e12


def test_a_longer_name_comes_before_what_it_holds() -> None:
    names = [name for name, _ in time_estimate._GPU_RATES]
    assert not [
        (earlier_name, later_name)
        for i, earlier_name in enumerate(names)
        for later_name in names[i + 1 :]
        if earlier_name in later_name
    ]


def test_a_card_of_unknown_rates_has_no_estimate() -> None:
    assert find_rates("Tesla T4") is None
    plan = make_study_plan({})
    resource_plan = preflight(plan, None, FOUR_GPUS, 2, None, is_real=False)
    gpu_plan = plan_memory(plan, resource_plan, H100, NO_MODELS)
    assert gpu_plan is not None
    assert time_estimate.format_time_line(gpu_plan, plan, resource_plan, ()) is None
    assert time_estimate.format_time_line(gpu_plan, plan, resource_plan, ("NVIDIA H100 80GB HBM3", "Tesla T4")) is None
    line = time_estimate.format_time_line(gpu_plan, plan, resource_plan, ("NVIDIA H100 80GB HBM3",) * 4)
    assert line is not None
    assert "an estimate for conversations of 3600 tokens, at 40% of 989 TFLOP/s and 50% of 3.35 TB/s" in line


@draw_examples(30)
@given(st.sampled_from([0.25, 0.5, 1.0]), st.integers(1, 4))
def test_shares_of_a_card_take_longer_and_ranks_share_the_work(share: float, ranks: int) -> None:
    shape = read_model_shape("Qwen/Qwen2.5-0.5B", {})
    assert shape is not None
    full_card_seconds = estimate_step_seconds(shape, RunConfig(), H100_RATES)
    config = apply_overrides(RunConfig(), {"trainer.n_gpus_per_node": share})
    assert estimate_step_seconds(shape, config, H100_RATES) == pytest.approx(full_card_seconds / share)
    ranks_seconds = estimate_step_seconds(
        shape, apply_overrides(RunConfig(), {"trainer.n_gpus_per_node": ranks}), H100_RATES
    )
    assert full_card_seconds / ranks <= ranks_seconds * (1 + 1e-9) <= full_card_seconds * (1 + 1e-9)
    assert estimate_run_seconds(shape, config, H100_RATES) > 400 * full_card_seconds / share


def test_offloading_costs_time() -> None:
    policy, critic = 3_085_938_688, 3_085_938_688 + 2049
    shape = read_model_shape("Qwen/Qwen2.5-3B", {})
    assert shape is not None
    assert estimate_offload_seconds(shape, RunConfig()) == 0
    changes = {"trainer.strategy": "deepspeed", "trainer.offload_optimizer": True}
    offloaded = apply_overrides(RunConfig(), changes)
    # 128 sequences in mini-batches of 32 are four optimizer steps of each network.
    seconds = estimate_offload_seconds(shape, offloaded)
    assert seconds == pytest.approx(4 * (policy + critic) * 6.8e-9)
    slower = estimate_step_seconds(shape, offloaded, H100_RATES) - estimate_step_seconds(shape, RunConfig(), H100_RATES)
    assert slower == pytest.approx(seconds)


def test_a_run_on_a_core_is_its_steps_validations_and_tests() -> None:
    config = apply_overrides(RunConfig(), {**LAPTOP, "trainer.total_training_steps": 60, "trainer.test_freq": 20})
    tokens = round(time_estimate.TYPICAL_FILL * compute_max_tokens(config))
    # 60 steps of 8 x 16 episodes; validations twice before step 1, at 20, 40 and 60, and at the end; two tests.
    episodes = 60 * config.env.env_groups * config.env.group_size
    episodes += 6 * config.env.val_env_groups + 2 * config.env.test_env_groups
    for rates, settings in (
        (time_estimate.COMPILED_RATES, {}),
        (time_estimate.TORCH_RATES, {"rollout.name": "torch", "model.compiled_passes": False}),
    ):
        expected = time_estimate.RUN_START_SECONDS
        expected += estimate_forward_flops(SMALL, episodes, tokens, True) / rates.sampling
        expected += 0.5 * 60 * estimate_update_flops(SMALL, config) / rates.passes
        assert estimate_cpu_run_seconds(SMALL, apply_overrides(config, settings)) == pytest.approx(expected)


def test_the_plan_of_a_laptop_study_has_an_estimate_of_time() -> None:
    """Eighteen runs took 479 seconds on two cores (benchmarks/RESULTS.md)."""
    plan = make_plan(STUDIES["kl"], "laptop", "a test", {}, None, 3, Path("/out"))
    resource_plan = preflight(plan, None, (), 2, None, is_real=False)
    line = time_estimate.format_cpu_time_line(plan, resource_plan)
    assert line is not None
    minutes = float(line.split("per run, ")[1].split(" min for these 18 runs")[0])
    assert 0.5 * 479 < 60 * minutes < 2 * 479
    one_at_a_time = time_estimate.format_cpu_time_line(plan, resource_plan._replace(max_concurrent=1))
    assert one_at_a_time is not None
    assert float(one_at_a_time.split("per run, ")[1].split(" min")[0]) == pytest.approx(2 * minutes, abs=1)
    assert line.endswith("twice as long")
    half = make_plan(
        STUDIES["kl"], "laptop", "a test", {"model.dtype": "float16", **TORCH_SETTINGS}, None, 1, Path("/out")
    )
    half_line = time_estimate.format_cpu_time_line(half, resource_plan)
    assert half_line is not None
    assert half_line.endswith("; measured in float32, and a CPU is slower in float16")
    # Three trials of three runs took 26, 68 and 70 s.
    sandbox = make_plan(STUDIES["influence"], "laptop", "a test", {}, None, 3, Path("/out"))
    sandbox_line = time_estimate.format_cpu_time_line(sandbox, resource_plan)
    assert sandbox_line is not None
    assert 0.5 * 82 < 60 * float(sandbox_line.split("per run, ")[1].split(" min for these 9 runs")[0]) < 2 * 82
    unmeasured = make_plan(STUDIES["sandbox"], "laptop", "a test", {"task": "lm_bandit"}, None, 1, Path("/out"))
    assert time_estimate.format_cpu_time_line(unmeasured, resource_plan) is None
    unknown = make_plan(STUDIES["kl"], "laptop", "a test", {"model.path": "nosuch"}, None, 1, Path("/out"))
    assert time_estimate.format_cpu_time_line(unknown, resource_plan) is None
