import weakref
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from search_spaces.catalog import STUDIES
from tests.fakes.plans import read_shape
from tests.fakes.scripted import make_qwen2_shape as make_torch_shape
from tests.fakes.scripted import make_random_model
from tests.fakes.trainers import make_quiet_trainer
from tests.strategies.examples import draw_examples, thin_out
from trainable.config.run_config import RunConfig, apply_overrides
from trainable.config.seeds import make_rng
from trainable.models.interface import PassSettings
from trainable.models.load import freeze, make_frozen_copy
from trainable.models.lora import make_adapted_policy
from trainable.rollout.kv_cache_size import TURN_TOKENS, compute_max_tokens, compute_step_kv_bytes
from tune_study.placement import memory
from tune_study.placement.memory import GIB, Allocation, ModelShape, list_allocations, sum_by_phase
from tune_study.placement.time_estimate import estimate_update_flops

TINY = "sokoban-tiny"
VARIANTS: dict[str, Mapping[str, object]] = {
    "gae": {},
    "gae, reference": {"actor.use_kl_loss": True, "actor.kl_loss_coef": 0.1},
    "gae, shared trunk": {"critic.shared_trunk": True},
    "grpo, reference for the reward": {"algorithm.adv_estimator": "grpo", "algorithm.use_kl_in_reward": True},
    "grpo, some adapters": {"algorithm.adv_estimator": "grpo", "model.lora_target_modules": ["q_proj", "down_proj"]},
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def make_paper_config(**overrides: object) -> RunConfig:
    return apply_overrides(RunConfig(), {key.replace("__", "."): value for key, value in overrides.items()})


def list_items(config: RunConfig, budget: int = 80 * GIB) -> dict[str, Allocation]:
    """List the memory of a run of the 3B by name."""
    return {item.name: item for item in list_allocations(read_shape("Qwen/Qwen2.5-3B"), config, budget)}


def count_storage_bytes(tensors: list[torch.Tensor]) -> int:
    """Count the bytes of the storages of tensors, each storage once."""
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


@pytest.mark.long
@pytest.mark.parametrize("dtype", thin_out(DTYPES, 2))
@pytest.mark.parametrize("rank", [0, 5])
@pytest.mark.parametrize("name", VARIANTS)
def test_what_a_trainer_holds_for_good_is_what_is_planned(name: str, rank: int, dtype: str) -> None:
    changes = {key.replace(".", "__"): value for key, value in VARIANTS[name].items()}
    trainer = make_quiet_trainer(**changes, model__dtype=dtype, model__lora_rank=rank)
    trainer.step()
    planned_bytes = {item.name: item.backward for item in list_allocations(read_shape(TINY), trainer.config, GIB)}
    label = "adapters" if rank else "weights"
    networks = {"policy": [trainer.model, trainer.value_head], "critic": [trainer.critic]}
    frozen_weights = []
    for network, modules in networks.items():
        weights = [weight for module in modules if module is not None for weight in module.parameters()]
        frozen_weights += [weight for weight in weights if not weight.requires_grad]
        trained_weights = [weight for weight in weights if weight.requires_grad]
        assert (f"{network} {label}" in planned_bytes) == bool(trained_weights)
        if trained_weights:
            optimizer = "actor" if network == "policy" else network
            assert planned_bytes[f"{network} {label}"] == count_storage_bytes(trained_weights)
            states = trainer.backends[optimizer].optimizer.state.values()
            moments = [state[key] for state in states for key in ("exp_avg", "exp_avg_sq")]
            assert planned_bytes[f"{network} AdamW moments"] == count_storage_bytes(moments)
    gradients = [torch.zeros_like(weight) for weight in trainer.model.parameters() if weight.requires_grad]
    gradients += [torch.zeros_like(weight) for weight in (trainer.value_head or torch.nn.Module()).parameters()]
    assert planned_bytes["policy gradients"] == count_storage_bytes(gradients)
    if trainer.reference is not None:
        frozen_weights += trainer.reference.parameters()
    # With adapters, the base is also the reference, which has no adapters.
    assert ("reference weights" in planned_bytes) == (trainer.reference is not None and not rank)
    frozen_name = "frozen base weights" if rank else "reference weights"
    assert planned_bytes.get(frozen_name, 0) == count_storage_bytes(frozen_weights)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_reference_has_the_bytes_of_the_frozen_copy(dtype: str, tied: bool) -> None:
    model = make_random_model(make_torch_shape(tie_word_embeddings=tied))
    model.model.pass_settings = PassSettings(DTYPES[dtype])
    config = make_paper_config(model__dtype=dtype, actor__use_kl_loss=True)
    shape = ModelShape.model_validate(vars(model.shape))
    assert memory.compute_frozen_bytes(shape, config) == count_storage_bytes(list(make_frozen_copy(model).parameters()))


@pytest.mark.parametrize("rank", [0, 8])
def test_a_reference_of_its_own_has_its_own_size(rank: int) -> None:
    policy_shape, teacher_shape = read_shape("Qwen/Qwen2.5-3B"), read_shape("Qwen/Qwen2.5-7B")
    settings = {"actor__use_kl_loss": True, "actor__kl_loss_type": "mse", "model__lora_rank": rank}
    config = make_paper_config(**settings, model__reference_path="Qwen/Qwen2.5-7B")
    items = {item.name: item for item in list_allocations(policy_shape, config, 80 * GIB, teacher_shape)}
    size = memory.compute_frozen_bytes(teacher_shape, config)
    assert items["reference weights"] == ("reference weights", size, size, size, size, 0)


@st.composite
def draw_small_sizes(draw: st.DrawFn) -> dict[str, int]:
    kv_heads, groups, head_dim = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.sampled_from([8, 16, 24]))
    return {
        "hidden_size": kv_heads * groups * head_dim,
        "intermediate_size": draw(st.sampled_from([40, 56, 104])),
        "num_attention_heads": kv_heads * groups,
        "num_key_value_heads": kv_heads,
    }


def count_saved_bytes(model: Any, positions: torch.Tensor) -> int:
    """Count the bytes that autograd saves in a pass over two rows of 37 tokens, without weights that are cast."""
    weight_shapes = {size for weight in model.parameters() for size in (weight.shape, weight.shape[::-1])}
    saved_tensors: list[torch.Tensor] = []
    with saved_tensors_hooks(lambda tensor: saved_tensors.append(tensor) or tensor, lambda tensor: tensor):
        model.model.compute_hidden_states(torch.zeros((2, 37), dtype=torch.long), positions)
    return count_storage_bytes([tensor for tensor in saved_tensors if tensor.shape not in weight_shapes])


@pytest.mark.parametrize("dtype", DTYPES)
@draw_examples(15)
@given(draw_small_sizes(), st.sampled_from([0, 1, 3, 8]))
def test_a_block_keeps_what_autograd_saves(dtype: str, sizes: dict[str, int], rank: int) -> None:
    # Two rows of 37 tokens. In float32, attention over rows of different lengths is computed by length, so that fewer
    # tokens are read. In bfloat16 a GPU computes it in one call, as for equal lengths.
    positions, n_tokens_read = (torch.tensor([30, 73]), 68) if dtype == "float32" else (torch.arange(74), 74)
    config = make_paper_config(model__dtype=dtype, model__lora_rank=rank)
    saved_bytes = []
    for layers in (2, 3):
        model: Any = make_random_model(make_torch_shape(**sizes, num_hidden_layers=layers))
        model.model.pass_settings = PassSettings(DTYPES[dtype])
        if rank:
            model = make_adapted_policy(freeze(model), config.model, make_rng(0, "adapters", 0))
        saved_bytes.append(count_saved_bytes(model, positions))
    shape = ModelShape.model_validate(vars(model.shape))
    assert saved_bytes[1] - saved_bytes[0] == n_tokens_read * memory.compute_block_bytes(shape, config)


@pytest.mark.parametrize("turns", [1, 2, 5])
def test_the_game_says_no_more_than_planned(turns: int) -> None:
    trainer = make_quiet_trainer(env__max_turn=turns)
    levels = [level for step in trainer.levels for level in step]
    episodes = trainer.roll_out(levels, 4, "sampling")
    longest_prompt = max(len(episode.tokens) - episode.response_tokens for episode in episodes)
    assert longest_prompt <= turns * TURN_TOKENS["compact"] <= 1.5 * longest_prompt


def test_the_torch_sampler_reads_the_prefixes_of_all_branches_at_once() -> None:
    config = make_paper_config(rollout__name="torch", env__group_size=6)
    shape = ModelShape.model_validate(vars(make_torch_shape()))
    plain, branched, ranks = (
        memory._allocate_sampler(shape, apply_overrides(config, changes)).gpu_bytes[0]
        for changes in ({}, {"rollout.ts_n": 2}, {"rollout.ts_n": 2, "trainer.n_gpus_per_node": 4})
    )
    # Eight levels with two trees each, and a bias of float32 per slot of a cache of 1.5 times 3600.
    token_bytes = memory.compute_block_bytes(shape, config) + 4 * (2 * shape.hidden_size + 5400)
    assert branched - plain == 8 * 2 * 2 * 3600 * token_bytes
    assert ranks == branched / 4


def test_a_published_conversation_has_3600_tokens() -> None:
    changes: dict[int, dict[str, object]] = {1000: {"rollout__max_model_len": 1000}, 1440: {"env__max_turn": 2}}
    for tokens, settings in (changes | {3600: {"rollout__max_model_len": None}}).items():
        assert compute_max_tokens(make_paper_config(**settings)) == tokens
    assert compute_max_tokens(make_paper_config()) == 3600


# Computed by hand: weights, optimizer state, gradients in the backward pass and in the step, and offloaded bytes. A
# network of 1000 parameters has 4000 bytes, as a bucket of all its gradients has; a shard over 4 ranks has 1000.
FOUR_RANKS = {"trainer.n_gpus_per_node": 4, "trainer.zero_stage": 3}
BUCKET = 50_000_000
BY_HAND: list[tuple[Mapping[str, object], tuple[int, ...]]] = [
    ({}, (4000, 8000, 4000, 4000, 0)),
    ({"trainer.n_gpus_per_node": 0.5, "trainer.offload_optimizer": True}, (4000, 8000, 4000, 4000, 0)),
    ({"trainer.strategy": "deepspeed", "trainer.zero_stage": 1}, (4000, 12_000, 8000, 8000, 0)),
    (FOUR_RANKS | {"trainer.zero_stage": 1}, (4000, 3000, 8000, 5000, 0)),
    (FOUR_RANKS | {"trainer.zero_stage": 2}, (4000, 3000, 5000, 2000, 0)),
    (FOUR_RANKS | {"trainer.zero_stage": 1, "trainer.offload_optimizer": True}, (4000, 0, 8000, 4000, 3000)),
    (FOUR_RANKS | {"trainer.zero_stage": 2, "trainer.offload_optimizer": True}, (4000, 0, 4000, 0, 4000)),
    (FOUR_RANKS, (1000, 3000, 1000 + BUCKET * 4, 2000 + BUCKET * 4, 0)),
    (FOUR_RANKS | {"trainer.offload_parameters": True}, (0, 3000, 1000 + BUCKET * 4, 2000 + BUCKET * 4, 1000)),
    (FOUR_RANKS | {"trainer.offload_optimizer": True}, (1000, 0, BUCKET * 4, BUCKET * 4, 5000)),
    (
        FOUR_RANKS | {"trainer.offload_optimizer": True, "trainer.offload_parameters": True},
        (0, 0, BUCKET * 4, BUCKET * 4, 6000),
    ),
]


@pytest.mark.parametrize(("changes", "expected"), BY_HAND, ids=[" ".join(changes) for changes, _ in BY_HAND])
def test_a_network_by_hand(changes: Mapping[str, object], expected: tuple[int, ...]) -> None:
    config = apply_overrides(RunConfig(), changes)
    weights, state, gradients = memory.list_network_allocations("policy", 1000, config)
    sizes = (weights.rollout, state.rollout, gradients.backward, gradients.step, weights.host + state.host)
    assert sizes == expected


# Of Qwen2.5-3B: parameters of policy and critic, and of the embedding, which is also the head; channels; one block.
POLICY, CRITIC, EMBEDDING = 3_085_938_688, 3_085_938_688 + 2049, 151_936 * 2048
HIDDEN, WIDE, KV = 2048, 11_008, 256
BLOCK_WEIGHTS = 2 * HIDDEN * (HIDDEN + KV) + 3 * HIDDEN * WIDE
BLOCK = BLOCK_WEIGHTS + HIDDEN + 2 * KV
FROZEN = 2 * POLICY + 2 * (EMBEDDING + 73 * HIDDEN)
TOKEN_KV_BYTES = 36 * 2 * 2 * 128 * 2


def everywhere(size: int, host: int = 0) -> tuple[int, ...]:
    """Bytes in all phases, and in host memory."""
    return size, size, size, size, host


COPIES = 2 * (BLOCK + EMBEDDING)


def test_the_3b_of_the_paper_by_hand() -> None:
    """The other phases than the policy's backward pass, which docs/placement.md has."""
    items = list_items(make_paper_config(actor__use_kl_loss=True))
    assert items["critic weights"][1:] == everywhere(4 * CRITIC)
    assert items["reference weights"][1:] == everywhere(FROZEN)
    assert items["policy gradients"][1:] == (0, 0, 4 * POLICY, 4 * POLICY, 0)
    assert items["critic gradients"][1:] == everywhere(0)
    assert items["copies of weights"][1:] == (0, COPIES, COPIES, 0, 0)
    assert (items["activations"].rollout, items["activations"].step) == (0, 0)
    assert (items["logits"].values, items["logits"].step) == (3 * 2**29, 0)


def test_stage_3_of_the_3b_by_hand() -> None:
    """What `BY_HAND` has not."""
    config = apply_overrides(RunConfig(), FOUR_RANKS | {"rollout.name": "torch", "algorithm.adv_estimator": "grpo"})
    items, gradients = list_items(config), POLICY + 4 * BUCKET
    assert items["policy gradients"][1:] == (gradients, gradients, gradients, POLICY + gradients, 0)
    gathered = FROZEN + 2 * EMBEDDING
    assert items["copies of weights"][1:] == (gathered, gathered, 4 * 10**9 + COPIES, 0, 0)
    # Nothing stays in host memory, but each of the four ranks loads the policy there.
    assert memory.compute_host_bytes(items.values(), read_shape("Qwen/Qwen2.5-3B"), config) == 4 * 4 * POLICY


def test_the_3b_with_adapters_by_hand() -> None:
    items = list_items(make_paper_config(actor__use_kl_loss=True, model__lora_rank=64))
    # A and B of the query and output layers, of the key and value layers, and of the three feed-forward layers.
    adapters = 36 * 64 * (2 * (HIDDEN + HIDDEN) + 2 * (HIDDEN + KV) + 3 * (HIDDEN + WIDE))
    assert items["frozen base weights"][1:] == everywhere(FROZEN)
    assert items["policy adapters"][1:] == everywhere(4 * adapters)
    assert items["critic adapters"][1:] == everywhere(4 * (adapters + 2049))
    copies = 2 * (adapters // 36 + EMBEDDING)
    assert items["copies of weights"][1:] == (4 * BLOCK_WEIGHTS, copies, copies, 0, 0)  # vLLM gets merged weights
    assert items["logits"].backward == 7 * 2**29
    assert not {"reference weights", "policy weights"} & items.keys()


def test_vllm_gets_its_fraction_of_the_runs_memory_and_no_more() -> None:
    config = make_paper_config(rollout__gpu_memory_utilization=0.25, rollout__free_cache_engine=False)
    items = list_items(config, 40 * GIB)
    assert sum_by_phase(item for name, item in items.items() if name.startswith("vLLM")) == (10 * GIB,) * 4
    assert items["vLLM weights"].rollout == 2 * POLICY
    sleeping_items = list_items(make_paper_config(rollout__gpu_memory_utilization=0.25), 40 * GIB)
    assert sleeping_items["vLLM KV cache"][1:] == (items["vLLM KV cache"].rollout, 0, 0, 0, 0)


@pytest.mark.parametrize(
    ("settings", "gib", "expected"),
    [
        ({}, 200, 128 * 3600 * TOKEN_KV_BYTES),
        ({"trainer__n_gpus_per_node": 2}, 200, 64 * 3600 * TOKEN_KV_BYTES),
        ({"rollout__kv_cache_gib": 2.5}, 80, 2.5 * GIB),
        # 1000 tokens take 63 blocks of 16 tokens.
        ({"rollout__max_model_len": 1000}, 200, 128 * 63 * 16 * TOKEN_KV_BYTES),
        # Where less is free, it holds a conversation.
        ({"model__lora_rank": 64}, 4, 3600 * TOKEN_KV_BYTES),
    ],
)
def test_the_cache_has_room_for_the_conversations_of_a_step(
    settings: dict[str, object], gib: int, expected: float
) -> None:
    assert list_items(make_paper_config(**settings), gib * GIB)["vLLM KV cache"][1:] == (expected, 0, 0, 0, 0)


def test_the_cache_takes_what_is_free() -> None:
    items = list_items(make_paper_config(model__lora_rank=64), 24 * GIB)
    assert abs(sum_by_phase(items.values())[0] - 0.95 * 24 * GIB) <= 1


def test_swapping_by_hand() -> None:
    changes = {"actor__use_kl_loss": True, "trainer__swap_to_host": True}
    items = list_items(make_paper_config(**changes))
    assert items["policy weights"][1:] == everywhere(4 * POLICY, 4 * POLICY)
    assert items["policy AdamW moments"][1:] == (0, 0, 8 * POLICY, 8 * POLICY, 8 * POLICY)
    assert items["critic weights"][1:] == everywhere(0, 4 * CRITIC)
    assert items["critic AdamW moments"][1:] == everywhere(0, 8 * CRITIC)
    assert items["reference weights"][1:] == (0, FROZEN, 0, 0, FROZEN)
    exact_kl = list_items(make_paper_config(**changes, actor__kl_loss_type="full"))
    assert exact_kl["reference weights"][1:] == (0, FROZEN, FROZEN, FROZEN, FROZEN)


def test_swapping_in_stage_3_moves_what_the_optimizer_reads() -> None:
    settings = FOUR_RANKS | {"trainer.swap_to_host": True}
    items = list_items(apply_overrides(RunConfig(), settings))
    shard, critic_shard = POLICY, CRITIC + 3  # 4 bytes of a quarter of the parameters, rounded up
    assert items["critic weights"][1:] == everywhere(critic_shard)
    assert items["policy AdamW moments and master weights"][1:] == (0, 0, 3 * shard, 3 * shard, 3 * shard)
    offloaded = list_items(apply_overrides(RunConfig(), settings | {"trainer.offload_parameters": True}))
    assert offloaded["policy weights"][1:] == everywhere(0, shard)
    assert offloaded["critic weights"][1:] == everywhere(0, critic_shard)


class WeightCopies(TorchDispatchMode):
    """Adds up the copies of weights in another dtype that exist at once."""

    def __init__(self, weights: list[torch.Tensor]) -> None:
        super().__init__()
        self.addresses = {weight.data_ptr() for weight in weights}
        self.live_bytes = self.peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].data_ptr() in self.addresses:
            size = output.untyped_storage().nbytes()
            self.live_bytes += size
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
            weakref.finalize(output.untyped_storage(), self.release, size)
        return output

    def release(self, size: int) -> None:
        self.live_bytes -= size


@pytest.mark.parametrize("recomputes", [True, False])
def test_copies_of_weights_are_as_planned(recomputes: bool) -> None:
    torch_shape = make_torch_shape(hidden_size=32, intermediate_size=64, num_hidden_layers=4, vocab_size=97)
    model = make_random_model(torch_shape)
    model.model.pass_settings = PassSettings(torch.bfloat16, recompute=recomputes)
    shape = ModelShape.model_validate(vars(torch_shape))
    config = make_paper_config(model__enable_gradient_checkpointing=recomputes)
    tokens = torch.arange(24)[None]
    with WeightCopies(list(model.parameters())) as copies:
        hidden = model.model.compute_hidden_states(tokens, torch.arange(24))
        hidden.sum().backward()
    # Biases of queries, keys and values are copied, too. This pass has no head.
    planned_bytes = memory.compute_copied_bytes(shape, config)[1] - 2 * 97 * 32
    assert 0.9 * planned_bytes < copies.peak_bytes <= planned_bytes


def test_a_tree_has_room_for_its_children() -> None:
    study = STUDIES["tree-grpo"]
    settings = {**study.fixed_settings, **study.presets["paper"], "rollout.name": "vllm"}
    shape = read_shape("Qwen/Qwen2.5-0.5B")

    def compute(max_children: int) -> tuple[int, float]:
        config = apply_overrides(RunConfig(), {**settings, "env.papers.max_children": max_children})
        return compute_step_kv_bytes(shape, config), estimate_update_flops(shape, config)

    # rollout.max_model_len, since code prints what it likes; keys and values, blocks, key heads, channels, bytes
    conversation_bytes = 8192 * 2 * 24 * 2 * 64 * 2
    (kv_bytes, flops), (kv_bytes_alone, flops_alone) = compute(8), compute(0)
    assert (kv_bytes, kv_bytes_alone) == (4 * 9 * conversation_bytes, 4 * conversation_bytes)
    assert flops == pytest.approx(9 * flops_alone)
