"""The memory of a run on each of its GPUs, item by item, before it starts. All sizes are in bytes.

Exact for what a trainer keeps, which tests compare with its tensors. Upper bounds for what passes need, since every
conversation is assumed to have maximum length.

Symbols: N parameters of a network, R ranks (GPUs of the run), h hidden size, f intermediate size, kv channels of all
key heads, V vocabulary size.
"""

from collections.abc import Iterable
from typing import NamedTuple

from trainable.config import constants
from trainable.config.run_config import RunConfig
from trainable.rollout import kv_cache_size
from trainable.rollout.kv_cache_size import count_ranks, get_dtype_bytes
from tune_study.placement import model_size
from tune_study.placement.model_size import ModelShape

GIB = 2**30
PHASES = ("rollout", "values", "policy backward", "policy step")
"""The moments at which memory use is highest. values: passes without gradients, for values and for the reference. While
the critic is trained, less is used than while the policy is, which has its logits in addition."""

FLOAT32, BFLOAT16 = 4, 2
FOUR_BIT_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Bytes of a weight in 4 bits: its code, and its share of two scales, one per 64 weights and one per 256 scales."""
CONTEXT_BYTES, NCCL_BYTES, CUDA_GRAPH_BYTES = int(0.75 * GIB), 1 * GIB, int(1.5 * GIB)
"""A process's CUDA context and NCCL's buffers, and vLLM's CUDA graphs, which stay while it sleeps. Assumptions."""
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
    rollout: int = 0
    values: int = 0
    backward: int = 0
    step: int = 0
    host: int = 0

    @property
    def gpu_bytes(self) -> tuple[int, ...]:
        """Bytes on each GPU in each of PHASES."""
        return self.rollout, self.values, self.backward, self.step


def _allocate_always(name: str, size: int, host: int = 0) -> Allocation:
    return Allocation(name, size, size, size, size, host)


def sum_by_phase(allocations: Iterable[Allocation]) -> tuple[int, ...]:
    """Sum the bytes on each GPU in each of PHASES."""
    return tuple(map(sum, zip(*(item.gpu_bytes for item in allocations), strict=True)))


def shards_weights(config: RunConfig) -> bool:
    """Check whether every rank stores only its shard of the weights (ZeRO stage 3)."""
    return config.trainer.uses_deepspeed and config.trainer.zero_stage == 3


def list_allocations(
    shape: ModelShape, config: RunConfig, budget: int, reference_shape: ModelShape | None = None
) -> list[Allocation]:
    """List the memory of a run, item by item.

    budget: bytes that the run may use on each of its GPUs. Only the size of vLLM's KV cache depends on it.
    reference_shape: shape of a separate reference; None for the policy's.
    """
    items = []
    if config.model.lora_rank:
        frozen_bytes = compute_frozen_bytes(shape, config, config.model.load_in_4bit)
        items.append(_allocate_always("frozen base weights", frozen_bytes))
    for name, sizes in model_size.list_trained_sizes(shape, config).items():
        items += list_network_allocations(name, sum(sizes), config)
    # With adapters, the frozen base is the reference, unless another model is named.
    if config.needs_reference and (not config.model.lora_rank or config.model.reference_path is not None):
        size = compute_frozen_bytes(reference_shape or shape, config)
        if config.trainer.swap_to_host:
            # It is on the GPU for its own passes, and for the exact KL also in those of the policy.
            update_size = size if config.actor.reads_reference_distribution else 0
            items.append(Allocation("reference weights", 0, size, update_size, update_size, host=size))
        else:
            items.append(_allocate_always("reference weights", size))
    items += _list_pass_allocations(shape, config)
    items.append(_allocate_always("CUDA context", CONTEXT_BYTES + (NCCL_BYTES if count_ranks(config) > 1 else 0)))
    if config.rollout.uses_vllm:
        return items + _list_vllm_allocations(shape, config, budget, items)
    return [*items, _allocate_sampler(shape, config)]


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
        state, state_name, flattened = 3 * shard, "AdamW moments and master weights", shard
        bucket = FLOAT32 * (constants.ZERO_BUCKET_SIZE if is_sharded else min(REDUCE_BUCKET_SIZE, parameters))
        if trainer.offload_parameters:  # only stage 3 accepts this setting
            weights, weights_host = 0, shard
        if trainer.offload_optimizer:
            state, state_host, flattened = 0, {1: 3, 2: 4, 3: 5}[stage] * shard, 0
            gradients = gradients if stage == 1 else 0
    # Gradients exist from the backward pass to the step. Stage 3 keeps their shard and the bucket in all phases.
    idle_gradients = gradients + bucket if is_sharded else 0
    backward_gradients = gradients + bucket
    step_gradients = gradients + flattened + (bucket if is_sharded else 0)
    resident_weights, idle_state = weights, state
    if trainer.swap_to_host:
        idle_state, state_host = 0, state
        if not is_sharded:  # all phases gather from shards
            weights_host, resident_weights = weights, weights if name == "policy" else 0
    if name == "critic":  # PHASES are those of the policy, in which a swapped critic is in host memory
        state, backward_gradients, step_gradients = idle_state, idle_gradients, idle_gradients
    label = f"{name} {'adapters' if config.model.lora_rank else 'weights'}"
    return [
        _allocate_always(label, resident_weights, weights_host),
        Allocation(f"{name} {state_name}", idle_state, idle_state, state, state, state_host),
        Allocation(f"{name} gradients", idle_gradients, idle_gradients, backward_gradients, step_gradients),
    ]


def compute_frozen_bytes(shape: ModelShape, config: RunConfig, in_4bit: bool = False) -> int:
    """Compute the bytes of a frozen network: `make_frozen_copy`, or `make_frozen_base` under adapters.

    Linear layers have the dtype of passes, or in blocks 4 bits and float32 biases. Everything else is in float32.
    """
    block_parameters = model_size.count_block_parameters(shape)
    block_bytes = get_dtype_bytes(config) * block_parameters
    if in_4bit:
        weights = sum(inputs * outputs for inputs, outputs in model_size.list_trunk_matrices(shape))
        block_bytes = int(FOUR_BIT_BYTES * weights) + FLOAT32 * (block_parameters - weights)
    other_parameters = shape.parameters - block_parameters - shape.own_head
    return FLOAT32 * other_parameters + get_dtype_bytes(config) * shape.own_head + block_bytes


def compute_cast_bytes(shape: ModelShape, config: RunConfig, with_gradients: bool) -> int:
    """Compute the bytes of the copies of blocks' weights in the dtype of passes that exist at once.

    Autocast copies the float32 weights of a matrix product: of one block at a time, or in a pass with gradients and
    without gradient checkpointing of all blocks. With LoRA these are adapters.
    """
    if config.model.dtype == "float32":
        return 0
    block_parameters = model_size.count_block_parameters(shape) // shape.num_hidden_layers
    if config.model.lora_rank:
        block_parameters = config.model.lora_rank * sum(map(sum, model_size.list_adapted_layers(shape, config.model)))
    keeps_all_blocks = with_gradients and not config.model.enable_gradient_checkpointing
    return BFLOAT16 * block_parameters * (shape.num_hidden_layers if keeps_all_blocks else 1)


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
    """List the temporary memory of the torch engine's passes: copies of weights, activations and logits."""
    model, rollout, dtype_bytes = config.model, config.rollout, get_dtype_bytes(config)
    head, hidden_bytes = shape.embedding, FLOAT32 * shape.hidden_size
    # A head with LoRA is frozen, and in the dtype of passes unless it is the embedding.
    casts_head = dtype_bytes < FLOAT32 and (shape.tie_word_embeddings or not model.lora_rank)
    extra_copies = BFLOAT16 * head if casts_head else 0
    merged = 0
    if model.load_in_4bit:  # a pass unpacks one layer at a time
        extra_copies += dtype_bytes * max((a * b for a, b in model_size.list_trunk_matrices(shape)), default=0)
    if model.lora_rank:  # vLLM is sent the merged weights of a block at a time
        merged = FLOAT32 * sum(inputs * outputs for inputs, outputs in model_size.list_linear_layers(shape).values())
    no_grad_copies, copies = (compute_cast_bytes(shape, config, has_grad) + extra_copies for has_grad in (False, True))
    if shards_weights(config):
        # Passes without gradients gather a network, linear layers of blocks in their dtype (`backend.zero`),
        # and copy the head. In passes with gradients, DeepSpeed holds a limited number of gathered weights.
        parameters = sum(model_size.list_trained_sizes(shape, config)["policy"])
        block_parameters = model_size.count_block_parameters(shape)
        no_grad_copies = FLOAT32 * (parameters - block_parameters) + dtype_bytes * block_parameters + extra_copies
        copies += FLOAT32 * min(constants.ZERO_MAX_LIVE_PARAMETERS, parameters)
    # Without gradients, one block's activations exist at a time, and the residual stream before and after it.
    max_tokens, block_bytes = kv_cache_size.compute_max_tokens(config), compute_block_bytes(shape, config)
    rows = max(rollout.log_prob_micro_batch_size_per_gpu, rollout.ref_log_prob_micro_batch_size_per_gpu)
    no_grad_activations = rows * max_tokens * (block_bytes + 2 * hidden_bytes)
    # With gradients, a token takes the saved tensors of all blocks, 12 h around the blocks, and within one block
    # gradients of 3 f numbers and 8 h. Gradient checkpointing saves every block's input (4 h), and one block's tensors.
    saved_bytes = shape.num_hidden_layers * block_bytes
    if model.enable_gradient_checkpointing:
        saved_bytes = shape.num_hidden_layers * hidden_bytes + block_bytes
    token_bytes = saved_bytes + 5 * hidden_bytes + 3 * shape.intermediate_size * dtype_bytes
    # A pass has at most TOKENS_PER_PASS tokens or one conversation, and a rank's share of a mini-batch. No padding.
    mini_batch = max(config.actor.ppo_mini_batch_size, config.critic.ppo_mini_batch_size)
    max_pass_tokens = max(constants.TOKENS_PER_PASS["cuda"], max_tokens)
    tokens = min(-(-mini_batch // count_ranks(config)) * max_tokens, max_pass_tokens)
    # Float32 logits at once: three copies of a chunk, or with gradients seven of it, or of all tokens without chunking.
    # Unless LoRA freezes the head, its gradient is summed in float32 over chunks of the dtype of passes.
    chunk = min(tokens * shape.vocab_size, constants.CHUNK_ELEMENTS)
    elements = chunk if config.actor.entropy_from_logits_with_chunking else tokens * shape.vocab_size
    head_gradient = 0 if model.lora_rank else head * (FLOAT32 + dtype_bytes)
    return [
        Allocation("copies of weights", merged if rollout.uses_vllm else no_grad_copies, no_grad_copies, copies),
        Allocation("activations", values=no_grad_activations, backward=tokens * token_bytes),
        Allocation("logits", values=3 * FLOAT32 * chunk, backward=7 * FLOAT32 * elements + head_gradient),
    ]


def _list_vllm_allocations(
    shape: ModelShape, config: RunConfig, budget: int, others: Iterable[Allocation]
) -> list[Allocation]:
    """List the memory of vLLM: its weights, work space and KV cache. others: all other items of the run.

    The cache has room for all conversations of a training step, or as many as fit, unless kv_cache_gib gives its size.
    With gpu_memory_utilization, the cache is what weights and work space leave of that fraction of the budget.
    """
    rollout, dtype_bytes = config.rollout, get_dtype_bytes(config)
    weight_bytes = dtype_bytes * shape.parameters
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
        other_bytes = other_totals[0] if rollout.free_cache_engine else max(other_totals)
        free_bytes = int(TIGHT_FRACTION * budget) - other_bytes - engine_bytes
        needed_bytes = kv_cache_size.compute_step_kv_bytes(shape, config)
        kv_bytes = max(min(needed_bytes, free_bytes), kv_cache_size.compute_conversation_kv_bytes(shape, config))
    sizes = {"vLLM weights": weight_bytes, "vLLM work space": work_bytes, KV_CACHE_NAME: max(kv_bytes, 0)}
    allocate = Allocation if rollout.free_cache_engine else _allocate_always
    return [*(allocate(name, size) for name, size in sizes.items()), _allocate_always("vLLM CUDA graphs", graph_bytes)]


def _allocate_sampler(shape: ModelShape, config: RunConfig) -> Allocation:
    """Compute the memory of the torch or compiled sampler, for all conversations of a rank at once."""
    env = config.env
    max_rows = max(env.env_groups * env.group_size, env.val_env_groups * env.val_group_size, env.test_env_groups)
    rows = -(-max_rows * env.max_conversations_per_rollout // count_ranks(config))
    # The cache grows by half its size at a time, so it may be 1.5 times as long as the longest conversation.
    slots = rows * (kv_cache_size.compute_max_tokens(config) * 3 // 2)
    # Drawing a token needs logits, log-probs and probabilities in float32, and in float64 probabilities and their sums.
    draw_bytes = rows * shape.vocab_size * (3 * FLOAT32 + 16)
    kv_bytes = slots * kv_cache_size.compute_token_kv_bytes(shape, config)
    return Allocation("sampler KV cache and logits", rollout=kv_bytes + draw_bytes)


def compute_host_bytes(allocations: Iterable[Allocation], shape: ModelShape, config: RunConfig) -> int:
    """Compute the host bytes of all ranks: of `allocations`, or of whole networks, which stage 3 loads at the start."""
    trained_sizes = model_size.list_trained_sizes(shape, config).values()
    start_bytes = FLOAT32 * sum(map(sum, trained_sizes)) if shards_weights(config) else 0
    return count_ranks(config) * max(sum(item.host for item in allocations), start_bytes)
