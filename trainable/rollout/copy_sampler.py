"""Sampling in torch or compiled code from a copy of the policy, whose weights are synced as those of vLLM."""

from collections.abc import Iterable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainable.algo.vocabulary import logprobs_from_hidden
from trainable.config.constants import CHUNK_ELEMENTS
from trainable.models.interface import LanguageModel
from trainable.models.load import Policy
from trainable.rollout.sampler import Conversation, RowStreams, Sampler, SamplingParams


class CopySampler:
    """Samples from `copy`, which has the policy's weights only after `update_weights`.

    With it, an engine that computes other log-probs than the trainer can be studied on any machine.

    Args:
        copy: the policy's model, loaded again.
        sampler: a sampler of `copy.model`.
    """

    def __init__(self, copy: Policy, sampler: Sampler) -> None:
        self.model, self.sampler = copy.model, sampler
        self.is_sleeping = False

    def start_conversation(
        self, prompts: Sequence[Sequence[int]], group_size: int, params: SamplingParams, rng: RowStreams
    ) -> Conversation:
        """Start a conversation with the copy (see `Sampler.start_conversation`)."""
        return self.sampler.start_conversation(prompts, group_size, params, rng)

    @torch.no_grad()
    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy the policy's weights.

        weights: every tensor under its name on the hub. Raises KeyError for an unknown name.
        """
        own_weights = {self.model.to_hub_name(name): weight for name, weight in self.model.state_dict().items()}
        for name, weight in weights:
            own_weights[name].copy_(weight)

    def compute_logprobs(self, token_ids: Sequence[Sequence[int]]) -> list[npt.NDArray[np.float32]]:
        """Log-probs (T - 1,) of each row's tokens without the first, at temperature 1."""
        device = self.model.model.embed_tokens.weight.device
        return [compute_row_logprobs(self.model, torch.tensor([ids], device=device)).cpu().numpy() for ids in token_ids]

    def sleep(self) -> None:
        """Do nothing: the copy stays where it is."""

    def close(self) -> None:
        """Do nothing: there is no engine to end."""


@torch.no_grad()
def compute_row_logprobs(model: LanguageModel, tokens: Tensor) -> Tensor:
    """Log-probs (T - 1,) of `tokens` (1, T) at temperature 1; the first token has none, since nothing precedes it."""
    flat_positions = torch.arange(tokens.shape[1] - 1, device=tokens.device)
    logprobs: Tensor = model.lm_head(
        model.model.compute_hidden_states(tokens, flat_positions),
        partial(logprobs_from_hidden, tokens=tokens[0, 1:], temperature=1.0, chunk_elements=CHUNK_ELEMENTS),
    )
    return logprobs
