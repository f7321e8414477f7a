"""The memory of a run on each of its GPUs, item by item, before it starts. All sizes are in bytes.

Exact for what a trainer keeps, which tests compare with its tensors. Upper bounds for what passes need, since every
conversation is assumed to have maximum length. In comments, h is the hidden size and f the intermediate size.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, PositiveInt

from trainable.config import constants
from trainable.config.run_config import RunConfig
from trainable.rollout import kv_cache_size
from trainable.rollout.kv_cache_size import count_ranks, get_dtype_bytes

GIB, FLOAT32 = 2**30, 4
PHASES = ("rollout", "values", "policy backward", "policy step")
"""The moments at which memory use is highest. values: passes without gradients, for values and for the reference. While
the critic is trained, less is used than while the policy is, which has its logits in addition."""

FOUR_BIT_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Bytes of a weight in 4 bits: its code, and its share of two scales, one per 64 weights and one per 256 scales."""
CONTEXT_BYTES, NCCL_BYTES, CUDA_GRAPH_BYTES = int(0.75 * GIB), 1 * GIB, int(1.5 * GIB)
"""A process's CUDA context and NCCL's buffers, and vLLM's CUDA graphs, which stay while it sleeps. Assumptions."""
REDUCE_BUCKET_SIZE = 500_000_000
"""Gradients that DeepSpeed's stages 1 and 2 collect before they reduce them: its default of reduce_bucket_size."""
TIGHT_FRACTION = 0.95
"""Fraction of the budget above which a fit is tight, because fragmentation in the allocator is not counted."""
KV_CACHE_NAME = "vLLM KV cache"
VLLM_MAX_BATCHED_TOKENS = 16_384
"""vLLM's most tokens per pass: its default from 70 GiB on."""


class ModelShape(BaseModel):
    """The fields of a Qwen2 model's config.json that determine its parameters; other fields are ignored."""

    # strict: a config.json with "36" or 36.0 blocks is refused instead of being converted.
    model_config = ConfigDict(frozen=True, strict=True)

    vocab_size: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt
    tie_word_embeddings: bool = False
    is_plain_qwen2: bool = False
    """Whether our own implementation runs the model (see `trainable.models.qwen2_shape`)."""
    max_position_embeddings: PositiveInt | None = None
    """Tokens of the context; None if only the number of parameters is known."""
    # Of other architectures, whose parameters are counted on the model (see `hub_config.read_sizes`).
    head_size: PositiveInt | None = None
    trunk: tuple[PositiveInt, ...] = ()
    linear: int = 0
    matrices: tuple[tuple[PositiveInt, PositiveInt], ...] = ()

    @property
    def head_dim(self) -> int:
        """Channels of one attention head."""
        return self.head_size or self.hidden_size // self.num_attention_heads

    @property
    def layers(self) -> dict[str, tuple[int, int]]:
        """(inputs, outputs) of each linear layer of a block, by name, for other architectures as in Qwen2."""
        h, f, kv = self.hidden_size, self.intermediate_size, self.num_key_value_heads * self.head_dim
        attention = {"q_proj": (h, h), "k_proj": (h, kv), "v_proj": (h, kv), "o_proj": (h, h)}
        return attention | {"gate_proj": (h, f), "up_proj": (h, f), "down_proj": (f, h)}

    @property
    def all_matrices(self) -> Sequence[tuple[int, int]]:
        """(inputs, outputs) of each linear layer of all blocks, without the head."""
        return self.matrices if self.trunk else [*self.layers.values()] * self.num_hidden_layers

    @property
    def trunk_tensors(self) -> Sequence[int]:
        """Number of elements of every parameter tensor of embedding, blocks and final norm."""
        h, kv = self.hidden_size, self.num_key_value_heads * self.head_dim
        # Matrices, biases of queries, keys and values, and two norms.
        block = [*(inputs * outputs for inputs, outputs in self.layers.values()), h, kv, kv, h, h]
        return self.trunk or [self.embedding, *block * self.num_hidden_layers, h]

    @property
    def trunk_parameters(self) -> int:
        """Parameters of embedding, blocks and final norm."""
        return sum(self.trunk_tensors)

    @property
    def linear_parameters(self) -> int:
        """Parameters of the linear layers of all blocks, including biases: without embedding, norms and head."""
        norms = (2 * self.num_hidden_layers + 1) * self.hidden_size
        return self.linear if self.trunk else self.trunk_parameters - self.embedding - norms

    @property
    def parameters(self) -> int:
        """Parameters of the policy."""
        return self.trunk_parameters + self.own_head

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, and of a head of its own."""
        return self.vocab_size * self.hidden_size

    @property
    def own_head(self) -> int:
        """Parameters of the head; 0 if it is the embedding."""
        return 0 if self.tie_word_embeddings else self.embedding

    @property
    def block_weights(self) -> tuple[int, int]:
        """Parameters per block, all counted before the attention, since plans pass every token through every block."""
        return (self.trunk_parameters - self.embedding) // self.num_hidden_layers, 0


def list_adapted_layers(shape: ModelShape, config: RunConfig) -> list[tuple[int, int]]:
    """List the (inputs, outputs) of the layers of a block that have an adapter; empty without LoRA."""
    names = config.model.lora_target_modules if config.model.lora_rank else ()
    return [layer for name, layer in shape.layers.items() if names == "all-linear" or name in names]


def list_trained_tensors(shape: ModelShape, config: RunConfig) -> dict[str, list[int]]:
    """List the number of elements of each trained tensor by network: `policy` and, if there is one, `critic`.

    With LoRA only the adapters and the value head are trained. The value head belongs to the policy with
    `critic.shared_trunk`, and an advantage estimator without values has none.
    """
    critic, value_head = [*shape.trunk_tensors], [shape.hidden_size, 1]
    policy = critic if shape.tie_word_embeddings else [*critic, shape.own_head]
    if rank := config.model.lora_rank:  # A and B of every adapter
        adapters = [rank * width for layer in list_adapted_layers(shape, config) for width in layer]
        policy = critic = adapters * shape.num_hidden_layers
    if not config.algorithm.estimator.needs_critic:
        return {"policy": policy}
    if config.critic.shared_trunk:
        return {"policy": policy + value_head}
    return {"policy": policy, "critic": critic + value_head}


def count_trained_parameters(shape: ModelShape, config: RunConfig) -> dict[str, int]:
    """Count the trained parameters by network: `policy` and, if there is one, `critic`."""
    return {network: sum(sizes) for network, sizes in list_trained_tensors(shape, config).items()}


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
    model, swaps, items = config.model, config.trainer.swap_to_host, []
    if model.lora_rank:
        items.append(_allocate_always("frozen base weights", compute_frozen_bytes(shape, config, model.load_in_4bit)))
    for name, parameters in count_trained_parameters(shape, config).items():
        items += list_network_allocations(name, parameters, config)
    # With adapters, the frozen base is the reference, unless another model is named.
    if config.needs_reference and (not model.lora_rank or model.reference_path is not None):
        size = compute_frozen_bytes(reference_shape or shape, config)
        resident, host = (0, size) if swaps else (size, 0)
        # If it is swapped, it is on the GPU for its own passes, and for the exact KL also in those of the policy.
        update = size if config.actor.reads_reference_distribution else resident
        items.append(Allocation("reference weights", resident, size, update, update, host))
    elif config.syncs_reference:
        items.append(_allocate_always("reference adapters", compute_moving_reference_bytes(shape, config)))
    items += _list_pass_allocations(shape, config)
    items.append(_allocate_always("CUDA context", CONTEXT_BYTES + (NCCL_BYTES if count_ranks(config) > 1 else 0)))
    if config.rollout.uses_vllm:
        return items + _list_vllm_allocations(shape, config, budget, sum_by_phase(items))
    return [*items, _allocate_sampler(shape, config)]


def list_network_allocations(name: str, parameters: int, config: RunConfig) -> list[Allocation]:
    """List weights, optimizer state and gradients of `policy` or `critic`. Source: ZeRO, arXiv:1910.02054.

    DeepSpeed shards over the ranks moments and a master copy of the weights, from stage 2 on also gradients, and in
    stage 3 weights. Its backward pass has a bucket, and its step flattens a shard's gradients.
    """
    trainer, stage = config.trainer, config.trainer.zero_stage if config.trainer.uses_deepspeed else 0
    # Shards are rounded up, because DeepSpeed pads the parameters so that all shards have one size.
    whole, shard = FLOAT32 * parameters, FLOAT32 * -(-parameters // count_ranks(config))
    weights, gradients = shard if stage == 3 else whole, shard if stage > 1 else whole
    # AdamW has two moments per weight.
    state, flattened = (3 * shard, shard) if stage else (2 * whole, 0)
    bucket_size = constants.ZERO_BUCKET_SIZE if stage == 3 else min(REDUCE_BUCKET_SIZE, parameters)
    bucket = FLOAT32 * bucket_size if stage else 0
    weights_host = state_host = 0
    if stage == 3 and trainer.offload_parameters:
        weights, weights_host = 0, shard
    if stage and trainer.offload_optimizer:
        # Besides the state, the host has gradients from stage 2 on, and two copies of them in stage 3.
        state, state_host, flattened = 0, (stage + 2) * shard, 0
        gradients = gradients if stage == 1 else 0
    # Gradients exist from the backward pass to the step. Stage 3 keeps their shard and the bucket in all phases.
    idle_gradients = gradients + bucket if stage == 3 else 0
    backward_gradients, step_gradients = gradients + bucket, (idle_gradients or gradients) + flattened
    idle_state = state
    if trainer.swap_to_host:
        idle_state, state_host = 0, state
        if stage != 3:  # in stage 3 all phases gather from shards
            weights, weights_host = weights if name == "policy" else 0, weights
    if name == "critic":  # PHASES are those of the policy, in which a swapped critic is in host memory
        state, backward_gradients, step_gradients = idle_state, idle_gradients, idle_gradients
    state_name = "AdamW moments and master weights" if stage else "AdamW moments"
    return [
        _allocate_always(f"{name} {'adapters' if config.model.lora_rank else 'weights'}", weights, weights_host),
        Allocation(f"{name} {state_name}", idle_state, idle_state, state, state, state_host),
        Allocation(f"{name} gradients", idle_gradients, idle_gradients, backward_gradients, step_gradients),
    ]


def compute_frozen_bytes(shape: ModelShape, config: RunConfig, in_4bit: bool = False) -> int:
    """Compute the bytes of a frozen network: `make_frozen_copy`, or `make_frozen_base` under adapters.

    Linear layers have the dtype of passes, or in blocks 4 bits and float32 biases. Everything else is in float32.
    """
    dtype_bytes = get_dtype_bytes(config)
    linear_bytes = dtype_bytes * shape.linear_parameters
    if in_4bit:
        weights = sum(inputs * outputs for inputs, outputs in shape.all_matrices)
        linear_bytes = int(FOUR_BIT_BYTES * weights) + FLOAT32 * (shape.linear_parameters - weights)
    other_parameters = shape.trunk_parameters - shape.linear_parameters
    return FLOAT32 * other_parameters + dtype_bytes * shape.own_head + linear_bytes


def compute_moving_reference_bytes(shape: ModelShape, config: RunConfig) -> int:
    """Compute the bytes of a reference that becomes a later policy: a frozen copy, or adapters in float32."""
    if not config.model.lora_rank:
        return compute_frozen_bytes(shape, config)
    return (
        FLOAT32 * config.model.lora_rank * shape.num_hidden_layers * sum(map(sum, list_adapted_layers(shape, config)))
    )


def compute_block_bytes(shape: ModelShape, config: RunConfig) -> int:
    """Compute the bytes that one block saves per token for its backward pass, as counted by autograd's hooks.

    The float32 output of attention counts twice: grouped by length, and concatenated. In bfloat16, norms and the
    residual stream stay in float32. Both add a float32 number per head for the softmax normalizer and one per norm.
    With LoRA every adapter adds the input of its matrix B, and frozen norms save less; this is exact for adapters on
    all layers and an upper bound otherwise.
    """
    hidden, wide, kv = shape.hidden_size, shape.intermediate_size, shape.num_key_value_heads * shape.head_dim
    saved_bytes = 24 * hidden + 4 * kv + 8 * wide
    if config.model.dtype == "float32":
        saved_bytes = FLOAT32 * (9 * hidden + 2 * kv + 4 * wide)
    if config.model.lora_rank:
        adapter_bytes = get_dtype_bytes(config) * config.model.lora_rank
        saved_bytes += adapter_bytes * len(list_adapted_layers(shape, config)) - 2 * FLOAT32 * hidden
    return saved_bytes + FLOAT32 * (shape.num_attention_heads + 2)


def compute_copied_bytes(shape: ModelShape, config: RunConfig) -> tuple[int, int]:
    """Compute the bytes of copies of weights in passes without and with gradients."""
    model, dtype_bytes = config.model, get_dtype_bytes(config)
    # Autocast copies the float32 weights of a matrix product: of one block at a time, or with gradients and without
    # gradient checkpointing of all blocks. With LoRA these are adapters, and a head that is not the embedding is frozen
    # in the dtype of passes.
    block, head = shape.linear_parameters // shape.num_hidden_layers, shape.embedding
    if model.lora_rank:
        block = model.lora_rank * sum(map(sum, list_adapted_layers(shape, config)))
        head = head if shape.tie_word_embeddings else 0
    if model.dtype == "float32":
        block = head = 0
    if model.load_in_4bit:  # a pass unpacks one layer at a time
        head += max((inputs * outputs for inputs, outputs in shape.all_matrices), default=0)
    num_blocks = 1 if model.enable_gradient_checkpointing else shape.num_hidden_layers
    no_grad_bytes, grad_bytes = dtype_bytes * (block + head), dtype_bytes * (num_blocks * block + head)
    if shards_weights(config):
        # Passes without gradients gather a network, linear layers of blocks in their dtype (`backend.zero`),
        # and copy the head. In passes with gradients, DeepSpeed holds a limited number of gathered weights.
        parameters = count_trained_parameters(shape, config)["policy"]
        other_parameters = parameters - shape.linear_parameters
        no_grad_bytes = FLOAT32 * other_parameters + dtype_bytes * (shape.linear_parameters + head)
        grad_bytes += FLOAT32 * min(constants.ZERO_MAX_LIVE_PARAMETERS, parameters)
    return no_grad_bytes, grad_bytes


def _list_pass_allocations(shape: ModelShape, config: RunConfig) -> list[Allocation]:
    """List the temporary memory of the torch engine's passes: copies of weights, activations and logits."""
    model, rollout, dtype_bytes = config.model, config.rollout, get_dtype_bytes(config)
    hidden_bytes, block_bytes = FLOAT32 * shape.hidden_size, compute_block_bytes(shape, config)
    no_grad_copies, copies = compute_copied_bytes(shape, config)
    rollout_copies = 0 if rollout.uses_vllm else no_grad_copies
    if rollout.uses_vllm and model.lora_rank:  # it is sent the merged weights of a block at a time
        rollout_copies = FLOAT32 * sum(inputs * outputs for inputs, outputs in shape.layers.values())
    # Without gradients, one block's activations exist at a time, and the residual stream before and after it.
    max_tokens = kv_cache_size.compute_max_tokens(config)
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
    head_gradient = 0 if model.lora_rank else shape.embedding * (FLOAT32 + dtype_bytes)
    return [
        Allocation("copies of weights", rollout_copies, no_grad_copies, copies),
        Allocation("activations", values=no_grad_activations, backward=tokens * token_bytes),
        Allocation("logits", values=3 * FLOAT32 * chunk, backward=7 * FLOAT32 * elements + head_gradient),
    ]


def _list_vllm_allocations(
    shape: ModelShape, config: RunConfig, budget: int, other_bytes: tuple[int, ...]
) -> list[Allocation]:
    """List the memory of vLLM: its weights, work space and KV cache. other_bytes: of all other items, per phase.

    The cache has room for all conversations of a training step, or as many as fit, unless kv_cache_gib gives its size.
    With gpu_memory_utilization, the cache is what weights and work space leave of that fraction of the budget.
    """
    rollout, dtype_bytes = config.rollout, get_dtype_bytes(config)
    # Activations of the largest pass, and distributions of the rows that it decodes: an estimate of what vLLM measures.
    pass_bytes = VLLM_MAX_BATCHED_TOKENS * (3 * shape.intermediate_size + 4 * shape.hidden_size) * dtype_bytes
    work_bytes = pass_bytes + constants.VLLM_MAX_SEQS * shape.vocab_size * (dtype_bytes + 3 * FLOAT32)
    sizes = {"vLLM weights": dtype_bytes * shape.parameters, "vLLM work space": work_bytes}
    graph_bytes = 0 if rollout.enforce_eager else CUDA_GRAPH_BYTES
    engine_bytes = sum(sizes.values()) + graph_bytes
    if rollout.gpu_memory_utilization is not None:
        kv_bytes = max(int(rollout.gpu_memory_utilization * budget) - engine_bytes, 0)
    elif rollout.kv_cache_gib is not None:
        kv_bytes = int(rollout.kv_cache_gib * GIB)
    else:
        used_bytes = engine_bytes + (other_bytes[0] if rollout.free_cache_engine else max(other_bytes))
        kv_bytes = min(kv_cache_size.compute_step_kv_bytes(shape, config), int(TIGHT_FRACTION * budget) - used_bytes)
        kv_bytes = max(kv_bytes, kv_cache_size.compute_conversation_kv_bytes(shape, config))
    sizes[KV_CACHE_NAME] = kv_bytes
    allocate = Allocation if rollout.free_cache_engine else _allocate_always
    return [*(allocate(name, size) for name, size in sizes.items()), _allocate_always("vLLM CUDA graphs", graph_bytes)]


def _allocate_sampler(shape: ModelShape, config: RunConfig) -> Allocation:
    """Compute the memory of the torch or compiled sampler, for all conversations of a rank at once."""
    env = config.env
    max_rows = max(env.env_groups * env.group_size, env.val_env_groups * env.val_group_size, env.test_env_groups)
    # With branching, a conversation has only some of the episodes.
    rows = -(-max_rows * env.max_conversations_per_rollout // count_ranks(config))
    tokens = kv_cache_size.compute_max_tokens(config)
    # The cache grows by half its size at a time, so it may be 1.5 times as long as the longest conversation.
    slots = tokens * 3 // 2
    kv_bytes = slots * kv_cache_size.compute_token_kv_bytes(shape, config)
    # Drawing a token needs logits, log-probs and probabilities in float32, and in float64 probabilities and their sums.
    draw_bytes = shape.vocab_size * (3 * FLOAT32 + 16)
    # Branches read their prefixes in one pass, which has a bias per token and slot. Other prompts are short.
    trees = config.episodes_per_step // config.rollout.episodes_per_tree
    branches = -(-trees * config.rollout.ts_n // count_ranks(config))
    token_bytes = compute_block_bytes(shape, config) + FLOAT32 * (2 * shape.hidden_size + slots)
    prefix_bytes = branches * tokens * token_bytes
    return Allocation("sampler KV cache and logits", rollout=rows * (kv_bytes + draw_bytes) + prefix_bytes)


def compute_host_bytes(allocations: Iterable[Allocation], shape: ModelShape, config: RunConfig) -> int:
    """Compute the host bytes of all ranks: of `allocations`, or of whole networks, which stage 3 loads at the start."""
    start_bytes = FLOAT32 * sum(count_trained_parameters(shape, config).values()) if shards_weights(config) else 0
    return count_ranks(config) * max(sum(item.host for item in allocations), start_bytes)
