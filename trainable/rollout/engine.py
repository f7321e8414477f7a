"""Sampling engines of a trainer: torch or compiled code, on the trainer's weights, or vLLM, which has its own copy.

vLLM has the weights of the trainer only after a weight sync, so two checks guard it. After each sync, vLLM and the
trainer compute log-probs of a fixed prompt: a run whose engine has other weights ends here. After each rollout, the
trainer recomputes the log-probs of all sampled tokens; training uses these, and their mismatch with vLLM's is measured.
It ends no run: rounding alone makes it grow when a policy loses its way, and those are the runs that a study is about.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Protocol

import numpy as np
import torch

from trainable.algo.batching import split_by_tokens
from trainable.algo.vocabulary import compute_token_statistics, logprobs_from_hidden
from trainable.config.constants import CHUNK_ELEMENTS
from trainable.config.run_config import RunConfig
from trainable.models.interface import LanguageModel
from trainable.models.load import Policy
from trainable.models.lora import iter_hub_weights, list_weight_names
from trainable.rollout.batch import Batch, collate
from trainable.rollout.episode import Episode
from trainable.rollout.logprob_mismatch import LogprobMismatch, check_logprobs, check_mismatch, measure_mismatch
from trainable.rollout.sampler import Sampler
from trainable.rollout.torch_sampler import TorchSampler

GatherWeights = Callable[[], AbstractContextManager[None]]
"""Returns a context in which the trainer's weights can be read (see `Backend.gather_weights`)."""


class Engine(Protocol):
    """The interface between a trainer and the engine that samples for it."""

    sampler: Sampler

    def sleep(self) -> None:
        """Free memory for an update, if the engine can."""
        ...

    def wake_up(self) -> AbstractContextManager[None]:
        """Make the engine ready to sample, which is possible within the returned context. All ranks enter it."""
        ...

    def sync_weights(self, step: int) -> None:
        """Copy the trainer's weights, which have changed at `step`.

        Raises EngineMismatchError if log-probs then differ by more than rollout.logprob_tolerance.
        """
        ...

    def recompute_logprobs(self, episodes: Sequence[Episode], temperature: float) -> list[Episode]:
        """`episodes`, sampled at `temperature`, with log-probs and entropies of the trainer's model."""
        ...

    def measure_mismatch(self, episodes: Sequence[Episode], step: int) -> LogprobMismatch | None:
        """Mismatch between engine and trainer over all sampled tokens; None if they share weights.

        Raises NonFiniteError if a log-prob is not finite.
        """
        ...

    def close(self) -> None:
        """End the engine and free its memory."""
        ...


class SharedWeightsEngine:
    """Samples with the trainer's own weights, so there is nothing to sync, recompute or compare."""

    def __init__(self, sampler: Sampler, gather_weights: GatherWeights) -> None:
        self.sampler = sampler
        self.gather_weights = gather_weights

    def sleep(self) -> None:
        """Do nothing: the engine has no memory of its own."""

    def wake_up(self) -> AbstractContextManager[None]:
        """Gather the trainer's weights for the duration of the context."""
        return self.gather_weights()

    def sync_weights(self, step: int) -> None:
        """Do nothing: the weights are the trainer's."""

    def recompute_logprobs(self, episodes: Sequence[Episode], temperature: float) -> list[Episode]:
        """Return the episodes: a pass of the trainer would give the same numbers."""
        return list(episodes)

    def measure_mismatch(self, episodes: Sequence[Episode], step: int) -> None:
        """Return None: there is nothing to compare."""

    def close(self) -> None:
        """Do nothing: there is no engine to end."""


class VllmEngine:
    """Samples with vLLM, in the process of the trainer and on the same device.

    prompt: token ids of the fixed prompt, whose log-probs are compared after each weight sync. context_length: maximum
    number of tokens in a conversation. gather_weights: makes the trainer's weights readable.

    Raises ValueError if vLLM cannot be used: if it is missing, or if the names of the model's tensors do not match.
    """

    def __init__(
        self,
        config: RunConfig,
        policy: Policy,
        device: torch.device,
        prompt: list[int],
        context_length: int,
        gather_weights: GatherWeights,
    ) -> None:
        from trainable.rollout.vllm_sampler import LM_HEAD_NAME, EngineSettings, VllmSampler, read_weight_shapes

        self.config, self.model, self.device, self.prompt = config, policy.model, device, prompt
        self.gather_weights = gather_weights
        # This check takes a moment. Without it, vLLM would start, and only the first weight sync would fail. The head
        # may be missing in the files: a model with tied embeddings stores their weight once.
        unknown_names = list_weight_names(policy.model) - read_weight_shapes(policy.folder).keys() - {LM_HEAD_NAME}
        if unknown_names:
            raise ValueError(
                f"vLLM cannot sample from this model: {len(unknown_names)} tensors of the trained model, such as "
                f"{min(unknown_names)}, are not in the model's files under these names, and weights are synced by "
                f"name. Sample in torch with --set rollout.name=torch."
            )
        # rollout.gpu_memory_utilization is a fraction of the trial's share of a GPU, and vLLM's setting is a fraction
        # of the full GPU. A trial with several GPUs has one engine per GPU; 0 GPUs is a CPU, which has no such share.
        gpu_fraction = min(1.0, config.trainer.n_gpus_per_node or 1.0)
        self.vllm_sampler = VllmSampler(
            policy.folder,
            EngineSettings(
                device,
                config.model.dtype,
                context_length,
                gpu_fraction * config.rollout.gpu_memory_utilization,
                enforce_eager=config.rollout.enforce_eager,
                enable_sleep_mode=config.rollout.free_cache_engine,
            ),
        )
        self.sampler: Sampler = self.vllm_sampler

    def sleep(self) -> None:
        """Free the device memory, if rollout.free_cache_engine is set."""
        self.vllm_sampler.sleep()

    def wake_up(self) -> AbstractContextManager[None]:
        """Bring the engine back with the weights that it had when it went to sleep."""
        # Not if it is awake: `wake_up` resets the prefix cache, which is still valid for these weights.
        if self.vllm_sampler.is_sleeping:
            self.vllm_sampler.wake_up()
        return nullcontext()

    def sync_weights(self, step: int) -> None:
        """Copy all weights, and compare the log-probs of the fixed prompt (see `Engine.sync_weights`)."""
        # Outside of the context, stage 3 has only a shard of the weights on each rank.
        with self.gather_weights():
            self.vllm_sampler.update_weights(iter_hub_weights(self.model))
            trainer_logprobs = _compute_logprobs(self.model, torch.tensor([self.prompt], device=self.device)).cpu()
        engine_logprobs = torch.from_numpy(self.vllm_sampler.compute_logprobs([self.prompt])[0])
        mismatch = _compare(trainer_logprobs, engine_logprobs, step)
        check_mismatch(mismatch.mean_abs, self.config.rollout.logprob_tolerance, step)

    def recompute_logprobs(self, episodes: Sequence[Episode], temperature: float) -> list[Episode]:
        """Recompute log-probs with the trainer, and keep the engine's beside them (see `Engine.recompute_logprobs`)."""
        micro_batch_size = self.config.rollout.log_prob_micro_batch_size_per_gpu
        with self.gather_weights():
            return recompute_logprobs(self.model, episodes, temperature, micro_batch_size, self.device)

    def measure_mismatch(self, episodes: Sequence[Episode], step: int) -> LogprobMismatch:
        """Compare over all sampled tokens (see `Engine.measure_mismatch`)."""
        trainer_logprobs = np.concatenate([episode.logprobs[episode.mask] for episode in episodes])
        engine_logprobs = np.concatenate(
            [episode.engine_logprobs[episode.mask] for episode in episodes if episode.engine_logprobs is not None]
        )
        return _compare(torch.from_numpy(trainer_logprobs), torch.from_numpy(engine_logprobs), step)

    def close(self) -> None:
        """End the engine and free its memory."""
        self.vllm_sampler.close()


def _compare(trainer_logprobs: torch.Tensor, engine_logprobs: torch.Tensor, step: int) -> LogprobMismatch:
    """The mismatch of log-probs (N,) of the same tokens. NonFiniteError if one is not finite."""
    check_logprobs(trainer_logprobs, engine_logprobs, step)
    return measure_mismatch(trainer_logprobs, engine_logprobs)


def make_engine(
    config: RunConfig,
    policy: Policy,
    device: torch.device,
    prompt: list[int],
    context_length: int,
    gather_weights: GatherWeights,
) -> Engine:
    """Make the engine that rollout.name selects; for the arguments see `VllmEngine`."""
    if config.rollout.name == "vllm":
        return VllmEngine(config, policy, device, prompt, context_length, gather_weights)
    if config.rollout.name == "compiled":
        from trainable.rollout.compiled_sampler import CompiledSampler

        return SharedWeightsEngine(CompiledSampler(policy.model), gather_weights)
    return SharedWeightsEngine(TorchSampler(policy.model), gather_weights)


@torch.no_grad()
def recompute_logprobs(
    model: LanguageModel, episodes: Sequence[Episode], temperature: float, micro_batch_size: int, device: torch.device
) -> list[Episode]:
    """`episodes` with log-probs and entropies of `model`; those of the engine move to `engine_logprobs`.

    A pass has at most as many tokens as `micro_batch_size` rows of the longest episode.
    """
    if not episodes:  # a rank without levels
        return []
    batch = Batch(*(tensor.to(device) for tensor in collate(episodes)))
    logprobs, entropies = torch.zeros_like(batch.logprobs), torch.zeros_like(batch.logprobs)
    lengths = batch.lengths.cpu()
    for index in split_by_tokens(lengths, micro_batch_size * int(lengths.max()), model.model.needs_padding):
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
        # The statistics are a flat list over sampled tokens: put them at their places, which `index` selects rows of.
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


@torch.no_grad()
def _compute_logprobs(model: LanguageModel, tokens: torch.Tensor) -> torch.Tensor:
    """Log-probs (T - 1,) of `tokens` (1, T) at temperature 1; the first token has none, since nothing precedes it."""
    flat_positions = torch.arange(tokens.shape[1] - 1, device=tokens.device)
    logprobs: torch.Tensor = model.lm_head(
        model.model.compute_hidden_states(tokens, flat_positions),
        partial(logprobs_from_hidden, tokens=tokens[0, 1:], temperature=1.0, chunk_elements=CHUNK_ELEMENTS),
    )
    return logprobs
