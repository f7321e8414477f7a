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

from trainable.algo.batching import cut_by_tokens
from trainable.algo.vocabulary import logprobs_from_hidden, token_numbers
from trainable.config.constants import CHUNK_ELEMENTS
from trainable.config.run_config import RunConfig
from trainable.models.interface import LanguageModel
from trainable.models.load import Policy
from trainable.models.lora import hub_weights, weight_names
from trainable.rollout.agreement import Agreement, check_agreement, compare
from trainable.rollout.batch import Batch, collate
from trainable.rollout.episode import Episode
from trainable.rollout.sampler import Sampler
from trainable.rollout.torch_sampler import TorchSampler

Whole = Callable[[], AbstractContextManager[None]]
"""Within what it gives, the trainer's weights can be read (see `Backend.whole`)."""


class Engine(Protocol):
    """What a trainer asks of the engine that samples for it."""

    sampler: Sampler

    def rest(self) -> None:
        """Make room for an update."""
        ...

    def sampling(self) -> AbstractContextManager[None]:
        """What sampling is done within: at its start the engine is made ready."""
        ...

    def follow(self, step: int) -> None:
        """Take over the trainer's weights, which have changed at `step`."""
        ...

    def reread(self, episodes: Sequence[Episode]) -> list[Episode]:
        """Training episodes with the log-probs and entropies that the trainer gives their tokens."""
        ...

    def compare(self, episodes: Sequence[Episode], step: int) -> Agreement | None:
        """How far engine and trainer are apart; None where they share weights. EngineMismatchError beyond tolerance."""
        ...

    def close(self) -> None:
        """End what the engine holds."""
        ...


class SharedWeights:
    """Torch on the trainer's own weights: there is nothing to push, to read again, or to compare."""

    def __init__(self, model: LanguageModel, whole: Whole) -> None:
        self.sampler: Sampler = TorchSampler(model)
        self.whole = whole

    def rest(self) -> None:
        """Nothing is held."""

    def sampling(self) -> AbstractContextManager[None]:
        """The trainer's weights are read."""
        return self.whole()

    def follow(self, step: int) -> None:
        """The weights are the trainer's."""

    def reread(self, episodes: Sequence[Episode]) -> list[Episode]:
        """The episodes: a pass of the trainer would give the same numbers."""
        return list(episodes)

    def compare(self, episodes: Sequence[Episode], step: int) -> None:
        """Nothing to compare."""

    def close(self) -> None:
        """Nothing is held."""


class Vllm:
    """vLLM beside the trainer, in the same process and on the same device.

    prompt: token ids of a fixed prompt. context: tokens of a conversation at most. whole: the trainer's weights.
    """

    def __init__(
        self, config: RunConfig, policy: Policy, device: torch.device, prompt: list[int], context: int, whole: Whole
    ) -> None:
        from trainable.rollout.vllm_sampler import HEAD, EngineSettings, VllmSampler, hub_shapes

        self.config, self.model, self.device, self.prompt = config, policy.model, device, prompt
        self.whole = whole
        unknown = weight_names(policy.model) - hub_shapes(policy.folder).keys() - {HEAD}
        if unknown:
            raise ValueError(
                f"vLLM does not know {len(unknown)} tensors of this model by the names that training has, such "
                f"as {min(unknown)}: sample with --set rollout.name=torch."
            )
        share = min(1.0, config.trainer.n_gpus_per_node or 1.0)
        self.vllm = VllmSampler(policy.folder, EngineSettings(
            device, config.model.dtype, context, share * config.rollout.gpu_memory_utilization,
            enforce_eager=config.rollout.enforce_eager, sleeps=config.rollout.free_cache_engine,
        ))  # fmt: skip
        self.sampler: Sampler = self.vllm

    def rest(self) -> None:
        """Leave the device, where rollout.free_cache_engine asks for it."""
        self.vllm.sleep()

    def sampling(self) -> AbstractContextManager[None]:
        """It comes back with the weights as they were."""
        if self.vllm.sleeping:
            self.vllm.wake()
        return nullcontext()

    def follow(self, step: int) -> None:
        """Push all weights and compare the fixed prompt's log-probs (see `Engine.follow`)."""
        with self.whole():
            self.vllm.push(hub_weights(self.model))
            ours = _logprobs(self.model, torch.tensor([self.prompt], device=self.device)).cpu()
        theirs = torch.from_numpy(self.vllm.logprobs([self.prompt])[0])
        check_agreement(compare(ours, theirs).mean, self.config.rollout.logprob_tolerance, step)

    def reread(self, episodes: Sequence[Episode]) -> list[Episode]:
        """One pass of the trainer over all sampled tokens (see `Engine.reread`); the engine's stay beside them."""
        rows = self.config.rollout.log_prob_micro_batch_size_per_gpu
        with self.whole():
            return reread(self.model, episodes, self.config.rollout.temperature, rows, self.device)

    def compare(self, episodes: Sequence[Episode], step: int) -> Agreement:
        """Over all sampled tokens (see `Engine.compare`)."""
        ours = np.concatenate([episode.logprobs[episode.mask] for episode in episodes])
        theirs = np.concatenate([
            episode.engine_logprobs[episode.mask] for episode in episodes if episode.engine_logprobs is not None
        ])  # fmt: skip
        agreement = compare(torch.from_numpy(ours), torch.from_numpy(theirs))
        check_agreement(agreement.mean, self.config.rollout.logprob_tolerance, step)
        return agreement

    def close(self) -> None:
        """End the engine and free its memory."""
        self.vllm.close()


def make_engine(
    config: RunConfig, policy: Policy, device: torch.device, prompt: list[int], context: int, whole: Whole
) -> Engine:
    """The engine that rollout.name asks for (arguments: see `Vllm`)."""
    if config.rollout.name == "vllm":
        return Vllm(config, policy, device, prompt, context, whole)
    return SharedWeights(policy.model, whole)


@torch.no_grad()
def reread(
    model: LanguageModel, episodes: Sequence[Episode], temperature: float, rows_a_pass: int, device: torch.device
) -> list[Episode]:
    """`episodes` with the model's own log-probs and entropies; what the engine gave stays as `engine_logprobs`.

    A pass has as many tokens at most as `rows_a_pass` rows of the longest episode.
    """
    if not episodes:
        return []
    batch = Batch(*(part.to(device) for part in collate(episodes)))
    logprobs, entropies = torch.zeros_like(batch.logprobs), torch.zeros_like(batch.logprobs)
    lengths = batch.lengths.cpu()
    for index in cut_by_tokens(lengths, rows_a_pass * int(lengths.max()), model.model.pads):
        part = batch.rows(index)
        numbers = model.lm_head(model.model.hidden_at(part.tokens, part.where()), partial(
            token_numbers, tokens=part.tokens[part.mask], temperature=temperature, entropy_gradient=False,
            elements=CHUNK_ELEMENTS,
        ))  # fmt: skip
        for store, found in ((logprobs, numbers.logprobs), (entropies, numbers.entropies)):
            flat = torch.zeros(part.mask.shape, device=device)
            flat[part.mask] = found.float()
            store[index, : part.mask.shape[1]] = flat
    stores = logprobs.cpu().numpy(), entropies.cpu().numpy()
    return [
        episode._replace(
            logprobs=stores[0][row, : len(episode.tokens)], entropies=stores[1][row, : len(episode.tokens)],
            engine_logprobs=episode.logprobs,
        )
        for row, episode in enumerate(episodes)
    ]  # fmt: skip


@torch.no_grad()
def _logprobs(model: LanguageModel, tokens: torch.Tensor) -> torch.Tensor:
    """Log-probs (T - 1,) at temperature 1 of the tokens (1, T) after the first."""
    where = torch.arange(tokens.shape[1] - 1, device=tokens.device)
    found: torch.Tensor = model.lm_head(model.model.hidden_at(tokens, where), partial(
        logprobs_from_hidden, tokens=tokens[0, 1:], temperature=1.0, elements=CHUNK_ELEMENTS
    ))  # fmt: skip
    return found
