"""Sampling engines of a trainer: torch or compiled code with the trainer's weights, or vLLM with its own copy.

A copy has the trainer's weights only after a sync, so there are two checks. After each sync, engine and trainer compute
log-probs of a fixed prompt, and the run ends if they differ. After each rollout, unless rollout.recompute_logprobs is
off, the trainer recomputes the log-probs of all sampled tokens, trains with these, and reports their mismatch with the
engine's. This mismatch never ends a run: rounding alone makes it grow when a policy collapses, and such runs are what
a study is about.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainable.algo.batching import split_by_tokens
from trainable.algo.vocabulary import compute_token_statistics, logprobs_from_hidden
from trainable.config.constants import CHUNK_ELEMENTS
from trainable.config.run_config import RunConfig
from trainable.config.seeds import make_rng
from trainable.files.step_phase import STEP_PHASE
from trainable.models.interface import LanguageModel, Shape
from trainable.models.load import Policy, allow_for_engine, load_policy, make_pass_settings
from trainable.models.lora import get_base_weights, iter_hub_weights
from trainable.rollout.episode import Episode, collate
from trainable.rollout.kv_cache_size import compute_conversation_kv_bytes, compute_step_kv_bytes
from trainable.rollout.sampler import Conversation, Sampler, SamplingParams
from trainable.rollout.torch_sampler import TorchSampler
from trainable.runs.failures import NonFiniteError

if TYPE_CHECKING:
    from trainable.rollout.vllm_sampler import VllmSampler  # it needs an optional package


class EngineMismatchError(ArithmeticError):
    """The engine's log-probs of the fixed prompt differ from the trainer's: its weights differ, so no retry helps."""


class LogprobMismatch(NamedTuple):
    """Mismatch over N sampled tokens, with d = trainer's log-prob minus engine's log-prob.

    mean_abs, max_abs: mean and maximum of |d|, in nats. kl: KL(engine || trainer) in nats per token, estimated as the
    mean of exp(d) - 1 - d (k3, Schulman 2020), which is never negative. ess_fraction: effective sample size of the
    weights w = exp(d), as a fraction of N: (sum w)^2 / (N sum w^2), in (0, 1] (Kish 1965); 1 if all weights are equal.
    """

    mean_abs: float
    max_abs: float
    kl: float
    ess_fraction: float


def measure_mismatch(trainer_logprobs: Tensor, engine_logprobs: Tensor, step: int) -> LogprobMismatch:
    """Compare log-probs (N,) of the same N >= 1 tokens, sampled in `step` at the same temperature.

    Raises NonFiniteError if log-probs are not finite, since this is not a mismatch.
    """
    log_probs = {"trainer": trainer_logprobs, "engine": engine_logprobs}
    names = [name for name, values in log_probs.items() if not bool(torch.isfinite(values).all())]
    if names:
        raise NonFiniteError(f"log-probs of the {' and the '.join(names)} were not finite at step {step}")
    difference = trainer_logprobs.double() - engine_logprobs.double()
    # Subtract the maximum to prevent overflow. A common factor does not change the effective sample size.
    weights = (difference - difference.max()).exp()
    return LogprobMismatch(
        mean_abs=float(difference.abs().mean()),
        max_abs=float(difference.abs().max()),
        kl=float((torch.expm1(difference) - difference).mean()),  # KL(engine || trainer): tokens are the engine's
        ess_fraction=float(weights.sum() ** 2 / (len(weights) * (weights**2).sum())),
    )


def check_mismatch(mean_abs: float, tolerance: float, step: int) -> None:
    """Raise EngineMismatchError if the mean |difference| at `step`, in nats, is above `tolerance`."""
    if mean_abs <= tolerance:
        return
    raise EngineMismatchError(
        f"After the sync of step {step} the engine's log-probs of a fixed prompt differ from the trainer's by "
        f"{mean_abs:.3g} nats per token on average, and {tolerance:g} is allowed: the engine samples from other "
        f"weights than the trainer trains. Check that the weights were synced to the engine. If only rounding differs, "
        f"raise the limit with --set rollout.logprob_tolerance={2 * mean_abs:.1g}, or compute in higher "
        f"precision with --set model.dtype=float32."
    )


STARTING_UTILIZATION = 0.01
"""Fraction of a GPU that must be free when vLLM starts with a KV cache of a given size. vLLM does not use it otherwise,
and the memory plan has already checked that a run fits."""

GatherWeights = Callable[[], AbstractContextManager[None]]
"""Returns a context in which the trainer's weights are readable (see `TorchBackend.gather_weights`)."""


class Engine:
    """Samples with the trainer's weights, and defines the interface of all engines.

    Use `sampler` within `wake_up` only. This engine has nothing to sync, recompute or compare. `SyncedEngine` has its
    own copy of the weights.
    """

    synced_step = 0
    """The step of the last `sync_weights`; 0 before. Seeds the noise of rollout.weight_noise."""
    prompt_mismatch: float | None = None
    """Mean absolute difference of log-probs on the fixed prompt after the last sync, in nats; None before."""

    def __init__(self, sampler: Sampler, gather_weights: GatherWeights) -> None:
        self.sampler, self.gather_weights = sampler, gather_weights

    def sleep(self) -> None:
        """Free the engine's own memory, if any, for an update."""

    def wake_up(self) -> AbstractContextManager[None]:
        """Return a context in which the engine can sample. All ranks must enter it."""
        return self.gather_weights()

    def sync_weights(self, step: int) -> None:
        """Copy the trainer's weights, which changed at `step`, to the engine if it has its own copy.

        Raises EngineMismatchError if log-probs then differ by more than rollout.logprob_tolerance.
        """
        self.synced_step = step

    def recompute_logprobs(self, episodes: Sequence[Episode], temperature: float) -> list[Episode]:
        """Recompute log-probs and entropies of `episodes`, sampled at `temperature`, with the trainer's model."""
        return list(episodes)  # the trainer's pass would give the same numbers

    def measure_mismatch(self, episodes: Sequence[Episode], step: int) -> LogprobMismatch | None:
        """Measure the mismatch of engine and trainer over all sampled tokens; None if nothing was recomputed.

        Raises NonFiniteError if a log-prob is not finite.
        """
        return None

    def close(self) -> None:
        """Shut down the engine and free its own memory, if any."""


class CopySampler:
    """Samples from `copy`, which has the policy's weights only after `update_weights`, as `VllmSampler` does.

    It allows studying engines whose log-probs differ from the trainer's on any machine. copy: the policy's model,
    loaded again. sampler: a sampler of `copy.model`.
    """

    is_sleeping = False
    """Whether its weights have been discarded until the next `update_weights`. A copy never sleeps."""

    def __init__(self, copy: Policy, sampler: Sampler) -> None:
        self.model, self.sampler = copy.model, sampler

    def start_conversation(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, rngs: Sequence[np.random.Generator]
    ) -> Conversation:
        """Start a conversation with the copy (see `Sampler.start_conversation`)."""
        return self.sampler.start_conversation(prompts, params, rngs)

    @torch.no_grad()
    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy the policy's weights, given by their hub names. Raises KeyError for an unknown name."""
        own_weights = {self.model.to_hub_name(name): weight for name, weight in self.model.state_dict().items()}
        for name, weight in weights:
            own_weights[name].copy_(weight)

    def compute_logprobs(self, token_ids: Sequence[Sequence[int]]) -> list[npt.NDArray[np.float32]]:
        """Compute log-probs (T - 1,) of each row's tokens after the first, at temperature 1."""
        device = self.model.model.embed_tokens.weight.device
        return [compute_row_logprobs(self.model, torch.tensor([ids], device=device)).cpu().numpy() for ids in token_ids]

    def sleep(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class SyncedEngine(Engine):
    """Samples in the trainer's process with a sampler that has its own copy of the weights.

    prompt: token ids of the fixed prompt whose log-probs are compared after each sync.
    """

    sampler: "CopySampler | VllmSampler"

    def __init__(
        self,
        sampler: "CopySampler | VllmSampler",
        config: RunConfig,
        policy: Policy,
        device: torch.device,
        prompt: list[int],
        gather_weights: GatherWeights,
    ) -> None:
        super().__init__(sampler, gather_weights)
        self.config, self.model, self.device, self.prompt = config, policy.model, device, prompt
        if config.rollout.weight_noise:  # before the first sync, the sampler has weights without noise
            self.sync_weights(step=0)

    def sleep(self) -> None:
        """Free device memory if rollout.free_cache_engine is set."""
        self.sampler.sleep()

    def wake_up(self) -> AbstractContextManager[None]:
        """Wake the engine if it sleeps, with the weights that it had before.

        They still equal the trainer's, because every change is followed by a sync, which wakes the engine.
        """
        if self.sampler.is_sleeping:
            self.sync_weights(self.synced_step)
        return nullcontext()

    def sync_weights(self, step: int) -> None:
        """Copy all weights and compare the log-probs of the fixed prompt (see `Engine.sync_weights`)."""
        self.synced_step = step
        weights, noise = iter_hub_weights(self.model), self.config.rollout.weight_noise
        if noise:
            weights = iter_noisy_weights(self.model, noise, make_rng(self.config.seed, "engine_noise", step))
        # Outside of this context, ranks have only shards of the weights in stage 3.
        with self.gather_weights():
            self.sampler.update_weights(weights)
            trainer_logprobs = compute_row_logprobs(self.model, torch.tensor([self.prompt], device=self.device)).cpu()
        engine_logprobs = torch.from_numpy(self.sampler.compute_logprobs([self.prompt])[0])
        self.prompt_mismatch = measure_mismatch(trainer_logprobs, engine_logprobs, step).mean_abs
        check_mismatch(self.prompt_mismatch, self.config.rollout.logprob_tolerance, step)

    def recompute_logprobs(self, episodes: Sequence[Episode], temperature: float) -> list[Episode]:
        """Recompute log-probs with the trainer and keep the engine's, too (see `Engine.recompute_logprobs`)."""
        micro_batch_size = self.config.rollout.log_prob_micro_batch_size_per_gpu
        with self.gather_weights():
            return recompute_logprobs(self.model, episodes, temperature, micro_batch_size, self.device)

    def measure_mismatch(self, episodes: Sequence[Episode], step: int) -> LogprobMismatch | None:
        """Compare over all sampled tokens (see `Engine.measure_mismatch`)."""
        if self.config.rollout.trains_from_engine_logprobs:
            return None
        trainer_logprobs = np.concatenate([episode.logprobs[episode.mask] for episode in episodes])
        engine_logprobs = np.concatenate(
            [episode.engine_logprobs[episode.mask] for episode in episodes if episode.engine_logprobs is not None]
        )
        return measure_mismatch(torch.from_numpy(trainer_logprobs), torch.from_numpy(engine_logprobs), step)

    def close(self) -> None:
        """Shut down the sampler and free its memory."""
        self.sampler.close()


@torch.no_grad()
def compute_row_logprobs(model: LanguageModel, tokens: Tensor) -> Tensor:
    """Compute log-probs (T - 1,) of `tokens` (1, T) after the first, at temperature 1."""
    flat_positions = torch.arange(tokens.shape[1] - 1, device=tokens.device)
    logprobs: Tensor = model.lm_head(
        model.model.compute_hidden_states(tokens, flat_positions),
        partial(logprobs_from_hidden, tokens=tokens[0, 1:], temperature=1.0, chunk_elements=CHUNK_ELEMENTS),
    )
    return logprobs


def iter_noisy_weights(model: LanguageModel, noise: float, rng: np.random.Generator) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of `iter_hub_weights` with every entry multiplied by 1 + noise * e, e standard normal.

    Like an engine's rounding errors, the noise is relative to each entry. A weight with two names, such as a tied head,
    gets the same noise under both.
    """
    seed = int(rng.integers(2**62))  # fits a signed 64-bit integer
    base_weights, numbers = get_base_weights(model), dict[int, int]()
    for name, weight in iter_hub_weights(model):
        # Identified by the model's own tensor: merged weights are freed, and their addresses may be reused.
        number = numbers.setdefault(base_weights[name].data_ptr(), len(numbers))
        draws = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed ^ number))
        yield name, weight * (1 + noise * draws.to(weight.device))


def _make_vllm_sampler(config: RunConfig, policy: Policy, device: torch.device, context_length: int) -> "VllmSampler":
    """Start vLLM. Raise ValueError if vLLM is missing or the names of the model's tensors do not match."""
    from trainable.rollout.vllm_sampler import LM_HEAD_NAME, VllmSampler, read_weight_shapes

    # This check is quick. Without it, vLLM would start, and only the first sync would fail. A tied head may be missing
    # in the files.
    unknown_names = get_base_weights(policy.model).keys() - read_weight_shapes(policy.folder).keys() - {LM_HEAD_NAME}
    if unknown_names:
        raise ValueError(
            f"vLLM cannot sample from this model: {len(unknown_names)} tensors of the trained model, such as "
            f"{min(unknown_names)}, are not in the model's files under these names, and weights are synced by "
            f"name. Sample in torch with --set rollout.name=torch."
        )
    rollout = config.rollout
    # rollout.gpu_memory_utilization is a fraction of the trial's share of a GPU, but vLLM's setting is a fraction of
    # the full GPU. A trial with several GPUs has one engine per GPU. 0 GPUs means a CPU, which is not shared this way.
    gpu_fraction = min(1.0, config.trainer.n_gpus_per_node or 1.0)
    has_fraction = rollout.gpu_memory_utilization is not None
    return VllmSampler(
        policy.folder,
        device,
        dtype=config.model.dtype,
        max_model_len=context_length,
        gpu_memory_utilization=gpu_fraction * (rollout.gpu_memory_utilization or STARTING_UTILIZATION),
        kv_cache_memory_bytes=(
            None if has_fraction else _compute_cache_bytes(config, policy.model.shape, context_length)
        ),
        enforce_eager=rollout.enforce_eager,
        enable_sleep_mode=rollout.free_cache_engine,
        hf_overrides={"head_dtype": config.model.head_dtype},
    )


def _compute_cache_bytes(config: RunConfig, shape: Shape, context_length: int) -> int:
    """Compute the bytes of the KV cache, from rollout.kv_cache_gib or for the conversations of a training step.

    They suffice for at least one conversation of `context_length` tokens, without which vLLM does not start.
    """
    cache_bytes = compute_step_kv_bytes(shape, config)
    if config.rollout.kv_cache_gib is not None:
        cache_bytes = int(config.rollout.kv_cache_gib * 2**30)
    # vLLM keeps one block for itself, which has up to 128 tokens on a CPU.
    return max(cache_bytes, compute_conversation_kv_bytes(shape, config, context_length + 128))


def make_engines(
    config: RunConfig,
    policy: Policy,
    device: torch.device,
    prompt: list[int],
    context_length: int,
    gather_weights: GatherWeights,
) -> tuple[Engine, Engine]:
    """Make the engine that rollout.name selects, and the engine of evaluations, which has no weight noise.

    With vLLM or weight noise, the first one has its own copy of the weights. vLLM evaluates with noise, too, because a
    run has no room for a second engine. context_length: maximum tokens per conversation. For the other arguments see
    `SyncedEngine`. Raises ValueError if vLLM cannot be used.
    """
    if config.rollout.uses_vllm:
        reserved_bytes = torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
        vllm_sampler = _make_vllm_sampler(config, policy, device, context_length)
        if config.rollout.free_cache_engine and device.type == "cuda":
            engine_bytes = torch.cuda.memory_reserved(device) - reserved_bytes
            allow_for_engine(device, config.trainer.n_gpus_per_node, engine_bytes)
        vllm_engine = SyncedEngine(vllm_sampler, config, policy, device, prompt, gather_weights)
        return vllm_engine, vllm_engine
    engine = Engine(_make_local_sampler(config, policy), gather_weights)
    if config.rollout.weight_noise:
        copy = load_policy(config.model.path, device, make_pass_settings(config.model), config.model.chat_format)
        copy_sampler = CopySampler(copy, _make_local_sampler(config, copy))
        return SyncedEngine(copy_sampler, config, policy, device, prompt, gather_weights), engine
    return engine, engine


def _make_local_sampler(config: RunConfig, policy: Policy) -> Sampler:
    """Make the sampler that rollout.name selects, compiled or torch."""
    if config.rollout.uses_compiled_sampler:
        from trainable.rollout.compiled_sampler import CompiledSampler

        return CompiledSampler(policy.model)
    return TorchSampler(policy.model)


@torch.no_grad()
def recompute_logprobs(
    model: LanguageModel, episodes: Sequence[Episode], temperature: float, micro_batch_size: int, device: torch.device
) -> list[Episode]:
    """Recompute log-probs and entropies of `episodes` with `model`; move the engine's log-probs to `engine_logprobs`.

    A pass has at most as many tokens as `micro_batch_size` rows of the longest episode.
    """
    if not episodes:  # a rank without levels
        return []
    batch = collate(episodes).to(device)
    logprobs, entropies = torch.zeros_like(batch.logprobs), torch.zeros_like(batch.logprobs)
    lengths = batch.lengths.cpu()
    passes = split_by_tokens(lengths, micro_batch_size * int(lengths.max()), model.model.needs_padding)
    for index in STEP_PHASE.track(passes, "log-probs, pass"):
        micro_batch = batch.select_rows(index)
        token_stats = model.lm_head(
            model.model.compute_hidden_states(micro_batch.tokens, micro_batch.find_prediction_positions()),
            partial(
                compute_token_statistics,
                tokens=micro_batch.tokens[micro_batch.mask],
                temperature=temperature,
                entropy_gradient=False,
                chunk_elements=CHUNK_ELEMENTS,
            ),
        )
        # Scatter the statistics, flat over sampled tokens, to their places in the rows `index`.
        for output, values in ((logprobs, token_stats.logprobs), (entropies, token_stats.entropies)):
            padded_values = torch.zeros(micro_batch.mask.shape, device=device)
            padded_values[micro_batch.mask] = values.float()
            output[index, : micro_batch.mask.shape[1]] = padded_values
    logprob_rows, entropy_rows = logprobs.cpu().numpy(), entropies.cpu().numpy()
    return [
        episode._replace(
            logprobs=logprob_rows[row, : len(episode.tokens)],
            entropies=entropy_rows[row, : len(episode.tokens)],
            engine_logprobs=episode.logprobs,
        )
        for row, episode in enumerate(episodes)
    ]
