import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tune_study.placement.test_memory_plan import FOUR, H100, NO_MODELS, plan_of
from trainable.config.run_config import RunConfig, apply_overrides
from tune_study.placement import time_estimate
from tune_study.placement.memory_plan import plan_memory
from tune_study.placement.model_size import ModelShape, read_model_shape
from tune_study.placement.resources import preflight
from tune_study.placement.time_estimate import (
    GpuRates,
    estimate_forward_flops,
    estimate_run_seconds,
    estimate_step_seconds,
    estimate_update_flops,
    find_rates,
)

SMALL = ModelShape(
    vocab_size=10,
    hidden_size=4,
    intermediate_size=6,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    tie_word_embeddings=True,
)
H = GpuRates(989e12, 3.35e12)


def counted(tokens: int, with_head: bool) -> int:
    """Multiplications and additions of one sequence, product by product; biases and gains as in the formula."""
    total = 0
    for _ in range(SMALL.num_hidden_layers):
        projections = 4 * 4 + 4 * 2 + 4 * 2 + 4 * 4 + 3 * 4 * 6 + (4 + 2 + 2) + (4 + 4)
        total += 2 * tokens * projections
        for query in range(tokens):
            total += 2 * 2 * (query + 1) * 4  # scores and mixture, 4 channels in all
    total += 2 * tokens * 4  # the final norm's gain
    return total + (2 * tokens * 4 * 10 if with_head else 0)


@pytest.mark.parametrize("with_head", [True, False])
@pytest.mark.parametrize("tokens", [1, 2, 7])
def test_operations_of_a_forward_pass_by_counting(tokens: int, with_head: bool) -> None:
    assert estimate_forward_flops(SMALL, 3, tokens, with_head) == 3 * counted(tokens, with_head)
    untied = SMALL.model_copy(update={"tie_word_embeddings": False})
    assert estimate_forward_flops(untied, 3, tokens, with_head) == 3 * counted(tokens, with_head)


def test_passes_of_an_update_by_hand() -> None:
    def operations(**changes: object) -> float:
        return estimate_update_flops(
            SMALL, apply_overrides(RunConfig(), {k.replace("__", "."): v for k, v in changes.items()})
        )

    policy, critic = estimate_forward_flops(SMALL, 128, 3600, True), estimate_forward_flops(SMALL, 128, 3600, False)
    assert operations() == pytest.approx(4 * policy + 5 * critic)
    assert operations(model__enable_gradient_checkpointing=False) == pytest.approx(3 * policy + 4 * critic)
    assert operations(actor__use_kl_loss=True) == pytest.approx(5 * policy + 5 * critic)
    assert operations(algorithm__adv_estimator="grpo", actor__ppo_epochs=2) == pytest.approx(8 * policy)
    tpo = {"actor__policy_loss": "tpo", "algorithm__adv_estimator": "group_skill", "actor__ppo_epochs": 2}
    assert operations(**tpo) == pytest.approx(10 * policy)
    assert operations(critic__shared_trunk=True) == pytest.approx(4 * policy + critic)
    assert operations(model__lora_rank=8) == pytest.approx(3 * policy + 4 * critic)


@pytest.mark.parametrize(("sampler", "weight", "waves"), [("vllm", 2, 3), ("torch", 4, 1)])
def test_sampling_by_hand(sampler: str, weight: int, waves: int) -> None:
    config = apply_overrides(RunConfig(), {"rollout.name": sampler})
    parameters, rows = 2 * (16 + 8 + 8 + 16 + 72 + 8 + 8) + 4 + 40, 600
    cache = 2 * 2 * 1 * 2 * 2  # keys and values, blocks, key heads, channels, bytes
    read = waves * weight * parameters + rows * 1800 * cache
    expected = 2000 * read / (0.5 * H.memory_bandwidth) + estimate_forward_flops(SMALL, rows, 3600, True) / (
        0.4 * H.peak_flops_per_s
    )
    assert time_estimate.estimate_sampling_seconds(SMALL, config, rows, H) == pytest.approx(expected)


def test_a_run_is_its_steps_validations_and_tests() -> None:
    look = time_estimate.estimate_sampling_seconds(SMALL, RunConfig(), 512, H)
    update = estimate_update_flops(SMALL, RunConfig()) / (0.4 * H.peak_flops_per_s)
    step = update + time_estimate.estimate_sampling_seconds(SMALL, RunConfig(), 128, H)
    assert estimate_step_seconds(SMALL, RunConfig(), H) == pytest.approx(step)
    # Sampled and greedy before training, every tenth of 400 steps, greedy at the end; the test levels both ways.
    assert estimate_run_seconds(SMALL, RunConfig(), H) == pytest.approx(400 * step + (2 + 40 + 1 + 2) * look)


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
    assert not [(a, b) for i, a in enumerate(names) for b in names[i + 1 :] if a in b]


def test_a_card_of_unknown_rates_has_no_estimate() -> None:
    assert find_rates("Tesla T4") is None
    plan = plan_of({})
    resource_plan = preflight(plan, None, FOUR, 2, None, is_real=False)
    found = plan_memory(plan, resource_plan, H100, NO_MODELS)
    assert found is not None
    assert time_estimate.format_time_line(found, plan, resource_plan, ()) is None
    assert time_estimate.format_time_line(found, plan, resource_plan, ("NVIDIA H100 80GB HBM3", "Tesla T4")) is None
    said = time_estimate.format_time_line(found, plan, resource_plan, ("NVIDIA H100 80GB HBM3",) * 4)
    assert said is not None
    assert "an estimate for conversations of 3600 tokens, at 40% of 989 TFLOP/s and 50% of 3.35 TB/s" in said


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([0.25, 0.5, 1.0]), st.integers(1, 4))
def test_shares_of_a_card_take_longer_and_ranks_share_the_work(share: float, ranks: int) -> None:
    shape = read_model_shape("Qwen/Qwen2.5-0.5B", {})
    assert shape is not None
    whole = estimate_step_seconds(shape, RunConfig(), H)
    config = apply_overrides(RunConfig(), {"trainer.n_gpus_per_node": share})
    assert estimate_step_seconds(shape, config, H) == pytest.approx(whole / share)
    several = estimate_step_seconds(shape, apply_overrides(RunConfig(), {"trainer.n_gpus_per_node": ranks}), H)
    assert whole / ranks <= several * (1 + 1e-9) <= whole * (1 + 1e-9)
    assert estimate_run_seconds(shape, config, H) > 400 * whole / share
