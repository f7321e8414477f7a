"""The teachers: distributions over tokens that depend on the correct token alone, not on what the student wrote."""

import torch
from torch import Tensor

from sandboxes.distillation.settings import DistillationConfig

TIE_BREAK = 0.001
"""Relative weight per index of a content token, which gives tokens at equal distance an order. Source: published."""


def make_teacher_table(config: DistillationConfig) -> Tensor:
    """[A, A] log-probabilities: row y is the teacher where y is correct.

    reversal, format_answer: 1 − ε for y, and ε / (A − 1) for every other token.

    soft_reversal: proportional to exp(−d(j, y) / τ) (1 + 0.001 j) for a content token j, where d is the distance on the
    circle of the V content tokens, and to `special_token_weight` for the separator. The separator is never correct, and
    its row is that of the first content token.
    """
    actions = torch.arange(config.num_actions)
    if config.task != "soft_reversal":
        others = config.teacher_epsilon / max(config.num_actions - 1, 1)
        return torch.where(actions == actions[:, None], 1 - config.teacher_epsilon, others).double().log().float()
    vocab_size = config.vocab_size
    distance = (actions - actions[:, None] % vocab_size).abs() % vocab_size
    cyclic_distance = torch.minimum(distance, vocab_size - distance).double()
    # The tie-break multiplies, so in logarithms it is added.
    content = -cyclic_distance / config.teacher_temperature + (1 + TIE_BREAK * actions.double()).log()
    special = torch.tensor(config.special_token_weight, dtype=torch.float64).log()
    return torch.where(actions < vocab_size, content, special).log_softmax(-1).float()
