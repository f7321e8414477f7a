"""Estimate the memory of a run on each of its GPUs, item by item, before it starts. All sizes are in bytes.

The functions are pure formulas of a model's shape and a run's settings. They are exact for permanent allocations of the
trainer, and upper bounds for temporary ones of forward and backward passes, since every conversation is assumed to have
maximum length.

Symbols: N parameters of a network, R ranks (GPUs of the run), h hidden size, f intermediate size, kv channels of all
key heads, V vocabulary size.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from trainable.config.constants import (
    CHUNK_ELEMENTS,
    MAX_DEFAULT_THREADS,
    MAX_TENSORS_FILE_BYTES,
    TOKENS_PER_PASS,
    ZERO_BUCKET_SIZE,
    ZERO_MAX_LIVE_PARAMETERS,
)
from trainable.config.run_config import RunConfig
from trainable.rollout.kv_cache_size import (
    compute_conversation_kv_bytes,
    compute_max_tokens,
    compute_step_kv_bytes,
    compute_token_kv_bytes,
)
from tune_study.placement.model_size import (
    ModelShape,
    count_linear_parameters,
    count_policy_parameters,
    list_adapted_layers,
    list_linear_layers,
    list_trained_tensor_sizes,
    list_trunk_matrices,
)

GIB = 2**30
PHASES = ("rollout", "values", "critic backward", "critic step", "policy backward", "policy step")
"""The moments at which memory use is highest.

rollout: sampling of episodes. values: passes without gradients, for values and for the reference. backward and step:
passes with gradients of critic or policy, and the optimizer step that follows. The start of a run needs no more,
because networks that will be sharded are loaded into host memory.
"""
ROLLOUT, VALUES, CRITIC_BACKWARD, CRITIC_STEP, POLICY_BACKWARD, POLICY_STEP = range(len(PHASES))

FLOAT32, BFLOAT16 = 4, 2
FOUR_BIT_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Bytes of a weight in 4 bits: its code, and its share of two scales, one per 64 weights and one per 256 scales."""
MOMENT_BYTES = 2 * FLOAT32
"""Bytes of AdamW's two moments per parameter."""
LOGIT_COPIES = {True: 7, False: 3}
"""Float32 copies of the logits in passes with (True) and without gradients (False); see `compute_logits_bytes`."""
CUDA_CONTEXT_BYTES = int(0.75 * GIB)
"""CUDA context of a process and its libraries' work spaces. An assumption, since it differs between drivers."""
NCCL_BYTES = 1 * GIB
"""NCCL's buffers in a run with several ranks. An assumption."""
REDUCE_BUCKET_SIZE = 500_000_000
"""Gradient elements that DeepSpeed collects before it reduces them over the ranks: its default of reduce_bucket_size,
which our configuration changes only for stage 3 (ZERO_BUCKET_SIZE)."""
TIGHT_FRACTION = 0.95
"""Fraction of the budget above which a fit is tight, because fragmentation in the allocator is not counted."""
KV_CACHE_NAME = "vLLM KV cache"
CUDA_GRAPH_BYTES = int(1.5 * GIB)
"""Memory of vLLM's CUDA graphs, which stays on the GPU while the engine sleeps. An assumption."""
VLLM_MAX_SEQS, VLLM_MAX_BATCHED_TOKENS = 256, 16_384
"""vLLM's maximum number of concurrent rows (`EngineSettings.max_num_seqs`) and of tokens per pass
(max_num_batched_tokens: the default of vLLM's class LLM on GPUs of 70 GiB and more; on others it is 8,192)."""


class Allocation(NamedTuple):
    """One item of a run's memory: bytes on each GPU in each of PHASES, and bytes per rank in host memory."""

    name: str
    gpu_bytes: tuple[int, ...]
    host_bytes: int = 0


class NetworkBytes(NamedTuple):
    """Bytes per rank that a trained network needs, split by use."""

    weights: int
    """The weights of the forward and backward passes, in float32."""
    master: int
    """DeepSpeed's master copy of the weights that the rank updates."""
    moments: int
    """AdamW's two moments."""
    gradients: int
    """The gradients, in float32."""
    scratch: int
    """Temporary memory of the optimizer step."""
    host: int
    """Everything that is offloaded to host memory, which the other fields do not include."""


def count_ranks(config: RunConfig) -> int:
    """Count R, the processes of a run, one per GPU. A run on a fraction of a GPU, or on none, has one."""
    return max(1, int(config.trainer.n_gpus_per_node))


def shards_weights(config: RunConfig) -> bool:
    """Check whether every rank stores only its shard of the weights (ZeRO stage 3)."""
    return config.trainer.uses_deepspeed and config.trainer.zero_stage == 3


def compute_network_bytes(parameters: int, config: RunConfig) -> NetworkBytes:
    """Compute the memory of a trained network of `parameters` float32 parameters under the run's ZeRO stage.

    Torch: 4 N weights, 8 N moments, 4 N gradients. AdamW is fused, so its step needs no more.

    DeepSpeed: every rank has 4 N weights. Stage 1 shards the optimizer state (a master copy of 4 N, and 8 N moments)
    over the R ranks, stage 2 also the 4 N of gradients, and stage 3 also the weights. In the optimizer step, a rank
    flattens the gradients of its shard.

    offload_optimizer moves a rank's master copy and moments to the host, where the optimizer step then runs. From stage
    2 on the gradients move too, and stage 3 keeps two copies of them. offload_parameters moves a rank's shard of the
    weights.

    Source: Rajbhandari et al. 2020, arXiv:1910.02054; deepspeed 0.19.
    """
    trainer = config.trainer
    # Shards are rounded up, because DeepSpeed pads the parameters so that all shards have one size.
    full_bytes, shard_bytes = FLOAT32 * parameters, FLOAT32 * -(-parameters // count_ranks(config))
    if not trainer.uses_deepspeed:  # torch updates the weights themselves, which are float32
        return NetworkBytes(full_bytes, master=0, moments=2 * full_bytes, gradients=full_bytes, scratch=0, host=0)
    gradients = full_bytes if trainer.zero_stage == 1 else shard_bytes
    offloaded_weights = shard_bytes if trainer.offload_parameters else 0  # only stage 3 accepts this setting
    weights = (shard_bytes if trainer.zero_stage == 3 else full_bytes) - offloaded_weights
    if not trainer.offload_optimizer:
        return NetworkBytes(weights, shard_bytes, 2 * shard_bytes, gradients, shard_bytes, host=offloaded_weights)
    # Master copy and two moments, and copies of the gradients: one in stage 2, two in stage 3.
    host = offloaded_weights + {1: 3, 2: 4, 3: 5}[trainer.zero_stage] * shard_bytes
    return NetworkBytes(weights, 0, 0, gradients if trainer.zero_stage == 1 else 0, scratch=0, host=host)


def compute_reference_bytes(shape: ModelShape, config: RunConfig) -> int:
    """Compute the bytes of a separate reference model with this shape.

    0 if the run needs no reference, and with LoRA, where the frozen base is the reference unless model.reference_path
    names another.
    """
    is_separate = config.needs_reference and (not config.model.lora_rank or config.model.reference_path is not None)
    return compute_frozen_bytes(shape, config) if is_separate else 0


def compute_frozen_bytes(shape: ModelShape, config: RunConfig) -> int:
    """Compute the bytes of a frozen network, as `trainable.models.load.make_frozen_copy` makes it.

    Linear layers have the dtype of passes. Embedding, tied head and norms are in float32.
    """
    saved_bytes = (FLOAT32 - get_dtype_bytes(config)) * count_linear_parameters(shape)
    return FLOAT32 * count_policy_parameters(shape) - saved_bytes


def compute_base_bytes(shape: ModelShape, config: RunConfig) -> int:
    """Compute the bytes of the frozen base under adapters, as `trainable.models.lora.make_frozen_base` makes it."""
    if not config.model.load_in_4bit:
        return compute_frozen_bytes(shape, config)
    weights = sum(inputs * outputs for inputs, outputs in list_trunk_matrices(shape))
    block_parameters = _count_block_parameters(shape)
    # The biases stay in float32.
    packed_bytes = int(FOUR_BIT_BYTES * weights) + FLOAT32 * (block_parameters - weights)
    return compute_frozen_bytes(shape, config) - get_dtype_bytes(config) * block_parameters + packed_bytes


def compute_unpacked_bytes(shape: ModelShape, config: RunConfig) -> int:
    """Compute the bytes of the largest 4-bit layer when unpacked; a pass unpacks one layer at a time."""
    if not config.model.load_in_4bit:
        return 0
    return get_dtype_bytes(config) * max(inputs * outputs for inputs, outputs in list_trunk_matrices(shape))


def compute_cast_bytes(shape: ModelShape, name: str, config: RunConfig, with_gradients: bool) -> int:
    """Compute the bytes of the weight copies in the dtype of passes that exist at once during a network's pass.

    name: policy or critic. Autocast copies the weights of a matrix product and caches no copy. A pass with gradients
    keeps a block's copies until its backward pass; with gradient checkpointing, or without gradients, one block has
    copies at a time. With LoRA only the adapters and a tied head are copied, because the other layers are frozen in the
    dtype of passes. In float32 nothing is copied.
    """
    if config.model.dtype == "float32":
        return 0
    if config.model.lora_rank:
        block = config.model.lora_rank * sum(map(sum, list_adapted_layers(shape, config.model)))
    else:
        block = _count_block_parameters(shape) // shape.num_hidden_layers
    keeps_all_blocks = with_gradients and not config.model.enable_gradient_checkpointing
    blocks = block * (shape.num_hidden_layers if keeps_all_blocks else 1)
    return BFLOAT16 * (blocks + (_count_cast_head(shape, config) if name == "policy" else 0))


def _count_block_parameters(shape: ModelShape) -> int:
    """Count the parameters of the linear layers of all blocks: all linear layers except an untied head."""
    head = 0 if shape.tie_word_embeddings else shape.vocab_size * shape.hidden_size
    return count_linear_parameters(shape) - head


def _count_cast_head(shape: ModelShape, config: RunConfig) -> int:
    """Count the parameters of the head if passes copy it. An untied head under LoRA is not float32 and not copied."""
    is_float32 = shape.tie_word_embeddings or not config.model.lora_rank
    return shape.vocab_size * shape.hidden_size * is_float32


def get_dtype_bytes(config: RunConfig) -> int:
    """Return the bytes per number in the dtype of passes."""
    return FLOAT32 if config.model.dtype == "float32" else BFLOAT16


def compute_block_bytes(shape: ModelShape, config: RunConfig) -> int:
    """Compute the bytes that one block saves per token for its backward pass.

    In float32 these are 4 (9 h + 2 kv + 4 f) bytes, where the output of attention counts twice: grouped by length, and
    concatenated. In bfloat16 they are 24 h + 4 kv + 8 f bytes, because norms and the residual stream stay in float32.
    Both cases add one float32 number per head for the softmax normalizer, and one for each of the two norms.

    With LoRA every adapter adds the input of its matrix B, as many numbers as its rank, and the frozen norms save 8 h
    bytes less. This is exact for adapters on all layers and an upper bound otherwise.

    The formula was found by counting the tensors that autograd saves; tests compare it with them.
    """
    hidden, intermediate, kv = shape.hidden_size, shape.intermediate_size, shape.num_key_value_heads * shape.head_dim
    factor_bytes = FLOAT32 * (shape.num_attention_heads + 2)
    if config.model.lora_rank:
        adapters = config.model.lora_rank * len(list_adapted_layers(shape, config.model))
        factor_bytes += get_dtype_bytes(config) * adapters - 2 * FLOAT32 * hidden
    if config.model.dtype == "float32":
        return FLOAT32 * (9 * hidden + 2 * kv + 4 * intermediate) + factor_bytes
    return 24 * hidden + 4 * kv + 8 * intermediate + factor_bytes


def compute_tokens_per_pass(config: RunConfig) -> int:
    """Compute the tokens of the largest pass with gradients. Passes have no padding.

    A pass has at most TOKENS_PER_PASS tokens, unless a single conversation is longer, and never more than a rank's
    share of a mini-batch.
    """
    max_mini_batch = max(config.actor.ppo_mini_batch_size, config.critic.ppo_mini_batch_size)
    return min(
        -(-max_mini_batch // count_ranks(config)) * compute_max_tokens(config),
        max(TOKENS_PER_PASS["cuda"], compute_max_tokens(config)),
    )


def compute_logits_bytes(shape: ModelShape, config: RunConfig, with_gradients: bool) -> int:
    """Compute the bytes of all copies of the logits that exist at once, LOGIT_COPIES of them.

    A copy has at most CHUNK_ELEMENTS logits. If `actor.entropy_from_logits_with_chunking` is off, a pass with gradients
    has the logits of all its tokens at once. Unless LoRA freezes the head, such a pass also holds its gradient: the sum
    over chunks in float32, and the gradient of one chunk in the dtype of passes.
    """
    elements = compute_tokens_per_pass(config) * shape.vocab_size
    if config.actor.entropy_from_logits_with_chunking or not with_gradients:
        elements = min(elements, CHUNK_ELEMENTS)
    head = shape.vocab_size * shape.hidden_size * (FLOAT32 + get_dtype_bytes(config))
    return FLOAT32 * LOGIT_COPIES[with_gradients] * elements + (with_gradients and not config.model.lora_rank) * head


def list_allocations(
    shape: ModelShape, config: RunConfig, budget: int, reference_shape: ModelShape | None = None
) -> tuple[Allocation, ...]:
    """List the memory of a run, item by item, in the order of the plan's table. Items of 0 bytes are left out.

    budget: bytes that the run may use on each of its GPUs. Only the size of vLLM's KV cache depends on it.
    reference_shape: shape of a separate reference; None for the policy's.
    """
    context_name, context_bytes = "CUDA context", CUDA_CONTEXT_BYTES
    if count_ranks(config) > 1:  # ranks communicate by NCCL
        context_name, context_bytes = "CUDA context, NCCL", CUDA_CONTEXT_BYTES + NCCL_BYTES
    sizes = count_trained_parameters(shape, config)
    networks = {name: compute_network_bytes(parameters, config) for name, parameters in sizes.items()}
    # Policy and critic as passes without gradients read them. Stage 3 gathers them first: linear layers of blocks in
    # the dtype of passes, and everything else in float32 (`trainable.backend.zero_weights`).
    read_bytes = {name: network.weights for name, network in networks.items()}
    if shards_weights(config):
        saved_bytes = (FLOAT32 - get_dtype_bytes(config)) * _count_block_parameters(shape)
        read_bytes = {name: FLOAT32 * parameters - saved_bytes for name, parameters in sizes.items()}
    reference_bytes = compute_reference_bytes(reference_shape or shape, config)
    # A run that swaps has one network at a time in the phase VALUES, so the largest one counts. In other phases, only
    # the exact KL reads the reference.
    is_reference_largest = reference_bytes > max(read_bytes.values())
    reference_phases = [VALUES] if is_reference_largest else []
    if config.actor.reads_reference_distribution:
        reference_phases += [POLICY_BACKWARD, POLICY_STEP]
    swaps = bool(config.trainer.swap_to_host)
    trained_allocations = [
        *_list_trained_allocations(shape, config, networks),
        _make_swapped_allocation("reference weights", reference_bytes, reference_phases, swaps),
    ]
    pass_allocations = _list_pass_allocations(shape, config)
    if shards_weights(config):
        live_bytes = {name: FLOAT32 * min(ZERO_MAX_LIVE_PARAMETERS, parameters) for name, parameters in sizes.items()}
        # For passes without gradients, one complete network is gathered at a time, so the largest counts in the phase
        # VALUES. In passes with gradients, DeepSpeed holds at most ZERO_MAX_LIVE_PARAMETERS gathered weights. Optimizer
        # steps work on shards.
        gathered_sizes = {
            ROLLOUT: 0 if config.rollout.uses_vllm else read_bytes["policy"],
            VALUES: 0 if swaps and is_reference_largest else max(read_bytes.values()),
            CRITIC_BACKWARD: live_bytes.get("critic", 0),  # no critic on a shared trunk or without gae
            POLICY_BACKWARD: live_bytes["policy"],
        }
        pass_allocations.append(_make_allocation("weights gathered", gathered_sizes))
    pass_allocations.append(_make_allocation(context_name, context_bytes))
    if config.rollout.uses_vllm:
        # The cache gets what it needs, if everything else leaves as much while vLLM is on the GPU.
        phases = (ROLLOUT,) if config.rollout.free_cache_engine else range(len(PHASES))
        phase_totals = sum_by_phase((*trained_allocations, *pass_allocations))
        free_bytes = int(TIGHT_FRACTION * budget) - max(phase_totals[phase] for phase in phases)
        sampler_allocations = _list_vllm_allocations(shape, config, budget, phases, free_bytes)
    else:
        sampler_allocations = _list_sampler_allocations(shape, config)
    allocations = [*trained_allocations, *sampler_allocations, *pass_allocations]
    return tuple(allocation for allocation in allocations if any(allocation.gpu_bytes) or allocation.host_bytes)


def _make_allocation(name: str, sizes: int | Mapping[int, int], host: int = 0) -> Allocation:
    """Make an item. sizes: bytes by index of the phase (others have 0), or a number for all phases."""
    phases = range(len(PHASES))
    return Allocation(name, tuple(sizes if isinstance(sizes, int) else sizes.get(phase, 0) for phase in phases), host)


def _make_swapped_allocation(
    name: str, size: int, phases: Iterable[int], swaps: bool, offloaded_bytes: int = 0
) -> Allocation:
    """Make an item that, if it is swapped, is on the GPU only in `phases` and otherwise in host memory.

    offloaded_bytes: further bytes in host memory that are not swapped.
    """
    if not swaps:
        return _make_allocation(name, size, offloaded_bytes)
    return _make_allocation(name, dict.fromkeys(phases, size), size + offloaded_bytes)


def count_trained_parameters(shape: ModelShape, config: RunConfig) -> dict[str, int]:
    """Count the trained parameters of the policy (with a value head on a shared trunk) and of the critic."""
    return {name: sum(sizes) for name, sizes in list_trained_tensor_sizes(shape, config).items()}


def _list_trained_allocations(
    shape: ModelShape, config: RunConfig, networks: Mapping[str, NetworkBytes]
) -> list[Allocation]:
    """List weights, optimizer state, gradients and optimizer step of each trained network, and LoRA's frozen base."""
    allocations, weights_label = [], "weights"
    if config.model.lora_rank:
        base_name = f"base weights, frozen{', in 4 bits' if config.model.load_in_4bit else ''}"
        allocations, weights_label = [_make_allocation(base_name, compute_base_bytes(shape, config))], "adapters"
    swaps, is_sharded = bool(config.trainer.swap_to_host), shards_weights(config)
    swaps_weights = swaps and not is_sharded  # all phases gather from shards
    phases = {"policy": (POLICY_BACKWARD, POLICY_STEP), "critic": (CRITIC_BACKWARD, CRITIC_STEP)}
    # The policy, which is at least as large as the critic, is read in rollouts, and to copy its weights to the engine.
    reading_phases = {"policy": (ROLLOUT, VALUES), "critic": ()}
    for name, parameters in count_trained_parameters(shape, config).items():
        network, (backward, step) = networks[name], phases[name]
        bucket_bytes = FLOAT32 * min(REDUCE_BUCKET_SIZE, parameters) if config.trainer.uses_deepspeed else 0
        # Gradients exist from a network's backward pass to its optimizer step. DeepSpeed's bucket exists only while
        # gradients are reduced. In stage 3 DeepSpeed keeps the gradients' shard and its bucket in all phases.
        gradient_sizes = {backward: network.gradients + bucket_bytes, step: network.gradients}
        all_phases_size = network.gradients + FLOAT32 * ZERO_BUCKET_SIZE
        # The table shows offloaded bytes with the item to which most of them belong.
        moments_host = network.host if config.trainer.offload_optimizer else 0
        weights_name, weights_host = f"{name} {weights_label}, float32", network.host - moments_host
        weights_phases = (*reading_phases[name], backward, step)
        allocations += [
            _make_swapped_allocation(weights_name, network.weights, weights_phases, swaps_weights, weights_host),
            _make_swapped_allocation(f"{name} master weights", network.master, (backward, step), swaps),
            _make_swapped_allocation(f"{name} AdamW moments", network.moments, (backward, step), swaps, moments_host),
            _make_allocation(f"{name} gradients", all_phases_size if is_sharded else gradient_sizes),
            _make_allocation(f"{name} optimizer step", {step: network.scratch}),
        ]
    return allocations


def compute_saving_bytes(shape: ModelShape, config: RunConfig) -> int:
    """Compute the bytes of host memory that a run needs in addition while it saves a checkpoint.

    With DeepSpeed, rank 0 collects all weights and moments. With torch, a run copies the files that it writes at the
    same time, unless their tensors are already in host memory.
    """
    state_bytes = (FLOAT32 + MOMENT_BYTES) * sum(count_trained_parameters(shape, config).values())
    if config.trainer.uses_deepspeed:
        return state_bytes
    if config.trainer.swap_to_host:
        return 0
    largest_tensor = max(size for sizes in list_trained_tensor_sizes(shape, config).values() for size in sizes)
    file_bytes = max(MAX_TENSORS_FILE_BYTES, FLOAT32 * largest_tensor)
    return min(state_bytes, (config.trainer.num_threads or MAX_DEFAULT_THREADS) * file_bytes)


def _list_pass_allocations(shape: ModelShape, config: RunConfig) -> list[Allocation]:
    """List the temporary memory of the torch engine's passes: copies of weights, activations and logits."""
    # Copies for passes without gradients: the critic needs no more than the policy, which has the head.
    no_grad_bytes = compute_cast_bytes(shape, "policy", config, with_gradients=False)
    if shards_weights(config):  # gathered weights already have the dtype of passes, except the head
        no_grad_bytes = 0 if config.model.dtype == "float32" else BFLOAT16 * _count_cast_head(shape, config)
    rollout, hidden_bytes = config.rollout, FLOAT32 * shape.hidden_size
    block_bytes, num_blocks = compute_block_bytes(shape, config), shape.num_hidden_layers
    rows = max(rollout.log_prob_micro_batch_size_per_gpu, rollout.ref_log_prob_micro_batch_size_per_gpu)
    # Without gradients, one block's activations exist at a time, and the residual stream before and after it.
    forward_bytes = rows * compute_max_tokens(config) * (block_bytes + 2 * hidden_bytes)
    # With gradients, a token takes the saved tensors of every block, 12 h bytes around the blocks, and the gradients
    # within one block during its backward pass: 3 f numbers in the dtype of passes and 8 h bytes. Gradient
    # checkpointing saves only the input of every block (4 h bytes each), and the other tensors of one block at a time.
    is_recomputed = config.model.enable_gradient_checkpointing
    saved_bytes = num_blocks * hidden_bytes + block_bytes if is_recomputed else num_blocks * block_bytes
    backward_bytes = 3 * shape.intermediate_size * get_dtype_bytes(config) + 2 * hidden_bytes
    activations = compute_tokens_per_pass(config) * (saved_bytes + 3 * hidden_bytes + backward_bytes)
    has_critic = "critic" in count_trained_parameters(shape, config)
    unpacked = compute_unpacked_bytes(shape, config)
    critic_copies, policy_copies = (
        compute_cast_bytes(shape, name, config, with_gradients=True) + unpacked for name in ("critic", "policy")
    )
    copy_sizes = {
        ROLLOUT: 0 if rollout.uses_vllm else no_grad_bytes + unpacked,
        VALUES: no_grad_bytes + unpacked,
        CRITIC_BACKWARD: critic_copies * has_critic,
        POLICY_BACKWARD: policy_copies,
    }
    activation_sizes = {VALUES: forward_bytes, CRITIC_BACKWARD: activations * has_critic, POLICY_BACKWARD: activations}
    # The critic has no logits: its value head has one output per token.
    logit_sizes = {
        VALUES: compute_logits_bytes(shape, config, with_gradients=False),
        POLICY_BACKWARD: compute_logits_bytes(shape, config, with_gradients=True),
    }
    return [
        _make_allocation(f"copies in {config.model.dtype}", copy_sizes),
        _make_allocation("activations", activation_sizes),
        _make_allocation("logits", logit_sizes),
    ]


def _list_vllm_allocations(
    shape: ModelShape, config: RunConfig, budget: int, phases: Iterable[int], free_bytes: int
) -> list[Allocation]:
    """List the memory of vLLM: its weights, work space and KV cache.

    The cache has room for all conversations of a training step, or as many as fit, unless kv_cache_gib gives its size.
    With gpu_memory_utilization, the cache is what weights and work space leave of that fraction of the budget.

    phases: when vLLM has its memory on the GPU. free_bytes: bytes of the budget that everything else leaves free in
    these phases, without becoming tight.
    """
    rollout, dtype_bytes = config.rollout, get_dtype_bytes(config)
    weight_bytes = dtype_bytes * count_policy_parameters(shape)
    # Activations of vLLM's largest pass, and distributions of the rows that it decodes. An estimate of what vLLM
    # measures when it starts.
    pass_bytes = VLLM_MAX_BATCHED_TOKENS * (3 * shape.intermediate_size + 4 * shape.hidden_size) * dtype_bytes
    work_bytes = pass_bytes + VLLM_MAX_SEQS * shape.vocab_size * (dtype_bytes + 3 * FLOAT32)
    graph_bytes = 0 if rollout.enforce_eager else CUDA_GRAPH_BYTES
    # The merged weights of a block are collected before vLLM loads them.
    block_parameters = sum(inputs * outputs for inputs, outputs in list_linear_layers(shape).values())
    merged_bytes = FLOAT32 * block_parameters * (config.model.lora_rank > 0)
    other_bytes = weight_bytes + work_bytes + graph_bytes
    if rollout.gpu_memory_utilization is not None:
        kv_bytes = int(rollout.gpu_memory_utilization * budget) - other_bytes
    elif rollout.kv_cache_gib is not None:
        kv_bytes = int(rollout.kv_cache_gib * GIB)
    else:
        needed_bytes = compute_step_kv_bytes(shape, config, dtype_bytes, count_ranks(config))
        smallest_bytes = compute_conversation_kv_bytes(shape, dtype_bytes, compute_max_tokens(config))
        kv_bytes = max(min(needed_bytes, free_bytes - other_bytes - merged_bytes), smallest_bytes)
    # Below 0 there is no cache, and `MemoryPlan.cache_shortfall` says how much vLLM lacks.
    sizes = {"vLLM weights": weight_bytes, "vLLM work space": work_bytes, KV_CACHE_NAME: max(kv_bytes, 0)}
    return [
        *(_make_allocation(name, dict.fromkeys(phases, size)) for name, size in sizes.items()),
        _make_allocation("vLLM CUDA graphs", graph_bytes),
        _make_allocation("a block for vLLM, adapters merged", {ROLLOUT: merged_bytes}),
    ]


def _list_sampler_allocations(shape: ModelShape, config: RunConfig) -> list[Allocation]:
    """List the KV cache of the torch or compiled sampler, and its memory for drawing one token per row."""
    # Concurrent conversations per rank: the maximum over training, validation and test.
    env = config.env
    max_rows = max(env.env_groups * env.group_size, env.val_env_groups * env.val_group_size, env.test_env_groups)
    rows = -(-max_rows * env.max_conversations_per_rollout // count_ranks(config))
    # The cache grows by half its size at a time, so it may be 1.5 times as long as the longest conversation.
    kv_bytes = rows * (compute_max_tokens(config) * 3 // 2) * compute_token_kv_bytes(shape, get_dtype_bytes(config))
    # Drawing a token needs logits, log-probs and probabilities in float32, and in float64 (16 bytes for both) the
    # probabilities once more and their cumulative sums.
    draw_bytes = rows * shape.vocab_size * (3 * FLOAT32 + 16)
    return [
        _make_allocation("sampler KV cache", {ROLLOUT: kv_bytes}),
        _make_allocation("sampler logits", {ROLLOUT: draw_bytes}),
    ]


def sum_by_phase(allocations: tuple[Allocation, ...]) -> tuple[int, ...]:
    """Sum the bytes on each GPU in each of PHASES."""
    return tuple(sum(allocation.gpu_bytes[phase] for allocation in allocations) for phase in range(len(PHASES)))


def compute_host_bytes(allocations: tuple[Allocation, ...], shape: ModelShape, config: RunConfig) -> int:
    """Compute the host bytes of all ranks of a run: the sum of `allocations`, or of the start if it needs more.

    At the start, every rank of stage 3 loads whole networks into host memory, which are then sharded and freed.
    """
    start_bytes = FLOAT32 * sum(count_trained_parameters(shape, config).values()) if shards_weights(config) else 0
    return count_ranks(config) * max(sum(allocation.host_bytes for allocation in allocations), start_bytes)
