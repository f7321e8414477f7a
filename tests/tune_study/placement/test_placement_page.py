"""The numbers of docs/placement.md that a reader can recompute."""

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.fakes.plans import read_shape
from trainable.config.run_config import RunConfig, apply_overrides
from tune_study.placement import memory
from tune_study.placement.memory import GIB, ModelShape

PAGE = (Path(__file__).parents[3] / "docs" / "placement.md").read_text(encoding="utf-8")


def read_rows(section: str) -> list[list[str]]:
    """Read the cells of the table in a section of the page, without its header."""
    text = PAGE.split(f"## {section}\n")[1].split("\n## ")[0]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")][1:]


def test_a_plan_by_hand_has_the_items_of_the_plan() -> None:
    shape = read_shape("Qwen/Qwen2.5-3B")
    config = apply_overrides(RunConfig(), {"actor.use_kl_loss": True, "trainer.swap_to_host": True})
    items = {item.name: item.backward for item in memory.list_allocations(shape, config, 80 * GIB)}
    groups = (
        ("policy weights", "policy gradients"),
        ("policy AdamW moments",),
        ("copies of weights",),
        ("activations",),
        ("logits",),
        ("vLLM CUDA graphs", "CUDA context"),
    )
    *rows, total_row = read_rows("A 3B plan by hand")
    for (_, formula, gib), names in zip(rows, groups, strict=True):
        assert re.fullmatch(r"[\d,.x+() ]+", formula)
        number = eval(formula.replace(",", "").replace("x", "*"))
        assert number == sum(items[name] for name in names)
        assert gib == f"{number / GIB:.2f}"
    assert total_row[-1] == f"{sum(items.values()) / GIB:.2f}"
    assert sum(items[name] for names in groups for name in names) == sum(items.values())
    assert f"{memory.compute_block_bytes(shape, config):,} bytes per token" in PAGE


def make_shape(vocabulary: int, hidden: int, intermediate: int, layers: int, kv_heads: int) -> ModelShape:
    sizes = (vocabulary, hidden, intermediate, layers, hidden // 128, kv_heads)
    return ModelShape.model_validate(dict(zip(ModelShape.model_fields, sizes, strict=False)))


QWEN_7B, QWEN_2B = make_shape(151_936, 4096, 11_008, 32, 32), make_shape(151_936, 2048, 5504, 24, 16)
LLAMA_2, LLAMA_3 = make_shape(32_000, 4096, 11_008, 32, 32), make_shape(128_256, 4096, 14_336, 32, 8)
LORA = {"model.lora_rank": 64}


def plan_backward(shape: ModelShape, tokens: int, settings: Mapping[str, object]) -> int:
    """Plan the bytes of a backward pass over one sequence of `tokens` tokens."""
    names = ("ppo_mini_batch_size", "ppo_micro_batch_size_per_gpu")
    one_row = {f"{network}.{name}": 1 for network in ("actor", "critic") for name in names}
    sequence = {"env.max_turn": 1, "rollout.response_length": tokens - 320, "rollout.max_model_len": None}
    policy = {"algorithm.adv_estimator": "grpo", "rollout.name": "torch"}
    config = apply_overrides(RunConfig(), {**one_row, **sequence, **policy, **settings})
    return sum(item.backward for item in memory.list_allocations(shape, config, 80 * GIB))


def plan_states(parameters: int, stage: int, ranks: int) -> int:
    config = apply_overrides(RunConfig(), {"trainer.n_gpus_per_node": ranks, "trainer.zero_stage": stage})
    return sum(item.backward for item in memory.list_network_allocations("policy", parameters, config))


def test_published_peaks_are_compared_with_this_plan() -> None:
    engine = {item.name: item.rollout for item in memory.list_allocations(LLAMA_3, RunConfig(), 80 * GIB)}
    planned = (
        plan_backward(QWEN_7B, 1024, LORA),
        plan_backward(QWEN_7B, 8192, LORA),
        plan_backward(QWEN_7B, 8192, LORA | {"model.load_in_4bit": True}),
        plan_backward(QWEN_2B, 1024, {"trainer.strategy": "deepspeed"}),
        plan_backward(LLAMA_2, 8192, {"model.lora_rank": 8}),
        plan_states(2_850_000_000, 2, 1),
        plan_states(2_851_000_000, 2, 8),
        plan_states(2_851_000_000, 3, 8),
        engine["vLLM weights"] + engine["vLLM work space"],
    )
    for (_, run, published, plan, ratio), size in zip(read_rows("Published peaks"), planned, strict=True):
        assert plan == f"{size / 1e9:.1f}", run
        assert float(ratio) == pytest.approx(size / 1e9 / float(published), abs=0.011), run
