"""The engine that samples for a run: torch, which shares the trainer's weights, or vLLM, which has its own.

vLLM's weights are the trainer's only after a push. After every push a fixed prompt is read by both, and after every
rollout all sampled tokens are read again by the trainer: its log-probs are those that training starts from.
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
from trainable.rollout.agreement import LogprobMismatch, check_mismatch, measure_mismatch
from trainable.rollout.batch import Batch, collate
from trainable.rollout.episode import Episode
from trainable.rollout.sampler import Sampler
from trainable.rollout.torch_sampler import TorchSampler

GatherWeights = Callable[[], AbstractContextManager[None]]
"""Within what it gives, the trainer's weights can be read (see `Backend.whole`)."""


class Engine(Protocol):
    """What a trainer asks of the engine that samples for it."""

    sampler: Sampler

    def sleep(self) -> None:
        """Make room for an update."""
        ...

    def wake_up(self) -> AbstractContextManager[None]:
        """What sampling is done within: at its start the engine is made ready."""
        ...

    def sync_weights(self, step: int) -> None:
        """Take over the trainer's weights, which have changed at `step`."""
        ...

    def recompute_logprobs(self, episodes: Sequence[Episode]) -> list[Episode]:
        """Training episodes with the log-probs and entropies that the trainer gives their tokens."""
        ...

    def measure_mismatch(self, episodes: Sequence[Episode], step: int) -> LogprobMismatch | None:
        """How far engine and trainer are apart; None where they share weights. EngineMismatchError beyond tolerance."""
        ...

    def close(self) -> None:
        """End what the engine holds."""
        ...


class TorchEngine:
    """Torch on the trainer's own weights: there is nothing to push, to read again, or to compare."""

    def __init__(self, model: LanguageModel, gather_weights: GatherWeights) -> None:
        self.sampler: Sampler = TorchSampler(model)
        self.gather_weights = gather_weights

    def sleep(self) -> None:
        """Nothing is held."""

    def wake_up(self) -> AbstractContextManager[None]:
        """The trainer's weights are read."""
        return self.gather_weights()

    def sync_weights(self, step: int) -> None:
        """The weights are the trainer's."""

    def recompute_logprobs(self, episodes: Sequence[Episode]) -> list[Episode]:
        """The episodes: a pass of the trainer would give the same numbers."""
        return list(episodes)

    def measure_mismatch(self, episodes: Sequence[Episode], step: int) -> None:
        """Nothing to compare."""

    def close(self) -> None:
        """Nothing is held."""


class VllmEngine:
    """vLLM beside the trainer, in the same process and on the same device.

    prompt: token ids of a fixed prompt. context: tokens of a conversation at most. whole: the trainer's weights.
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
        unknown_names = list_weight_names(policy.model) - read_weight_shapes(policy.folder).keys() - {LM_HEAD_NAME}
        if unknown_names:
            raise ValueError(
                f"vLLM does not know {len(unknown_names)} tensors of this model by the names that training has, such "
                f"as {min(unknown_names)}: sample with --set rollout.name=torch."
            )
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
        """Leave the device, where rollout.free_cache_engine asks for it."""
        self.vllm_sampler.sleep()

    def wake_up(self) -> AbstractContextManager[None]:
        """It comes back with the weights as they were."""
        if self.vllm_sampler.is_sleeping:
            self.vllm_sampler.wake_up()
        return nullcontext()

    def sync_weights(self, step: int) -> None:
        """Push all weights and compare the fixed prompt's log-probs (see `Engine.follow`)."""
        with self.gather_weights():
            self.vllm_sampler.update_weights(iter_hub_weights(self.model))
            trainer_logprobs = _compute_logprobs(self.model, torch.tensor([self.prompt], device=self.device)).cpu()
        engine_logprobs = torch.from_numpy(self.vllm_sampler.compute_logprobs([self.prompt])[0])
        check_mismatch(
            measure_mismatch(trainer_logprobs, engine_logprobs).mean_abs, self.config.rollout.logprob_tolerance, step
        )

    def recompute_logprobs(self, episodes: Sequence[Episode]) -> list[Episode]:
        """One pass of the trainer over all sampled tokens (see `Engine.reread`); the engine's stay beside them."""
        micro_batch_size = self.config.rollout.log_prob_micro_batch_size_per_gpu
        with self.gather_weights():
            return recompute_logprobs(
                self.model, episodes, self.config.rollout.temperature, micro_batch_size, self.device
            )

    def measure_mismatch(self, episodes: Sequence[Episode], step: int) -> LogprobMismatch:
        """Over all sampled tokens (see `Engine.compare`)."""
        trainer_logprobs = np.concatenate([episode.logprobs[episode.mask] for episode in episodes])
        engine_logprobs = np.concatenate(
            [episode.engine_logprobs[episode.mask] for episode in episodes if episode.engine_logprobs is not None]
        )
        mismatch = measure_mismatch(torch.from_numpy(trainer_logprobs), torch.from_numpy(engine_logprobs))
        check_mismatch(mismatch.mean_abs, self.config.rollout.logprob_tolerance, step)
        return mismatch

    def close(self) -> None:
        """End the engine and free its memory."""
        self.vllm_sampler.close()


def make_engine(
    config: RunConfig,
    policy: Policy,
    device: torch.device,
    prompt: list[int],
    context_length: int,
    gather_weights: GatherWeights,
) -> Engine:
    """The engine that rollout.name asks for (arguments: see `Vllm`)."""
    if config.rollout.name == "vllm":
        return VllmEngine(config, policy, device, prompt, context_length, gather_weights)
    return TorchEngine(policy.model, gather_weights)


@torch.no_grad()
def recompute_logprobs(
    model: LanguageModel, episodes: Sequence[Episode], temperature: float, micro_batch_size: int, device: torch.device
) -> list[Episode]:
    """`episodes` with the model's own log-probs and entropies; what the engine gave stays as `engine_logprobs`.

    A pass has as many tokens at most as `rows_a_pass` rows of the longest episode.
    """
    if not episodes:
        return []
    batch = Batch(*(part.to(device) for part in collate(episodes)))
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
        for output, values in ((logprobs, token_stats.logprobs), (entropies, token_stats.entropies)):
            padded_values = torch.zeros(micro_batch.mask.shape, device=device)
            padded_values[micro_batch.mask] = values.float()
            output[index, : micro_batch.mask.shape[1]] = padded_values
    arrays = logprobs.cpu().numpy(), entropies.cpu().numpy()
    return [
        episode._replace(
            logprobs=arrays[0][row, : len(episode.tokens)],
            entropies=arrays[1][row, : len(episode.tokens)],
            engine_logprobs=episode.logprobs,
        )
        for row, episode in enumerate(episodes)
    ]


@torch.no_grad()
def _compute_logprobs(model: LanguageModel, tokens: torch.Tensor) -> torch.Tensor:
    """Log-probs (T - 1,) at temperature 1 of the tokens (1, T) after the first."""
    flat_positions = torch.arange(tokens.shape[1] - 1, device=tokens.device)
    logprobs: torch.Tensor = model.lm_head(
        model.model.compute_hidden_states(tokens, flat_positions),
        partial(logprobs_from_hidden, tokens=tokens[0, 1:], temperature=1.0, chunk_elements=CHUNK_ELEMENTS),
    )
    return logprobs
