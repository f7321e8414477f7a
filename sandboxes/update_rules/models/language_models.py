"""Ensemble of E language models that start from one pretrained policy: shared modules, separate weights."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call

from trainable.models.load import Policy


class _NextTokenModel(nn.Module):
    """The policy's model as a function from contexts to the logits of the next token."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = policy.model

    def forward(self, contexts: Tensor) -> Tensor:
        """Logits [B, V] of the token after each of contexts [B, L]."""
        # Hidden states are selected by position in the flattened batch: the last one of each row.
        rows, length = contexts.shape
        last_positions = torch.arange(1, rows + 1) * length - 1
        logits: Tensor = self.policy.lm_head(self.policy.model.compute_hidden_states(contexts, last_positions))
        return logits.float()


class LanguageModelEnsemble:
    """E language models. weights: [E, ...] each, named as the model's parameters; the policy keeps the initial ones.

    Members run one after another, which costs little for models of this size.
    """

    def __init__(self, policy: Policy, num_members: int) -> None:
        # The members have their own tensors; the model's weights stay those of the policy, for the KL to it.
        self.initial_model = _NextTokenModel(policy).requires_grad_(False)
        self.weights = {
            name: weight.expand(num_members, *weight.shape).clone().requires_grad_()
            for name, weight in self.initial_model.named_parameters()
        }

    def get_parameters(self) -> Mapping[str, Tensor]:
        """All weights, [E, ...] each."""
        return self.weights

    def compute_logits(self, contexts: Tensor) -> Tensor:
        """Logits [E, B, V] of the token after each of contexts [E, B, L]; with gradients."""
        member_weights = {name: weight.unbind() for name, weight in self.weights.items()}
        return torch.stack(
            [
                functional_call(
                    self.initial_model, {name: weights[member] for name, weights in member_weights.items()}, (rows,)
                )
                for member, rows in enumerate(contexts)
            ]
        )

    @torch.no_grad()
    def compute_initial_log_probs(self, contexts: Tensor) -> Tensor:
        """Log-probabilities [..., B, V] of the token after contexts [..., B, L], under the initial weights."""
        flat_log_probs: Tensor = self.initial_model(contexts.flatten(0, -2)).log_softmax(-1)
        return flat_log_probs.unflatten(0, contexts.shape[:-1])
