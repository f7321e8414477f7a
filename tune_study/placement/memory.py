"""The memory that a run takes on each of its GPUs, part by part, worked out before it starts. Sizes in bytes.

Pure formulas over a model's shape and a run's settings. What the trainer allocates for good is exact; what passes hold
for a while is an upper bound, since every conversation is taken to be as long as it can be. Symbols: N parameters of a
network, R ranks (GPUs of the run), h hidden size, f intermediate size, kv channels of all key heads, V vocabulary.
"""

from typing import NamedTuple

from trainable.config.constants import CHUNK_ELEMENTS, TOKENS_PER_PASS, ZERO_BUCKET, ZERO_LIVE
from trainable.config.run_config import RunConfig
from tune_study.placement.model_size import (
    ModelShape,
    adapted_layers,
    linear_elements,
    linear_layers,
    policy_parameters,
    trained_tensors,
)

GIB = 2**30
PHASES = ("rollout", "values", "critic backward", "critic step", "policy backward", "policy step", "start")
"""When memory is at its highest: while episodes are sampled; in passes without gradients (values, reference); in the
passes with gradients, and in the optimizer step, of critic and of policy; and before weights are dealt out."""
ROLLOUT, VALUES, CRITIC_BACKWARD, CRITIC_STEP, POLICY_BACKWARD, POLICY_STEP, START = range(len(PHASES))

FLOAT32, BFLOAT16 = 4, 2
MOMENT_BYTES = 2 * FLOAT32
LOGIT_COPIES = {True: 7, False: 3}
"""Float32 copies of those logits, in passes with gradients and without: see there."""
TURN_TOKENS = {"full": 320, "compact": 16}
"""Tokens that the game says a turn. full: the published limit of 3600, less five replies of 400, over five turns."""
CONTEXT = int(0.75 * GIB)
"""A process's CUDA context with its libraries' work spaces; an assumption, they differ between drivers."""
COMMUNICATION = 1 * GIB
"""NCCL's buffers, where a run has several ranks; an assumption."""
BUCKET = 500_000_000
"""Elements that DeepSpeed reduces at once (reduce_bucket_size)."""
VLLM_ROWS, VLLM_TOKENS = 256, 16_384
"""Rows that vLLM decodes at once (max_num_seqs), and tokens that one of its passes takes (max_num_batched_tokens)."""


class Part(NamedTuple):
    """One part of a run's memory: bytes on each GPU at each of PHASES, and bytes of each rank in the host's memory."""

    name: str
    gpu: tuple[int, ...]
    host: int = 0


class Network(NamedTuple):
    """Bytes of each rank for a network that is trained, by what they are for.

    weights: float32. master: DeepSpeed's own copy of the weights that a rank updates. moments: AdamW's two. gradients:
    float32. scratch: what the optimizer step makes for itself. host: of these, what is offloaded.
    """

    weights: int
    master: int
    moments: int
    gradients: int
    scratch: int
    host: int


def ranks(config: RunConfig) -> int:
    """R: processes of a run, one a GPU; a run on a fraction of a GPU, or on none, has one."""
    return max(1, int(config.trainer.n_gpus_per_node))


def uses_deepspeed(config: RunConfig) -> bool:
    """Whether DeepSpeed owns the optimizers."""
    return config.trainer.strategy == "deepspeed" or ranks(config) > 1


def deals_weights(config: RunConfig) -> bool:
    """Whether every rank keeps a part of the weights only: ZeRO stage 3."""
    return uses_deepspeed(config) and config.trainer.zero_stage == 3


def network_bytes(parameters: int, config: RunConfig) -> Network:
    """A trained network of `parameters` float32 parameters under the run's ZeRO stage.

    Torch: 4 N weights, 8 N moments, 4 N gradients. DeepSpeed: every rank has 4 N weights; stage 1 deals the optimizer's
    own part (a master copy of 4 N and 8 N moments) out to the R ranks, stage 2 the 4 N of gradients too,
    stage 3 the weights. offload_optimizer moves a rank's master copy and moments to the host, from stage 2 on with its
    gradients, of which stage 3 has two copies there; offload_parameters its part of the weights. In the step AdamW
    makes square roots of as many elements as it updates, and DeepSpeed flattens their gradients.
    Source: Rajbhandari et al. 2020, arXiv:1910.02054; deepspeed 0.19.
    """
    whole, part = FLOAT32 * parameters, FLOAT32 * -(-parameters // ranks(config))
    if not uses_deepspeed(config):
        return Network(whole, 0, 2 * whole, whole, whole, 0)
    trainer = config.trainer
    gradients = whole if trainer.zero_stage == 1 else part
    weights = part if trainer.zero_stage == 3 else whole
    on_host = part if trainer.offload_parameters else 0
    if not trainer.offload_optimizer:
        return Network(weights - on_host, part, 2 * part, gradients, 2 * part, on_host)
    moved = {1: 3, 2: 4, 3: 5}[trainer.zero_stage] * part
    return Network(weights - on_host, 0, 0, gradients if trainer.zero_stage == 1 else 0, 0, on_host + moved)


def read_bytes(shape: ModelShape, parameters: int, config: RunConfig) -> int:
    """A network that stage 3 gathers to be read: linear layers of blocks in the type of the passes, the rest float32.

    As `trainable.backend.zero_weights` gathers it.
    """
    head = 0 if shape.tie_word_embeddings else shape.vocab_size * shape.hidden_size
    linear = linear_elements(shape) - head
    return FLOAT32 * (parameters - linear) + compute_bytes(config) * linear


def reference_bytes(shape: ModelShape, config: RunConfig) -> int:
    """A reference of its own; 0 where no loss and no reward needs it, and with LoRA, where the base is it."""
    is_needed = config.actor.use_kl_loss or config.algorithm.use_kl_in_reward
    return frozen_bytes(shape, config) if is_needed and not config.model.lora_rank else 0


def frozen_bytes(shape: ModelShape, config: RunConfig) -> int:
    """A frozen network: linear layers in the type of the passes, embedding (a tied head too) and norms in float32.

    As `trainable.models.load.frozen` makes it.
    """
    linear = linear_elements(shape)
    return FLOAT32 * (policy_parameters(shape) - linear) + compute_bytes(config) * linear


def cast_bytes(shape: ModelShape, name: str, parameters: int, config: RunConfig) -> int:
    """Copies of a network's weights in the type of the passes, which autocast keeps while one runs; 0 in float32.

    name: policy or critic. Only what enters a matrix product is copied: an embedding that is not also the head stays
    as it is. With LoRA that is the adapters and a tied head: the other frozen layers have the type already.
    """
    if config.model.dtype == "float32":
        return 0
    is_multiplied = shape.tie_word_embeddings and name == "policy"
    if config.model.lora_rank:
        return BFLOAT16 * (parameters + (shape.vocab_size * shape.hidden_size if is_multiplied else 0))
    return BFLOAT16 * (parameters - (0 if is_multiplied else shape.vocab_size * shape.hidden_size))


def compute_bytes(config: RunConfig) -> int:
    """Bytes of a number in passes."""
    return FLOAT32 if config.model.dtype == "float32" else BFLOAT16


def longest(config: RunConfig) -> int:
    """Tokens of a conversation at most: all its turns with replies of full length, within max_model_len."""
    tokens = config.env.max_turn * (config.rollout.response_length + TURN_TOKENS[config.model.prompt_style])
    return min(tokens, config.rollout.max_model_len or tokens)


def block_bytes(shape: ModelShape, config: RunConfig) -> int:
    """What one block keeps of one token for its backward pass.

    float32: 4 (9 h + 2 kv + 4 f), of which attention's output twice, by length and end to end; bfloat16: 24 h + 4 kv +
    8 f, since norms and the residual stream stay float32; in both the softmax's normaliser of each head and the norms'
    two factors. Counted over the tensors that autograd saves. With LoRA every adapter adds what it multiplies with B,
    as many numbers as its rank, and frozen norms keep 8 h less; exact for adapters on all layers, an upper bound for
    some.
    """
    hidden, wide, kv = shape.hidden_size, shape.intermediate_size, shape.num_key_value_heads * shape.head_dim
    factors = FLOAT32 * (shape.num_attention_heads + 2)
    if config.model.lora_rank:
        adapters = config.model.lora_rank * len(adapted_layers(shape, config.model))
        factors += compute_bytes(config) * adapters - 2 * FLOAT32 * hidden
    if config.model.dtype == "float32":
        return FLOAT32 * (9 * hidden + 2 * kv + 4 * wide) + factors
    return 24 * hidden + 4 * kv + 8 * wide + factors


def tokens_a_pass(config: RunConfig) -> int:
    """Tokens of the largest pass with gradients, which has no padding: at most a rank's rows of a mini-batch."""
    most = max(config.actor.ppo_mini_batch_size, config.critic.ppo_mini_batch_size)
    return min(-(-most // ranks(config)) * longest(config), max(TOKENS_PER_PASS["cuda"], longest(config)))


def activation_bytes(shape: ModelShape, config: RunConfig) -> int:
    """What the passes with gradients hold of activations.

    A token: the saved tensors of every block, or with gradient checkpointing each block's input (4 h) and one block's
    saved tensors; 12 h around the blocks; and 3 f numbers and 8 h bytes of gradients while a block goes backward.
    """
    block, hidden = block_bytes(shape, config), shape.hidden_size
    working = 3 * shape.intermediate_size * compute_bytes(config) + 2 * FLOAT32 * hidden
    blocks = shape.num_hidden_layers * block
    if config.model.enable_gradient_checkpointing:
        blocks = shape.num_hidden_layers * FLOAT32 * hidden + block
    return tokens_a_pass(config) * (blocks + 3 * FLOAT32 * hidden + working)


def logits_bytes(shape: ModelShape, config: RunConfig, with_gradients: bool) -> int:
    """Logits of CHUNK_ELEMENTS, or with gradients of a whole pass where chunking is off, in all their copies.

    With gradients also the head's, unless it is frozen: a sum in float32, and a summand in the type of the passes.
    """
    elements = tokens_a_pass(config) * shape.vocab_size
    if config.actor.entropy_from_logits_with_chunking or not with_gradients:
        elements = min(elements, CHUNK_ELEMENTS)
    head = shape.vocab_size * shape.hidden_size * (FLOAT32 + compute_bytes(config))
    return FLOAT32 * LOGIT_COPIES[with_gradients] * elements + (with_gradients and not config.model.lora_rank) * head


def cache_bytes(shape: ModelShape, number: int) -> int:
    """Keys and values of one token in all blocks, `number` bytes each."""
    return 2 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim * number


def rows_at_once(config: RunConfig) -> int:
    """Conversations that one rank plays at once: of training, validation or test, whichever has most."""
    env = config.env
    most = max(env.env_groups * env.group_size, env.val_env_groups * env.val_group_size, env.test_env_groups)
    return -(-most // ranks(config))


def parts(shape: ModelShape, config: RunConfig, share: int) -> tuple[Part, ...]:
    """All parts of a run that has `share` bytes of each of its GPUs; parts of no bytes are left out."""
    found = [
        *_trained(shape, config),
        _always("reference weights", reference_bytes(shape, config)),
        *(_vllm(shape, config, share) if config.rollout.name == "vllm" else _torch_sampler(shape, config)),
        *_passes(shape, config),
        *_dealt(shape, config),
        _always("CUDA context" + (", NCCL" if ranks(config) > 1 else ""),
                CONTEXT + (COMMUNICATION if ranks(config) > 1 else 0)),
    ]  # fmt: skip
    return tuple(part for part in found if any(part.gpu) or part.host)


def _always(name: str, size: int, host: int = 0) -> Part:
    return Part(name, (size,) * len(PHASES), host)


def _at(name: str, sizes: dict[int, int], host: int = 0) -> Part:
    """A part that is there at some moments only: index of the moment -> bytes."""
    return Part(name, tuple(sizes.get(moment, 0) for moment in range(len(PHASES))), host)


def trained_parameters(shape: ModelShape, config: RunConfig) -> dict[str, int]:
    """Parameters that are trained: of the policy (with a value head on a shared trunk), and of the critic."""
    return {name: sum(sizes) for name, sizes in trained_tensors(shape, config).items()}


def _trained(shape: ModelShape, config: RunConfig) -> list[Part]:
    """The base of adapters; and weights, optimizer, gradients and step of each network that is trained."""
    found, weights = [], "weights"
    if config.model.lora_rank:
        found, weights = [_always("base weights, frozen", frozen_bytes(shape, config))], "adapters"
    moments = {"policy": (POLICY_BACKWARD, POLICY_STEP), "critic": (CRITIC_BACKWARD, CRITIC_STEP)}
    for name, parameters in trained_parameters(shape, config).items():
        network, (backward, step) = network_bytes(parameters, config), moments[name]
        bucket = FLOAT32 * min(BUCKET, parameters) if uses_deepspeed(config) else 0
        gradients = _at(f"{name} gradients", {backward: network.gradients + bucket, step: network.gradients})
        if deals_weights(config):  # DeepSpeed keeps what it sums them in
            gradients = _always(f"{name} gradients", network.gradients + FLOAT32 * ZERO_BUCKET)
        on_host = "AdamW moments" if config.trainer.offload_optimizer else "weights"
        found += [
            _always(f"{name} {weights}, float32", network.weights, network.host if on_host == "weights" else 0),
            _always(f"{name} master weights", network.master),
            _always(f"{name} AdamW moments", network.moments, network.host if on_host != "weights" else 0),
            gradients,
            _at(f"{name} optimizer step", {step: network.scratch}),
        ]
    return found


def _dealt(shape: ModelShape, config: RunConfig) -> list[Part]:
    """What stage 3 gathers of weights for a while, and what there is before it has dealt them out."""
    if not deals_weights(config):
        return []
    sizes = trained_parameters(shape, config)
    read = {name: read_bytes(shape, parameters, config) for name, parameters in sizes.items()}
    live = {name: FLOAT32 * min(ZERO_LIVE, parameters) for name, parameters in sizes.items()}
    samples = config.rollout.name == "torch"
    return [
        _at("weights gathered", {
            ROLLOUT: read["policy"] if samples else 0, VALUES: max(read.values()),
            CRITIC_BACKWARD: live.get("critic", 0), POLICY_BACKWARD: live["policy"],
        }),
        _at("networks before they are dealt out", {START: FLOAT32 * sum(sizes.values())}),
    ]  # fmt: skip


def saving_bytes(shape: ModelShape, config: RunConfig) -> int:
    """What a run holds in the host's memory while it saves a state: all weights and moments, which rank 0 collects."""
    return (FLOAT32 + MOMENT_BYTES) * sum(trained_parameters(shape, config).values())


def _passes(shape: ModelShape, config: RunConfig) -> list[Part]:
    """What passes hold while they run: copies of weights, activations, logits."""
    sizes = trained_parameters(shape, config)
    copies = {name: cast_bytes(shape, name, parameters, config) for name, parameters in sizes.items()}
    # What stage 3 has gathered to be read is in the type of the passes already, but for the head.
    head = cast_bytes(shape, "head", 2 * shape.vocab_size * shape.hidden_size, config)
    read = dict.fromkeys(copies, head) if deals_weights(config) else copies
    rollout = config.rollout
    rows = max(rollout.log_prob_micro_batch_size_per_gpu, rollout.ref_log_prob_micro_batch_size_per_gpu)
    forward = rows * longest(config) * (block_bytes(shape, config) + 2 * FLOAT32 * shape.hidden_size)
    with_critic = "critic" in sizes
    held, logits = activation_bytes(shape, config), logits_bytes(shape, config, with_gradients=True)
    return [
        _at(f"copies in {config.model.dtype}", {
            ROLLOUT: read["policy"] if rollout.name == "torch" else 0, VALUES: max(read.values()),
            CRITIC_BACKWARD: copies.get("critic", 0), POLICY_BACKWARD: copies["policy"],
        }),
        _at("activations", {VALUES: forward, CRITIC_BACKWARD: held * with_critic, POLICY_BACKWARD: held}),
        _at("logits", {VALUES: logits_bytes(shape, config, with_gradients=False), POLICY_BACKWARD: logits}),
    ]  # fmt: skip


def _vllm(shape: ModelShape, config: RunConfig, share: int) -> list[Part]:
    """vLLM's part: gpu_memory_utilization of the run's share, of which what its weights leave is its cache."""
    rollout = config.rollout
    weights = compute_bytes(config) * policy_parameters(shape)
    given = int(rollout.gpu_memory_utilization * share)
    work = vllm_work_bytes(shape, config)
    cache = max(given - weights - work, 0)
    when = (ROLLOUT,) if rollout.free_cache_engine else range(START)
    block = sum(inputs * outputs for inputs, outputs in linear_layers(shape).values())
    return [
        _at("vLLM weights", dict.fromkeys(when, weights), weights if rollout.free_cache_engine else 0),
        _at("vLLM work space", dict.fromkeys(when, work)),
        _at("vLLM KV cache", dict.fromkeys(when, cache)),
        # vLLM takes a block over when it has all of it.
        _at("a block for vLLM, adapters merged", {ROLLOUT: FLOAT32 * block * (config.model.lora_rank > 0)}),
    ]


def vllm_work_bytes(shape: ModelShape, config: RunConfig) -> int:
    """Activations of vLLM's largest pass, and the distributions of the rows that it decodes at once; an estimate."""
    number = compute_bytes(config)
    tokens = VLLM_TOKENS * (3 * shape.intermediate_size + 4 * shape.hidden_size) * number
    return tokens + VLLM_ROWS * shape.vocab_size * (number + 3 * FLOAT32)


def _torch_sampler(shape: ModelShape, config: RunConfig) -> list[Part]:
    """The torch sampler's cache, which grows by half at a time, and what drawing one token of each row takes."""
    rows = rows_at_once(config)
    cache = rows * (longest(config) * 3 // 2) * cache_bytes(shape, compute_bytes(config))
    # `draw`: logits, log-probs and probabilities in float32, heights and the numbers they sum in float64.
    drawn = rows * shape.vocab_size * (3 * FLOAT32 + 16)
    return [_at("sampler KV cache", {ROLLOUT: cache}), _at("sampler logits", {ROLLOUT: drawn})]


def totals(found: tuple[Part, ...]) -> tuple[int, ...]:
    """Bytes on each GPU at each of PHASES: the sum over parts."""
    return tuple(sum(part.gpu[moment] for part in found) for moment in range(len(PHASES)))


def host_bytes(found: tuple[Part, ...], config: RunConfig) -> int:
    """What all ranks of a run keep in the host's memory."""
    return ranks(config) * sum(part.host for part in found)
