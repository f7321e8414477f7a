"""E language models that start from one policy on disk: the same modules, run with each member's own weights."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call

from trainable.models.load import Policy


class _NextToken(nn.Module):
    """The policy's model as a function of whole contexts."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = policy.model

    def forward(self, contexts: Tensor) -> Tensor:
        """Logits [B, V] of the token after each of contexts [B, L]."""
        rows, length = contexts.shape
        where = torch.arange(1, rows + 1) * length - 1
        logits: Tensor = self.policy.lm_head(self.policy.model.hidden_at(contexts, where))
        return logits.float()


class LanguageModels:
    """weights: [E, ...] each, named as the model's parameters. The policy itself keeps the first ones.

    Members are run one after another, which costs little at the size of a language model.
    """

    def __init__(self, policy: Policy, members: int) -> None:
        self.first = _NextToken(policy).requires_grad_(False)
        self.weights = {
            name: weight.expand(members, *weight.shape).clone().requires_grad_()
            for name, weight in self.first.named_parameters()
        }

    def parameters_by_name(self) -> Mapping[str, Tensor]:
        """All weights, [E, ...] each."""
        return self.weights

    def logits(self, contexts: Tensor) -> Tensor:
        """Logits [E, B, V] of the token after each of contexts [E, B, L]; with gradients."""
        own = {name: weight.unbind() for name, weight in self.weights.items()}
        return torch.stack(
            [
                functional_call(self.first, {name: parts[member] for name, parts in own.items()}, (rows,))
                for member, rows in enumerate(contexts)
            ]
        )

    @torch.no_grad()
    def first_log_probs(self, contexts: Tensor) -> Tensor:
        """Log-probabilities [..., B, V] of the token after contexts [..., B, L], of the weights that all began with."""
        flat: Tensor = self.first(contexts.flatten(0, -2)).log_softmax(-1)
        return flat.unflatten(0, contexts.shape[:-1])
