"""The memory of a run on each of its GPUs, item by item, before it starts. All sizes are in bytes.

Exact for what a trainer keeps, which tests compare with its tensors. Upper bounds for what passes need, since every
conversation is assumed to have maximum length.

Symbols: N parameters of a network, R ranks (GPUs of the run), h hidden size, f intermediate size, kv channels of all
key heads, V vocabulary size.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from trainable.config import constants
from trainable.config.run_config import RunConfig
from trainable.rollout import kv_cache_size
from tune_study.placement import model_size
from tune_study.placement.model_size import ModelShape

GIB = 2**30
PHASES = ("rollout", "values", "critic backward", "critic step", "policy backward", "policy step")
"""The moments at which memory use is highest. values: passes without gradients, for values and for the reference."""
ROLLOUT, VALUES, CRITIC_BACKWARD, CRITIC_STEP, POLICY_BACKWARD, POLICY_STEP = ALL_PHASES = range(len(PHASES))

FLOAT32, BFLOAT16 = 4, 2
FOUR_BIT_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Bytes of a weight in 4 bits: its code, and its share of two scales, one per 64 weights and one per 256 scales."""
CONTEXT_BYTES, NCCL_BYTES, CUDA_GRAPH_BYTES = int(0.75 * GIB), 1 * GIB, int(1.5 * GIB)
"""A process's CUDA context, NCCL's buffers, and vLLM's CUDA graphs, which stay while it sleeps. Assumptions."""
REDUCE_BUCKET_SIZE = 500_000_000
"""Gradients that DeepSpeed's stages 1 and 2 collect before they reduce them: its default of reduce_bucket_size."""
TIGHT_FRACTION = 0.95
"""Fraction of the budget above which a fit is tight, because fragmentation in the allocator is not counted."""
KV_CACHE_NAME = "vLLM KV cache"
VLLM_MAX_SEQS, VLLM_MAX_BATCHED_TOKENS = 256, 16_384
"""vLLM's most concurrent rows (`EngineSettings.max_num_seqs`) and tokens per pass (its default from 70 GiB on)."""


class Allocation(NamedTuple):
    """One item of a run's memory: bytes on each GPU in each of PHASES, and bytes per rank in host memory."""

    name: str
    gpu_bytes: tuple[int, ...]
    host_bytes: int = 0


def count_ranks(config: RunConfig) -> int:
    """Count R, the processes of a run, one per GPU. A run on a fraction of a GPU, or on none, has one."""
    return max(1, int(config.trainer.n_gpus_per_node))


def shards_weights(config: RunConfig) -> bool:
    """Check whether every rank stores only its shard of the weights (ZeRO stage 3)."""
    return config.trainer.uses_deepspeed and config.trainer.zero_stage == 3


def get_dtype_bytes(config: RunConfig) -> int:
    """Return the bytes per number in the dtype of passes."""
    return FLOAT32 if config.model.dtype == "float32" else BFLOAT16


def list_allocations(
    shape: ModelShape, config: RunConfig, budget: int, reference_shape: ModelShape | None = None
) -> tuple[Allocation, ...]:
    """List the memory of a run, item by item, in the order of the plan's table. Items of 0 bytes are left out.

    budget: bytes that the run may use on each of its GPUs. Only the size of vLLM's KV cache depends on it.
    reference_shape: shape of a separate reference; None for the policy's.
    """
    items = []
    if config.model.lora_rank:
        name = "base weights, frozen, in 4 bits" if config.model.load_in_4bit else "base weights, frozen"
        items.append(_make_allocation(name, compute_frozen_bytes(shape, config, config.model.load_in_4bit)))
    for name, parameters in model_size.count_trained_parameters(shape, config).items():
        items += list_network_allocations(name, parameters, config)
    # With adapters, the frozen base is the reference, unless another model is named.
    if config.needs_reference and (not config.model.lora_rank or config.model.reference_path is not None):
        size = compute_frozen_bytes(reference_shape or shape, config)
        # A swapped reference is on the GPU for its own passes, and for the exact KL also in those of the policy.
        phases = (VALUES, POLICY_BACKWARD, POLICY_STEP) if config.actor.reads_reference_distribution else (VALUES,)
        items.append(_make_allocation("reference weights", size, phases if config.trainer.swap_to_host else None))
    nccl_bytes = NCCL_BYTES if count_ranks(config) > 1 else 0
    context = _make_allocation("CUDA context, NCCL" if nccl_bytes else "CUDA context", CONTEXT_BYTES + nccl_bytes)
    last_items = [*_list_pass_allocations(shape, config), context]
    if config.rollout.uses_vllm:
        items += _list_vllm_allocations(shape, config, budget, [*items, *last_items])
    else:
        items += _list_sampler_allocations(shape, config)
    return tuple(item for item in [*items, *last_items] if any(item.gpu_bytes) or item.host_bytes)


def _make_allocation(
    name: str, sizes: int | Mapping[int, int], swap_phases: Iterable[int] | None = None, host: int = 0
) -> Allocation:
    """Make an item. sizes: bytes by phase, where others have 0, or a number for all phases.

    swap_phases: when an item that is swapped is on the GPU; otherwise it is in host memory.
    """
    if isinstance(sizes, int):
        host += 0 if swap_phases is None else sizes
        sizes = dict.fromkeys(ALL_PHASES if swap_phases is None else swap_phases, sizes)
    return Allocation(name, tuple(sizes.get(phase, 0) for phase in ALL_PHASES), host)


def list_network_allocations(name: str, parameters: int, config: RunConfig) -> list[Allocation]:
    """List weights, optimizer state and gradients of `policy` or `critic`. Source: ZeRO, arXiv:1910.02054.

    torch: 4 N weights, 8 N moments of AdamW, 4 N gradients. DeepSpeed shards over the R ranks moments and a master copy
    of the weights (12 N), from stage 2 on also gradients, and in stage 3 weights. Its backward pass has a bucket, and
    its step flattens a shard's gradients. offload_optimizer moves the optimizer state to the host, from stage 2 on with
    gradients, of which stage 3 has two copies; offload_parameters moves the shard of the weights.
    """
    trainer, stage, is_sharded = config.trainer, config.trainer.zero_stage, shards_weights(config)
    # Shards are rounded up, because DeepSpeed pads the parameters so that all shards have one size.
    weights, shard = FLOAT32 * parameters, FLOAT32 * -(-parameters // count_ranks(config))
    gradients, state, state_name = weights, 2 * weights, "AdamW moments"
    bucket = flattened = weights_host = state_host = 0
    if trainer.uses_deepspeed:
        weights = shard if is_sharded else weights
        gradients = gradients if stage == 1 else shard
        state, state_name, flattened = 3 * shard, "AdamW moments, master weights", shard
        bucket = FLOAT32 * (constants.ZERO_BUCKET_SIZE if is_sharded else min(REDUCE_BUCKET_SIZE, parameters))
        if trainer.offload_parameters:  # only stage 3 accepts this setting
            weights, weights_host = 0, shard
        if trainer.offload_optimizer:
            state, state_host, flattened = 0, {1: 3, 2: 4, 3: 5}[stage] * shard, 0
            gradients = gradients if stage == 1 else 0
    backward, step = (CRITIC_BACKWARD, CRITIC_STEP) if name == "critic" else (POLICY_BACKWARD, POLICY_STEP)
    # The policy, which is at least as large as the critic, is read in rollouts, and to copy its weights to the engine.
    weights_phases = (backward, step) if name == "critic" else (ROLLOUT, VALUES, backward, step)
    swaps = bool(trainer.swap_to_host)
    # Gradients exist from the backward pass to the step. Stage 3 keeps their shard and the bucket in all phases.
    gradient_bytes = dict.fromkeys(ALL_PHASES if is_sharded else (backward,), gradients + bucket)
    gradient_bytes[step] = gradients + flattened + (bucket if is_sharded else 0)
    weights_name = f"{name} {'adapters' if config.model.lora_rank else 'weights'}, float32"
    return [
        # All phases gather from shards.
        _make_allocation(weights_name, weights, weights_phases if swaps and not is_sharded else None, weights_host),
        _make_allocation(f"{name} {state_name}", state, (backward, step) if swaps else None, state_host),
        _make_allocation(f"{name} gradients", gradient_bytes),
    ]


def compute_frozen_bytes(shape: ModelShape, config: RunConfig, in_4bit: bool = False) -> int:
    """Compute the bytes of a frozen network: `make_frozen_copy`, or `make_frozen_base` under adapters.

    Linear layers have the dtype of passes, or in blocks 4 bits and float32 biases. Everything else is in float32.
    """
    block_parameters = model_size.count_block_parameters(shape)
    head = 0 if shape.tie_word_embeddings else shape.vocab_size * shape.hidden_size
    block_bytes = get_dtype_bytes(config) * block_parameters
    if in_4bit:
        weights = sum(inputs * outputs for inputs, outputs in model_size.list_trunk_matrices(shape))
        block_bytes = int(FOUR_BIT_BYTES * weights) + FLOAT32 * (block_parameters - weights)
    other_parameters = model_size.count_policy_parameters(shape) - block_parameters - head
    return FLOAT32 * other_parameters + get_dtype_bytes(config) * head + block_bytes


def compute_cast_bytes(shape: ModelShape, name: str, config: RunConfig, with_gradients: bool) -> int:
    """Compute the bytes of the weight copies in the dtype of passes that exist at once in a pass of policy or critic.

    Autocast copies the float32 weights of a matrix product: of one block at a time, or in a pass with gradients and
    without gradient checkpointing of all blocks, and of the policy's head. With LoRA that is adapters and a tied head.
    """
    if config.model.dtype == "float32":
        return 0
    block_parameters = model_size.count_block_parameters(shape) // shape.num_hidden_layers
    if config.model.lora_rank:
        block_parameters = config.model.lora_rank * sum(map(sum, model_size.list_adapted_layers(shape, config.model)))
    keeps_all_blocks = with_gradients and not config.model.enable_gradient_checkpointing
    casts_head = name == "policy" and (shape.tie_word_embeddings or not config.model.lora_rank)
    head = shape.vocab_size * shape.hidden_size if casts_head else 0
    return BFLOAT16 * (block_parameters * (shape.num_hidden_layers if keeps_all_blocks else 1) + head)


def compute_block_bytes(shape: ModelShape, config: RunConfig) -> int:
    """Compute the bytes that one block saves per token for its backward pass, as counted by autograd's hooks.

    float32: 4 (9 h + 2 kv + 4 f), where the output of attention counts twice: grouped by length, and concatenated.
    bfloat16: 24 h + 4 kv + 8 f, because norms and the residual stream stay in float32. Both add a float32 number per
    head for the softmax normalizer and one per norm. With LoRA every adapter adds the input of its matrix B, and frozen
    norms save 8 h less; this is exact for adapters on all layers and an upper bound otherwise.
    """
    hidden, intermediate, kv = shape.hidden_size, shape.intermediate_size, shape.num_key_value_heads * shape.head_dim
    factor_bytes = FLOAT32 * (shape.num_attention_heads + 2)
    if config.model.lora_rank:
        adapters = config.model.lora_rank * len(model_size.list_adapted_layers(shape, config.model))
        factor_bytes += get_dtype_bytes(config) * adapters - 2 * FLOAT32 * hidden
    if config.model.dtype == "float32":
        return FLOAT32 * (9 * hidden + 2 * kv + 4 * intermediate) + factor_bytes
    return 24 * hidden + 4 * kv + 8 * intermediate + factor_bytes


def _list_pass_allocations(shape: ModelShape, config: RunConfig) -> list[Allocation]:
    """List the temporary memory of the torch engine's passes: copies of weights, activations and logits.

    The critic's phases are those of a run with a critic; without one, the policy's phases need more.
    """
    rollout, dtype_bytes, blocks = config.rollout, get_dtype_bytes(config), shape.num_hidden_layers
    hidden_bytes, head = FLOAT32 * shape.hidden_size, shape.vocab_size * shape.hidden_size
    unpacked = merged = 0
    if config.model.load_in_4bit:  # a pass unpacks one layer at a time
        unpacked = dtype_bytes * max((a * b for a, b in model_size.list_trunk_matrices(shape)), default=0)
    if config.model.lora_rank:  # vLLM is sent the merged weights of a block at a time
        merged = FLOAT32 * sum(inputs * outputs for inputs, outputs in model_size.list_linear_layers(shape).values())
    no_grad_copies = compute_cast_bytes(shape, "policy", config, with_gradients=False) + unpacked
    critic_copies, policy_copies = (
        compute_cast_bytes(shape, name, config, with_gradients=True) + unpacked for name in ("critic", "policy")
    )
    if shards_weights(config):
        # Passes without gradients gather a network, linear layers of blocks in their dtype (`backend.zero`),
        # and copy the head. In passes with gradients, DeepSpeed holds a limited number of gathered weights.
        parameters = model_size.count_trained_parameters(shape, config)["policy"]
        block_parameters = model_size.count_block_parameters(shape)
        no_grad_copies = FLOAT32 * (parameters - block_parameters) + dtype_bytes * block_parameters
        no_grad_copies += BFLOAT16 * head if dtype_bytes < FLOAT32 else 0
        live_bytes = FLOAT32 * min(constants.ZERO_MAX_LIVE_PARAMETERS, parameters)
        critic_copies, policy_copies = critic_copies + live_bytes, policy_copies + live_bytes
    copies = {
        ROLLOUT: merged if rollout.uses_vllm else no_grad_copies,
        VALUES: no_grad_copies,
        CRITIC_BACKWARD: critic_copies,
        POLICY_BACKWARD: policy_copies,
    }
    # Without gradients, one block's activations exist at a time, and the residual stream before and after it.
    max_tokens, block_bytes = kv_cache_size.compute_max_tokens(config), compute_block_bytes(shape, config)
    rows = max(rollout.log_prob_micro_batch_size_per_gpu, rollout.ref_log_prob_micro_batch_size_per_gpu)
    no_grad_activations = rows * max_tokens * (block_bytes + 2 * hidden_bytes)
    # With gradients, a token takes the saved tensors of all blocks, 12 h around the blocks, and within one block
    # gradients of 3 f numbers and 8 h. Gradient checkpointing saves every block's input (4 h), and one block's tensors.
    recomputes = config.model.enable_gradient_checkpointing
    saved_bytes = blocks * hidden_bytes + block_bytes if recomputes else blocks * block_bytes
    token_bytes = saved_bytes + 5 * hidden_bytes + 3 * shape.intermediate_size * dtype_bytes
    # A pass has at most TOKENS_PER_PASS tokens or one conversation, and a rank's share of a mini-batch. No padding.
    mini_batch = max(config.actor.ppo_mini_batch_size, config.critic.ppo_mini_batch_size)
    max_pass_tokens = max(constants.TOKENS_PER_PASS["cuda"], max_tokens)
    tokens = min(-(-mini_batch // count_ranks(config)) * max_tokens, max_pass_tokens)
    activations = {VALUES: no_grad_activations, CRITIC_BACKWARD: tokens * token_bytes}
    # Float32 logits at once: three copies of a chunk, or with gradients seven of it, or of all tokens without chunking.
    # Unless LoRA freezes the head, its gradient is summed in float32 over chunks of the dtype of passes.
    chunk = min(tokens * shape.vocab_size, constants.CHUNK_ELEMENTS)
    elements = chunk if config.actor.entropy_from_logits_with_chunking else tokens * shape.vocab_size
    head_gradient = 0 if config.model.lora_rank else head * (FLOAT32 + dtype_bytes)
    return [
        _make_allocation("copies of weights", copies),
        _make_allocation("activations", activations | {POLICY_BACKWARD: tokens * token_bytes}),
        _make_allocation(
            "logits", {VALUES: 3 * FLOAT32 * chunk, POLICY_BACKWARD: 7 * FLOAT32 * elements + head_gradient}
        ),
    ]


def _list_vllm_allocations(
    shape: ModelShape, config: RunConfig, budget: int, others: Iterable[Allocation]
) -> list[Allocation]:
    """List the memory of vLLM: its weights, work space and KV cache. others: all other items of the run.

    The cache has room for all conversations of a training step, or as many as fit, unless kv_cache_gib gives its size.
    With gpu_memory_utilization, the cache is what weights and work space leave of that fraction of the budget.
    """
    rollout, dtype_bytes = config.rollout, get_dtype_bytes(config)
    phases = (ROLLOUT,) if rollout.free_cache_engine else ALL_PHASES
    weight_bytes = dtype_bytes * model_size.count_policy_parameters(shape)
    # Activations of the largest pass, and distributions of the rows that it decodes: an estimate of what vLLM measures.
    pass_bytes = VLLM_MAX_BATCHED_TOKENS * (3 * shape.intermediate_size + 4 * shape.hidden_size) * dtype_bytes
    work_bytes = pass_bytes + VLLM_MAX_SEQS * shape.vocab_size * (dtype_bytes + 3 * FLOAT32)
    graph_bytes = 0 if rollout.enforce_eager else CUDA_GRAPH_BYTES
    engine_bytes = weight_bytes + work_bytes + graph_bytes
    if rollout.gpu_memory_utilization is not None:
        kv_bytes = int(rollout.gpu_memory_utilization * budget) - engine_bytes
    elif rollout.kv_cache_gib is not None:
        kv_bytes = int(rollout.kv_cache_gib * GIB)
    else:
        other_totals = sum_by_phase(others)
        free_bytes = int(TIGHT_FRACTION * budget) - max(other_totals[phase] for phase in phases) - engine_bytes
        needed_bytes = kv_cache_size.compute_step_kv_bytes(shape, config, dtype_bytes, count_ranks(config))
        kv_bytes = max(min(needed_bytes, free_bytes), compute_conversation_bytes(shape, config))
    sizes = {"vLLM weights": weight_bytes, "vLLM work space": work_bytes, KV_CACHE_NAME: max(kv_bytes, 0)}
    graphs = _make_allocation("vLLM CUDA graphs", graph_bytes)
    return [*(_make_allocation(name, dict.fromkeys(phases, size)) for name, size in sizes.items()), graphs]


def compute_conversation_bytes(shape: ModelShape, config: RunConfig) -> int:
    """Compute the bytes in vLLM's KV cache of a conversation of full length."""
    max_tokens = kv_cache_size.compute_max_tokens(config)
    return kv_cache_size.compute_conversation_kv_bytes(shape, get_dtype_bytes(config), max_tokens)


def _list_sampler_allocations(shape: ModelShape, config: RunConfig) -> list[Allocation]:
    """List the memory of the torch or compiled sampler, for all conversations of a rank at once."""
    env = config.env
    max_rows = max(env.env_groups * env.group_size, env.val_env_groups * env.val_group_size, env.test_env_groups)
    rows = -(-max_rows * env.max_conversations_per_rollout // count_ranks(config))
    # The cache grows by half its size at a time, so it may be 1.5 times as long as the longest conversation.
    slots = rows * (kv_cache_size.compute_max_tokens(config) * 3 // 2)
    kv_bytes = slots * kv_cache_size.compute_token_kv_bytes(shape, get_dtype_bytes(config))
    # Drawing a token needs logits, log-probs and probabilities in float32, and in float64 probabilities and their sums.
    draw_bytes = rows * shape.vocab_size * (3 * FLOAT32 + 16)
    return [_make_allocation("sampler KV cache, logits", {ROLLOUT: kv_bytes + draw_bytes})]


def sum_by_phase(allocations: Iterable[Allocation]) -> tuple[int, ...]:
    """Sum the bytes on each GPU in each of PHASES."""
    return tuple(map(sum, zip(*(allocation.gpu_bytes for allocation in allocations), strict=True)))


def compute_host_bytes(allocations: Iterable[Allocation], shape: ModelShape, config: RunConfig) -> int:
    """Compute the host bytes of all ranks: of `allocations`, or of whole networks, which stage 3 loads at the start."""
    parameters = model_size.count_trained_parameters(shape, config)
    start_bytes = FLOAT32 * sum(parameters.values()) if shards_weights(config) else 0
    return count_ranks(config) * max(sum(allocation.host_bytes for allocation in allocations), start_bytes)


def compute_saving_bytes(shape: ModelShape, config: RunConfig) -> int:
    """Compute the bytes of host memory that a run needs in addition while it saves a checkpoint.

    With DeepSpeed, rank 0 collects all weights and moments. With torch, a run copies the files that it writes at the
    same time, unless their tensors are already in host memory.
    """
    tensors = [size for sizes in model_size.list_trained_tensor_sizes(shape, config).values() for size in sizes]
    state_bytes = 3 * FLOAT32 * sum(tensors)
    if config.trainer.uses_deepspeed or config.trainer.swap_to_host:
        return state_bytes if config.trainer.uses_deepspeed else 0
    file_bytes = max(constants.MAX_TENSORS_FILE_BYTES, FLOAT32 * max(tensors))
    return min(state_bytes, (config.trainer.num_threads or constants.MAX_DEFAULT_THREADS) * file_bytes)
