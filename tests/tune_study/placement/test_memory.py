from collections.abc import Mapping

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd.graph import saved_tensors_hooks

from tests.fakes.scripted import make_qwen2_shape as torch_shape
from tests.fakes.scripted import make_random_model
from tests.fakes.trainers import make_quiet_trainer
from trainable.config.run_config import RunConfig, apply_overrides
from trainable.config.seeds import make_rng
from trainable.models.load import freeze, make_frozen_copy
from trainable.models.lora import make_adapted_policy
from trainable.models.qwen2 import PassSettings
from trainable.ppo.trainer import PPOTrainer
from trainable.rollout.vllm_sampler import EngineSettings
from tune_study.placement import memory
from tune_study.placement.memory import (
    GIB,
    PHASES,
    POLICY_BACKWARD,
    NetworkBytes,
    compute_network_bytes,
    list_allocations,
    sum_by_phase,
)
from tune_study.placement.model_size import ModelShape, count_policy_parameters, read_model_shape

TINY = "sokoban-tiny"
VARIANTS: dict[str, Mapping[str, object]] = {
    "gae": {},
    "gae, reference": {"actor.use_kl_loss": True, "actor.kl_loss_coef": 0.1},
    "gae, shared trunk": {"critic.shared_trunk": True},
    "grpo, reference for the reward": {"algorithm.adv_estimator": "grpo", "algorithm.use_kl_in_reward": True},
}
ADAPTERS: dict[str, Mapping[str, object]] = {
    "gae": {},
    "gae, reference": {"actor.use_kl_loss": True, "actor.kl_loss_coef": 0.1},
    "gae, shared trunk": {"critic.shared_trunk": True},
    "grpo, some layers": {"algorithm.adv_estimator": "grpo", "model.lora_target_modules": ["q_proj", "down_proj"]},
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def shape_at(path: str) -> ModelShape:
    found = read_model_shape(path, {})
    assert found is not None
    return found


def paper(**overrides: object) -> RunConfig:
    return apply_overrides(RunConfig(), {key.replace("__", "."): value for key, value in overrides.items()})


def on_gpu(config: RunConfig, share: int = 80 * GIB, path: str = "Qwen/Qwen2.5-3B") -> dict[str, tuple[int, ...]]:
    return {part.name: part.gpu_bytes for part in list_allocations(shape_at(path), config, share)}


def held(tensors: list[torch.Tensor]) -> int:
    """Bytes of the storages, each once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def moments(trainer: PPOTrainer, name: str) -> list[torch.Tensor]:
    optimizer = trainer.backends[name].optimizer  # type: ignore[attr-defined]
    return [state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", VARIANTS)
def test_what_a_trainer_holds_for_good_is_what_is_planned(name: str, dtype: str) -> None:
    trainer = make_quiet_trainer(
        **{key.replace(".", "__"): value for key, value in VARIANTS[name].items()}, model__dtype=dtype
    )
    trainer.step()
    planned = {
        part.name: part.gpu_bytes[memory.POLICY_BACKWARD]
        for part in list_allocations(shape_at(TINY), trainer.config, GIB)
    }
    policy = [*trainer.model.parameters(), *(trainer.value_head.parameters() if trainer.value_head else ())]
    assert planned["policy weights, float32"] == held(policy)
    assert planned["policy AdamW moments"] == held(moments(trainer, "actor"))
    assert planned["policy gradients"] == held([torch.zeros_like(weight) for weight in policy])
    assert ("critic weights, float32" in planned) == (trainer.critic is not None)
    if trainer.critic is not None:
        assert planned["critic weights, float32"] == held(list(trainer.critic.parameters()))
        assert planned["critic AdamW moments"] == held(moments(trainer, "critic"))
    assert ("reference weights" in planned) == (trainer.reference is not None)
    if trainer.reference is not None:
        assert planned["reference weights"] == held(list(trainer.reference.parameters()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ADAPTERS)
def test_what_a_trainer_with_adapters_holds_for_good_is_what_is_planned(name: str, dtype: str) -> None:
    changes = {key.replace(".", "__"): value for key, value in ADAPTERS[name].items()}
    trainer = make_quiet_trainer(**changes, model__dtype=dtype, model__lora_rank=5)
    trainer.step()
    planned = {
        part.name: part.gpu_bytes[memory.POLICY_BACKWARD]
        for part in list_allocations(shape_at(TINY), trainer.config, GIB)
    }
    networks = [network for network in (trainer.model, trainer.value_head, trainer.critic) if network is not None]
    learns = [[weight for weight in network.parameters() if weight.requires_grad] for network in networks]
    everything = [weight for network in networks for weight in network.parameters()]
    frozen = [weight for weight in everything if not weight.requires_grad]
    if trainer.reference is not None:
        frozen += trainer.reference.parameters()  # which has nothing of its own
    assert planned["base weights, frozen"] == held(frozen)
    policy = [weight for weights in learns[: len(networks) - (trainer.critic is not None)] for weight in weights]
    assert planned["policy adapters, float32"] == held(policy)
    assert planned["policy AdamW moments"] == held(moments(trainer, "actor"))
    assert planned["policy gradients"] == held([torch.zeros_like(weight) for weight in policy])
    assert "reference weights" not in planned
    assert ("critic adapters, float32" in planned) == (trainer.critic is not None)
    if trainer.critic is not None:
        assert planned["critic adapters, float32"] == held(learns[-1])
        assert planned["critic AdamW moments"] == held(moments(trainer, "critic"))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_reference_has_the_bytes_of_the_frozen_copy(dtype: str, tied: bool) -> None:
    model = make_random_model(torch_shape(tie_word_embeddings=tied))
    model.model.pass_settings = PassSettings(DTYPES[dtype])
    config = paper(model__dtype=dtype, actor__use_kl_loss=True)
    shape = ModelShape.model_validate(vars(model.shape))
    assert memory.compute_reference_bytes(shape, config) == held(list(make_frozen_copy(model).parameters()))


@st.composite
def small_shapes(draw: st.DrawFn) -> dict[str, int]:
    kv_heads, groups, head_dim = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.sampled_from([8, 16, 24]))
    return {
        "hidden_size": kv_heads * groups * head_dim,
        "intermediate_size": draw(st.sampled_from([40, 56, 104])),
        "num_attention_heads": kv_heads * groups,
        "num_key_value_heads": kv_heads,
    }


def asked_of(dtype: str) -> tuple[torch.Tensor, int]:
    """Positions of two rows of 37 tokens, and how many tokens are read for them.

    Of unequal rows attention is made by length in float32; a GPU makes it in one call in bfloat16, as for equal ones.
    """
    return (torch.tensor([30, 73]), 68) if dtype == "float32" else (torch.arange(74), 74)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=15, deadline=None)
@given(small_shapes())
def test_a_block_keeps_what_autograd_saves(dtype: str, sizes: dict[str, int]) -> None:
    where, read = asked_of(dtype)
    found = []
    for layers in (2, 3):
        model = make_random_model(torch_shape(**sizes, num_hidden_layers=layers))
        model.model.pass_settings = PassSettings(DTYPES[dtype])
        weights = {size for weight in model.parameters() for size in (weight.shape, weight.shape[::-1])}
        saved: list[torch.Tensor] = []
        with saved_tensors_hooks(lambda t, saved=saved: saved.append(t) or t, lambda t: t):  # type: ignore[misc]
            model.model.compute_hidden_states(torch.zeros((2, 37), dtype=torch.long), where)
        found.append(held([tensor for tensor in saved if tensor.shape not in weights]))  # nor weights as they are cast
    shape = ModelShape.model_validate(vars(model.shape))
    assert found[1] - found[0] == read * memory.compute_block_bytes(shape, paper(model__dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=10, deadline=None)
@given(small_shapes(), st.sampled_from([1, 3, 8]))
def test_a_block_with_adapters_keeps_what_autograd_saves(dtype: str, sizes: dict[str, int], rank: int) -> None:
    where, read = asked_of(dtype)
    found = []
    for layers in (2, 3):
        base = make_random_model(torch_shape(**sizes, num_hidden_layers=layers))
        base.model.pass_settings = PassSettings(DTYPES[dtype])
        config = paper(model__dtype=dtype, model__lora_rank=rank)
        model = make_adapted_policy(freeze(base), config.model, make_rng(0, "adapters", 0))
        weights = {size for weight in model.parameters() for size in (weight.shape, weight.shape[::-1])}
        saved: list[torch.Tensor] = []
        with saved_tensors_hooks(lambda t, saved=saved: saved.append(t) or t, lambda t: t):  # type: ignore[misc]
            model.model.compute_hidden_states(torch.zeros((2, 37), dtype=torch.long), where)
        found.append(held([tensor for tensor in saved if tensor.shape not in weights]))
    shape = ModelShape.model_validate(vars(model.shape))
    assert found[1] - found[0] == read * memory.compute_block_bytes(shape, config)


def test_constants_are_those_of_the_trainer() -> None:
    assert EngineSettings(torch.device("cuda"), "bfloat16", 3600).max_num_seqs == memory.VLLM_MAX_SEQS


@pytest.mark.parametrize("turns", [1, 2, 5])
def test_the_game_says_no_more_than_planned(turns: int) -> None:
    trainer = make_quiet_trainer(env__max_turn=turns)
    levels = [level for step in trainer.levels for level in step]
    episodes = trainer.roll_out(levels, 4, make_rng(0, "sampling", 1))
    most = max(len(episode.tokens) - episode.response_tokens for episode in episodes)
    assert most <= turns * memory.TURN_TOKENS["compact"] <= 1.5 * most


def test_a_published_conversation_has_3600_tokens() -> None:
    assert memory.compute_max_tokens(paper()) == memory.compute_max_tokens(paper(rollout__max_model_len=None)) == 3600
    assert memory.compute_max_tokens(paper(rollout__max_model_len=1000)) == 1000
    assert memory.compute_max_tokens(paper(env__max_turn=2)) == 1440


# By hand. A network of 1000 parameters: whole 4000 bytes; over 4 ranks a part is 1000.
BY_HAND: list[tuple[Mapping[str, object], NetworkBytes]] = [
    ({}, NetworkBytes(4000, 0, 8000, 4000, 4000, 0)),
    ({"trainer.strategy": "deepspeed", "trainer.zero_stage": 1}, NetworkBytes(4000, 4000, 8000, 4000, 8000, 0)),
    ({"trainer.n_gpus_per_node": 4, "trainer.zero_stage": 1}, NetworkBytes(4000, 1000, 2000, 4000, 2000, 0)),
    ({"trainer.n_gpus_per_node": 4, "trainer.zero_stage": 2}, NetworkBytes(4000, 1000, 2000, 1000, 2000, 0)),
    (
        {"trainer.n_gpus_per_node": 4, "trainer.zero_stage": 1, "trainer.offload_optimizer": True},
        NetworkBytes(4000, 0, 0, 4000, 0, 3000),
    ),
    (
        {"trainer.n_gpus_per_node": 4, "trainer.zero_stage": 2, "trainer.offload_optimizer": True},
        NetworkBytes(4000, 0, 0, 0, 0, 4000),
    ),
    ({"trainer.n_gpus_per_node": 4, "trainer.zero_stage": 3}, NetworkBytes(1000, 1000, 2000, 1000, 2000, 0)),
    (
        {"trainer.n_gpus_per_node": 4, "trainer.zero_stage": 3, "trainer.offload_parameters": True},
        NetworkBytes(0, 1000, 2000, 1000, 2000, 1000),
    ),
    (
        {"trainer.n_gpus_per_node": 4, "trainer.zero_stage": 3, "trainer.offload_optimizer": True},
        NetworkBytes(1000, 0, 0, 0, 0, 5000),
    ),
    (
        {
            "trainer.n_gpus_per_node": 4,
            "trainer.zero_stage": 3,
            "trainer.offload_optimizer": True,
            "trainer.offload_parameters": True,
        },
        NetworkBytes(0, 0, 0, 0, 0, 6000),
    ),
    ({"trainer.n_gpus_per_node": 0.5, "trainer.offload_optimizer": True}, NetworkBytes(4000, 0, 8000, 4000, 4000, 0)),
]


@pytest.mark.parametrize(("changes", "expected"), BY_HAND, ids=[" ".join(changes) for changes, _ in BY_HAND])
def test_a_network_by_hand(changes: Mapping[str, object], expected: NetworkBytes) -> None:
    assert compute_network_bytes(1000, apply_overrides(RunConfig(), changes)) == expected


@given(st.integers(1, 10**9), st.integers(2, 16), st.sampled_from([1, 2]))
def test_what_is_dealt_out_is_all_of_it_once(parameters: int, count: int, stage: int) -> None:
    config = paper(trainer__n_gpus_per_node=count, trainer__zero_stage=stage)
    alone = compute_network_bytes(parameters, paper())
    dealt = compute_network_bytes(parameters, config)
    assert alone.moments <= count * dealt.moments < alone.moments + 8 * count
    assert alone.weights <= count * dealt.master < alone.weights + 4 * count
    assert dealt.weights == alone.weights
    offloaded = compute_network_bytes(
        parameters, paper(trainer__n_gpus_per_node=count, trainer__zero_stage=stage, trainer__offload_optimizer=True)
    )
    moved = dealt.master + dealt.moments + (dealt.gradients if stage == 2 else 0)
    assert (offloaded.host, offloaded.master, offloaded.moments) == (moved, 0, 0)


def test_the_3b_of_the_paper_by_hand() -> None:
    # 3,085,938,688 parameters; the embedding, which is the head too, has 151,936 x 2048.
    found = on_gpu(paper(actor__use_kl_loss=True))
    policy, embedding = 3_085_938_688, 151_936 * 2048
    assert found["policy weights, float32"] == (4 * policy,) * 7
    assert found["policy AdamW moments"] == (8 * policy,) * 7
    assert found["critic weights, float32"] == (4 * (policy + 2049),) * 7
    assert found["reference weights"] == (2 * policy + 2 * (embedding + 73 * 2048),) * 7
    assert found["policy gradients"] == (0, 0, 0, 0, 4 * policy, 4 * policy, 0)
    assert found["critic gradients"] == (0, 0, 4 * (policy + 2049), 4 * (policy + 2049), 0, 0, 0)
    copies = 2 * (policy + 2049 - embedding)
    assert found["copies in bfloat16"] == (0, 2 * policy, copies, 0, 2 * policy, 0, 0)
    # A token of the 16,384 of a pass: 36 block inputs, one block, what is around the blocks, and gradients
    # of one block.
    token = 36 * 4 * 2048 + (24 * 2048 + 4 * 256 + 8 * 11_008 + 4 * 18) + 12 * 2048 + (3 * 2 * 11_008 + 8 * 2048)
    assert found["activations"][2:] == (16_384 * token, 0, 16_384 * token, 0, 0)
    assert found["logits"] == (0, 3 * 2**29, 0, 0, 7 * 2**29 + 6 * embedding, 0, 0)


def test_stage_3_of_the_3b_by_hand() -> None:
    config = paper(
        trainer__n_gpus_per_node=4, trainer__zero_stage=3, rollout__name="torch", algorithm__adv_estimator="grpo"
    )
    found = on_gpu(config)
    policy, embedding, gains = 3_085_938_688, 151_936 * 2048, 73 * 2048
    read = 2 * policy + 2 * (embedding + gains)
    assert found["policy weights, float32"] == (policy,) * 7
    assert found["policy gradients"] == (policy + 200_000_000,) * 7
    assert found["weights gathered"] == (read, read, 0, 0, 4 * 10**9, 0, 0)
    assert found["networks before sharding"] == (0, 0, 0, 0, 0, 0, 4 * policy)
    assert found["copies in bfloat16"] == (2 * embedding, 2 * embedding, 0, 0, 2 * policy, 0, 0)
    assert memory.compute_saving_bytes(shape_at("Qwen/Qwen2.5-3B"), config) == 12 * policy


def test_the_3b_with_adapters_by_hand() -> None:
    found = on_gpu(paper(actor__use_kl_loss=True, model__lora_rank=64))
    policy, embedding, hidden, wide, kv = 3_085_938_688, 151_936 * 2048, 2048, 11_008, 256
    # A and B of queries and output, of keys and values, and of the three layers of the feed-forward block.
    adapters = 36 * 64 * (2 * (hidden + hidden) + 2 * (hidden + kv) + 3 * (hidden + wide))
    assert found["base weights, frozen"] == (2 * policy + 2 * (embedding + 73 * 2048),) * 7
    assert found["policy adapters, float32"] == (4 * adapters,) * 7
    assert found["policy AdamW moments"] == (8 * adapters,) * 7
    assert found["critic adapters, float32"] == (4 * (adapters + 2049),) * 7
    assert found["copies in bfloat16"][POLICY_BACKWARD] == 2 * (adapters + embedding)
    assert found["logits"][POLICY_BACKWARD] == 7 * 2**29
    block = 2 * hidden * (hidden + kv) + 3 * hidden * wide
    assert found["a block for vLLM, adapters merged"] == (4 * block, 0, 0, 0, 0, 0, 0)
    assert not {"reference weights", "policy weights, float32"} & found.keys()
    assert (
        max(sum_by_phase(list_allocations(shape_at("Qwen/Qwen2.5-3B"), paper(model__lora_rank=64), 40 * GIB)))
        < 40 * GIB
    )


def test_vllm_gets_its_part_of_the_runs_share_and_no_more() -> None:
    config = paper(rollout__gpu_memory_utilization=0.25, rollout__free_cache_engine=False)
    found = on_gpu(config, 40 * GIB)
    engine = [sizes for name, sizes in found.items() if name.startswith("vLLM")]
    assert [sum(moment) for moment in zip(*engine, strict=True)] == [*[10 * GIB] * 6, 0]
    assert found["vLLM weights"][0] == 2 * 3_085_938_688
    asleep = on_gpu(paper(rollout__gpu_memory_utilization=0.25), 40 * GIB)
    assert asleep["vLLM KV cache"] == (found["vLLM KV cache"][0], 0, 0, 0, 0, 0, 0)


def test_a_tokens_keys_and_values_by_hand() -> None:
    # 3B: 36 blocks, 2 key heads of 128 channels, keys and values, two bytes each.
    assert memory.compute_token_kv_bytes(shape_at("Qwen/Qwen2.5-3B"), 2) == 36 * 2 * 2 * 128 * 2


def test_less_is_never_more() -> None:
    base = paper(actor__use_kl_loss=True, model__enable_gradient_checkpointing=False)
    most = max(sum_by_phase(list_allocations(shape_at("Qwen/Qwen2.5-3B"), base, 80 * GIB)))
    for change in (
        {"model.enable_gradient_checkpointing": True},
        {"critic.shared_trunk": True},
        {"actor.use_kl_loss": False},
        {"algorithm.adv_estimator": "grpo"},
        {"trainer.n_gpus_per_node": 4},
        {"model.lora_rank": 64},
    ):
        less = max(sum_by_phase(list_allocations(shape_at("Qwen/Qwen2.5-3B"), apply_overrides(base, change), 80 * GIB)))
        assert less < most, change


def test_moments_are_sums_of_parts_that_hold_something() -> None:
    found = list_allocations(shape_at("Qwen/Qwen2.5-7B"), paper(trainer__n_gpus_per_node=4), 80 * GIB)
    assert all(any(part.gpu_bytes) or part.host_bytes for part in found)
    assert sum_by_phase(found) == tuple(sum(part.gpu_bytes[i] for part in found) for i in range(len(PHASES)))
    assert count_policy_parameters(shape_at("Qwen/Qwen2.5-7B")) * 4 == found[0].gpu_bytes[0]
